// Rows of a table added up by bags of indices. An index or an offset out of range is an error of the call.
#include "sample.h"

#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

namespace keepdim::ggml {
namespace {

constexpr int kVectors = 4;      // of a row, that are added up in registers
constexpr int64_t kAhead = 12;  // rows that are fetched before they are needed

// The indices of one bag; nothing where its offsets are wrong.
Span range_of(const BagJob& job, int64_t bag) {
  const auto* offsets = static_cast<const int64_t*>(job.data[3]);
  const int64_t begin = offsets[bag], end = bag + 1 < job.offsets ? offsets[bag + 1] : job.count;
  if (bag == 0 && begin != 0) job.fail(0, "offset 0 is " + std::to_string(begin) + ", expected 0.");
  else if (begin < 0 || begin > end || end > job.count)
    job.fail(bag, "bag " + std::to_string(bag) + " is " + std::to_string(begin) + ".." + std::to_string(end) + " of " +
                      std::to_string(job.count) + " indices.");
  else return {begin, end};
  return {0, 0};
}

[[gnu::noinline, gnu::cold]] void out_of_range(const BagJob& job, int64_t position, int64_t index) {
  const std::string range = job.rows ? "out of range 0.." + std::to_string(job.rows - 1) : "not in an empty dim";
  job.fail(job.bags + position, "index " + std::to_string(index) + " is " + range + ".");
}

struct Half { uint16_t bits; };
struct Brain { uint16_t bits; };  // the upper half of a float

template <class S>
using Computed = std::conditional_t<std::is_same_v<S, double>, double, float>;

// A register of stored elements, in the type that they are computed in.
template <class S>
VectorOf<Computed<S>> read(const S* x) {
  if constexpr (std::is_same_v<S, Half>) {
#if defined(__AVX512F__)
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
#elif defined(__F16C__)
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
#else
    VectorOf<float> y;
    for (int i = 0; i < kVector; ++i) y[i] = ggml_fp16_to_fp32(x[i].bits);
    return y;
#endif
  } else if constexpr (std::is_same_v<S, Brain>) {
    typedef uint16_t Stored __attribute__((vector_size(kVector * sizeof(uint16_t)), aligned(2), may_alias));
    typedef uint32_t Wide __attribute__((vector_size(kVector * sizeof(uint32_t))));
    return bits<VectorOf<float>>(__builtin_convertvector(*reinterpret_cast<const Stored*>(x), Wide) << 16);
  } else {
    return load_vector(x);
  }
}

// Adds up some columns of one bag's rows; `from` is that part of the table's first row. Gives how many rows there were.
template <bool largest, class S, class T = Computed<S>>
int64_t gather_rows(const BagJob& job, Span range, const S* from, int64_t n, VectorOf<T> (&acc)[kVectors]) {
  constexpr int lanes = Register<T>::count;
  const auto* indices = static_cast<const int64_t*>(job.data[2]);
  const auto* factors = static_cast<const T*>(job.data[4]);
  const auto rows = static_cast<uint64_t>(job.rows);
  S room[kVectors * lanes] = {};
  int64_t used = 0;
  for (int64_t i = range.begin; i < range.end; ++i) {
    const int64_t index = indices[i];
    if (static_cast<uint64_t>(index) >= rows) {
      out_of_range(job, i, index);
      break;
    }
    if (i + kAhead < job.count) {
      const auto next = static_cast<uint64_t>(indices[i + kAhead]);
      const auto* soon = reinterpret_cast<const char*>(from + (next < rows ? next : 0) * job.columns);
      for (int64_t line = 0; line < n * static_cast<int64_t>(sizeof(S)); line += 64) __builtin_prefetch(soon + line);
    }
    if (index == job.padding) continue;
    const S* row = from + index * job.columns;
    if (n < kVectors * lanes) {
      std::copy(row, row + n, room);
      row = room;
    }
    const T factor = factors ? factors[i] : T(1);
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const VectorOf<T> x = read(row + v * lanes);
      if constexpr (largest) acc[v] = used ? (x > acc[v] ? x : acc[v]) : x;  // as torch: only a first NaN stays
      else acc[v] += factor * x;
    }
    ++used;
  }
  return used;
}

template <class S>
void bags(ggml_tensor*, int ith, int nth, void* userdata) {
  using T = Computed<S>;
  const auto& job = *static_cast<const BagJob*>(userdata);
  constexpr int64_t lanes = Register<T>::count, width = kVectors * lanes;
  const int64_t parts = (job.columns + width - 1) / width;
  const Span span = share(job.bags * parts, ith, nth);
  for (int64_t unit = span.begin; unit < span.end; ++unit) {
    const int64_t bag = unit / parts, column = unit % parts * width, n = std::min(width, job.columns - column);
    const Span range = range_of(job, bag);
    const S* from = static_cast<const S*>(job.data[1]) + column;
    VectorOf<T> acc[kVectors] = {};
    const int64_t used = job.bag == Bag::max ? gather_rows<true>(job, range, from, n, acc)
                                             : gather_rows<false>(job, range, from, n, acc);
    const bool last = bag == job.bags - 1 && range.end > range.begin;
    const int64_t divisor = used + (last ? job.count - range.end : 0);  // torch counts what lies behind the last end
    T result[width];
    for (int v = 0; v < kVectors; ++v)
      store_vector(result + v * lanes, job.bag == Bag::mean && divisor ? acc[v] / static_cast<T>(divisor) : acc[v]);
    S* y = static_cast<S*>(job.data[0]) + bag * job.columns + column;
    job.write(y, sizeof(S), result, sizeof(T), n);
  }
}

}  // namespace

Kernel bag_kernel(DType dtype) {
  switch (dtype) {
    case DType::f32: return bags<float>;
    case DType::f64: return bags<double>;
    case DType::f16: return bags<Half>;
    case DType::bf16: return bags<Brain>;
    default: return nullptr;
  }
}

}  // namespace keepdim::ggml
