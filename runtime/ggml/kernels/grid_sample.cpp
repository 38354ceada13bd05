// grid_sample, and fold (col2im).
#include "ggml/kernels/conv_pool.h"

namespace keepdim::ggml {
namespace {

// ---- grid_sample

constexpr int64_t kPoints = 128;   // points per chunk, whose taps are computed together
constexpr int64_t kChannels = 64;  // channels per work item
constexpr int kAxisTaps = 4, kTaps = 16;

// Maps a coordinate in [-1, 1] to pixels along a dim of `size`, with torch's arithmetic.
template <GridPadding padding, class T>
struct Axis {
  T size, half, low, span;  // low, span: the reflection interval

  Axis(bool align_corners, int64_t n)
      : size(static_cast<T>(n)),
        half((align_corners ? size - 1 : size) / 2),
        low(align_corners ? T(0) : T(-0.5)),
        span(2 * half) {}

  T pixel(T x) const { return (x + 1) * half + low; }

  // Applies the padding mode to a pixel coordinate; NaN becomes 0.
  T inside(T x) const {
    if constexpr (padding == GridPadding::zeros) return x;
    if constexpr (padding == GridPadding::reflect) {
      const T far = std::fabs(x - low), period = 2 * span;
      const T rest = far - std::trunc(far / period) * period;  // NaN for an image of one pixel
      x = std::min(rest, period - rest) + low;
    }
    x = x > 0 ? x : T(0);
    return x < size - 1 ? x : size - 1;
  }

