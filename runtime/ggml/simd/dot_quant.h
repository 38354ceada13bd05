// AVX2 dot products of weight rows with activation rows. Activations are quantised with a scale per block of 32: int8 for
// 4-bit weights, int16 for 8-bit weights. 16-bit float weights are multiplied in f32. Each unpacked weight block is used for
// several rows of activations. The number of weight rows per pass was measured: several rows share the horizontal sums, one
// row is a single memory stream.
#pragma once
#include "ggml/simd/quant_blocks.h"

#ifdef __AVX2__
#include <algorithm>
#include <type_traits>

namespace keepdim::ggml {

inline __m256i load256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

// Loads two 128-bit halves.
inline __m256i load_2x128(const void* low, const void* high) {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(load128(low)), load128(high), 1);
}

// sum + u0 . s0 + u1 . s1 per 32-bit lane (4 bytes each). u <= 15, so that the sum of two pairs fits in int16.
inline __m256i dot_bytes(__m256i sum, __m256i u0, __m256i s0, __m256i u1, __m256i s1) {
#ifdef KEEPDIM_VNNI
  return _mm256_dpbusd_epi32(_mm256_dpbusd_epi32(sum, u0, s0), u1, s1);
#else
  const __m256i pairs = _mm256_add_epi16(_mm256_maddubs_epi16(u0, s0), _mm256_maddubs_epi16(u1, s1));
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
}

// Weights of iq4_nl and iq4_xs as bytes: unsigned with an offset for VNNI, signed otherwise, where the sum of a pair of products
// with unsigned ones does not fit in int16.
#ifdef KEEPDIM_VNNI
constexpr int kIq4OffsetBits = 7;
#else
constexpr int kIq4OffsetBits = 0;
#endif
constexpr int kIq4Offset = kIq4OffsetBits ? 1 << kIq4OffsetBits : 0;

// The weights of 4-bit indices, plus kIq4Offset.
inline __m256i iq4_weights(__m256i indices) {
  const __m256i table = _mm256_broadcastsi128_si256(load128(kIq4Values));
  return _mm256_shuffle_epi8(_mm256_xor_si256(table, _mm256_set1_epi8(static_cast<char>(kIq4Offset))), indices);
}

// sum + w . x per 32-bit lane (4 bytes each), w from iq4_weights.
inline __m256i dot_iq4(__m256i sum, __m256i w, __m256i x) {
#ifdef KEEPDIM_VNNI
  return _mm256_dpbusd_epi32(sum, w, x);
#else
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
}

// a0 . b0 + a1 . b1 per 32-bit lane (2 int16 each).
inline __m256i dot_int16(__m256i a0, __m256i b0, __m256i a1, __m256i b1) {
#ifdef KEEPDIM_VNNI
  return _mm256_dpwssd_epi32(_mm256_madd_epi16(a0, b0), a1, b1);
#else
  return _mm256_add_epi32(_mm256_madd_epi16(a0, b0), _mm256_madd_epi16(a1, b1));
#endif
}

// Scales of up to four blocks as f32.
template <int count, class Block>
__m128 load_scales(const Block* w) {
  uint64_t bits = 0;
  for (int i = 0; i < count; ++i) bits |= static_cast<uint64_t>(w[i].d) << (16 * i);
  return _mm_cvtph_ps(_mm_cvtsi64_si128(static_cast<int64_t>(bits)));
}

inline float horizontal_sum(__m256 x) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

// Maximum of |x| over 32 elements. Compares as integers: without the sign bit, floats order like their bits, with NaN largest.
inline float max_abs(const float* x) {
  const __m256i magnitude = _mm256_set1_epi32(INT32_MAX);
  const auto eight = [&](int i) { return _mm256_and_si256(load256(x + 8 * i), magnitude); };
  const __m256i max = _mm256_max_epi32(_mm256_max_epi32(eight(0), eight(1)), _mm256_max_epi32(eight(2), eight(3)));
  __m128i m = _mm_max_epi32(_mm256_castsi256_si128(max), _mm256_extracti128_si256(max, 1));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1));
  return _mm_cvtss_f32(_mm_castsi128_ps(m));
}

// round(x * inverse) to int16 for 16 elements.
inline __m256i scale_to_int16(const float* x, __m256 inverse) {
  const __m256i a = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x), inverse));
  const __m256i b = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8), inverse));
  return _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);
}

