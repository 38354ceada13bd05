// The 16-bit floats as they are stored, and how they become f32 and are made of it: alone, and in groups that stay in
// registers between reading, computing and writing.
#pragma once
#include "loops.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace keepdim::ggml {

struct Half { ggml_fp16_t bits; };
struct Brain { uint16_t bits; };  // the upper half of a float

// To the nearest, to even between two; a NaN stays one. Without a call, so that loops of it are vectorised.
inline Brain to_brain(float x) {
  const uint32_t u = bits<uint32_t>(x);
  const uint32_t nearest = u + 0x7fff + (u >> 16 & 1);
  return {static_cast<uint16_t>((x != x ? u | 0x400000 : nearest) >> 16)};
}

template <class From>
auto widen(From x) {
  if constexpr (std::is_same_v<From, Half>) return ggml_fp16_to_fp32(x.bits);
  else if constexpr (std::is_same_v<From, Brain>) return bits<float>(static_cast<uint32_t>(x.bits) << 16);
  else return x;
}

template <class S>
S narrow(float x) {
  if constexpr (std::is_same_v<S, Half>) return {ggml_fp32_to_fp16(x)};
  else return to_brain(x);
}

template <class S>
constexpr bool kIsHalf = std::is_same_v<S, Half> || std::is_same_v<S, Brain>;
template <class S>
using Computed = std::conditional_t<kIsHalf<S>, float, S>;

constexpr int kGroup = 8;

#if defined(__F16C__)
inline void read_group(float* y, const Half* x) {
  _mm256_storeu_ps(y, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))));
}
inline void write_group(Half* y, const float* x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(y), _mm256_cvtps_ph(_mm256_loadu_ps(x), _MM_FROUND_TO_NEAREST_INT));
}
#else
inline void read_group(float* y, const Half* x) { ggml_cpu_fp16_to_fp32(&x->bits, y, kGroup); }
inline void write_group(Half* y, const float* x) { ggml_cpu_fp32_to_fp16(x, &y->bits, kGroup); }
#endif

// y[i] = f(x[i]…) of f32 for n elements; operands that are one for all are numbers of f's own. A last part of a group is
// filled up.
template <class F, class... X>
void map_half(Half* y, int64_t n, F&& f, const X*... x) {
  struct Read {
    float values[kGroup];
    explicit Read(const Half* from) { read_group(values, from); }
  };
  const auto compute = [&](Half* to, const auto&... read) {
    float made[kGroup];
    for (int i = 0; i < kGroup; ++i) made[i] = f(read.values[i]...);
    write_group(to, made);
  };
  int64_t i = 0;
  for (; i + kGroup <= n; i += kGroup) compute(y + i, Read(x + i)...);
  if (i == n) return;
  struct Part {
    Half values[kGroup] = {};
    Part(const Half* from, int64_t count) { std::copy(from, from + count, values); }
  };
  Half made[kGroup];
  compute(made, Read(Part(x + i, n - i).values)...);
  std::copy(made, made + (n - i), y + i);
}
template <class F, class... X>
void map_half(Brain* y, int64_t n, F&& f, const X*... x) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) y[i] = to_brain(f(widen(x[i])...));
}

}  // namespace keepdim::ggml
