// Matrix product with a constant weight of 16-bit floats, packed at load time: panels of kNR columns that keep the 16 bits, so
// that one product reads half of the bytes of f32. bf16 is stored in pairs along k, the operand of the dot product instruction of
// AVX-512 BF16. Without that instruction, and for rows of f32, a panel is widened in registers.
#include "ggml/kernels/copy_cast.h"
#include "ggml/kernels/gemm_microkernel.h"
#include "ggml/simd/float16.h"

namespace keepdim::ggml {
namespace {

constexpr int64_t kDepth16 = 768;  // k per slice of a panel, an even number

using Words = VectorOf<uint32_t>;

// The rows of one tile and a slice of a panel.
struct Tile16 {
  const char* const* rows;  // [height] the first element of each row that is multiplied
  const uint16_t* panel;
  int64_t depth;
  float* sum;  // [height, kNR]
  bool add;    // to `sum`
};

inline Words load_words(const uint16_t* x) { return load_vector(reinterpret_cast<const uint32_t*>(x)); }
inline Vector even_half(Words pairs) { return reinterpret_cast<Vector>(pairs << 16); }
inline Vector odd_half(Words pairs) { return reinterpret_cast<Vector>(pairs & 0xffff0000u); }

inline uint32_t read_pair(const char* x) {
  uint32_t pair;
  std::memcpy(&pair, x, sizeof(pair));
  return pair;
}
inline uint32_t read_last(const char* x) {  // the last element of an odd number
  uint16_t one;
  std::memcpy(&one, x, sizeof(one));
  return one;
}

// sum[r, c] (+)= sum over k of rows[r][k] * panel[k, c]. Several accumulators for few rows hide the latency.
template <int height, class Step>
void multiply_tile(const Tile16& t, int64_t steps, Step&& step) {
  constexpr int sums = height >= 4 ? 1 : height >= 2 ? 2 : 4;
  Vector acc[sums][height][2] = {};
  int64_t k = 0;
  for (; k + sums <= steps; k += sums)
#pragma GCC unroll 4
    for (int i = 0; i < sums; ++i) step(acc[i], k + i);
  for (; k < steps; ++k) step(acc[0], k);
#pragma GCC unroll 16
  for (int r = 0; r < height; ++r)
    for (int v = 0; v < 2; ++v) {
#pragma GCC unroll 4
      for (int i = 1; i < sums; ++i) acc[0][r][v] += acc[i][r][v];
      float* to = t.sum + r * kNR + v * kVector;
      store(to, t.add ? acc[0][r][v] + load(to) : acc[0][r][v]);
    }
}

// Rows of f32 times bf16.
template <int height>
void multiply_bf16(const Tile16& t) {
  const auto step = [&](Vector(&acc)[height][2], int64_t pair) {
    const Words w[2] = {load_words(t.panel + pair * 2 * kNR), load_words(t.panel + pair * 2 * kNR + 2 * kVector)};
    const auto add = [&](int64_t k, Vector first, Vector second) {
#pragma GCC unroll 16
      for (int r = 0; r < height; ++r) {
        const float x = reinterpret_cast<const float*>(t.rows[r])[k];
        acc[r][0] += x * first;
        acc[r][1] += x * second;
      }
    };
    add(2 * pair, even_half(w[0]), even_half(w[1]));
    if (2 * pair + 1 < t.depth) add(2 * pair + 1, odd_half(w[0]), odd_half(w[1]));
  };
  multiply_tile<height>(t, (t.depth + 1) / 2, step);
}

#ifdef __AVX512BF16__
// Rows of bf16 times bf16: products are exact, sums are f32.
template <int height>
void multiply_bf16_rows(const Tile16& t) {
  const auto add = [&](Vector(&acc)[height][2], int64_t pair, auto&& read) {
    const Words w[2] = {load_words(t.panel + pair * 2 * kNR), load_words(t.panel + pair * 2 * kNR + 2 * kVector)};
#pragma GCC unroll 16
    for (int r = 0; r < height; ++r) {
      const Words x = Words{} + read(t.rows[r] + 4 * pair);
      for (int v = 0; v < 2; ++v)
        acc[r][v] = reinterpret_cast<Vector>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(acc[r][v]),
                                                              reinterpret_cast<__m512bh>(w[v]), reinterpret_cast<__m512bh>(x)));
    }
  };
  const int64_t pairs = t.depth / 2;
  const auto step = [&](Vector(&acc)[height][2], int64_t pair) { add(acc, pair, read_pair); };
  const auto step_to_odd = [&](Vector(&acc)[height][2], int64_t pair) {
    pair < pairs ? add(acc, pair, read_pair) : add(acc, pair, read_last);
  };
  if (t.depth % 2)
    multiply_tile<height>(t, pairs + 1, step_to_odd);
  else
    multiply_tile<height>(t, pairs, step);
}
#endif