// Layout of a quantised row of activations: values, then scales and sums (byte offsets), padded to a multiple of four blocks.
struct ActivationLayout {
  int64_t scales, sums, pitch;

  ActivationLayout(int64_t blocks, int64_t block_bytes) {
    const int64_t padded_blocks = (blocks + 3) / 4 * 4;
    scales = padded_blocks * block_bytes;
    sums = scales + padded_blocks * static_cast<int64_t>(sizeof(float));
    pitch = (sums + padded_blocks * static_cast<int64_t>(sizeof(float)) + 63) / 64 * 64;
  }
};

// ---- 4-bit weights

// Activations are stored in pairs of blocks a, b: first 16 values of a and b, last 16 values of a and b, then the initial value
// of each lane of the dot product: -8 * sum(x) for q4_0 (whose weights are q - 8), -kIq4Offset * sum(x) for iq4_nl, unused for
// q4_1.
template <class Block>
struct Dot4Bit {
  static constexpr bool has_min = sizeof(Block) == sizeof(BlockQ4m), iq4 = std::is_same_v<Block, BlockIq4nl>;
  static constexpr int offset_bits = has_min ? 0 : iq4 ? kIq4OffsetBits : 3;  // 0: no offset
  static constexpr int64_t kBytes = 48;                                       // per block of activations
  static constexpr int kRows = 4;                                             // weight rows per pass

  static void prepare(const float* x, int64_t blocks, char* row, const ActivationLayout& at) {
    auto* scales = reinterpret_cast<float*>(row + at.scales);
    auto* sums = reinterpret_cast<float*>(row + at.sums);
    std::memset(row + (blocks - 1) / 2 * 2 * kBytes, 0, static_cast<size_t>(at.pitch - (blocks - 1) / 2 * 2 * kBytes));
    for (int64_t i = 0; i < blocks; ++i, x += 32) {
      const float max = max_abs(x), scale = max * (1.0f / 127);
      const __m256 inverse = _mm256_set1_ps(max > 0 ? 127 / max : 0);
      const __m256i first = scale_to_int16(x, inverse), second = scale_to_int16(x + 16, inverse);
      char* pair = row + i / 2 * 2 * kBytes + i % 2 * 16;
      const auto narrow = [](__m256i v) { return _mm_packs_epi16(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1)); };
      _mm_storeu_si128(reinterpret_cast<__m128i*>(pair), narrow(first));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(pair + 32), narrow(second));
      const __m256i pair_sums =
          _mm256_madd_epi16(_mm256_add_epi16(first, second), _mm256_set1_epi16(1));  // sums of four values: a pair of each half
      const __m128i lanes =
          _mm_hadd_epi32(_mm256_castsi256_si128(pair_sums), _mm256_extracti128_si256(pair_sums, 1));  // lane order of dot_bytes
      if (offset_bits)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(pair + 64),
                         _mm_slli_epi32(_mm_sub_epi32(_mm_setzero_si128(), lanes), offset_bits));
      scales[i] = scale;
      if (!has_min) continue;
      const __m128i two = _mm_hadd_epi32(lanes, lanes);
      sums[i] = scale * static_cast<float>(_mm_extract_epi32(two, 0) + _mm_extract_epi32(two, 1));
    }
  }

  // Scales of up to four blocks, followed by their minima for q4_1.
  template <int count>
  static __m256 load_scales_mins(const Block* w) {
    if constexpr (has_min) {
      uint32_t scales_mins[4] = {};
      for (int i = 0; i < count; ++i) std::memcpy(scales_mins + i, w + i, sizeof(uint32_t));
      const auto two = [&](int i) {
        return static_cast<int64_t>(scales_mins[i] | static_cast<uint64_t>(scales_mins[i + 1]) << 32);
      };
      const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
      return _mm256_cvtph_ps(_mm_shuffle_epi8(_mm_set_epi64x(two(2), two(0)), order));
    } else {
      return _mm256_castps128_ps256(load_scales<count>(w));
    }
  }

  // sum[m] += `count` weight blocks times row m of the activations.
  template <int count, int n_act>
  static void add(__m256 (&sum)[n_act], const char* w, const char* x, const ActivationLayout& at, int64_t block) {
    const __m256i nibble = _mm256_set1_epi8(15);
    const __m256i spread[2] = {_mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1), _mm256_setr_epi32(2, 2, 2, 2, 3, 3, 3, 3)};
    const auto* blocks = reinterpret_cast<const Block*>(w);
    const __m256 scales_mins = load_scales_mins<count>(blocks);
    static constexpr uint8_t zero_block[16] = {};
    constexpr int pairs = (count + 1) / 2;
    __m256i low[2], high[2];
    for (int p = 0; p < pairs; ++p) {
      const __m256i packed = load_2x128(blocks[2 * p].q, 2 * p + 1 < count ? blocks[2 * p + 1].q : zero_block);
      low[p] = _mm256_and_si256(packed, nibble);
      high[p] = _mm256_and_si256(_mm256_srli_epi16(packed, 4), nibble);
      if constexpr (iq4) low[p] = iq4_weights(low[p]), high[p] = iq4_weights(high[p]);
    }
