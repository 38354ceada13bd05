// Elementwise kernels and data movement. Like rows.cpp and product.cpp: run by ggml's threads through ggml_custom_4d,
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

// Storage types of the 16-bit floats; the others are their own.
struct Half { ggml_fp16_t bits; };
struct Brain { ggml_bf16_t bits; };

template <class From>
auto widen(From x) {
  if constexpr (std::is_same_v<From, Half>) return ggml_fp16_to_fp32(x.bits);
  else if constexpr (std::is_same_v<From, Brain>) return ggml_bf16_to_fp32(x.bits);
  else return x;
}

template <class To, class From>
To convert(From stored) {
  const auto x = widen(stored);
  using Wide = decltype(x);
  if constexpr (std::is_same_v<To, bool>) return x != 0;
  else if constexpr (std::is_same_v<To, Half>) return {ggml_fp32_to_fp16(static_cast<float>(x))};
  else if constexpr (std::is_same_v<To, Brain>) return {ggml_fp32_to_bf16(static_cast<float>(x))};
  else if constexpr (std::is_integral_v<To> && std::is_floating_point_v<std::remove_const_t<Wide>>) {
    return static_cast<To>(truncate(x));
  } else return static_cast<To>(x);
}

template <class From, class To>
void cast(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const MapJob*>(userdata);
  const int last = job.loop.rank - 1;
  const int64_t sy = job.loop.strides[0][last], sx = job.loop.strides[1][last];
  each_run(job.loop, ith, nth, [&](int64_t n, const int64_t* offset) {
    To* y = at<To>(job.data[0], offset[0]);
    From* x = at<From>(job.data[1], offset[1]);
    if (sy == sizeof(To) && sx == sizeof(From)) {
      // ggml has the half floats in vectors.
      if constexpr (std::is_same_v<From, float> && std::is_same_v<To, Half>)
        ggml_cpu_fp32_to_fp16(x, &y->bits, n);
      else if constexpr (std::is_same_v<From, Half> && std::is_same_v<To, float>)
        ggml_cpu_fp16_to_fp32(&x->bits, y, n);
      else
        for (int64_t i = 0; i < n; ++i) y[i] = convert<To>(x[i]);
    } else {
      for (int64_t i = 0; i < n; ++i) *at<To>(y, i * sy) = convert<To>(*at<From>(x, i * sx));
    }
  });
}

// ---- data movement

constexpr int64_t kTile = 16;

// A transpose of the two innermost dims, in tiles that stay in the first cache.
template <class T>
void copy_transposed(const Job& job, int ith, int nth) {
  const Loop& loop = job.loop;
  const int last = loop.rank - 1;
  const int64_t rows = loop.dims[last - 1], cols = loop.dims[last];
  const int64_t sy = loop.strides[0][last - 1], sx = loop.strides[1][last];
  const int64_t tiles = (rows + kTile - 1) / kTile;
  Loop outer = loop;
  outer.rank = last - 1;
  outer.push(tiles, kTile * sy, kTile * static_cast<int64_t>(sizeof(T)));
  each_row(outer, kTile * cols, ith, nth, [&](int64_t position, const int64_t* offset) {
    char* y0 = at<char>(job.data[0], offset[0]);
    const char* x0 = at<char>(job.data[1], offset[1]);
    const int64_t height = std::min(kTile, rows - position % tiles * kTile);
    for (int64_t c0 = 0; c0 < cols; c0 += kTile) {
      const int64_t width = std::min(kTile, cols - c0);
      T tile[kTile][kTile];  // read along the source, written along the result
      for (int64_t c = 0; c < width; ++c) std::memcpy(tile[c], x0 + (c0 + c) * sx, height * sizeof(T));
      for (int64_t r = 0; r < height; ++r) {
        T* y = reinterpret_cast<T*>(y0 + r * sy) + c0;
        for (int64_t c = 0; c < width; ++c) y[c] = tile[c][r];
      }
    }
  });
}

