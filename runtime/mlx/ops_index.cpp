// Rows that read or write at positions which are data. An index out of range is an error of the call, seen after it; it
// is kept inside before MLX sees it, which checks none.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "op.h"

namespace keepdim::mlx {
namespace {

int rank_of(const Array& x) { return static_cast<int>(x.ndim()); }

// Nothing can be read of an empty dim: every index is out of range.
void need_some(Op& op, const Array& index, int64_t limit) {
  if (limit > 0 || index.size() == 0) return;
  Array first = mx::astype(mx::slice(mx::flatten(index), {0}, {1}), mx::int64);
  op.fault("index " + std::to_string(mx::squeeze(first).item<int64_t>()) + " is not in an empty dim.");
}

Array embedding(Op& op) {
  const Array& index = op.in(1);
  const Packed* packed = op.packed(0);
  const int rows = packed ? packed->quants.shape(0) : op.in(0).shape(0);
  need_some(op, index, rows);
  const Array at = op.index(index, rows, false);
  if (!packed) return mx::take(op.in(0), at, 0);
  return mx::dequantize(mx::take(packed->quants, at, 0), mx::take(packed->scales, at, 0), mx::take(packed->biases, at, 0), kGroup, packed->bits);
}

Array index_select(Op& op) {
  const Array &x = op.in(0), &index = op.in(1);
  if (index.ndim() > 1) op.refuse("the index " + dims_text(index.shape()) + " is no list.");
  const int dim = op.axis(rank_of(x));
  need_some(op, index, x.shape(dim));
  return mx::take(x, op.index(mx::reshape(index, {static_cast<int>(index.size())}), x.shape(dim), false), dim);
}

// Indices of several dims of x: checked, and together of one shape.
struct Indices {
  Axes dims;
  std::vector<Array> at;
  mx::Shape shape;  // of each
  bool together;    // the dims lie beside each other; else what is indexed comes first
};
Indices indices(Op& op, size_t first) {
  const Array& x = op.in(0);
  Indices out{op.axes("dims", rank_of(x)), {}, {}, true};
  if (out.dims.empty() || out.dims.size() != op.ins() - first || !std::is_sorted(out.dims.begin(), out.dims.end()))
    op.refuse("dims are not " + std::to_string(op.ins() - first) + " sorted dims of " + dims_text(x.shape()) + ".");
  for (size_t i = 0; i < out.dims.size(); ++i) {
    need_some(op, op.in(first + i), x.shape(out.dims[i]));
    out.at.push_back(op.index(op.in(first + i), x.shape(out.dims[i]), true));
  }
  out.at = mx::broadcast_arrays(out.at);
  out.shape = out.at[0].shape();
  out.together = out.dims.back() - out.dims.front() == static_cast<int>(out.dims.size()) - 1;
  return out;
}

// Where the dims of the indices stand among those that are not indexed.
int place(const Indices& i) { return i.together ? i.dims.front() : 0; }

// A run of `count` dims moved from one place to another.
Array moved(const Array& x, int from, int to, int count) {
  Axes order;
  for (int d = 0; d < rank_of(x); ++d)
    if (d < from || d >= from + count) order.push_back(d);
  Axes run(static_cast<size_t>(count));
  std::iota(run.begin(), run.end(), from);
  order.insert(order.begin() + to, run.begin(), run.end());
  return mx::transpose(x, order);
}

Array index(Op& op) {
  const Array& x = op.in(0);
  const Indices i = indices(op, 1);
  mx::Shape sizes = x.shape();
  Axes ones;
  for (int d : i.dims) sizes[d] = 1, ones.push_back(d + static_cast<int>(i.shape.size()));
  const Array found = mx::squeeze(mx::gather(x, i.at, i.dims, sizes), ones);
  return moved(found, 0, place(i), static_cast<int>(i.shape.size()));
}

enum class Put { set, add, prod, amax, amin };

Array put(Put how, const Array& x, const std::vector<Array>& at, const Array& updates, const Axes& axes) {
  switch (how) {
    case Put::set: return mx::scatter(x, at, updates, axes);
    case Put::add: return mx::scatter_add(x, at, updates, axes);
    case Put::prod: return mx::scatter_prod(x, at, updates, axes);
    case Put::amax: return mx::scatter_max(x, at, updates, axes);
    case Put::amin: return mx::scatter_min(x, at, updates, axes);
  }
  return x;
}

// With a NaN where one is among what is compared: MLX takes the greater without looking for it.
Array put_nan(Put how, const Array& x, const std::vector<Array>& at, const Array& updates, const Axes& axes) {
  const Array y = put(how, x, at, updates, axes);
  if ((how != Put::amax && how != Put::amin) || !mx::issubdtype(x.dtype(), mx::floating)) return y;
  const auto flags = [](const Array& a) { return mx::astype(mx::isnan(a), mx::int32); };
  const Array nan = mx::scatter_max(flags(x), at, flags(updates), axes);
  return mx::where(mx::astype(nan, mx::bool_), number(NAN, x.dtype()), y);
}

template <Put how>
Array index_put(Op& op) {
  const Array &x = op.in(0), &values = op.in(1);
  const Indices i = indices(op, 2);
  const auto rank = static_cast<int>(i.shape.size());
  mx::Shape part, rest, single = i.shape;  // what is written: as x has it; without the indices; as MLX wants it
  for (int d = 0; d < rank_of(x); ++d) {
    const bool indexed = std::find(i.dims.begin(), i.dims.end(), d) != i.dims.end();
    if (!indexed) rest.push_back(x.shape(d));
    single.push_back(indexed ? 1 : x.shape(d));
  }
  part = rest;
  part.insert(part.begin() + place(i), i.shape.begin(), i.shape.end());
  if (count_of(part) == 0) return x;
  const Array updates = moved(mx::broadcast_to(values, part), place(i), 0, rank);
  return put(how, x, i.at, mx::reshape(updates, single), i.dims);
}

// x cut to the index's sizes in all dims but one.
Array cut(Op& op, const Array& x, const mx::Shape& sizes, int but) {
  mx::Shape stop = x.shape();
  if (x.ndim() != sizes.size()) op.refuse("index " + dims_text(sizes) + " does not fit " + dims_text(x.shape()) + ".");
  for (int d = 0; d < rank_of(x); ++d) {
    if (d == but) continue;
    if (sizes[d] > x.shape(d)) op.refuse("index " + dims_text(sizes) + " does not fit " + dims_text(x.shape()) + ".");
    stop[d] = sizes[d];
  }
  return mx::slice(x, mx::Shape(x.ndim(), 0), stop);
}

Array gather(Op& op) {
  const Array &x = op.in(0), &given = op.in(1);
  if (given.size() == 0) return mx::zeros(op.shape(), op.dtype());  // it may have any rank
  if (x.ndim() == 0) {
    const Array safe = op.index(given, 1, false);
    return mx::add(x, mx::astype(mx::multiply(safe, number(0, safe.dtype())), x.dtype()));
  }
  const int dim = op.axis(rank_of(x));
  need_some(op, given, x.shape(dim));
  return mx::take_along_axis(cut(op, x, given.shape(), dim), op.index(given, x.shape(dim), false), dim);
}

Array scatter(Op& op, Put how) {
  if (op.in(1).size() == 0) return op.in(0);
  const bool single = op.in(0).ndim() == 0;
  const auto full = [&](const Array& a) { return single ? mx::reshape(a, {1}) : a; };
  const Array x = full(op.in(0)), given = full(op.in(1));
  const int dim = single ? 0 : op.axis(rank_of(x));
  cut(op, x, given.shape(), dim);
  need_some(op, given, x.shape(dim));
  const Array source = cut(op, full(op.in(2)), given.shape(), -1);
  std::vector<Array> at;
  Axes axes;
  for (int d = 0; d < rank_of(x); ++d) {
    axes.push_back(d);
    if (d == dim) {
      at.push_back(op.index(given, x.shape(dim), false));
      continue;
    }
    mx::Shape line(x.ndim(), 1);
    line[d] = given.shape(d);
    at.push_back(mx::broadcast_to(mx::reshape(mx::arange(0.0, given.shape(d), 1.0, given.dtype()), line), given.shape()));
  }
  mx::Shape updates = given.shape();
  updates.insert(updates.end(), x.ndim(), 1);
  return mx::reshape(put_nan(how, x, at, mx::reshape(source, updates), axes), op.shape());
}

Array scatter_reduce(Op& op) {
  constexpr Put kinds[] = {Put::add, Put::prod, Put::amax, Put::amin};
  return scatter(op, kinds[op.choice("reduce", {"sum", "prod", "amax", "amin"})]);
}

// The lists are for engines that compute only those rows. Nothing here reads them, so they are not computed.
Array flatnonzero(Op& op) {
  const Array x = mx::flatten(op.in(0));
  const int count = x.shape(0);
  if (op.rank() != 1 || op.shape()[0] != count) op.refuse("result " + dims_text(op.shape()) + " does not count " + dims_text(op.in(0).shape()) + ".");
  const Array end = whole(count, mx::int64), at = mx::sort(mx::where(x, mx::arange(0, count, 1, mx::int64), end));
  return mx::where(mx::equal(at, end), whole(-1, mx::int64), at);
}

constexpr Row kRows[] = {
    {"embedding", embedding},
    {"flatnonzero", flatnonzero},
    {"index_select", index_select},
    {"index", index},
    {"gather", gather},
    {"index_put", index_put<Put::set>},
    {"index_add", index_put<Put::add>},
    {"scatter", [](Op& op) { return scatter(op, Put::set); }},
    {"scatter_reduce", scatter_reduce},
};

}  // namespace

Table index_rows() { return {kRows, std::size(kRows)}; }

}  // namespace keepdim::mlx
