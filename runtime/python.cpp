// keepdim._native: the runtime for Python. Conversions only; every rule is the core's.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "backend.h"
#include "cpu.h"
#include "plan.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace keepdim {

namespace {

std::string_view text_of(const nb::bytes& json) { return {json.c_str(), json.size()}; }

[[noreturn]] void refuse(size_t i, const Spec& spec, const std::string& fact) {
  fail(Code::invalid_argument, "[bind] input " + std::to_string(i) + " '" + spec.name + "': " + fact);
}

[[noreturn]] void wrong_kind(size_t i, const Spec& spec, PyObject* got) {
  refuse(i, spec, std::string("expected dtype ") + dtype_name(spec.dtype) + ", got " + Py_TYPE(got)->tp_name + ".");
}

int64_t read_int(size_t i, const Spec& spec, PyObject* arg) {
  if (!PyLong_Check(arg) || PyBool_Check(arg)) wrong_kind(i, spec, arg);
  int overflow = 0;
  const int64_t value = PyLong_AsLongLongAndOverflow(arg, &overflow);
  if (overflow) refuse(i, spec, "the integer does not fit int64.");
  return value;
}

// ---- Contract: binds torch tensors through their attributes, without torch's headers

struct Names {
  PyObject *shape = PyUnicode_InternFromString("shape"), *dtype = PyUnicode_InternFromString("dtype");
};
const Names& names() {
  static const Names n;
  return n;
}

// dtype objects by identity; few, so a scan. The references are never given back: the objects live as long as torch.
std::vector<std::pair<PyObject*, DType>>& dtypes() {
  static auto* const table = new std::vector<std::pair<PyObject*, DType>>;
  return *table;
}

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
  explicit PyContract(const nb::bytes& json) : contract_(Contract::parse(text_of(json))) {}

  nb::list bind(nb::handle args) {
    Scratch s = run(args);
    nb::list out;
    for (int64_t value : s.bound) out.append(value);
    scratch_ = std::move(s);
    return out;
  }

  void check(nb::handle args) { scratch_ = run(args); }

  std::vector<std::string> symbols() const {
    std::vector<std::string> out;
    for (const Symbol& symbol : contract_.symbols) out.push_back(symbol.name);
    return out;
  }

 private:
  struct Scratch {
    std::vector<Argument> args;
    std::vector<int64_t> sizes, bound, values;
  };

  // Reading an element runs Python code, which may call back: so the scratch is taken out while it is in use.
  Scratch run(nb::handle arguments) {
    Scratch s = std::move(scratch_);
    const nb::object held = nb::steal(PySequence_Fast(arguments.ptr(), "expected a sequence of arguments"));
    if (!held.is_valid()) throw nb::python_error();
    const size_t count = static_cast<size_t>(PySequence_Fast_GET_SIZE(held.ptr()));
    s.args.assign(count, Argument{DType::python});
    s.sizes.clear();
    if (count == contract_.inputs.size()) {
      for (size_t i = 0; i < count; ++i) read(s, i, PySequence_Fast_GET_ITEM(held.ptr(), i));
      const int64_t* at = s.sizes.data();  // stable only now
      for (Argument& arg : s.args) {
        arg.sizes = at;
        at += arg.rank;
      }
    }
    contract_.bind(s.args.data(), count, s.bound, s.values);
    return s;
  }

  void read(Scratch& s, size_t i, PyObject* object) {
    const Spec& spec = contract_.inputs[i];
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
      wrong_kind(i, spec, object);
    }
    arg.dtype = dtype_of(i, spec, dtype);
    arg.rank = static_cast<size_t>(PyTuple_GET_SIZE(shape.ptr()));
    for (size_t d = 0; d < arg.rank; ++d) {
      PyObject* size = PyTuple_GET_ITEM(shape.ptr(), d);
      // A symbolic size is not asked for its value: that would specialise the graph it belongs to.
      if (!PyLong_Check(size)) refuse(i, spec, "dim " + std::to_string(d) + " is no number but a " + Py_TYPE(size)->tp_name + ".");
      s.sizes.push_back(PyLong_AsLongLong(size));
    }
    arg.data = object;
    arg.item = read_tensor_item;
  }

  static DType dtype_of(size_t i, const Spec& spec, const nb::object& dtype) {
    for (const auto& [object, known] : dtypes()) {
      if (object == dtype.ptr()) return known;
    }
    refuse(i, spec, std::string("expected dtype ") + dtype_name(spec.dtype) + ", got " + nb::str(dtype).c_str() + ".");
  }

  const Contract contract_;
  Scratch scratch_;
};

