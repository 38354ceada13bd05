# ggml, static, CPU only. Sets keepdim_ggml_version.
set(keepdim_sdist ggml_python-0.0.45)
set(keepdim_sdist_sha256 10aac52075cf3c7ef2b00d6c35b1c23f7b018dbeff8ae8df67339b4be1166f05)

if(KEEPDIM_GGML_SOURCE)
  set(keepdim_ggml_folder "${KEEPDIM_GGML_SOURCE}")
else()
  set(keepdim_ggml_folder "${KEEPDIM_DOWNLOADS}/${keepdim_sdist}/vendor/ggml")
  if(NOT EXISTS "${keepdim_ggml_folder}/CMakeLists.txt")
    set(archive "${KEEPDIM_DOWNLOADS}/${keepdim_sdist}.tar.gz")
    if(NOT EXISTS "${archive}")
      message(STATUS "Downloading the source of ggml (${keepdim_sdist}, 3.4 MB)")
      # Only this package from source: `:all:` would make pip build cmake from source as well.
      execute_process(COMMAND "${Python_EXECUTABLE}" -m pip download --quiet --disable-pip-version-check --no-deps
                              --no-binary ggml-python ggml-python==0.0.45 --dest "${KEEPDIM_DOWNLOADS}"
                      COMMAND_ERROR_IS_FATAL ANY)
    endif()
    file(SHA256 "${archive}" found)
    if(NOT found STREQUAL keepdim_sdist_sha256)
      file(REMOVE "${archive}")
      message(FATAL_ERROR "${archive}: sha256 ${found}, expected ${keepdim_sdist_sha256}. It was removed; try again.")
    endif()
    file(ARCHIVE_EXTRACT INPUT "${archive}" DESTINATION "${KEEPDIM_DOWNLOADS}" PATTERNS "${keepdim_sdist}/vendor/ggml/*")
  endif()
endif()

function(keepdim_set)  # Settings of ggml's own build, as it reads them.
  while(ARGN)
    list(POP_FRONT ARGN name value)
    set(${name} ${value} CACHE BOOL "" FORCE)
  endwhile()
endfunction()
keepdim_set(BUILD_SHARED_LIBS OFF GGML_STATIC OFF GGML_CCACHE OFF GGML_BUILD_TESTS OFF GGML_BUILD_EXAMPLES OFF
            GGML_LLAMAFILE ON GGML_BLAS OFF GGML_METAL OFF GGML_ACCELERATE OFF)
if(KEEPDIM_PORTABLE)
  add_compile_options("-ffile-prefix-map=${keepdim_ggml_folder}=ggml") # a wheel names no folder of who built it
  keepdim_set(GGML_NATIVE OFF GGML_SSE42 ON GGML_AVX ON GGML_AVX2 ON GGML_FMA ON GGML_F16C ON GGML_BMI2 ON)
else()
  keepdim_set(GGML_NATIVE ON)
endif()
if(KEEPDIM_SANITIZE)
  keepdim_set(GGML_OPENMP OFF)  # libgomp's barriers are invisible to ThreadSanitizer
else()
  keepdim_set(GGML_OPENMP ON)
endif()

# ggml asks git for a commit and compiles it in; it would find ours, and every commit of ours would rebuild it.
set(GIT_EXE "" CACHE FILEPATH "" FORCE)
add_subdirectory("${keepdim_ggml_folder}" ggml EXCLUDE_FROM_ALL SYSTEM)
get_directory_property(keepdim_ggml_version DIRECTORY "${keepdim_ggml_folder}" DEFINITION GGML_VERSION)
