// Kernels of our own, run by ggml's threads through ggml_custom_4d. Every one takes any strides and any rank,
// gives the same bits whatever the number of threads, and cannot fail except through RunError.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "build.h"

namespace keepdim::ggml {
namespace {

// ---- loops ----------------------------------------------------------------------------------------------------

constexpr int64_t kGrain = 2048;  // elements below which splitting a run costs more than it gives

struct Span {
  int64_t begin, end;
};

Span share(int64_t count, int ith, int nth) {
  return {count / nth * ith + std::min<int64_t>(count % nth, ith),
          count / nth * (ith + 1) + std::min<int64_t>(count % nth, ith + 1)};
}

// Byte offsets of all operands at one position of the outer dims, moved on without divisions.
struct Odometer {
  const Loop& loop;
  const int rank;  // of the dims walked over
  int64_t index[kMaxRank] = {};
  int64_t offset[kMaxOperands] = {};

  Odometer(const Loop& loop, int rank, int64_t start) : loop(loop), rank(rank) {
    for (int d = rank - 1; d >= 0 && start; --d) {
      index[d] = start % loop.dims[d];
      start /= loop.dims[d];
      for (int o = 0; o < kMaxOperands; ++o) offset[o] += index[d] * loop.strides[o][d];
    }
  }
  void next() {
    for (int d = rank - 1; d >= 0; --d) {
      for (int o = 0; o < kMaxOperands; ++o) offset[o] += loop.strides[o][d];
      if (++index[d] < loop.dims[d]) return;
      for (int o = 0; o < kMaxOperands; ++o) offset[o] -= index[d] * loop.strides[o][d];
      index[d] = 0;
    }
  }
};

int64_t outer_count(const Loop& loop) {
  int64_t rows = 1;
  for (int d = 0; d + 1 < loop.rank; ++d) rows *= loop.dims[d];
  return rows;
}

// Calls body(n, offsets) for runs along the innermost dim, this thread's share of them.
template <class Body>
void each_run(const Loop& loop, int ith, int nth, Body&& body) {
  const int last = loop.rank - 1;
  const int64_t n = loop.dims[last], rows = outer_count(loop);
  if (n <= 0 || rows <= 0) return;
  if (rows * n < 2 * kGrain) {
    if (ith) return;
    nth = 1;
  }
  const int64_t parts = rows >= nth ? 1 : std::min<int64_t>((nth + rows - 1) / rows, std::max<int64_t>(1, n / kGrain));
  const Span span = share(rows * parts, ith, nth);
  Odometer at(loop, last, span.begin / parts);
  int64_t part = span.begin % parts;
  for (int64_t i = span.begin; i < span.end; ++i) {
    const Span run = share(n, static_cast<int>(part), static_cast<int>(parts));
    int64_t offset[kMaxOperands];
    for (int o = 0; o < kMaxOperands; ++o) offset[o] = at.offset[o] + run.begin * loop.strides[o][last];
    body(run.end - run.begin, offset);
    if (++part == parts) {
      part = 0;
      at.next();
    }
  }
}

// Calls body(position, offsets) for every position of the whole nest, this thread's share of them.
template <class Body>
void each_row(const Loop& loop, int64_t work, int ith, int nth, Body&& body) {
  const int64_t rows = loop.count();
  if (rows <= 0) return;
  if (rows * work < 2 * kGrain) {
    if (ith) return;
    nth = 1;
  }
  const Span span = share(rows, ith, nth);
  Odometer at(loop, loop.rank, span.begin);
  for (int64_t i = span.begin; i < span.end; ++i, at.next()) body(i, at.offset);
}

template <class T>
T* at(void* base, int64_t offset) {
  return reinterpret_cast<T*>(static_cast<char*>(base) + offset);
}

// ---- functions of one element: plain arithmetic, so that loops over them vectorise ------------------------------

template <class To, class From>
To bits(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  std::memcpy(&y, &x, sizeof(y));
  return y;
}

// Within 2 ulp, with the limits of expf: 2^n * e^r with |r| <= ln 2 / 2.
inline float fast_exp(float x) {
  x = x < -104.0f ? -104.0f : x;
  x = x > 89.0f ? 89.0f : x;
  const float shifted = x * 1.44269504f + 12582912.0f;
  const float n = shifted - 12582912.0f;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  // In two factors: the ends of the range are beyond one exponent.
  const int32_t e = bits<int32_t>(shifted) - bits<int32_t>(12582912.0f);
  const int32_t half = e >> 1;
  return p * bits<float>((half + 127) << 23) * bits<float>((e - half + 127) << 23);
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

template <class T>
using Unsigned = std::make_unsigned_t<std::conditional_t<std::is_integral_v<T>, T, int>>;

// Integers wrap, as in torch: the arithmetic is done unsigned.
template <class T, class Op>
T wrap(T a, T b, Op op) {
  if constexpr (std::is_integral_v<T>)
    return static_cast<T>(op(static_cast<Unsigned<T>>(a), static_cast<Unsigned<T>>(b)));
  else
    return op(a, b);
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

struct Add { template <class T> static T f(T a, T b) { return wrap(a, b, [](auto x, auto y) { return x + y; }); } };
struct Sub { template <class T> static T f(T a, T b) { return wrap(a, b, [](auto x, auto y) { return x - y; }); } };
struct Mul { template <class T> static T f(T a, T b) { return wrap(a, b, [](auto x, auto y) { return x * y; }); } };
struct Div { static float f(float a, float b) { return a / b; } };
struct Maximum { template <class T> static T f(T a, T b) { return a > b || a != a ? a : b; } };  // a NaN wins
struct Minimum { template <class T> static T f(T a, T b) { return a < b || a != a ? a : b; } };
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

// ---- elementwise ----------------------------------------------------------------------------------------------

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
  each_run(job.loop, ith, nth, [&](int64_t n, const int64_t* offset) {
    char* y = at<char>(job.data[0], offset[0]);
    char* x = at<char>(job.data[1], offset[1]);
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) {
      T v = *at<T>(x, i * sx);  // a NaN passes through both comparisons
      v = v < lo || nan ? lo : v;
      *at<T>(y, i * sy) = v > hi ? hi : v;
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
      for (int64_t i = 0; i < n; ++i) y[i] = convert<To>(x[i]);
    } else {
      for (int64_t i = 0; i < n; ++i) *at<To>(y, i * sy) = convert<To>(*at<From>(x, i * sx));
    }
  });
}

// ---- data movement --------------------------------------------------------------------------------------------

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
      const int64_t c1 = std::min(cols, c0 + kTile);
      for (int64_t r = 0; r < height; ++r) {
        T* y = reinterpret_cast<T*>(y0 + r * sy);
        const char* x = x0 + r * sizeof(T);
        for (int64_t c = c0; c < c1; ++c) y[c] = *reinterpret_cast<const T*>(x + c * sx);
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
    const int64_t index = job.wide ? static_cast<const int64_t*>(job.data[2])[i] : static_cast<const int32_t*>(job.data[2])[i];
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

// ---- reductions and rows ----------------------------------------------------------------------------------------

constexpr int kLanes = 16;
constexpr int64_t kBlock = 4096;   // elements summed in f32 before the sum moves to f64
constexpr int64_t kColumns = 256;  // columns reduced at once

template <class F, class T>
struct Reducer {
  static constexpr bool sums = std::is_same_v<F, Add>;
  using Acc = std::conditional_t<sums && std::is_floating_point_v<T>, double, T>;

  template <class A>
  static A first() {
    using Limits = std::numeric_limits<A>;
    if (sums) return A(0);
    const A top = Limits::has_infinity ? Limits::infinity() : Limits::max();
    const A bottom = Limits::has_infinity ? -Limits::infinity() : Limits::lowest();
    return std::is_same_v<F, Maximum> ? bottom : top;
  }

  static Acc run(const T* x, int64_t n) {
    Acc total = first<Acc>();
    for (int64_t begin = 0; begin < n; begin += kBlock, x += kBlock) {
      const int64_t m = std::min(kBlock, n - begin);
      T lanes[kLanes];
      std::fill(lanes, lanes + kLanes, first<T>());
      int64_t i = 0;
      for (; i + kLanes <= m; i += kLanes)
        for (int l = 0; l < kLanes; ++l) lanes[l] = F::f(lanes[l], x[i + l]);
      for (; i < m; ++i) lanes[0] = F::f(lanes[0], x[i]);
      for (int l = 0; l < kLanes; ++l) total = F::f(total, static_cast<Acc>(lanes[l]));
    }
    return total;
  }
};

template <class F, class T, bool mean>
void reduce(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const ReduceJob*>(userdata);
  using R = Reducer<F, T>;
  using Acc = typename R::Acc;
  const Loop &kept = job.loop, &inner = job.inner;
  const int last = inner.rank - 1, tail = kept.rank - 1;
  const int64_t n = inner.dims[last], sx = inner.strides[1][last];
  const int64_t rows = job.count ? outer_count(inner) : 0;
  const auto finish = [&](Acc a) { return mean ? static_cast<T>(a / static_cast<Acc>(job.count)) : static_cast<T>(a); };

  if (sx != sizeof(T) && kept.strides[1][tail] == sizeof(T) && kept.strides[0][tail] == sizeof(T)) {
    // What is kept is contiguous: whole rows are added up, a block of columns at a time.
    each_run(kept, ith, nth, [&](int64_t count, const int64_t* offset) {
      for (int64_t c0 = 0; c0 < count; c0 += kColumns) {
        const int64_t c = std::min(kColumns, count - c0);
        Acc acc[kColumns];
        std::fill(acc, acc + c, R::template first<Acc>());
        Odometer row(inner, inner.rank, 0);
        for (int64_t i = 0; i < job.count; ++i, row.next()) {
          const T* x = at<T>(job.data[1], offset[1] + row.offset[1]) + c0;
          for (int64_t j = 0; j < c; ++j) acc[j] = F::f(acc[j], static_cast<Acc>(x[j]));
        }
        T* y = at<T>(job.data[0], offset[0]) + c0;
        for (int64_t j = 0; j < c; ++j) y[j] = finish(acc[j]);
      }
    });
    return;
  }
  each_row(kept, job.count, ith, nth, [&](int64_t, const int64_t* offset) {
    Acc acc = R::template first<Acc>();
    Odometer row(inner, last, 0);
    for (int64_t r = 0; r < rows; ++r, row.next()) {
      T* x = at<T>(job.data[1], offset[1] + row.offset[1]);
      if (sx == sizeof(T)) {
        acc = F::f(acc, R::run(x, n));
      } else {
        for (int64_t i = 0; i < n; ++i) acc = F::f(acc, static_cast<Acc>(*at<T>(x, i * sx)));
      }
    }
    *at<T>(job.data[0], offset[0]) = finish(acc);
  });
}

void softmax_run(float* y, const float* x, int64_t n) {
  const float top = Reducer<Maximum, float>::run(x, n);
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) y[i] = fast_exp(x[i] - top);
  const float scale = static_cast<float>(1.0 / Reducer<Add, float>::run(y, n));
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) y[i] *= scale;
}

void softmax(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const RowJob*>(userdata);
  const int64_t n = job.size, sy = job.strides[0], sx = job.strides[1];
  each_row(job.loop, n * 8, ith, nth, [&](int64_t, const int64_t* offset) {
    float* y = at<float>(job.data[0], offset[0]);
    float* x = at<float>(job.data[1], offset[1]);
    if (sy == sizeof(float) && sx == sizeof(float)) return softmax_run(y, x, n);
    float top = -std::numeric_limits<float>::infinity();
    for (int64_t i = 0; i < n; ++i) top = Maximum::f(top, *at<float>(x, i * sx));
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += *at<float>(y, i * sy) = fast_exp(*at<float>(x, i * sx) - top);
    const float scale = static_cast<float>(1.0 / sum);
    for (int64_t i = 0; i < n; ++i) *at<float>(y, i * sy) *= scale;
  });
}

// The sum of (x - shift)^2, in the same blocks as Reducer.
double sum_squares(const float* x, int64_t n, float shift) {
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += kBlock, x += kBlock) {
    const int64_t m = std::min(kBlock, n - begin);
    float lanes[kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= m; i += kLanes)
      for (int l = 0; l < kLanes; ++l) lanes[l] += (x[i + l] - shift) * (x[i + l] - shift);
    for (; i < m; ++i) lanes[0] += (x[i] - shift) * (x[i] - shift);
    for (int l = 0; l < kLanes; ++l) total += lanes[l];
  }
  return total;
}

