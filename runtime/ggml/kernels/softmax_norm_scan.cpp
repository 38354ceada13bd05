// Row-wise kernels: softmax, log_softmax, layer_norm, rms_norm, cumsum and cumprod.
#include "ggml/kernels/softmax_norm_scan.h"

#include "ggml/simd/lanes.h"
#include "ggml/simd/vector_math.h"

namespace keepdim::ggml {
namespace {

constexpr int64_t kColumns = 256;  // columns per block

inline float exp_of(float x) { return fast_exp(x); }
inline double exp_of(double x) { return std::exp(x); }

// ---- softmax and log_softmax

// One contiguous row [n].
template <class T, bool logarithm>
void softmax_run(T* y, const T* x, int64_t n) {
  const T max = Lanes<Maximum, T>::run(x, n);
  if (logarithm) {
    double sum = 0;
    T part[kColumns];
    for (int64_t begin = 0; begin < n; begin += kColumns) {
      const int64_t m = std::min(kColumns, n - begin);
#pragma GCC ivdep
      for (int64_t i = 0; i < m; ++i) part[i] = exp_of(x[begin + i] - max);
      sum += Lanes<Add, T>::run(part, m);
    }
    const T shift = static_cast<T>(std::log(sum));
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) y[i] = x[i] - max - shift;
    return;
  }
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) y[i] = exp_of(x[i] - max);
  const T scale = static_cast<T>(1.0 / Lanes<Add, T>::run(y, n));
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) y[i] *= scale;
}

// Softmax over dim 0 of [n, columns] with contiguous columns, vectorised over columns. Pitch: row stride in bytes.
template <class T, bool logarithm>
void softmax_columns(char* y, char* x, int64_t n, int64_t columns, int64_t y_pitch, int64_t x_pitch) {
  for (int64_t c0 = 0; c0 < columns; c0 += kColumns) {
    const int64_t c = std::min(kColumns, columns - c0);
    T max[kColumns], sum[kColumns] = {};
    std::fill(max, max + c, -std::numeric_limits<T>::infinity());
    for (int64_t i = 0; i < n; ++i) {
      const T* from = at<T>(x, i * x_pitch) + c0;
      for (int64_t j = 0; j < c; ++j) max[j] = Maximum::f(max[j], from[j]);
    }
    for (int64_t i = 0; i < n; ++i) {
      const T* from = at<T>(x, i * x_pitch) + c0;
      T* to = at<T>(y, i * y_pitch) + c0;
#pragma GCC ivdep
      for (int64_t j = 0; j < c; ++j) {
        const T e = exp_of(from[j] - max[j]);
        if (!logarithm) to[j] = e;
        sum[j] += e;
      }
    }
    for (int64_t j = 0; j < c; ++j) {
      if constexpr (logarithm)
        sum[j] = std::log(sum[j]);
      else
        sum[j] = T(1) / sum[j];
    }
    for (int64_t i = 0; i < n; ++i) {
      const T* from = at<T>(x, i * x_pitch) + c0;
      T* to = at<T>(y, i * y_pitch) + c0;
#pragma GCC ivdep
      for (int64_t j = 0; j < c; ++j) to[j] = logarithm ? from[j] - max[j] - sum[j] : to[j] * sum[j];
    }
  }
}

constexpr int64_t kMaxShortRow = 64;  // shorter rows are transposed, a lane each

// A row in each lane of tile [n, lanes].
template <class T, bool logarithm>
void softmax_lanes(T* tile, int64_t n) {
  constexpr int64_t width = Register<T>::count;
  using V = VectorOf<T>;
  V max = load_vector(tile), sum = {};
  for (int64_t i = 1; i < n; ++i) max = Maximum::f(max, load_vector(tile + i * width));
  for (int64_t i = 0; i < n; ++i) {
    V e = load_vector(tile + i * width) - max;
    if (logarithm) store_vector(tile + i * width, e);
    if constexpr (std::is_same_v<T, float>) {
      e = fast_exp(e);
    } else {
      for (int l = 0; l < width; ++l) e[l] = std::exp(e[l]);
    }
    if (!logarithm) store_vector(tile + i * width, e);
    sum += e;
  }
  alignas(64) T last[width];
  store_vector(last, sum);
  for (int64_t l = 0; l < width; ++l) last[l] = logarithm ? std::log(last[l]) : T(1) / last[l];
  const V shift = load_vector(last);
  for (int64_t i = 0; i < n; ++i) {
    const V e = load_vector(tile + i * width);
    store_vector(tile + i * width, logarithm ? e - shift : e * shift);
  }
}