std::vector<int64_t> eval_dims(const nb::bytes& json, const std::vector<int64_t>& symbols) {
  const Contract c = Contract::parse(text_of(json));
  if (symbols.size() != c.symbols.size()) {
    fail(Code::invalid_argument, "[bind] symbols: expected " + std::to_string(c.symbols.size()) + " values, got " +
                                     std::to_string(symbols.size()) + ".");
  }
  std::vector<int64_t> out(c.dims.size());
  c.dims.eval(symbols.data(), out.data());
  return out;
}

nb::list dim_bounds(const nb::bytes& json) {
  const Contract c = Contract::parse(text_of(json));
  nb::list out;
  for (DimId id = 0; id < c.dims.size(); ++id) out.append(nb::make_tuple(c.dims.bounds(id).lo, c.dims.bounds(id).hi));
  return out;
}

std::vector<std::string> dim_texts(const nb::bytes& json) {
  const Contract c = Contract::parse(text_of(json));
  std::vector<std::string> out;
  for (DimId id = 0; id < c.dims.size(); ++id) out.push_back(c.text(id));
  return out;
}

// ---- Delegate: one program on one engine with numpy arrays, for tests

using Array = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
using nb::dlpack::dtype_code;

nb::dlpack::dtype to_dlpack(DType dtype) {
  const auto code = [&] {
    switch (dtype) {
      case DType::f32: case DType::f16: case DType::f64: return dtype_code::Float;
      case DType::bf16: case DType::u8: return dtype_code::UInt;  // numpy has no bf16: its bits
      case DType::boolean: return dtype_code::Bool;
      default: return dtype_code::Int;
    }
  }();
  return {static_cast<uint8_t>(code), static_cast<uint8_t>(dtype_bytes(dtype) * 8), 1};
}

class HeapOutputs final : public Outputs {
 public:
  explicit HeapOutputs(const Contract& contract) : contract_(contract), rows_(contract.outputs.size()) {}

  void* resize(size_t i, const int64_t* sizes, size_t rank) override {
    size_t bytes = dtype_bytes(contract_.outputs[i].dtype);
    for (size_t d = 0; d < rank; ++d) {
      if (__builtin_mul_overflow(bytes, static_cast<size_t>(sizes[d]), &bytes)) throw std::bad_alloc();
    }
    rows_[i].sizes.assign(sizes, sizes + rank);
    rows_[i].data.reset(new char[bytes > 0 ? bytes : 1]);
    return rows_[i].data.get();
  }

  void set_integer(size_t i, int64_t value) override { rows_[i].value = value; }

  nb::list take() {
    nb::list out;
    for (size_t i = 0; i < rows_.size(); ++i) {
      Row& row = rows_[i];
      if (contract_.outputs[i].dtype == DType::integer) {
        out.append(row.value);
        continue;
      }
      char* data = row.data.release();
      const nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<char*>(p); });
      out.append(nb::ndarray<nb::numpy>(data, row.sizes.size(), row.sizes.data(), owner, nullptr, to_dlpack(contract_.outputs[i].dtype))
                     .cast());
    }
    return out;
  }

 private:
  struct Row {
    std::vector<size_t> sizes;
    std::unique_ptr<char[]> data;
    int64_t value = 0;
  };
  const Contract& contract_;
  std::vector<Row> rows_;
};

nb::dict counters_dict(const Counters& c) {
  nb::dict out;
  out["id"] = c.id;
  out["engine"] = c.engine;
  out["calls"] = c.calls;
  out["built"] = c.built;
  out["reused"] = c.reused;
  out["evicted"] = c.evicted;
  out["plans"] = c.plans;
  out["plan_bytes"] = c.plan_bytes;
  out["arena_bytes"] = c.arena_bytes;
  out["weight_bytes"] = c.weight_bytes;
  return out;
}

class PyDelegate {
 public:
  PyDelegate(const std::string& engine, const nb::bytes& json, const nb::dict& weights)
      : weights_(nb::steal<nb::dict>(PyDict_Copy(weights.ptr()))),
        delegate_(find_engine(engine), text_of(json), [this](const std::string& key) { return weight(key); }) {}

  nb::list run(const nb::list& args) {
    const Contract& contract = delegate_.program().contract;
    std::vector<Argument> arguments(args.size(), Argument{DType::python});
    std::vector<Array> arrays(args.size());
    if (args.size() == contract.inputs.size()) {
      for (size_t i = 0; i < args.size(); ++i) read(i, args[i], arguments[i], arrays[i]);
    }
    HeapOutputs outputs(contract);
    {
      nb::gil_scoped_release release;
      delegate_.run(arguments.data(), arguments.size(), outputs);
    }
    return outputs.take();
  }

  nb::dict counters() const { return counters_dict(delegate_.counters()); }
  void clear_plans() { delegate_.clear_plans(); }

 private:
  Bytes weight(const std::string& key) const {
    const nb::str name(key.c_str(), key.size());
    if (!weights_.contains(name)) fail(Code::invalid_program, "[load] weight '" + key + "': not found.");
    const nb::bytes data = nb::cast<nb::bytes>(weights_[name]);
    return {data.c_str(), data.size()};  // alive in weights_
  }

