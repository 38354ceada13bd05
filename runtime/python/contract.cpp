// Contract: binds torch tensors through their attributes, without torch's headers.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "python/bindings.h"

namespace keepdim {

namespace {

void set_dtypes(const nb::dict& table) {
  dtypes().clear();
  for (const auto& [key, value] : table) {
    const std::string name = nb::cast<std::string>(value);
    DType dtype = DType::f32;
    while (name != dtype_name(dtype)) {
      if (dtype == DType::boolean) fail(Code::invalid_argument, "[bind] dtype '" + name + "': it is not known.");
      dtype = static_cast<DType>(static_cast<int>(dtype) + 1);
    }
    dtypes().emplace_back(key.inc_ref().ptr(), dtype);
  }
}

int64_t read_tensor_item(const void* tensor, size_t index) {
  const nb::handle t(const_cast<PyObject*>(static_cast<const PyObject*>(tensor)));
  return nb::cast<int64_t>(nb::int_(t.attr("reshape")(-1)[nb::cast(index)]));
}

class PyContract {
 public:
  explicit PyContract(const nb::bytes& json) : contract_(Contract::parse(as_string_view(json))) {}

  nb::list bind(nb::handle args) {
    Scratch s = run(args);
    nb::list out;
    for (int64_t value : s.bound) out.append(value);
    scratch_ = std::move(s);
    return out;
  }

  void check(nb::handle args) { scratch_ = run(args); }

  // Checks the arguments and returns them as ExecuTorch takes them: contiguous CPU tensors, without None.
  nb::list inputs(nb::handle args) {
    check(args);
    nb::list out;
    size_t i = 0;
    for (nb::handle arg : args) {
      const Spec& spec = contract_.inputs[i];
      if (spec.dtype == DType::integer || spec.dtype == DType::python) {
        if (!arg.is_none()) out.append(arg);
      } else {
        out.append(cpu_contiguous(i, spec, arg));
      }
      ++i;
    }
    return out;
  }

  // Checks the results of a run with `args` against the contract.
  void check_results(nb::handle args, nb::handle results) {
    Scratch s = run(args);
    Scratch r;
    read_all(r, contract_.outputs, results);
    contract_.bind_results(r.args.data(), r.args.size(), s.bound, s.values);
    scratch_ = std::move(s);
  }

  std::vector<std::string> symbols() const {
    std::vector<std::string> out;
    for (const Symbol& symbol : contract_.symbols) out.push_back(symbol.name);
    return out;
  }

 private:
  static nb::object cpu_contiguous(size_t i, const Spec& spec, nb::handle tensor) {
    const auto call = [&](PyObject* method) {
      nb::object result = nb::steal(PyObject_CallMethodNoArgs(tensor.ptr(), method));
      if (!result.is_valid()) throw nb::python_error();
      return result;
    };
    const nb::object on_cpu = nb::steal(PyObject_GetAttr(tensor.ptr(), names().is_cpu));
    if (!on_cpu.is_valid()) throw nb::python_error();
    if (!on_cpu.is(Py_True))
      refuse(i, spec, "it is on " + std::string(nb::str(tensor.attr("device")).c_str()) + ". Move it to the CPU.");
    if (call(names().is_neg).is(Py_True))
      return nb::object(call(names().resolve_neg).attr("contiguous")());  // lazy negation (is_neg)
    return call(names().is_contiguous).is(Py_True) ? nb::borrow(tensor) : call(names().contiguous);
  }

  struct Scratch {
    std::vector<Argument> args;
    std::vector<int64_t> sizes, bound, values;
  };

  // Reading an element runs Python code, which may reenter: the scratch is moved out while in use.
  Scratch run(nb::handle arguments) {
    Scratch s = std::move(scratch_);
    read_all(s, contract_.inputs, arguments);
    contract_.bind(s.args.data(), s.args.size(), s.bound, s.values);
    return s;
  }

  static void read_all(Scratch& s, const std::vector<Spec>& specs, nb::handle arguments) {
    const nb::object sequence = nb::steal(PySequence_Fast(arguments.ptr(), "expected a sequence of arguments"));
    if (!sequence.is_valid()) throw nb::python_error();
    const size_t count = static_cast<size_t>(PySequence_Fast_GET_SIZE(sequence.ptr()));
    s.args.assign(count, Argument{DType::python});
    s.sizes.clear();
    if (count != specs.size()) return;
    for (size_t i = 0; i < count; ++i) read(s, i, specs[i], PySequence_Fast_GET_ITEM(sequence.ptr(), i));
    const int64_t* at = s.sizes.data();  // stable only after all reads
    for (Argument& arg : s.args) {
      arg.sizes = at;
      at += arg.rank;
    }
  }

