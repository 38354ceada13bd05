// One row an op: its rule, checked when a program is loaded, and how it is built. Shapes are checked on the
// evaluated sizes before anything is added to the graph.
#include <algorithm>
#include <iterator>
#include <string_view>
#include <unordered_map>

#include "build.h"

namespace keepdim::ggml {
namespace {

constexpr TypeMask bit(DType dtype) { return static_cast<TypeMask>(1u << static_cast<int>(dtype)); }
constexpr TypeMask kF32 = bit(DType::f32);
constexpr TypeMask kNumbers = kF32 | bit(DType::i64) | bit(DType::i32);
constexpr TypeMask kAll = 0x3ff;  // every dtype of a tensor

// ---- rules

using Attrs = std::initializer_list<AttrRule>;
constexpr AttrRule kDim{"dim", AttrKind::size, true};
constexpr Attrs kOther = {{"other", AttrKind::number, false, true}};
constexpr Attrs kBounds = {{"min", AttrKind::number, false, true}, {"max", AttrKind::number, false, true}};
constexpr Attrs kApproximate = {{"approximate", AttrKind::text, false}};
constexpr Attrs kDimOnly = {kDim};
constexpr Attrs kDims = {{"dims", AttrKind::sizes, true}};
constexpr Attrs kNorm = {{"eps", AttrKind::number, true}, {"axes", AttrKind::size, true}};
constexpr Attrs kSlice = {kDim, {"start", AttrKind::size, true}, {"step", AttrKind::size, true}};
constexpr Attrs kSelect = {kDim, {"index", AttrKind::size, true}};
constexpr Attrs kArange = {{"start", AttrKind::number, true, true}, {"step", AttrKind::number, true}};
constexpr Attrs kValue = {{"value", AttrKind::number, true, true}};

constexpr Rule unary(TypeMask types, Attrs attrs = {}) { return {1, 1, 0, Types::same, types, attrs}; }
constexpr Rule binary(TypeMask types) { return {1, 2, 0, Types::same, types, kOther}; }
constexpr Rule source(TypeMask types, Attrs attrs) { return {0, 0, 0, Types::same, types, attrs}; }

// ---- elementwise

void need_fit(Build& b, const Tensor& x) {
  if (fits(x, b.out())) return;
  b.refuse("operand " + dims_text(x) + " does not broadcast to " + dims_text(b.out()) + ".");
}

Tensor map_one(Build& b, Fn fn) {
  need_fit(b, b.in(0));
  return b.map(map_kernel(fn, b.out().dtype), b.out(), {&b.in(0)}, {}, fn_cost(fn));
}

template <Fn fn>
Tensor one(Build& b) {
  return map_one(b, fn);
}

template <Fn fn>
Tensor two(Build& b) {
  const Kernel kernel = map_kernel(fn, b.out().dtype);
  need_fit(b, b.in(0));
  if (b.has(1)) {
    need_fit(b, b.in(1));
    return b.map(kernel, b.out(), {&b.in(0), &b.in(1)}, {}, fn_cost(fn));
  }
  MapJob job;
  job.scalar[0] = b.scalar("other");
  job.has[0] = true;
  return b.map(kernel, b.out(), {&b.in(0)}, job, fn_cost(fn));
}

// The exponents that models use are products and roots, as in torch.
Tensor power(Build& b) {
  if (b.has(1) || b.out().dtype != DType::f32) return two<Fn::pow>(b);
  const Scalar exponent = b.scalar("other");
  if (!exponent.data) {
    const double e = exponent.as<double>();
    if (e == 2) return map_one(b, Fn::square);
    if (e == 3) return map_one(b, Fn::cube);
    if (e == 0.5) return map_one(b, Fn::sqrt);
    if (e == -0.5) return map_one(b, Fn::rsqrt);
    if (e == -1) return map_one(b, Fn::reciprocal);
  }
  return two<Fn::pow>(b);
}

Tensor gelu(Build& b) {
  const Attr* approximate = b.attr("approximate");
  const std::string kind = approximate ? std::get<std::string>(*approximate) : "none";
  if (kind != "none" && kind != "tanh") b.refuse("approximate is '" + kind + "', not 'none' or 'tanh'.");
  return map_one(b, kind == "tanh" ? Fn::gelu_tanh : Fn::gelu);
}

Tensor clamp(Build& b) {
  need_fit(b, b.in(0));
  MapJob job;
  const char* names[] = {"min", "max"};
  for (int i = 0; i < 2; ++i) {
    job.has[i] = b.attr(names[i]);
    if (job.has[i]) job.scalar[i] = b.scalar(names[i]);
  }
  return b.map(clamp_kernel(b.out().dtype), b.out(), {&b.in(0)}, job, 2);
}

Tensor same_shape(Build& b) {
  if (!same_dims(b.in(0), b.out())) b.refuse("input " + dims_text(b.in(0)) + " is not " + dims_text(b.out()) + ".");
  return b.in(0);
}

Tensor cast(Build& b) {
  const Tensor x = same_shape(b);
  if (x.dtype == b.out().dtype) return x;
  return b.map(cast_kernel(x.dtype, b.out().dtype), b.out(), {&x}, {}, 4);
}

// ---- products

Tensor zeros(Build& b) { return b.fill(b.out(), {}, {}); }

// x with the batch dims of `out`; repeated dims have stride 0.
Tensor expand_batch(const Tensor& x, const Tensor& out) {
  Tensor y = x;
  y.rank = out.rank;
  for (int d = 0; d < out.rank; ++d) {
    const int own = d - (out.rank - x.rank);
    const bool matrix = d >= out.rank - 2;
    y.dims[d] = matrix ? x.dims[own] : out.dims[d];
    y.strides[d] = matrix || (own >= 0 && x.dims[own] != 1) ? x.strides[own] : 0;
  }
  return y;
}

Tensor transposed(Tensor x) {
  std::swap(x.dims[x.rank - 1], x.dims[x.rank - 2]);
  std::swap(x.strides[x.rank - 1], x.strides[x.rank - 2]);
  return x;
}

// [..., m, k] @ [..., k, n] + [n] for operands of the same batch, as they lie.
Tensor product(Build& b, Tensor out, const Tensor& x, const Tensor& y, const Tensor& bias) {
  b.allocate(out);
  const int last = out.rank - 1;
  auto* job = b.make<ProductJob>();
  job->m = out.dims[last - 1];
  job->n = out.dims[last];
  job->k = x.dims[last];
  job->a_row = x.strides[last - 1];
  job->a_step = x.strides[last];
  job->b_step = y.strides[last - 1];
  job->b_column = y.strides[last];
  for (int d = 0; d < last - 1; ++d) job->loop.push(out.dims[d], out.strides[d], x.strides[d], y.strides[d]);
  job->loop.merge();
  const double cost = static_cast<double>(out.count()) * static_cast<double>(job->k);
  b.step(product_kernel(), job, out, {&x, &y, &bias}, cost);
  return out;
}

// Whether ggml's product is the better one (measured): few rows, so that reading w is what it costs, and w lies
// as ggml reads it. Its tiles take whole vectors of k and fours of n; else it makes single dot products.
bool prefers_ggml(const Tensor& w, int64_t rows) {
  const int64_t k = w.dims[w.rank - 1], n = w.dims[w.rank - 2], width = w.width();
  const bool lies = (k == 1 || w.strides[w.rank - 1] == width) && (n == 1 || w.strides[w.rank - 2] >= width);
  return lies && rows < (k % 16 == 0 && n % 4 == 0 ? 32 : 6);
}

// All rows of x times one w [n, k], plus a bias [n] where there is one.
Tensor rows_product(Build& b, const Tensor& x, const Tensor& w, const Tensor* bias) {
  const Tensor& out = b.out();
  const int64_t n = w.dims[0], k = w.dims[1], m = out.count() / n;
  if (k == 0 || prefers_ggml(w, m)) {
    const Tensor y = k == 0 ? zeros(b) : b.mul_mat(out, w, b.contiguous(x), m, Loop());
    return bias ? b.map(map_kernel(Fn::add, y.dtype), out, {&y, bias}, {}, 2) : y;
  }
  Tensor rows = b.contiguous(x), flat = out, result = out;
  rows.rank = flat.rank = 2;
  rows.dims[0] = flat.dims[0] = m;
  rows.dims[1] = k;
  flat.dims[1] = n;
  rows.pack();
  flat.pack();
  result.buffer = product(b, flat, rows, transposed(w), bias ? b.contiguous(*bias) : Tensor()).buffer;
  return result;
}

Tensor linear(Build& b) {
  const Tensor &x = b.in(0), &w = b.in(1), &out = b.out();
  if (x.rank < 1 || w.rank != 2 || w.dims[1] != x.dims[x.rank - 1])
    b.refuse("weight " + dims_text(w) + " does not fit input " + dims_text(x) + ".");
  Tensor expected = x;
  expected.dims[x.rank - 1] = w.dims[0];
  if (!same_dims(expected, out)) b.refuse("result " + dims_text(out) + " is not " + dims_text(expected) + ".");
  if (b.has(2) && (b.in(2).rank != 1 || b.in(2).dims[0] != w.dims[0]))
    b.refuse("bias " + dims_text(b.in(2)) + " does not fit weight " + dims_text(w) + ".");
  if (out.count() == 0) return out;
  return rows_product(b, x, w, b.has(2) ? &b.in(2) : nullptr);
}

void check_matmul(Build& b) {
  const Tensor &x = b.in(0), &y = b.in(1), &out = b.out();
  const std::string pair = dims_text(x) + " and " + dims_text(y);
  if (x.rank < 2 || y.rank < 2 || x.dims[x.rank - 1] != y.dims[y.rank - 2]) b.refuse(pair + " do not fit.");
  if (out.rank != std::max(x.rank, y.rank) || out.dims[out.rank - 2] != x.dims[x.rank - 2] ||
      out.dims[out.rank - 1] != y.dims[y.rank - 1])
    b.refuse("result " + dims_text(out) + " is not the product of " + pair + ".");
  for (int d = 0; d + 2 < out.rank; ++d) {
    const int dx = d - (out.rank - x.rank), dy = d - (out.rank - y.rank);
    const int64_t nx = dx >= 0 ? x.dims[dx] : 1, ny = dy >= 0 ? y.dims[dy] : 1, n = out.dims[d];
    if ((nx != n && nx != 1) || (ny != n && ny != 1) || (nx == 1 && ny == 1 && n != 1))
      b.refuse("the batches of " + pair + " do not broadcast to " + dims_text(out) + ".");
  }
}

Tensor matmul(Build& b) {
  check_matmul(b);
  const Tensor& out = b.out();
  if (out.count() == 0) return out;
  if (b.in(0).dims[b.in(0).rank - 1] == 0) return zeros(b);
  const Tensor x = expand_batch(b.in(0), out), y = expand_batch(b.in(1), out);
  Tensor w = transposed(y);  // [..., n, k]
  const int64_t m = out.dims[out.rank - 2];
  Loop batch;
  for (int d = 0; d + 2 < out.rank; ++d) batch.push(out.dims[d], out.strides[d], x.strides[d], w.strides[d]);
  batch.merge();
  const bool shared = std::all_of(batch.strides[2], batch.strides[2] + batch.rank, [](int64_t s) { return s == 0; });
  if (shared && x.contiguous()) {  // one matrix for the whole batch
    std::copy(w.dims + w.rank - 2, w.dims + w.rank, w.dims);
    std::copy(w.strides + w.rank - 2, w.strides + w.rank, w.strides);
    w.rank = 2;
    return rows_product(b, x, w, nullptr);
  }
  // ggml has two dims of batch, and reads contiguous rows.
  if (x.contiguous() && prefers_ggml(w, m) && batch.rank <= 2) return b.mul_mat(out, w, x, m, batch);
  return product(b, out, x, y, Tensor());
}

// ---- reductions and rows

std::vector<int64_t> reduced_dims(Build& b, const Tensor& x) {
  const std::vector<int64_t> dims = b.sizes("dims");
  for (size_t i = 0; i < dims.size(); ++i)
    if (dims[i] < 0 || dims[i] >= x.rank || (i && dims[i] <= dims[i - 1]))
      b.refuse("dims are not sorted dims of " + dims_text(x) + ".");
  return dims;
}

template <Fn fn>
Tensor reduce(Build& b) {
  const Tensor& x = b.in(0);
  const std::vector<int64_t> dims = reduced_dims(b, x);
  Tensor out = b.out(), kept = out, ones = x;
  kept.rank = 0;
  auto* job = b.make<ReduceJob>();
  job->count = 1;
  int64_t strides[kMaxRank];
  for (int d = 0; d < x.rank; ++d) {
    if (std::find(dims.begin(), dims.end(), d) == dims.end()) {
      strides[kept.rank] = x.strides[d];
      kept.dims[kept.rank++] = x.dims[d];
    } else {
      ones.dims[d] = 1;
      job->count *= x.dims[d];
      job->inner.push(x.dims[d], 0, x.strides[d]);
    }
  }
  if (!same_dims(out, kept) && !same_dims(out, ones))
    b.refuse("result " + dims_text(out) + " is not " + dims_text(kept) + ", what is left of " + dims_text(x) + ".");
  b.allocate(out);
  if (out.buffer < 0) return out;
  if (job->count == 0 && (fn == Fn::amax || fn == Fn::amin)) b.refuse("nothing to reduce in " + dims_text(x) + ".");
  kept.pack();
  for (int d = 0; d < kept.rank; ++d) job->loop.push(kept.dims[d], kept.strides[d], strides[d]);
  job->loop.merge();
  job->inner.merge();
  b.step(reduce_kernel(fn, x.dtype), job, out, {&x}, 2.0 * static_cast<double>(x.count()));
  return out;
}

Tensor softmax(Build& b) {
  const Tensor x = same_shape(b);
  const int64_t dim = b.size("dim");
  if (dim < 0 || dim >= std::max(x.rank, 1))
    b.refuse("dim " + std::to_string(dim) + " is none of " + dims_text(x) + ".");
  Tensor out = b.out();
  b.allocate(out);
  if (out.buffer < 0) return out;
  auto* job = b.make<RowJob>();
  job->size = x.rank ? x.dims[dim] : 1;
  for (int d = 0; d < x.rank; ++d) {
    if (d == dim) job->strides[0] = out.strides[d], job->strides[1] = x.strides[d];
    else job->loop.push(x.dims[d], out.strides[d], x.strides[d]);
  }
  job->loop.merge();
  b.step(softmax_kernel(), job, out, {&x}, 12.0 * static_cast<double>(out.count()), true);
  return out;
}

Tensor norm(Build& b, Kernel kernel) {
  const Tensor x = same_shape(b);
  const int64_t axes = b.size("axes");
  if (axes < 1 || axes > x.rank) b.refuse(std::to_string(axes) + " axes do not fit " + dims_text(x) + ".");
  Tensor row = x;  // the normalised dims
  row.rank = static_cast<int>(axes);
  std::copy(x.dims + x.rank - axes, x.dims + x.rank, row.dims);
  std::copy(x.strides + x.rank - axes, x.strides + x.rank, row.strides);
  for (size_t i = 1; i < 3; ++i)
    if (b.has(i) && !same_dims(b.in(i), row))
      b.refuse("weight or bias " + dims_text(b.in(i)) + " does not fit " + dims_text(x) + ".");
  Tensor out = b.out();
  if (out.count() == 0) return out;
  const Tensor source = row.contiguous() ? x : b.contiguous(x);
  Tensor weight, bias;
  if (b.has(1)) weight = b.contiguous(b.in(1));
  if (b.has(2)) bias = b.contiguous(b.in(2));
  b.allocate(out);
  auto* job = b.make<RowJob>();
  job->size = row.count();
  job->eps = b.number("eps");
  for (int d = 0; d + axes < x.rank; ++d) job->loop.push(x.dims[d], out.strides[d], source.strides[d]);
  job->loop.merge();
  b.step(kernel, job, out, {&source, &weight, &bias}, 6.0 * static_cast<double>(out.count()), true);
  return out;
}

// ---- data movement

// Splits and joins dims without moving data where the strides allow it, as torch's view does.
bool reshape_view(const Tensor& x, Tensor& out) {
  int d = x.rank - 1, e = out.rank - 1;
  while (d >= 0 && e >= 0) {
    int64_t stride = x.strides[d], have = x.dims[d];
    while (d > 0 && (x.dims[d - 1] == 1 || x.strides[d - 1] == stride * have)) have *= x.dims[--d];
    // x's dims from here are one run of `have` elements, `stride` apart
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
  if (x.count() != out.count()) b.refuse(dims_text(x) + " has not the elements of " + dims_text(out) + ".");
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
  if (!valid) b.refuse("dims are no permutation of " + dims_text(x) + ".");
  if (!same_dims(out, b.out())) b.refuse("result " + dims_text(b.out()) + " is not " + dims_text(out) + ".");
  return out;
}

Tensor expand(Build& b) {
  const Tensor& x = b.in(0);
  need_fit(b, x);
  Tensor out = b.out();
  if (out.count() == 0) return out;
  out.buffer = x.buffer;
  out.offset = x.offset;
  for (int d = 0; d < out.rank; ++d) {
    const int own = d - (out.rank - x.rank);
    out.strides[d] = own >= 0 && x.dims[own] != 1 ? x.strides[own] : 0;
  }
  return out;
}

int64_t need_dim(Build& b, const Tensor& x) {
  const int64_t dim = b.size("dim");
  if (dim < 0 || dim >= x.rank) b.refuse("dim " + std::to_string(dim) + " is none of " + dims_text(x) + ".");
  return dim;
}

Tensor slice(Build& b) {
  const Tensor& x = b.in(0);
  const int64_t dim = need_dim(b, x), start = b.size("start"), step = b.size("step");
  Tensor out = x;
  out.dims[dim] = b.out().rank == x.rank ? b.out().dims[dim] : -1;
  if (!same_dims(out, b.out())) b.refuse("result " + dims_text(b.out()) + " is no slice of " + dims_text(x) + ".");
  const int64_t length = out.dims[dim], size = x.dims[dim];
  const bool bad = start < 0 || start > size || step < 1;
  if (bad || (length && (start >= size || (length - 1) > (size - 1 - start) / step)))
    b.refuse(std::to_string(length) + " elements from " + std::to_string(start) + " with step " +
             std::to_string(step) + " are not in dim " + std::to_string(dim) + " of " + dims_text(x) + ".");
  if (b.out().count() == 0) return b.out();
  out.offset += start * x.strides[dim];
  if (length > 1) out.strides[dim] = x.strides[dim] * step;
  return out;
}

Tensor select(Build& b) {
  const Tensor& x = b.in(0);
  const int64_t dim = need_dim(b, x), index = b.size("index");
  if (index < 0 || index >= x.dims[dim])
    b.refuse("index " + std::to_string(index) + " is not in dim " + std::to_string(dim) + " of " + dims_text(x) +
             ".");
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
  const int64_t dim = need_dim(b, out);
  int64_t total = 0;
  for (size_t i = 0; i < b.ins(); ++i) {
    Tensor expected = b.in(i);
    if (expected.rank == out.rank) {
      total += expected.dims[dim];
      expected.dims[dim] = out.dims[dim];
    }
    if (!same_dims(expected, out))
      b.refuse("operand " + dims_text(b.in(i)) + " does not fit result " + dims_text(out) + ".");
  }
  if (total != out.dims[dim]) b.refuse("the operands fill " + std::to_string(total) + " of " + dims_text(out) + ".");
  b.allocate(out);
  Tensor part = out;
  for (size_t i = 0; i < b.ins(); ++i) {
    part.dims[dim] = b.in(i).dims[dim];
    if (part.count()) b.copy_into(part, b.in(i));
    part.offset += part.dims[dim] * part.strides[dim];
  }
  return out;
}

Tensor embedding(Build& b) {
  const Tensor &weight = b.in(0), &indices = b.in(1);
  Tensor out = b.out(), expected = indices;
  expected.rank = indices.rank + weight.rank - 1;
  if (weight.rank < 1 || expected.rank > kMaxRank) b.refuse("weight " + dims_text(weight) + " has no rows.");
  std::copy(weight.dims + 1, weight.dims + weight.rank, expected.dims + indices.rank);
  if (!same_dims(expected, out)) b.refuse("result " + dims_text(out) + " is not " + dims_text(expected) + ".");
  if (out.count() == 0) return out;
  const Tensor rows = b.contiguous(weight), list = b.contiguous(indices);
  b.allocate(out);
  auto* job = b.make<GatherJob>();
  job->count = indices.count();
  job->row_bytes = out.count() / job->count * out.width();
  job->limit = weight.dims[0];
  job->wide = indices.dtype == DType::i64;
  job->name = &b.name();
  job->error = b.error();
  b.step(gather_kernel(), job, out, {&rows, &list}, static_cast<double>(out.count()));
  return out;
}

Tensor arange(Build& b) { return b.fill(b.out(), b.scalar("start"), b.scalar("step")); }
Tensor full(Build& b) { return b.fill(b.out(), b.scalar("value"), {}); }

// ---- the table

constexpr Row kRows[] = {
    {"neg", unary(kNumbers), one<Fn::neg>},
    {"abs", unary(kNumbers), one<Fn::abs>},
    {"relu", unary(kNumbers), one<Fn::relu>},
    {"sqrt", unary(kF32), one<Fn::sqrt>},
    {"rsqrt", unary(kF32), one<Fn::rsqrt>},
    {"exp", unary(kF32), one<Fn::exp>},
    {"log", unary(kF32), one<Fn::log>},
    {"sin", unary(kF32), one<Fn::sin>},
    {"cos", unary(kF32), one<Fn::cos>},
    {"tanh", unary(kF32), one<Fn::tanh>},
    {"sigmoid", unary(kF32), one<Fn::sigmoid>},
    {"silu", unary(kF32), one<Fn::silu>},
    {"gelu", unary(kF32, kApproximate), gelu},
    {"add", binary(kNumbers), two<Fn::add>},
    {"sub", binary(kNumbers), two<Fn::sub>},
    {"mul", binary(kNumbers), two<Fn::mul>},
    {"div", binary(kF32), two<Fn::div>},
    {"pow", binary(kNumbers), power},
    {"maximum", binary(kNumbers), two<Fn::maximum>},
    {"minimum", binary(kNumbers), two<Fn::minimum>},
    {"clamp", unary(kNumbers, kBounds), clamp},
    {"cast", {1, 1, 0, Types::any, kAll, {}}, cast},
    {"matmul", {2, 2, 0, Types::same, kF32, {}}, matmul},
    {"linear", {2, 3, 4, Types::same, kF32, {}}, linear},
    {"sum", unary(kNumbers, kDims), reduce<Fn::sum>},
    {"mean", unary(kF32, kDims), reduce<Fn::mean>},
    {"amax", unary(kNumbers, kDims), reduce<Fn::amax>},
    {"amin", unary(kNumbers, kDims), reduce<Fn::amin>},
    {"softmax", unary(kF32, kDimOnly), softmax},
    {"layer_norm", {1, 3, 6, Types::same, kF32, kNorm}, [](Build& b) { return norm(b, layer_norm_kernel()); }},
    {"rms_norm", {1, 2, 2, Types::same, kF32, kNorm}, [](Build& b) { return norm(b, rms_norm_kernel()); }},
    {"reshape", unary(kAll), reshape},
    {"permute", unary(kAll, kDims), permute},
    {"expand", unary(kAll), expand},
    {"slice", unary(kAll, kSlice), slice},
    {"select", unary(kAll, kSelect), select},
    {"cat", {1, -1, 0, Types::same, kAll, kDimOnly}, cat},
    {"embedding", {2, 2, 0, Types::gather, kAll, {}}, embedding},
    {"arange", source(kNumbers, kArange), arange},
    {"full", source(kAll, kValue), full},
};

constexpr bool rows_are_sound() {
  for (const Row& row : kRows) {
    if (row.rule.attrs.size() > std::size(Resolved{}.attrs)) return false;
    int same = 0;
    for (const Row& other : kRows) same += std::string_view(row.name) == other.name;
    if (same != 1) return false;
  }
  return true;
}
static_assert(rows_are_sound(), "two rows of one name, or more attributes than Resolved holds");

// ---- the static part of the rules

struct Check {
  const Program& program;
  const Node& node;
  const Row& row;

  [[noreturn]] void refuse(const std::string& fact) const {
    const std::string name = node.outs.empty() ? "" : " '" + program.values[node.outs[0]].name + "'";
    fail(Code::invalid_program, "[load] " + node.op + name + ": " + fact);
  }

  void arity() const {
    const auto count = static_cast<int>(node.ins.size());
    const Rule& rule = row.rule;
    if (count < rule.min_ins || (rule.max_ins >= 0 && count > rule.max_ins))
      refuse("takes " + std::to_string(rule.min_ins) + (rule.max_ins == rule.min_ins ? "" : " or more") +
             " operands, got " + std::to_string(count) + ".");
    if (node.outs.size() != 1) refuse("has one result, got " + std::to_string(node.outs.size()) + ".");
    if (!node.regions.empty()) refuse("takes no regions.");
    for (int i = 0; i < count; ++i)
      if (node.ins[i] == kNone && !(i < 8 && rule.optional >> i & 1))
        refuse("operand " + std::to_string(i) + " is missing.");
  }

  DType tensor(int32_t id) const {
    const Value& value = program.values[id];
    if (dtype_bytes(value.dtype) == 0) refuse("'" + value.name + "' is no tensor.");
    if (value.dims.size() > kMaxRank)
      refuse("'" + value.name + "' has more than " + std::to_string(kMaxRank) + " dims.");
    return value.dtype;
  }

  void dtypes() const {
    const DType out = tensor(node.outs[0]);
    if (!(row.rule.allowed & bit(out))) refuse(std::string("has no form for ") + dtype_name(out) + ".");
    for (size_t i = 0; i < node.ins.size(); ++i) {
      if (node.ins[i] == kNone) continue;
      const DType in = tensor(node.ins[i]);
      const bool index = row.rule.types == Types::gather && i == 1;
      const bool fine = row.rule.types == Types::any || (index ? in == DType::i64 || in == DType::i32 : in == out);
      if (!fine)
        refuse("operand " + std::to_string(i) + " is " + dtype_name(in) + ", expected " +
               (index ? "i64 or i32" : dtype_name(out)) + ".");
    }
  }

  // An integer result takes whole numbers only; what torch would promote has been cast before.
  void number(const AttrRule& rule, const Attr& value) const {
    const DType out = program.values[node.outs[0]].dtype;
    const bool real = out == DType::f32 || out == DType::f64 || out == DType::f16 || out == DType::bf16;
    if (const auto* text = std::get_if<std::string>(&value)) {
      if (*text != "inf" && *text != "-inf" && *text != "nan") refuse(std::string(rule.name) + " is no number.");
      if (!real && out != DType::boolean)
        refuse(std::string(rule.name) + " = " + *text + " is no " + dtype_name(out) + ".");
    } else if (const auto* x = std::get_if<double>(&value)) {
      if (!real && out != DType::boolean && static_cast<double>(truncate(*x)) != *x)
        refuse(std::string(rule.name) + " = " + std::to_string(*x) + " is no " + dtype_name(out) + ".");
    } else if (std::holds_alternative<std::vector<DimId>>(value)) {
      refuse(std::string(rule.name) + " is a list, expected a number.");
    }
  }

  void attrs() const {
    size_t found = 0;
    for (const AttrRule& rule : row.rule.attrs) {
      const auto it = node.attrs.find(rule.name);
      if (it == node.attrs.end()) {
        if (rule.required) refuse(std::string("attribute '") + rule.name + "' is missing.");
        continue;
      }
      ++found;
      const Attr& value = it->second;
      if (rule.kind == AttrKind::number) number(rule, value);
      else if ((rule.kind == AttrKind::size && !std::holds_alternative<DimId>(value)) ||
               (rule.kind == AttrKind::sizes && !std::holds_alternative<std::vector<DimId>>(value)) ||
               (rule.kind == AttrKind::text && !std::holds_alternative<std::string>(value)))
        refuse(std::string("attribute '") + rule.name + "' has the wrong type.");
    }
    if (found == node.attrs.size()) return;
    for (const auto& [name, value] : node.attrs) {
      bool known = false;
      for (const AttrRule& rule : row.rule.attrs) known |= name == rule.name;
      if (!known) refuse("attribute '" + name + "' is not known.");
    }
  }

  void all() const {
    arity();
    dtypes();
    attrs();
    // A binary op has its second operand as a tensor or as a number, and not both.
    if (row.rule.attrs.begin() == kOther.begin() && (node.ins.size() == 2) == (node.attrs.count("other") == 1))
      refuse("takes either two operands or one and 'other'.");
    if (node.op == "clamp" && node.attrs.empty()) refuse("takes min, max or both.");
  }
};

}  // namespace

const Row* find_row(const std::string& op) {
  static const auto index = [] {
    std::unordered_map<std::string, const Row*> map;
    for (const Row& row : kRows) map.emplace(row.name, &row);
    return map;
  }();
  const auto it = index.find(op);
  return it == index.end() ? nullptr : it->second;
}

std::vector<std::string> row_names() {
  std::vector<std::string> names;
  for (const Row& row : kRows) names.emplace_back(row.name);
  return names;
}

bool is_data(const std::string& op, const std::string& attr) {
  const Row* row = find_row(op);
  if (!row) return false;
  return std::any_of(row->rule.attrs.begin(), row->rule.attrs.end(),
                     [&](const AttrRule& rule) { return rule.data && attr == rule.name; });
}

void check(const Program& program) {
  for (const Node& node : program.nodes) {
    const Row* row = find_row(node.op);
    if (!row) fail(Code::not_supported, "[load] " + program.describe(node) + ": ggml has no row for this op.");
    Check{program, node, *row}.all();
  }
  for (int32_t id : program.results)
    if (id != kNone && program.values[id].dims.size() > kMaxRank)
      fail(Code::not_supported, "[load] result '" + program.values[id].name + "': has more than " +
                                    std::to_string(kMaxRank) + " dims.");
}

std::vector<Resolved> resolve(const Program& program) {
  std::vector<Resolved> nodes;
  nodes.reserve(program.nodes.size());
  for (const Node& node : program.nodes) {
    Resolved resolved{find_row(node.op), &node, {}};
    size_t i = 0;
    for (const AttrRule& rule : resolved.row->rule.attrs) {
      const auto it = node.attrs.find(rule.name);
      resolved.attrs[i++] = it == node.attrs.end() ? nullptr : &it->second;
    }
    nodes.push_back(resolved);
  }
  return nodes;
}

}  // namespace keepdim::ggml