#pragma GCC unroll 4
    for (int m = 0; m < n_act; ++m) {
      const char* row = x + m * at.pitch;
      const __m128 row_scales = _mm_loadu_ps(reinterpret_cast<const float*>(row + at.scales) + block);
      const __m256 product = _mm256_castps128_ps256(_mm_mul_ps(_mm256_castps256_ps128(scales_mins), row_scales));
#pragma GCC unroll 2
      for (int p = 0; p < pairs; ++p) {
        const char* pair = row + (block + 2 * p) * kBytes;
        const __m256i first = offset_bits ? load256(pair + 64) : _mm256_setzero_si256();
        __m256i dots;
        if constexpr (iq4)
          dots = dot_iq4(dot_iq4(first, low[p], load256(pair)), high[p], load256(pair + 32));
        else
          dots = dot_bytes(first, low[p], load256(pair), high[p], load256(pair + 32));
        sum[m] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots), _mm256_permutevar8x32_ps(product, spread[p]), sum[m]);
      }
      if constexpr (has_min) {
        const __m128 sums = _mm_loadu_ps(reinterpret_cast<const float*>(row + at.sums) + block);
        sum[m] = _mm256_add_ps(sum[m], _mm256_zextps128_ps256(_mm_mul_ps(_mm256_extractf128_ps(scales_mins, 1), sums)));
      }
    }
  }
};

// ---- 8-bit weights

struct Dot8Bit {
  using Block = BlockQ8;
  static constexpr int64_t kBytes = 64;
  static constexpr int kRows = 1;

  static void prepare(const float* x, int64_t blocks, char* row, const ActivationLayout& at) {
    auto* scales = reinterpret_cast<float*>(row + at.scales);
    std::memset(scales, 0, static_cast<size_t>(at.sums - at.scales));  // zero for the padding blocks
    for (int64_t i = 0; i < blocks; ++i, x += 32, row += kBytes) {
      const float max = max_abs(x);
      const __m256 inverse = _mm256_set1_ps(max > 0 ? 32767 / max : 0);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(row), scale_to_int16(x, inverse));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(row + 32), scale_to_int16(x + 16, inverse));
      scales[i] = max * (1.0f / 32767);
    }
  }

  template <int count, int n_act>
  static void add(__m256 (&sum)[n_act], const char* w, const char* x, const ActivationLayout& at, int64_t block) {
    const auto* blocks = reinterpret_cast<const Block*>(w);
    const __m128 scale = load_scales<count>(blocks);
    __m256 product[n_act];
    for (int m = 0; m < n_act; ++m) {
      const __m128 row_scales = _mm_loadu_ps(reinterpret_cast<const float*>(x + m * at.pitch + at.scales) + block);
      product[m] = _mm256_castps128_ps256(_mm_mul_ps(scale, row_scales));
    }
#pragma GCC unroll 4
    for (int i = 0; i < count; ++i) {
      const auto* q = reinterpret_cast<const __m128i*>(blocks[i].q);
      const __m256i low = _mm256_cvtepi8_epi16(_mm_loadu_si128(q)), high = _mm256_cvtepi8_epi16(_mm_loadu_si128(q + 1));
#pragma GCC unroll 4
      for (int m = 0; m < n_act; ++m) {
        const char* row = x + m * at.pitch + (block + i) * kBytes;
        const __m256i dots = dot_int16(low, load256(row), high, load256(row + 32));
        const __m256 spread = _mm256_permutevar8x32_ps(product[m], _mm256_set1_epi32(i));
        sum[m] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots), spread, sum[m]);
      }
    }
  }
};

