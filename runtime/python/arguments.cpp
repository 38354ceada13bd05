// Conversion of Python objects.
#include "python/bindings.h"

namespace keepdim {

[[noreturn]] void refuse(size_t i, const Spec& spec, const std::string& fact) {
  fail(Code::invalid_argument, "[bind] input " + std::to_string(i) + " '" + spec.name + "': " + fact);
}

[[noreturn]] void wrong_argument_type(size_t i, const Spec& spec, PyObject* got) {
  const std::string wanted =
      spec.dtype == DType::integer ? "dtype int" : std::string("a torch.Tensor of ") + dtype_name(spec.dtype);
  refuse(i, spec, "expected " + wanted + ", got " + Py_TYPE(got)->tp_name + ".");
}

int64_t read_int(size_t i, const Spec& spec, PyObject* arg) {
  if (!PyLong_Check(arg) || PyBool_Check(arg)) wrong_argument_type(i, spec, arg);
  int overflow = 0;
  const int64_t value = PyLong_AsLongLongAndOverflow(arg, &overflow);
  if (overflow) refuse(i, spec, "the integer does not fit int64.");
  return value;
}

const Names& names() {
  static const Names n;
  return n;
}

// The references are never released: the objects live as long as torch.
std::vector<std::pair<PyObject*, DType>>& dtypes() {
  static auto* const table = new std::vector<std::pair<PyObject*, DType>>;
  return *table;
}

}  // namespace keepdim
