// ggml's blocks of 32 weights as they lie in files, and how one becomes f32.
#pragma once
#include <cstdint>
#include <cstring>

namespace keepdim::ggml {

constexpr int64_t kBlock32 = 32;

inline float half_to_float(uint16_t bits) {
  _Float16 x;
  std::memcpy(&x, &bits, sizeof(x));
  return static_cast<float>(x);
}

struct BlockQ8 {  // q8_0: w = d * q
  uint16_t d;
  int8_t q[32];

  void read(float* y) const {
    const float scale = half_to_float(d);
    for (int i = 0; i < 32; ++i) y[i] = static_cast<float>(q[i]) * scale;
  }
};

struct BlockQ4 {  // q4_0: w = d * (q - 8); the low four bits are the first half
  uint16_t d;
  uint8_t q[16];

  void read(float* y) const {
    const float scale = half_to_float(d);
    for (int i = 0; i < 16; ++i) {
      y[i] = static_cast<float>((q[i] & 15) - 8) * scale;
      y[i + 16] = static_cast<float>((q[i] >> 4) - 8) * scale;
    }
  }
};

struct BlockQ4m {  // q4_1: w = d * q + m
  uint16_t d, m;
  uint8_t q[16];

  void read(float* y) const {
    const float scale = half_to_float(d), least = half_to_float(m);
    for (int i = 0; i < 16; ++i) {
      y[i] = static_cast<float>(q[i] & 15) * scale + least;
      y[i + 16] = static_cast<float>(q[i] >> 4) * scale + least;
    }
  }
};

static_assert(sizeof(BlockQ8) == 34 && sizeof(BlockQ4) == 18 && sizeof(BlockQ4m) == 20);

}  // namespace keepdim::ggml
