// Dot products of quantised rows with activations in whole numbers, on AVX2: as many rows of the weight at a time as are
// quickest (few sums over lanes, against a single stream of memory), several rows of activations for each block that is
// unpacked. Activations have a scale for each block of 32: 8 bits with weights of 4 bits, 16 bits with weights of 8. Halves
// are multiplied as f32.
#pragma once
#include "quant.h"

#ifdef __AVX2__
#include <algorithm>
#include <type_traits>

namespace keepdim::ggml {

inline __m256i load256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

// Two halves of 128 bits.
inline __m256i load_two(const void* low, const void* high) {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(load128(low)), load128(high), 1);
}

// sum + four products of bytes a lane. u: up to 15, where two pairs fit 16 bits.
inline __m256i dot_bytes(__m256i sum, __m256i u0, __m256i s0, __m256i u1, __m256i s1) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  return _mm256_dpbusd_epi32(_mm256_dpbusd_epi32(sum, u0, s0), u1, s1);
#else
  const __m256i pairs = _mm256_add_epi16(_mm256_maddubs_epi16(u0, s0), _mm256_maddubs_epi16(u1, s1));
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
}

// Four products of 16 bits a lane.
inline __m256i dot_words(__m256i a0, __m256i b0, __m256i a1, __m256i b1) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  return _mm256_dpwssd_epi32(_mm256_madd_epi16(a0, b0), a1, b1);
#else
  return _mm256_add_epi32(_mm256_madd_epi16(a0, b0), _mm256_madd_epi16(a1, b1));
#endif
}

// The scales of up to four blocks.
template <int count, class Block>
__m128 scales_of(const Block* w) {
  uint64_t bits = 0;
  for (int i = 0; i < count; ++i) bits |= static_cast<uint64_t>(w[i].d) << (16 * i);
  return _mm_cvtph_ps(_mm_cvtsi64_si128(static_cast<int64_t>(bits)));
}

inline float sum_of(__m256 x) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

// The largest magnitude of 32 elements. Without the sign, floats are in the order of their bits, and a NaN is the largest.
inline float largest(const float* x) {
  const __m256i magnitude = _mm256_set1_epi32(INT32_MAX);
  const auto eight = [&](int i) { return _mm256_and_si256(load256(x + 8 * i), magnitude); };
  const __m256i most = _mm256_max_epi32(_mm256_max_epi32(eight(0), eight(1)), _mm256_max_epi32(eight(2), eight(3)));
  __m128i m = _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1));
  return _mm_cvtss_f32(_mm_castsi128_ps(m));
}

// 16 elements as whole numbers of `scale`.
inline __m256i rounded(const float* x, __m256 inverse) {
  const __m256i a = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x), inverse));
  const __m256i b = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8), inverse));
  return _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);
}

// Where the parts of a prepared row of activations lie, in bytes; scales and sums in fours of blocks.
struct Layout {
  int64_t scales, sums, pitch;

  Layout(int64_t blocks, int64_t block_bytes) {
    const int64_t fours = (blocks + 3) / 4 * 4;
    scales = fours * block_bytes;
    sums = scales + fours * static_cast<int64_t>(sizeof(float));
    pitch = (sums + fours * static_cast<int64_t>(sizeof(float)) + 63) / 64 * 64;
  }
};

// ---- weights of 4 bits

// Activations go in pairs of blocks a and b: a's first half and b's, a's second and b's, then what to add to each lane
// of the dot product: for q4_0 the -8 of every weight, for q4_1 nothing.
template <class Block>
struct Nibbles {
  static constexpr bool least = sizeof(Block) == sizeof(BlockQ4m);
  static constexpr int64_t kBytes = 48;  // of a block of activations
  static constexpr int kRows = 4;        // of the weight at a time

