// keepdim._native: the runtime for Python. Conversions only; every rule is the core's.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>

#include "backend.h"
#include "cpu.h"
#include "ggml/gguf_file.h"
#include "kernels.h"
#include "method.h"
#include "plan.h"
#include "pte.h"
#include "quant.h"

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
  PyObject* shape = PyUnicode_InternFromString("shape");
  PyObject* dtype = PyUnicode_InternFromString("dtype");
  PyObject* is_cpu = PyUnicode_InternFromString("is_cpu");
  PyObject* is_contiguous = PyUnicode_InternFromString("is_contiguous");
  PyObject* contiguous = PyUnicode_InternFromString("contiguous");
  PyObject* is_neg = PyUnicode_InternFromString("is_neg");
  PyObject* resolve_neg = PyUnicode_InternFromString("resolve_neg");
  PyObject* data_ptr = PyUnicode_InternFromString("data_ptr");
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

  // check, then the arguments as ExecuTorch takes them: tensors on the CPU and contiguous, and no None.
  nb::list inputs(nb::handle args) {
    check(args);
    nb::list out;
    size_t i = 0;
    for (nb::handle arg : args) {
      const Spec& spec = contract_.inputs[i];
      if (spec.dtype == DType::integer || spec.dtype == DType::python) {
        if (!arg.is_none()) out.append(arg);
      } else {
        out.append(plain(i, spec, arg));
      }
      ++i;
    }
    return out;
  }

  // What a run on `args` gave, against what the contract says of it.
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
  static nb::object plain(size_t i, const Spec& spec, nb::handle tensor) {
    const auto call = [&](PyObject* method) {
      nb::object result = nb::steal(PyObject_CallMethodNoArgs(tensor.ptr(), method));
      if (!result.is_valid()) throw nb::python_error();
      return result;
    };
    const nb::object on_cpu = nb::steal(PyObject_GetAttr(tensor.ptr(), names().is_cpu));
    if (!on_cpu.is_valid()) throw nb::python_error();
    if (!on_cpu.is(Py_True)) refuse(i, spec, "it is on " + std::string(nb::str(tensor.attr("device")).c_str()) + ". Move it to the CPU.");
    if (call(names().is_neg).is(Py_True)) return nb::object(call(names().resolve_neg).attr("contiguous")());  // lazily negated
    return call(names().is_contiguous).is(Py_True) ? nb::borrow(tensor) : call(names().contiguous);
  }

  struct Scratch {
    std::vector<Argument> args;
    std::vector<int64_t> sizes, bound, values;
  };

  // Reading an element runs Python code, which may call back: so the scratch is taken out while it is in use.
  Scratch run(nb::handle arguments) {
    Scratch s = std::move(scratch_);
    read_all(s, contract_.inputs, arguments);
    contract_.bind(s.args.data(), s.args.size(), s.bound, s.values);
    return s;
  }

  static void read_all(Scratch& s, const std::vector<Spec>& specs, nb::handle arguments) {
    const nb::object held = nb::steal(PySequence_Fast(arguments.ptr(), "expected a sequence of arguments"));
    if (!held.is_valid()) throw nb::python_error();
    const size_t count = static_cast<size_t>(PySequence_Fast_GET_SIZE(held.ptr()));
    s.args.assign(count, Argument{DType::python});
    s.sizes.clear();
    if (count != specs.size()) return;
    for (size_t i = 0; i < count; ++i) read(s, i, specs[i], PySequence_Fast_GET_ITEM(held.ptr(), i));
    const int64_t* at = s.sizes.data();  // stable only now
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

// ---- Method: torch tensors in and out, without ExecuTorch's Python runtime

nb::object call_method(nb::handle object, PyObject* name) {
  nb::object result = nb::steal(PyObject_CallMethodNoArgs(object.ptr(), name));
  if (!result.is_valid()) throw nb::python_error();
  return result;
}

void* data_of(nb::handle tensor) {
  void* data = PyLong_AsVoidPtr(call_method(tensor, names().data_ptr).ptr());
  if (!data && PyErr_Occurred()) throw nb::python_error();
  return data;
}

// Collects what a run gives while the GIL is released; takes it back to make each tensor.
class TorchResults final : public ResultSink {
 public:
  void* tensor(DType dtype, const int64_t* sizes, size_t rank) override {
    const nb::gil_scoped_acquire gil;
    const nb::object shape = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(rank)));
    for (size_t d = 0; d < rank; ++d) PyTuple_SET_ITEM(shape.ptr(), d, PyLong_FromLongLong(sizes[d]));
    PyObject* kind = nullptr;
    for (const auto& [object, known] : dtypes()) {
      if (known == dtype) kind = object;
    }
    static PyObject* const empty = nb::object(nb::module_::import_("torch").attr("empty")).release().ptr();
    static PyObject* const keywords = nb::make_tuple("dtype", "device").release().ptr();
    static PyObject* const cpu = nb::str("cpu").release().ptr();  // whatever the default device is
    PyObject* const arguments[] = {shape.ptr(), kind, cpu};
    nb::object made = nb::steal(PyObject_Vectorcall(empty, arguments, 1, keywords));
    if (!made.is_valid()) throw nb::python_error();
    void* const data = data_of(made);
    if (!data && std::find(sizes, sizes + rank, 0) == sizes + rank) {
      fail(Code::not_supported, "[run] output " + std::to_string(nb::len(out)) + ": torch gives no memory for it here. "
                                "Call outside of FakeTensorMode, torch.vmap and torch.func.");
    }
    out.append(made);
    return data;
  }
  void integer(int64_t value) override { add([&] { return nb::object(nb::int_(value)); }); }
  void number(double value) override { add([&] { return nb::object(nb::float_(value)); }); }
  void truth(bool value) override { add([&] { return nb::object(nb::bool_(value)); }); }
  void text(const std::string& value) override {
    add([&] {
      nb::object made = nb::steal(PyUnicode_DecodeUTF8(value.data(), static_cast<Py_ssize_t>(value.size()), nullptr));
      if (!made.is_valid()) {
        PyErr_Clear();
        fail(Code::invalid_program, "[run] output " + std::to_string(nb::len(out)) + ": its text is not UTF-8.");
      }
      return made;
    });
  }
  void none() override { add([] { return nb::object(nb::none()); }); }

  nb::list out;

 private:
  template <typename Make>
  void add(const Make& make) {
    const nb::gil_scoped_acquire gil;
    out.append(make());
  }
};

