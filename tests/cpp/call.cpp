// An app without Python: keepdim_call model.pte inputs.bin results.bin [threads calls]
// Loads the file, calls it with each set of inputs and writes the results. With threads, that many call it concurrently, and
// every result is compared with the first one. The formats are those of tests/support/apps.py.
#include <executorch/extension/tensor/tensor_ptr.h>
#include <keepdim/keepdim.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

namespace {

using executorch::aten::ScalarType;
using executorch::aten::SizesType;
using executorch::extension::make_tensor_ptr;
using executorch::extension::TensorPtr;
using executorch::runtime::EValue;

struct Inputs {
  std::vector<EValue> values;
  std::vector<TensorPtr> tensors;
};

class Reader {
 public:
  explicit Reader(const char* path) {
    std::ifstream file(path, std::ios::binary);
    bytes_.assign(std::istreambuf_iterator<char>(file), {});
  }
  template <typename T>
  T read() {
    T value;
    std::memcpy(&value, bytes_.data() + offset_, sizeof(T));
    offset_ += sizeof(T);
    return value;
  }
  std::vector<uint8_t> read_bytes(size_t count) {
    std::vector<uint8_t> out(bytes_.begin() + static_cast<ptrdiff_t>(offset_),
                             bytes_.begin() + static_cast<ptrdiff_t>(offset_ + count));
    offset_ += count;
    return out;
  }

 private:
  std::vector<char> bytes_;
  size_t offset_ = 0;
};

// Format: kind, then dtype, rank, sizes and bytes of a tensor, or a number.
EValue read_value(Reader& in, std::vector<TensorPtr>& tensors) {
  switch (in.read<uint8_t>()) {
    case 't': {
      const auto dtype = static_cast<ScalarType>(in.read<int8_t>());
      std::vector<SizesType> sizes(in.read<uint32_t>());
      for (SizesType& size : sizes) size = static_cast<SizesType>(in.read<int64_t>());
      const auto bytes = in.read<uint64_t>();
      tensors.push_back(make_tensor_ptr(std::move(sizes), in.read_bytes(bytes), {}, {}, dtype));
      return EValue(*tensors.back());
    }
    case 'i': return EValue(in.read<int64_t>());
    case 'd': return EValue(in.read<double>());
    case 'b': return EValue(in.read<int64_t>() != 0);
    default: return EValue();
  }
}

// Writes a value in the same format.
std::string serialise(const EValue& value) {
  std::string out;
  const auto put = [&](const auto& number) { out.append(reinterpret_cast<const char*>(&number), sizeof(number)); };
  if (value.isTensor()) {
    const auto& t = value.toTensor();
    put('t'), put(static_cast<int8_t>(t.scalar_type())), put(static_cast<uint32_t>(t.dim()));
    for (ssize_t d = 0; d < t.dim(); ++d) put(static_cast<int64_t>(t.size(d)));
    put(static_cast<uint64_t>(t.nbytes()));
    if (t.nbytes() > 0) out.append(static_cast<const char*>(t.const_data_ptr()), t.nbytes());
  } else if (value.isInt()) {
    put('i'), put(value.toInt());
  } else if (value.isDouble()) {
    put('d'), put(value.toDouble());
  } else if (value.isBool()) {
    put('b'), put(static_cast<int64_t>(value.toBool()));
  } else {
    put('n');
  }
  return out;
}

// 0 and the results, or 1 and the error message; with its length.
std::string call(keepdim::Module& module, const std::vector<EValue>& inputs) {
  const auto results = module.forward(inputs);
  std::string body;
  if (results.ok()) {
    for (const EValue& value : *results) body += serialise(value);
  } else {
    body = keepdim::last_error();
  }
  const uint64_t length = body.size();
  std::string out(1, results.ok() ? '\0' : '\1');
  out.append(reinterpret_cast<const char*>(&length), sizeof(length));
  return out + body;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4 && argc != 6) {
    std::fprintf(stderr, "usage: %s model.pte inputs.bin results.bin [threads calls]\n", argv[0]);
    return 2;
  }
  auto module = keepdim::load(argv[1]);
  if (!module.ok()) {
    std::fprintf(stderr, "%s\n", keepdim::last_error().c_str());
    return 1;
  }
  Reader in(argv[2]);
  std::vector<Inputs> sets(in.read<uint32_t>());
  for (Inputs& set : sets) {
    const auto count = in.read<uint32_t>();
    for (uint32_t i = 0; i < count; ++i) set.values.push_back(read_value(in, set.tensors));
  }
  std::vector<std::string> expected;
  for (const Inputs& set : sets) expected.push_back(call(**module, set.values));
  std::ofstream out(argv[3], std::ios::binary);
  for (const std::string& result : expected) out.write(result.data(), static_cast<std::streamsize>(result.size()));
  if (argc == 4) return 0;

  // Every thread calls its own module and a shared one.
  const int threads = std::stoi(argv[4]), calls = std::stoi(argv[5]);
  std::atomic<int> wrong{0};
  std::vector<std::thread> all;
  for (int t = 0; t < threads; ++t) {
    all.emplace_back([&, t] {
      auto own = keepdim::load(argv[1]);
      if (!own.ok()) {
        ++wrong;
        return;
      }
      for (int c = 0; c < calls; ++c) {
        const size_t k = static_cast<size_t>(t + c) % sets.size();
        if (call(**own, sets[k].values) != expected[k]) ++wrong;
        if (call(**module, sets[k].values) != expected[k]) ++wrong;
      }
    });
  }
  for (std::thread& thread : all) thread.join();
  std::printf("%d threads, %d calls each, %d wrong\n", threads, calls, wrong.load());
  return wrong > 0 ? 1 : 0;
}
