// Rows of ops over images: convolutions, pools, padding, resampling, norms of channels.
#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

#include "op.h"

namespace keepdim::mlx {
namespace {

using Ints = std::vector<int>;

int rank_of(const Array& x) { return static_cast<int>(x.ndim()); }

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

// One group: x [n, space.., c], w [o, kernel.., c]. What MLX has no convolution of, integers and f64: their windows are
// multiplied and added up.
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
  windows.push_back(1);
  strides.push_back(0);
  for (int d = 0; d < rank; ++d) {
    windows.push_back(w.shape(d + 1));
    strides.push_back(whole[d + 2] * g.dilation[d]);
  }
  windows.push_back(x.shape(-1));
  strides.push_back(1);
  Axes sums(static_cast<size_t>(rank) + 1);
  std::iota(sums.begin(), sums.end(), rank + 2);
  return mx::astype(mx::sum(mx::multiply(mx::as_strided(padded, windows, strides, 0), w), sums), x.dtype());
}

Array part(const Array& x, int axis, int index, int count) {
  mx::Shape start(x.ndim(), 0), stop = x.shape();
  const int size = x.shape(axis) / count;
  start[axis] = index * size;
  stop[axis] = (index + 1) * size;
  return mx::slice(x, start, stop);
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
    const int64_t reach = int64_t{dilation[d]} * (w.shape(d + 2) - 1) + 1, in = x.shape(d + 2), out = op.shape()[d + 2];
    const int64_t least = transposed ? (in - 1) * stride[d] - 2 * int64_t{padding[d]} + reach
                                     : in + 2 * int64_t{padding[d]} < reach ? 0 : (in + 2 * int64_t{padding[d]} - reach) / stride[d] + 1;
    const int64_t spare = transposed ? std::max(stride[d], dilation[d]) - 1 : 0;
    if (w.shape(d + 2) < 1 || out < least || out > least + spare)
      op.refuse("result " + dims_text(op.shape()) + " is not that of " + dims_text(x.shape()) + " and weight " + dims_text(w.shape()) + ".");
    if (!transposed) continue;
    g.stride[d] = 1;
    g.spread[d] = stride[d];
    const int64_t low = reach - 1 - padding[d], high = low + out - least;
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

struct Window {
  Ints taps;         // positions in the input; those outside are replaced by one inside
  Ints inside;       // 1 where it was none of those
  int64_t size;      // for a mean: what it is divided by
  int64_t none = 0;  // the place that stands for one with nothing inside, as in torch
};
using Windows = std::vector<std::vector<Window>>;  // by dim, by output

int widest(const std::vector<Window>& all) {
  size_t most = 1;
  for (const Window& w : all) most = std::max(most, w.taps.size());
  return static_cast<int>(most);
}

// For one dim: positions [outputs, taps], and which of them count.
struct Taps {
  std::vector<int64_t> at, inside, place;
  int outputs, width;
};
Taps taps_of(const std::vector<Window>& all) {
  Taps t{{}, {}, {}, static_cast<int>(all.size()), widest(all)};
  for (const Window& w : all) {
    const bool some = std::find(w.inside.begin(), w.inside.end(), 1) != w.inside.end();
    for (int k = 0; k < t.width; ++k) {
      const bool own = k < static_cast<int>(w.taps.size());
      t.at.push_back(own ? w.taps[k] : w.taps.back());
      t.inside.push_back(own && w.inside[k]);
      t.place.push_back(some ? t.at.back() : w.none);
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
      for (const Window& w : windows[d]) next.push_back(size * w.size);
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

Array pool(Op& op, Pool kind, const Windows& windows, int64_t divisor) {
  const Array& x = op.in(0);
  const Read r = read(x, windows);
  if (kind == Pool::mean) {
    const Array sum = mx::sum(mx::where(r.inside, r.values, number(0, x.dtype())), Axes{-1});
    mx::Shape grid;
    for (const auto& dim : windows) grid.push_back(static_cast<int>(dim.size()));
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

void need_pool(Op& op, int rank) {
  const Array& x = op.in(0);
  bool fits = rank >= 1 && rank <= 3 && rank_of(x) == op.rank() && rank_of(x) >= rank;
  for (int d = 0; fits && d < rank_of(x) - rank; ++d) fits = x.shape(d) == op.shape()[d];
  for (int d = rank_of(x) - rank; fits && d < rank_of(x); ++d) fits = x.shape(d) > 0;
  if (!fits) op.refuse("result " + dims_text(op.shape()) + " is no pool of " + dims_text(x.shape()) + ".");
}

// Windows of one size at equal distances; they begin in the padding at the earliest, and reach over it.
Array sliding(Op& op, Pool kind) {
  const auto rank = static_cast<int>(op.sizes("kernel").size());
  need_pool(op, rank);
  const Ints size = space(op, "kernel", rank, 1), stride = space(op, "stride", rank, 1), padding = space(op, "padding", rank, 0);
  const Ints dilation = op.attr("dilation") ? space(op, "dilation", rank, 1) : Ints(rank, 1);
  const bool with_padding = op.flag("count_include_pad");
  Windows windows(rank);
  for (int d = 0; d < rank; ++d) {
    const int64_t in = op.in(0).shape(rank_of(op.in(0)) - rank + d), out = op.shape()[op.rank() - rank + d];
    for (int64_t o = 0; o < out; ++o) {
      const int64_t begin = o * stride[d] - padding[d], end = begin + int64_t{size[d] - 1} * dilation[d] + 1;
      if (std::max<int64_t>(begin, 0) >= std::min(end, in))
        op.refuse("window " + std::to_string(o) + " of result " + dims_text(op.shape()) + " is outside of " + dims_text(op.in(0).shape()) + ".");
      Window w{{}, {}, 0};
      int64_t first = -1, last = -1;
      for (int k = 0; k < size[d]; ++k) {
        const int64_t at = begin + int64_t{k} * dilation[d];
        if (at < 0 || at >= in) continue;
        if (first < 0) first = at;
        last = at;
      }
      for (int k = 0; k < size[d]; ++k) {
        const int64_t at = begin + int64_t{k} * dilation[d];
        w.inside.push_back(at >= 0 && at < in);
        w.taps.push_back(static_cast<int>(first < 0 ? 0 : std::clamp(at, first, last)));
      }
      w.none = begin < 0 ? begin + (-begin + dilation[d] - 1) / dilation[d] * dilation[d] : begin;
      w.size = with_padding ? std::min(end, in + padding[d]) - begin : std::min(end, in) - std::max<int64_t>(begin, 0);
      windows[d].push_back(std::move(w));
    }
  }
  return pool(op, kind, windows, op.attr("divisor") ? op.size("divisor") : 0);
}

// Windows that share out the whole input.
Array adaptive(Op& op, Pool kind) {
  const auto rank = static_cast<int>(op.size("axes"));
  need_pool(op, rank);
  Windows windows(rank);
  for (int d = 0; d < rank; ++d) {
    const int64_t in = op.in(0).shape(rank_of(op.in(0)) - rank + d), out = op.shape()[op.rank() - rank + d];
    for (int64_t o = 0; o < out; ++o) {
      const int64_t begin = o * in / out, end = ((o + 1) * in + out - 1) / out;
      Window w{Ints(static_cast<size_t>(end - begin)), Ints(static_cast<size_t>(end - begin), 1), end - begin};
      std::iota(w.taps.begin(), w.taps.end(), static_cast<int>(begin));
      windows[d].push_back(std::move(w));
    }
  }
  return pool(op, kind, windows, 0);
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
  const int kind = op.choice("mode", {"constant", "reflect", "replicate", "circular"});
  return remap(op, rank, op.scalar("value", op.type()), [&](int d, int64_t o) {
    const int64_t size = x.shape(d), at = o - before[d - (op.rank() - rank)];
    if (at >= 0 && at < size) return at;
    if (kind == 0) return int64_t{-1};
    const int64_t mirrored = at < 0 ? -at : 2 * (size - 1) - at;
    const int64_t from = kind == 1 ? mirrored : kind == 2 ? (at < 0 ? 0 : size - 1) : at < 0 ? at + size : at - size;
    if (from < 0 || from >= size) op.refuse("the padding of dim " + std::to_string(d) + " is too large for " + dims_text(x.shape()) + ".");
    return from;
  });
}

int space_rank(Op& op) {
  const int rank = rank_of(op.in(0)) - 2;
  if (rank < 1 || rank > 3 || op.rank() != rank + 2) op.refuse("input " + dims_text(op.in(0).shape()) + " is no batch of images.");
  if (op.in(0).size() == 0) op.refuse("input " + dims_text(op.in(0).shape()) + " is empty.");
  return rank;
}

// Inputs per output of a spatial dim, as torch computes it, in T.
template <class T>
T scale_of(Op& op, int d, int64_t in, int64_t out) {
  static const char* names[] = {"scale_0", "scale_1", "scale_2"};
  if (op.attr(names[d]) && op.number(names[d]) > 0) return static_cast<T>(1 / op.number(names[d]));
  return static_cast<T>(in) / static_cast<T>(out);
}

template <class T>
Array nearest(Op& op) {
  const int rank = space_rank(op);
  const T half = op.flag("exact") ? T(0.5) : T(0);
  return remap(op, rank, number(0, op.in(0).dtype()), [&](int d, int64_t o) {
    const int64_t in = op.in(0).shape(d);
    const T at = std::floor((static_cast<T>(o) + half) * scale_of<T>(op, d - 2, in, op.shape()[d]));
    return at < static_cast<T>(in) ? static_cast<int64_t>(at) : in - 1;
  });
}

// One dim after the other: a few taps of each row, with weights.
Array resample(Op& op) {
  const int rank = space_rank(op), taps = op.choice("mode", {"linear", "cubic"}) ? 4 : 2;
  Array y = op.in(0);
  for (int d = 2; d < rank + 2; ++d) {
    const int64_t in = y.shape(d), out = op.shape()[d];
    const bool corners = op.flag("align_corners");
    const float scale = corners ? (out > 1 ? static_cast<float>(in - 1) / static_cast<float>(out - 1) : 0.0f) : scale_of<float>(op, d - 2, in, out);
    std::vector<std::vector<int64_t>> index(static_cast<size_t>(taps));
    std::vector<std::vector<float>> weight(static_cast<size_t>(taps));
    for (int64_t o = 0; o < out; ++o) {
      float at = corners ? static_cast<float>(o) * scale : (static_cast<float>(o) + 0.5f) * scale - 0.5f;
      if (taps == 2) {
        at = std::clamp(at, 0.0f, static_cast<float>(in));
        const int64_t first = std::min(static_cast<int64_t>(at), in - 1);
        const float right = std::min(std::max(at - static_cast<float>(first), 0.0f), 1.0f);
        index[0].push_back(first), index[1].push_back(std::min(first + 1, in - 1));
        weight[0].push_back(1 - right), weight[1].push_back(right);
        continue;
      }
      at = std::min(at, static_cast<float>(in));
      const float floor = std::floor(at), t = at - floor, a = -0.75f;
      const auto near = [&](float x) { return ((a + 2) * x - (a + 3)) * x * x + 1; };
      const auto far = [&](float x) { return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a; };
      const float all[] = {far(t + 1), near(t), near(1 - t), far(2 - t)};
      for (int64_t i = 0; i < 4; ++i) {
        index[i].push_back(std::clamp<int64_t>(static_cast<int64_t>(floor) - 1 + i, 0, in - 1));
        weight[i].push_back(all[i]);
      }
    }
    mx::Shape line(y.ndim(), 1);
    line[d] = static_cast<int>(out);
    Array sum = number(0, y.dtype());
    for (int i = 0; i < taps; ++i)
      sum = mx::add(sum, mx::multiply(mx::take(y, host(index[i], {static_cast<int>(out)}), d), Array(weight[i].data(), line, mx::float32)));
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