template <class T>
void copy(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const Job*>(userdata);
  const int last = job.loop.rank - 1;
  constexpr int64_t w = sizeof(T);
  const int64_t sy = job.loop.strides[0][last], sx = job.loop.strides[1][last];
  if (last > 0 && sy == w && sx != w && job.loop.strides[1][last - 1] == w) return copy_transposed<T>(job, ith, nth);
  each_run(job.loop, ith, nth, [&](int64_t n, const int64_t* offset) {
    T* y = at<T>(job.data[0], offset[0]);
    T* x = at<T>(job.data[1], offset[1]);
    if (sy == w && sx == w) {
      std::memcpy(y, x, n * w);
    } else if (sy == w && sx == 0) {
      std::fill(y, y + n, *x);
    } else {
      for (int64_t i = 0; i < n; ++i) *at<T>(y, i * sy) = *at<T>(x, i * sx);
    }
  });
}

template <class T>
void fill(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const FillJob*>(userdata);
  T* y = static_cast<T*>(job.data[0]);
  const bool whole = std::is_integral_v<T> && !std::is_same_v<T, bool>;
  const double start = job.scalar[0].as<double>(), step = job.scalar[1].as<double>();
  const int64_t first = job.scalar[0].as<int64_t>(), stride = job.scalar[1].as<int64_t>();
  each_run(job.loop, ith, nth, [&](int64_t n, const int64_t* offset) {
    const int64_t begin = offset[0] / static_cast<int64_t>(sizeof(T));
    for (int64_t i = begin; i < begin + n; ++i) {
      if constexpr (whole) y[i] = static_cast<T>(Add::f(first, Mul::f(i, stride)));
      else y[i] = convert<T>(start + static_cast<double>(i) * step);
    }
  });
}

void gather(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const GatherJob*>(userdata);
  if (job.count * job.row_bytes < 4 * kGrain) {
    if (ith) return;
    nth = 1;
  }
  const Span span = share(job.count, ith, nth);
  char* y = static_cast<char*>(job.data[0]) + span.begin * job.row_bytes;
  for (int64_t i = span.begin; i < span.end; ++i, y += job.row_bytes) {
    const void* list = job.data[2];
    const int64_t index = job.wide ? static_cast<const int64_t*>(list)[i] : static_cast<const int32_t*>(list)[i];
    if (index >= 0 && index < job.limit) {
      std::memcpy(y, static_cast<const char*>(job.data[1]) + index * job.row_bytes, job.row_bytes);
      continue;
    }
    std::memset(y, 0, job.row_bytes);
    std::lock_guard<std::mutex> lock(job.error->mutex);
    if (!job.error->job || (job.error->job == &job && i < job.error->position)) {
      job.error->job = &job;
      job.error->position = i;
      job.error->index = index;
    }
  }
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
// Calls visit with a value of the storage type of `dtype`.
template <class Visit>
Kernel with_type(DType dtype, Visit&& visit) {
  switch (dtype) {
    case DType::f32: return visit(float());
    case DType::f64: return visit(double());
    case DType::f16: return visit(Half());
    case DType::bf16: return visit(Brain());
    case DType::i8: return visit(int8_t());
    case DType::u8: return visit(uint8_t());
    case DType::i16: return visit(int16_t());
    case DType::i32: return visit(int32_t());
    case DType::i64: return visit(int64_t());
    case DType::boolean: return visit(bool());
    default: return nullptr;
  }
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

Kernel cast_kernel(DType from, DType to) {
  return with_type(from, [&](auto x) {
    return with_type(to, [&](auto y) -> Kernel { return cast<decltype(x), decltype(y)>; });
  });
}

Kernel copy_kernel(size_t width) {
  return width == 1 ? copy<uint8_t> : width == 2 ? copy<uint16_t> : width == 4 ? copy<uint32_t> : copy<uint64_t>;
}

Kernel fill_kernel(DType dtype) {
  return with_type(dtype, [](auto x) -> Kernel { return fill<decltype(x)>; });
}

Kernel gather_kernel() { return gather; }

}  // namespace keepdim::ggml