// ---- 16-bit float weights, with f32 activations

template <bool bfloat>
struct DotFloat16 {
  struct Block {
    uint16_t q[32];
  };
  static constexpr int kRows = 2;

  static __m256 read(const uint16_t* q) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(q));
    return bfloat ? _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16)) : _mm256_cvtph_ps(bits);
  }

  template <int count, int n_act>
  static void add(__m256 (&sum)[n_act], const char* w, const char* x, const ActivationLayout& at, int64_t block) {
#pragma GCC unroll 16
    for (int i = 0; i < 4 * count; ++i) {
      const __m256 eight = read(reinterpret_cast<const uint16_t*>(w) + 8 * i);
#pragma GCC unroll 4
      for (int m = 0; m < n_act; ++m) {
        const auto* row = reinterpret_cast<const float*>(x + m * at.pitch) + block * kBlock32 + 8 * i;
        sum[m] = _mm256_fmadd_ps(eight, _mm256_loadu_ps(row), sum[m]);
      }
    }
  }
};

// ---- all formats

// y [n_act, rows] = activations [n_act, k] times `rows` weight rows.
template <class Dot, class Block, int rows, int n_act>
void dots(const char* w, int64_t pitch, const char* x, const ActivationLayout& at, int64_t blocks, float* y, int64_t y_pitch) {
  __m256 sum[rows][n_act] = {};
  // A single row is one stream, which the hardware prefetcher handles. For several rows, the next rows, adjacent in memory, are
  // prefetched in memory order.
  const char* next = w + rows * pitch;
  const auto add = [&](auto count, int64_t block) {
    if constexpr (Dot::kRows > 1) {
      for (int64_t line = 0; line < static_cast<int64_t>(rows * count * sizeof(Block)); line += 64)
        _mm_prefetch(next + line, _MM_HINT_T0);
      next += rows * count * sizeof(Block);
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r)
      Dot::template add<count, n_act>(sum[r], w + r * pitch + block * static_cast<int64_t>(sizeof(Block)), x, at, block);
  };
  int64_t block = 0;
  for (; block + 4 <= blocks; block += 4) add(std::integral_constant<int, 4>(), block);
  switch (blocks - block) {
    case 1: add(std::integral_constant<int, 1>(), block); break;
    case 2: add(std::integral_constant<int, 2>(), block); break;
    case 3: add(std::integral_constant<int, 3>(), block); break;
    default: break;
  }
  for (int m = 0; m < n_act; ++m)
    for (int r = 0; r < rows; ++r) y[m * y_pitch + r] = horizontal_sum(sum[r][m]);
}

// y [rows, columns] = activations [rows, k] times `columns` weight rows.
template <class Dot, class Block>
void all_dots(const char* w, int64_t pitch, int64_t columns, const char* x, const ActivationLayout& at, int64_t blocks,
              int64_t rows, float* y, int64_t y_pitch) {
  const auto run = [&](auto rows_at_once, auto n_act) {
    int64_t c = 0;
    for (; c + rows_at_once <= columns; c += rows_at_once)
      dots<Dot, Block, rows_at_once, n_act>(w + c * pitch, pitch, x, at, blocks, y + c, y_pitch);
    for (; c < columns; ++c) dots<Dot, Block, 1, n_act>(w + c * pitch, pitch, x, at, blocks, y + c, y_pitch);
    x += n_act * at.pitch;
    y += n_act * y_pitch;
  };
  using std::integral_constant;
  const integral_constant<int, std::min(Dot::kRows, 2)> two;  // more accumulators do not fit in registers
  for (; rows >= 4; rows -= 4) run(integral_constant<int, 1>(), integral_constant<int, 4>());
  if (rows == 3) run(two, integral_constant<int, 3>());
  if (rows == 2) run(two, integral_constant<int, 2>());
  if (rows == 1) run(integral_constant<int, Dot::kRows>(), integral_constant<int, 1>());
}

}  // namespace keepdim::ggml
#endif