void open_file(PteFile* file, const nb::bytes& path, bool verify) {
  const std::string name(path.c_str(), path.size());
  const nb::gil_scoped_release release;
  new (file) PteFile(name, verify);
}

class PyMethod {
 public:
  PyMethod(std::shared_ptr<PteFile> file, const std::string& name, const nb::bytes& weights, const Spans& spans)
      : method_(std::move(file), name, {{weights.c_str(), weights.size()}, spans}) {}

  // Inputs as Contract.inputs gives them: contiguous tensors on the CPU, numbers, flags.
  nb::list call(nb::handle arguments) { return run(arguments, nullptr); }

  // The same, and what took time in it: (name, what a delegate says about it, start, end, whether it is inside one).
  nb::tuple profile(nb::handle arguments) {
    std::vector<MethodEvent> events;
    nb::list results = run(arguments, &events), rows;
    for (const MethodEvent& e : events) rows.append(nb::make_tuple(e.name, e.about, e.start, e.end, e.delegated));
    return nb::make_tuple(results, rows);
  }

  size_t planned_bytes() const { return method_.planned_bytes(); }

 private:
  nb::list run(nb::handle arguments, std::vector<MethodEvent>* events) {
    std::vector<MethodInput> inputs;
    std::vector<std::vector<int64_t>> sizes;
    for (nb::handle object : arguments) inputs.push_back(read(object, sizes));
    TorchResults results;
    {
      const nb::gil_scoped_release release;
      method_.run(inputs.data(), inputs.size(), results, events);
    }
    return std::move(results.out);
  }

