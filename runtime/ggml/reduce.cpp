// Reductions, softmax and norms: kernels that make rows out of rows. Sums of f32 go through f64 every few thousand
// elements, so that their error does not grow with the length.
#include <cmath>
#include <limits>

#include "tile.h"

namespace keepdim::ggml {
namespace {

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
  const auto finish = [&](Acc a) { return static_cast<T>(mean ? a / static_cast<Acc>(job.count) : a); };

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

// Columns side by side: each pass runs along them. `pitch` steps to the next row.
void softmax_columns(char* y, char* x, int64_t n, int64_t columns, int64_t y_pitch, int64_t x_pitch) {
  for (int64_t c0 = 0; c0 < columns; c0 += kColumns) {
    const int64_t c = std::min(kColumns, columns - c0);
    float top[kColumns], sum[kColumns] = {};
    std::fill(top, top + c, -std::numeric_limits<float>::infinity());
    for (int64_t i = 0; i < n; ++i) {
      const float* from = at<float>(x, i * x_pitch) + c0;
      for (int64_t j = 0; j < c; ++j) top[j] = Maximum::f(top[j], from[j]);
    }
    for (int64_t i = 0; i < n; ++i) {
      const float* from = at<float>(x, i * x_pitch) + c0;
      float* to = at<float>(y, i * y_pitch) + c0;
#pragma GCC ivdep
      for (int64_t j = 0; j < c; ++j) {
        to[j] = fast_exp(from[j] - top[j]);
        sum[j] += to[j];
      }
    }
    for (int64_t i = 0; i < n; ++i) {
      float* to = at<float>(y, i * y_pitch) + c0;
      for (int64_t j = 0; j < c; ++j) to[j] /= sum[j];
    }
  }
}

void softmax(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const RowJob*>(userdata);
  const int64_t n = job.size, sy = job.strides[0], sx = job.strides[1];
  constexpr int64_t w = sizeof(float);
  const int last = job.loop.rank - 1;
  if (sx != w && job.loop.strides[0][last] == w && job.loop.strides[1][last] == w) {
    each_run(job.loop, ith, nth, [&](int64_t columns, const int64_t* offset) {
      softmax_columns(at<char>(job.data[0], offset[0]), at<char>(job.data[1], offset[1]), n, columns, sy, sx);
    });
    return;
  }
  each_row(job.loop, n * 8, ith, nth, [&](int64_t, const int64_t* offset) {
    float* y = at<float>(job.data[0], offset[0]);
    float* x = at<float>(job.data[1], offset[1]);
    if (sy == w && sx == w) return softmax_run(y, x, n);
    float top = -std::numeric_limits<float>::infinity();
    for (int64_t i = 0; i < n; ++i) top = Maximum::f(top, *at<float>(x, i * sx));
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += *at<float>(y, i * sy) = fast_exp(*at<float>(x, i * sx) - top);
    const float scale = static_cast<float>(1.0 / sum);
    for (int64_t i = 0; i < n; ++i) *at<float>(y, i * sy) *= scale;
  });
}

// The sum of f(x), in the same blocks as Reducer.
template <class F>
double sum_of(const float* x, int64_t n, F f) {
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += kBlock, x += kBlock) {
    const int64_t m = std::min(kBlock, n - begin);
    constexpr int sums = 4;
    Vector acc[sums] = {};
    int64_t i = 0;
    for (; i + sums * kVector <= m; i += sums * kVector)
#pragma GCC unroll 4
      for (int s = 0; s < sums; ++s) acc[s] += f(load(x + i + s * kVector));
    for (; i + kVector <= m; i += kVector) acc[0] += f(load(x + i));
    for (; i < m; ++i) total += f(x[i]);
    const Vector all = (acc[0] + acc[1]) + (acc[2] + acc[3]);
    double halves[kVector / 2];
    for (int l = 0; l < kVector / 2; ++l) halves[l] = static_cast<double>(all[l]) + all[l + kVector / 2];
    for (int l = 0; l < kVector / 2; ++l) total += halves[l];
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
    const float mean = centred ? static_cast<float>(sum_of(x, n, [](auto v) { return v; }) / static_cast<double>(n)) : 0.0f;
    const double variance = sum_of(x, n, [&](auto v) { return (v - mean) * (v - mean); }) / static_cast<double>(n);
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

template <class F>
Kernel any_reduce(DType dtype) {
  return dtype == DType::i64   ? reduce<F, int64_t, false>
         : dtype == DType::i32 ? reduce<F, int32_t, false>
         : dtype == DType::f32 ? reduce<F, float, false>
                               : nullptr;
}

}  // namespace

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

}  // namespace keepdim::ggml
