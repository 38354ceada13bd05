// An app without Python: keepdim_call model.pte inputs.bin results.bin [threads calls]
// Loads the file, calls it with each set of inputs and writes what it gives; with threads, as many of them call at once and
// every result is compared with the first. The formats are those of tests/apps.py.
#include <keepdim.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include <executorch/extension/tensor/tensor_ptr.h>

namespace {

using executorch::aten::ScalarType;
using executorch::aten::SizesType;
using executorch::extension::make_tensor_ptr;
using executorch::extension::TensorPtr;
using executorch::runtime::EValue;

struct Inputs {
  std::vector<EValue> values;
  std::vector<TensorPtr> held;
};

class Reader {
 public:
  explicit Reader(const char* path) {
    std::ifstream file(path, std::ios::binary);
    bytes_.assign(std::istreambuf_iterator<char>(file), {});
  }
  template <typename T>
  T take() {
    T value;
    std::memcpy(&value, bytes_.data() + at_, sizeof(T));
    at_ += sizeof(T);
    return value;
  }
  std::vector<uint8_t> take_bytes(size_t count) {
    std::vector<uint8_t> out(bytes_.begin() + static_cast<ptrdiff_t>(at_), bytes_.begin() + static_cast<ptrdiff_t>(at_ + count));
    at_ += count;
    return out;
  }

 private:
  std::vector<char> bytes_;
  size_t at_ = 0;
};

// Kind, then: a tensor's dtype, rank, sizes, bytes; or a number.
EValue read_value(Reader& in, std::vector<TensorPtr>& held) {
  switch (in.take<uint8_t>()) {
    case 't': {
      const auto dtype = static_cast<ScalarType>(in.take<int8_t>());
      std::vector<SizesType> sizes(in.take<uint32_t>());
      for (SizesType& size : sizes) size = static_cast<SizesType>(in.take<int64_t>());
      const auto bytes = in.take<uint64_t>();
      held.push_back(make_tensor_ptr(std::move(sizes), in.take_bytes(bytes), {}, {}, dtype));
      return EValue(*held.back());
    }
    case 'i': return EValue(in.take<int64_t>());
    case 'd': return EValue(in.take<double>());
    case 'b': return EValue(in.take<int64_t>() != 0);
    default: return EValue();
  }
}

// The same, as text of bytes.
std::string text_of(const EValue& value) {
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

// 0 and the results, or 1 and the sentence; each with its length.
std::string call(keepdim::Module& module, const std::vector<EValue>& inputs) {
  const auto results = module.forward(inputs);
  std::string body;
  if (results.ok()) {
    for (const EValue& value : *results) body += text_of(value);
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
  std::vector<Inputs> sets(in.take<uint32_t>());
  for (Inputs& set : sets) {
    const auto count = in.take<uint32_t>();
    for (uint32_t i = 0; i < count; ++i) set.values.push_back(read_value(in, set.held));
  }
  std::vector<std::string> first;
  for (const Inputs& set : sets) first.push_back(call(**module, set.values));
  std::ofstream out(argv[3], std::ios::binary);
  for (const std::string& result : first) out.write(result.data(), static_cast<std::streamsize>(result.size()));
  if (argc == 4) return 0;

  // Every thread has a module of its own, and all share one.
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
        if (call(**own, sets[k].values) != first[k]) ++wrong;
        if (call(**module, sets[k].values) != first[k]) ++wrong;
      }
    });
  }
  for (std::thread& thread : all) thread.join();
  std::printf("%d threads, %d calls each, %d wrong\n", threads, calls, wrong.load());
  return wrong > 0 ? 1 : 0;
}