template <bool centred>
void norm(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const RowJob*>(userdata);
  const int64_t n = job.size;
  const float* weight = static_cast<const float*>(job.data[2]);
  const float* bias = static_cast<const float*>(job.data[3]);
  each_row(job.loop, n * 3, ith, nth, [&](int64_t, const int64_t* offset) {
    float* y = at<float>(job.data[0], offset[0]);
    const float* x = at<float>(job.data[1], offset[1]);
    const float mean = centred ? static_cast<float>(Reducer<Add, float>::run(x, n) / static_cast<double>(n)) : 0.0f;
    const double variance = sum_squares(x, n, mean) / static_cast<double>(n);
    const float scale = static_cast<float>(1.0 / std::sqrt(variance + job.eps));
    if (weight && bias) {
#pragma GCC ivdep
      for (int64_t i = 0; i < n; ++i) y[i] = (x[i] - mean) * scale * weight[i] + bias[i];
    } else if (weight) {
#pragma GCC ivdep
      for (int64_t i = 0; i < n; ++i) y[i] = (x[i] - mean) * scale * weight[i];
    } else {
#pragma GCC ivdep
      for (int64_t i = 0; i < n; ++i) y[i] = (x[i] - mean) * scale + (bias ? bias[i] : 0.0f);
    }
  });
}

