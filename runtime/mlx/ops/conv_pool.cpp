// Image ops: convolution, pooling, padding, resampling, group and batch norm, grid_sample, fold.
#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

#include "core/geometry.h"
#include "mlx/op.h"

namespace keepdim::mlx {
namespace {

using Ints = std::vector<int>;

// Attribute with one value per spatial dim.
Ints spatial_attr(Op& op, const char* name, int rank, int64_t min_value) {
  const std::vector<int64_t> list = op.sizes(name);
  if (list.size() != static_cast<size_t>(rank))
    op.refuse(std::string(name) + " has " + std::to_string(list.size()) + " numbers for " + std::to_string(rank) +
              " spatial dims.");
  for (int64_t n : list)
    if (n < min_value || n > INT32_MAX) op.refuse(std::string(name) + " = " + std::to_string(n) + " is out of range.");
  return Ints(list.begin(), list.end());
}

// ---- convolutions

// [a, b, space..] to [a, space.., b], and back.
Array channels_last(const Array& x) { return mx::moveaxis(x, 1, -1); }
Array channels_first(const Array& x) { return mx::moveaxis(x, -1, 1); }

struct Geometry {
  Ints stride, low, high, dilation, input_dilation;  // input_dilation: stride of a transposed convolution
};

// One group: x [n, space.., c], w [o, kernel.., c]. MLX has no integer or f64 convolution: those use im2col views and a matrix
// product.
Array conv_group(const Array& x, const Array& w, const Geometry& g) {
  if (x.dtype() == mx::float32) return mx::conv_general(x, w, g.stride, g.low, g.high, g.dilation, g.input_dilation, 1, false);
  const int rank = rank_of(x) - 2;
  mx::Shape padded_shape = x.shape(), from(x.ndim(), 0), to, step(x.ndim(), 1);
  for (int d = 0; d < rank; ++d) {
    padded_shape[d + 1] = (x.shape(d + 1) - 1) * g.input_dilation[d] + 1 + g.low[d] + g.high[d];
    from[d + 1] = g.low[d];
    step[d + 1] = g.input_dilation[d];
  }
  to = padded_shape;
  for (int d = 0; d < rank; ++d) to[d + 1] = g.low[d] + (x.shape(d + 1) - 1) * g.input_dilation[d] + 1;
  const Array padded = mx::slice_update(mx::zeros(padded_shape, x.dtype()), x, from, to, step);
  mx::Strides strides{};
  mx::Shape windows{x.shape(0)};
  std::vector<int64_t> dim_strides(x.ndim() + 1, 1);  // [d + 1]: stride of dim d of `padded` in elements
  for (int d = rank_of(x) - 1; d >= 0; --d) dim_strides[d] = dim_strides[d + 1] * padded.shape(d);
  strides.push_back(dim_strides[1]);
  for (int d = 0; d < rank; ++d) {
    windows.push_back((padded.shape(d + 1) - g.dilation[d] * (w.shape(d + 1) - 1) - 1) / g.stride[d] + 1);
    strides.push_back(dim_strides[d + 2] * g.stride[d]);
  }
  for (int d = 0; d < rank; ++d) {
    windows.push_back(w.shape(d + 1));
    strides.push_back(dim_strides[d + 2] * g.dilation[d]);
  }
  windows.push_back(x.shape(-1));
  strides.push_back(1);
  const Array columns = mx::transpose(mx::reshape(w, {w.shape(0), -1}));  // [kernel * c, o]
  return concatenate_chunks(windows[1], count_of(windows) / windows[1], 1, [&](int from, int to) {
    mx::Shape chunk = windows, result(windows.begin(), windows.begin() + rank + 1);
    chunk[1] = result[1] = to - from;
    result.push_back(w.shape(0));
    const Array rows = mx::as_strided(padded, chunk, strides, static_cast<size_t>(from * strides[1]));
    return mx::reshape(general_matmul(mx::reshape(rows, {-1, columns.shape(0)}), columns), result);
  });
}

// A transposed convolution is a convolution of the dilated input. `start`: elements to crop if the padding exceeds the kernel.
void transpose_dim(Geometry& g, int d, const WindowDim& dim, int64_t in, int64_t out, mx::Shape& start) {
  g.stride[d] = 1;
  g.input_dilation[d] = static_cast<int>(dim.stride);
  const int64_t low = dim.dilation * (dim.kernel - 1) - dim.padding;
  const int64_t high = low + out - static_cast<int64_t>(window_count(dim, in, true));
  g.low[d] = static_cast<int>(std::max<int64_t>(low, 0));
  g.high[d] = static_cast<int>(std::max<int64_t>(high, 0));
  start[d + 1] = static_cast<int>(std::max<int64_t>(-low, 0));
}

// Results of all groups, channels last.
std::vector<Array> conv_groups(const Array& x, const Array& w, const Geometry& g, int groups, bool transposed) {
  std::vector<Array> results;
  for (int i = 0; i < groups && x.size() > 0; ++i) {
    Array weight = equal_part(w, 0, i, groups);
    if (transposed) {  // [in, out, kernel..] to [out, in, flipped kernel..]
      Axes flipped(x.ndim() - 2);
      std::iota(flipped.begin(), flipped.end(), 2);
      weight = mx::swapaxes(mx::flip(weight, flipped), 0, 1);
    }
    results.push_back(conv_group(channels_last(equal_part(x, 1, i, groups)), channels_last(weight), g));
  }
  return results;
}

Array conv(Op& op) {
  const Array &x = op.in(0), &w = op.in(1);
  const int rank = rank_of(x) - 2;
  const int64_t groups = op.size("groups");
  const bool transposed = op.flag("transposed");
  if (rank < 1 || rank > 3 || w.ndim() != x.ndim() || op.rank() != rank_of(x) || groups < 1 || x.shape(1) % groups ||
      op.shape()[1] % groups || w.shape(0) % groups ||
      (transposed ? w.shape(0) != x.shape(1) : w.shape(1) != x.shape(1) / groups))
    op.refuse("weight " + dims_text(w.shape()) + " in " + std::to_string(groups) + " groups does not fit input " +
              dims_text(x.shape()) + ".");
  const Ints stride = spatial_attr(op, "stride", rank, 1), padding = spatial_attr(op, "padding", rank, 0),
             dilation = spatial_attr(op, "dilation", rank, 1);
  Geometry g{stride, padding, padding, dilation, Ints(rank, 1)};
  mx::Shape start(x.ndim(), 0);
  for (int d = 0; d < rank; ++d) {
    const WindowDim dim{w.shape(d + 2), stride[d], padding[d], dilation[d]};
    const int64_t in = x.shape(d + 2), out = op.shape()[d + 2];
    if (!is_conv_size(dim, in, out, transposed))
      op.refuse("result " + dims_text(op.shape()) + " does not fit input " + dims_text(x.shape()) + " and weight " +
                dims_text(w.shape()) + ".");
    if (transposed) transpose_dim(g, d, dim, in, out, start);
  }
  const std::vector<Array> results = conv_groups(x, w, g, static_cast<int>(groups), transposed);
  Array y = results.empty() ? mx::zeros(op.shape(), op.dtype()) : results.size() == 1 ? results[0] : mx::concatenate(results, -1);
  if (!results.empty()) {
    mx::Shape stop = y.shape();
    for (int d = 0; d < rank; ++d) stop[d + 1] = std::min(stop[d + 1], start[d + 1] + op.shape()[d + 2]);
    y = channels_first(transposed ? mx::slice(y, start, stop) : y);
  }
  if (op.has(2)) {
    mx::Shape channel(x.ndim(), 1);
    channel[1] = op.shape()[1];
    y = mx::add(y, mx::reshape(op.in(2), channel));
  }
  if (op.has(3)) {
    if (op.in(3).shape() != op.shape())
      op.refuse("residual " + dims_text(op.in(3).shape()) + " is not " + dims_text(op.shape()) + ".");
    y = mx::add(y, op.in(3));
  }
  return op.attr("activation") ? activate(y, op.text("activation")) : y;
}

// ---- pooling by gathering the taps of every window

struct PoolDim {
  std::vector<Window> windows;  // one per output
  int64_t dilation = 1;
};
using Windows = std::vector<PoolDim>;

int64_t taps_in(const Window& w, int64_t dilation) { return std::max<int64_t>(w.end - w.begin + dilation - 1, 0) / dilation; }

// Taps of one dim, all [outputs, width]: input index, whether it is inside of the window, and reported position. Shorter windows
// repeat their last tap; an empty window reads index 0 and reports its begin, as in torch.
struct PoolTaps {
  std::vector<int64_t> at, inside, position;
  int outputs, width = 1;
};
PoolTaps pool_taps(const PoolDim& dim) {
  PoolTaps t{{}, {}, {}, static_cast<int>(dim.windows.size())};
  for (const Window& w : dim.windows) t.width = std::max(t.width, static_cast<int>(taps_in(w, dim.dilation)));
  for (const Window& w : dim.windows) {
    const int64_t count = taps_in(w, dim.dilation);
    for (int64_t k = 0; k < t.width; ++k) {
      const int64_t at = w.begin + std::min(k, count - 1) * dim.dilation;
      t.at.push_back(count ? at : 0);
      t.inside.push_back(k < count);
      t.position.push_back(count ? at : w.begin);
    }
  }
  return t;
}

// Gathered windows [.., outputs.., taps]: values, flat positions, and whether a tap is inside of its window.
struct PoolInputs {
  Array values, positions, inside;
  std::vector<int64_t> sizes;  // divisor of each output: product of the window weights
};
PoolInputs gather_pool_inputs(const Array& x, const Windows& windows) {
  const auto rank = static_cast<int>(windows.size()), first = rank_of(x) - rank;
  mx::Shape outputs, all(windows.size(), 1);
  Array values = x, positions = integer(0, mx::int64), inside = Array(true);
  std::vector<int64_t> sizes{1};
  for (int d = 0; d < rank; ++d) {
    const PoolTaps t = pool_taps(windows[d]);
    const int axis = first + 2 * d;
    values = mx::unflatten(mx::take(values, host_array(t.at, {t.outputs * t.width}), axis), axis, {t.outputs, t.width});
    mx::Shape line(2 * windows.size(), 1);
    line[2 * d] = t.outputs, line[2 * d + 1] = t.width;
    positions = mx::add(mx::multiply(positions, integer(x.shape(first + d), mx::int64)), host_array(t.position, line));
    inside = mx::logical_and(inside, mx::astype(host_array(t.inside, line), mx::bool_));
    std::vector<int64_t> next;
    for (int64_t size : sizes)
      for (const Window& w : windows[d].windows) next.push_back(size * w.weight);
    sizes = std::move(next);
    outputs.push_back(t.outputs);
  }
  const auto taps_last = [&](const Array& a, int before) {
    Axes order(static_cast<size_t>(before));
    std::iota(order.begin(), order.end(), 0);
    for (int d = 0; d < rank; ++d) order.push_back(before + 2 * d);
    for (int d = 0; d < rank; ++d) order.push_back(before + 2 * d + 1);
    return mx::flatten(mx::transpose(a, order), before + rank, -1);
  };
  return {taps_last(values, first), taps_last(positions, 0), taps_last(inside, 0), sizes};
}

enum class PoolKind { max, position, mean };

Array pool(const Array& x, PoolKind kind, const Windows& windows, int64_t divisor) {
  const PoolInputs r = gather_pool_inputs(x, windows);
  if (kind == PoolKind::mean) {
    const Array sum = mx::sum(mx::where(r.inside, r.values, number(0, x.dtype())), Axes{-1});
    mx::Shape grid;
    for (const PoolDim& dim : windows) grid.push_back(static_cast<int>(dim.windows.size()));
    if (divisor) return mx::divide(sum, number(static_cast<double>(divisor), x.dtype()));
    return mx::divide(sum, mx::astype(host_array(r.sizes, grid), x.dtype()));
  }
  const bool real = mx::issubdtype(x.dtype(), mx::floating);
  // An empty window gives -inf.
  const Array values = real ? mx::where(mx::any(r.inside, Axes{-1}, true), r.values, number(-HUGE_VAL, x.dtype())) : r.values;
  const Array max = mx::max(values, Axes{-1}, true);
  if (kind == PoolKind::max) return mx::squeeze(max, -1);
  const Array is_max = mx::equal(values, max);  // position of the first maximum, or of the last NaN
  Array where = mx::argmax(mx::astype(is_max, mx::int32), -1, true);
  if (real) {
    const Array nan = mx::isnan(values);
    const int last = values.shape(-1) - 1;
    const Array back = mx::subtract(integer(last, mx::int64),
                                    mx::astype(mx::argmax(mx::astype(mx::flip(nan, -1), mx::int32), -1, true), mx::int64));
    where = mx::where(mx::any(nan, Axes{-1}, true), back, mx::astype(where, mx::int64));
  }
  const Array positions = mx::broadcast_to(r.positions, values.shape());
  return mx::squeeze(mx::take_along_axis(positions, mx::astype(where, mx::int64), -1), -1);
}

// `make(d, in, out, o)` returns the window of output o of spatial dim d.
template <class Make>
Array pool(Op& op, PoolKind kind, int64_t rank, Make&& make, const Ints& dilation = {}, int64_t divisor = 0) {
  const Array& x = op.in(0);
  const auto first = static_cast<int>(rank_of(x) - rank);
  bool fits = rank >= 1 && rank <= 3 && rank_of(x) == op.rank() && first >= 0;
  for (int d = 0; fits && d < first; ++d) fits = x.shape(d) == op.shape()[d];
  if (!fits) op.refuse("result " + dims_text(op.shape()) + " is not a pool of " + dims_text(x.shape()) + ".");
  Windows windows(static_cast<size_t>(rank));
  for (int d = 0; d < rank; ++d) {
    const int64_t in = x.shape(first + d), out = op.shape()[first + d];
    if (!dilation.empty()) windows[d].dilation = dilation[d];
    for (int64_t o = 0; o < out; ++o) {
      windows[d].windows.push_back(make(d, in, out, o));
      if (!windows[d].windows.back().valid(in, windows[d].dilation))
        op.refuse("window " + std::to_string(o) + " of result " + dims_text(op.shape()) + " is outside of " +
                  dims_text(x.shape()) + ".");
    }
  }
  int64_t taps = 1, outputs = 1;  // per position of the outermost spatial dim
  for (const PoolDim& dim : windows) taps *= pool_taps(dim).width;
  for (int d = 0; d < op.rank(); ++d) outputs *= d == first ? 1 : op.shape()[d];
  return concatenate_chunks(op.shape()[first], outputs * taps, first, [&](int from, int to) {
    Windows chunk = windows;
    const auto& all = windows[0].windows;
    chunk[0].windows.assign(all.begin() + from, all.begin() + to);
    return pool(x, kind, chunk, divisor);
  });
}

// Pooling with a fixed window size and stride.
Array sliding_pool(Op& op, PoolKind kind) {
  const auto rank = static_cast<int>(op.sizes("kernel").size());
  const Ints size = spatial_attr(op, "kernel", rank, 1), stride = spatial_attr(op, "stride", rank, 1),
             padding = spatial_attr(op, "padding", rank, 0);
  const Ints dilation = op.attr("dilation") ? spatial_attr(op, "dilation", rank, 1) : Ints(rank, 1);
  const bool with_padding = op.flag("count_include_pad");
  const auto window = [&](int d, int64_t in, int64_t, int64_t o) {
    return window_of({size[d], stride[d], padding[d], dilation[d]}, in, o, with_padding);
  };
  return pool(op, kind, rank, window, dilation, op.attr("divisor") ? op.size("divisor") : 0);
}

// Adaptive pooling.
Array adaptive_pool(Op& op, PoolKind kind) {
  return pool(op, kind, op.size("axes"), [](int, int64_t in, int64_t out, int64_t o) { return adaptive_window(in, out, o); });
}

// ---- padding and resampling

// Reads x through an index table per dim, for the last `rank` dims; index -1 gives `value`.
Array remap(Op& op, int rank, const Array& value, const std::function<int64_t(int, int64_t)>& position) {
  Array y = op.in(0), outside = Array(false);
  const mx::Shape& in = op.in(0).shape();
  if (op.rank() != rank_of(y) || rank > op.rank())
    op.refuse("result " + dims_text(op.shape()) + " does not fit input " + dims_text(in) + ".");
  bool has_outside = false;
  for (int d = op.rank() - rank; d < op.rank(); ++d) {
    std::vector<int64_t> at, out;
    bool same = in[d] == op.shape()[d];
    for (int64_t o = 0; o < op.shape()[d]; ++o) {
      const int64_t from = position(d, o);
      if (from >= in[d]) op.refuse("reads past the end of dim " + std::to_string(d) + " of " + dims_text(in) + ".");
      at.push_back(std::max<int64_t>(from, 0));
      out.push_back(from < 0);
      same &= from == o;
      has_outside |= from < 0;
    }
    if (same) continue;
    mx::Shape line(static_cast<size_t>(op.rank()), 1);
    line[d] = op.shape()[d];
    outside = mx::logical_or(outside, mx::astype(host_array(out, line), mx::bool_));
    if (in[d] == 0) return mx::full(op.shape(), value);
    y = mx::take(y, host_array(at, {op.shape()[d]}), d);
  }
  return has_outside ? mx::where(outside, value, y) : y;
}

Array pad(Op& op) {
  const Array& x = op.in(0);
  const std::vector<int64_t> before = op.sizes("before");
  const auto rank = static_cast<int>(before.size());
  const auto mode = static_cast<Padding>(op.choice("mode", {"constant", "reflect", "replicate", "circular"}));
  return remap(op, rank, op.scalar("value", op.type()), [&](int d, int64_t o) {
    const int64_t from = padded_index(mode, x.shape(d), o - before[d - (op.rank() - rank)]);
    if (from == kTooSmall)
      op.refuse("the padding of dim " + std::to_string(d) + " is too large for " + dims_text(x.shape()) + ".");
    return from;
  });
}

int spatial_rank(Op& op) {
  const int rank = rank_of(op.in(0)) - 2;
  if (rank < 1 || rank > 3 || op.rank() != rank + 2)
    op.refuse("input " + dims_text(op.in(0).shape()) + " is not a batch of images.");
  if (op.in(0).size() == 0) op.refuse("input " + dims_text(op.in(0).shape()) + " is empty.");
  return rank;
}

// Explicit scale factor of a spatial dim; 0 if not given.
double explicit_scale(Op& op, int d) {
  static const char* names[] = {"scale_0", "scale_1", "scale_2"};
  return op.attr(names[d]) ? op.number(names[d]) : 0;
}

template <class T>
Array nearest(Op& op) {
  const int rank = spatial_rank(op);
  const bool exact = op.flag("exact");
  return remap(op, rank, number(0, op.in(0).dtype()), [&](int d, int64_t o) {
    const int64_t in = op.in(0).shape(d);
    return nearest_index(o, in, resample_scale<T>(explicit_scale(op, d - 2), in, op.shape()[d]), exact);
  });
}

// Separable interpolation: a weighted sum of taps, one dim after the other.
Array resample(Op& op) {
  const int rank = spatial_rank(op), taps = op.choice("mode", {"linear", "cubic"}) ? 4 : 2;
  Array y = op.in(0);
  for (int d = 2; d < rank + 2; ++d) {
    const ResampleDim dim{y.shape(d), op.shape()[d], taps, op.flag("align_corners"), explicit_scale(op, d - 2)};
    std::vector<std::vector<int64_t>> index(static_cast<size_t>(taps));
    std::vector<std::vector<float>> weight(static_cast<size_t>(taps));
    for (int64_t o = 0; o < dim.out; ++o) {
      const Sample sample = dim.at(o);
      for (int i = 0; i < taps; ++i) {
        index[i].push_back(sample.index[i]);
        weight[i].push_back(sample.weight[i]);
      }
    }
    const auto out = static_cast<int>(dim.out);
    mx::Shape line(y.ndim(), 1);
    line[d] = out;
    Array sum = number(0, y.dtype());
    for (int i = 0; i < taps; ++i)
      sum = mx::add(sum, mx::multiply(mx::take(y, host_array(index[i], {out}), d), Array(weight[i].data(), line, mx::float32)));
    y = sum;
  }
  return y;
}

// ---- group and batch norm

Array per_channel(Op& op, size_t i) {
  mx::Shape shape(op.in(0).ndim(), 1);
  shape[1] = op.in(0).shape(1);
  if (op.in(i).shape() != mx::Shape{shape[1]})
    op.refuse("operand " + dims_text(op.in(i).shape()) + " does not fit the channels of " + dims_text(op.in(0).shape()) + ".");
  return mx::reshape(op.in(i), shape);
}

Array scale_and_shift(Op& op, Array y) {
  if (op.has(1)) y = mx::multiply(y, per_channel(op, 1));
  return op.has(2) ? mx::add(y, per_channel(op, 2)) : y;
}

Array group_norm(Op& op) {
  const Array& x = op.in(0);
  const int64_t groups = op.size("groups");
  if (x.ndim() < 2 || groups < 1 || x.shape(1) % groups)
    op.refuse("the channels of " + dims_text(x.shape()) + " are not divisible into " + std::to_string(groups) + " groups.");
  const Array rows = mx::reshape(x, {static_cast<int>(x.shape(0) * groups), -1});
  const Array centred = mx::subtract(rows, mean_of_rows(rows));
  const Array deviation = mx::rsqrt(mx::add(mean_of_rows(mx::square(centred)), number(op.number("eps"), x.dtype())));
  return scale_and_shift(op, mx::reshape(mx::multiply(centred, deviation), x.shape()));
}

Array batch_norm(Op& op) {
  const Array& x = op.in(0);
  if (x.ndim() < 2) op.refuse(dims_text(x.shape()) + " has no channels.");
  const Array deviation = mx::rsqrt(mx::add(per_channel(op, 4), number(op.number("eps"), x.dtype())));
  return scale_and_shift(op, mx::multiply(mx::subtract(x, per_channel(op, 3)), deviation));
}

// ---- grid_sample

enum class GridPadding { zeros, border, reflection };

struct GridAxis {
  GridPadding border;
  bool align_corners;
  int size;  // image size along this dim
};

// [-1, 1] to pixel coordinates.
Array unnormalised(const Array& x, const GridAxis& g) {
  const Array shifted = mx::add(x, scalar_like(x, 1));
  if (g.align_corners) return mx::multiply(mx::divide(shifted, scalar_like(x, 2)), scalar_like(x, g.size - 1));
  return mx::divide(mx::subtract(mx::multiply(shifted, scalar_like(x, g.size)), scalar_like(x, 1)), scalar_like(x, 2));
}

Array clipped(const Array& x, int size) { return mx::clip(x, scalar_like(x, 0), scalar_like(x, size - 1)); }

// Reflects at the image borders: pixel centres with align_corners, otherwise pixel edges.
Array reflected(const Array& x, const GridAxis& g) {
  const double low = g.align_corners ? 0 : -0.5, span = g.align_corners ? g.size - 1 : g.size;
  if (span == 0) return mx::zeros_like(x);
  const Array at = mx::abs(mx::subtract(x, scalar_like(x, low)));
  const Array periods = mx::floor(mx::divide(at, scalar_like(x, span)));
  const Array rest = mx::subtract(at, mx::multiply(periods, scalar_like(x, span)));
  const Array even = mx::equal(mx::remainder(periods, scalar_like(x, 2)), scalar_like(x, 0));
  return mx::where(even, mx::add(rest, scalar_like(x, low)),
                   mx::add(mx::subtract(scalar_like(x, span), rest), scalar_like(x, low)));
}

// Applies the padding mode to pixel coordinates.
Array apply_padding_mode(const Array& x, const GridAxis& g) {
  if (g.border == GridPadding::zeros) return x;
  Array y = g.border == GridPadding::reflection ? reflected(x, g) : x;
  y = clipped(y, g.size);
  return mx::where(mx::isnan(y), scalar_like(y, 0), y);
}

// Taps along one dim: positions and weights.
struct Taps {
  std::vector<Array> at, weight;
};
Taps taps(const Array& x, const GridAxis& g, int count) {
  const Array position = unnormalised(x, g);
  if (count == 1) return {{mx::round(apply_padding_mode(position, g), 0)}, {scalar_like(x, 1)}};
  if (count == 2) {
    const Array p = apply_padding_mode(position, g), left = mx::floor(p), right = mx::subtract(p, left);
    return {{left, mx::add(left, scalar_like(x, 1))}, {mx::subtract(scalar_like(x, 1), right), right}};
  }
  const Array left = mx::floor(position), t = mx::subtract(position, left);
  constexpr double a = -0.75;
  const auto poly = [&](const Array& v, double c3, double c2, double c1, double c0) {
    const Array q =
        mx::add(mx::multiply(mx::add(mx::multiply(scalar_like(v, c3), v), scalar_like(v, c2)), v), scalar_like(v, c1));
    return mx::add(mx::multiply(q, v), scalar_like(v, c0));
  };
  const auto near = [&](const Array& v) { return poly(v, a + 2, -(a + 3), 0, 1); };
  const auto far = [&](const Array& v) { return poly(v, a, -5 * a, 8 * a, -4 * a); };
  const Array one = scalar_like(x, 1);
  Taps out{{}, {far(mx::add(t, one)), near(t), near(mx::subtract(one, t)), far(mx::subtract(scalar_like(x, 2), t))}};
  for (int i = -1; i < 3; ++i) out.at.push_back(apply_padding_mode(mx::add(left, scalar_like(x, i)), g));
  return out;
}

Array grid_sample(Op& op) {
  const Array &x = op.in(0), &grid = op.in(1);
  const int rank = rank_of(x) - 2;
  bool fit = (rank == 2 || rank == 3) && grid.ndim() == x.ndim() && op.rank() == rank_of(x) && grid.shape(-1) == rank &&
             grid.shape(0) == x.shape(0);
  for (int d = 0; fit && d < rank; ++d) fit = grid.shape(d + 1) == op.shape()[d + 2];
  if (!fit)
    op.refuse("grid " + dims_text(grid.shape()) + " does not take " + dims_text(x.shape()) + " to " + dims_text(op.shape()) +
              ".");
  const int count = 1 << op.choice("mode", {"nearest", "bilinear", "bicubic"});
  if (rank == 3 && count == 4) op.refuse("bicubic needs images of two dims.");
  const auto border = static_cast<GridPadding>(op.choice("padding_mode", {"zeros", "border", "reflection"}));
  const int plane = static_cast<int>(count_of(mx::Shape(x.shape().begin() + 2, x.shape().end())));
  if (plane < 1) op.refuse("an image of " + dims_text(x.shape()) + " is empty.");
  const int batch = x.shape(0), channels = x.shape(1), points = static_cast<int>(grid.size()) / (batch * rank);
  const Array flat = mx::reshape(x, {batch, channels, plane}), coordinates = mx::reshape(grid, {batch, points, rank});
  std::vector<Taps> dims;  // outermost first; grid coordinates are innermost first
  for (int d = 0; d < rank; ++d) {
    const int k = rank - 1 - d;
    const Array line = mx::squeeze(mx::slice(coordinates, {0, 0, k}, {batch, points, k + 1}), 2);
    dims.push_back(taps(line, {border, op.flag("align_corners"), x.shape(d + 2)}, count));
  }
  Array sum = scalar_like(x, 0);
  for (int tap = 0, all = static_cast<int>(std::pow(count, rank)); tap < all; ++tap) {
    Array weight = scalar_like(x, 1), at = integer(0, mx::int64), in_bounds = Array(true);
    for (int d = 0, rest = tap; d < rank; ++d, rest /= count) {
      const Array& p = dims[d].at[rest % count];
      const int size = x.shape(d + 2);
      const Array valid =
          mx::logical_and(mx::greater_equal(p, scalar_like(p, 0)), mx::less_equal(p, scalar_like(p, size - 1)));  // false for NaN
      in_bounds = mx::logical_and(in_bounds, valid);
      at = mx::add(mx::multiply(at, integer(size, mx::int64)), mx::astype(mx::where(valid, p, scalar_like(p, 0)), mx::int64));
      weight = mx::multiply(weight, dims[d].weight[rest % count]);
    }
    const Array index = mx::broadcast_to(mx::expand_dims(at, 1), {batch, channels, points});
    const Array read = mx::where(mx::expand_dims(in_bounds, 1), mx::take_along_axis(flat, index, 2), scalar_like(x, 0));
    sum = mx::add(sum, count == 1 ? read : mx::multiply(read, mx::expand_dims(weight, 1)));  // NaN in the grid propagates
  }
  return mx::reshape(sum, op.shape());
}

// ---- fold

Array fold(Op& op) {
  const Array& x = op.in(0);
  const auto pair_attr = [&](const char* name, int64_t min_value) {
    const std::vector<int64_t> list = op.sizes(name);
    if (list.size() != 2) op.refuse(std::string(name) + " has " + std::to_string(list.size()) + " numbers, expected 2.");
    for (int64_t n : list)
      if (n < min_value || n > INT32_MAX) op.refuse(std::string(name) + " = " + std::to_string(n) + " is out of range.");
    return list;
  };
  const auto kernel = pair_attr("kernel", 1), stride = pair_attr("stride", 1), padding = pair_attr("padding", 0),
             dilation = pair_attr("dilation", 1);
  if (x.ndim() < 2 || op.rank() != rank_of(x) + 1)
    op.refuse("patches " + dims_text(x.shape()) + " do not fold to " + dims_text(op.shape()) + ".");
  int64_t blocks[2], padded_size[2];
  for (int d = 0; d < 2; ++d) {
    const int64_t size = op.shape()[op.rank() - 2 + d];
    padded_size[d] = size + 2 * padding[d];
    blocks[d] = static_cast<int64_t>(window_count({kernel[d], stride[d], padding[d], dilation[d]}, size));
  }
  const int channels = op.shape()[op.rank() - 3];
  if (x.shape(-1) != blocks[0] * blocks[1] || x.shape(-2) != channels * kernel[0] * kernel[1] || padded_size[0] > INT32_MAX ||
      padded_size[1] > INT32_MAX)
    op.refuse("patches " + dims_text(x.shape()) + " do not fold to " + dims_text(op.shape()) + ".");
  const auto of = [](int64_t n) { return static_cast<int>(n); };
  const int planes = static_cast<int>(count_of(op.shape()) / (int64_t{op.shape()[op.rank() - 1]} * op.shape()[op.rank() - 2]));
  const Array patches = mx::reshape(x, {planes, of(kernel[0]), of(kernel[1]), of(blocks[0]), of(blocks[1])});
  Array y = mx::zeros({planes, of(padded_size[0]), of(padded_size[1])}, x.dtype());
  for (int i = 0; i < kernel[0]; ++i)
    for (int j = 0; j < kernel[1]; ++j) {
      const Array one = mx::reshape(mx::slice(patches, {0, i, j, 0, 0}, {planes, i + 1, j + 1, of(blocks[0]), of(blocks[1])}),
                                    {planes, of(blocks[0]), of(blocks[1])});
      const int top = of(i * dilation[0]), left = of(j * dilation[1]);
      const mx::Shape start{0, top, left},
          stop{planes, of(top + (blocks[0] - 1) * stride[0] + 1), of(left + (blocks[1] - 1) * stride[1] + 1)},
          step{1, of(stride[0]), of(stride[1])};
      y = mx::slice_update(y, mx::add(mx::slice(y, start, stop, step), one), start, stop, step);
    }
  const int top = of(padding[0]), left = of(padding[1]), h = op.shape()[op.rank() - 2], w = op.shape()[op.rank() - 1];
  return mx::reshape(mx::slice(y, {0, top, left}, {planes, top + h, left + w}), op.shape());
}

constexpr OpBuilder kOps[] = {
    {"conv", conv},
    {"max_pool", [](Op& op) { return sliding_pool(op, PoolKind::max); }},
    {"max_pool_index", [](Op& op) { return sliding_pool(op, PoolKind::position); }},
    {"avg_pool", [](Op& op) { return sliding_pool(op, PoolKind::mean); }},
    {"adaptive_max_pool", [](Op& op) { return adaptive_pool(op, PoolKind::max); }},
    {"adaptive_max_pool_index", [](Op& op) { return adaptive_pool(op, PoolKind::position); }},
    {"adaptive_avg_pool", [](Op& op) { return adaptive_pool(op, PoolKind::mean); }},
    {"pad", pad},
    {"nearest", [](Op& op) { return op.type() == DType::f64 ? nearest<double>(op) : nearest<float>(op); }},
    {"resample", resample},
    {"group_norm", group_norm},
    {"batch_norm", batch_norm},
    {"grid_sample", grid_sample},
    {"fold", fold},
};

}  // namespace

OpTable conv_pool_ops() { return {kOps, std::size(kOps)}; }

}  // namespace keepdim::mlx
