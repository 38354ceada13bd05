// Shape ops: views, copies, casts, fills.
#include <algorithm>

#include "ggml/ops/ops.h"

namespace keepdim::ggml {
namespace {

Tensor cast(Build& b) {
  const Tensor x = check_same_shape(b);
  return x.dtype == b.out().dtype ? x : b.cast(x, b.out().dtype);
}

// Sets the strides of `out` to view x in its shape, if the strides of x allow it (as torch's view).
bool reshape_view(const Tensor& x, Tensor& out) {
  int d = x.rank - 1, e = out.rank - 1;
  while (d >= 0 && e >= 0) {
    int64_t stride = x.strides[d], have = x.dims[d];
    while (d > 0 && (x.dims[d - 1] == 1 || x.strides[d - 1] == stride * have)) have *= x.dims[--d];
    // dims of x from d on form one run of `have` elements with stride `stride`
    int64_t need = 1;
    for (; e >= 0 && (need < have || out.dims[e] == 1); --e) {
      out.strides[e] = stride * need;
      need *= out.dims[e];
    }
    if (need != have) return false;
    --d;
  }
  return true;
}

Tensor reshape(Build& b) {
  const Tensor& x = b.in(0);
  Tensor out = b.out();
  if (x.count() != out.count()) b.refuse(dims_text(x) + " does not have as many elements as " + dims_text(out) + ".");
  if (out.count() == 0) return out;
  Tensor source = x;
  if (!x.contiguous() && !reshape_view(x, out)) {
    source = b.contiguous(x);
    out.pack();
  }
  out.buffer = source.buffer;
  out.offset = source.offset;
  return out;
}

Tensor permute(Build& b) {
  const Tensor& x = b.in(0);
  const std::vector<int64_t> dims = b.sizes("dims");
  Tensor out = x;
  unsigned seen = 0;
  bool valid = dims.size() == static_cast<size_t>(x.rank);
  for (size_t i = 0; valid && i < dims.size(); ++i) {
    valid = dims[i] >= 0 && dims[i] < x.rank && !(seen >> dims[i] & 1);
    if (!valid) break;
    seen |= 1u << dims[i];
    out.dims[i] = x.dims[dims[i]];
    out.strides[i] = x.strides[dims[i]];
  }
  if (!valid) b.refuse("dims are not a permutation of " + dims_text(x) + ".");
  if (!same_dims(out, b.out())) b.refuse("result " + dims_text(b.out()) + " is not " + dims_text(out) + ".");
  return out;
}

Tensor expand(Build& b) {
  const Tensor& x = b.in(0);
  check_broadcast(b, x);
  Tensor out = b.out();
  if (out.count() == 0) return out;
  out.buffer = x.buffer;
  out.offset = x.offset;
  for (int d = 0; d < out.rank; ++d) out.strides[d] = broadcast_stride(x, out.rank, d);
  return out;
}

// View of `length` elements of dim `dim` of x; offset and strides are not set if it is empty.
Tensor slice_view(Build& b, const Tensor& x, int64_t dim, int64_t length) {
  const int64_t start = b.size("start"), step = b.size("step"), size = x.dims[dim];
  const bool bad = start < 0 || start > size || step < 1;
  if (bad || (length && (start >= size || (length - 1) > (size - 1 - start) / step)))
    b.refuse(std::to_string(length) + " elements from " + std::to_string(start) + " with step " + std::to_string(step) +
             " are not in dim " + std::to_string(dim) + " of " + dims_text(x) + ".");
  Tensor out = x;
  out.dims[dim] = length;
  if (out.count() == 0) return out;
  out.offset += start * x.strides[dim];
  if (length > 1) out.strides[dim] = x.strides[dim] * step;
  return out;
}

Tensor slice(Build& b) {
  const Tensor& x = b.in(0);
  const int64_t dim = checked_dim(b, x);
  Tensor out = x;
  out.dims[dim] = b.out().rank == x.rank ? b.out().dims[dim] : -1;
  if (!same_dims(out, b.out())) b.refuse("result " + dims_text(b.out()) + " is not a slice of " + dims_text(x) + ".");
  out = slice_view(b, x, dim, out.dims[dim]);
  return out.count() == 0 ? b.out() : out;
}

Tensor slice_scatter(Build& b) {
  const Tensor x = check_same_shape(b), &source = b.in(1);
  const int64_t dim = checked_dim(b, x);
  Tensor expected = x;
  expected.dims[dim] = source.rank == x.rank ? source.dims[dim] : -1;
  if (!same_dims(expected, source)) b.refuse("source " + dims_text(source) + " is not a slice of " + dims_text(x) + ".");
  Tensor out = b.out();
  b.allocate(out);
  b.copy_into(out, x);
  const Tensor part = slice_view(b, out, dim, source.dims[dim]);
  if (part.count()) b.copy_into(part, source);
  return out;
}

// The two dims are replaced by one at the end.
Tensor diagonal(Build& b) {
  const Tensor& x = b.in(0);
  const std::vector<int64_t> dims = b.sizes("dims");
  const int64_t offset = b.size("offset");
  bool valid = dims.size() == 2 && dims[0] != dims[1];
  for (int64_t d : dims) valid &= d >= 0 && d < x.rank;
  if (!valid || offset == INT64_MIN) b.refuse("dims or offset do not fit two dims of " + dims_text(x) + ".");
  const int64_t down = std::max<int64_t>(0, -offset), right = std::max<int64_t>(0, offset);
  Tensor out = x;
  out.rank = 0;
  for (int d = 0; d < x.rank; ++d) {
    if (d == dims[0] || d == dims[1]) continue;
    out.dims[out.rank] = x.dims[d];
    out.strides[out.rank++] = x.strides[d];
  }
  out.dims[out.rank] = std::max<int64_t>(0, std::min(x.dims[dims[0]] - down, x.dims[dims[1]] - right));
  out.strides[out.rank++] = x.strides[dims[0]] + x.strides[dims[1]];
  if (!same_dims(out, b.out())) b.refuse("result " + dims_text(b.out()) + " is not " + dims_text(out) + ".");
  if (out.count() == 0) return b.out();
  out.offset += down * x.strides[dims[0]] + right * x.strides[dims[1]];
  return out;
}

// Sliding windows of a dim as a view; the position in the window becomes the last dim.
Tensor unfold(Build& b) {
  const Tensor& x = b.in(0);
  const int64_t dim = checked_dim(b, x), step = b.size("step");
  Tensor out = x, wanted = b.out();
  const bool fine = x.rank < kMaxRank && wanted.rank == x.rank + 1;
  const int64_t windows = fine ? wanted.dims[dim] : -1, size = fine ? wanted.dims[x.rank] : -1;
  if (!fine || step < 1 || size > x.dims[dim] || (windows && windows - 1 > (x.dims[dim] - size) / step))
    b.refuse("result " + dims_text(wanted) + " is not in " + dims_text(x) + ".");
  out.dims[dim] = windows;
  if (windows > 1) out.strides[dim] = x.strides[dim] * step;
  out.dims[x.rank] = size;
  out.strides[x.rank] = x.strides[dim];
  ++out.rank;
  if (!same_dims(out, wanted)) b.refuse("result " + dims_text(wanted) + " is not " + dims_text(out) + ".");
  return out.count() == 0 ? wanted : out;
}

Tensor as_strided(Build& b) {
  const Tensor& x = b.in(0);
  const std::vector<int64_t> strides = b.sizes("strides");
  const int64_t start = b.size("offset");
  Tensor out = b.out();
  int64_t end = start;  // the last element
  bool valid = strides.size() == static_cast<size_t>(out.rank) && start >= 0;
  for (int d = 0; d < out.rank && valid; ++d) {
    int64_t extent = 0;
    valid = strides[d] >= 0 && !__builtin_mul_overflow(out.dims[d] - 1, strides[d], &extent) &&
            !__builtin_add_overflow(end, extent, &end);
  }
  if (!valid || (out.count() && end >= x.count()))
    b.refuse("result " + dims_text(out) + " is not in the " + std::to_string(x.count()) + " elements of x.");
  if (out.count() == 0) return out;
  const Tensor source = b.contiguous(x);
  out.buffer = source.buffer;
  out.offset = source.offset + start * x.width();
  for (int d = 0; d < out.rank; ++d) out.strides[d] = out.dims[d] > 1 ? strides[d] * x.width() : 0;
  return out;
}

// Copies x with negative strides.
Tensor flip(Build& b) {
  Tensor x = check_same_shape(b), out = b.out();
  b.allocate(out);
  if (out.buffer < 0) return out;
  for (int64_t d : b.sizes("dims")) {
    if (d < 0 || d >= x.rank) b.refuse("dim " + std::to_string(d) + " is out of range for " + dims_text(x) + ".");
    x.offset += (x.dims[d] - 1) * x.strides[d];
    x.strides[d] = -x.strides[d];
  }
  b.copy_into(out, x);
  return out;
}

template <bool upper>
Tensor triangle(Build& b) {
  const Tensor x = check_same_shape(b);
  if (x.rank < 2) b.refuse(dims_text(x) + " is not a matrix.");
  Tensor out = b.out();
  b.allocate(out);
  if (out.buffer < 0) return out;
  auto* job = b.make<TriangleJob>();
  job->rows = x.dims[x.rank - 2];
  job->columns = x.dims[x.rank - 1];
  job->step = x.strides[x.rank - 1];
  job->diagonal = std::clamp(b.size("diagonal"), -job->rows, job->columns);
  job->upper = upper;
  for (int d = 0; d < x.rank - 1; ++d) job->loop.push(x.dims[d], out.strides[d], x.strides[d]);
  job->loop.merge();
  b.step(triangle_kernel(dtype_bytes(x.dtype)), job, out, {&x}, static_cast<double>(out.count()));
  return out;
}

Tensor select(Build& b) {
  const Tensor& x = b.in(0);
  const int64_t dim = checked_dim(b, x), index = b.size("index");
  if (index < 0 || index >= x.dims[dim])
    b.refuse("index " + std::to_string(index) + " is not in dim " + std::to_string(dim) + " of " + dims_text(x) + ".");
  Tensor out = x;
  out.rank = x.rank - 1;
  std::copy(x.dims + dim + 1, x.dims + x.rank, out.dims + dim);
  std::copy(x.strides + dim + 1, x.strides + x.rank, out.strides + dim);
  if (!same_dims(out, b.out())) b.refuse("result " + dims_text(b.out()) + " is not " + dims_text(out) + ".");
  if (out.count() == 0) return b.out();
  out.offset += index * x.strides[dim];
  return out;
}

Tensor cat(Build& b) {
  Tensor out = b.out();
  const int64_t dim = checked_dim(b, out);
  int64_t total = 0;
  for (size_t i = 0; i < b.ins(); ++i) {
    Tensor expected = b.in(i);
    bool over = false;
    if (expected.rank == out.rank) {
      over = __builtin_add_overflow(total, expected.dims[dim], &total);
      expected.dims[dim] = out.dims[dim];
    }
    if (over || !same_dims(expected, out))
      b.refuse("operand " + dims_text(b.in(i)) + " does not fit result " + dims_text(out) + ".");
  }
  if (total != out.dims[dim]) b.refuse("the operands fill " + std::to_string(total) + " of " + dims_text(out) + ".");
  if (b.ins() && is_channels_last(b.in(0))) set_channels_last(out);
  b.allocate(out);
  Tensor part = out;
  for (size_t i = 0; i < b.ins(); ++i) {
    part.dims[dim] = b.in(i).dims[dim];
    if (part.count()) b.copy_into(part, b.in(i));
    part.offset += part.dims[dim] * part.strides[dim];
  }
  return out;
}

Tensor arange(Build& b) { return b.fill(b.out(), b.scalar("start"), b.scalar("step")); }
Tensor full(Build& b) { return b.fill(b.out(), b.scalar("value"), {}); }

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

}  // namespace keepdim::ggml
