// Many rows times a quantised weight in whole numbers, on AVX-512 with VNNI: rows become 16 bits with a scale for each block
// of 32, which rounds as little as the weights allow, and takes half the time of f32.
#include "dot.h"
#include "tile.h"

namespace keepdim::ggml {

#ifdef KEEPDIM_WORDS
namespace {

constexpr int64_t kRows = 6;    // of a tile: its sums of whole numbers and of f32 fill the registers
constexpr int64_t kBlocks = 8;  // of a panel, which stays in the first cache
constexpr int64_t kPairs = kBlock32 / 2;

// 32 columns of the weight: pairs of whole numbers along k, [block, pair, column, 2], and for each block and column the
// numbers that they are multiplied by and begin at.
struct alignas(64) Columns {
  int16_t q[kBlocks * kPairs][kWidth][2];
  float scale[kBlocks][kWidth], least[kBlocks][kWidth];
};

template <class Block>
void read_columns(Columns& to, const char* w, int64_t pitch, int64_t blocks, int64_t columns) {
  constexpr int64_t row = kBlocks * kPairs + 16;  // not all of them in the same places of the cache
  alignas(64) float pairs[8][row];                // the bits of two whole numbers
  for (int64_t first = 0; first < kWidth; first += 8) {
    for (int64_t c = 0; c < 8; ++c) {
      const auto* block = reinterpret_cast<const Block*>(w + (first + c) * pitch);
      const bool there = first + c < columns;
      for (int64_t b = 0; b < blocks; ++b) {
        auto* words = reinterpret_cast<__m256i*>(pairs[c] + b * kPairs);
        for (int half = 0; half < 2; ++half)
          _mm256_store_si256(words + half, there ? _mm256_cvtepi8_epi16(half_of(block[b], half)) : _mm256_setzero_si256());
        to.scale[b][first + c] = there ? _cvtsh_ss(block[b].d) : 0;
        to.least[b][first + c] = there ? least_of(block[b]) : 0;
      }
    }
    for (int64_t p = 0; p < blocks * kPairs; p += 8) transpose(pairs[0] + p, row, reinterpret_cast<float*>(to.q[p][first]), kWidth);
  }
}

// Rows of activations: whole numbers, and for each block their scale and what they add up to.
struct Rows {
  const int16_t* q;
  const float *scale, *sum;
  int64_t pitch, blocks;  // of q and of the others, for the next row
};

struct WordTile {
  float* y;
  const float* start;
  int64_t y_pitch, start_pitch, blocks;
  Rows x;
  const Columns* w;
  __mmask16 mask[2];
};

template <int height, bool least>
void multiply_words(const WordTile& t) {
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
      const __m512 own = _mm512_set1_ps(t.x.scale[r * t.x.blocks + b]);
      for (int v = 0; v < 2; ++v) sum[r][v] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[r][v]), _mm512_mul_ps(own, scale[v]), sum[r][v]);
      if constexpr (least) {
        const __m512 all = _mm512_set1_ps(t.x.sum[r * t.x.blocks + b]);
        for (int v = 0; v < 2; ++v) sum[r][v] = _mm512_fmadd_ps(all, _mm512_load_ps(t.w->least[b] + 16 * v), sum[r][v]);
      }
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < height; ++r)
    for (int v = 0; v < 2; ++v) {
      const __m512 start = _mm512_maskz_loadu_ps(t.mask[v], t.start + r * t.start_pitch + 16 * v);
      _mm512_mask_storeu_ps(t.y + r * t.y_pitch + 16 * v, t.mask[v], _mm512_add_ps(sum[r][v], start));
    }
}

template <bool least, int... height>
void multiply_words(const WordTile& tile, int64_t rows, std::integer_sequence<int, height...>) {
  static constexpr void (*kernels[])(const WordTile&) = {multiply_words<height + 1, least>...};
  kernels[rows - 1](tile);
}

// The rows that a thread multiplies at the moment, in its own memory.
class Prepared {
 public:
  explicit Prepared(const ProductJob& job) : job_(job), blocks_(job.k / kBlock32) {}