// ---- a product whose second operand is not transposed -----------------------------------------------------------

// A tile of the result is two vectors wide and as high as the registers allow.
#ifdef __AVX512F__
constexpr int kHeight = 12, kVector = 16;
#else
constexpr int kHeight = 4, kVector = 8;
#endif
constexpr int kWidth = 2 * kVector;
using Vector = float __attribute__((vector_size(kVector * sizeof(float)), aligned(alignof(float)), may_alias));

// `columns` < kWidth reads and writes no further than that.
template <int height, bool whole>
void product_tile(const ProductJob& job, float* y, char* a, char* b, int64_t columns) {
  Vector acc[height][2] = {};
  float edge[kWidth] = {};
  for (int64_t k = 0; k < job.k; ++k, a += job.inner, b += job.step) {
    const float* row = at<float>(b, 0);
    if (!whole) {
      for (int64_t c = 0; c < columns; ++c) edge[c] = row[c];
      row = edge;
    }
    const Vector b0 = *reinterpret_cast<const Vector*>(row), b1 = *reinterpret_cast<const Vector*>(row + kVector);
#pragma GCC unroll 12
    for (int r = 0; r < height; ++r) {
      const float ak = *at<float>(a, r * job.row);
      acc[r][0] += ak * b0;
      acc[r][1] += ak * b1;
    }
  }
  for (int r = 0; r < height; ++r)
    std::memcpy(y + r * job.n, acc[r], (whole ? kWidth : columns) * sizeof(float));
}

