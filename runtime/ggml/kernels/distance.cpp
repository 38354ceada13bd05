// Pairwise p-norm distances (cdist, pdist) from differences rather than dot products, which lose precision for close points.
#include "ggml/kernels/distance.h"

#include "ggml/kernels/gemm_microkernel.h"

namespace keepdim::ggml {
namespace {

constexpr int64_t kRows = 48;    // rows of a per panel of b
constexpr int64_t kDepth = 256;  // coordinates per panel slice
constexpr int kTileRows = 6;

// Accumulation of a difference d, for a vector type V, by norm: p = 2, 1, inf, 0, other.
struct SquaredSum {
  template <class V> static V add(V to, V d) { return to + d * d; }
};
struct AbsSum {
  template <class V> static V add(V to, V d) { return to + (d < 0 ? -d : d); }
};
struct AbsMax {
  template <class V> static V add(V to, V d) {
    d = d < 0 ? -d : d;
    return (d > to) | (d != d) ? d : to;
  }
};
struct NonzeroCount {
  template <class V> static V add(V to, V d) {
    const V none{}, one = none + 1;
    return to + (d == d ? (d != 0 ? one : none) : d);  // NaN propagates
  }
};
struct PowerSum {};

// A panel of points of b, transposed, and the accumulators for kRows points of a.
template <class T>
struct PointPanel {
  static constexpr int width = 2 * Register<T>::count;
  T total[kRows * width];   // [kRows, width]
  T points[kDepth][width];  // [coordinate, point]
};

template <class F, int height, class T>
void add_tile(const DistanceJob& job, PointPanel<T>& panel, int64_t row, const char* a, int64_t depth) {
  constexpr int lanes = Register<T>::count;
  T* total = panel.total + row * panel.width;
  VectorOf<T> acc[height][2];
#pragma GCC unroll 8
  for (int r = 0; r < height; ++r)
    for (int v = 0; v < 2; ++v) acc[r][v] = load_vector(total + r * panel.width + v * lanes);
  for (int64_t k = 0; k < depth; ++k, a += job.a_step) {
    const VectorOf<T> left = load_vector(panel.points[k]), right = load_vector(panel.points[k] + lanes);
#pragma GCC unroll 8
    for (int r = 0; r < height; ++r) {
      const T x = *reinterpret_cast<const T*>(a + r * job.a_row);
      acc[r][0] = F::add(acc[r][0], x - left);
      acc[r][1] = F::add(acc[r][1], x - right);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < height; ++r)
    for (int v = 0; v < 2; ++v) store_vector(total + r * panel.width + v * lanes, acc[r][v]);
}

template <class F, class T>
void add_rows(const DistanceJob& job, PointPanel<T>& panel, int64_t rows, const char* a, int64_t depth) {
  constexpr int columns = PointPanel<T>::width;
  if constexpr (std::is_same_v<F, PowerSum>) {
    T size[columns], power[columns];
    const void* ins[] = {size};
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t k = 0; k < depth; ++k) {
        const T x = *reinterpret_cast<const T*>(a + r * job.a_row + k * job.a_step);
        for (int c = 0; c < columns; ++c) size[c] = std::fabs(x - panel.points[k][c]);
        job.power(job.exponent, power, ins, 0, columns);
        for (int c = 0; c < columns; ++c) panel.total[r * columns + c] += power[c];
      }
  } else {
    int64_t r = 0;
    for (; r + kTileRows <= rows; r += kTileRows) add_tile<F, kTileRows>(job, panel, r, a + r * job.a_row, depth);
    for (; r < rows; ++r) add_tile<F, 1>(job, panel, r, a + r * job.a_row, depth);
  }
}

// panel.total [rows, width] = distances between `rows` points of a and `columns` points of b.
template <class F, class T>
void compute(const DistanceJob& job, PointPanel<T>& panel, const char* a, const char* b, int64_t rows, int64_t columns) {
  constexpr int width = PointPanel<T>::width;
  std::fill(panel.total, panel.total + rows * width, T(0));
  for (int64_t k = 0; k < job.size; k += kDepth) {
    const int64_t depth = std::min(kDepth, job.size - k);
    for (int64_t c = 0; c < width; ++c) {  // columns past the end repeat the last point
      const char* from = b + std::min(c, columns - 1) * job.b_row + k * job.b_step;
      for (int64_t d = 0; d < depth; ++d) panel.points[d][c] = *reinterpret_cast<const T*>(from + d * job.b_step);
    }
    add_rows<F>(job, panel, rows, a + k * job.a_step, depth);
  }
  if constexpr (std::is_same_v<F, SquaredSum>) {
    for (int64_t i = 0; i < rows * width; ++i) panel.total[i] = std::sqrt(panel.total[i]);
  } else if constexpr (std::is_same_v<F, PowerSum>) {
    const void* ins[] = {panel.total};
    job.power(job.root, panel.total, ins, 0, rows * width);
  }
}

template <class F, class T>
void distance(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const DistanceJob*>(userdata);
  constexpr int64_t width = PointPanel<T>::width;
  const int64_t down = (job.rows + kRows - 1) / kRows, across = (job.columns + width - 1) / width;
  const int64_t units = job.loop.count() * down * across;
  PointPanel<T> panel;
  // Round-robin, since half of the work items of a triangle are empty.
  for (int64_t unit = ith; unit < units; unit += nth) {
    const int64_t j = unit % across * width, i = unit / across % down * kRows;
    const int64_t rows = std::min(kRows, job.rows - i), columns = std::min(width, job.columns - j);
    if (job.condensed && j + columns <= i + 1) continue;
    const StridedIterator batch(job.loop, job.loop.rank, unit / across / down);
    compute<F>(job, panel, at<char>(job.data[1], batch.offset[1] + i * job.a_row),
               at<char>(job.data[2], batch.offset[2] + j * job.b_row), rows, columns);
    T* y = at<T>(job.data[0], batch.offset[0]);
    for (int64_t r = i; r < i + rows; ++r) {
      const int64_t first = job.condensed ? std::max(j, r + 1) : j;
      if (first >= j + columns) break;
      const int64_t start = job.condensed ? r * (2 * job.columns - r - 1) / 2 - r - 1 : r * job.columns;
      std::memcpy(y + start + first, panel.total + (r - i) * width + first - j, (j + columns - first) * sizeof(T));
    }
  }
}

template <class T>
Kernel kernel_of(double p) {
  return p == 2          ? distance<SquaredSum, T>
         : p == 1        ? distance<AbsSum, T>
         : p == 0        ? distance<NonzeroCount, T>
         : std::isinf(p) ? distance<AbsMax, T>
                         : distance<PowerSum, T>;
}

}  // namespace

Kernel distance_kernel(double p, DType dtype) {
  return dtype == DType::f32 ? kernel_of<float>(p) : dtype == DType::f64 ? kernel_of<double>(p) : nullptr;
}

}  // namespace keepdim::ggml
