# find_package(keepdim): the target keepdim::delegate is libkeepdim.so, which gives ExecuTorch its backends when it is loaded,
# and has keepdim::load and keepdim::check_file (keepdim/keepdim.h).
# Is installed next to executorch's package: CMAKE_PREFIX_PATH is the folder that holds both (site-packages).
if(NOT TARGET executorch::runtime)
  include(CMakeFindDependencyMacro)
  find_dependency(executorch 1.5)
endif()

get_filename_component(_keepdim_folder "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
if(NOT TARGET keepdim::delegate)
  add_library(keepdim::delegate SHARED IMPORTED)
  # A program with ExecuTorch's own Module uses no symbol of it: without --no-as-needed the linker would drop it.
  set_target_properties(
    keepdim::delegate
    PROPERTIES IMPORTED_LOCATION "${_keepdim_folder}/libkeepdim.so"
               INTERFACE_INCLUDE_DIRECTORIES "${_keepdim_folder}/include"
               INTERFACE_LINK_LIBRARIES executorch::runtime
               INTERFACE_LINK_OPTIONS
               "LINKER:-rpath,${_keepdim_folder};LINKER:--push-state,--no-as-needed,${_keepdim_folder}/libkeepdim.so,--pop-state")
endif()
unset(_keepdim_folder)
