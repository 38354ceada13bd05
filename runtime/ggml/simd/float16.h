// 16-bit float storage types and their conversion from and to f32: scalar, and in groups of 8 for elementwise loops.
#pragma once
#include "ggml/kernels/strided_loop.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace keepdim::ggml {

struct Float16 {
  ggml_fp16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};  // the upper 16 bits of a float

// Rounds to nearest even; NaN stays NaN. Inline, so that loops vectorise.
inline BFloat16 to_bfloat16(float x) {
  const uint32_t u = bit_cast<uint32_t>(x);
  const uint32_t nearest = u + 0x7fff + (u >> 16 & 1);
  return {static_cast<uint16_t>((x != x ? u | 0x400000 : nearest) >> 16)};
}

template <class From>
auto widen(From x) {
  if constexpr (std::is_same_v<From, Float16>)
    return ggml_fp16_to_fp32(x.bits);
  else if constexpr (std::is_same_v<From, BFloat16>)
    return bit_cast<float>(static_cast<uint32_t>(x.bits) << 16);
  else
    return x;
}

template <class S>
S narrow(float x) {
  if constexpr (std::is_same_v<S, Float16>)
    return {ggml_fp32_to_fp16(x)};
  else
    return to_bfloat16(x);
}

template <class S>
constexpr bool kIsFloat16 = std::is_same_v<S, Float16> || std::is_same_v<S, BFloat16>;
template <class S>
using ComputeType = std::conditional_t<kIsFloat16<S>, float, S>;

constexpr int kGroup = 8;

#if defined(__F16C__)
inline void read_group(float* y, const Float16* x) {
  _mm256_storeu_ps(y, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))));
}
inline void write_group(Float16* y, const float* x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(y), _mm256_cvtps_ph(_mm256_loadu_ps(x), _MM_FROUND_TO_NEAREST_INT));
}
#else
inline void read_group(float* y, const Float16* x) { ggml_cpu_fp16_to_fp32(&x->bits, y, kGroup); }
inline void write_group(Float16* y, const float* x) { ggml_cpu_fp32_to_fp16(x, &y->bits, kGroup); }
#endif

// y[i] = f(x[i]…) in f32 for n elements; scalar operands are captured by f. The last group is padded.
template <class F, class... X>
void map_float16(Float16* y, int64_t n, F&& f, const X*... x) {
  struct Read {
    float values[kGroup];
    explicit Read(const Float16* from) { read_group(values, from); }
  };
  const auto compute = [&](Float16* to, const auto&... read) {
    float result[kGroup];
    for (int i = 0; i < kGroup; ++i) result[i] = f(read.values[i]...);
    write_group(to, result);
  };
  int64_t i = 0;
  for (; i + kGroup <= n; i += kGroup) compute(y + i, Read(x + i)...);
  if (i == n) return;
  struct Part {
    Float16 values[kGroup] = {};
    Part(const Float16* from, int64_t count) { std::copy(from, from + count, values); }
  };
  Float16 result[kGroup];
  compute(result, Read(Part(x + i, n - i).values)...);
  std::copy(result, result + (n - i), y + i);
}
template <class F, class... X>
void map_float16(BFloat16* y, int64_t n, F&& f, const X*... x) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) y[i] = to_bfloat16(f(widen(x[i])...));
}

}  // namespace keepdim::ggml
