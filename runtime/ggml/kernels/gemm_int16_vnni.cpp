// Matrix product with a quantised weight in int16 on AVX-512 VNNI, for large m; K-quants and iq4 have gemm_int8.cpp. Activations
// are quantised to int16 with a scale per block of 32: the error is small compared with that of the weights, and it takes half
// the time of f32.
#include "ggml/kernels/gemm_microkernel.h"
#include "ggml/simd/dot_quant.h"

namespace keepdim::ggml {

#ifdef KEEPDIM_INT16_GEMM
namespace {

constexpr int64_t kRows = 6;    // rows of the microkernel: its int32 and f32 accumulators fill the registers
constexpr int64_t kBlocks = 8;  // blocks along k per panel, which fits in the L1 cache
constexpr int64_t kPairs = kBlock32 / 2;

// kNR columns of the weight: pairs of int16 along k, and the scale and minimum of each block and column.
struct alignas(64) WeightPanel {
  int16_t q[kBlocks * kPairs][kNR][2];  // [block * pair, column, 2]
  float scale[kBlocks][kNR], min[kBlocks][kNR];
};

// Unpacks `blocks` blocks of up to kNR weight rows into a panel, padded with zeros.
template <class Block>
void read_columns(WeightPanel& to, const char* w, int64_t pitch, int64_t blocks, int64_t columns) {
  constexpr int64_t row = kBlocks * kPairs + 16;  // padded, so that the rows map to different cache sets
  alignas(64) float pairs[8][row];                // pairs of int16 as 32-bit lanes
  for (int64_t first = 0; first < kNR; first += 8) {
    for (int64_t c = 0; c < 8; ++c) {
      const auto* block = reinterpret_cast<const Block*>(w + (first + c) * pitch);
      const bool in_range = first + c < columns;
      for (int64_t b = 0; b < blocks; ++b) {
        auto* pair = reinterpret_cast<__m256i*>(pairs[c] + b * kPairs);
        for (int half = 0; half < 2; ++half)
          _mm256_store_si256(pair + half, in_range ? _mm256_cvtepi8_epi16(unpack_half(block[b], half)) : _mm256_setzero_si256());
        to.scale[b][first + c] = in_range ? _cvtsh_ss(block[b].d) : 0;
        to.min[b][first + c] = in_range ? block_min(block[b]) : 0;
      }
    }
    for (int64_t p = 0; p < blocks * kPairs; p += 8) transpose(pairs[0] + p, row, reinterpret_cast<float*>(to.q[p][first]), kNR);
  }
}

// Rows of quantised activations: int16 values, and a scale and a sum per block.
struct Int16Rows {
  const int16_t* q;
  const float *scale, *sum;
  int64_t pitch, blocks;  // row stride of q; row stride of scale and sum
};

struct Int16Microkernel {
  float* y;
  const float* init;
  int64_t y_pitch, init_pitch, blocks;
  Int16Rows x;
  const WeightPanel* w;
  __mmask16 mask[2];
};

template <int height, bool has_min>
void int16_microkernel(const Int16Microkernel& t) {
  __m512 sum[height][2] = {};
  for (int64_t b = 0; b < t.blocks; ++b) {
    __m512i dots[height][2] = {};
#pragma GCC unroll 4
    for (int64_t p = 0; p < kPairs; ++p) {
      const auto* w = reinterpret_cast<const __m512i*>(t.w->q[b * kPairs + p]);
      const __m512i first = _mm512_load_si512(w), second = _mm512_load_si512(w + 1);
#pragma GCC unroll 6
      for (int r = 0; r < height; ++r) {
        int32_t pair;
        std::memcpy(&pair, t.x.q + r * t.x.pitch + b * kBlock32 + 2 * p, sizeof(pair));
        const __m512i x = _mm512_set1_epi32(pair);
        dots[r][0] = _mm512_dpwssd_epi32(dots[r][0], first, x);
        dots[r][1] = _mm512_dpwssd_epi32(dots[r][1], second, x);
      }
    }
    const __m512 scale[2] = {_mm512_load_ps(t.w->scale[b]), _mm512_load_ps(t.w->scale[b] + 16)};
#pragma GCC unroll 6
    for (int r = 0; r < height; ++r) {
      const __m512 row_scale = _mm512_set1_ps(t.x.scale[r * t.x.blocks + b]);
      for (int v = 0; v < 2; ++v)
        sum[r][v] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[r][v]), _mm512_mul_ps(row_scale, scale[v]), sum[r][v]);
      if constexpr (has_min) {
        const __m512 row_sum = _mm512_set1_ps(t.x.sum[r * t.x.blocks + b]);
        for (int v = 0; v < 2; ++v) sum[r][v] = _mm512_fmadd_ps(row_sum, _mm512_load_ps(t.w->min[b] + 16 * v), sum[r][v]);
      }
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < height; ++r)
    for (int v = 0; v < 2; ++v) {
      const __m512 init = _mm512_maskz_loadu_ps(t.mask[v], t.init + r * t.init_pitch + 16 * v);
      _mm512_mask_storeu_ps(t.y + r * t.y_pitch + 16 * v, t.mask[v], _mm512_add_ps(sum[r][v], init));
    }
}

template <bool has_min, int... height>
void int16_microkernel(const Int16Microkernel& args, int64_t rows, std::integer_sequence<int, height...>) {
  static constexpr void (*kernels[])(const Int16Microkernel&) = {int16_microkernel<height + 1, has_min>...};
  kernels[rows - 1](args);
}

// The rows that a thread is working on, quantised into its scratch memory.
class QuantisedRows {
 public:
  explicit QuantisedRows(const MatmulJob& job) : job_(job), blocks_(job.k / kBlock32) {}

