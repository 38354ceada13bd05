// AVX2 dot product of one row of a K-quant or iq4_xs weight with one row of activations, quantised to int8 with a scale per block
// of 32.
#pragma once
#include "ggml/simd/dot_quant.h"

#ifdef __AVX2__
namespace keepdim::ggml {

constexpr int64_t kSuperBlock = 256;  // weights per block of a K-quant or iq4_xs

// 32 elements as int8; returns their scale. `sums`: of the q of each half.
inline float quantise_int8(const float* x, int8_t* q, int32_t (&sums)[2]) {
  const float max = max_abs(x);
  const __m256 inverse = _mm256_set1_ps(max > 0 ? 127 / max : 0);
  const __m256i first = scale_to_int16(x, inverse), second = scale_to_int16(x + 16, inverse), ones = _mm256_set1_epi16(1);
  const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(first, second), 0xd8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), bytes);
  const __m256i pairs = _mm256_hadd_epi32(_mm256_madd_epi16(first, ones), _mm256_madd_epi16(second, ones));
  __m128i both = _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
  both = _mm_hadd_epi32(both, both);
  sums[0] = _mm_cvtsi128_si32(both);
  sums[1] = _mm_extract_epi32(both, 1);
  return max * (1.0f / 127);
}

// Whether 512-bit vectors hold two blocks of 32 weights.
#if defined(KEEPDIM_VNNI) && defined(__AVX512BW__)
#define KEEPDIM_TWO_BLOCKS
constexpr bool kTwoBlocks = true;
#else
constexpr bool kTwoBlocks = false;
#endif

// 256 activations. `nibbles`: for q4_k and q5_k, where 64 bytes of two blocks at a time are the low nibbles of blocks 0 and 2 and
// the high nibbles of blocks 1 and 3.
template <bool nibbles>
struct KActivations {
  int8_t q[kSuperBlock];
  float scale_sum[16];           // of each 32: scales, then sums of scale * q
  float scale16[16], sum16[16];  // of each 16

  const float* scale() const { return scale_sum; }
  const float* sum() const { return scale_sum + 8; }

  void quantise(const float* x) {
    for (int b = 0; b < 8; ++b) {
      const int place = nibbles && kTwoBlocks ? b / 4 * 4 + b % 2 * 2 + b % 4 / 2 : b;
      int32_t sums[2];
      const float scale = quantise_int8(x + 32 * b, q + 32 * place, sums);
      scale_sum[b] = scale;
      scale_sum[8 + b] = scale * static_cast<float>(sums[0] + sums[1]);
      for (int half = 0; half < 2; ++half) {
        scale16[2 * b + half] = scale;
        sum16[2 * b + half] = scale * static_cast<float>(sums[half]);
      }
    }
  }
};

// The same for iq4_xs, with blocks in pairs a, b as in Dot4Bit. start: -kIq4Offset * the sum of the q of a block, in one lane of
// its half.
struct PairedActivations {
  int8_t q[kSuperBlock];
  float scale[8];
  int32_t start[4][8];

  void quantise(const float* x) {
    std::memset(start, 0, sizeof(start));
    for (int b = 0; b < 8; ++b) {
      alignas(32) int8_t block[32];
      int32_t sums[2];
      scale[b] = quantise_int8(x + 32 * b, block, sums);
      for (int half = 0; half < 2; ++half) std::memcpy(q + 64 * (b / 2) + 32 * half + 16 * (b % 2), block + 16 * half, 16);
      start[b / 2][b % 2 * 4] = -kIq4Offset * (sums[0] + sums[1]);
    }
  }
};

// Sums of four products u * s. u < 64, so that pairs fit in int16.
inline __m256i dot_four(__m256i u, __m256i s) {
#ifdef KEEPDIM_VNNI
  return _mm256_dpbusd_epi32(_mm256_setzero_si256(), u, s);
#else
  return _mm256_madd_epi16(_mm256_maddubs_epi16(u, s), _mm256_set1_epi16(1));
#endif
}

inline float read_f16(const uint8_t* p) {
  uint16_t bits;
  std::memcpy(&bits, p, sizeof(bits));
  return _cvtsh_ss(bits);
}

// Eight bytes as floats.
inline __m256 bytes_to_float(uint64_t bytes) {
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<int64_t>(bytes))));
}

struct KDotSums {
#ifdef KEEPDIM_TWO_BLOCKS
  __m512 wide[4] = {}, wide_mins = {};
#endif
  __m256 dots[4] = {}, mins = {};