  static MethodInput read(nb::handle object, std::vector<std::vector<int64_t>>& sizes) {
    MethodInput in;
    if (object.is_none()) {
      in.kind = MethodInput::Kind::none;
    } else if (PyBool_Check(object.ptr())) {
      in.kind = MethodInput::Kind::truth;
      in.truth = object.is(Py_True);
    } else if (PyFloat_Check(object.ptr())) {
      in.kind = MethodInput::Kind::number;
      in.number = PyFloat_AS_DOUBLE(object.ptr());
    } else if (PyLong_Check(object.ptr())) {
      in.argument.value = nb::cast<int64_t>(object);
    } else {
      const nb::object dtype = nb::steal(PyObject_GetAttr(object.ptr(), names().dtype));
      const nb::object shape = dtype.is_valid() ? nb::steal(PyObject_GetAttr(object.ptr(), names().shape)) : nb::object();
      if (!shape.is_valid()) throw nb::python_error();
      for (const auto& [known, name] : dtypes()) {
        if (known == dtype.ptr()) in.argument.dtype = name;
      }
      sizes.emplace_back();
      for (nb::handle size : shape) sizes.back().push_back(PyLong_AsLongLong(size.ptr()));
      in.argument.rank = sizes.back().size();
      in.argument.sizes = sizes.back().data();  // the inner vector's memory stays where it is
      in.argument.data = data_of(object);
      if (!in.argument.data && std::find(sizes.back().begin(), sizes.back().end(), 0) == sizes.back().end()) {
        fail(Code::invalid_argument, "[bind] input " + std::to_string(sizes.size() - 1) + ": is a tensor without memory. Give one that is on the CPU.");
      }
    }
    return in;
  }