  int32_t index(T x) const {
    const bool in_bounds = (x >= 0) & (x < size);
    const auto index = static_cast<int32_t>(in_bounds ? x : T(0));
    return in_bounds ? index : -1;
  }
};

template <class T>
struct Taps {
  int32_t at[kAxisTaps][kPoints];  // -1: out of bounds
  T weight[kAxisTaps][kPoints];
};

template <class T>
void cubic_weights(T t, T* weight) {
  const T a = T(-0.75);
  const auto near = [&](T x) { return ((a + 2) * x - (a + 3)) * x * x + 1; };
  const auto far = [&](T x) { return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a; };
  weight[0] = far(t + 1), weight[1] = near(t), weight[2] = near(1 - t), weight[3] = far(2 - t);
}

// Taps along one dim of n points; their coordinates are `step` elements apart.
template <int count, GridPadding padding, class T>
void axis_taps(const T* grid, int64_t step, int64_t n, const Axis<padding, T>& axis, Taps<T>& taps) {
#pragma GCC ivdep
  for (int64_t j = 0; j < n; ++j) {
    const T point = axis.pixel(grid[j * step]);
    if constexpr (count == 1) {
      taps.at[0][j] = axis.index(std::nearbyint(axis.inside(point)));
      taps.weight[0][j] = 1;
    } else if constexpr (count == 2) {
      const T at = axis.inside(point), floor = std::floor(at), right = at - floor;
      taps.at[0][j] = axis.index(floor);
      taps.at[1][j] = axis.index(floor + 1);
      taps.weight[0][j] = 1 - right;
      taps.weight[1][j] = right;
    } else {
      const T floor = std::floor(point);
      T weight[kAxisTaps];
      cubic_weights(point - floor, weight);
      for (int t = 0; t < count; ++t) {
        taps.at[t][j] = axis.index(axis.inside(floor + static_cast<T>(t - 1)));
        taps.weight[t][j] = weight[t];
      }
    }
  }
}

template <int count, class T>
void axis_taps(const GridSampleJob& job, int64_t size, const T* grid, int64_t n, Taps<T>& taps) {
  constexpr GridPadding zeros = GridPadding::zeros, clamp = GridPadding::clamp, reflect = GridPadding::reflect;
  if (job.padding_mode == zeros)
    axis_taps<count>(grid, job.rank, n, Axis<zeros, T>(job.align_corners, size), taps);
  else if (job.padding_mode == clamp)
    axis_taps<count>(grid, job.rank, n, Axis<clamp, T>(job.align_corners, size), taps);
  else
    axis_taps<count>(grid, job.rank, n, Axis<reflect, T>(job.align_corners, size), taps);
}

// Taps of n points over all dims: at [count, n], weight [count, n]. Returns count = per_axis^rank.
template <int per_axis, class T>
int point_taps(const GridSampleJob& job, const T* grid, int64_t n, int32_t (*at)[kPoints], T (*weight)[kPoints]) {
  Taps<T> axis[kSpatialDims];
  int count = 1;
  for (int d = 0; d < job.rank; ++d, count *= per_axis)  // grid coordinates are ordered innermost dim first
    axis_taps<per_axis>(job, job.in[d], grid + job.rank - 1 - d, n, axis[d]);
  for (int t = 0; t < count; ++t) {
    int rest = t;
    int32_t pitch = 1;
    for (int d = job.rank - 1; d >= 0; pitch *= static_cast<int32_t>(job.in[d--]), rest /= per_axis) {
      const int32_t* from = axis[d].at[rest % per_axis];
      const T* factor = axis[d].weight[rest % per_axis];
      const bool last = d == job.rank - 1;
#pragma GCC ivdep
      for (int64_t j = 0; j < n; ++j) {
        const int32_t before = last ? 0 : at[t][j];
        at[t][j] = (before | from[j]) < 0 ? -1 : before + from[j] * pitch;
        weight[t][j] = last ? factor[j] : weight[t][j] * factor[j];
      }
    }
  }
  return count;
}

// y (+)= weight * x[at], with x = 0 out of bounds; a NaN weight gives NaN there too.
template <bool first, class T>
void add_tap(T* y, const T* x, const int32_t* at, const T* weight, int64_t n) {
#pragma GCC ivdep
  for (int64_t j = 0; j < n; ++j) {
    const T pixel_value = x[at[j] < 0 ? 0 : at[j]];
    const T value = weight[j] * (at[j] < 0 ? T(0) : pixel_value);
    y[j] = first ? value : y[j] + value;
  }
}

template <int per_axis, class T>
void grid_sample(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const GridSampleJob*>(userdata);
  const int64_t chunks = (job.points + kPoints - 1) / kPoints, parts = (job.channels + kChannels - 1) / kChannels;
  const Span span = split_range(job.batch * chunks * parts, ith, nth);
  int64_t plane = 1;
  for (int d = 0; d < job.rank; ++d) plane *= job.in[d];
  int32_t at[kTaps][kPoints];
  T weight[kTaps][kPoints];
  for (int64_t unit = span.begin; unit < span.end; ++unit) {
    const int64_t part = unit % parts, chunk = unit / parts % chunks, image = unit / parts / chunks;
    const int64_t begin = chunk * kPoints, n = std::min(kPoints, job.points - begin);
    const T* grid = static_cast<const T*>(job.data[2]) + (image * job.points + begin) * job.rank;
    const int count = point_taps<per_axis>(job, grid, n, at, weight);
    const int64_t end = std::min(job.channels, (part + 1) * kChannels);
    for (int64_t c = part * kChannels; c < end; ++c) {
      const int64_t channel = image * job.channels + c;
      const T* x = static_cast<const T*>(job.data[1]) + channel * plane;
      T* y = static_cast<T*>(job.data[0]) + channel * job.points + begin;
      add_tap<true>(y, x, at[0], weight[0], n);
      for (int t = 1; t < count; ++t) add_tap<false>(y, x, at[t], weight[t], n);
    }
  }
}

// ---- fold

// Every output row sums the patches that cover it, in kernel order.
template <class T>
void fold(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const FoldJob*>(userdata);
  const int64_t height = job.size[0], width = job.size[1], stride = job.stride[1];
  const int64_t blocks = job.blocks[0] * job.blocks[1];
  if (job.planes * height * width < kGrain) {
    if (ith) return;
    nth = 1;
  }
  const Span span = split_range(job.planes * height, ith, nth);
  for (int64_t row = span.begin; row < span.end; ++row) {
    const int64_t plane = row / height, h = row % height;
    T* y = static_cast<T*>(job.data[0]) + row * width;
    std::fill(y, y + width, T(0));
    for (int64_t i = 0; i < job.kernel[0]; ++i) {
      const int64_t from = h + job.padding[0] - i * job.dilation[0], block = from / job.stride[0];
      if (from < 0 || from % job.stride[0] || block >= job.blocks[0]) continue;
      for (int64_t j = 0; j < job.kernel[1]; ++j) {
        const int64_t position = (plane * job.kernel[0] + i) * job.kernel[1] + j;
        const T* x = static_cast<const T*>(job.data[1]) + position * blocks + block * job.blocks[1];
        const int64_t first = j * job.dilation[1] - job.padding[1];  // output column of block 0
        const int64_t begin = first < 0 ? (stride - 1 - first) / stride : 0;
        const int64_t end = first < width ? std::min(job.blocks[1], (width - 1 - first) / stride + 1) : 0;
        if (stride == 1) {
#pragma GCC ivdep
          for (int64_t k = begin; k < end; ++k) y[first + k] += x[k];
        } else {
          for (int64_t k = begin; k < end; ++k) y[first + k * stride] += x[k];
        }
      }
    }
  }
}

}  // namespace

Kernel grid_sample_kernel(int taps, DType dtype) {
  if (dtype == DType::f32) return taps == 1 ? grid_sample<1, float> : taps == 2 ? grid_sample<2, float> : grid_sample<4, float>;
  if (dtype != DType::f64) return nullptr;
  return taps == 1 ? grid_sample<1, double> : taps == 2 ? grid_sample<2, double> : grid_sample<4, double>;
}

Kernel fold_kernel(DType dtype) { return dtype == DType::f32 ? fold<float> : dtype == DType::f64 ? fold<double> : nullptr; }

}  // namespace keepdim::ggml