  float total() const {
    __m256 pairs[2] = {_mm256_add_ps(dots[0], dots[1]), _mm256_add_ps(dots[2], dots[3])};
#ifdef KEEPDIM_TWO_BLOCKS
    const __m512 all = _mm512_add_ps(_mm512_add_ps(_mm512_add_ps(wide[0], wide[1]), _mm512_add_ps(wide[2], wide[3])), wide_mins);
    pairs[0] = _mm256_add_ps(pairs[0], _mm512_castps512_ps256(all));
    pairs[1] = _mm256_add_ps(pairs[1], _mm512_extractf32x8_ps(all, 1));
#endif
    return horizontal_sum(_mm256_add_ps(_mm256_add_ps(pairs[0], pairs[1]), mins));
  }
};

#ifdef KEEPDIM_TWO_BLOCKS
// sum + scale of each lane * sums of four products u * s of 64 bytes. The scale of lane i is entry order[i] of `scales`.
inline __m512 add_two_blocks(__m512 sum, __m512i u, const int8_t* s, __m512 scales, __m512i order) {
  const __m512i dots = _mm512_dpbusd_epi32(_mm512_setzero_si512(), u, _mm512_loadu_si512(s));
  return _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots), _mm512_permutexvar_ps(order, scales), sum);
}

// (low & 15) | (high & mask)
inline __m512i join_bits(__m512i low, __m512i high, int mask) {
  constexpr int a_or_b_and_c = 0xf8;
  return _mm512_ternarylogic_epi32(_mm512_and_si512(low, _mm512_set1_epi8(15)), high, _mm512_set1_epi8(static_cast<char>(mask)),
                                   a_or_b_and_c);
}

// 16-bit lanes: `first` in the lower half, `second` in the upper.
inline __m512i two_halves(int16_t first, int16_t second) {
  return _mm512_inserti64x4(_mm512_set1_epi16(first), _mm256_set1_epi16(second), 1);
}
inline __m512i two_orders(int first, int second) {
  return _mm512_inserti64x4(_mm512_set1_epi32(first), _mm256_set1_epi32(second), 1);
}
#endif

// q4_k and q5_k: d and dmin as f16, 6-bit scales and minima of 8 blocks of 32 in 12 bytes, [fifth bits], nibbles.
template <bool fifth_bits>
struct KDot45 {
  using Activations = KActivations<true>;
  static constexpr int64_t kBytes = fifth_bits ? 176 : 144;

  static void add(KDotSums& sum, const uint8_t* w, const Activations& x) {
#ifdef KEEPDIM_TWO_BLOCKS
    add_pairs(sum, w, x);
#else
    add_blocks(sum, w, x);
#endif
  }

 private:
#ifdef KEEPDIM_TWO_BLOCKS
  // Scales of the 8 blocks, then their minima, each multiplied by d or dmin.
  static __m512 read_scales(const uint8_t* w) {
    const __m128i head = load128(w);
    const __m128i low = _mm_shuffle_epi8(head, _mm_setr_epi8(4, 5, 6, 7, 4, 5, 6, 7, 8, 9, 10, 11, 8, 9, 10, 11));
    const __m128i upper = _mm_shuffle_epi32(head, 0xff);
    constexpr int six = 0x3f3f3f3f, four = 0x0f0f0f0f, two = 0x30303030, a_or_b_and_c = 0xf8;
    const __m128i first = _mm_and_si128(_mm_srlv_epi32(low, _mm_setr_epi32(0, 2, 0, 2)), _mm_setr_epi32(six, two, six, two));
    const __m128i bytes = _mm_ternarylogic_epi32(first, _mm_srlv_epi32(upper, _mm_setr_epi32(0, 0, 0, 4)),
                                                 _mm_setr_epi32(0, four, 0, four), a_or_b_and_c);
    const __m512 factor = _mm512_permutexvar_ps(two_orders(0, 1), _mm512_castps128_ps512(_mm_cvtph_ps(head)));
    return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes)), factor);
  }

  static void add_pairs(KDotSums& sum, const uint8_t* w, const Activations& x) {
    const __m512 factors = _mm512_mul_ps(read_scales(w), _mm512_loadu_ps(x.scale_sum));
    sum.wide_mins = _mm512_mask_sub_ps(sum.wide_mins, 0xff00, sum.wide_mins, factors);
    const __m512i high = fifth_bits ? _mm512_broadcast_i64x4(load256(w + 16)) : _mm512_setzero_si512();
#pragma GCC unroll 2
    for (int group = 0; group < 2; ++group) {  // four blocks
      const __m512i bytes = _mm512_loadu_si512(w + kBytes - 128 + 64 * group);
      __m512i q[2] = {bytes, _mm512_srli_epi16(bytes, 4)};
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        if constexpr (fifth_bits) {  // bit 4 * group + i of the lower half, and the one after the next of the upper half
          const auto left = static_cast<int16_t>(4 - i), right = static_cast<int16_t>(i);
          const __m512i bits = group == 0 ? _mm512_sllv_epi16(high, two_halves(left, static_cast<int16_t>(left - 2)))
                                          : _mm512_srlv_epi16(high, two_halves(right, static_cast<int16_t>(right + 2)));
          q[i] = join_bits(q[i], bits, 16);
        } else {
          q[i] = _mm512_and_si512(q[i], _mm512_set1_epi8(15));
        }
        const int first = 4 * group + i;
        __m512& to = sum.wide[2 * group + i];
        to = add_two_blocks(to, q[i], x.q + 128 * group + 64 * i, factors, two_orders(first, first + 2));
      }
    }
  }