  // Returns false if the allocation failed.
  bool quantise(Span rows) {
    if (rows.begin == span_.begin && rows.end == span_.end) return true;
    const int64_t count = rows.end - rows.begin;
    float* workspace = scratch(count * (job_.k / 2 + 2 * blocks_));
    if (!workspace) return false;
    scale_ = workspace;
    sum_ = scale_ + count * blocks_;
    q_ = reinterpret_cast<int16_t*>(sum_ + count * blocks_);
    span_ = rows;
    for (int64_t r = 0; r < count; ++r) quantise_row(static_cast<const float*>(job_.data[1]) + (rows.begin + r) * job_.k, r);
    return true;
  }

  Int16Rows at(int64_t row, int64_t block) const {
    const int64_t r = row - span_.begin;
    return {q_ + r * job_.k + block * kBlock32, scale_ + r * blocks_ + block, sum_ + r * blocks_ + block, job_.k, blocks_};
  }

 private:
  void quantise_row(const float* x, int64_t r) {
    for (int64_t b = 0; b < blocks_; ++b, x += kBlock32) {
      const float max = max_abs(x), scale = max * (1.0f / 32767);
      const __m256 inverse = _mm256_set1_ps(max > 0 ? 32767 / max : 0);
      const __m256i first = scale_to_int16(x, inverse), second = scale_to_int16(x + 16, inverse);
      auto* to = reinterpret_cast<__m256i*>(q_ + r * job_.k + b * kBlock32);
      _mm256_storeu_si256(to, first);
      _mm256_storeu_si256(to + 1, second);
      const __m256i ones = _mm256_set1_epi16(1);
      const __m256i pair_sums = _mm256_add_epi32(_mm256_madd_epi16(first, ones), _mm256_madd_epi16(second, ones));
      scale_[r * blocks_ + b] = scale;
      sum_[r * blocks_ + b] = scale * horizontal_sum(_mm256_cvtepi32_ps(pair_sums));
    }
  }

  const MatmulJob& job_;
  const int64_t blocks_;
  Span span_{0, 0};
  float *scale_ = nullptr, *sum_ = nullptr;
  int16_t* q_ = nullptr;
};

template <class Block>
void gemm_int16(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const MatmulJob*>(userdata);
  const int64_t blocks = job.k / kBlock32;
  static constexpr float zeros[kNR] = {};
  QuantisedRows rows(job);
  for_each_panel(job, job.m, 4 * kBlock, kRows, ith, nth, [&](const PanelSpan& p, const int64_t* offset) {
    if (!rows.quantise(p.rows)) return job.fail(0, "out of memory for its rows. Free memory, or call with smaller sizes.");
    WeightPanel columns;
    const auto lanes = [&](int64_t n) { return static_cast<__mmask16>(n >= 16 ? 0xffff : n <= 0 ? 0 : (1 << n) - 1); };
    Int16Microkernel args{};
    args.y_pitch = job.n;
    args.w = &columns;
    args.mask[0] = lanes(p.columns), args.mask[1] = lanes(p.columns - 16);
    float* const y = at<float>(job.data[0], offset[0]);
    const char* const w = at<char>(job.data[2], offset[2]);
    const float* const bias = job.data[3] ? static_cast<const float*>(job.data[3]) + p.first : zeros;
    for (int64_t block = 0; block < blocks; block += kBlocks) {
      args.blocks = std::min(kBlocks, blocks - block);
      read_columns<Block>(columns, w + block * static_cast<int64_t>(sizeof(Block)), job.b_column, args.blocks, p.columns);
      for (int64_t r = p.rows.begin; r < p.rows.end; r += kRows) {
        const int64_t height = std::min(kRows, p.rows.end - r);
        args.y = y + r * job.n;
        args.init = block ? args.y : bias;
        args.init_pitch = block ? job.n : 0;
        args.x = rows.at(r, block);
        int16_microkernel<kHasMin<Block>>(args, height, std::make_integer_sequence<int, kRows>());
        if (block + kBlocks >= blocks) activate(job, args.y, job.n, height, p.columns);
      }
    }
  });
}

}  // namespace

Kernel gemm_int16_kernel(DType dtype) {
  switch (dtype) {
    case DType::q8_0: return gemm_int16<BlockQ8>;
    case DType::q4_0: return gemm_int16<BlockQ4>;
    case DType::q4_1: return gemm_int16<BlockQ4m>;
    case DType::q5_0: return gemm_int16<BlockQ5>;
    case DType::q5_1: return gemm_int16<BlockQ5m>;
    default: return nullptr;
  }
}

#else
Kernel gemm_int16_kernel(DType) { return nullptr; }
#endif

}  // namespace keepdim::ggml
