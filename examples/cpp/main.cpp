// Runs a .pte at the sizes given, without Python:
//   runner model.pte 1x1x64 1x17x64 8x256x64
// The file is checked before it is used: a damaged or forged one is refused. A call outside the contract is refused in a
// sentence, and the next call works.
#include <executorch/extension/tensor/tensor_ptr.h>
#include <keepdim/keepdim.h>

#include <cstdio>
#include <numeric>
#include <sstream>
#include <string>
#include <vector>

using executorch::aten::SizesType;
using executorch::aten::Tensor;
using executorch::extension::make_tensor_ptr;

namespace {

constexpr int64_t kMostElements = 1 << 28;  // of an input: 1 GiB

// "1x17x64"; empty where a part is not a size, or the whole is too large.
std::vector<SizesType> parse(const std::string& text) {
  std::vector<SizesType> sizes;
  int64_t elements = 1;
  std::stringstream stream(text + "x");
  for (std::string part; std::getline(stream, part, 'x');) {
    if (part.empty() || part.size() > 9 || part.find_first_not_of("0123456789") != std::string::npos) return {};
    sizes.push_back(std::stoi(part));
    elements *= sizes.back();
    if (elements > kMostElements) return {};
  }
  return sizes;
}

// The same numbers for the same sizes, so that anybody can check the results.
std::vector<float> numbers(const std::vector<SizesType>& sizes) {
  std::vector<float> out(std::accumulate(sizes.begin(), sizes.end(), size_t{1}, std::multiplies<>()));
  for (size_t i = 0; i < out.size(); ++i) out[i] = (static_cast<float>(i % 13) - 6) / 8;
  return out;
}

void print(const std::string& size, const Tensor& result) {
  if (result.scalar_type() != executorch::aten::ScalarType::Float || result.numel() == 0) {
    std::printf("%s -> %d elements\n", size.c_str(), static_cast<int>(result.numel()));
    return;
  }
  std::printf("%s -> ", size.c_str());
  for (ssize_t d = 0; d < result.dim(); ++d) std::printf(d > 0 ? "x%d" : "%d", static_cast<int>(result.size(d)));
  const float* data = result.const_data_ptr<float>();
  double sum = 0;
  for (ssize_t i = 0; i < result.numel(); ++i) sum += data[i];
  std::printf(": first %.6f, last %.6f, mean %.6f\n", data[0], data[result.numel() - 1], sum / result.numel());
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: %s model.pte 1x17x64 [sizes ...]\n", argv[0]);
    return 2;
  }
  const auto module = keepdim::load(argv[1]);  // weights stay in the file until they are read
  if (!module.ok()) {
    std::fprintf(stderr, "%s\n", keepdim::last_error().c_str());
    return 1;
  }
  int refused = 0;
  for (int i = 2; i < argc; ++i) {
    const std::vector<SizesType> sizes = parse(argv[i]);
    if (sizes.empty()) {
      std::fprintf(stderr, "%s: is not a size as in 1x17x64, or has more than %lld elements\n", argv[i],
                   static_cast<long long>(kMostElements));
      return 2;
    }
    const auto input = make_tensor_ptr(sizes, numbers(sizes));
    const auto results = (*module)->forward({input});
    if (results.ok() && results->size() > 0 && (*results)[0].isTensor()) {
      print(argv[i], (*results)[0].toTensor());
    } else if (results.ok()) {
      std::printf("%s: ran, its first result is not a tensor\n", argv[i]);
    } else {
      std::printf("%s: refused: %s\n", argv[i], keepdim::last_error().c_str());
      ++refused;
    }
  }
  return refused > 0 ? 1 : 0;
}