#endif

  static void add_blocks(KDotSums& sum, const uint8_t* w, const Activations& x) {
    uint32_t packed[3];
    std::memcpy(packed, w + 4, sizeof(packed));
    constexpr uint32_t six = 0x3f3f3f3f, four = 0x0f0f0f0f, two = 0x30303030;
    const auto join = [](uint32_t low, uint32_t high) { return low | static_cast<uint64_t>(high) << 32; };
    const uint64_t scales = join(packed[0] & six, (packed[2] & four) | (packed[0] >> 2 & two));
    const uint64_t mins = join(packed[1] & six, (packed[2] >> 4 & four) | (packed[1] >> 2 & two));
    alignas(32) float scale[8];
    _mm256_store_ps(
        scale, _mm256_mul_ps(_mm256_mul_ps(bytes_to_float(scales), _mm256_loadu_ps(x.scale())), _mm256_set1_ps(read_f16(w))));
    const __m256 min = _mm256_mul_ps(bytes_to_float(mins), _mm256_set1_ps(-read_f16(w + 2)));
    sum.mins = _mm256_fmadd_ps(min, _mm256_loadu_ps(x.sum()), sum.mins);
    const __m256i nibble = _mm256_set1_epi8(15), bit = _mm256_set1_epi8(16);
    const __m256i high = fifth_bits ? load256(w + 16) : _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int b = 0; b < 8; ++b) {
      const __m256i bytes = load256(w + kBytes - 128 + 32 * (b / 2));
      __m256i q = _mm256_and_si256(b % 2 ? _mm256_srli_epi16(bytes, 4) : bytes, nibble);
      if constexpr (fifth_bits)
        q = _mm256_or_si256(q, _mm256_and_si256(b < 4 ? _mm256_slli_epi16(high, 4 - b) : _mm256_srli_epi16(high, b - 4), bit));
      const __m256 dots = _mm256_cvtepi32_ps(dot_four(q, load256(x.q + 32 * b)));
      sum.dots[b % 4] = _mm256_fmadd_ps(dots, _mm256_broadcast_ss(scale + b), sum.dots[b % 4]);
    }
  }
};

struct KDot6 {
  using Activations = KActivations<false>;
  static constexpr int64_t kBytes = sizeof(BlockQ6k);

  static void add(KDotSums& sum, const uint8_t* w, const Activations& x) {
    const auto& block = *reinterpret_cast<const BlockQ6k*>(w);
    const float d = _cvtsh_ss(block.d);
#ifdef KEEPDIM_TWO_BLOCKS
    add_pairs(sum, block, x, d);
#else
    add_blocks(sum, block, x, d);
#endif
  }

 private:
#ifdef KEEPDIM_TWO_BLOCKS
  static void add_pairs(KDotSums& sum, const BlockQ6k& block, const Activations& x, float d) {
    const __m512i fours = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    const __m512 factors = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load128(block.scales))), _mm512_set1_ps(d));
    sum.wide_mins = _mm512_fmadd_ps(_mm512_mul_ps(factors, _mm512_set1_ps(-32)), _mm512_loadu_ps(x.sum16), sum.wide_mins);
    const __m512 scales = _mm512_mul_ps(factors, _mm512_loadu_ps(x.scale16));
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const __m512i low = _mm512_loadu_si512(block.low + 64 * half);
      const __m512i high = _mm512_broadcast_i64x4(load256(block.high + 32 * half));
      const __m512i q[2] = {join_bits(low, _mm512_sllv_epi16(high, two_halves(4, 2)), 48),
                            join_bits(_mm512_srli_epi16(low, 4), _mm512_srlv_epi16(high, two_halves(0, 2)), 48)};
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        const __m512i order = _mm512_add_epi32(fours, _mm512_set1_epi32(8 * half + 4 * i));
        __m512& to = sum.wide[2 * half + i];
        to = add_two_blocks(to, q[i], x.q + 128 * half + 64 * i, scales, order);
      }
    }
  }
