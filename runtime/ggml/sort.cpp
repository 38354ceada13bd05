// Sorting along rows: keys that order as unsigned numbers, each with its position, so that equals keep their order.
// A NaN is above all numbers, as in torch.
#include <array>

#include "loops.h"

namespace keepdim::ggml {
namespace {

constexpr int64_t kShort = 512;  // rows up to this size are compared, longer ones counted by digits
constexpr int kDigit = 11;       // bits

// A 32-bit key and its position in one number: the position decides between equals.
struct Narrow {
  uint64_t both;
  static constexpr int bits = 32;

  Narrow() = default;
  Narrow(uint64_t key, int64_t position) : both(key << 32 | static_cast<uint32_t>(position)) {}
  uint64_t key() const { return both >> 32; }
  int64_t position() const { return static_cast<uint32_t>(both); }
  bool operator<(const Narrow& o) const { return both < o.both; }
};

struct Wide {
  uint64_t number;
  int64_t place;
  static constexpr int bits = 64;

  Wide() = default;
  Wide(uint64_t key, int64_t position) : number(key), place(position) {}
  uint64_t key() const { return number; }
  int64_t position() const { return place; }
  bool operator<(const Wide& o) const { return number != o.number ? number < o.number : place < o.place; }
};

template <class T>
using KeyOf = std::conditional_t<sizeof(T) == 4, Narrow, Wide>;

// Numbers in the order of T; both zeros are one, and all NaNs.
template <class T>
auto ordered(T x) {
  using U = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
  constexpr U top = U(1) << (sizeof(T) * 8 - 1);
  if constexpr (std::is_integral_v<T>) return static_cast<U>(static_cast<U>(x) ^ top);
  else {
    const U u = bits<U>(x + T(0));
    return x != x ? ~U(0) : static_cast<U>(u & top ? ~u : u | top);
  }
}

template <class T>
void make_keys(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const SortJob*>(userdata);
  const T* x = static_cast<const T*>(job.data[1]);
  auto* y = static_cast<KeyOf<T>*>(job.data[0]);
  const Span rows = share(job.rows, ith, nth);
  for (int64_t r = rows.begin; r < rows.end; ++r)
    for (int64_t i = 0, at = r * job.size; i < job.size; ++i, ++at) {
      const auto key = ordered(x[at]);
      y[at] = KeyOf<T>(job.descending ? static_cast<decltype(key)>(~key) : key, i);
    }
}

// By digits, the last first: each pass keeps the order of the one before. Digits that are all the same are left out.
template <class Key>
const Key* sort_digits(Key* keys, Key* room, int64_t n) {
  constexpr int passes = (Key::bits + kDigit - 1) / kDigit;
  constexpr size_t values = size_t(1) << kDigit;
  const auto digit = [](const Key& k, int pass) { return k.key() >> (pass * kDigit) & (values - 1); };
  std::array<std::array<uint32_t, values>, passes> counts = {};
  for (int64_t i = 0; i < n; ++i)
    for (int pass = 0; pass < passes; ++pass) ++counts[pass][digit(keys[i], pass)];
  for (int pass = 0; pass < passes; ++pass) {
    auto& count = counts[pass];
    if (count[digit(keys[0], pass)] == static_cast<uint64_t>(n)) continue;
    uint32_t begin = 0;
    for (uint32_t& c : count) {
      const uint32_t here = c;
      c = begin;
      begin += here;
    }
    for (int64_t i = 0; i < n; ++i) room[count[digit(keys[i], pass)]++] = keys[i];
    std::swap(keys, room);
  }
  return keys;
}

template <class T>
void sort_rows(ggml_tensor*, int ith, int nth, void* userdata) {
  using Key = KeyOf<T>;
  const auto& job = *static_cast<const SortJob*>(userdata);
  const int64_t n = job.size, k = job.taken;
  int64_t* y = static_cast<int64_t*>(job.data[0]);
  Key* all = static_cast<Key*>(job.data[1]);
  const Span rows = share(job.rows, ith, nth);
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    Key* keys = all + r * n;
    const Key* sorted = keys;
    if (k < n / 8) {
      std::nth_element(keys, keys + k, keys + n);
      std::sort(keys, keys + k);
    } else if (sort_needs_room(n)) {
      sorted = sort_digits(keys, all + (job.rows + r) * n, n);
    } else {
      std::sort(keys, keys + n);
    }
    for (int64_t i = 0; i < k; ++i) y[r * k + i] = sorted[i].position();
  }
}

template <class Visit>
auto by_type(DType dtype, Visit&& visit) {
  switch (dtype) {
    case DType::f64: return visit(double());
    case DType::i64: return visit(int64_t());
    case DType::i32: return visit(int32_t());
    default: return visit(float());
  }
}

}  // namespace

int64_t sort_bytes(DType dtype) {
  return by_type(dtype, [](auto x) { return static_cast<int64_t>(sizeof(KeyOf<decltype(x)>)); });
}

bool sort_needs_room(int64_t size) { return size > kShort; }

Kernel sort_keys_kernel(DType dtype) {
  return by_type(dtype, [](auto x) -> Kernel { return make_keys<decltype(x)>; });
}

Kernel sort_kernel(DType dtype) {
  return by_type(dtype, [](auto x) -> Kernel { return sort_rows<decltype(x)>; });
}

}  // namespace keepdim::ggml
