// Elementwise kernels. Like move.cpp, rows.cpp and product.cpp: run by ggml's threads through ggml_custom_4d,
// for any strides and any rank, with the same bits whatever the number of threads; a kernel cannot fail, except
// through RunError. Their loops vectorise with -O3 -fno-math-errno -fno-trapping-math.
#include <cmath>
#include <limits>

#include "loops.h"

namespace keepdim::ggml {
namespace {

// ---- functions of one element

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
  const float large = std::copysign(1.0f - fast_exp(r), x);
  float q = -5.96761703e-4f;
  q = q * s + 4.99119423e-3f;
  q = q * s - 2.67681349e-2f;
  q = q * s + 1.12819925e-1f;
  q = q * s - 3.76125336e-1f;
  q = q * s + 1.28379166e-1f;
  const float small = q * x + x;
  return t > 0.927734375f ? large : small;
}

struct Neg { template <class T> static T f(T x) { return wrap(T(0), x, [](auto a, auto b) { return a - b; }); } };
template <> float Neg::f(float x) { return -x; }
struct Abs { template <class T> static T f(T x) { return x < 0 ? Neg::f(x) : x; } };
template <> float Abs::f(float x) { return std::fabs(x); }
struct Relu { template <class T> static T f(T x) { return x < 0 ? T(0) : x; } };  // keeps a NaN
struct Sqrt { static float f(float x) { return std::sqrt(x); } };
struct Rsqrt { static float f(float x) { return 1.0f / std::sqrt(x); } };
struct Exp { static float f(float x) { return fast_exp(x); } };
struct Log { static float f(float x) { return std::log(x); } };
struct Sin { static float f(float x) { return std::sin(x); } };
struct Cos { static float f(float x) { return std::cos(x); } };
struct Tanh { static float f(float x) { return fast_tanh(x); } };
struct Sigmoid { static float f(float x) { return 1.0f / (1.0f + fast_exp(-x)); } };
struct Silu { static float f(float x) { return x / (1.0f + fast_exp(-x)); } };
struct Gelu { static float f(float x) { return 0.5f * x * (1.0f + fast_erf(x * 0.70710678f)); } };
struct GeluTanh {
  static float f(float x) { return 0.5f * x * (1.0f + fast_tanh(0.79788456f * (x + 0.044715f * x * x * x))); }
};
struct Square { static float f(float x) { return x * x; } };
struct Cube { static float f(float x) { return x * x * x; } };
struct Reciprocal { static float f(float x) { return 1.0f / x; } };

struct Sub { template <class T> static T f(T a, T b) { return wrap(a, b, [](auto x, auto y) { return x - y; }); } };
struct Div { static float f(float a, float b) { return a / b; } };
struct Pow {
  static float f(float a, float b) { return std::pow(a, b); }
  template <class T>
  static T f(T a, T b) {
    if (b < 0) return a == 1 ? 1 : a == -1 ? (b % 2 ? -1 : 1) : 0;
    T y = 1;
    for (; b; b >>= 1, a = Mul::f(a, a))
      if (b & 1) y = Mul::f(y, a);
    return y;
  }
};

// ---- elementwise

template <class F, class T>
void map_one(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const MapJob*>(userdata);
  const int last = job.loop.rank - 1;
  const int64_t sy = job.loop.strides[0][last], sx = job.loop.strides[1][last];
  each_run(job.loop, ith, nth, [&](int64_t n, const int64_t* offset) {
    T* y = at<T>(job.data[0], offset[0]);
    const T* x = at<T>(job.data[1], offset[1]);
    if (sy == sizeof(T) && sx == sizeof(T)) {
#pragma GCC ivdep
      for (int64_t i = 0; i < n; ++i) y[i] = F::f(x[i]);
    } else {
      for (int64_t i = 0; i < n; ++i) *at<T>(y, i * sy) = F::f(*at<T>(const_cast<T*>(x), i * sx));
    }
  });
}

template <class F, class T>
void map_two(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const MapJob*>(userdata);
  const int last = job.loop.rank - 1;
  constexpr int64_t w = sizeof(T);
  const int64_t sy = job.loop.strides[0][last], sa = job.loop.strides[1][last], sb = job.loop.strides[2][last];
  T number = job.has[0] ? job.scalar[0].as<T>() : T(0);
  void* second = job.has[0] ? &number : job.data[2];
  each_run(job.loop, ith, nth, [&](int64_t n, const int64_t* offset) {
    T* y = at<T>(job.data[0], offset[0]);
    T* a = at<T>(job.data[1], offset[1]);
    T* b = at<T>(second, offset[2]);
    if (sy == w && sa == w && sb == w) {
#pragma GCC ivdep
      for (int64_t i = 0; i < n; ++i) y[i] = F::f(a[i], b[i]);
    } else if (sy == w && sa == w && sb == 0) {
      const T c = *b;
#pragma GCC ivdep
      for (int64_t i = 0; i < n; ++i) y[i] = F::f(a[i], c);
    } else if (sy == w && sa == 0 && sb == w) {
      const T c = *a;
#pragma GCC ivdep
      for (int64_t i = 0; i < n; ++i) y[i] = F::f(c, b[i]);
    } else {
      for (int64_t i = 0; i < n; ++i) *at<T>(y, i * sy) = F::f(*at<T>(a, i * sa), *at<T>(b, i * sb));
    }
  });
}

template <class T>
void clamp(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const MapJob*>(userdata);
  const int last = job.loop.rank - 1;
  const int64_t sy = job.loop.strides[0][last], sx = job.loop.strides[1][last];
  using Limits = std::numeric_limits<T>;
  T lo = Limits::has_infinity ? -Limits::infinity() : Limits::lowest();
  T hi = Limits::has_infinity ? Limits::infinity() : Limits::max();
  if (job.has[0]) lo = job.scalar[0].as<T>();
  if (job.has[1]) hi = job.scalar[1].as<T>();
  if (lo != lo || hi != hi) lo = hi = lo != lo ? lo : hi;
  const bool nan = lo != lo;
  const auto bound = [=](T v) {  // a NaN passes through both comparisons
    v = (v < lo) | nan ? lo : v;
    return v > hi ? hi : v;
  };
  each_run(job.loop, ith, nth, [&](int64_t n, const int64_t* offset) {
    T* y = at<T>(job.data[0], offset[0]);
    T* x = at<T>(job.data[1], offset[1]);
    if (sy == sizeof(T) && sx == sizeof(T)) {
#pragma GCC ivdep
      for (int64_t i = 0; i < n; ++i) y[i] = bound(x[i]);
    } else {
      for (int64_t i = 0; i < n; ++i) *at<T>(y, i * sy) = bound(*at<T>(x, i * sx));
    }
  });
}

// ---- choice

template <class F>
Kernel floats_one(DType dtype) {
  return dtype == DType::f32 ? map_one<F, float> : nullptr;
}
template <class F>
Kernel any_one(DType dtype) {
  return dtype == DType::i64 ? map_one<F, int64_t> : dtype == DType::i32 ? map_one<F, int32_t> : floats_one<F>(dtype);
}
template <class F>
Kernel any_two(DType dtype) {
  return dtype == DType::i64   ? map_two<F, int64_t>
         : dtype == DType::i32 ? map_two<F, int32_t>
         : dtype == DType::f32 ? map_two<F, float>
                               : nullptr;
}

}  // namespace

