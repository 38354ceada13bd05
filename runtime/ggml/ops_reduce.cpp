// Rows that make less out of more, or rows out of rows: reductions, softmax, norms.
#include <algorithm>

#include "ops.h"

namespace keepdim::ggml {
namespace {

constexpr TypeMask kNumbers = kF32 | bit(DType::i64) | bit(DType::i32);
constexpr Attrs kNorm = {{"eps", AttrKind::number, true}, {"axes", AttrKind::size, true}};

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

constexpr Row kRows[] = {
    {"sum", unary(kNumbers, kDims), reduce<Fn::sum>},
    {"mean", unary(kF32, kDims), reduce<Fn::mean>},
    {"amax", unary(kNumbers, kDims), reduce<Fn::amax>},
    {"amin", unary(kNumbers, kDims), reduce<Fn::amin>},
    {"softmax", unary(kF32, kDimOnly), softmax},
    {"layer_norm", {1, 3, 6, "TTT>T", kF32, kNorm}, [](Build& b) { return norm(b, layer_norm_kernel()); }},
    {"rms_norm", {1, 2, 2, "TT>T", kF32, kNorm}, [](Build& b) { return norm(b, rms_norm_kernel()); }},
};

}  // namespace

Table reduce_rows() { return {kRows, std::size(kRows)}; }

}  // namespace keepdim::ggml
