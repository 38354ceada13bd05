// embedding_bag: sum, mean or max of table rows per bag of indices. An index or offset out of range fails the call.
#include "ggml/kernels/gather_scatter.h"
#include "ggml/kernels/gemm_microkernel.h"

#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

namespace keepdim::ggml {
namespace {

constexpr int kVectors = 4;                // vectors of a row accumulated in registers
constexpr int64_t kPrefetchDistance = 12;  // in rows

// Range of the indices of one bag; empty (with an error) if its offsets are invalid.
Span bag_range(const EmbeddingBagJob& job, int64_t bag) {
  const auto* offsets = static_cast<const int64_t*>(job.data[3]);
  const int64_t begin = offsets[bag], end = bag + 1 < job.offsets ? offsets[bag + 1] : job.count;
  if (bag == 0 && begin != 0)
    job.fail(0, "offset 0 is " + std::to_string(begin) + ", expected 0.");
  else if (begin < 0 || begin > end || end > job.count)
    job.fail(bag, "bag " + std::to_string(bag) + " is " + std::to_string(begin) + ".." + std::to_string(end) + " of " +
                      std::to_string(job.count) + " indices.");
  else
    return {begin, end};
  return {0, 0};
}

[[gnu::noinline, gnu::cold]] void out_of_range(const EmbeddingBagJob& job, int64_t position, int64_t index) {
  const std::string range = job.rows ? "out of range 0.." + std::to_string(job.rows - 1) : "not in an empty dim";
  job.fail(job.bags + position, "index " + std::to_string(index) + " is " + range + ".");
}

struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};  // the upper 16 bits of a float

template <class S>
using ComputeType = std::conditional_t<std::is_same_v<S, double>, double, float>;

// Loads a vector of storage type S in the compute type.
template <class S>
VectorOf<ComputeType<S>> read(const S* x) {
  if constexpr (std::is_same_v<S, Float16>) {
#if defined(__AVX512F__)
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
#elif defined(__F16C__)
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
#else
    VectorOf<float> y;
    for (int i = 0; i < kVector; ++i) y[i] = ggml_fp16_to_fp32(x[i].bits);
    return y;
#endif
  } else if constexpr (std::is_same_v<S, BFloat16>) {
    typedef uint16_t Storage __attribute__((vector_size(kVector * sizeof(uint16_t)), aligned(2), may_alias));
    typedef uint32_t Wide __attribute__((vector_size(kVector * sizeof(uint32_t))));
    return bit_cast<VectorOf<float>>(__builtin_convertvector(*reinterpret_cast<const Storage*>(x), Wide) << 16);
  } else {
    return load_vector(x);
  }
}

// Reduces n columns of the rows of one bag into acc; `from` is the first of those columns in table row 0. Returns the number of
// rows used. `whole`: n is the width of acc; `weighted`: rows have factors.
template <bool is_max, bool whole, bool weighted, class S, class T = ComputeType<S>>
int64_t gather_rows(const EmbeddingBagJob& job, Span range, const S* from, int64_t n, VectorOf<T> (&acc)[kVectors]) {
  constexpr int lanes = Register<T>::count;
  const auto* indices = static_cast<const int64_t*>(job.data[2]);
  const auto* factors = static_cast<const T*>(job.data[4]);
  const auto rows = static_cast<uint64_t>(job.rows);
  const int64_t columns = job.columns, count = job.count, padding = job.padding;
  constexpr int64_t bytes = kVectors * lanes * sizeof(S);
  S buffer[kVectors * lanes] = {};
  int64_t used = 0;
  for (int64_t i = range.begin; i < range.end; ++i) {
    const int64_t index = indices[i];
    if (static_cast<uint64_t>(index) >= rows) {
      out_of_range(job, i, index);
      break;
    }
    if (i + kPrefetchDistance < count) {
      const auto next = static_cast<uint64_t>(indices[i + kPrefetchDistance]);
      const auto* prefetched = reinterpret_cast<const char*>(from + (next < rows ? next : 0) * columns);
#pragma GCC unroll 8
      for (int64_t line = 0; line < (whole ? bytes : n * static_cast<int64_t>(sizeof(S))); line += 64)
        __builtin_prefetch(prefetched + line);
    }
    if (index == padding) continue;
    const S* row = from + index * columns;
    if constexpr (!whole) {
      std::copy(row, row + n, buffer);
      row = buffer;
    }
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const VectorOf<T> x = read(row + v * lanes);
      if constexpr (is_max)
        acc[v] = used ? (x > acc[v] ? x : acc[v]) : x;  // as in torch: only a NaN in the first row propagates
      else if constexpr (weighted)
        acc[v] += factors[i] * x;
      else
        acc[v] += x;
    }
    ++used;
  }
  return used;
}

template <class S>
void embedding_bag(ggml_tensor*, int ith, int nth, void* userdata) {
  using T = ComputeType<S>;
  const auto& job = *static_cast<const EmbeddingBagJob*>(userdata);
  constexpr int64_t lanes = Register<T>::count, width = kVectors * lanes;
  const int64_t parts = (job.columns + width - 1) / width;
  const Span span = split_range(job.bags * parts, ith, nth);
  for (int64_t unit = span.begin; unit < span.end; ++unit) {
    const int64_t bag = unit / parts, column = unit % parts * width, n = std::min(width, job.columns - column);
    const Span range = bag_range(job, bag);
    const S* from = static_cast<const S*>(job.data[1]) + column;
    VectorOf<T> acc[kVectors] = {};
    const auto gather = [&](auto whole) {
      if (job.mode == BagMode::max) return gather_rows<true, whole, false>(job, range, from, n, acc);
      return job.data[4] ? gather_rows<false, whole, true>(job, range, from, n, acc)
                         : gather_rows<false, whole, false>(job, range, from, n, acc);
    };
    const int64_t used = n == width ? gather(std::true_type()) : gather(std::false_type());
    const bool last = bag == job.bags - 1 && range.end > range.begin;
    const int64_t divisor = used + (last ? job.count - range.end : 0);  // as in torch: indices after the last offset count
    T result[width];
    for (int v = 0; v < kVectors; ++v)
      store_vector(result + v * lanes, job.mode == BagMode::mean && divisor ? acc[v] / static_cast<T>(divisor) : acc[v]);
    S* y = static_cast<S*>(job.data[0]) + bag * job.columns + column;
    job.write(y, sizeof(S), result, sizeof(T), n);
  }
}

}  // namespace

Kernel embedding_bag_kernel(DType dtype) {
  switch (dtype) {
    case DType::f32: return embedding_bag<float>;
    case DType::f64: return embedding_bag<double>;
    case DType::f16: return embedding_bag<Float16>;
    case DType::bf16: return embedding_bag<BFloat16>;
    default: return nullptr;
  }
}

}  // namespace keepdim::ggml
