// libFuzzer target for Program JSON: parses, checks, builds and runs on the ggml engine with weights of ones, at small sizes.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/delegate.h"
#include "core/registry.h"
#include "ggml/engine.h"

namespace {

using namespace keepdim;

constexpr int64_t kMaxElements = 1 << 16;  // elements per input; larger calls are skipped

class Outputs final : public keepdim::Outputs {
 public:
  Outputs(const Contract& contract) : contract_(contract), memory_(contract.outputs.size()) {}
  void* resize(size_t i, const int64_t* sizes, size_t rank) override {
    size_t bytes = dtype_bytes(contract_.outputs[i].dtype);
    for (size_t d = 0; d < rank; ++d) bytes *= static_cast<size_t>(sizes[d]);
    memory_[i].reset(new char[bytes]);
    return memory_[i].get();
  }
  void set_integer(size_t, int64_t) override {}

 private:
  const Contract& contract_;
  std::vector<std::unique_ptr<char[]>> memory_;
};

// Calls with every symbol at its minimum plus `increment`.
void call(Delegate& delegate, int64_t increment) {
  const Contract& contract = delegate.program().contract;
  std::vector<int64_t> symbols, dims(contract.dims.size());
  for (const Symbol& s : contract.symbols) {
    const int64_t lo = s.range.lo.value_or(0), hi = s.range.hi.value_or(INT64_MAX);
    symbols.push_back(std::min(hi, std::max<int64_t>(lo, std::min<int64_t>(lo, INT64_MAX - increment) + increment)));
  }
  contract.dims.eval(symbols.data(), dims.data());
  std::vector<Argument> args(contract.inputs.size(), Argument{DType::integer});
  std::vector<std::vector<int64_t>> sizes(args.size());
  std::vector<std::vector<char>> memory(args.size());
  for (size_t i = 0; i < args.size(); ++i) {
    const Spec& spec = contract.inputs[i];
    if (spec.dtype == DType::integer) {
      args[i].value = dims[spec.dims[0]];
      continue;
    }
    int64_t count = 1;
    for (DimId id : spec.dims) {
      sizes[i].push_back(dims[id]);
      if (__builtin_mul_overflow(count, dims[id], &count) || count > kMaxElements) return;
    }
    memory[i].assign(static_cast<size_t>(count) * dtype_bytes(spec.dtype), 1);
    args[i] = Argument{spec.dtype, sizes[i].size(), sizes[i].data(), memory[i].data()};
  }
  Outputs outputs(contract);
  delegate.run(args.data(), args.size(), outputs);
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  register_ggml_engine();
  set_options({1, int64_t{64} << 20, int64_t{8} << 20});
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    std::map<std::string, std::vector<char>> weights;
    const std::string json(reinterpret_cast<const char*>(data), size);
    const Program program = Program::parse(json);
    size_t bytes = 0;
    for (const Value& value : program.values) {
      if (value.kind != Value::Kind::constant && value.kind != Value::Kind::state) continue;
      size_t count = dtype_bytes(value.dtype);
      for (DimId id : value.dims) count *= static_cast<size_t>(program.contract.dims.node(id).value);
      count /= dtype_block(value.dtype);
      if ((bytes += count) > (size_t{16} << 20)) return 0;
      if (value.kind == Value::Kind::constant) weights[value.key].assign(count, 1);
    }
    Delegate delegate(find_engine("ggml"), json,
                      [&](const std::string& key) { return Bytes{weights.at(key).data(), weights.at(key).size()}; });
    for (int64_t increment : {0, 3, 1, 3}) {
      try {
        call(delegate, increment);
      } catch (const Error& e) {
        if (e.code == Code::internal) throw std::logic_error(e.what());  // a bug in keepdim
      }
    }
  } catch (const Error&) {
  } catch (const std::bad_alloc&) {
  }
  return 0;
}
