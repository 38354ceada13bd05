// Rows that make less out of more, or rows out of rows: reductions, softmax, norms, running sums, sorting.
#include <algorithm>

#include "ops.h"

namespace keepdim::ggml {
namespace {

constexpr int64_t kFewResults = 64;       // below this, what is reduced is split
constexpr int64_t kChunkElements = 16384;  // in so many elements

// ---- reductions

// What is kept of x and what is reduced, as loops; the result's strides are those of `kept` when packed.
struct Parts {
  Tensor kept, ones;
  int64_t strides[kMaxRank];  // of x along what is kept
  Loop inner;
  int64_t count = 1;
};

Parts split(Build& b, const Tensor& x, const Tensor& out) {
  const std::vector<int64_t> dims = b.sizes("dims");
  for (size_t i = 0; i < dims.size(); ++i)
    if (dims[i] < 0 || dims[i] >= x.rank || (i && dims[i] <= dims[i - 1]))
      b.refuse("dims are not sorted dims of " + dims_text(x) + ".");
  Parts p;
  p.kept = p.ones = x;
  p.kept.dtype = out.dtype;
  p.kept.rank = 0;
  for (int d = 0; d < x.rank; ++d) {
    if (std::find(dims.begin(), dims.end(), d) == dims.end()) {
      p.strides[p.kept.rank] = x.strides[d];
      p.kept.dims[p.kept.rank++] = x.dims[d];
    } else {
      p.ones.dims[d] = 1;
      p.count *= x.dims[d];
      p.inner.push(x.dims[d], 0, x.strides[d]);
    }
  }
  p.kept.pack();
  p.inner.merge();
  if (!same_dims(out, p.kept) && !same_dims(out, p.ones))
    b.refuse("result " + dims_text(out) + " is not " + dims_text(p.kept) + ", what is left of " + dims_text(x) + ".");
  return p;
}

// Rows of the first reduced dim in a chunk; 0: in one piece. By the sizes alone.
int64_t chunk_rows(const Parts& p) {
  if (p.kept.count() >= kFewResults || p.count < 4 * kChunkElements || p.inner.dims[0] < 2) return 0;
  return std::max<int64_t>(1, kChunkElements * p.inner.dims[0] / p.count);
}

// One result for each chunk of each kept element: [chunks, kept…].
Tensor chunk_results(const Parts& p, DType dtype, int64_t chunk) {
  Tensor t = p.kept;
  t.dtype = dtype;
  t.rank = 2;
  t.dims[0] = (p.inner.dims[0] + chunk - 1) / chunk;
  t.dims[1] = p.kept.count();
  t.pack();
  return t;
}

// A job over all of x; `chunk` rows at a time when it is not 0.
ReduceJob* reduce_job(Build& b, const Parts& p, int64_t width, int64_t chunk, const Tensor* shift = nullptr) {
  auto* job = b.make<ReduceJob>();
  job->inner = p.inner;
  job->count = p.count;
  job->chunk = chunk;
  Loop kept;
  for (int d = 0; d < p.kept.rank; ++d)
    kept.push(p.kept.dims[d], p.kept.strides[d] / p.kept.width() * width, p.strides[d],
              shift ? p.kept.strides[d] / p.kept.width() * shift->width() : 0);
  kept.merge();
  if (chunk) {  // a dim of its own: the last chunk can be smaller
    job->chunk_bytes = p.kept.count() * width;
    job->loop.push((p.inner.dims[0] + chunk - 1) / chunk, job->chunk_bytes, chunk * p.inner.strides[1][0]);
  }
  for (int d = 0; d < kept.rank; ++d)
    job->loop.push(kept.dims[d], kept.strides[0][d], kept.strides[1][d], kept.strides[2][d]);
  return job;
}

// fn over what is reduced, divided by `divisor`; `shift` is packed as the kept dims.
Tensor reduce_to(Build& b, Fn fn, const Parts& p, const Tensor& x, Tensor out, double divisor = 1,
                 const Tensor* shift = nullptr) {
  b.allocate(out);
  if (out.buffer < 0) return out;
  const double cost = 2.0 * static_cast<double>(x.count());
  const Tensor none, &second = shift ? *shift : none;
  const int64_t chunk = chunk_rows(p);
  if (!chunk) {
    ReduceJob* job = reduce_job(b, p, out.width(), 0, shift);
    job->divisor = divisor;
    b.step(reduce_kernel(fn, x.dtype, out.dtype), job, out, {&x, &second}, cost);
    return out;
  }
  const bool sums = fn == Fn::sum || fn == Fn::squares;
  Tensor some = chunk_results(p, sums && x.dtype == DType::f32 ? DType::f64 : out.dtype, chunk);
  b.allocate(some);
  b.step(reduce_kernel(fn, x.dtype, some.dtype), reduce_job(b, p, some.width(), chunk, shift), some, {&x, &second},
         cost);
  auto* job = b.make<ReduceJob>();
  job->count = some.dims[0];
  job->divisor = divisor;
  job->inner.push(some.dims[0], 0, some.strides[0]);
  job->loop.push(some.dims[1], out.width(), some.width());
  b.step(reduce_kernel(sums ? Fn::sum : fn, some.dtype, out.dtype), job, out, {&some},
         static_cast<double>(some.count()));
  return out;
}

void need_elements(Build& b, const Parts& p, const Tensor& x) {
  if (p.count == 0 && p.kept.count()) b.refuse("nothing to reduce in " + dims_text(x) + ".");
}

template <Fn fn, bool mean = false>
Tensor reduce(Build& b) {
  const Tensor& x = b.in(0);
  const Parts p = split(b, x, b.out());
  if (fn == Fn::amax || fn == Fn::amin) need_elements(b, p, x);
  return reduce_to(b, fn, p, x, b.out(), mean ? static_cast<double>(p.count) : 1);
}

// Twice over x: the mean, and the squares of what is left without it.
Tensor var(Build& b) {
  const Tensor& x = b.in(0);
  const Parts p = split(b, x, b.out());
  const Tensor mean = reduce_to(b, Fn::sum, p, x, p.kept, static_cast<double>(p.count));
  const double freedom = std::max(0.0, static_cast<double>(p.count) - b.number("correction"));
  return reduce_to(b, Fn::squares, p, x, b.out(), freedom, &mean);
}

template <Fn fn>
Tensor position(Build& b) {
  const Tensor& x = b.in(0);
  const Parts p = split(b, x, b.out());
  need_elements(b, p, x);
  Tensor out = b.out();
  b.allocate(out);
  if (out.buffer < 0) return out;
  const double cost = 3.0 * static_cast<double>(x.count());
  const int64_t chunk = chunk_rows(p);
  if (!chunk) {
    b.step(position_kernel(fn, x.dtype), reduce_job(b, p, out.width(), 0), out, {&x}, cost);
    return out;
  }
  Tensor some = chunk_results(p, DType::i64, chunk);
  b.allocate(some);
  b.step(position_kernel(fn, x.dtype), reduce_job(b, p, some.width(), chunk), some, {&x}, cost);
  ReduceJob* job = reduce_job(b, p, out.width(), 0, &some);
  job->count = some.dims[0];
  job->chunk_bytes = some.strides[0];
  b.step(best_position_kernel(fn, x.dtype), job, out, {&x, &some}, static_cast<double>(some.count()));
  return out;
}

// ---- rows out of rows

// The dim of a row; a rank-0 tensor is a row of one.
int64_t row_dim(Build& b, const Tensor& x) {
  const int64_t dim = b.size("dim");
  if (dim < 0 || dim >= std::max(x.rank, 1))
    b.refuse("dim " + std::to_string(dim) + " is none of " + dims_text(x) + ".");
  return dim;
}

Tensor along(Build& b, Kernel kernel, double cost) {
  const Tensor x = same_shape(b);
  const int64_t dim = row_dim(b, x);
  Tensor out = b.out();
  b.allocate(out);
  if (out.buffer < 0) return out;
  auto* job = b.make<RowJob>();
  job->size = x.rank ? x.dims[dim] : 1;
  job->strides[0] = job->strides[1] = x.width();
  for (int d = 0; d < x.rank; ++d) {
    if (d == dim) job->strides[0] = out.strides[d], job->strides[1] = x.strides[d];
    else job->loop.push(x.dims[d], out.strides[d], x.strides[d]);
  }
  job->loop.merge();
  b.step(kernel, job, out, {&x}, cost * static_cast<double>(out.count()), true);
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

// ---- sorting: positions along a dim; the values are gathered by them

// x with `dim` last, or back.
Tensor moved(const Tensor& x, int64_t dim, bool back) {
  Tensor t = x;
  if (x.rank == 0) return t;
  const auto turn = [&](int64_t* list) {
    if (back) std::rotate(list + dim, list + x.rank - 1, list + x.rank);
    else std::rotate(list + dim, list + dim + 1, list + x.rank);
  };
  turn(t.dims);
  turn(t.strides);
  return t;
}

Tensor sort(Build& b) {
  const Tensor& x = b.in(0);
  const int64_t dim = row_dim(b, x);
  const int64_t size = x.rank ? x.dims[dim] : 1, taken = x.rank && b.out().rank ? b.out().dims[dim] : 1;
  Tensor expected = x;
  if (x.rank) expected.dims[dim] = taken;
  if (!same_dims(expected, b.out()) || taken > size)
    b.refuse("result " + dims_text(b.out()) + " is no part of " + dims_text(x) + ".");
  if (size > UINT32_MAX) b.refuse("rows of " + std::to_string(size) + " are too long to sort.");
  Tensor out = moved(b.out(), dim, false);
  out.pack();
  b.allocate(out);
  if (out.buffer < 0) return b.out();
  const Tensor rows = b.contiguous(moved(x, dim, false));
  Tensor keys = rows;  // and, for long rows, as much room again
  keys.dtype = DType::i64;
  keys.rank = 2;
  keys.dims[0] = rows.count();
  keys.dims[1] = sort_bytes(x.dtype) / 8 * (sort_needs_room(size) ? 2 : 1);
  keys.pack();
  b.allocate(keys);
  auto* job = b.make<SortJob>();
  job->rows = rows.count() / size;
  job->size = size;
  job->taken = taken;
  job->descending = b.flag("descending");
  auto* second = b.make<SortJob>();
  *second = *job;
  b.step(sort_keys_kernel(x.dtype), job, keys, {&rows}, 2.0 * static_cast<double>(rows.count()));
  b.step(sort_kernel(x.dtype), second, out, {&keys}, 40.0 * static_cast<double>(rows.count()));
  return moved(out, dim, true);
}

constexpr Row kRows[] = {
    {"sum", reduce<Fn::sum>},
    {"mean", reduce<Fn::sum, true>},
    {"prod", reduce<Fn::prod>},
    {"amax", reduce<Fn::amax>},
    {"amin", reduce<Fn::amin>},
    {"any", reduce<Fn::any>},
    {"all", reduce<Fn::all>},
    {"var", var},
    {"argmax", position<Fn::amax>},
    {"argmin", position<Fn::amin>},
    {"softmax", [](Build& b) { return along(b, softmax_kernel(b.out().dtype), 12); }},
    {"log_softmax", [](Build& b) { return along(b, log_softmax_kernel(b.out().dtype), 12); }},
    {"cumsum", [](Build& b) { return along(b, scan_kernel(Fn::sum, b.out().dtype), 4); }},
    {"cumprod", [](Build& b) { return along(b, scan_kernel(Fn::prod, b.out().dtype), 4); }},
    {"layer_norm", [](Build& b) { return norm(b, layer_norm_kernel(b.out().dtype)); }},
    {"rms_norm", [](Build& b) { return norm(b, rms_norm_kernel(b.out().dtype)); }},
    {"argsort", sort},
};

}  // namespace

Table reduce_rows() { return {kRows, std::size(kRows)}; }

}  // namespace keepdim::ggml
