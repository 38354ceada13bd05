// Rows of ops over images: convolutions, pools, padding, resampling, norms of channels.
#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

#include "../geometry.h"
#include "op.h"

namespace keepdim::mlx {
namespace {

using Ints = std::vector<int>;

// One number for each spatial dim.
Ints space(Op& op, const char* name, int rank, int64_t least) {
  const std::vector<int64_t> list = op.sizes(name);
  if (list.size() != static_cast<size_t>(rank))
    op.refuse(std::string(name) + " has " + std::to_string(list.size()) + " numbers for " + std::to_string(rank) + " spatial dims.");
  for (int64_t n : list)
    if (n < least || n > INT32_MAX) op.refuse(std::string(name) + " = " + std::to_string(n) + " is out of range.");
  return Ints(list.begin(), list.end());
}

// ---- convolutions

// [a, b, space..] to [a, space.., b], and back.
Array channels_last(const Array& x) { return mx::moveaxis(x, 1, -1); }
Array channels_first(const Array& x) { return mx::moveaxis(x, -1, 1); }

struct Geometry {
  Ints stride, low, high, dilation, spread;  // spread: distance that the elements of the input are set apart to
};

// One group: x [n, space.., c], w [o, kernel.., c]. MLX has no convolution of integers and f64: their windows are the rows of
// a product.
Array conv_group(const Array& x, const Array& w, const Geometry& g) {
  if (x.dtype() == mx::float32) return mx::conv_general(x, w, g.stride, g.low, g.high, g.dilation, g.spread, 1, false);
  const int rank = rank_of(x) - 2;
  mx::Shape spread = x.shape(), from(x.ndim(), 0), to, step(x.ndim(), 1);
  for (int d = 0; d < rank; ++d) {
    spread[d + 1] = (x.shape(d + 1) - 1) * g.spread[d] + 1 + g.low[d] + g.high[d];
    from[d + 1] = g.low[d];
    step[d + 1] = g.spread[d];
  }
  to = spread;
  for (int d = 0; d < rank; ++d) to[d + 1] = g.low[d] + (x.shape(d + 1) - 1) * g.spread[d] + 1;
  const Array padded = mx::slice_update(mx::zeros(spread, x.dtype()), x, from, to, step);
  mx::Strides strides{};
  mx::Shape windows{x.shape(0)};
  std::vector<int64_t> whole(x.ndim() + 1, 1);  // elements below each dim of `padded`
  for (int d = rank_of(x) - 1; d >= 0; --d) whole[d] = whole[d + 1] * padded.shape(d);
  strides.push_back(whole[1]);
  for (int d = 0; d < rank; ++d) {
    windows.push_back((padded.shape(d + 1) - g.dilation[d] * (w.shape(d + 1) - 1) - 1) / g.stride[d] + 1);
    strides.push_back(whole[d + 2] * g.stride[d]);
  }
  for (int d = 0; d < rank; ++d) {
    windows.push_back(w.shape(d + 1));
    strides.push_back(whole[d + 2] * g.dilation[d]);
  }
  windows.push_back(x.shape(-1));
  strides.push_back(1);
  const Array columns = mx::transpose(mx::reshape(w, {w.shape(0), -1}));  // [kernel * c, o]
  return in_parts(windows[1], count_of(windows) / windows[1], 1, [&](int from, int to) {
    mx::Shape some = windows, result(windows.begin(), windows.begin() + rank + 1);
    some[1] = result[1] = to - from;
    result.push_back(w.shape(0));
    const Array rows = mx::as_strided(padded, some, strides, static_cast<size_t>(from * strides[1]));
    return mx::reshape(product(mx::reshape(rows, {-1, columns.shape(0)}), columns), result);
  });
}

Array conv(Op& op) {
  const Array &x = op.in(0), &w = op.in(1);
  const int rank = rank_of(x) - 2;
  const int64_t groups = op.size("groups");
  const bool transposed = op.flag("transposed");
  if (rank < 1 || rank > 3 || w.ndim() != x.ndim() || op.rank() != rank_of(x) || groups < 1 || x.shape(1) % groups || op.shape()[1] % groups ||
      w.shape(0) % groups || (transposed ? w.shape(0) != x.shape(1) : w.shape(1) != x.shape(1) / groups))
    op.refuse("weight " + dims_text(w.shape()) + " in " + std::to_string(groups) + " groups does not fit input " + dims_text(x.shape()) + ".");
  const Ints stride = space(op, "stride", rank, 1), padding = space(op, "padding", rank, 0), dilation = space(op, "dilation", rank, 1);
  Geometry g{stride, padding, padding, dilation, Ints(rank, 1)};
  mx::Shape start(x.ndim(), 0);
  for (int d = 0; d < rank; ++d) {
    const Slide slide{w.shape(d + 2), stride[d], padding[d], dilation[d]};
    const int64_t in = x.shape(d + 2), out = op.shape()[d + 2];
    if (!convolves(slide, in, out, transposed))
      op.refuse("result " + dims_text(op.shape()) + " is not that of " + dims_text(x.shape()) + " and weight " + dims_text(w.shape()) + ".");
    if (!transposed) continue;
    g.stride[d] = 1;
    g.spread[d] = stride[d];
    const int64_t low = slide.dilation * (slide.kernel - 1) - slide.padding;
    const int64_t high = low + out - static_cast<int64_t>(stops(slide, in, true));
    g.low[d] = static_cast<int>(std::max<int64_t>(low, 0));
    g.high[d] = static_cast<int>(std::max<int64_t>(high, 0));
    start[d + 1] = static_cast<int>(std::max<int64_t>(-low, 0));  // padding beyond the kernel's reach cuts off
  }
  std::vector<Array> made;
  for (int i = 0; i < groups && x.size() > 0; ++i) {
    const auto count = static_cast<int>(groups);
    Array image = channels_last(part(x, 1, i, count)), weight = part(w, 0, i, count);
    if (transposed) {  // from what a result takes to what an input gives
      Axes flipped(static_cast<size_t>(rank));
      std::iota(flipped.begin(), flipped.end(), 2);
      weight = mx::swapaxes(mx::flip(weight, flipped), 0, 1);
    }
    made.push_back(conv_group(image, channels_last(weight), g));
  }
  Array y = made.empty() ? mx::zeros(op.shape(), op.dtype()) : made.size() == 1 ? made[0] : mx::concatenate(made, -1);
  if (!made.empty()) {
    mx::Shape stop = y.shape();
    for (int d = 0; d < rank; ++d) stop[d + 1] = std::min(stop[d + 1], start[d + 1] + op.shape()[d + 2]);
    y = channels_first(transposed ? mx::slice(y, start, stop) : y);
  }
  if (!op.has(2)) return y;
  mx::Shape channel(x.ndim(), 1);
  channel[1] = op.shape()[1];
  return mx::add(y, mx::reshape(op.in(2), channel));
}

// ---- pools: tables of what each window of each dim reads

struct PoolDim {
  std::vector<Window> windows;  // by output
  int64_t dilation = 1;
};
using Windows = std::vector<PoolDim>;

int64_t taps_in(const Window& w, int64_t dilation) { return std::max<int64_t>(w.end - w.begin + dilation - 1, 0) / dilation; }

// For one dim: positions [outputs, taps], which of them count, and the place that each is called. Shorter windows end with
// their last position again; one with nothing inside reads 0 and is called by its beginning, as in torch.
struct Taps {
  std::vector<int64_t> at, inside, place;
  int outputs, width = 1;
};
Taps taps_of(const PoolDim& dim) {
  Taps t{{}, {}, {}, static_cast<int>(dim.windows.size())};
  for (const Window& w : dim.windows) t.width = std::max(t.width, static_cast<int>(taps_in(w, dim.dilation)));
  for (const Window& w : dim.windows) {
    const int64_t count = taps_in(w, dim.dilation);
    for (int64_t k = 0; k < t.width; ++k) {
      const int64_t at = w.begin + std::min(k, count - 1) * dim.dilation;
      t.at.push_back(count ? at : 0);
      t.inside.push_back(k < count);
      t.place.push_back(count ? at : w.begin);
    }
  }
  return t;
}

// x [.., space] to [.., outputs.., all taps of a window]; and the same of a number for each position, and of what counts.
struct Read {
  Array values, places, inside;
  std::vector<int64_t> sizes;  // of each output's window, all dims multiplied
};
Read read(const Array& x, const Windows& windows) {
  const auto rank = static_cast<int>(windows.size()), first = rank_of(x) - rank;
  mx::Shape outputs, all(windows.size(), 1);
  Array values = x, places = whole(0, mx::int64), inside = Array(true);
  std::vector<int64_t> sizes{1};
  for (int d = 0; d < rank; ++d) {
    const Taps t = taps_of(windows[d]);
    const int axis = first + 2 * d;
    values = mx::unflatten(mx::take(values, host(t.at, {t.outputs * t.width}), axis), axis, {t.outputs, t.width});
    mx::Shape line(2 * windows.size(), 1);
    line[2 * d] = t.outputs, line[2 * d + 1] = t.width;
    places = mx::add(mx::multiply(places, whole(x.shape(first + d), mx::int64)), host(t.place, line));
    inside = mx::logical_and(inside, mx::astype(host(t.inside, line), mx::bool_));
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
  return {taps_last(values, first), taps_last(places, 0), taps_last(inside, 0), sizes};
}

enum class Pool { max, place, mean };

Array pool(const Array& x, Pool kind, const Windows& windows, int64_t divisor) {
  const Read r = read(x, windows);
  if (kind == Pool::mean) {
    const Array sum = mx::sum(mx::where(r.inside, r.values, number(0, x.dtype())), Axes{-1});
    mx::Shape grid;
    for (const PoolDim& dim : windows) grid.push_back(static_cast<int>(dim.windows.size()));
    if (divisor) return mx::divide(sum, number(static_cast<double>(divisor), x.dtype()));
    return mx::divide(sum, mx::astype(host(r.sizes, grid), x.dtype()));
  }
  const bool real = mx::issubdtype(x.dtype(), mx::floating);
  // A window with nothing inside, between taps, is -inf.
  const Array values = real ? mx::where(mx::any(r.inside, Axes{-1}, true), r.values, number(-HUGE_VAL, x.dtype())) : r.values;
  const Array most = mx::max(values, Axes{-1}, true);
  if (kind == Pool::max) return mx::squeeze(most, -1);
  const Array hit = mx::equal(values, most);  // the first, or the last NaN
  Array where = mx::argmax(mx::astype(hit, mx::int32), -1, true);
  if (real) {
    const Array nan = mx::isnan(values);
    const int last = values.shape(-1) - 1;
    const Array back = mx::subtract(whole(last, mx::int64), mx::astype(mx::argmax(mx::astype(mx::flip(nan, -1), mx::int32), -1, true), mx::int64));
    where = mx::where(mx::any(nan, Axes{-1}, true), back, mx::astype(where, mx::int64));
  }
  const Array places = mx::broadcast_to(r.places, values.shape());
  return mx::squeeze(mx::take_along_axis(places, mx::astype(where, mx::int64), -1), -1);
}

// `make` gives the window of one output of one spatial dim, from that dim's size and the result's.
template <class Make>
Array pool(Op& op, Pool kind, int64_t rank, Make&& make, const Ints& dilation = {}, int64_t divisor = 0) {
  const Array& x = op.in(0);
  const auto first = static_cast<int>(rank_of(x) - rank);
  bool fits = rank >= 1 && rank <= 3 && rank_of(x) == op.rank() && first >= 0;
  for (int d = 0; fits && d < first; ++d) fits = x.shape(d) == op.shape()[d];
  if (!fits) op.refuse("result " + dims_text(op.shape()) + " is no pool of " + dims_text(x.shape()) + ".");
  Windows windows(static_cast<size_t>(rank));
  for (int d = 0; d < rank; ++d) {
    const int64_t in = x.shape(first + d), out = op.shape()[first + d];
    if (!dilation.empty()) windows[d].dilation = dilation[d];
    for (int64_t o = 0; o < out; ++o) {
      windows[d].windows.push_back(make(d, in, out, o));
      if (!windows[d].windows.back().valid(in, windows[d].dilation))
        op.refuse("window " + std::to_string(o) + " of result " + dims_text(op.shape()) + " is outside of " + dims_text(x.shape()) + ".");
    }
  }
  int64_t taps = 1, outputs = 1;  // of one place of the outermost spatial dim
  for (const PoolDim& dim : windows) taps *= taps_of(dim).width;
  for (int d = 0; d < op.rank(); ++d) outputs *= d == first ? 1 : op.shape()[d];
  return in_parts(op.shape()[first], outputs * taps, first, [&](int from, int to) {
    Windows some = windows;
    const auto& all = windows[0].windows;
    some[0].windows.assign(all.begin() + from, all.begin() + to);
    return pool(x, kind, some, divisor);
  });
}

// Windows of one size at equal distances.
Array sliding(Op& op, Pool kind) {
  const auto rank = static_cast<int>(op.sizes("kernel").size());
  const Ints size = space(op, "kernel", rank, 1), stride = space(op, "stride", rank, 1), padding = space(op, "padding", rank, 0);
  const Ints dilation = op.attr("dilation") ? space(op, "dilation", rank, 1) : Ints(rank, 1);
  const bool with_padding = op.flag("count_include_pad");
  const auto window = [&](int d, int64_t in, int64_t, int64_t o) {
    return window_of({size[d], stride[d], padding[d], dilation[d]}, in, o, with_padding);
  };
  return pool(op, kind, rank, window, dilation, op.attr("divisor") ? op.size("divisor") : 0);
}

// Windows that share out the whole input.
Array adaptive(Op& op, Pool kind) {
  return pool(op, kind, op.size("axes"), [](int, int64_t in, int64_t out, int64_t o) { return share_of(in, out, o); });
}

// ---- padding and resampling

// x read through a table of positions for each of its last dims; -1 is `value`.
Array remap(Op& op, int rank, const Array& value, const std::function<int64_t(int, int64_t)>& position) {
  Array y = op.in(0), outside = Array(false);
  const mx::Shape& in = op.in(0).shape();
  if (op.rank() != rank_of(y) || rank > op.rank()) op.refuse("result " + dims_text(op.shape()) + " is not made of " + dims_text(in) + ".");
  bool holes = false;
  for (int d = op.rank() - rank; d < op.rank(); ++d) {
    std::vector<int64_t> at, out;
    bool same = in[d] == op.shape()[d];
    for (int64_t o = 0; o < op.shape()[d]; ++o) {
      const int64_t from = position(d, o);
      if (from >= in[d]) op.refuse("reads behind dim " + std::to_string(d) + " of " + dims_text(in) + ".");
      at.push_back(std::max<int64_t>(from, 0));
      out.push_back(from < 0);
      same &= from == o;
      holes |= from < 0;
    }
    if (same) continue;
    mx::Shape line(static_cast<size_t>(op.rank()), 1);
    line[d] = op.shape()[d];
    outside = mx::logical_or(outside, mx::astype(host(out, line), mx::bool_));
    if (in[d] == 0) return mx::full(op.shape(), value);
    y = mx::take(y, host(at, {op.shape()[d]}), d);
  }
  return holes ? mx::where(outside, value, y) : y;
}

Array pad(Op& op) {
  const Array& x = op.in(0);
  const std::vector<int64_t> before = op.sizes("before");
  const auto rank = static_cast<int>(before.size());
  const auto mode = static_cast<Padding>(op.choice("mode", {"constant", "reflect", "replicate", "circular"}));
  return remap(op, rank, op.scalar("value", op.type()), [&](int d, int64_t o) {
    const int64_t from = padded(mode, x.shape(d), o - before[d - (op.rank() - rank)]);
    if (from == kTooFar) op.refuse("the padding of dim " + std::to_string(d) + " is too large for " + dims_text(x.shape()) + ".");
    return from;
  });
}

int space_rank(Op& op) {
  const int rank = rank_of(op.in(0)) - 2;
  if (rank < 1 || rank > 3 || op.rank() != rank + 2) op.refuse("input " + dims_text(op.in(0).shape()) + " is no batch of images.");
  if (op.in(0).size() == 0) op.refuse("input " + dims_text(op.in(0).shape()) + " is empty.");
  return rank;
}

// Outputs per input of a spatial dim; 0 where nobody said.
double given_scale(Op& op, int d) {
  static const char* names[] = {"scale_0", "scale_1", "scale_2"};
  return op.attr(names[d]) ? op.number(names[d]) : 0;
}

template <class T>
Array nearest(Op& op) {
  const int rank = space_rank(op);
  const bool exact = op.flag("exact");
  return remap(op, rank, number(0, op.in(0).dtype()), [&](int d, int64_t o) {
    const int64_t in = op.in(0).shape(d);
    return nearest_to(o, in, scale_of<T>(given_scale(op, d - 2), in, op.shape()[d]), exact);
  });
}

// One dim after the other: a few taps of each row, with weights.
Array resample(Op& op) {
  const int rank = space_rank(op), taps = op.choice("mode", {"linear", "cubic"}) ? 4 : 2;
  Array y = op.in(0);
  for (int d = 2; d < rank + 2; ++d) {
    const Resampled dim{y.shape(d), op.shape()[d], taps, op.flag("align_corners"), given_scale(op, d - 2)};
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
      sum = mx::add(sum, mx::multiply(mx::take(y, host(index[i], {out}), d), Array(weight[i].data(), line, mx::float32)));
    y = sum;
  }
  return y;
}

// ---- norms of channels

Array per_channel(Op& op, size_t i) {
  mx::Shape shape(op.in(0).ndim(), 1);
  shape[1] = op.in(0).shape(1);
  if (op.in(i).shape() != mx::Shape{shape[1]}) op.refuse("operand " + dims_text(op.in(i).shape()) + " does not fit the channels of " + dims_text(op.in(0).shape()) + ".");
  return mx::reshape(op.in(i), shape);
}

Array scaled(Op& op, Array y) {
  if (op.has(1)) y = mx::multiply(y, per_channel(op, 1));
  return op.has(2) ? mx::add(y, per_channel(op, 2)) : y;
}

Array group_norm(Op& op) {
  const Array& x = op.in(0);
  const int64_t groups = op.size("groups");
  if (x.ndim() < 2 || groups < 1 || x.shape(1) % groups) op.refuse("the channels of " + dims_text(x.shape()) + " are no " + std::to_string(groups) + " groups.");
  const Array rows = mx::reshape(x, {static_cast<int>(x.shape(0) * groups), -1});
  const Array centred = mx::subtract(rows, mean_of_rows(rows));
  const Array deviation = mx::rsqrt(mx::add(mean_of_rows(mx::square(centred)), number(op.number("eps"), x.dtype())));
  return scaled(op, mx::reshape(mx::multiply(centred, deviation), x.shape()));
}

Array batch_norm(Op& op) {
  const Array& x = op.in(0);
  if (x.ndim() < 2) op.refuse(dims_text(x.shape()) + " has no channels.");
  const Array deviation = mx::rsqrt(mx::add(per_channel(op, 4), number(op.number("eps"), x.dtype())));
  return scaled(op, mx::multiply(mx::subtract(x, per_channel(op, 3)), deviation));
}

constexpr Row kRows[] = {
    {"conv", conv},
    {"max_pool", [](Op& op) { return sliding(op, Pool::max); }},
    {"max_pool_index", [](Op& op) { return sliding(op, Pool::place); }},
    {"avg_pool", [](Op& op) { return sliding(op, Pool::mean); }},
    {"adaptive_max_pool", [](Op& op) { return adaptive(op, Pool::max); }},
    {"adaptive_max_pool_index", [](Op& op) { return adaptive(op, Pool::place); }},
    {"adaptive_avg_pool", [](Op& op) { return adaptive(op, Pool::mean); }},
    {"pad", pad},
    {"nearest", [](Op& op) { return op.type() == DType::f64 ? nearest<double>(op) : nearest<float>(op); }},
    {"resample", resample},
    {"group_norm", group_norm},
    {"batch_norm", batch_norm},
};

}  // namespace

Table window_rows() { return {kRows, std::size(kRows)}; }

}  // namespace keepdim::mlx