#endif

  static void add_blocks(KDotSums& sum, const BlockQ6k& block, const Activations& x, float d) {
    const __m256i nibble = _mm256_set1_epi8(15), top = _mm256_set1_epi8(48);
    const __m256i halves = _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      int64_t bytes;
      std::memcpy(&bytes, block.scales + 8 * half, sizeof(bytes));
      const __m256 factors = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(bytes))), _mm256_set1_ps(d));
      sum.mins = _mm256_fmadd_ps(_mm256_mul_ps(factors, _mm256_set1_ps(-32)), _mm256_loadu_ps(x.sum16 + 8 * half), sum.mins);
      const __m256i low[2] = {load256(block.low + 64 * half), load256(block.low + 64 * half + 32)};
      const __m256i high = load256(block.high + 32 * half);
#pragma GCC unroll 4
      for (int b = 0; b < 4; ++b) {
        const __m256i low4 = _mm256_and_si256(b / 2 ? _mm256_srli_epi16(low[b % 2], 4) : low[b % 2], nibble);
        const __m256i high2 =
            _mm256_and_si256(b < 2 ? _mm256_slli_epi16(high, 4 - 2 * b) : _mm256_srli_epi16(high, 2 * b - 4), top);
        const __m256 dots = _mm256_cvtepi32_ps(dot_four(_mm256_or_si256(low4, high2), load256(x.q + 128 * half + 32 * b)));
        const __m256 scale = _mm256_permutevar8x32_ps(factors, _mm256_add_epi32(halves, _mm256_set1_epi32(2 * b)));
        const __m256 product = _mm256_mul_ps(scale, _mm256_broadcast_ss(x.scale() + 4 * half + b));
        sum.dots[b] = _mm256_fmadd_ps(dots, product, sum.dots[b]);
      }
    }
  }
};

struct KDotIq4 {
  using Activations = PairedActivations;
  static constexpr int64_t kBytes = sizeof(BlockIq4xs);

  static void add(KDotSums& sum, const uint8_t* w, const PairedActivations& x) {
    const auto& block = *reinterpret_cast<const BlockIq4xs*>(w);
    uint32_t packed;
    std::memcpy(&packed, block.scales_low, sizeof(packed));
    const __m256i even = _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14), nibble = _mm256_set1_epi8(15);
    const __m256i low4 = _mm256_and_si256(
        _mm256_srlv_epi32(_mm256_set1_epi32(static_cast<int>(packed)), _mm256_slli_epi32(even, 1)), _mm256_set1_epi32(15));
    const __m256i high2 = _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(block.scales_high), even), _mm256_set1_epi32(3));
    const __m256i scales = _mm256_sub_epi32(_mm256_or_si256(low4, _mm256_slli_epi32(high2, 4)), _mm256_set1_epi32(32));
    const __m256 factors =
        _mm256_mul_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(scales), _mm256_loadu_ps(x.scale)), _mm256_set1_ps(_cvtsh_ss(block.d)));
    const __m256i halves = _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1);
#pragma GCC unroll 4
    for (int p = 0; p < 4; ++p) {
      const __m256i bytes = load256(block.q + 32 * p);
      const __m256i low = iq4_weights(_mm256_and_si256(bytes, nibble));
      const __m256i high = iq4_weights(_mm256_and_si256(_mm256_srli_epi16(bytes, 4), nibble));
      const __m256i first = kIq4Offset ? load256(x.start[p]) : _mm256_setzero_si256();
      const __m256i dots = dot_iq4(dot_iq4(first, low, load256(x.q + 64 * p)), high, load256(x.q + 64 * p + 32));
      const __m256 scale = _mm256_permutevar8x32_ps(factors, _mm256_add_epi32(halves, _mm256_set1_epi32(2 * p)));
      sum.dots[p] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots), scale, sum.dots[p]);
    }
  }
};

template <class Dot>
float kquant_dot(const char* weight, const typename Dot::Activations* x, int64_t blocks) {
  KDotSums sum;
  const auto* w = reinterpret_cast<const uint8_t*>(weight);
  for (int64_t b = 0; b < blocks; ++b, w += Dot::kBytes) {
    for (int64_t line = 0; line < Dot::kBytes; line += 64) _mm_prefetch(w + 4096 + line, _MM_HINT_T0);
    Dot::add(sum, w, x[b]);
  }
  return sum.total();
}

}  // namespace keepdim::ggml
#endif
