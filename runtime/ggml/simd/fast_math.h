// Exponentials and functions made of them, for scalars in loops that compilers vectorise and for SIMD vectors.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "ggml/simd/vector.h"

namespace keepdim::ggml {

template <class To, class From>
To bit_cast(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  std::memcpy(&y, &x, sizeof(y));
  return y;
}

// F is float or a SIMD vector of floats in these functions; the operations are the same.
template <class F>
using IntegersOf = std::conditional_t<std::is_same_v<F, float>, int32_t, decltype(std::declval<F>() < std::declval<F>())>;

// Range reduction: e^x = e^r * 2^n with |r| <= ln 2 / 2.
template <class F>
struct SplitExp {
  F exp_r;  // e^r
  IntegersOf<F> n;
};
template <class F>
inline __attribute__((always_inline)) SplitExp<F> split_exp(F x) {
  const F shifted = x * 1.44269504f + 12582912.0f;
  const F n = shifted - 12582912.0f;
  const F r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  F p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  return {p * (r * r) + r + 1.0f, bit_cast<IntegersOf<F>>(shifted) - bit_cast<int32_t>(12582912.0f)};
}
template <class F = float>
inline __attribute__((always_inline)) F power_of_two(IntegersOf<F> n) {  // -127 <= n <= 128
  return bit_cast<F>((n + 127) << 23);
}

// Within 2 ulp of expf; overflows to inf and underflows to 0 as expf does.
template <class F>
inline __attribute__((always_inline)) F fast_exp(F x) {
  const auto [exp_r, n] = split_exp(clamp<F>(x, F() - 104.0f, F() + 89.0f));
  const IntegersOf<F> half = n >> 1;  // 2^n in two factors, since n may exceed the exponent range
  return exp_r * power_of_two<F>(half) * power_of_two<F>(n - half);
}

// 2^f for |f| <= 0.5.
template <class F>
inline __attribute__((always_inline)) F exp2_fraction(F f) {
  F p = f * 1.53533620e-4f + 1.33988750e-3f;
  p = p * f + 9.61843692e-3f;
  p = p * f + 5.55033237e-2f;
  p = p * f + 2.40226477e-1f;
  p = p * f + 6.93147182e-1f;
  return p * f + 1.0f;
}

constexpr float kExponentShift = 12582912.0f + 127.0f;  // x + this has round(x) + 127 in its lowest bits

// The float whose exponent is in the lowest bits of x.
template <class F>
inline __attribute__((always_inline)) F shifted_exponent(F x) {
  if constexpr (std::is_same_v<F, float>)
    return bit_cast<float>(bit_cast<uint32_t>(x) << 23);
  else
    return bit_cast<F>(bit_cast<IntegersOf<F>>(x) << 23);
}

// 2^x for -126 <= x < 128.
inline float fast_exp2(float x) {
  const float shifted = x + kExponentShift;
  return exp2_fraction(x - (shifted - kExponentShift)) * shifted_exponent(shifted);
}

// 1 / (1 + e^-x), within 3 ulp where that is above 1e-38; 0 below. Cheaper than with fast_exp: e^-x is 2^n * 2^f with
// |f| <= 0.5 and one factor 2^n, which may be inf, and is not needed exactly where it is lost beside 1.
template <class F>
inline __attribute__((always_inline)) F fast_sigmoid(F x) {
  constexpr float log2_e = -1.44269502f, rest = -1.92596303e-8f;
  x = clamp<F>(x, F() - 88.8f, F() + 87.3f);  // n from -126 to 128
  const F shifted = x * log2_e + kExponentShift;
  const F f = x * rest + (x * log2_e - (shifted - kExponentShift));
  return 1.0f / (exp2_fraction(f) * shifted_exponent(shifted) + 1.0f);
}

inline float fast_tanh(float x) {
  const float t = std::fabs(x), s = x * x;
  float p = -5.70498872745e-3f;
  p = p * s + 2.06390887954e-2f;
  p = p * s - 5.37397155531e-2f;
  p = p * s + 1.33314422036e-1f;
  p = p * s - 3.33332819422e-1f;
  const float small = p * s * x + x;
  const float large = std::copysign(1.0f - 2.0f / (fast_exp(2.0f * t) + 1.0f), x);
  return t < 0.625f ? small : large;
}

inline float fast_erf(float x) {
  const float t = std::fabs(x), s = x * x;
  float r = -1.72853470e-5f * t + 3.83197126e-4f;
  r = r * s + (-3.88396438e-3f * t + 2.42546219e-2f);
  r = r * t - 1.06777877e-1f;
  r = r * t - 6.34846687e-1f;
  r = r * t - 1.28717512e-1f;
  r = r * t - t;
  const auto [exp_r, n] = split_exp(r < -87.0f ? -87.0f : r);  // r <= 0; below -87 the result is 1
  const float large = std::copysign(1.0f - exp_r * power_of_two(n), x);
  float q = -5.96761703e-4f;
  q = q * s + 4.99119423e-3f;
  q = q * s - 2.67681349e-2f;
  q = q * s + 1.12819925e-1f;
  q = q * s - 3.76125336e-1f;
  q = q * s + 1.28379166e-1f;
  const float small = q * x + x;
  return t > 0.927734375f ? large : small;
}

// Normal CDF, absolute error within 4e-8: 2^p with a polynomial in |x|, which approximates log2 CDF(-|x|).
inline float fast_normal_cdf(float x) {
  const float t = std::fabs(x);
  float p = -2.31832848e-08f;
  p = p * t + 7.20665870e-07f;
  p = p * t - 9.56398616e-06f;
  p = p * t + 6.87693476e-05f;
  p = p * t - 2.54947422e-04f;
  p = p * t - 4.76227298e-05f;
  p = p * t + 7.00085007e-03f;
  p = p * t - 5.24751261e-02f;
  p = p * t - 4.59210446e-01f;
  p = p * t - 1.15110534e+00f;
  p = p * t - 1.0f;
  const float rest = p < -126.0f ? 0.0f : fast_exp2(p < -126.0f ? -126.0f : p);
  return x > 0 ? 1.0f - rest : rest;
}

}  // namespace keepdim::ggml