  void read(size_t i, nb::handle object, Argument& arg, Array& array) const {
    const Spec& spec = delegate_.program().contract.inputs[i];
    if (spec.dtype == DType::integer) {
      arg.dtype = DType::integer;
      arg.value = read_int(i, spec, object.ptr());
      return;
    }
    if (!nb::try_cast(object, array)) wrong_kind(i, spec, object.ptr());
    const bool bits = spec.dtype == DType::bf16 && array.dtype() == nb::dtype<uint16_t>();
    DType dtype = bits ? DType::bf16 : DType::f32;
    while (!bits && (dtype == DType::bf16 || to_dlpack(dtype) != array.dtype())) {
      if (dtype == DType::boolean) refuse(i, spec, std::string("expected dtype ") + dtype_name(spec.dtype) + ", got another.");
      dtype = static_cast<DType>(static_cast<int>(dtype) + 1);
    }
    arg.dtype = dtype;
    arg.rank = array.ndim();
    arg.sizes = array.shape_ptr();
    arg.data = array.data();
  }

  nb::dict weights_;
  Delegate delegate_;
};

// ---- the process

nb::list live() {
  nb::list out;
  for (const Counters& c : live_counters()) out.append(counters_dict(c));
  return out;
}

nb::dict options_dict() {
  const Options o = options();
  nb::dict out;
  out["threads"] = o.threads;
  out["memory_limit"] = o.memory_limit;
  out["plan_limit"] = o.plan_limit;
  return out;
}

void change_options(std::optional<int> threads, std::optional<int64_t> memory_limit, std::optional<int64_t> plan_limit) {
  const Options o = options();
  set_options({threads.value_or(o.threads), memory_limit.value_or(o.memory_limit), plan_limit.value_or(o.plan_limit)});
}

nb::dict engines() {
  nb::dict out;
  for (const std::string& name : engine_names()) out[name.c_str()] = find_engine(name).ops();
  return out;
}

nb::dict backends() {
  nb::dict out;
  for (const auto& [id, answer] : backend_status()) out[id.c_str()] = answer;
  return out;
}

nb::dict build_info_dict() {
  nb::dict out;
  out["cpu"] = build_info().cpu;
  out["ggml"] = build_info().ggml;
  out["format"] = kFormatVersion;
  return out;
}

}  // namespace

NB_MODULE(_native, m) {
  if (const std::string problem = cpu_problem(); !problem.empty()) throw nb::import_error(problem.c_str());
  nb::exception<Error>(m, "Error", PyExc_RuntimeError);

  nb::class_<PyContract>(m, "Contract")
      .def(nb::init<const nb::bytes&>(), "json"_a)
      .def("bind", &PyContract::bind, "args"_a, "The symbols' values for these arguments, in order; raises the first thing wrong.")
      .def("check", &PyContract::check, "args"_a, "bind, without the values.")
      .def_prop_ro("symbols", &PyContract::symbols);
  m.def("set_dtypes", set_dtypes, "table"_a, "Names of torch's dtype objects, for Contract.bind.");
  m.def("verify", [](const nb::bytes& json) { Program::parse(text_of(json)); }, "json"_a, "Raises what is wrong with a program.");
  m.def(
      "check",
      [](const std::string& engine, const nb::bytes& json) { find_engine(engine).check(Program::parse(text_of(json))); },
      "engine"_a, "json"_a, "Raises why an engine does not take a program: unknown op, wrong arity, dtype or attribute.");
  m.def("eval_dims", eval_dims, "json"_a, "symbols"_a);
  m.def("dim_bounds", dim_bounds, "json"_a);
  m.def("dim_texts", dim_texts, "json"_a);

  nb::class_<PyDelegate>(m, "Delegate")
      .def(nb::init<const std::string&, const nb::bytes&, const nb::dict&>(), "engine"_a, "json"_a, "weights"_a)
      .def("run", &PyDelegate::run, "args"_a)
      .def("counters", &PyDelegate::counters)
      .def("clear_plans", &PyDelegate::clear_plans);

  m.def("live", live, "Counters of every living delegate.");
  m.def("last_error", [] { return last_error(); }, "The sentence of this thread's last failure.");
  m.def("clear_last_error", [] { clear_last_error(); });
  m.def("options", options_dict);
  m.def("set_options", change_options, nb::kw_only(), "threads"_a = nb::none(), "memory_limit"_a = nb::none(), "plan_limit"_a = nb::none());
  m.def("engines", engines, "Engine names and their ops.");
  m.def("backends", backends, "ExecuTorch backend ids and the status of their registration; 0 is ok.");
  m.def("cpu_supported", [] { return cpu_problem().empty(); });
  m.def("build_info", build_info_dict);
}

}  // namespace keepdim
