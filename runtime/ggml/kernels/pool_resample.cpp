// Image kernels: pooling, padding, resampling, group and batch norm.
#include <cmath>
#include <limits>

#include "ggml/kernels/conv_pool.h"
#include "ggml/kernels/gemm_microkernel.h"
#include "ggml/simd/lanes.h"

namespace keepdim::ggml {
namespace {

constexpr int64_t kLongWindow = 32;  // windows whose rows are reduced in lanes

// ---- pooling

template <class T>
constexpr T lowest() {
  using Limits = std::numeric_limits<T>;
  return Limits::has_infinity ? -Limits::infinity() : Limits::lowest();
}

// Calls body(y, x, z, v) for every output row: its address, its input plane, and its windows in the two outer spatial dims.
template <class T, class Y, class Body>
void each_output_row(const PoolJob& job, int ith, int nth, Body&& body) {
  const int64_t plane = job.in[0] * job.in[1] * job.in[2];
  const int64_t rows = job.planes * job.out[0] * job.out[1];
  if (std::max(rows * job.out[2], job.planes * plane) < kGrain) {
    if (ith) return;
    nth = 1;
  }
  const Span span = split_range(rows, ith, nth);
  for (int64_t i = span.begin; i < span.end; ++i) {
    const Window& v = job.window[1][i % job.out[1]];
    const Window& z = job.window[0][i / job.out[1] % job.out[0]];
    const T* x = static_cast<const T*>(job.data[1]) + i / job.out[1] / job.out[0] * plane;
    body(static_cast<Y*>(job.data[0]) + i * job.out[2], x, z, v);
  }
}

// Reduces the windows of one output row with F into y, one input row after the other.
template <class F, class T>
void gather_windows(const PoolJob& job, const T* x, const Window& z, const Window& v, T* y) {
  const int64_t step = job.step[2];
  const Window* windows = job.window[2];
  for (int64_t d = z.begin; d < z.end; d += job.step[0])
    for (int64_t h = v.begin; h < v.end; h += job.step[1]) {
      const T* row = x + (d * job.in[1] + h) * job.in[2];
      for (int64_t t = 0; t < job.row.taps; ++t) {
        const Tap& tap = job.row.tap[t];
        const T* from = row + tap.offset;
        const int64_t stride = job.row.stride;
        if (stride == 1)
          for (int64_t j = tap.begin; j < tap.end; ++j) y[j] = F::f(y[j], from[j]);
        else if (stride == 2)
          for (int64_t j = tap.begin; j < tap.end; ++j) y[j] = F::f(y[j], from[2 * j]);
        else
          for (int64_t j = tap.begin; j < tap.end; ++j) y[j] = F::f(y[j], from[stride * j]);
      }
      if (job.row.taps) continue;
      for (int64_t j = 0; j < job.out[2]; ++j) {
        T a = y[j];
        if (const int64_t n = windows[j].end - windows[j].begin; step == 1 && n >= kLongWindow) {
          y[j] = F::f(a, static_cast<T>(Lanes<F, T>::run(row + windows[j].begin, n)));
          continue;
        }
        for (int64_t w = windows[j].begin; w < windows[j].end; w += step) a = F::f(a, row[w]);
        y[j] = a;
      }
    }
}

// Channels-last images: reduces the pixels of each window with F, all channels at once, then calls finish(y, divisor).
template <class F, class T, class Finish>
void pool_pixels(const PoolJob& job, T start, int ith, int nth, Finish&& finish) {
  const int64_t channels = job.channels, row = job.in[2] * channels, plane = job.in[1] * row;
  const Span span = split_range(job.planes * job.out[0] * job.out[1], ith, nth);
  for (int64_t i = span.begin; i < span.end; ++i) {
    const Window& v = job.window[1][i % job.out[1]];
    const Window& z = job.window[0][i / job.out[1] % job.out[0]];
    const T* image = static_cast<const T*>(job.data[1]) + i / job.out[1] / job.out[0] * job.in[0] * plane;
    T* y = static_cast<T*>(job.data[0]) + i * job.out[2] * channels;
    for (int64_t j = 0; j < job.out[2]; ++j, y += channels) {
      const Window& u = job.window[2][j];
      std::fill(y, y + channels, start);
      for (int64_t d = z.begin; d < z.end; d += job.step[0])
        for (int64_t h = v.begin; h < v.end; h += job.step[1])
          for (int64_t w = u.begin; w < u.end; w += job.step[2]) {
            const T* x = image + d * plane + h * row + w * channels;
            for (int64_t c = 0; c < channels; ++c) y[c] = F::f(y[c], x[c]);
          }
      finish(y, static_cast<double>(z.weight) * static_cast<double>(v.weight) * static_cast<double>(u.weight));
    }
  }
}

template <class T>
void max_pool(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const PoolJob*>(userdata);
  if (job.channels > 1) return pool_pixels<Maximum>(job, lowest<T>(), ith, nth, [](T*, double) {});
  each_output_row<T, T>(job, ith, nth, [&](T* y, const T* x, const Window& z, const Window& v) {
    std::fill(y, y + job.out[2], lowest<T>());
    gather_windows<Maximum>(job, x, z, v, y);
  });
}

// Index of the first maximum, or of the last NaN, as in torch: first that of each input column, as vectors, then that of each
// window's columns.
template <class T>
class MaxIndex {
 public:
  MaxIndex(const PoolJob& job, const T* x, const Window& z, const Window& v) : job_(job), x_(x), z_(z), v_(v) {}

