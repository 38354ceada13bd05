// Rows that read or write at positions which are data. An index out of range is an error of the call.
#include <algorithm>

#include "ops.h"

namespace keepdim::ggml {
namespace {

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
  b.step(gather_kernel(), job, out, {&rows, &list}, static_cast<double>(out.count()));
  return out;
}

constexpr Row kRows[] = {
    {"embedding", {2, 2, 0, "Ti>T", kAll, {}}, embedding},
};

}  // namespace

Table index_rows() { return {kRows, std::size(kRows)}; }

}  // namespace keepdim::ggml
