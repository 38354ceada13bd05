// ggml's blocks of weights as they lie in files; and, on AVX2, how one becomes f32.
#pragma once
#include <cstdint>
#include <cstring>

namespace keepdim::ggml {

constexpr int64_t kBlock32 = 32;  // weights of a block, but of K types

struct BlockQ8 {  // q8_0: w = d * q
  uint16_t d;
  int8_t q[32];
};
struct BlockQ4 {  // q4_0: w = d * (q - 8); the low four bits of all bytes first
  uint16_t d;
  uint8_t q[16];
};
struct BlockQ4m {  // q4_1: w = d * q + m
  uint16_t d, m;
  uint8_t q[16];
};
struct BlockQ5 {  // q5_0: w = d * (q - 16); the fifth bits are in h
  uint16_t d;
  uint8_t h[4], q[16];
};
struct BlockQ5m {  // q5_1: w = d * q + m
  uint16_t d, m;
  uint8_t h[4], q[16];
};
struct BlockQ6k {  // q6_k: w = d * scale * (q - 32), a scale for each 16 of 256
  uint8_t low[128], high[64];
  int8_t scales[16];
  uint16_t d;
};
static_assert(sizeof(BlockQ8) == 34 && sizeof(BlockQ4) == 18 && sizeof(BlockQ4m) == 20);
static_assert(sizeof(BlockQ5) == 22 && sizeof(BlockQ5m) == 24 && sizeof(BlockQ6k) == 210);

}  // namespace keepdim::ggml

#ifdef __AVX2__
#include <immintrin.h>

namespace keepdim::ggml {

inline __m128i load128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }

// y = q * scale + least for 16 bytes.
inline void read_bytes(__m128i q, float scale, float least, float* y) {
  const __m256 factor = _mm256_set1_ps(scale), term = _mm256_set1_ps(least);
  const __m256i first = _mm256_cvtepi8_epi32(q), second = _mm256_cvtepi8_epi32(_mm_unpackhi_epi64(q, q));
  _mm256_storeu_ps(y, _mm256_fmadd_ps(_mm256_cvtepi32_ps(first), factor, term));
  _mm256_storeu_ps(y + 8, _mm256_fmadd_ps(_mm256_cvtepi32_ps(second), factor, term));
}

// Some bits of every byte, moved down.
inline __m128i bits_of(__m128i bytes, int down, int mask) {
  return _mm_and_si128(_mm_srl_epi16(bytes, _mm_cvtsi32_si128(down)), _mm_set1_epi8(static_cast<char>(mask)));
}

inline void read_nibbles(const uint8_t* q, float scale, float least, float* y) {
  read_bytes(bits_of(load128(q), 0, 15), scale, least, y);
  read_bytes(bits_of(load128(q), 4, 15), scale, least, y + 16);
}

inline void read_fives(const uint8_t* q, const uint8_t* h, float scale, float least, float* y) {
  const __m128i own_bit = _mm_set1_epi64x(static_cast<int64_t>(0x8040201008040201u));
  for (int half = 0; half < 2; ++half) {
    const __m128i eights = _mm_unpacklo_epi64(_mm_set1_epi8(static_cast<char>(h[2 * half])),
                                              _mm_set1_epi8(static_cast<char>(h[2 * half + 1])));
    const __m128i set = _mm_cmpeq_epi8(_mm_and_si128(eights, own_bit), own_bit);
    const __m128i fifth = _mm_and_si128(set, _mm_set1_epi8(16));
    read_bytes(_mm_or_si128(bits_of(load128(q), 4 * half, 15), fifth), scale, least, y + 16 * half);
  }
}

inline void read_block(const BlockQ8& b, float* y) {
  read_bytes(load128(b.q), _cvtsh_ss(b.d), 0, y);
  read_bytes(load128(b.q + 16), _cvtsh_ss(b.d), 0, y + 16);
}
inline void read_block(const BlockQ4& b, float* y) { read_nibbles(b.q, _cvtsh_ss(b.d), -8 * _cvtsh_ss(b.d), y); }
inline void read_block(const BlockQ4m& b, float* y) { read_nibbles(b.q, _cvtsh_ss(b.d), _cvtsh_ss(b.m), y); }
inline void read_block(const BlockQ5& b, float* y) { read_fives(b.q, b.h, _cvtsh_ss(b.d), -16 * _cvtsh_ss(b.d), y); }
inline void read_block(const BlockQ5m& b, float* y) { read_fives(b.q, b.h, _cvtsh_ss(b.d), _cvtsh_ss(b.m), y); }

inline void read_block(const BlockQ6k& b, float* y) {
  const float scale = _cvtsh_ss(b.d);
  for (int half = 0; half < 2; ++half)
    for (int i = 0; i < 8; ++i, y += 16) {  // 16 weights: a part of a quarter
      const int quarter = i / 2, part = i % 2;
      const __m128i four = bits_of(load128(b.low + 64 * half + 32 * (quarter % 2) + 16 * part), quarter / 2 * 4, 15);
      const __m128i two = bits_of(load128(b.high + 32 * half + 16 * part), 2 * quarter, 3);
      const float factor = scale * static_cast<float>(b.scales[8 * half + i]);
      read_bytes(_mm_or_si128(four, _mm_slli_epi16(two, 4)), factor, -32 * factor, y);
    }
}

}  // namespace keepdim::ggml
#endif