  // The windows of one output row.
  void row(int64_t* y) const {
    const Window* windows = job_.window[2];
    const bool rows_fit = job_.in[0] * job_.in[1] <= std::numeric_limits<Row>::max();
    for (int64_t j = 0; j < job_.out[2];) {
      Span columns{windows[j].begin, windows[j].begin};  // of windows [j, end); of a dilated one the next may begin before it
      int64_t end = j;
      for (; rows_fit && end < job_.out[2]; ++end) {
        const Span wider{std::min(columns.begin, windows[end].begin), std::max(columns.end, windows[end].end)};
        if (wider.end - wider.begin > kColumns) break;
        columns = wider;
      }
      if (end == j) {  // a window of too many columns
        y[j] = best_of_window(windows[j]);
        ++j;
        continue;
      }
      T value[kColumns];
      Row of[kColumns];
      best_of_columns(columns.begin, columns.end - columns.begin, value, of);
      for (; j < end; ++j) y[j] = best_of_columns_in(windows[j], columns.begin, value, of);
    }
  }

 private:
  using Row = std::conditional_t<sizeof(T) == sizeof(int32_t), int32_t, int64_t>;  // row of the plane
  static constexpr int64_t kColumns = 256;

  template <class Body>
  void each_row(Body&& body) const {
    for (int64_t d = z_.begin; d < z_.end; d += job_.step[0])
      for (int64_t h = v_.begin; h < v_.end; h += job_.step[1]) body(d * job_.in[1] + h);
  }
  int64_t first_row() const { return z_.begin * job_.in[1] + v_.begin; }

  int64_t best_of_window(const Window& u) const {
    int64_t best = first_row() * job_.in[2] + u.begin;
    T max = lowest<T>();
    each_row([&](int64_t row) {
      for (int64_t at = row * job_.in[2] + u.begin; at < row * job_.in[2] + u.end; at += job_.step[2])
        if (x_[at] > max || x_[at] != x_[at]) max = x_[at], best = at;
    });
    return best;
  }