Kernel map_kernel(Fn fn, DType dtype) {
  switch (fn) {
    case Fn::neg: return any_one<Neg>(dtype);
    case Fn::abs: return any_one<Abs>(dtype);
    case Fn::relu: return any_one<Relu>(dtype);
    case Fn::sqrt: return floats_one<Sqrt>(dtype);
    case Fn::rsqrt: return floats_one<Rsqrt>(dtype);
    case Fn::exp: return floats_one<Exp>(dtype);
    case Fn::log: return floats_one<Log>(dtype);
    case Fn::sin: return floats_one<Sin>(dtype);
    case Fn::cos: return floats_one<Cos>(dtype);
    case Fn::tanh: return floats_one<Tanh>(dtype);
    case Fn::sigmoid: return floats_one<Sigmoid>(dtype);
    case Fn::silu: return floats_one<Silu>(dtype);
    case Fn::gelu: return floats_one<Gelu>(dtype);
    case Fn::gelu_tanh: return floats_one<GeluTanh>(dtype);
    case Fn::square: return floats_one<Square>(dtype);
    case Fn::cube: return floats_one<Cube>(dtype);
    case Fn::reciprocal: return floats_one<Reciprocal>(dtype);
    case Fn::add: return any_two<Add>(dtype);
    case Fn::sub: return any_two<Sub>(dtype);
    case Fn::mul: return any_two<Mul>(dtype);
    case Fn::pow: return any_two<Pow>(dtype);
    case Fn::maximum: return any_two<Maximum>(dtype);
    case Fn::minimum: return any_two<Minimum>(dtype);
    case Fn::div: return dtype == DType::f32 ? map_two<Div, float> : nullptr;
    default: return nullptr;
  }
}

double fn_cost(Fn fn) {
  switch (fn) {
    case Fn::log: case Fn::sin: case Fn::cos: case Fn::pow: return 60;
    case Fn::exp: case Fn::tanh: case Fn::sigmoid: case Fn::silu: case Fn::gelu: case Fn::gelu_tanh: return 10;
    default: return 2;
  }
}

Kernel clamp_kernel(DType dtype) {
  return dtype == DType::f32   ? clamp<float>
         : dtype == DType::i64 ? clamp<int64_t>
         : dtype == DType::i32 ? clamp<int32_t>
                               : nullptr;
}

}  // namespace keepdim::ggml