  // False when there is no memory for them.
  bool take(Span rows) {
    if (rows.begin == taken_.begin && rows.end == taken_.end) return true;
    const int64_t count = rows.end - rows.begin;
    float* room = scratch(count * (job_.k / 2 + 2 * blocks_));
    if (!room) return false;
    scale_ = room;
    sum_ = scale_ + count * blocks_;
    q_ = reinterpret_cast<int16_t*>(sum_ + count * blocks_);
    taken_ = rows;
    for (int64_t r = 0; r < count; ++r) prepare(static_cast<const float*>(job_.data[1]) + (rows.begin + r) * job_.k, r);
    return true;
  }

  Rows at(int64_t row, int64_t block) const {
    const int64_t r = row - taken_.begin;
    return {q_ + r * job_.k + block * kBlock32, scale_ + r * blocks_ + block, sum_ + r * blocks_ + block, job_.k, blocks_};
  }

 private:
  void prepare(const float* x, int64_t r) {
    for (int64_t b = 0; b < blocks_; ++b, x += kBlock32) {
      const float most = largest(x), scale = most * (1.0f / 32767);
      const __m256 inverse = _mm256_set1_ps(most > 0 ? 32767 / most : 0);
      const __m256i first = rounded(x, inverse), second = rounded(x + 16, inverse);
      auto* to = reinterpret_cast<__m256i*>(q_ + r * job_.k + b * kBlock32);
      _mm256_storeu_si256(to, first);
      _mm256_storeu_si256(to + 1, second);
      const __m256i ones = _mm256_set1_epi16(1);
      const __m256i four = _mm256_add_epi32(_mm256_madd_epi16(first, ones), _mm256_madd_epi16(second, ones));
      scale_[r * blocks_ + b] = scale;
      sum_[r * blocks_ + b] = scale * sum_of(_mm256_cvtepi32_ps(four));
    }
  }

  const ProductJob& job_;
  const int64_t blocks_;
  Span taken_{0, 0};
  float *scale_ = nullptr, *sum_ = nullptr;
  int16_t* q_ = nullptr;
};

template <class Block>
void words_product(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const ProductJob*>(userdata);
  const int64_t blocks = job.k / kBlock32;
  static constexpr float zeros[kWidth] = {};
  Prepared rows(job);
  each_panel(job, job.m, 4 * kBlock, kRows, ith, nth, [&](const Panel& p, const int64_t* offset) {
    if (!rows.take(p.rows)) return job.fail(0, "there is no memory for its rows.");
    Columns columns;
    const auto lanes = [&](int64_t n) { return static_cast<__mmask16>(n >= 16 ? 0xffff : n <= 0 ? 0 : (1 << n) - 1); };
    WordTile tile{};
    tile.y_pitch = job.n;
    tile.w = &columns;
    tile.mask[0] = lanes(p.columns), tile.mask[1] = lanes(p.columns - 16);
    float* const y = at<float>(job.data[0], offset[0]);
    const char* const w = at<char>(job.data[2], offset[2]);
    const float* const bias = job.data[3] ? static_cast<const float*>(job.data[3]) + p.first : zeros;
    for (int64_t block = 0; block < blocks; block += kBlocks) {
      tile.blocks = std::min(kBlocks, blocks - block);
      read_columns<Block>(columns, w + block * static_cast<int64_t>(sizeof(Block)), job.b_column, tile.blocks, p.columns);
      for (int64_t r = p.rows.begin; r < p.rows.end; r += kRows) {
        const int64_t height = std::min(kRows, p.rows.end - r);
        tile.y = y + r * job.n;
        tile.start = block ? tile.y : bias;
        tile.start_pitch = block ? job.n : 0;
        tile.x = rows.at(r, block);
        multiply_words<kHasLeast<Block>>(tile, height, std::make_integer_sequence<int, kRows>());
        if (block + kBlocks >= blocks) activate(job, tile.y, job.n, height, p.columns);
      }
    }
  });
}

}  // namespace

Kernel words_kernel(DType dtype) {
  switch (dtype) {
    case DType::q8_0: return words_product<BlockQ8>;
    case DType::q4_0: return words_product<BlockQ4>;
    case DType::q4_1: return words_product<BlockQ4m>;
    case DType::q5_0: return words_product<BlockQ5>;
    case DType::q5_1: return words_product<BlockQ5m>;
    default: return nullptr;
  }
}

#else
Kernel words_kernel(DType) { return nullptr; }
#endif

}  // namespace keepdim::ggml