  // The greatest element of each of `count` columns from `first` on, and its row.
  void best_of_columns(int64_t first, int64_t count, T* value, Row* of) const {
    constexpr int64_t lanes = Register<T>::count;
    const T* const x = x_ + first;
    const auto start = static_cast<Row>(first_row());
    for (int64_t c = 0; count >= lanes && c < count; c += lanes) {
      c = std::min(c, count - lanes);  // the last vector overlaps the one before: the same again
      VectorOf<T> max = VectorOf<T>{} + lowest<T>();
      VectorOf<Row> best = VectorOf<Row>{} + start;
      each_row([&](int64_t row) {
        const VectorOf<T> here = load_vector(x + row * job_.in[2] + c);
        const auto better = (here > max) | (here != here);
        max = better ? here : max;
        best = better ? VectorOf<Row>{} + static_cast<Row>(row) : best;
      });
      store_vector(value + c, max);
      store_vector(of + c, best);
    }
    for (int64_t c = 0; count < lanes && c < count; ++c) {
      value[c] = lowest<T>(), of[c] = start;
      each_row([&](int64_t row) {
        const T here = x[row * job_.in[2] + c];
        if (here > value[c] || here != here) value[c] = here, of[c] = static_cast<Row>(row);
      });
    }
  }

  int64_t best_of_columns_in(const Window& u, int64_t first, const T* value, const Row* of) const {
    if (u.begin >= u.end) return first_row() * job_.in[2] + u.begin;
    int64_t best = u.begin - first;
    for (int64_t c = best + job_.step[2]; c < u.end - first; c += job_.step[2]) {
      const bool nan = value[c] != value[c], best_is_nan = value[best] != value[best];
      const bool greater = nan | (value[c] > value[best]) | ((value[c] == value[best]) & (of[c] < of[best]));
      best = (best_is_nan ? nan & (of[c] >= of[best]) : greater) ? c : best;
    }
    return of[best] * job_.in[2] + first + best;
  }

  const PoolJob& job_;
  const T* const x_;
  const Window &z_, &v_;
};

template <class T>
void max_pool_index(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const PoolJob*>(userdata);
  each_output_row<T, int64_t>(
      job, ith, nth, [&](int64_t* y, const T* x, const Window& z, const Window& v) { MaxIndex<T>(job, x, z, v).row(y); });
}

template <class T>
void avg_pool(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const PoolJob*>(userdata);
  if (job.channels > 1)
    return pool_pixels<Add>(job, T(0), ith, nth, [&](T* y, double weight) {
      const T divisor = static_cast<T>(job.divisor ? static_cast<double>(job.divisor) : weight);
      for (int64_t c = 0; c < job.channels; ++c) y[c] /= divisor;
    });
  each_output_row<T, T>(job, ith, nth, [&](T* y, const T* x, const Window& z, const Window& v) {
    std::fill(y, y + job.out[2], T(0));
    gather_windows<Add>(job, x, z, v, y);
    const double outer = static_cast<double>(z.weight) * static_cast<double>(v.weight);
    for (int64_t j = 0; j < job.out[2]; ++j)
      y[j] /= static_cast<T>(job.divisor ? job.divisor : outer * static_cast<double>(job.window[2][j].weight));
  });
}

// ---- padding and nearest neighbour

// Block is an integer of the element's width, or char for any other width.
template <class Block>
void remap_row(const RemapJob& job, char* y, const char* x, const int64_t* table) {
  const int64_t n = job.dims[job.rank - 1];
  const auto each = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if constexpr (std::is_same_v<Block, char>) {
        char* to = y + i * job.width;
        if (table[i] >= 0)
          std::memcpy(to, x + table[i], job.width);
        else
          for (int64_t b = 0; b < job.width; b += job.unit) std::memcpy(to + b, job.value, job.unit);
      } else {
        // memcpy: the element may be several scalars and not aligned to Block.
        std::memcpy(y + i * static_cast<int64_t>(sizeof(Block)), table[i] < 0 ? job.value : x + table[i], sizeof(Block));
      }
    }
  };
  each(0, job.run.begin);
  if (job.run.end > job.run.begin)
    std::memcpy(y + job.run.begin * job.width, x + table[job.run.begin], (job.run.end - job.run.begin) * job.width);
  each(job.run.end, n);
}

