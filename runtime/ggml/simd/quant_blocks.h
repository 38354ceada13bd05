// ggml's quantised weight blocks in their file layout and, on AVX2, their conversion to f32.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace keepdim::ggml {

constexpr int64_t kBlock32 = 32;  // weights per block, except for K-quants and iq4_xs

// Whether the int16 GEMM is available (kernels/gemm_int16_vnni.cpp).
#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define KEEPDIM_INT16_GEMM
constexpr bool kInt16Gemm = true;
#else
constexpr bool kInt16Gemm = false;
#endif

// Dot products of unsigned with signed bytes that sum in int32.
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
#define KEEPDIM_VNNI
#endif

// Whether the int8 GEMM is available (kernels/gemm_int8.cpp).
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && (!defined(__AVX512F__) || defined(__AVX512BW__))
#define KEEPDIM_INT8_GEMM
constexpr bool kInt8Gemm = true;
#else
constexpr bool kInt8Gemm = false;
#endif

struct BlockQ8 {  // q8_0: w = d * q
  uint16_t d;
  int8_t q[32];
};
struct BlockQ4 {  // q4_0: w = d * (q - 8); low nibbles are weights 0..15, high nibbles 16..31
  uint16_t d;
  uint8_t q[16];
};
struct BlockQ4m {  // q4_1: w = d * q + m
  uint16_t d, m;
  uint8_t q[16];
};
struct BlockQ5 {  // q5_0: w = d * (q - 16); h has the fifth bits
  uint16_t d;
  uint8_t h[4], q[16];
};
struct BlockQ5m {  // q5_1: w = d * q + m
  uint16_t d, m;
  uint8_t h[4], q[16];
};
struct BlockQ6k {  // q6_k: w = d * scale * (q - 32), 256 weights with a scale per 16
  uint8_t low[128], high[64];
  int8_t scales[16];
  uint16_t d;
};
struct BlockIq4nl {  // iq4_nl: w = d * kIq4Values[q]; low nibbles are weights 0..15, high nibbles 16..31
  uint16_t d;
  uint8_t q[16];
};
struct BlockIq4xs {         // iq4_xs: w = d * (scale - 32) * kIq4Values[q], a scale per 32 of 256 weights, nibbles as in iq4_nl
  uint16_t d, scales_high;  // two bits per scale
  uint8_t scales_low[4], q[128];  // four bits per scale
};
alignas(16) constexpr int8_t kIq4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
static_assert(sizeof(BlockQ8) == 34 && sizeof(BlockQ4) == 18 && sizeof(BlockQ4m) == 20);
static_assert(sizeof(BlockQ5) == 22 && sizeof(BlockQ5m) == 24 && sizeof(BlockQ6k) == 210);
static_assert(sizeof(BlockIq4nl) == 18 && sizeof(BlockIq4xs) == 136);

}  // namespace keepdim::ggml

#ifdef __AVX2__
#include <immintrin.h>

namespace keepdim::ggml {

inline __m128i load128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }

// y [16] = q * scale + min for 16 int8.
inline void dequantise_16(__m128i q, float scale, float min, float* y) {
  const __m256 factor = _mm256_set1_ps(scale), term = _mm256_set1_ps(min);
  const __m256i first = _mm256_cvtepi8_epi32(q), second = _mm256_cvtepi8_epi32(_mm_unpackhi_epi64(q, q));
  _mm256_storeu_ps(y, _mm256_fmadd_ps(_mm256_cvtepi32_ps(first), factor, term));
  _mm256_storeu_ps(y + 8, _mm256_fmadd_ps(_mm256_cvtepi32_ps(second), factor, term));
}

// (byte >> down) & mask for every byte.
inline __m128i extract_bits(__m128i bytes, int down, int mask) {
  return _mm_and_si128(_mm_srl_epi16(bytes, _mm_cvtsi32_si128(down)), _mm_set1_epi8(static_cast<char>(mask)));
}