  Method method_;
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
  out["packed_bytes"] = c.packed_bytes;
  out["state_bytes"] = c.state_bytes;
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

// ---- quantised weights

DType quantised_type(const std::string& name) {
  DType dtype;
  if (!find_dtype(name, &dtype) || !is_quantised(dtype))
    fail(Code::invalid_argument, "[quantise] dtype '" + name + "': is none of quantised weights.");
  return dtype;
}

template <class T>
nb::ndarray<nb::numpy, T> new_array(size_t rows, size_t columns) {
  auto* data = new T[std::max<size_t>(rows * columns, 1)];
  const nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return nb::ndarray<nb::numpy, T>(data, {rows, columns}, owner);
}

template <class T>
using Matrix = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

nb::ndarray<nb::numpy, uint8_t> quantise_rows(const Matrix<float>& x, const std::string& name) {
  const DType dtype = quantised_type(name);
  const size_t rows = x.shape(0), k = x.shape(1), block = dtype_block(dtype);
  if (k % block)
    fail(Code::invalid_argument, "[quantise] rows of " + std::to_string(k) + ": are no whole blocks of " +
                                     std::to_string(block) + ", as " + name + " needs.");
  auto y = new_array<uint8_t>(rows, k / block * dtype_bytes(dtype));
  nb::gil_scoped_release release;
  quantise(dtype, x.data(), static_cast<int64_t>(rows), static_cast<int64_t>(k), y.data());
  return y;
}

nb::ndarray<nb::numpy, float> dequantise_rows(const Matrix<uint8_t>& x, const std::string& name) {
  const DType dtype = quantised_type(name);
  const size_t rows = x.shape(0), bytes = dtype_bytes(dtype), k = x.shape(1) / bytes * dtype_block(dtype);
  if (x.shape(1) % bytes)
    fail(Code::invalid_argument, "[quantise] rows of " + std::to_string(x.shape(1)) + " bytes: are no whole blocks of " +
                                     std::to_string(bytes) + ", as " + name + " has.");
  auto y = new_array<float>(rows, k);
  nb::gil_scoped_release release;
  dequantise(dtype, x.data(), static_cast<int64_t>(rows), static_cast<int64_t>(k), y.data());
  return y;
}

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

nb::dict splits(const std::string& engine) {
  nb::dict out;
  for (const auto& [name, value] : find_engine(engine).splits()) out[name.c_str()] = value;
  return out;
}

void set_splits(const std::string& engine, const nb::dict& changed) {
  std::map<std::string, int64_t> all;
  for (const auto& [name, value] : changed) all[nb::cast<std::string>(name)] = nb::cast<int64_t>(value);
  find_engine(engine).set_splits(all);
}

bool widens(const std::string& engine, const std::string& dtype) {
  const EngineInfo& info = find_engine(engine);
  return info.widens && info.widens(quantised_type(dtype));
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
  nb::set_leak_warnings(false);  // a module that lives until the process ends is no leak, and we print nothing
  // What is quoted in a sentence may be any bytes of a file.
  static PyObject* const error = nb::exception<Error>(m, "Error", PyExc_RuntimeError).inc_ref().ptr();
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const Error& e) {
      const nb::object text = nb::steal(PyUnicode_DecodeUTF8(e.what(), static_cast<Py_ssize_t>(std::strlen(e.what())), "replace"));
      if (text.is_valid()) PyErr_SetObject(error, text.ptr());
    }
  });

  nb::class_<PyContract>(m, "Contract")
      .def(nb::init<const nb::bytes&>(), "json"_a)
      .def("bind", &PyContract::bind, "args"_a, "The symbols' values for these arguments, in order; raises the first thing wrong.")
      .def("check", &PyContract::check, "args"_a, "bind, without the values.")
      .def("inputs", &PyContract::inputs, "args"_a, "check, then the arguments as ExecuTorch takes them.")
      .def("check_results", &PyContract::check_results, "args"_a, "results"_a,
           "Raises what is wrong with the results of a run on these arguments: sizes that data decided.")
      .def_prop_ro("symbols", &PyContract::symbols);
  nb::class_<PteFile>(m, "File")
      .def("__init__", open_file, "path"_a, "verify"_a = false, "A .pte, checked; with `verify` its weights too.")
      .def("fileno", &PteFile::descriptor)
      .def_prop_ro("size", &PteFile::program_bytes, "Bytes before the trailer.")
      .def_prop_ro("sha256", &PteFile::sha256, "Of everything but the weights.")
      .def_prop_ro("weights", [](const PteFile& file) {
        nb::list out;
        for (const WeightSpan& w : file.weights()) out.append(nb::make_tuple(w.key, w.offset, w.size, w.sha256));
        return out;
      }, "(key, offset, bytes, sha256) of each.");
  nb::class_<PyMethod>(m, "Method")
      .def(nb::init<std::shared_ptr<PteFile>, const std::string&, const nb::bytes&, const Spans&>(), "file"_a, "name"_a, "weights"_a = nb::bytes("", 0),
           "spans"_a = nb::dict())
      .def("__call__", &PyMethod::call, "inputs"_a, "Run on ExecuTorch's inputs in order; its outputs in order.")
      .def("profile", &PyMethod::profile, "inputs"_a, "The same with every event of the run: name, about, start, end, delegated.")
      .def_prop_ro("planned_bytes", &PyMethod::planned_bytes);
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

  m.def("quantise", quantise_rows, "rows"_a, "dtype"_a, "f32 [rows, k] to u8 [rows, bytes of a row].");
  m.def("dequantise", dequantise_rows, "rows"_a, "dtype"_a, "u8 [rows, bytes of a row] to f32 [rows, k].");
  m.def("check_gguf", [](const nb::bytes& path) { check_gguf({path.c_str(), path.size()}); }, "path"_a,
        "Raises which count, length or offset of a GGUF file does not fit into it.");
  m.def("live", live, "Counters of every living delegate.");
  m.def("last_error", [] { return last_error(); }, "The sentence of this thread's last failure.");
  m.def("clear_last_error", [] { clear_last_error(); });
  m.def("options", options_dict);
  m.def("set_options", change_options, nb::kw_only(), "threads"_a = nb::none(), "memory_limit"_a = nb::none(), "plan_limit"_a = nb::none());
  m.def("kernels", kernel_names, "Names of ExecuTorch's own kernels in this process.");
  m.def("load_engine", [](const std::string& engine) { find_engine(engine); }, "engine"_a, "Raises why there is no such engine.");
  m.def("engines", engines, "Names of the engines that are loaded, and their ops.");
  m.def("splits", splits, "engine"_a, "Sizes at which an engine changes from one way of computing to another, by name.");
  m.def("set_splits", set_splits, "engine"_a, "changed"_a, "Other ones, for plans that are built later.");
  m.def("widens", widens, "engine"_a, "dtype"_a, "Whether an engine makes f32 of weights in such blocks when it loads them.");
  m.def("backends", backends, "ExecuTorch backend ids and the status of their registration; 0 is ok.");
  m.def("cpu_supported", [] { return cpu_problem().empty(); });
  m.def("build_info", build_info_dict);
}

}  // namespace keepdim
