// Stable argsort along rows: elements are mapped to unsigned keys with their position as tie-breaker. NaN sorts last, as in
// torch.
#include "ggml/kernels/sort.h"

#include <array>

#include "ggml/kernels/strided_loop.h"

namespace keepdim::ggml {
namespace {

constexpr int64_t kMaxComparisonSort = 512;  // longer rows use radix sort
constexpr int kRadixBits = 11;               // bits per radix digit

// A 32-bit key and its position packed into one integer.
struct NarrowKey {
  uint64_t packed;
  static constexpr int bits = 32;

  NarrowKey() = default;
  NarrowKey(uint64_t key, int64_t position) : packed(key << 32 | static_cast<uint32_t>(position)) {}
  uint64_t key() const { return packed >> 32; }
  int64_t position() const { return static_cast<uint32_t>(packed); }
  bool operator<(const NarrowKey& o) const { return packed < o.packed; }
};

struct WideKey {
  uint64_t sort_key;
  int64_t index;
  static constexpr int bits = 64;

  WideKey() = default;
  WideKey(uint64_t key, int64_t position) : sort_key(key), index(position) {}
  uint64_t key() const { return sort_key; }
  int64_t position() const { return index; }
  bool operator<(const WideKey& o) const { return sort_key != o.sort_key ? sort_key < o.sort_key : index < o.index; }
};

template <class T>
using KeyOf = std::conditional_t<sizeof(T) == 4, NarrowKey, WideKey>;

// Maps T to unsigned integers in the same order; -0 equals +0, and all NaNs are equal.
template <class T>
auto sortable_bits(T x) {
  using U = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
  constexpr U top = U(1) << (sizeof(T) * 8 - 1);
  if constexpr (std::is_integral_v<T>)
    return static_cast<U>(static_cast<U>(x) ^ top);
  else {
    const U u = bit_cast<U>(x + T(0));
    return x != x ? ~U(0) : static_cast<U>(u & top ? ~u : u | top);
  }
}

template <class T>
void make_keys(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const SortJob*>(userdata);
  const T* x = static_cast<const T*>(job.data[1]);
  auto* y = static_cast<KeyOf<T>*>(job.data[0]);
  const Span rows = split_range(job.rows, ith, nth);
  for (int64_t r = rows.begin; r < rows.end; ++r)
    for (int64_t i = 0, at = r * job.size; i < job.size; ++i, ++at) {
      const auto key = sortable_bits(x[at]);
      y[at] = KeyOf<T>(job.descending ? static_cast<decltype(key)>(~key) : key, i);
    }
}

// LSD radix sort; a pass is skipped if all its digits are equal.
template <class Key>
const Key* radix_sort(Key* keys, Key* scratch, int64_t n) {
  constexpr int passes = (Key::bits + kRadixBits - 1) / kRadixBits;
  constexpr size_t buckets = size_t(1) << kRadixBits;
  const auto digit = [](const Key& k, int pass) { return k.key() >> (pass * kRadixBits) & (buckets - 1); };
  std::array<std::array<uint32_t, buckets>, passes> counts = {};
  for (int64_t i = 0; i < n; ++i)
    for (int pass = 0; pass < passes; ++pass) ++counts[pass][digit(keys[i], pass)];
  for (int pass = 0; pass < passes; ++pass) {
    auto& count = counts[pass];
    if (count[digit(keys[0], pass)] == static_cast<uint64_t>(n)) continue;
    uint32_t begin = 0;
    for (uint32_t& c : count) {
      const uint32_t digit_count = c;
      c = begin;
      begin += digit_count;
    }
    for (int64_t i = 0; i < n; ++i) scratch[count[digit(keys[i], pass)]++] = keys[i];
    std::swap(keys, scratch);
  }
  return keys;
}

// The k smallest keys, in order, at the beginning of the row. Only keys below the k-th smallest so far are kept: few of them.
template <class Key>
void select_smallest(Key* keys, int64_t n, int64_t k) {
  const int64_t most = 2 * k + 32;
  int64_t kept = std::min(n, most), i = kept;
  while (i < n) {
    std::nth_element(keys, keys + k - 1, keys + kept);
    kept = k;
    const Key limit = keys[k - 1];
    for (; i < n && kept < most; ++i)
      if (keys[i] < limit) keys[kept++] = keys[i];
  }
  std::partial_sort(keys, keys + k, keys + kept);
}

template <class T>
void sort_rows(ggml_tensor*, int ith, int nth, void* userdata) {
  using Key = KeyOf<T>;
  const auto& job = *static_cast<const SortJob*>(userdata);
  const int64_t n = job.size, k = job.top_k;
  int64_t* y = static_cast<int64_t*>(job.data[0]);
  Key* all = static_cast<Key*>(job.data[1]);
  const Span rows = split_range(job.rows, ith, nth);
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    Key* keys = all + r * n;
    const Key* sorted = keys;
    if (k > 0 && k < n / 8) {
      select_smallest(keys, n, k);
    } else if (sort_needs_scratch(n)) {
      sorted = radix_sort(keys, all + (job.rows + r) * n, n);
    } else {
      std::sort(keys, keys + n);
    }
    for (int64_t i = 0; i < k; ++i) y[r * k + i] = sorted[i].position();
  }
}

template <class Visit>
auto dispatch_dtype(DType dtype, Visit&& visit) {
  switch (dtype) {
    case DType::f64: return visit(double());
    case DType::i64: return visit(int64_t());
    case DType::i32: return visit(int32_t());
    default: return visit(float());
  }
}

}  // namespace

int64_t sort_key_bytes(DType dtype) {
  return dispatch_dtype(dtype, [](auto x) { return static_cast<int64_t>(sizeof(KeyOf<decltype(x)>)); });
}

bool sort_needs_scratch(int64_t size) { return size > kMaxComparisonSort; }

Kernel sort_keys_kernel(DType dtype) {
  return dispatch_dtype(dtype, [](auto x) -> Kernel { return make_keys<decltype(x)>; });
}

Kernel sort_kernel(DType dtype) {
  return dispatch_dtype(dtype, [](auto x) -> Kernel { return sort_rows<decltype(x)>; });
}

}  // namespace keepdim::ggml
