// Delegate: runs a program on an engine with numpy arrays, for tests; and program checks.
#include "core/delegate.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "core/registry.h"
#include "python/bindings.h"
#include "python/counters.h"

namespace keepdim {

namespace {

using Array = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
using nb::dlpack::dtype_code;

nb::dlpack::dtype to_dlpack(DType dtype) {
  const auto code = [&] {
    switch (dtype) {
      case DType::f32:
      case DType::f16:
      case DType::f64: return dtype_code::Float;
      case DType::bf16:
      case DType::u8: return dtype_code::UInt;  // numpy has no bf16: passed as uint16 bits
      case DType::boolean: return dtype_code::Bool;
      default: return dtype_code::Int;
    }
  }();
  return {static_cast<uint8_t>(code), static_cast<uint8_t>(dtype_bytes(dtype) * 8), 1};
}

class HeapOutputs final : public Outputs {
 public:
  explicit HeapOutputs(const Contract& contract) : contract_(contract), outputs_(contract.outputs.size()) {}

  void* resize(size_t i, const int64_t* sizes, size_t rank) override {
    size_t bytes = dtype_bytes(contract_.outputs[i].dtype);
    for (size_t d = 0; d < rank; ++d) {
      if (__builtin_mul_overflow(bytes, static_cast<size_t>(sizes[d]), &bytes)) throw std::bad_alloc();
    }
    outputs_[i].sizes.assign(sizes, sizes + rank);
    outputs_[i].data.reset(new char[bytes > 0 ? bytes : 1]);
    return outputs_[i].data.get();
  }

  void set_integer(size_t i, int64_t value) override { outputs_[i].value = value; }

  nb::list release_arrays() {
    nb::list out;
    for (size_t i = 0; i < outputs_.size(); ++i) {
      Output& output = outputs_[i];
      if (contract_.outputs[i].dtype == DType::integer) {
        out.append(output.value);
        continue;
      }
      char* data = output.data.release();
      const nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<char*>(p); });
      out.append(nb::ndarray<nb::numpy>(data, output.sizes.size(), output.sizes.data(), owner, nullptr,
                                        to_dlpack(contract_.outputs[i].dtype))
                     .cast());
    }
    return out;
  }

 private:
  struct Output {
    std::vector<size_t> sizes;
    std::unique_ptr<char[]> data;
    int64_t value = 0;
  };
  const Contract& contract_;
  std::vector<Output> outputs_;
};

class PyDelegate {
 public:
  PyDelegate(const std::string& engine, const nb::bytes& json, const nb::dict& weights)
      : weights_(nb::steal<nb::dict>(PyDict_Copy(weights.ptr()))),
        delegate_(find_engine(engine), as_string_view(json), [this](const std::string& key) { return weight(key); }) {}

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
    return outputs.release_arrays();
  }

  nb::dict counters() const { return counters_dict(delegate_.counters()); }
  void clear_plans() { delegate_.clear_plans(); }

 private:
  Bytes weight(const std::string& key) const {
    const nb::str name(key.c_str(), key.size());
    if (!weights_.contains(name)) fail(Code::invalid_program, "[load] weight '" + key + "': not found.");
    const nb::bytes data = nb::cast<nb::bytes>(weights_[name]);
    return {data.c_str(), data.size()};  // kept alive by weights_
  }

  void read(size_t i, nb::handle object, Argument& arg, Array& array) const {
    const Spec& spec = delegate_.program().contract.inputs[i];
    if (spec.dtype == DType::integer) {
      arg.dtype = DType::integer;
      arg.value = read_int(i, spec, object.ptr());
      return;
    }
    if (!nb::try_cast(object, array)) wrong_argument_type(i, spec, object.ptr());
    const bool bf16_as_uint16 = spec.dtype == DType::bf16 && array.dtype() == nb::dtype<uint16_t>();
    DType dtype = bf16_as_uint16 ? DType::bf16 : DType::f32;
    while (!bf16_as_uint16 && (dtype == DType::bf16 || to_dlpack(dtype) != array.dtype())) {
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

}  // namespace

void add_delegate(nb::module_& m) {
  m.def(
      "verify", [](const nb::bytes& json) { Program::parse(as_string_view(json)); }, "json"_a,
      "Raises what is wrong with a program.");
  m.def(
      "check",
      [](const std::string& engine, const nb::bytes& json) { find_engine(engine).check(Program::parse(as_string_view(json))); },
      "engine"_a, "json"_a, "Raises why an engine does not take a program: unknown op, wrong arity, dtype or attribute.");
  nb::class_<PyDelegate>(m, "Delegate")
      .def(nb::init<const std::string&, const nb::bytes&, const nb::dict&>(), "engine"_a, "json"_a, "weights"_a)
      .def("run", &PyDelegate::run, "args"_a)
      .def("counters", &PyDelegate::counters)
      .def("clear_plans", &PyDelegate::clear_plans);
}

}  // namespace keepdim