  static void read(Scratch& s, size_t i, const Spec& spec, PyObject* object) {
    Argument& arg = s.args[i];
    if (spec.dtype == DType::python) return;
    if (spec.dtype == DType::integer) {
      arg.dtype = DType::integer;
      arg.value = read_int(i, spec, object);
      return;
    }
    const nb::object dtype = nb::steal(PyObject_GetAttr(object, names().dtype));
    const nb::object shape = dtype.is_valid() ? nb::steal(PyObject_GetAttr(object, names().shape)) : nb::object();
    if (!shape.is_valid() || !PyTuple_Check(shape.ptr())) {
      PyErr_Clear();
      wrong_argument_type(i, spec, object);
    }
    arg.dtype = dtype_of(i, spec, dtype, object);
    arg.rank = static_cast<size_t>(PyTuple_GET_SIZE(shape.ptr()));
    for (size_t d = 0; d < arg.rank; ++d) {
      PyObject* size = PyTuple_GET_ITEM(shape.ptr(), d);
      // A symbolic size is not evaluated: that would specialise its graph.
      if (!PyLong_Check(size))
        refuse(i, spec, "dim " + std::to_string(d) + " is not an integer but a " + Py_TYPE(size)->tp_name + ".");
      s.sizes.push_back(PyLong_AsLongLong(size));
    }
    arg.data = object;
    arg.item = read_tensor_item;
  }

  static DType dtype_of(size_t i, const Spec& spec, const nb::object& dtype, PyObject* tensor) {
    for (const auto& [object, known] : dtypes()) {
      if (object == dtype.ptr()) return known;
    }
    if (!PyObject_HasAttr(tensor, names().is_contiguous)) wrong_argument_type(i, spec, tensor);  // a numpy or jax array
    refuse(i, spec, std::string("expected dtype ") + dtype_name(spec.dtype) + ", got " + nb::str(dtype).c_str() + ".");
  }

  const Contract contract_;
  Scratch scratch_;
};

std::vector<int64_t> eval_dims(const nb::bytes& json, const std::vector<int64_t>& symbols) {
  const Contract c = Contract::parse(as_string_view(json));
  if (symbols.size() != c.symbols.size()) {
    fail(Code::invalid_argument,
         "[bind] symbols: expected " + std::to_string(c.symbols.size()) + " values, got " + std::to_string(symbols.size()) + ".");
  }
  std::vector<int64_t> out(c.dims.size());
  c.dims.eval(symbols.data(), out.data());
  return out;
}

nb::list dim_bounds(const nb::bytes& json) {
  const Contract c = Contract::parse(as_string_view(json));
  nb::list out;
  for (DimId id = 0; id < c.dims.size(); ++id) out.append(nb::make_tuple(c.dims.bounds(id).lo, c.dims.bounds(id).hi));
  return out;
}

std::vector<std::string> dim_texts(const nb::bytes& json) {
  const Contract c = Contract::parse(as_string_view(json));
  std::vector<std::string> out;
  for (DimId id = 0; id < c.dims.size(); ++id) out.push_back(c.text(id));
  return out;
}

}  // namespace

void add_contract(nb::module_& m) {
  nb::class_<PyContract>(m, "Contract")
      .def(nb::init<const nb::bytes&>(), "json"_a)
      .def("bind", &PyContract::bind, "args"_a,
           "The symbols' values for these arguments, in order; raises the first thing wrong.")
      .def("check", &PyContract::check, "args"_a, "bind, without the values.")
      .def("inputs", &PyContract::inputs, "args"_a, "check, then the arguments as ExecuTorch takes them.")
      .def("check_results", &PyContract::check_results, "args"_a, "results"_a,
           "Raises what is wrong with the results of a run on these arguments: sizes that data decided.")
      .def_prop_ro("symbols", &PyContract::symbols);
  m.def("set_dtypes", set_dtypes, "table"_a, "Names of torch's dtype objects, for Contract.bind.");
  m.def("eval_dims", eval_dims, "json"_a, "symbols"_a);
  m.def("dim_bounds", dim_bounds, "json"_a);
  m.def("dim_texts", dim_texts, "json"_a);
}

}  // namespace keepdim