  static void prepare(const float* x, int64_t blocks, char* row, const Layout& at) {
    auto* scales = reinterpret_cast<float*>(row + at.scales);
    auto* sums = reinterpret_cast<float*>(row + at.sums);
    std::memset(row + (blocks - 1) / 2 * 2 * kBytes, 0, static_cast<size_t>(at.pitch - (blocks - 1) / 2 * 2 * kBytes));
    for (int64_t i = 0; i < blocks; ++i, x += 32) {
      const float most = largest(x), scale = most * (1.0f / 127);
      const __m256 inverse = _mm256_set1_ps(most > 0 ? 127 / most : 0);
      const __m256i first = rounded(x, inverse), second = rounded(x + 16, inverse);
      char* pair = row + i / 2 * 2 * kBytes + i % 2 * 16;
      const auto narrow = [](__m256i v) { return _mm_packs_epi16(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1)); };
      _mm_storeu_si128(reinterpret_cast<__m128i*>(pair), narrow(first));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(pair + 32), narrow(second));
      const __m256i words = _mm256_madd_epi16(_mm256_add_epi16(first, second), _mm256_set1_epi16(1));  // pairs of both halves
      const __m128i lanes = _mm_hadd_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));  // as dot_bytes
      if (!least) _mm_storeu_si128(reinterpret_cast<__m128i*>(pair + 64), _mm_slli_epi32(_mm_sub_epi32(_mm_setzero_si128(), lanes), 3));
      scales[i] = scale;
      if (!least) continue;
      const __m128i two = _mm_hadd_epi32(lanes, lanes);
      sums[i] = scale * static_cast<float>(_mm_extract_epi32(two, 0) + _mm_extract_epi32(two, 1));
    }
  }

  // The scales of up to four blocks, and for q4_1 what they begin at behind them.
  template <int count>
  static __m256 heads(const Block* w) {
    if constexpr (least) {
      uint32_t head[4] = {};
      for (int i = 0; i < count; ++i) std::memcpy(head + i, w + i, sizeof(uint32_t));
      const auto two = [&](int i) { return static_cast<int64_t>(head[i] | static_cast<uint64_t>(head[i + 1]) << 32); };
      const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
      return _mm256_cvtph_ps(_mm_shuffle_epi8(_mm_set_epi64x(two(2), two(0)), order));
    } else {
      return _mm256_castps128_ps256(scales_of<count>(w));
    }
  }

  // Adds the products of `count` blocks with `many` rows of activations.
  template <int count, int many>
  static void add(__m256 (&sum)[many], const char* w, const char* x, const Layout& at, int64_t block) {
    const __m256i nibble = _mm256_set1_epi8(15);
    const __m256i spread[2] = {_mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1), _mm256_setr_epi32(2, 2, 2, 2, 3, 3, 3, 3)};
    const auto* blocks = reinterpret_cast<const Block*>(w);
    const __m256 head = heads<count>(blocks);
    static constexpr uint8_t nothing[16] = {};
    constexpr int pairs = (count + 1) / 2;
    __m256i low[2], high[2];
    for (int p = 0; p < pairs; ++p) {
      const __m256i both = load_two(blocks[2 * p].q, 2 * p + 1 < count ? blocks[2 * p + 1].q : nothing);
      low[p] = _mm256_and_si256(both, nibble);
      high[p] = _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble);
    }
#pragma GCC unroll 4
    for (int m = 0; m < many; ++m) {
      const char* row = x + m * at.pitch;
      const __m128 own = _mm_loadu_ps(reinterpret_cast<const float*>(row + at.scales) + block);
      const __m256 product = _mm256_castps128_ps256(_mm_mul_ps(_mm256_castps256_ps128(head), own));
#pragma GCC unroll 2
      for (int p = 0; p < pairs; ++p) {
        const char* pair = row + (block + 2 * p) * kBytes;
        const __m256i first = least ? _mm256_setzero_si256() : load256(pair + 64);
        const __m256i dots = dot_bytes(first, low[p], load256(pair), high[p], load256(pair + 32));
        sum[m] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots), _mm256_permutevar8x32_ps(product, spread[p]), sum[m]);
      }
      if constexpr (least) {
        const __m128 sums = _mm_loadu_ps(reinterpret_cast<const float*>(row + at.sums) + block);
        sum[m] = _mm256_add_ps(sum[m], _mm256_zextps128_ps256(_mm_mul_ps(_mm256_extractf128_ps(head, 1), sums)));
      }
    }
  }
};

// ---- weights of 8 bits

struct Bytes8 {
  using Block = BlockQ8;
  static constexpr int64_t kBytes = 64;
  static constexpr int kRows = 1;

  static void prepare(const float* x, int64_t blocks, char* row, const Layout& at) {
    auto* scales = reinterpret_cast<float*>(row + at.scales);
    std::memset(scales, 0, static_cast<size_t>(at.sums - at.scales));  // of blocks that there are not
    for (int64_t i = 0; i < blocks; ++i, x += 32, row += kBytes) {
      const float most = largest(x);
      const __m256 inverse = _mm256_set1_ps(most > 0 ? 32767 / most : 0);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(row), rounded(x, inverse));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(row + 32), rounded(x + 16, inverse));
      scales[i] = most * (1.0f / 32767);
    }
  }

  template <int count, int many>
  static void add(__m256 (&sum)[many], const char* w, const char* x, const Layout& at, int64_t block) {
    const auto* blocks = reinterpret_cast<const Block*>(w);
    const __m128 scale = scales_of<count>(blocks);
    __m256 product[many];
    for (int m = 0; m < many; ++m) {
      const __m128 own = _mm_loadu_ps(reinterpret_cast<const float*>(x + m * at.pitch + at.scales) + block);
      product[m] = _mm256_castps128_ps256(_mm_mul_ps(scale, own));
    }
#pragma GCC unroll 4
    for (int i = 0; i < count; ++i) {
      const auto* q = reinterpret_cast<const __m128i*>(blocks[i].q);
      const __m256i low = _mm256_cvtepi8_epi16(_mm_loadu_si128(q)), high = _mm256_cvtepi8_epi16(_mm_loadu_si128(q + 1));
#pragma GCC unroll 4
      for (int m = 0; m < many; ++m) {
        const char* row = x + m * at.pitch + (block + i) * kBytes;
        const __m256i dots = dot_words(low, load256(row), high, load256(row + 32));
        const __m256 spread = _mm256_permutevar8x32_ps(product[m], _mm256_set1_epi32(i));
        sum[m] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots), spread, sum[m]);
      }
    }
  }
};

