// libFuzzer target for .pte files: checks, loads and calls them as an app does. The input is the file without its trailer; a
// valid trailer is appended, so that the checksum does not reject the input.
#include <executorch/extension/tensor/tensor_ptr.h>
#include <executorch/runtime/platform/runtime.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "artifact/sha256.h"
#include "core/engine.h"
#include "core/json.h"
#include "core/program.h"
#include "keepdim/keepdim.h"

namespace {

using executorch::extension::make_tensor_ptr;
using executorch::extension::TensorPtr;
using executorch::runtime::EValue;

constexpr int64_t kMaxElements = 1 << 16;  // elements per input; larger calls are skipped

std::string add_trailer(std::string body) {
  const std::string text = "{\"version\":1,\"size\":" + std::to_string(body.size()) + ",\"sha256\":\"" +
                           keepdim::Sha256().update(body.data(), body.size()).hex() + "\",\"weights\":[]}";
  const auto digest = keepdim::Sha256().update(text.data(), text.size()).digest();
  uint64_t length = text.size();
  return body + text + std::string(digest.begin(), digest.end()) + std::string(reinterpret_cast<const char*>(&length), 8) +
         "KEEPDIM1";
}

// torch's dtype numbers.
executorch::aten::ScalarType to_scalar_type(keepdim::DType dtype) {
  static constexpr int8_t scalar_types[] = {6, 5, 15, 7, 1, 0, 2, 3, 4, 11};
  return static_cast<executorch::aten::ScalarType>(scalar_types[static_cast<size_t>(dtype)]);
}

void call(keepdim::Module& module, int64_t increment) {
  const keepdim::Contract contract = keepdim::Contract::parse(module.contract());
  std::vector<int64_t> symbols, dims(contract.dims.size());
  for (const keepdim::Symbol& s : contract.symbols) {
    const int64_t lo = s.range.lo.value_or(0), hi = s.range.hi.value_or(INT64_MAX);
    symbols.push_back(std::min(hi, std::min<int64_t>(lo, INT64_MAX - increment) + increment));
  }
  contract.dims.eval(symbols.data(), dims.data());
  std::vector<EValue> inputs;
  std::vector<TensorPtr> tensors;
  for (const keepdim::Spec& spec : contract.inputs) {
    if (spec.dtype == keepdim::DType::integer) {
      inputs.emplace_back(dims[spec.dims[0]]);
      continue;
    }
    if (spec.dtype == keepdim::DType::python) {
      inputs.emplace_back();
      continue;
    }
    int64_t count = 1;
    std::vector<executorch::aten::SizesType> sizes;
    for (keepdim::DimId id : spec.dims) {
      if (__builtin_mul_overflow(count, dims[id], &count) || count > kMaxElements || dims[id] > kMaxElements) return;
      sizes.push_back(static_cast<executorch::aten::SizesType>(dims[id]));
    }
    if (sizes.size() > 16) return;  // ExecuTorch's limit
    std::vector<uint8_t> bytes(static_cast<size_t>(count) * keepdim::dtype_bytes(spec.dtype), 1);
    tensors.push_back(make_tensor_ptr(std::move(sizes), std::move(bytes), {}, {}, to_scalar_type(spec.dtype)));
    inputs.emplace_back(*tensors.back());
  }
  (void)module.forward(inputs);
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  executorch::runtime::runtime_init();
  keepdim::set_options({1, int64_t{256} << 20, int64_t{8} << 20});
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string file = add_trailer({reinterpret_cast<const char*>(data), size});
  const int descriptor = memfd_create("fuzz.pte", 0);
  if (descriptor < 0 || write(descriptor, file.data(), file.size()) != static_cast<ssize_t>(file.size())) return 0;
  auto module = keepdim::load("/proc/self/fd/" + std::to_string(descriptor));
  close(descriptor);
  if (!module.ok()) return 0;
  try {
    for (int64_t increment : {0, 3, 1}) call(**module, increment);
  } catch (const keepdim::Error&) {  // from parsing the contract above
  }
  return 0;
}