using ProductTile = void (*)(const ProductJob&, float*, char*, char*, int64_t);

template <bool whole, int... height>
ProductTile product_tile_of(int64_t rows, std::integer_sequence<int, height...>) {
  static constexpr ProductTile tiles[] = {product_tile<height + 1, whole>...};
  return tiles[rows - 1];
}

void product(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const ProductJob*>(userdata);
  Loop tiles = job.loop;
  const int64_t down = (job.m + kHeight - 1) / kHeight, across = (job.n + kWidth - 1) / kWidth;
  constexpr int64_t w = sizeof(float);
  tiles.push(across, kWidth * w, 0, kWidth * w);
  tiles.push(down, kHeight * job.n * w, kHeight * job.row, 0);
  constexpr auto heights = std::make_integer_sequence<int, kHeight>();
  each_row(tiles, kHeight * kWidth * job.k, ith, nth, [&](int64_t position, const int64_t* offset) {
    const int64_t rows = std::min<int64_t>(kHeight, job.m - position % down * kHeight);
    const int64_t columns = std::min<int64_t>(kWidth, job.n - position / down % across * kWidth);
    const ProductTile tile = columns == kWidth ? product_tile_of<true>(rows, heights) : product_tile_of<false>(rows, heights);
    tile(job, at<float>(job.data[0], offset[0]), at<char>(job.data[1], offset[1]), at<char>(job.data[2], offset[2]), columns);
  });
}

// ---- choice -----------------------------------------------------------------------------------------------------

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
template <class F>
Kernel any_reduce(DType dtype) {
  return dtype == DType::i64   ? reduce<F, int64_t, false>
         : dtype == DType::i32 ? reduce<F, int32_t, false>
         : dtype == DType::f32 ? reduce<F, float, false>
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

Kernel reduce_kernel(Fn fn, DType dtype) {
  switch (fn) {
    case Fn::sum: return any_reduce<Add>(dtype);
    case Fn::amax: return any_reduce<Maximum>(dtype);
    case Fn::amin: return any_reduce<Minimum>(dtype);
    case Fn::mean: return dtype == DType::f32 ? reduce<Add, float, true> : nullptr;
    default: return nullptr;
  }
}

Kernel softmax_kernel() { return softmax; }
Kernel layer_norm_kernel() { return norm<true>; }
Kernel rms_norm_kernel() { return norm<false>; }
Kernel gather_kernel() { return gather; }
Kernel product_kernel() { return product; }

}  // namespace keepdim::ggml
