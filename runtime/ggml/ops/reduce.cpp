// Reductions and row-wise ops: sum, argmax, softmax, norms, cumsum, argsort.
#include "ggml/kernels/reduce.h"

#include <algorithm>

#include "ggml/kernels/softmax_norm_scan.h"
#include "ggml/kernels/sort.h"
#include "ggml/ops/ops.h"

namespace keepdim::ggml {
namespace {

constexpr int64_t kFewResults = 64;        // with fewer results, the reduced dims are split into chunks
constexpr int64_t kFewRuns = 8;            // or with fewer runs of adjacent results
constexpr int64_t kChunkElements = 16384;  // elements per chunk

// ---- reductions

// Splits x into kept and reduced dims. `kept`: the kept dims, packed; `kept_ones`: the same with reduced dims of size 1.
struct ReducedDims {
  Tensor kept, kept_ones;
  int64_t strides[kMaxRank];  // of x along the kept dims
  Loop inner;                 // over the reduced dims
  int64_t count = 1;
};

ReducedDims reduction_of(Build& b, const Tensor& x, const Tensor& out) {
  const std::vector<int64_t> dims = b.sizes("dims");
  for (size_t i = 0; i < dims.size(); ++i)
    if (dims[i] < 0 || dims[i] >= x.rank || (i && dims[i] <= dims[i - 1]))
      b.refuse("dims are not sorted dims of " + dims_text(x) + ".");
  ReducedDims p;
  p.kept = p.kept_ones = x;
  p.kept.dtype = out.dtype;
  p.kept.rank = 0;
  for (int d = 0; d < x.rank; ++d) {
    if (std::find(dims.begin(), dims.end(), d) == dims.end()) {
      p.strides[p.kept.rank] = x.strides[d];
      p.kept.dims[p.kept.rank++] = x.dims[d];
    } else {
      p.kept_ones.dims[d] = 1;
      p.count *= x.dims[d];
      p.inner.push(x.dims[d], 0, x.strides[d]);
    }
  }
  p.kept.pack();
  p.inner.merge();
  if (!same_dims(out, p.kept) && !same_dims(out, p.kept_ones))
    b.refuse("result " + dims_text(out) + " is not " + dims_text(p.kept) + ", the dims of " + dims_text(x) + " that are kept.");
  return p;
}

// Chunk size along the first reduced dim; 0: not chunked. Depends on sizes only, for deterministic results.
int64_t chunk_rows(const ReducedDims& p, int64_t width) {
  const int last = p.kept.rank - 1;
  // Adjacent results, as the channels of a channels-last image, are computed together.
  const bool adjacent = last >= 0 && p.strides[last] == width && p.inner.strides[1][p.inner.rank - 1] != width;
  const int64_t results = p.kept.count(), run = adjacent ? p.kept.dims[last] : 1;
  const bool few = results < kFewResults || (adjacent && results / kFewRuns < std::min(run, kReduceColumns));
  if (!few || p.count * run < 4 * kChunkElements || p.inner.dims[0] < 2) return 0;
  return std::max<int64_t>(1, kChunkElements * p.inner.dims[0] / (p.count * run));
}

// Partial results [chunks, kept count].
Tensor chunk_results(const ReducedDims& p, DType dtype, int64_t chunk) {
  Tensor t = p.kept;
  t.dtype = dtype;
  t.rank = 2;
  t.dims[0] = (p.inner.dims[0] + chunk - 1) / chunk;
  t.dims[1] = p.kept.count();
  t.pack();
  return t;
}

// Creates a job that reduces x, in chunks of `chunk` if not 0.
ReduceJob* reduce_job(Build& b, const ReducedDims& p, int64_t width, int64_t chunk, const Tensor* shift = nullptr) {
  auto* job = b.make<ReduceJob>();
  job->inner = p.inner;
  job->count = p.count;
  job->chunk = chunk;
  Loop kept;
  for (int d = 0; d < p.kept.rank; ++d)
    kept.push(p.kept.dims[d], p.kept.strides[d] / p.kept.width() * width, p.strides[d],
              shift ? p.kept.strides[d] / p.kept.width() * shift->width() : 0);
  kept.merge();
  const auto push = [&](int begin, int end) {
    for (int d = begin; d < end; ++d) job->loop.push(kept.dims[d], kept.strides[0][d], kept.strides[1][d], kept.strides[2][d]);
  };
  // The chunks are a dim of their own, since the last may be smaller, after the outer kept dims: a thread gets whole images.
  const int outer = std::max(0, kept.rank - 1);
  push(0, outer);
  if (chunk) {
    job->chunk_bytes = p.kept.count() * width;
    job->loop.push((p.inner.dims[0] + chunk - 1) / chunk, job->chunk_bytes, chunk * p.inner.strides[1][0]);
  }
  push(outer, kept.rank);
  return job;
}

// out = fn over the reduced dims / divisor; `shift` has the kept dims, packed.
Tensor reduce_to(Build& b, ReduceFn fn, const ReducedDims& p, const Tensor& x, Tensor out, double divisor = 1,
                 const Tensor* shift = nullptr) {
  b.allocate(out);
  if (out.buffer < 0) return out;
  const double cost = 2.0 * static_cast<double>(x.count());
  const Tensor none, &second = shift ? *shift : none;
  const int64_t chunk = chunk_rows(p, x.width());
  const DType type = fn == ReduceFn::any || fn == ReduceFn::all ? x.dtype : compute_type(x.dtype);
  const auto first_job = [&](const Tensor& to) {
    ReduceJob* job = reduce_job(b, p, to.width(), chunk, shift);
    if (type != x.dtype) job->read = converter(x.dtype, type);
    job->width = x.width();
    return job;
  };
  if (!chunk) {
    ReduceJob* job = first_job(out);
    job->divisor = divisor;
    b.step(reduce_kernel(fn, type, out.dtype), job, out, {&x, &second}, cost);
    return out;
  }
  const bool sums = fn == ReduceFn::sum || fn == ReduceFn::squares;
  Tensor partial = chunk_results(p, sums && type == DType::f32 ? DType::f64 : out.dtype, chunk);
  b.allocate(partial);
  b.step(reduce_kernel(fn, type, partial.dtype), first_job(partial), partial, {&x, &second}, cost);
  auto* job = b.make<ReduceJob>();
  job->count = partial.dims[0];
  job->divisor = divisor;
  job->inner.push(partial.dims[0], 0, partial.strides[0]);
  job->loop.push(partial.dims[1], out.width(), partial.width());
  b.step(reduce_kernel(sums ? ReduceFn::sum : fn, partial.dtype, out.dtype), job, out, {&partial},
         static_cast<double>(partial.count()));
  return out;
}

void check_not_empty(Build& b, const ReducedDims& p, const Tensor& x) {
  if (p.count == 0 && p.kept.count()) b.refuse("nothing to reduce in " + dims_text(x) + ".");
}

// Whether the kernel can convert x as it reads it: a single contiguous reduced dim.
bool converts(const Tensor& x, const ReducedDims& p) {
  constexpr int64_t min_run = 64;  // shorter runs are reduced together
  return p.inner.rank == 1 && p.inner.strides[1][0] == x.width() && p.count > min_run;
}

template <ReduceFn fn, bool mean = false>
Tensor reduce(Build& b) {
  Tensor x = b.in(0);
  ReducedDims p = reduction_of(b, x, b.out());
  if (const DType type = compute_type(x.dtype);
      fn != ReduceFn::any && fn != ReduceFn::all && x.dtype != type && !converts(x, p)) {
    x = b.cast(x, type);
    p = reduction_of(b, x, b.out());
  }
  if (fn == ReduceFn::amax || fn == ReduceFn::amin) check_not_empty(b, p, x);
  return reduce_to(b, fn, p, x, b.out(), mean ? static_cast<double>(p.count) : 1);
}

// Two passes: the mean, then the sum of squared deviations.
Tensor var(Build& b) {
  const Tensor& x = b.in(0);
  const ReducedDims p = reduction_of(b, x, b.out());
  const Tensor mean = reduce_to(b, ReduceFn::sum, p, x, p.kept, static_cast<double>(p.count));
  const double degrees_of_freedom = std::max(0.0, static_cast<double>(p.count) - b.number("correction"));
  return reduce_to(b, ReduceFn::squares, p, x, b.out(), degrees_of_freedom, &mean);
}

template <ReduceFn fn>
Tensor argreduce(Build& b) {
  const Tensor& x = b.in(0);
  const ReducedDims p = reduction_of(b, x, b.out());
  check_not_empty(b, p, x);
  Tensor out = b.out();
  b.allocate(out);
  if (out.buffer < 0) return out;
  const double cost = 3.0 * static_cast<double>(x.count());
  const int64_t chunk = chunk_rows(p, x.width());
  if (!chunk) {
    b.step(argreduce_kernel(fn, x.dtype), reduce_job(b, p, out.width(), 0), out, {&x}, cost);
    return out;
  }
  Tensor partial = chunk_results(p, DType::i64, chunk);
  b.allocate(partial);
  b.step(argreduce_kernel(fn, x.dtype), reduce_job(b, p, partial.width(), chunk), partial, {&x}, cost);
  ReduceJob* job = reduce_job(b, p, out.width(), 0, &partial);
  job->count = partial.dims[0];
  job->chunk_bytes = partial.strides[0];
  b.step(argreduce_merge_kernel(fn, x.dtype), job, out, {&x, &partial}, static_cast<double>(partial.count()));
  return out;
}

// ---- row-wise ops

// Attribute dim; a rank-0 tensor counts as a row of one element.
int64_t row_dim(Build& b, const Tensor& x) {
  const int64_t dim = b.size("dim");
  if (dim < 0 || dim >= std::max(x.rank, 1))
    b.refuse("dim " + std::to_string(dim) + " is out of range for " + dims_text(x) + ".");
  return dim;
}

Tensor rowwise(Build& b, Kernel kernel, double cost) {
  const Tensor x = check_same_shape(b);
  const int64_t dim = row_dim(b, x);
  Tensor out = b.out();
  b.allocate(out);
  if (out.buffer < 0) return out;
  auto* job = b.make<RowwiseJob>();
  job->size = x.rank ? x.dims[dim] : 1;
  job->strides[0] = job->strides[1] = x.width();
  for (int d = 0; d < x.rank; ++d) {
    if (d == dim)
      job->strides[0] = out.strides[d], job->strides[1] = x.strides[d];
    else
      job->loop.push(x.dims[d], out.strides[d], x.strides[d]);
  }
  job->loop.merge();
  b.step(kernel, job, out, {&x}, cost * static_cast<double>(out.count()), true);
  return out;
}

Tensor norm(Build& b, Kernel kernel) {
  const Tensor x = check_same_shape(b);
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
  auto* job = b.make<RowwiseJob>();
  job->size = row.count();
  job->eps = b.number("eps");
  for (int d = 0; d + axes < x.rank; ++d) job->loop.push(x.dims[d], out.strides[d], source.strides[d]);
  job->loop.merge();
  b.step(kernel, job, out, {&source, &weight, &bias}, 6.0 * static_cast<double>(out.count()), true);
  return out;
}

// ---- argsort along a dim; values are gathered separately

// View of x with `dim` moved to the end, or back.
Tensor move_dim(const Tensor& x, int64_t dim, bool back) {
  Tensor t = x;
  if (x.rank == 0) return t;
  const auto move = [&](int64_t* list) {
    if (back)
      std::rotate(list + dim, list + x.rank - 1, list + x.rank);
    else
      std::rotate(list + dim, list + dim + 1, list + x.rank);
  };
  move(t.dims);
  move(t.strides);
  return t;
}

Tensor sort(Build& b) {
  const Tensor& x = b.in(0);
  const int64_t dim = row_dim(b, x);
  const int64_t size = x.rank ? x.dims[dim] : 1, top_k = x.rank && b.out().rank ? b.out().dims[dim] : 1;
  Tensor expected = x;
  if (x.rank) expected.dims[dim] = top_k;
  if (!same_dims(expected, b.out()) || top_k > size)
    b.refuse("result " + dims_text(b.out()) + " does not fit input " + dims_text(x) + ".");
  if (size > UINT32_MAX) b.refuse("rows of " + std::to_string(size) + " are too long to sort.");
  Tensor out = move_dim(b.out(), dim, false);
  out.pack();
  b.allocate(out);
  if (out.buffer < 0) return b.out();
  const Tensor rows = b.contiguous(move_dim(x, dim, false));
  Tensor keys = rows;  // twice the size for long rows: radix sort needs a second buffer
  keys.dtype = DType::i64;
  keys.rank = 2;
  keys.dims[0] = rows.count();
  keys.dims[1] = sort_key_bytes(x.dtype) / 8 * (sort_needs_scratch(size) ? 2 : 1);
  keys.pack();
  b.allocate(keys);
  auto* job = b.make<SortJob>();
  job->rows = rows.count() / size;
  job->size = size;
  job->top_k = top_k;
  job->descending = b.flag("descending");
  auto* sort_job = b.make<SortJob>();
  *sort_job = *job;
  b.step(sort_keys_kernel(x.dtype), job, keys, {&rows}, 2.0 * static_cast<double>(rows.count()));
  b.step(sort_kernel(x.dtype), sort_job, out, {&keys}, 40.0 * static_cast<double>(rows.count()));
  return move_dim(out, dim, true);
}

constexpr OpBuilder kOps[] = {
    {"sum", reduce<ReduceFn::sum>, true},
    {"mean", reduce<ReduceFn::sum, true>, true},
    {"prod", reduce<ReduceFn::prod>, true},
    {"amax", reduce<ReduceFn::amax>, true},
    {"amin", reduce<ReduceFn::amin>, true},
    {"any", reduce<ReduceFn::any>},
    {"all", reduce<ReduceFn::all>},
    {"var", var},
    {"argmax", argreduce<ReduceFn::amax>},
    {"argmin", argreduce<ReduceFn::amin>},
    {"softmax", [](Build& b) { return rowwise(b, softmax_kernel(b.out().dtype), 12); }},
    {"log_softmax", [](Build& b) { return rowwise(b, log_softmax_kernel(b.out().dtype), 12); }},
    {"cumsum", [](Build& b) { return rowwise(b, cumsum_kernel(b.out().dtype), 4); }},
    {"cumprod", [](Build& b) { return rowwise(b, cumprod_kernel(b.out().dtype), 4); }},
    {"layer_norm", [](Build& b) { return norm(b, layer_norm_kernel(b.out().dtype)); }},
    {"rms_norm", [](Build& b) { return norm(b, rms_norm_kernel(b.out().dtype)); }},
    {"argsort", sort},
};

}  // namespace

OpTable reduce_ops() { return {kOps, std::size(kOps)}; }

}  // namespace keepdim::ggml
