// Reductions and row-wise ops: sum, argmax, softmax, norms, cumsum, argsort.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "mlx/op.h"

namespace keepdim::mlx {
namespace {

// Reduced dims and number of elements per result. The result's shape decides whether they are kept with size 1.
struct ReducedDims {
  Axes dims;
  int64_t count = 1;
};
ReducedDims reduced_dims(Op& op) {
  const Array& x = op.in(0);
  ReducedDims p{op.axes("dims", rank_of(x))};
  for (int d : p.dims) p.count *= x.shape(d);
  return p;
}

// [n, count] → [n, 1]. MLX accumulates sequentially, which loses precision for long rows: sum blocks first.
Array blocked_sum(Array rows) {
  constexpr int kBlock = 64;
  const int n = rows.shape(0);
  while (rows.shape(1) > kBlock) {
    const int count = rows.shape(1), blocks = count / kBlock, even = blocks * kBlock;
    const Array sums = mx::sum(mx::reshape(mx::slice(rows, {0, 0}, {n, even}), {n, blocks, kBlock}), Axes{2});
    rows = even == count ? sums : mx::concatenate({sums, mx::slice(rows, {0, even}, {n, count})}, 1);
  }
  return mx::sum(rows, Axes{1}, true);
}

// x as [kept, reduced].
Array rows_to_reduce(const Array& x, const Axes& dims) {
  Axes order;
  int kept = 1;
  for (int d = 0; d < rank_of(x); ++d)
    if (std::find(dims.begin(), dims.end(), d) == dims.end()) order.push_back(d), kept *= x.shape(d);
  order.insert(order.end(), dims.begin(), dims.end());
  return mx::reshape(mx::transpose(x, order), {kept, kept ? static_cast<int>(x.size()) / kept : 0});
}

using Reduce = Array (*)(const Array&, const Axes&, bool, mx::StreamOrDevice);

template <Reduce f, bool needs_elements = false>
Array reduce(Op& op) {
  const ReducedDims p = reduced_dims(op);
  if (needs_elements && p.count == 0) op.refuse("nothing to reduce in " + dims_text(op.in(0).shape()) + ".");
  return p.dims.empty() ? op.in(0) : mx::reshape(f(op.in(0), p.dims, true, {}), op.shape());
}

Array mean_of(const Array& x, const ReducedDims& p) {
  return mx::divide(sum_keepdims(x, p.dims), number(static_cast<double>(p.count), x.dtype()));
}
Array sum(Op& op) { return mx::reshape(sum_keepdims(op.in(0), reduced_dims(op).dims), op.shape()); }
Array mean(Op& op) { return mx::reshape(mean_of(op.in(0), reduced_dims(op)), op.shape()); }

Array var(Op& op) {
  const Array& x = op.in(0);
  const ReducedDims p = reduced_dims(op);
  const Array squares = mx::square(mx::subtract(x, mean_of(x, p)));
  const double degrees_of_freedom = std::max(0.0, static_cast<double>(p.count) - op.number("correction"));
  return mx::reshape(mx::divide(sum_keepdims(squares, p.dims), number(degrees_of_freedom, x.dtype())), op.shape());
}

// Position in the flattened reduced dims.
using ArgReduceFn = Array (*)(const Array&, int, bool, mx::StreamOrDevice);
template <ArgReduceFn f>
Array argreduce(Op& op) {
  const Array& x = op.in(0);
  const ReducedDims p = reduced_dims(op);
  if (p.count == 0) op.refuse("nothing to reduce in " + dims_text(x.shape()) + ".");
  return mx::reshape(mx::astype(f(rows_to_reduce(x, p.dims), 1, false, {}), mx::int64), op.shape());
}

// ---- row-wise ops. A rank-0 array is a row of one element.

Array along_dim(Op& op, const std::function<Array(const Array&, int)>& f) {
  const Array& x = op.in(0);
  if (x.ndim() == 0) return mx::reshape(f(mx::reshape(x, {1}), 0), op.shape());
  return f(x, op.axis(rank_of(x)));
}

Array softmax(Op& op) {
  return along_dim(op, [](const Array& x, int d) {
    if (x.dtype() != mx::float64) return mx::softmax(x, Axes{d}, true);
    const Array e = exponential(mx::subtract(x, mx::max(x, Axes{d}, true)));
    return mx::divide(e, sum_keepdims(e, Axes{d}));
  });
}
Array log_softmax(Op& op) {
  return along_dim(op, [](const Array& x, int d) {
    const Array shifted = mx::subtract(x, mx::max(x, Axes{d}, true));
    return mx::subtract(shifted, mx::log(sum_keepdims(exponential(shifted), Axes{d})));
  });
}
Array cumsum(Op& op) {
  return along_dim(op, [](const Array& x, int d) { return mx::cumsum(x, d, false, true, std::nullopt); });
}
Array cumprod(Op& op) {
  return along_dim(op, [](const Array& x, int d) { return mx::cumprod(x, d, false, true, std::nullopt); });
}

// x as [rows, normalised dims].
Array flatten_rows(Op& op) {
  const Array& x = op.in(0);
  const int64_t axes = op.size("axes");
  if (axes < 1 || axes > rank_of(x)) op.refuse(std::to_string(axes) + " axes do not fit " + dims_text(x.shape()) + ".");
  mx::Shape row(x.shape().end() - axes, x.shape().end());
  for (size_t i = 1; i < 3; ++i)
    if (op.has(i) && op.in(i).shape() != row)
      op.refuse("weight or bias " + dims_text(op.in(i).shape()) + " does not fit " + dims_text(x.shape()) + ".");
  const auto size = static_cast<int>(count_of(row));
  return mx::reshape(x, {static_cast<int>(x.size()) / size, size});
}

constexpr int kShortRow = 16384;  // longest row for which MLX's norms are accurate

std::optional<Array> flat(Op& op, size_t i) { return op.has(i) ? std::optional<Array>(mx::flatten(op.in(i))) : std::nullopt; }

Array layer_norm(Op& op) {
  const Array x = flatten_rows(op);
  const double eps = op.number("eps");
  if (x.dtype() == mx::float32 && x.shape(1) <= kShortRow)
    return mx::reshape(mx::fast::layer_norm(x, flat(op, 1), flat(op, 2), static_cast<float>(eps)), op.shape());
  const Array centred = mx::subtract(x, mean_of_rows(x));
  Array y = mx::multiply(centred, mx::rsqrt(mx::add(mean_of_rows(mx::square(centred)), number(eps, x.dtype()))));
  if (op.has(1)) y = mx::multiply(y, *flat(op, 1));
  if (op.has(2)) y = mx::add(y, *flat(op, 2));
  return mx::reshape(y, op.shape());
}

Array rms_norm(Op& op) {
  const Array x = flatten_rows(op);
  const double eps = op.number("eps");
  if (x.dtype() == mx::float32 && x.shape(1) <= kShortRow)
    return mx::reshape(mx::fast::rms_norm(x, flat(op, 1), static_cast<float>(eps)), op.shape());
  const Array y = mx::multiply(x, mx::rsqrt(mx::add(mean_of_rows(mx::square(x)), number(eps, x.dtype()))));
  return mx::reshape(op.has(1) ? mx::multiply(y, *flat(op, 1)) : y, op.shape());
}

// Argsort along a dim. Descending: sorts the flipped array and flips back, so that the order is stable.
Array argsort(Op& op) {
  if (op.in(0).ndim() == 0) return mx::zeros(op.shape(), mx::int64);
  const int dim = op.axis(rank_of(op.in(0)));
  const Array& x = op.in(0);
  const int size = x.shape(dim);
  Array order = mx::astype(mx::argsort(op.flag("descending") ? mx::flip(x, dim) : x, dim), mx::int64);
  if (op.flag("descending")) order = mx::flip(mx::subtract(integer(size - 1, mx::int64), order), dim);
  mx::Shape stop = x.shape();
  if (op.rank() != rank_of(x) || op.shape()[dim] > size)
    op.refuse("result " + dims_text(op.shape()) + " does not fit input " + dims_text(x.shape()) + ".");
  stop[dim] = op.shape()[dim];
  return mx::slice(order, mx::Shape(x.ndim(), 0), stop);
}

constexpr OpBuilder kOps[] = {
    {"sum", sum},
    {"mean", mean},
    {"prod", reduce<mx::prod>},
    {"amax", reduce<mx::max, true>},
    {"amin", reduce<mx::min, true>},
    {"any", reduce<mx::any>},
    {"all", reduce<mx::all>},
    {"var", var},
    {"argmax", argreduce<mx::argmax>},
    {"argmin", argreduce<mx::argmin>},
    {"softmax", softmax},
    {"log_softmax", log_softmax},
    {"cumsum", cumsum},
    {"cumprod", cumprod},
    {"layer_norm", layer_norm},
    {"rms_norm", rms_norm},
    {"argsort", argsort},
};

}  // namespace

Array sum_keepdims(const Array& x, const Axes& dims) {
  mx::Shape one = x.shape();
  int64_t count = 1;
  for (int d : dims) count *= one[d], one[d] = 1;
  if (dims.empty()) return x;
  if (count <= 1024 || !mx::issubdtype(x.dtype(), mx::floating)) return mx::sum(x, dims, true);
  return mx::reshape(blocked_sum(rows_to_reduce(x, dims)), one);
}

Array mean_of_rows(const Array& rows) { return mx::divide(sum_keepdims(rows, {1}), number(rows.shape(1), rows.dtype())); }

OpTable reduce_ops() { return {kOps, std::size(kOps)}; }

}  // namespace keepdim::mlx