inline Vector widen_f16(const uint16_t* x) {
#if defined(__AVX512F__)
  return _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));  // gcc 12 warns of the plain one
#else
  alignas(64) float y[kVector];
  for (int i = 0; i < kVector; i += kGroup) read_group(y + i, reinterpret_cast<const Float16*>(x) + i);
  return load(y);
#endif
}

// Rows of f32 times f16, which is stored as [k, kNR].
template <int height>
void multiply_f16(const Tile16& t) {
  const auto step = [&](Vector(&acc)[height][2], int64_t k) {
    const Vector w[2] = {widen_f16(t.panel + k * kNR), widen_f16(t.panel + k * kNR + kVector)};
    __builtin_prefetch(t.panel + (k + 2 * kAhead) * kNR);
#pragma GCC unroll 16
    for (int r = 0; r < height; ++r) {
      const float x = reinterpret_cast<const float*>(t.rows[r])[k];
      for (int v = 0; v < 2; ++v) acc[r][v] += x * w[v];
    }
  };
  multiply_tile<height>(t, t.depth, step);
}

using Multiply16 = void (*)(const Tile16&);

template <int... i>
Multiply16 multiply_for(DType weight, DType rows, int64_t height, std::integer_sequence<int, i...>) {
  static constexpr Multiply16 f16[] = {multiply_f16<i + 1>...}, bf16[] = {multiply_bf16<i + 1>...};
#ifdef __AVX512BF16__
  static constexpr Multiply16 bf16_rows[] = {multiply_bf16_rows<i + 1>...};
  if (rows == DType::bf16) return bf16_rows[height - 1];
#endif
  return weight == DType::bf16 ? bf16[height - 1] : f16[height - 1];
}

// One panel of some rows: all slices of k, then bias, activation and rounding.
class Panel16 {
 public:
  Panel16(const MatmulJob& job, const Rows& rows)
      : job_(job), rows_(rows), a_(job, rows, job.a_step, rows.count * kNR), write_(converter(DType::f32, job.result)) {}

  void run(const PanelSpan& p) {
    if (!a_.gather(static_cast<const char*>(job_.data[1]), p.rows))
      return job_.fail(0, "out of memory for its rows. Free memory, or call with smaller sizes.");
    const auto* panel = reinterpret_cast<const uint16_t*>(job_.packed) + p.first * padded_depth(job_.type, job_.k);
    const int64_t slices = std::max<int64_t>(1, (job_.k + kDepth16 - 1) / kDepth16);
    for (int64_t s = 0; s < slices; ++s) {
      const Span k{s * kDepth16, std::min(job_.k, (s + 1) * kDepth16)};
      float* sum = a_.reserved();
      for (int64_t r = p.rows.begin; r < p.rows.end; r += kMR) {
        const Span tile{r, std::min<int64_t>(r + kMR, p.rows.end)};
        multiply(panel + k.begin * kNR, tile, k, sum);
        if (s + 1 == slices) finish(p, tile, sum);
        sum += (tile.end - tile.begin) * kNR;
      }
    }
  }

  // Elements of a column in a panel.
  static int64_t padded_depth(DType weight, int64_t k) { return weight == DType::bf16 ? (k + 1) / 2 * 2 : k; }

