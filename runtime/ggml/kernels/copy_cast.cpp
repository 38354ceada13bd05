// Cast, copy and fill kernels for every dtype.
#include "ggml/kernels/copy_cast.h"

#include <cmath>
#include <limits>

#include "ggml/simd/float16.h"
#include "ggml/simd/vector.h"

namespace keepdim::ggml {
namespace {

// ---- casts

template <class To, class From>
To convert(From stored) {
  const auto x = widen(stored);
  using Wide = decltype(x);
  if constexpr (std::is_same_v<To, bool>)
    return x != 0;
  else if constexpr (kIsFloat16<To>)
    return narrow<To>(static_cast<float>(x));
  else if constexpr (std::is_integral_v<To> && std::is_floating_point_v<std::remove_const_t<Wide>>) {
    return static_cast<To>(truncate(x));
  } else
    return static_cast<To>(x);
}

template <class From, class To>
void convert_run(void* to, int64_t sy, const void* from, int64_t sx, int64_t n) {
  To* y = static_cast<To*>(to);
  const From* x = static_cast<const From*>(from);
  if (sy == sizeof(To) && sx == sizeof(From)) {
    // ggml's f16 conversions are vectorised.
    if constexpr (std::is_same_v<From, float> && std::is_same_v<To, Float16>)
      ggml_cpu_fp32_to_fp16(x, &y->bits, n);
    else if constexpr (std::is_same_v<From, Float16> && std::is_same_v<To, float>)
      ggml_cpu_fp16_to_fp32(&x->bits, y, n);
    else if constexpr (std::is_same_v<From, To>)
      std::memcpy(y, x, n * sizeof(To));
    else
      for (int64_t i = 0; i < n; ++i) y[i] = convert<To>(x[i]);
  } else {
    for (int64_t i = 0; i < n; ++i) *at<To>(y, i * sy) = convert<To>(*at<From>(const_cast<From*>(x), i * sx));
  }
}

void cast(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const CastJob*>(userdata);
  const int last = job.loop.rank - 1;
  for_each_run(job.loop, ith, nth, [&](int64_t n, const int64_t* offset) {
    job.convert(at<char>(job.data[0], offset[0]), job.loop.strides[0][last], at<char>(job.data[1], offset[1]),
                job.loop.strides[1][last], n);
  });
}

// ---- data movement

constexpr int64_t kTile = 16;
constexpr int64_t kMaxRun = 4096;  // bytes of runs that are copied row by row

// y [fields, count] = x [count, fields]: adjacent fields, few of them.
template <class T, int fields>
void deinterleave(char* y, int64_t row, const T* x, int64_t count) {
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i)
    for (int f = 0; f < fields; ++f) at<T>(y, f * row)[i] = x[i * fields + f];
}

// Rows of n contiguous elements, which may be short.
template <class T>
void copy_rows(const Job& job, int ith, int nth) {
  const int last = job.loop.rank - 1;
  const int64_t bytes = job.loop.dims[last] * static_cast<int64_t>(sizeof(T));
  const int64_t y_row = job.loop.strides[0][last - 1], x_row = job.loop.strides[1][last - 1];
  for_each_plane(job.loop, ith, nth, [&](int64_t rows, const int64_t* offset) {
    char* const y = at<char>(job.data[0], offset[0]);
    const char* const x = at<char>(job.data[1], offset[1]);
    const auto copy_all = [&](auto size) {
      for (int64_t r = 0; r < rows; ++r) std::memcpy(y + r * y_row, x + r * x_row, size);
    };
    switch (bytes) {
      case 4: return copy_all(std::integral_constant<size_t, 4>());
      case 8: return copy_all(std::integral_constant<size_t, 8>());
      case 12: return copy_all(std::integral_constant<size_t, 12>());
      case 16: return copy_all(std::integral_constant<size_t, 16>());
      case 32: return copy_all(std::integral_constant<size_t, 32>());
      case 64: return copy_all(std::integral_constant<size_t, 64>());
      default:
        for (int64_t r = 0; r < rows; ++r) copy_bytes(y + r * y_row, x + r * x_row, bytes);
    }
  });
}

// Copy with the two innermost dims transposed, in kTile x kTile tiles that fit in the L1 cache.
template <class T>
void copy_transposed(const Job& job, int ith, int nth) {
  const Loop& loop = job.loop;
  const int last = loop.rank - 1;
  const int64_t rows = loop.dims[last - 1], cols = loop.dims[last];
  const int64_t sy = loop.strides[0][last - 1], sx = loop.strides[1][last];
  const int64_t tiles = (rows + kTile - 1) / kTile;
  Loop outer = loop;
  outer.rank = last - 1;
  if (rows <= 4 && sx == rows * static_cast<int64_t>(sizeof(T))) {
    constexpr int64_t part = 4096;
    outer.push((cols + part - 1) / part, part * static_cast<int64_t>(sizeof(T)), part * sx);
    return for_each_row(outer, part * rows, ith, nth, [&](int64_t position, const int64_t* offset) {
      char* const y = at<char>(job.data[0], offset[0]);
      const T* const x = at<const T>(job.data[1], offset[1]);
      const int64_t count = std::min(part, cols - position % ((cols + part - 1) / part) * part);
      switch (rows) {
        case 2: return deinterleave<T, 2>(y, sy, x, count);
        case 3: return deinterleave<T, 3>(y, sy, x, count);
        default: return deinterleave<T, 4>(y, sy, x, count);
      }
    });
  }
  outer.push(tiles, kTile * sy, kTile * static_cast<int64_t>(sizeof(T)));
  for_each_row(outer, kTile * cols, ith, nth, [&](int64_t position, const int64_t* offset) {
    char* y0 = at<char>(job.data[0], offset[0]);
    const char* x0 = at<char>(job.data[1], offset[1]);
    const int64_t height = std::min(kTile, rows - position % tiles * kTile);
    for (int64_t c0 = 0; c0 < cols; c0 += kTile) {
      const int64_t width = std::min(kTile, cols - c0);
      if constexpr (sizeof(T) == sizeof(float)) {
        if (height == kTile && width == kTile) {
          for (int64_t c = c0; c < c0 + kTile; c += 8)
            for (int64_t r = 0; r < kTile; r += 8)
              transpose(reinterpret_cast<const float*>(x0 + c * sx) + r, sx / 4, reinterpret_cast<float*>(y0 + r * sy) + c,
                        sy / 4);
          continue;
        }
      }
      T tile[kTile][kTile];  // contiguous reads from the source, contiguous writes to the result
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
  const bool transposed = last > 0 && sy == w && sx != w && sx != 0 && job.loop.strides[1][last - 1] == w;
  if (transposed) return copy_transposed<T>(job, ith, nth);
  if (last > 0 && sy == w && sx == w && job.loop.dims[last] * w <= kMaxRun) return copy_rows<T>(job, ith, nth);
  for_each_run(job.loop, ith, nth, [&](int64_t n, const int64_t* offset) {
    T* y = at<T>(job.data[0], offset[0]);
    T* x = at<T>(job.data[1], offset[1]);
    if (sy == w && sx == w) {
      std::memcpy(y, x, n * w);
    } else if (sy == w && sx == 0) {
      std::fill(y, y + n, *x);
    } else if (sy == w && sx == -w) {  // flip: vectorised as a lane reversal
#pragma GCC ivdep
      for (int64_t i = 0; i < n; ++i) y[i] = x[-i];
    } else {
      for (int64_t i = 0; i < n; ++i) *at<T>(y, i * sy) = *at<T>(x, i * sx);
    }
  });
}

template <class T>
void fill(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const FillJob*>(userdata);
  T* y = static_cast<T*>(job.data[0]);
  const bool integral = std::is_integral_v<T> && !std::is_same_v<T, bool>;
  const double start = job.start.as<double>(), step = job.step.as<double>();
  const int64_t first = job.start.as<int64_t>(), stride = job.step.as<int64_t>();
  const bool constant = step == 0;
  for_each_run(job.loop, ith, nth, [&](int64_t n, const int64_t* offset) {
    const int64_t begin = offset[0] / static_cast<int64_t>(sizeof(T));
    if (constant) return std::fill(y + begin, y + begin + n, integral ? convert<T>(first) : convert<T>(start));
    for (int64_t i = begin; i < begin + n; ++i) {
      if constexpr (integral)
        y[i] = static_cast<T>(Add::f(first, Mul::f(i, stride)));
      else
        y[i] = convert<T>(start + static_cast<double>(i) * step);
    }
  });
}

// tril and triu: copies rows, with zeros on one side of the diagonal.
template <class T>
void triangle(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const TriangleJob*>(userdata);
  for_each_row(job.loop, job.columns, ith, nth, [&](int64_t position, const int64_t* offset) {
    const int64_t edge = position % job.rows + job.diagonal + (job.upper ? 0 : 1);  // first column of the upper part
    const int64_t split = std::clamp<int64_t>(edge, 0, job.columns);
    const int64_t begin = job.upper ? split : 0, end = job.upper ? job.columns : split;  // columns to copy
    T* y = at<T>(job.data[0], offset[0]);
    std::fill(y, y + begin, T(0));
    for (int64_t i = begin; i < end; ++i) y[i] = *at<T>(job.data[1], offset[1] + i * job.step);
    std::fill(y + end, y + job.columns, T(0));
  });
}

// Calls visit(T()) with the storage type T of `dtype`.
template <class Result, class Visit>
Result dispatch_dtype(DType dtype, Visit&& visit) {
  switch (dtype) {
    case DType::f32: return visit(float());
    case DType::f64: return visit(double());
    case DType::f16: return visit(Float16());
    case DType::bf16: return visit(BFloat16());
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

Convert converter(DType from, DType to) {
  return dispatch_dtype<Convert>(from, [&](auto x) {
    return dispatch_dtype<Convert>(to, [&](auto y) -> Convert { return convert_run<decltype(x), decltype(y)>; });
  });
}

Kernel cast_kernel() { return cast; }

Kernel copy_kernel(size_t width) {
  return width == 1 ? copy<uint8_t> : width == 2 ? copy<uint16_t> : width == 4 ? copy<uint32_t> : copy<uint64_t>;
}

Kernel fill_kernel(DType dtype) {
  return dispatch_dtype<Kernel>(dtype, [](auto x) -> Kernel { return fill<decltype(x)>; });
}

Kernel triangle_kernel(size_t width) {
  return width == 1 ? triangle<uint8_t> : width == 2 ? triangle<uint16_t> : width == 4 ? triangle<uint32_t> : triangle<uint64_t>;
}

}  // namespace keepdim::ggml
