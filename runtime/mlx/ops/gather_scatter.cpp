// Gather, scatter and embedding ops. MLX does not check indices: they are clipped here, and an index out of range fails the call
// after the run.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "mlx/op.h"

namespace keepdim::mlx {
namespace {

// In an empty dim every index is out of range.
void check_not_empty(Op& op, const Array& index, int64_t limit) {
  if (limit > 0 || index.size() == 0) return;
  Array first = mx::astype(mx::slice(mx::flatten(index), {0}, {1}), mx::int64);
  op.fail_run("index " + std::to_string(mx::squeeze(first).item<int64_t>()) + " is not in an empty dim.");
}

Array embedding(Op& op) {
  const Array& index = op.in(1);
  const QuantisedWeight* packed = op.packed(0);
  const int rows = packed ? packed->quants.shape(0) : op.in(0).shape(0);
  check_not_empty(op, index, rows);
  const Array at = op.index(index, rows, false);
  if (!packed) return mx::take(op.in(0), at, 0);
  return mx::dequantize(mx::take(packed->quants, at, 0), mx::take(packed->scales, at, 0), mx::take(packed->biases, at, 0), kGroup,
                        packed->bits);
}

Array index_select(Op& op) {
  const Array &x = op.in(0), &index = op.in(1);
  if (index.ndim() > 1) op.refuse("the index " + dims_text(index.shape()) + " is not 1-D.");
  const int dim = op.axis(rank_of(x));
  check_not_empty(op, index, x.shape(dim));
  return mx::take(x, op.index(mx::reshape(index, {static_cast<int>(index.size())}), x.shape(dim), false), dim);
}

// Checked indices of several dims of x, broadcast to one shape.
struct Indices {
  Axes dims;
  std::vector<Array> at;
  mx::Shape shape;  // common shape
  bool adjacent;    // the indexed dims are adjacent; otherwise the index dims come first
};
Indices indices(Op& op, size_t first) {
  const Array& x = op.in(0);
  Indices out{op.axes("dims", rank_of(x)), {}, {}, true};
  if (out.dims.empty() || out.dims.size() != op.ins() - first || !std::is_sorted(out.dims.begin(), out.dims.end()))
    op.refuse("dims are not " + std::to_string(op.ins() - first) + " sorted dims of " + dims_text(x.shape()) + ".");
  for (size_t i = 0; i < out.dims.size(); ++i) {
    check_not_empty(op, op.in(first + i), x.shape(out.dims[i]));
    out.at.push_back(op.index(op.in(first + i), x.shape(out.dims[i]), true));
  }
  out.at = mx::broadcast_arrays(out.at);
  out.shape = out.at[0].shape();
  out.adjacent = out.dims.back() - out.dims.front() == static_cast<int>(out.dims.size()) - 1;
  return out;
}

// Position of the index dims in the result.
int index_axis(const Indices& i) { return i.adjacent ? i.dims.front() : 0; }

// Moves `count` consecutive dims from one position to another.
Array move_dims(const Array& x, int from, int to, int count) {
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
  return move_dims(found, 0, index_axis(i), static_cast<int>(i.shape.size()));
}

enum class ScatterFn { set, add, prod, amax, amin };

Array scatter_with(ScatterFn fn, const Array& x, const std::vector<Array>& at, const Array& updates, const Axes& axes) {
  switch (fn) {
    case ScatterFn::set: return mx::scatter(x, at, updates, axes);
    case ScatterFn::add: return mx::scatter_add(x, at, updates, axes);
    case ScatterFn::prod: return mx::scatter_prod(x, at, updates, axes);
    case ScatterFn::amax: return mx::scatter_max(x, at, updates, axes);
    case ScatterFn::amin: return mx::scatter_min(x, at, updates, axes);
  }
  return x;
}

// Propagates NaN in amax and amin, which MLX's scatter does not.
Array scatter_with_nan(ScatterFn fn, const Array& x, const std::vector<Array>& at, const Array& updates, const Axes& axes) {
  const Array y = scatter_with(fn, x, at, updates, axes);
  if ((fn != ScatterFn::amax && fn != ScatterFn::amin) || !mx::issubdtype(x.dtype(), mx::floating)) return y;
  const auto flags = [](const Array& a) { return mx::astype(mx::isnan(a), mx::int32); };
  const Array nan = mx::scatter_max(flags(x), at, flags(updates), axes);
  return mx::where(mx::astype(nan, mx::bool_), number(NAN, x.dtype()), y);
}

template <ScatterFn fn>
Array index_put(Op& op) {
  const Array &x = op.in(0), &values = op.in(1);
  const Indices i = indices(op, 2);
  const auto rank = static_cast<int>(i.shape.size());
  mx::Shape part, rest, single = i.shape;  // shapes of the updates: as in x; without index dims; as mx::scatter expects
  for (int d = 0; d < rank_of(x); ++d) {
    const bool indexed = std::find(i.dims.begin(), i.dims.end(), d) != i.dims.end();
    if (!indexed) rest.push_back(x.shape(d));
    single.push_back(indexed ? 1 : x.shape(d));
  }
  part = rest;
  part.insert(part.begin() + index_axis(i), i.shape.begin(), i.shape.end());
  if (count_of(part) == 0) return x;
  const Array updates = move_dims(mx::broadcast_to(values, part), index_axis(i), 0, rank);
  return scatter_with(fn, x, i.at, mx::reshape(updates, single), i.dims);
}

// Crops x to the sizes of the index in all dims except one.
Array crop(Op& op, const Array& x, const mx::Shape& sizes, int except_dim) {
  mx::Shape stop = x.shape();
  if (x.ndim() != sizes.size()) op.refuse("index " + dims_text(sizes) + " does not fit " + dims_text(x.shape()) + ".");
  for (int d = 0; d < rank_of(x); ++d) {
    if (d == except_dim) continue;
    if (sizes[d] > x.shape(d)) op.refuse("index " + dims_text(sizes) + " does not fit " + dims_text(x.shape()) + ".");
    stop[d] = sizes[d];
  }
  return mx::slice(x, mx::Shape(x.ndim(), 0), stop);
}

Array gather(Op& op) {
  const Array &x = op.in(0), &index_array = op.in(1);
  if (index_array.size() == 0) return mx::zeros(op.shape(), op.dtype());  // an empty index may have any rank
  if (x.ndim() == 0) {
    const Array safe = op.index(index_array, 1, false);
    return mx::add(x, mx::astype(mx::multiply(safe, number(0, safe.dtype())), x.dtype()));
  }
  const int dim = op.axis(rank_of(x));
  check_not_empty(op, index_array, x.shape(dim));
  return mx::take_along_axis(crop(op, x, index_array.shape(), dim), op.index(index_array, x.shape(dim), false), dim);
}

Array scatter(Op& op, ScatterFn fn) {
  if (op.in(1).size() == 0) return op.in(0);
  const bool single = op.in(0).ndim() == 0;
  const auto full = [&](const Array& a) { return single ? mx::reshape(a, {1}) : a; };
  const Array x = full(op.in(0)), index_array = full(op.in(1));
  const int dim = single ? 0 : op.axis(rank_of(x));
  crop(op, x, index_array.shape(), dim);
  check_not_empty(op, index_array, x.shape(dim));
  const Array source = crop(op, full(op.in(2)), index_array.shape(), -1);
  std::vector<Array> at;
  Axes axes;
  for (int d = 0; d < rank_of(x); ++d) {
    axes.push_back(d);
    if (d == dim) {
      at.push_back(op.index(index_array, x.shape(dim), false));
      continue;
    }
    mx::Shape line(x.ndim(), 1);
    line[d] = index_array.shape(d);
    at.push_back(mx::broadcast_to(mx::reshape(mx::arange(0.0, index_array.shape(d), 1.0, index_array.dtype()), line),
                                  index_array.shape()));
  }
  mx::Shape updates = index_array.shape();
  updates.insert(updates.end(), x.ndim(), 1);
  return mx::reshape(scatter_with_nan(fn, x, at, mx::reshape(source, updates), axes), op.shape());
}

Array scatter_reduce(Op& op) {
  constexpr ScatterFn kinds[] = {ScatterFn::add, ScatterFn::prod, ScatterFn::amax, ScatterFn::amin};
  return scatter(op, kinds[op.choice("reduce", {"sum", "prod", "amax", "amin"})]);
}

// Positions of nonzero elements, padded with -1. Row lists are used only by engines that skip rows; MLX is lazy, so unused ones
// are not computed.
Array flatnonzero(Op& op) {
  const Array x = mx::flatten(op.in(0));
  const int count = x.shape(0);
  if (op.rank() != 1 || op.shape()[0] != count)
    op.refuse("result " + dims_text(op.shape()) + " does not have one element for each of " + dims_text(op.in(0).shape()) + ".");
  const Array end = integer(count, mx::int64), at = mx::sort(mx::where(x, mx::arange(0, count, 1, mx::int64), end));
  return mx::where(mx::equal(at, end), integer(-1, mx::int64), at);
}

// ---- embedding_bag

// Bag i contains indices [starts[i], ends[i]).
struct Bags {
  int count, bags;
  Array indices, starts, ends;  // i64 [count], [bags], [bags]
};

Bags read_bags(Op& op) {
  const Array& table = op.in(0);
  const Array indices = mx::astype(op.in(1), mx::int64), offsets = mx::astype(op.in(2), mx::int64);
  const int bags = op.shape()[0];
  const bool with_end = op.flag("include_last_offset");
  if (table.ndim() != 2 || indices.ndim() != 1 || offsets.ndim() != 1 || offsets.shape(0) != bags + (with_end ? 1 : 0))
    op.refuse("offsets " + dims_text(offsets.shape()) + " do not take rows of " + dims_text(table.shape()) + " to " +
              dims_text(op.shape()) + ".");
  const int count = indices.shape(0);
  const Array last = integer(count, mx::int64);
  const Array ends = with_end ? mx::slice(offsets, {1}, {bags + 1})
                              : mx::concatenate({mx::slice(offsets, {1}, {bags}), mx::reshape(last, {1})}, 0);
  return {count, bags, indices, mx::slice(offsets, {0}, {bags}), ends};
}

// Checks that offsets start at 0, do not decrease, and do not exceed the number of indices.
void check_bags(Op& op, const Bags& b) {
  const Array zero = integer(0, mx::int64), last = integer(b.count, mx::int64), starts = b.starts, ends = b.ends;
  op.expect(mx::equal(mx::squeeze(mx::slice(starts, {0}, {1})), zero), [starts] {
    return "offset 0 is " + std::to_string(mx::squeeze(mx::slice(starts, {0}, {1})).item<int64_t>()) + ", expected 0.";
  });
  const Array ordered =
      mx::logical_and(mx::logical_and(mx::greater_equal(starts, zero), mx::less_equal(starts, ends)), mx::less_equal(ends, last));
  op.expect(mx::all(ordered), [ordered, starts, ends, count = b.count] {
    const int bag = static_cast<int>(mx::argmin(mx::astype(ordered, mx::int32)).item<uint32_t>());
    const auto at = [bag](const Array& x) { return std::to_string(mx::squeeze(mx::slice(x, {bag}, {bag + 1})).item<int64_t>()); };
    return "bag " + std::to_string(bag) + " is " + at(starts) + ".." + at(ends) + " of " + std::to_string(count) + " indices.";
  });
}

// Bag of each index: the number of bags that start at or before it, minus one. Invalid offsets are reported after the run.
Array bag_of_index(const Bags& b) {
  const Array zero = integer(0, mx::int64), one = integer(1, mx::int64);
  const Array begins = mx::clip(b.starts, zero, integer(b.count, mx::int64));
  const Array marks = mx::scatter_add(mx::zeros({b.count + 1}, mx::int64), begins, mx::ones({b.bags, 1}, mx::int64), 0);
  return mx::clip(mx::subtract(mx::slice(mx::cumsum(marks, 0), {0}, {b.count}), one), zero, integer(b.bags - 1, mx::int64));
}

// x [count, n] as the updates of a scatter by bag.
Array by_bag(const Array& x) { return mx::reshape(x, {x.shape(0), 1, x.shape(1)}); }

// Maximum over the rows of each bag; 0 for an empty bag. As in torch, a NaN counts only in the first row.
Array max_by_bag(Op& op, const Bags& b, const Array& bag, const Array& member, const Array& rows, const Array& sizes) {
  const mx::Dtype type = rows.dtype();
  const Array lowest = number(-HUGE_VAL, type), last = integer(b.count, mx::int64);
  const Array known = mx::where(mx::logical_and(mx::expand_dims(member, 1), mx::logical_not(mx::isnan(rows))), rows, lowest);
  const Array max = mx::scatter_max(mx::full(op.shape(), lowest), bag, by_bag(known), 0);
  const Array position = mx::expand_dims(mx::where(member, mx::arange(0.0, b.count, 1.0, mx::int64), last), 1);
  const Array begin = mx::squeeze(mx::scatter_min(mx::full({b.bags, 1}, last), bag, by_bag(position), 0), 1);
  const Array first = mx::take(rows, mx::minimum(begin, integer(b.count - 1, mx::int64)), 0);
  return mx::where(mx::greater(sizes, number(0, type)), mx::where(mx::isnan(first), first, max), number(0, type));
}

Array embedding_bag(Op& op) {
  const Array& table = op.in(0);
  const int mode = op.choice("mode", {"sum", "mean", "max"});
  const Bags b = read_bags(op);
  if (op.has(3) && (mode != 0 || op.in(3).shape() != b.indices.shape()))
    op.refuse("weights " + dims_text(op.in(3).shape()) + " need the mode sum and the shape " + dims_text(b.indices.shape()) +
              ".");
  check_bags(op, b);
  const mx::Dtype type = to_mlx(compute_type(op.type()));
  const Array zeros = mx::zeros(op.shape(), type);
  if (b.count == 0) return zeros;
  check_not_empty(op, b.indices, table.shape(0));
  Array rows = mx::astype(mx::take(table, op.index(b.indices, table.shape(0), false), 0), type);
  if (op.has(3)) rows = mx::multiply(rows, mx::expand_dims(mx::astype(op.in(3), type), 1));
  const Array bag = bag_of_index(b);
  Array member = mx::less(mx::arange(0.0, b.count, 1.0, mx::int64), mx::take(b.ends, bag, 0));
  if (op.attr("padding_idx"))
    member = mx::logical_and(member, mx::not_equal(b.indices, integer(op.size("padding_idx"), mx::int64)));
  const Array each = mx::expand_dims(member, 1);
  const Array sizes = mx::scatter_add(mx::zeros({b.bags, 1}, type), bag, by_bag(mx::astype(each, type)), 0);
  if (mode == 2) return max_by_bag(op, b, bag, member, rows, sizes);
  const Array sum = mx::scatter_add(zeros, bag, by_bag(mx::where(each, rows, number(0, type))), 0);
  if (mode == 0) return sum;
  // As in torch, the divisor of the last bag includes the indices after its end.
  const Array is_last = mx::equal(mx::arange(0.0, b.bags, 1.0, mx::int64), integer(b.bags - 1, mx::int64));
  const Array after = mx::where(mx::logical_and(is_last, mx::greater(b.ends, b.starts)),
                                mx::subtract(integer(b.count, mx::int64), b.ends), integer(0, mx::int64));
  return mx::divide(sum, mx::maximum(mx::add(sizes, mx::expand_dims(mx::astype(after, type), 1)), number(1, type)));
}

constexpr OpBuilder kOps[] = {
    {"embedding", embedding},
    {"flatnonzero", flatnonzero},
    {"index_select", index_select},
    {"index", index},
    {"gather", gather},
    {"index_put", index_put<ScatterFn::set>},
    {"index_add", index_put<ScatterFn::add>},
    {"scatter", [](Op& op) { return scatter(op, ScatterFn::set); }},
    {"scatter_reduce", scatter_reduce},
    {"embedding_bag", embedding_bag},
};

}  // namespace

OpTable gather_scatter_ops() { return {kOps, std::size(kOps)}; }

}  // namespace keepdim::mlx
