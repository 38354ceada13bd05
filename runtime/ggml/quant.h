// ggml's blocks of 32 weights as they lie in files, and how one becomes f32.
#pragma once
#ifdef __AVX2__
#include <immintrin.h>
#endif

#include <cstdint>
#include <cstring>

namespace keepdim::ggml {

constexpr int64_t kBlock32 = 32;

inline float half_to_float(uint16_t bits) {
  _Float16 x;
  std::memcpy(&x, &bits, sizeof(x));
  return static_cast<float>(x);
}

// y = q * scale + least, for the low four bits of 16 bytes and behind them for the high ones.
inline void read_nibbles(const uint8_t* q, float scale, float least, float* y) {
#ifdef __AVX2__
  const __m128i all = _mm_loadu_si128(reinterpret_cast<const __m128i*>(q)), nibble = _mm_set1_epi8(15);
  const __m128i halves[2] = {_mm_and_si128(all, nibble), _mm_and_si128(_mm_srli_epi16(all, 4), nibble)};
  const __m256 factor = _mm256_set1_ps(scale), term = _mm256_set1_ps(least);
  for (int i = 0; i < 4; ++i) {
    const __m128i eight = i % 2 ? _mm_unpackhi_epi64(halves[i / 2], halves[i / 2]) : halves[i / 2];
    const __m256 whole = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(eight));
    _mm256_storeu_ps(y + 8 * i, _mm256_fmadd_ps(whole, factor, term));
  }
#else
  for (int i = 0; i < 16; ++i) {
    y[i] = static_cast<float>(q[i] & 15) * scale + least;
    y[i + 16] = static_cast<float>(q[i] >> 4) * scale + least;
  }
#endif
}

struct BlockQ8 {  // q8_0: w = d * q
  uint16_t d;
  int8_t q[32];

  void read(float* y) const {
    const float scale = half_to_float(d);
    for (int i = 0; i < 32; ++i) y[i] = static_cast<float>(q[i]) * scale;
  }
};

struct BlockQ4 {  // q4_0: w = d * (q - 8)
  uint16_t d;
  uint8_t q[16];

  void read(float* y) const {
    const float scale = half_to_float(d);
    read_nibbles(q, scale, -8 * scale, y);
  }
};

struct BlockQ4m {  // q4_1: w = d * q + m
  uint16_t d, m;
  uint8_t q[16];

  void read(float* y) const { read_nibbles(q, half_to_float(d), half_to_float(m), y); }
};

static_assert(sizeof(BlockQ8) == 34 && sizeof(BlockQ4) == 18 && sizeof(BlockQ4m) == 20);

}  // namespace keepdim::ggml
