// Shape ops: views, copies, casts, fills.
#include <algorithm>

#include "mlx/op.h"

namespace keepdim::mlx {
namespace {

Array cast(Op& op) { return mx::astype(op.in(0), op.dtype()); }
Array reshape(Op& op) { return mx::reshape(op.in(0), op.shape()); }
Array permute(Op& op) { return mx::transpose(op.in(0), op.axes("dims", static_cast<int>(op.in(0).ndim()))); }
Array expand(Op& op) { return mx::broadcast_to(op.in(0), op.shape()); }

struct Span {
  mx::Shape start, stop, step;
};

// Slice of `length` elements along a dim.
Span span_of(Op& op, const mx::Shape& shape, int dim, int64_t length) {
  const int64_t start = op.size("start"), step = op.size("step"), size = shape[dim];
  if (start < 0 || step < 1 || length < 1 || start >= size || length - 1 > (size - 1 - start) / step)
    op.refuse(std::to_string(length) + " elements from " + std::to_string(start) + " with step " + std::to_string(step) +
              " are not in dim " + std::to_string(dim) + " of " + dims_text(shape) + ".");
  Span span{mx::Shape(shape.size(), 0), shape, mx::Shape(shape.size(), 1)};
  span.start[dim] = static_cast<int>(start);
  span.stop[dim] = static_cast<int>(start + (length - 1) * step + 1);
  span.step[dim] = length > 1 ? static_cast<int>(step) : 1;
  return span;
}

Array slice(Op& op) {
  const Array& x = op.in(0);
  const int dim = op.axis(static_cast<int>(x.ndim()));
  if (op.rank() != static_cast<int>(x.ndim()))
    op.refuse("result " + dims_text(op.shape()) + " is not a slice of " + dims_text(x.shape()) + ".");
  const Span span = span_of(op, x.shape(), dim, op.shape()[dim]);
  return mx::slice(x, span.start, span.stop, span.step);
}

Array slice_scatter(Op& op) {
  const Array &x = op.in(0), &source = op.in(1);
  const int dim = op.axis(static_cast<int>(x.ndim()));
  if (source.ndim() != x.ndim())
    op.refuse("source " + dims_text(source.shape()) + " is not a slice of " + dims_text(x.shape()) + ".");
  if (source.size() == 0) return x;
  const Span span = span_of(op, x.shape(), dim, source.shape(dim));
  return mx::slice_update(x, source, span.start, span.stop, span.step);
}

Array select(Op& op) {
  const Array& x = op.in(0);
  const int dim = op.axis(static_cast<int>(x.ndim()));
  const int64_t index = op.size("index");
  if (index < 0 || index >= x.shape(dim))
    op.refuse("index " + std::to_string(index) + " is not in dim " + std::to_string(dim) + " of " + dims_text(x.shape()) + ".");
  mx::Shape start(x.ndim(), 0), stop = x.shape();
  start[dim] = static_cast<int>(index);
  stop[dim] = start[dim] + 1;
  return mx::squeeze(mx::slice(x, start, stop), dim);
}

// Contiguous x viewed with other strides and offset, in elements.
Array strided(Op& op, const Array& x, const mx::Strides& strides, int64_t offset) {
  __int128 last = offset;
  bool valid = offset >= 0 && strides.size() == op.shape().size();
  for (size_t d = 0; valid && d < strides.size(); ++d) {
    valid = strides[d] >= 0;
    last += static_cast<__int128>(strides[d]) * (op.shape()[d] - 1);
  }
  if (!valid || last >= static_cast<__int128>(x.size()))
    op.refuse("result " + dims_text(op.shape()) + " is not in the " + std::to_string(x.size()) + " elements of x.");
  return mx::as_strided(mx::contiguous(x), op.shape(), strides,
                        static_cast<size_t>(offset));  // mx::as_strided needs a contiguous array
}

mx::Strides packed_strides(const mx::Shape& shape) {
  mx::Strides strides(shape.size(), 1);
  for (size_t d = shape.size(); d-- > 1;) strides[d - 1] = strides[d] * shape[d];
  return strides;
}

Array as_strided(Op& op) {
  const std::vector<int64_t> given = op.sizes("strides");
  return strided(op, op.in(0), mx::Strides(given.begin(), given.end()), op.size("offset"));
}

Array diagonal(Op& op) {
  const Array& x = op.in(0);
  const Axes dims = op.axes("dims", static_cast<int>(x.ndim()));
  const int64_t offset = op.size("offset");
  if (dims.size() != 2 || offset > INT32_MAX || offset < -INT32_MAX)
    op.refuse("dims or offset do not fit two dims of " + dims_text(x.shape()) + ".");
  return mx::diagonal(x, static_cast<int>(offset), dims[0], dims[1]);
}

// Sliding windows of a dim; the position in the window becomes the last dim.
Array unfold(Op& op) {
  const Array& x = op.in(0);
  const int dim = op.axis(static_cast<int>(x.ndim()));
  mx::Strides strides = packed_strides(x.shape());
  const int64_t step = op.size("step"), inner = strides[dim];
  mx::Shape expected = x.shape();
  expected.push_back(op.shape().back());
  if (op.rank() != static_cast<int>(x.ndim()) + 1 || step < 1)
    op.refuse("result " + dims_text(op.shape()) + " is not in " + dims_text(x.shape()) + ".");
  expected[dim] = op.shape()[dim];
  const int64_t reach = (op.shape()[dim] - 1) * step + op.shape().back();
  if (expected != op.shape() || reach > x.shape(dim))
    op.refuse("result " + dims_text(op.shape()) + " is not in " + dims_text(x.shape()) + ".");
  strides[dim] = inner * step;
  strides.push_back(inner);
  return strided(op, x, strides, 0);
}

Array flip(Op& op) {
  const Axes dims = op.axes("dims", op.rank());
  return dims.empty() ? op.in(0) : mx::flip(op.in(0), dims);
}

template <bool upper>
Array triangle(Op& op) {
  const Array& x = op.in(0);
  if (x.ndim() < 2) op.refuse(dims_text(x.shape()) + " is not a matrix.");
  const int64_t rows = x.shape(-2), columns = x.shape(-1);
  const int k = static_cast<int>(std::clamp<int64_t>(op.size("diagonal"), -rows, columns));
  const auto n = static_cast<int>(rows), m = static_cast<int>(columns);
  const Array lower = mx::tri(n, m, upper ? k - 1 : k, mx::bool_);
  const Array zero = number(0, x.dtype());
  return upper ? mx::where(lower, zero, x) : mx::where(lower, x, zero);
}

Array cat(Op& op) {
  std::vector<Array> parts;
  for (size_t i = 0; i < op.ins(); ++i)
    if (op.in(i).size()) parts.push_back(op.in(i));
  if (parts.empty()) op.refuse("the operands do not fill " + dims_text(op.shape()) + ".");
  return mx::concatenate(parts, op.axis(op.rank()));
}

Array arange(Op& op) {
  if (op.rank() != 1) op.refuse(dims_text(op.shape()) + " is not 1-D.");
  const int n = op.shape()[0];
  if (!(bit(op.type()) & kFloats)) {
    const Array count = mx::arange(0.0, n, 1.0, mx::int64);
    return mx::astype(mx::add(mx::multiply(count, op.scalar("step", DType::i64)), op.scalar("start", DType::i64)), op.dtype());
  }
  const double start = op.number("start"), step = op.number("step");
  std::vector<double> values(static_cast<size_t>(n));
  for (int i = 0; i < n; ++i) values[i] = start + i * step;
  return Array(values.data(), {n}, op.dtype());
}

Array full(Op& op) { return mx::full(op.shape(), op.scalar("value", op.type())); }

constexpr OpBuilder kOps[] = {
    {"cast", cast},           {"reshape", reshape},
    {"permute", permute},     {"expand", expand},
    {"slice", slice},         {"slice_scatter", slice_scatter},
    {"select", select},       {"diagonal", diagonal},
    {"unfold", unfold},       {"as_strided", as_strided},
    {"flip", flip},           {"tril", triangle<false>},
    {"triu", triangle<true>}, {"cat", cat},
    {"arange", arange},       {"full", full},
};

}  // namespace

OpTable shape_ops() { return {kOps, std::size(kOps)}; }

}  // namespace keepdim::mlx