template <class Block>
void remap(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const RemapJob*>(userdata);
  const int last = job.rank - 1;
  const int64_t row_bytes = job.dims[last] * job.width;
  int64_t rows = 1;
  for (int d = 0; d < last; ++d) rows *= job.dims[d];
  if (rows * row_bytes < 4 * kGrain) {
    if (ith) return;
    nth = 1;
  }
  const Span span = split_range(rows, ith, nth);
  int64_t before = -2;
  for (int64_t i = span.begin; i < span.end; ++i) {
    int64_t from = 0, rest = i;
    for (int d = last - 1; d > 0; --d) {
      const int64_t offset = job.table[d][rest % job.dims[d]];
      rest /= job.dims[d];
      from = offset < 0 || from < 0 ? -1 : from + offset;
    }
    if (from >= 0) from += rest * job.image;
    char* y = static_cast<char*>(job.data[0]) + i * row_bytes;
    if (from == before) {  // same source row as the previous one
      std::memcpy(y, y - row_bytes, row_bytes);
    } else if (from < 0) {
      for (int64_t b = 0; b < row_bytes; b += job.unit) std::memcpy(y + b, job.value, job.unit);
    } else {
      remap_row<Block>(job, y, static_cast<const char*>(job.data[1]) + from, job.table[last]);
    }
    before = from;
  }
}

// ---- resampling

// Separable interpolation: accumulates the weighted input rows, each sampled at the taps of the innermost dim.
void resample(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const ResampleJob*>(userdata);
  const int64_t plane = job.in[0] * job.in[1] * job.in[2], width = job.out[2];
  const Span span = split_range(job.planes * job.out[0] * job.out[1], ith, nth);
  const Sample* columns = job.sample[2];
  for (int64_t i = span.begin; i < span.end; ++i) {
    float* y = static_cast<float*>(job.data[0]) + i * width;
    const float* x = static_cast<const float*>(job.data[1]) + i / job.out[1] / job.out[0] * plane;
    const Sample &v = job.sample[1][i % job.out[1]], &z = job.sample[0][i / job.out[1] % job.out[0]];
    std::fill(y, y + width, 0.0f);
    for (int64_t a = 0; a < job.taps[0]; ++a)
      for (int64_t b = 0; b < job.taps[1]; ++b) {
        const float* row = x + (z.index[a] * job.in[1] + v.index[b]) * job.in[2];
        const float factor = z.weight[a] * v.weight[b];
        if (job.taps[2] == 2) {
          for (int64_t j = 0; j < width; ++j) {
            const Sample& c = columns[j];
            y[j] += factor * (c.weight[0] * row[c.index[0]] + c.weight[1] * row[c.index[1]]);
          }
        } else {
          for (int64_t j = 0; j < width; ++j) {
            float sum = 0;
            for (int64_t c = 0; c < job.taps[2]; ++c) sum += columns[j].weight[c] * row[columns[j].index[c]];
            y[j] += factor * sum;
          }
        }
      }
  }
}

// ---- norms

// Sum of x - shift, or of (x - shift)^2, in f64.
template <bool squares, class T>
double sum(const T* x, int64_t n, double shift) {
  constexpr int lanes = 8;
  double total[lanes] = {};
  const auto term = [&](T value) {
    const double v = static_cast<double>(value) - shift;
    return squares ? v * v : v;
  };
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes)
    for (int l = 0; l < lanes; ++l) total[l] += term(x[i + l]);
  for (; i < n; ++i) total[0] += term(x[i]);
  double all = 0;
  for (double t : total) all += t;
  return all;
}

