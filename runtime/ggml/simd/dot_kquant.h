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

// 256 activations.
struct KActivations {
  int8_t q[kSuperBlock];
  float scale[8], sum[8];  // of each 32; sum: scale * q
  float sum16[16];         // of each 16

  void quantise(const float* x) {
    for (int b = 0; b < 8; ++b) {
      int32_t sums[2];
      scale[b] = quantise_int8(x + 32 * b, q + 32 * b, sums);
      sum[b] = scale[b] * static_cast<float>(sums[0] + sums[1]);
      for (int half = 0; half < 2; ++half) sum16[2 * b + half] = scale[b] * static_cast<float>(sums[half]);
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
  __m256 dots[4] = {}, mins = {};

  float total() const {
    const __m256 pairs[2] = {_mm256_add_ps(dots[0], dots[1]), _mm256_add_ps(dots[2], dots[3])};
    return horizontal_sum(_mm256_add_ps(_mm256_add_ps(pairs[0], pairs[1]), mins));
  }
};

// q4_k and q5_k: d and dmin as f16, 6-bit scales and minima of 8 blocks of 32 in 12 bytes, [fifth bits], nibbles.
template <bool fifth_bits>
struct KDot45 {
  using Activations = KActivations;
  static constexpr int64_t kBytes = fifth_bits ? 176 : 144;

  static void add(KDotSums& sum, const uint8_t* w, const KActivations& x) {
    uint32_t packed[3];
    std::memcpy(packed, w + 4, sizeof(packed));
    constexpr uint32_t six = 0x3f3f3f3f, four = 0x0f0f0f0f, two = 0x30303030;
    const auto join = [](uint32_t low, uint32_t high) { return low | static_cast<uint64_t>(high) << 32; };
    const uint64_t scales = join(packed[0] & six, (packed[2] & four) | (packed[0] >> 2 & two));
    const uint64_t mins = join(packed[1] & six, (packed[2] >> 4 & four) | (packed[1] >> 2 & two));
    alignas(32) float scale[8];
    _mm256_store_ps(scale,
                    _mm256_mul_ps(_mm256_mul_ps(bytes_to_float(scales), _mm256_loadu_ps(x.scale)), _mm256_set1_ps(read_f16(w))));
    const __m256 min = _mm256_mul_ps(bytes_to_float(mins), _mm256_set1_ps(-read_f16(w + 2)));
    sum.mins = _mm256_fmadd_ps(min, _mm256_loadu_ps(x.sum), sum.mins);
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
  using Activations = KActivations;
  static constexpr int64_t kBytes = sizeof(BlockQ6k);

  static void add(KDotSums& sum, const uint8_t* w, const KActivations& x) {
    const auto& block = *reinterpret_cast<const BlockQ6k*>(w);
    const float d = _cvtsh_ss(block.d);
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
        const __m256 product = _mm256_mul_ps(scale, _mm256_broadcast_ss(x.scale + 4 * half + b));
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