 private:
  void multiply(const uint16_t* panel, Span tile, Span k, float* sum) {
    const auto [first, pitch] = a_.tile_rows(tile);
    const char* a[kMR];
    for (int64_t r = 0; r < tile.end - tile.begin; ++r) a[r] = first + r * pitch + k.begin * job_.a_step;
    const DType type = job_.a_step == 2 ? DType::bf16 : DType::f32;
    multiply_for(job_.type, type, tile.end - tile.begin,
                 std::make_integer_sequence<int, kMR>())({a, panel, k.end - k.begin, sum, k.begin > 0});
  }

  void finish(const PanelSpan& p, Span tile, float* sum) {
    const int64_t height = tile.end - tile.begin, width = static_cast<int64_t>(dtype_bytes(job_.result));
    if (job_.data[3]) {
      float bias[kNR] = {};
      std::memcpy(bias, static_cast<const float*>(job_.data[3]) + p.first, p.columns * sizeof(float));
      for (int64_t r = 0; r < height; ++r)
        for (int v = 0; v < kNR; v += kVector) store(sum + r * kNR + v, load(sum + r * kNR + v) + load(bias + v));
    }
    activate(job_, sum, kNR, height, kNR);
    for (int64_t r = 0; r < height; ++r) {
      char* y = static_cast<char*>(job_.data[0]) + (rows_[tile.begin + r] * job_.n + p.first) * width;
      write_(y, width, sum + r * kNR, sizeof(float), p.columns);
    }
  }

  const MatmulJob& job_;
  const Rows& rows_;
  GatheredRows a_;  // and sums [rows, kNR]
  const Convert write_;
};

void gemm_float16(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const MatmulJob*>(userdata);
  const Rows rows = parse_row_list(job, job.data[4], job.m);
  const auto row_bytes = job.n * static_cast<int64_t>(dtype_bytes(job.result));
  for_each_unlisted(rows, split_range(job.m, ith, nth),
                    [&](int64_t r) { std::memset(static_cast<char*>(job.data[0]) + r * row_bytes, 0, row_bytes); });
  if (rows.count == 0) return;
  Panel16 panel(job, rows);
  for_each_panel(job, rows.count, 2 * kBlock, kMR, ith, nth, [&](const PanelSpan& p, const int64_t*) { panel.run(p); });
}

}  // namespace

Kernel gemm_float16_kernel() { return gemm_float16; }

bool multiplies_bf16_rows() {
#ifdef __AVX512BF16__
  return true;
#else
  return false;
#endif
}

int64_t packed_float16_bytes(DType dtype, int64_t k, int64_t n) {
  return (n + kNR - 1) / kNR * kNR * Panel16::padded_depth(dtype, k) * static_cast<int64_t>(sizeof(uint16_t));
}

namespace {

// Index of element (k, column) in the packed weight.
int64_t packed_index(DType dtype, int64_t depth, int64_t k, int64_t column) {
  const int64_t panel = column / kNR * kNR * Panel16::padded_depth(dtype, depth);
  return panel + (dtype == DType::bf16 ? k / 2 * 2 * kNR + column % kNR * 2 + k % 2 : k * kNR + column % kNR);
}

}  // namespace

void pack_float16(uint16_t* packed, const uint16_t* weight, DType dtype, int64_t k, int64_t n) {
  std::memset(packed, 0, packed_float16_bytes(dtype, k, n));
  const int64_t step = packed_index(dtype, k, 2, 0);
  for (int64_t c = 0; c < n; ++c) {
    const uint16_t* from = weight + c * k;
    uint16_t *even = packed + packed_index(dtype, k, 0, c), *odd = packed + packed_index(dtype, k, 1, c);
    for (int64_t pair = 0; pair < k / 2; ++pair) {
      even[pair * step] = from[2 * pair];
      odd[pair * step] = from[2 * pair + 1];
    }
    if (k % 2) even[k / 2 * step] = from[k - 1];
  }
}

void read_packed_float16(const uint16_t* packed, DType dtype, int64_t k, int64_t column, float* y) {
  for (int64_t i = 0; i < k; ++i) {
    const uint16_t bits = packed[packed_index(dtype, k, i, column)];
    y[i] = dtype == DType::bf16 ? widen(BFloat16{bits}) : widen(Float16{bits});
  }
}

}  // namespace keepdim::ggml