template <class T>
void channel_norm(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const ChannelNormJob*>(userdata);
  const int64_t row_size = job.channels * job.size;
  if (job.rows * row_size < kGrain) {
    if (ith) return;
    nth = 1;
  }
  const auto param = [&](int operand, int64_t i, T fallback) {
    return job.data[operand] ? static_cast<const T*>(job.data[operand])[i] : fallback;
  };
  // With given statistics (batch norm) the channels are independent work items.
  const int64_t split = job.data[4] ? job.channels : 1;
  const Span span = split_range(job.rows * split, ith, nth);
  for (int64_t i = span.begin; i < span.end; ++i) {
    const int64_t row = i / split, begin = split > 1 ? i % split : 0, end = split > 1 ? begin + 1 : job.channels;
    const T* x = static_cast<const T*>(job.data[1]) + row * row_size;
    T* y = static_cast<T*>(job.data[0]) + row * row_size;
    double mean = 0, scale = 0;
    if (!job.data[4]) {
      mean = sum<false>(x, row_size, 0) / static_cast<double>(row_size);
      scale = 1 / std::sqrt(sum<true>(x, row_size, mean) / static_cast<double>(row_size) + job.eps);
    }
    for (int64_t c = begin; c < end; ++c) {
      const int64_t channel = row % job.groups * job.channels + c;
      if (job.data[4]) {
        mean = param(4, channel, 0);
        scale = 1 / std::sqrt(param(5, channel, 0) + job.eps);
      }
      const T mean_t = static_cast<T>(mean), bias = param(3, channel, 0);
      const T factor = static_cast<T>(scale * param(2, channel, 1));
      const T* from = x + c * job.size;
      T* to = y + c * job.size;
#pragma GCC ivdep
      for (int64_t j = 0; j < job.size; ++j) to[j] = (from[j] - mean_t) * factor + bias;
    }
  }
}

// ---- group norm of channels-last images

constexpr int64_t kBlockPixels = 256;

Span block_pixels(int64_t pixels, int64_t block) {
  return split_range(pixels, static_cast<int>(block), static_cast<int>(block_count(pixels)));
}

// For each block of pixels and channel: the mean, and the sum of squared differences from it.
void block_statistics(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const ChannelNormJob*>(userdata);
  const int64_t blocks = block_count(job.size), channels = job.channels;
  Loop loop;
  loop.push(job.rows * blocks, 0);
  for_each_row(loop, 4 * kBlockPixels * channels, ith, nth, [&](int64_t unit, const int64_t*) {
    const Span span = block_pixels(job.size, unit % blocks);
    const float* __restrict x = static_cast<const float*>(job.data[1]) + (unit / blocks * job.size + span.begin) * channels;
    float* __restrict mean = static_cast<float*>(job.data[0]) + unit * 2 * channels;
    float* __restrict squares = mean + channels;
    const int64_t count = span.end - span.begin;
    std::fill(mean, mean + 2 * channels, 0.0f);
    for (int64_t p = 0; p < count; ++p)
      for (int64_t c = 0; c < channels; ++c) mean[c] += x[p * channels + c];
    const float share = 1.0f / static_cast<float>(count);
    for (int64_t c = 0; c < channels; ++c) mean[c] *= share;
    for (int64_t p = 0; p < count; ++p)
      for (int64_t c = 0; c < channels; ++c) {
        const float off = x[p * channels + c] - mean[c];
        squares[c] += off * off;
      }
  });
}

// Mean and 1 / standard deviation of a group of channels of one image, from the statistics of its blocks.
std::pair<double, double> group_statistics(const ChannelNormJob& job, const float* blocks, int64_t first, int64_t width) {
  const int64_t count = block_count(job.size);
  double sum = 0, squares = 0;
  for (int64_t b = 0; b < count; ++b) {
    const Span span = block_pixels(job.size, b);
    for (int64_t c = first; c < first + width; ++c)
      sum += static_cast<double>(blocks[b * 2 * job.channels + c]) * static_cast<double>(span.end - span.begin);
  }
  const double elements = static_cast<double>(job.size * width), mean = sum / elements;
  for (int64_t b = 0; b < count; ++b) {
    const Span span = block_pixels(job.size, b);
    for (int64_t c = first; c < first + width; ++c) {
      const float* at = blocks + b * 2 * job.channels + c;
      const double off = at[0] - mean;
      squares += static_cast<double>(at[job.channels]) + off * off * static_cast<double>(span.end - span.begin);
    }
  }
  return {mean, 1 / std::sqrt(squares / elements + job.eps)};
}