template <class T, bool logarithm>
void softmax_short_rows(char* y, char* x, int64_t n, int64_t rows, int64_t y_row, int64_t x_row) {
  constexpr int64_t width = Register<T>::count;
  alignas(64) T tile[kMaxShortRow * width] = {};  // always all lanes, so that results do not depend on how many are used
  for (int64_t first = 0; first < rows; first += width) {
    const int64_t count = std::min(width, rows - first);
    transpose_rows(x + first * x_row, x_row, count, n, tile);
    softmax_lanes<T, logarithm>(tile, n);
    store_transposed_rows(tile, count, n, y + first * y_row, y_row);
  }
}

template <class T, bool logarithm>
void softmax(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const RowwiseJob*>(userdata);
  const int64_t n = job.size, sy = job.strides[0], sx = job.strides[1];
  constexpr int64_t w = sizeof(T);
  const int last = job.loop.rank - 1;
  if (sx != w && job.loop.strides[0][last] == w && job.loop.strides[1][last] == w) {
    for_each_run(job.loop, n * 8, ith, nth, [&](int64_t columns, const int64_t* offset) {
      softmax_columns<T, logarithm>(at<char>(job.data[0], offset[0]), at<char>(job.data[1], offset[1]), n, columns, sy, sx);
    });
    return;
  }
  if (sx == w && sy == w && n <= kMaxShortRow && job.loop.rank && job.loop.dims[last] >= Register<T>::count / 2) {
    const int64_t y_row = job.loop.strides[0][last], x_row = job.loop.strides[1][last];
    const auto body = [&](int64_t rows, const int64_t* offset) {
      softmax_short_rows<T, logarithm>(at<char>(job.data[0], offset[0]), at<char>(job.data[1], offset[1]), n, rows, y_row, x_row);
    };
    return for_each_run(job.loop, n * 8, ith, nth, body, Register<T>::count);
  }
  for_each_row(job.loop, n * 8, ith, nth, [&](int64_t, const int64_t* offset) {
    T* y = at<T>(job.data[0], offset[0]);
    T* x = at<T>(job.data[1], offset[1]);
    if (sy == w && sx == w) return softmax_run<T, logarithm>(y, x, n);
    T max = -std::numeric_limits<T>::infinity();
    for (int64_t i = 0; i < n; ++i) max = Maximum::f(max, *at<T>(x, i * sx));
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += exp_of(*at<T>(x, i * sx) - max);
    const T shift = static_cast<T>(std::log(sum)), scale = static_cast<T>(1.0 / sum);
    for (int64_t i = 0; i < n; ++i) {
      const T from = *at<T>(x, i * sx) - max;
      *at<T>(y, i * sy) = logarithm ? from - shift : exp_of(from) * scale;
    }
  });
}

// ---- norms

template <class T, bool subtract_mean>
void norm(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const RowwiseJob*>(userdata);
  const int64_t n = job.size;
  const T* weight = static_cast<const T*>(job.data[2]);
  const T* bias = static_cast<const T*>(job.data[3]);
  for_each_row(job.loop, n * 3, ith, nth, [&](int64_t, const int64_t* offset) {
    T* y = at<T>(job.data[0], offset[0]);
    const T* x = at<T>(job.data[1], offset[1]);
    using Sum = Lanes<Add, T>;
    const T mean = subtract_mean ? static_cast<T>(Sum::run(x, n) / static_cast<double>(n)) : T(0);
    const double squares = Sum::run(x, n, [&](auto v) { return (v - mean) * (v - mean); });
    const T scale = static_cast<T>(1.0 / std::sqrt(squares / static_cast<double>(n) + job.eps));
    if (weight && bias) {
#pragma GCC ivdep
      for (int64_t i = 0; i < n; ++i) y[i] = (x[i] - mean) * scale * weight[i] + bias[i];
    } else if (weight) {
#pragma GCC ivdep
      for (int64_t i = 0; i < n; ++i) y[i] = (x[i] - mean) * scale * weight[i];
    } else {
#pragma GCC ivdep
      for (int64_t i = 0; i < n; ++i) y[i] = (x[i] - mean) * scale + (bias ? bias[i] : T(0));
    }
  });
}

