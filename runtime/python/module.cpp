// keepdim._native: Python bindings of the runtime. Conversions only; all rules are in the core.
#include <cstring>

#include "core/cpu.h"
#include "python/bindings.h"

namespace keepdim {

NB_MODULE(_native, m) {
  if (const std::string problem = cpu_error(); !problem.empty()) throw nb::import_error(problem.c_str());
  nb::set_leak_warnings(false);  // module objects live until process exit
  // Messages may quote arbitrary bytes of a file, so they are decoded with "replace".
  static PyObject* const error = nb::exception<Error>(m, "Error", PyExc_RuntimeError).inc_ref().ptr();
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const Error& e) {
      const nb::object text =
          nb::steal(PyUnicode_DecodeUTF8(e.what(), static_cast<Py_ssize_t>(std::strlen(e.what())), "replace"));
      if (text.is_valid()) PyErr_SetObject(error, text.ptr());
    }
  });

  add_contract(m);
  add_method(m);
  add_delegate(m);
  add_quant(m);
  add_process(m);
}

}  // namespace keepdim