void normalise_pixels(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const ChannelNormJob*>(userdata);
  const int64_t blocks = block_count(job.size), channels = job.channels, width = channels / job.groups;
  float* const memory = scratch(3 * channels);  // mean, factor and bias of each channel
  if (!memory) return job.fail(0, "out of memory for its channels. Free memory, or call with smaller sizes.");
  float *const mean = memory, *const factor = memory + channels, *const bias = factor + channels;
  Loop loop;
  loop.push(job.rows * blocks, 0);
  int64_t filled = -1;
  for_each_row(loop, 2 * kBlockPixels * channels, ith, nth, [&](int64_t unit, const int64_t*) {
    const int64_t image = unit / blocks;
    if (std::exchange(filled, image) != image)
      for (int64_t c = 0; c < channels; ++c) {
        if (c % width == 0) {
          const auto* of_image = static_cast<const float*>(job.data[4]) + image * blocks * 2 * channels;
          const auto [middle, scale] = group_statistics(job, of_image, c, width);
          std::fill(mean + c, mean + c + width, static_cast<float>(middle));
          std::fill(factor + c, factor + c + width, static_cast<float>(scale));
        }
        if (job.data[2]) factor[c] *= static_cast<const float*>(job.data[2])[c];
        bias[c] = job.data[3] ? static_cast<const float*>(job.data[3])[c] : 0.0f;
      }
    const Span span = block_pixels(job.size, unit % blocks);
    const int64_t first = (image * job.size + span.begin) * channels;
    const float* x = static_cast<const float*>(job.data[1]) + first;
    float* y = static_cast<float*>(job.data[0]) + first;
    for (int64_t p = span.begin; p < span.end; ++p, x += channels, y += channels)
#pragma GCC ivdep
      for (int64_t c = 0; c < channels; ++c) y[c] = (x[c] - mean[c]) * factor[c] + bias[c];
  });
}

}  // namespace

int64_t block_count(int64_t pixels) { return std::max<int64_t>(1, (pixels + kBlockPixels - 1) / kBlockPixels); }
Kernel block_statistics_kernel() { return block_statistics; }
Kernel normalise_pixels_kernel() { return normalise_pixels; }

Kernel remap_kernel(int64_t width) {
  switch (width) {
    case 1: return remap<uint8_t>;
    case 2: return remap<uint16_t>;
    case 4: return remap<uint32_t>;
    case 8: return remap<uint64_t>;
    default: return remap<char>;
  }
}

Kernel resample_kernel() { return resample; }

Kernel channel_norm_kernel(DType dtype) {
  return dtype == DType::f32 ? channel_norm<float> : dtype == DType::f64 ? channel_norm<double> : nullptr;
}

Kernel max_pool_kernel(DType dtype) {
  switch (dtype) {
    case DType::f32: return max_pool<float>;
    case DType::f64: return max_pool<double>;
    case DType::i64: return max_pool<int64_t>;
    case DType::i32: return max_pool<int32_t>;
    default: return nullptr;
  }
}

Kernel max_pool_index_kernel(DType dtype) {
  switch (dtype) {
    case DType::f32: return max_pool_index<float>;
    case DType::f64: return max_pool_index<double>;
    case DType::i64: return max_pool_index<int64_t>;
    case DType::i32: return max_pool_index<int32_t>;
    default: return nullptr;
  }
}

Kernel avg_pool_kernel(DType dtype) {
  return dtype == DType::f32 ? avg_pool<float> : dtype == DType::f64 ? avg_pool<double> : nullptr;
}

}  // namespace keepdim::ggml