// ---- cumsum and cumprod, with f64 accumulators for floats

template <class F, class T>
void scan(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const RowwiseJob*>(userdata);
  using Acc = std::conditional_t<std::is_floating_point_v<T>, double, T>;
  const Acc first = Lanes<F, Acc>::template identity<Acc>();
  const int64_t n = job.size, sy = job.strides[0], sx = job.strides[1];
  constexpr int64_t w = sizeof(T);
  const int last = job.loop.rank - 1;
  if (sx != w && job.loop.strides[0][last] == w && job.loop.strides[1][last] == w) {
    for_each_run(job.loop, n, ith, nth, [&](int64_t columns, const int64_t* offset) {
      for (int64_t c0 = 0; c0 < columns; c0 += kColumns) {
        const int64_t c = std::min(kColumns, columns - c0);
        Acc acc[kColumns];
        std::fill(acc, acc + c, first);
        for (int64_t i = 0; i < n; ++i) {
          const T* x = at<T>(job.data[1], offset[1] + i * sx) + c0;
          T* y = at<T>(job.data[0], offset[0] + i * sy) + c0;
#pragma GCC ivdep
          for (int64_t j = 0; j < c; ++j) y[j] = static_cast<T>(acc[j] = F::f(acc[j], static_cast<Acc>(x[j])));
        }
      }
    });
    return;
  }
  for_each_row(job.loop, n, ith, nth, [&](int64_t, const int64_t* offset) {
    const char* x = at<char>(job.data[1], offset[1]);
    char* y = at<char>(job.data[0], offset[0]);
    Acc acc = first;
    int64_t i = 0;
    if constexpr (std::is_integral_v<T>) {  // exact in any order: one operation of four waits for the elements before
      for (; sx == w && sy == w && i + 4 <= n; i += 4, x += 4 * w, y += 4 * w) {
        const T* const from = reinterpret_cast<const T*>(x);
        T* const to = reinterpret_cast<T*>(y);
        const T a = from[0], ab = F::f(a, from[1]), abc = F::f(ab, from[2]), abcd = F::f(ab, F::f(from[2], from[3]));
        to[0] = F::f(acc, a);
        to[1] = F::f(acc, ab);
        to[2] = F::f(acc, abc);
        to[3] = acc = F::f(acc, abcd);
      }
    }
    for (; i < n; ++i, x += sx, y += sy) {
      acc = F::f(acc, static_cast<Acc>(*reinterpret_cast<const T*>(x)));
      *reinterpret_cast<T*>(y) = static_cast<T>(acc);
    }
  });
}

template <class F>
Kernel scan_of(DType dtype) {
  switch (dtype) {
    case DType::f32: return scan<F, float>;
    case DType::f64: return scan<F, double>;
    case DType::i64: return scan<F, int64_t>;
    case DType::i32: return scan<F, int32_t>;
    default: return nullptr;
  }
}

Kernel by_float_dtype(DType dtype, Kernel f32, Kernel f64) {
  return dtype == DType::f32 ? f32 : dtype == DType::f64 ? f64 : nullptr;
}

}  // namespace

Kernel softmax_kernel(DType dtype) { return by_float_dtype(dtype, softmax<float, false>, softmax<double, false>); }
Kernel log_softmax_kernel(DType dtype) { return by_float_dtype(dtype, softmax<float, true>, softmax<double, true>); }
Kernel layer_norm_kernel(DType dtype) { return by_float_dtype(dtype, norm<float, true>, norm<double, true>); }
Kernel rms_norm_kernel(DType dtype) { return by_float_dtype(dtype, norm<float, false>, norm<double, false>); }
Kernel cumsum_kernel(DType dtype) { return scan_of<Add>(dtype); }
Kernel cumprod_kernel(DType dtype) { return scan_of<Mul>(dtype); }

}  // namespace keepdim::ggml
