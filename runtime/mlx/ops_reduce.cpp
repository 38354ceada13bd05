// Rows that make less out of more, or rows out of rows: reductions, softmax, norms, running sums, sorting.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "op.h"

namespace keepdim::mlx {
namespace {

int rank_of(const Array& x) { return static_cast<int>(x.ndim()); }

// What is reduced, and how many elements become one; whether the dims stay as 1 is for the result's shape to say.
struct Parts {
  Axes dims;
  int64_t count = 1;
};
Parts parts(Op& op) {
  const Array& x = op.in(0);
  Parts p{op.axes("dims", rank_of(x))};
  for (int d : p.dims) p.count *= x.shape(d);
  return p;
}

// [n, count] → [n, 1]. MLX adds one by one, and loses digits where there are many: pieces are added first.
Array in_pieces(Array rows) {
  constexpr int kPiece = 64;
  const int n = rows.shape(0);
  while (rows.shape(1) > kPiece) {
    const int count = rows.shape(1), pieces = count / kPiece, even = pieces * kPiece;
    const Array sums = mx::sum(mx::reshape(mx::slice(rows, {0, 0}, {n, even}), {n, pieces, kPiece}), Axes{2});
    rows = even == count ? sums : mx::concatenate({sums, mx::slice(rows, {0, even}, {n, count})}, 1);
  }
  return mx::sum(rows, Axes{1}, true);
}

// The reduced dims as one, behind the others.
Array rows_to_reduce(const Array& x, const Axes& dims) {
  Axes order;
  int kept = 1;
  for (int d = 0; d < rank_of(x); ++d)
    if (std::find(dims.begin(), dims.end(), d) == dims.end()) order.push_back(d), kept *= x.shape(d);
  order.insert(order.end(), dims.begin(), dims.end());
  return mx::reshape(mx::transpose(x, order), {kept, kept ? static_cast<int>(x.size()) / kept : 0});
}

using Reduce = Array (*)(const Array&, const Axes&, bool, mx::StreamOrDevice);

template <Reduce f, bool some = false>
Array reduce(Op& op) {
  const Parts p = parts(op);
  if (some && p.count == 0) op.refuse("nothing to reduce in " + dims_text(op.in(0).shape()) + ".");
  return p.dims.empty() ? op.in(0) : mx::reshape(f(op.in(0), p.dims, true, {}), op.shape());
}

Array mean_of(const Array& x, const Parts& p) {
  return mx::divide(total(x, p.dims), number(static_cast<double>(p.count), x.dtype()));
}
Array sum(Op& op) { return mx::reshape(total(op.in(0), parts(op).dims), op.shape()); }
Array mean(Op& op) { return mx::reshape(mean_of(op.in(0), parts(op)), op.shape()); }

Array var(Op& op) {
  const Array& x = op.in(0);
  const Parts p = parts(op);
  const Array squares = mx::square(mx::subtract(x, mean_of(x, p)));
  const double freedom = std::max(0.0, static_cast<double>(p.count) - op.number("correction"));
  return mx::reshape(mx::divide(total(squares, p.dims), number(freedom, x.dtype())), op.shape());
}

// Its position among what the dims walk over.
using Place = Array (*)(const Array&, int, bool, mx::StreamOrDevice);
template <Place f>
Array position(Op& op) {
  const Array& x = op.in(0);
  const Parts p = parts(op);
  if (p.count == 0) op.refuse("nothing to reduce in " + dims_text(x.shape()) + ".");
  return mx::reshape(mx::astype(f(rows_to_reduce(x, p.dims), 1, false, {}), mx::int64), op.shape());
}

// ---- rows out of rows. A rank-0 array is a row of one.

Array along(Op& op, const std::function<Array(const Array&, int)>& f) {
  const Array& x = op.in(0);
  if (x.ndim() == 0) return mx::reshape(f(mx::reshape(x, {1}), 0), op.shape());
  return f(x, op.axis(rank_of(x)));
}

Array softmax(Op& op) {
  return along(op, [](const Array& x, int d) {
    if (x.dtype() != mx::float64) return mx::softmax(x, Axes{d}, true);
    const Array e = exponential(mx::subtract(x, mx::max(x, Axes{d}, true)));
    return mx::divide(e, total(e, Axes{d}));
  });
}
Array log_softmax(Op& op) {
  return along(op, [](const Array& x, int d) {
    const Array shifted = mx::subtract(x, mx::max(x, Axes{d}, true));
    return mx::subtract(shifted, mx::log(total(exponential(shifted), Axes{d})));
  });
}
Array cumsum(Op& op) {
  return along(op, [](const Array& x, int d) { return mx::cumsum(x, d, false, true, std::nullopt); });
}
Array cumprod(Op& op) {
  return along(op, [](const Array& x, int d) { return mx::cumprod(x, d, false, true, std::nullopt); });
}

// x with the normalised dims as one.
Array rows_of(Op& op) {
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

constexpr int kShortRow = 16384;  // up to here MLX's own norms keep their digits

std::optional<Array> flat(Op& op, size_t i) { return op.has(i) ? std::optional<Array>(mx::flatten(op.in(i))) : std::nullopt; }

Array layer_norm(Op& op) {
  const Array x = rows_of(op);
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
  const Array x = rows_of(op);
  const double eps = op.number("eps");
  if (x.dtype() == mx::float32 && x.shape(1) <= kShortRow) return mx::reshape(mx::fast::rms_norm(x, flat(op, 1), static_cast<float>(eps)), op.shape());
  const Array y = mx::multiply(x, mx::rsqrt(mx::add(mean_of_rows(mx::square(x)), number(eps, x.dtype()))));
  return mx::reshape(op.has(1) ? mx::multiply(y, *flat(op, 1)) : y, op.shape());
}

// Positions along a dim. From the greatest: sorted backwards twice, so that equal ones stay in their order.
Array argsort(Op& op) {
  if (op.in(0).ndim() == 0) return mx::zeros(op.shape(), mx::int64);
  const int dim = op.axis(rank_of(op.in(0)));
  const Array& x = op.in(0);
  const int size = x.shape(dim);
  Array order = mx::astype(mx::argsort(op.flag("descending") ? mx::flip(x, dim) : x, dim), mx::int64);
  if (op.flag("descending")) order = mx::flip(mx::subtract(whole(size - 1, mx::int64), order), dim);
  mx::Shape stop = x.shape();
  if (op.rank() != rank_of(x) || op.shape()[dim] > size) op.refuse("result " + dims_text(op.shape()) + " is no part of " + dims_text(x.shape()) + ".");
  stop[dim] = op.shape()[dim];
  return mx::slice(order, mx::Shape(x.ndim(), 0), stop);
}

constexpr Row kRows[] = {
    {"sum", sum},
    {"mean", mean},
    {"prod", reduce<mx::prod>},
    {"amax", reduce<mx::max, true>},
    {"amin", reduce<mx::min, true>},
    {"any", reduce<mx::any>},
    {"all", reduce<mx::all>},
    {"var", var},
    {"argmax", position<mx::argmax>},
    {"argmin", position<mx::argmin>},
    {"softmax", softmax},
    {"log_softmax", log_softmax},
    {"cumsum", cumsum},
    {"cumprod", cumprod},
    {"layer_norm", layer_norm},
    {"rms_norm", rms_norm},
    {"argsort", argsort},
};

}  // namespace

Array total(const Array& x, const Axes& dims) {
  mx::Shape one = x.shape();
  int64_t count = 1;
  for (int d : dims) count *= one[d], one[d] = 1;
  if (dims.empty()) return x;
  if (count <= 1024 || !mx::issubdtype(x.dtype(), mx::floating)) return mx::sum(x, dims, true);
  return mx::reshape(in_pieces(rows_to_reduce(x, dims)), one);
}

Array mean_of_rows(const Array& rows) { return mx::divide(total(rows, {1}), number(rows.shape(1), rows.dtype())); }

Table reduce_rows() { return {kRows, std::size(kRows)}; }

}  // namespace keepdim::mlx