// ---- weights of 16 bits, with activations as they are

template <bool brain>
struct Halves {
  struct Block {
    uint16_t q[32];
  };
  static constexpr int kRows = 2;

  static __m256 read(const uint16_t* q) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(q));
    return brain ? _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16)) : _mm256_cvtph_ps(bits);
  }

  template <int count, int many>
  static void add(__m256 (&sum)[many], const char* w, const char* x, const Layout& at, int64_t block) {
#pragma GCC unroll 16
    for (int i = 0; i < 4 * count; ++i) {
      const __m256 eight = read(reinterpret_cast<const uint16_t*>(w) + 8 * i);
#pragma GCC unroll 4
      for (int m = 0; m < many; ++m) {
        const auto* row = reinterpret_cast<const float*>(x + m * at.pitch) + block * kBlock32 + 8 * i;
        sum[m] = _mm256_fmadd_ps(eight, _mm256_loadu_ps(row), sum[m]);
      }
    }
  }
};

// ---- rows of all of them

// y[m, r] = row r of the weight times activations m.
template <class Kind, class Block, int rows, int many>
void dots(const char* w, int64_t pitch, const char* x, const Layout& at, int64_t blocks, float* y, int64_t y_pitch) {
  __m256 sum[rows][many] = {};
  // Rows lie one behind the other. One at a time is a stream that the CPU reads ahead of itself; of several, what the next
  // ones need is asked for in the order of memory.
  const char* next = w + rows * pitch;
  const auto add = [&](auto count, int64_t block) {
    if constexpr (Kind::kRows > 1) {
      for (int64_t line = 0; line < static_cast<int64_t>(rows * count * sizeof(Block)); line += 64)
        _mm_prefetch(next + line, _MM_HINT_T0);
      next += rows * count * sizeof(Block);
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r)
      Kind::template add<count, many>(sum[r], w + r * pitch + block * static_cast<int64_t>(sizeof(Block)), x, at, block);
  };
  int64_t block = 0;
  for (; block + 4 <= blocks; block += 4) add(std::integral_constant<int, 4>(), block);
  switch (blocks - block) {
    case 1: add(std::integral_constant<int, 1>(), block); break;
    case 2: add(std::integral_constant<int, 2>(), block); break;
    case 3: add(std::integral_constant<int, 3>(), block); break;
    default: break;
  }
  for (int m = 0; m < many; ++m)
    for (int r = 0; r < rows; ++r) y[m * y_pitch + r] = sum_of(sum[r][m]);
}

// All rows of the activations with `columns` rows of the weight.
template <class Kind, class Block>
void all_dots(const char* w, int64_t pitch, int64_t columns, const char* x, const Layout& at, int64_t blocks, int64_t rows,
              float* y, int64_t y_pitch) {
  const auto run = [&](auto at_once, auto many) {
    int64_t c = 0;
    for (; c + at_once <= columns; c += at_once)
      dots<Kind, Block, at_once, many>(w + c * pitch, pitch, x, at, blocks, y + c, y_pitch);
    for (; c < columns; ++c) dots<Kind, Block, 1, many>(w + c * pitch, pitch, x, at, blocks, y + c, y_pitch);
    x += many * at.pitch;
    y += many * y_pitch;
  };
  using std::integral_constant;
  const integral_constant<int, std::min(Kind::kRows, 2)> two;  // more sums than that do not fit into registers
  for (; rows >= 4; rows -= 4) run(integral_constant<int, 1>(), integral_constant<int, 4>());
  if (rows == 3) run(two, integral_constant<int, 3>());
  if (rows == 2) run(two, integral_constant<int, 2>());
  if (rows == 1) run(integral_constant<int, Kind::kRows>(), integral_constant<int, 1>());
}

}  // namespace keepdim::ggml
#endif