inline __m128i unpack_4bit(const uint8_t* q, int half) { return extract_bits(load128(q), 4 * half, 15); }

// Sets bit 4 of each nibble from h.
inline __m128i unpack_5bit(const uint8_t* q, const uint8_t* h, int half) {
  const __m128i lane_bit = _mm_set1_epi64x(static_cast<int64_t>(0x8040201008040201u));
  const __m128i high_bits =
      _mm_unpacklo_epi64(_mm_set1_epi8(static_cast<char>(h[2 * half])), _mm_set1_epi8(static_cast<char>(h[2 * half + 1])));
  const __m128i set = _mm_cmpeq_epi8(_mm_and_si128(high_bits, lane_bit), lane_bit);
  return _mm_or_si128(unpack_4bit(q, half), _mm_and_si128(set, _mm_set1_epi8(16)));
}

// Blocks of 32 as w = scale * q + min: 16 of the q as int8.
inline __m128i unpack_half(const BlockQ8& b, int half) { return load128(b.q + 16 * half); }
inline __m128i unpack_half(const BlockQ4& b, int half) { return _mm_sub_epi8(unpack_4bit(b.q, half), _mm_set1_epi8(8)); }
inline __m128i unpack_half(const BlockQ4m& b, int half) { return unpack_4bit(b.q, half); }
inline __m128i unpack_half(const BlockQ5& b, int half) { return _mm_sub_epi8(unpack_5bit(b.q, b.h, half), _mm_set1_epi8(16)); }
inline __m128i unpack_half(const BlockQ5m& b, int half) { return unpack_5bit(b.q, b.h, half); }
inline __m128i unpack_half(const BlockIq4nl& b, int half) {
  return _mm_shuffle_epi8(load128(kIq4Values), unpack_4bit(b.q, half));
}
template <class Block>
constexpr bool kHasMin = std::is_same_v<Block, BlockQ4m> || std::is_same_v<Block, BlockQ5m>;
template <class Block>
float block_min(const Block& b) {
  if constexpr (kHasMin<Block>) return _cvtsh_ss(b.m);
  return 0;
}

template <class Block>
void dequantise_block(const Block& b, float* y) {
  for (int half = 0; half < 2; ++half) dequantise_16(unpack_half(b, half), _cvtsh_ss(b.d), block_min(b), y + 16 * half);
}

inline void dequantise_block(const BlockQ6k& b, float* y) {
  const float scale = _cvtsh_ss(b.d);
  for (int half = 0; half < 2; ++half)
    for (int i = 0; i < 8; ++i, y += 16) {  // 16 weights
      const int quarter = i / 2, part = i % 2;
      const __m128i low4 = extract_bits(load128(b.low + 64 * half + 32 * (quarter % 2) + 16 * part), quarter / 2 * 4, 15);
      const __m128i high2 = extract_bits(load128(b.high + 32 * half + 16 * part), 2 * quarter, 3);
      const float factor = scale * static_cast<float>(b.scales[8 * half + i]);
      dequantise_16(_mm_or_si128(low4, _mm_slli_epi16(high2, 4)), factor, -32 * factor, y);
    }
}

inline void dequantise_block(const BlockIq4xs& b, float* y) {
  uint32_t low;
  std::memcpy(&low, b.scales_low, sizeof(low));
  for (int i = 0; i < 8; ++i) {  // 32 weights
    const uint32_t scale = (low >> (4 * i) & 15) | (b.scales_high >> (2 * i) & 3u) << 4;
    const float factor = _cvtsh_ss(b.d) * static_cast<float>(static_cast<int>(scale) - 32);
    for (int half = 0; half < 2; ++half, y += 16)
      dequantise_16(_mm_shuffle_epi8(load128(kIq4Values), unpack_4bit(b.q + 16 * i, half)), factor, 0, y);
  }
}

}  // namespace keepdim::ggml
#endif
