// Gather, scatter and embedding ops. An index out of range fails the call.
#include "ggml/kernels/gather_scatter.h"

#include <algorithm>

#include "ggml/ops/ops.h"

namespace keepdim::ggml {
namespace {

// An index tensor with the size (limit) and byte stride (scale) of the dim that it indexes.
struct Index {
  Tensor tensor;
  int64_t limit, scale;
  bool wrap;

  IndexJob* job(Build& b) const {
    auto* job = b.make<IndexJob>();
    job->limit = limit;
    job->scale = scale;
    job->wrap = wrap;
    job->wide = tensor.dtype == DType::i64;
    return job;
  }
};

// Combines several index tensors into one tensor of byte offsets.
Index combine_indices(Build& b, const std::vector<Index>& indices, Tensor shape) {
  if (indices.size() == 1) return indices[0];
  shape.dtype = DType::i64;
  Tensor total;
  int64_t bytes = 1;
  for (const Index& index : indices) {
    Tensor next = shape;
    b.allocate(next);
    next.pack();
    bytes += std::max<int64_t>(0, index.limit - 1) * index.scale;
    if (next.buffer < 0) return {next, bytes, 1, false};
    IndexJob* job = index.job(b);
    const Tensor& before = total.buffer < 0 ? shape : total;
    job->loop = broadcast(next, {&index.tensor, &before});
    b.step(offset_kernel(), job, next, {&index.tensor, &total}, 4.0 * static_cast<double>(next.count()), true);
    total = next;
  }
  return {total, bytes, 1, false};
}

// View of x for advanced indexing: the indexed dims are replaced by the dims of the index (moved to the front if the indexed
// dims are not adjacent), with stride 0.
struct IndexedView {
  Tensor x;      // [.., index dims, ..]
  Tensor index;  // same dims, stride 0 along the dims of x
  Index source;
};

// Broadcast shape of the index operands from `first` on.
Tensor index_shape(Build& b, size_t first) {
  Tensor shape;
  for (size_t i = first; i < b.ins(); ++i) shape.rank = std::max(shape.rank, b.in(i).rank);
  std::fill(shape.dims, shape.dims + shape.rank, 1);
  for (size_t i = first; i < b.ins(); ++i) {
    const Tensor& t = b.in(i);
    for (int d = 0; d < t.rank; ++d) {
      int64_t& size = shape.dims[shape.rank - t.rank + d];
      if (size == 1) size = t.dims[d];
    }
  }
  for (size_t i = first; i < b.ins(); ++i)
    if (!broadcastable(b.in(i), shape))
      b.refuse("index " + dims_text(b.in(i)) + " does not broadcast to " + dims_text(shape) + ".");
  return shape;
}

IndexedView indexed_view(Build& b, const Tensor& x, size_t first, const std::vector<int64_t>& dims, bool wrap) {
  const size_t count = b.ins() - first;
  bool valid = count == dims.size() && count > 0;
  for (size_t i = 0; i < dims.size() && valid; ++i) valid = dims[i] >= 0 && dims[i] < x.rank && (i == 0 || dims[i] > dims[i - 1]);
  if (!valid) b.refuse("dims are not " + std::to_string(count) + " sorted dims of " + dims_text(x) + ".");
  const Tensor shape = index_shape(b, first);
  if (shape.rank + x.rank - static_cast<int>(count) > kMaxRank)
    b.refuse("the result has more than " + std::to_string(kMaxRank) + " dims.");
  std::vector<Index> indices;
  for (size_t i = 0; i < count; ++i) indices.push_back({b.in(first + i), x.dims[dims[i]], x.strides[dims[i]], wrap});

  IndexedView view;
  view.source = combine_indices(b, indices, shape);
  view.x = x;
  view.x.rank = 0;
  view.index = view.source.tensor;
  view.index.rank = 0;
  const auto push = [&](int64_t size, int64_t in_x, int64_t in_index) {
    view.x.dims[view.x.rank] = view.index.dims[view.x.rank] = size;
    view.x.strides[view.x.rank++] = in_x;
    view.index.strides[view.index.rank++] = in_index;
  };
  const auto push_indices = [&] {
    for (int d = 0; d < shape.rank; ++d) push(shape.dims[d], 0, broadcast_stride(view.source.tensor, shape.rank, d));
  };
  const bool adjacent = dims.back() - dims.front() == static_cast<int64_t>(count) - 1;
  if (!adjacent) push_indices();
  for (int d = 0; d < x.rank; ++d) {
    if (adjacent && d == dims.front()) push_indices();
    if (std::find(dims.begin(), dims.end(), d) == dims.end()) push(x.dims[d], x.strides[d], 0);
  }
  return view;
}

Tensor add_gather(Build& b, const IndexedView& view) {
  Tensor out = b.out();
  if (!same_dims(view.x, out)) b.refuse("result " + dims_text(out) + " is not " + dims_text(view.x) + ".");
  b.allocate(out);
  if (out.buffer < 0) return out;
  IndexJob* job = view.source.job(b);
  job->loop = broadcast(out, {&view.x, &view.index});
  b.step(gather_kernel(dtype_bytes(out.dtype)), job, out, {&view.x, &view.index}, 3.0 * static_cast<double>(out.count()));
  return out;
}

Tensor index(Build& b) { return add_gather(b, indexed_view(b, b.in(0), 1, b.sizes("dims"), true)); }
Tensor index_select(Build& b) {
  if (b.in(1).rank > 1) b.refuse("the index " + dims_text(b.in(1)) + " is not 1-D.");
  return add_gather(b, indexed_view(b, b.in(0), 1, {checked_dim(b, b.in(0))}, false));
}

// Embedding lookup from a 16-bit, quantised or packed weight.
Tensor lookup_rows(Build& b) {
  const Tensor &w = b.in(0), &index = b.in(1);
  Tensor out = b.out();
  Tensor expected = index;
  if (w.rank == 2 && index.rank < kMaxRank) expected.dims[expected.rank++] = w.dims[1];
  if (w.rank != 2 || !same_dims(expected, out))
    b.refuse("result " + dims_text(out) + " does not fit rows of " + dims_text(w) + " at " + dims_text(index) + ".");
  const Tensor rows = b.packed() ? Tensor() : b.contiguous(w), from = b.contiguous(index);
  out.dtype = DType::f32;
  out.pack();
  b.allocate(out);
  if (out.buffer < 0) return b.out();
  auto* job = b.make<LookupJob>();
  job->rows = index.count();
  job->size = w.dims[1];
  job->limit = w.dims[0];
  job->packed = b.packed();
  job->format = weight_format(w.dtype);
  job->type = w.dtype;
  job->wide = index.dtype == DType::i64;
  b.step(lookup_kernel(), job, out, {&rows, &from}, 3.0 * static_cast<double>(out.count()));
  return b.cast(out, b.out().dtype);
}

Tensor embedding(Build& b) {
  if (b.in(0).rank < 1) b.refuse("the weight has no rows.");
  if (b.packed() || b.in(0).dtype != b.out().dtype) return lookup_rows(b);
  return add_gather(b, indexed_view(b, b.in(0), 1, {0}, false));
}

// View for gather and scatter along `dim`, with an index of the same rank as x.
IndexedView indexed_view_along(Build& b, const Tensor& x, const Tensor& index, int64_t dim) {
  bool valid = x.rank == index.rank;
  for (int d = 0; d < x.rank && valid; ++d) valid = d == dim || index.dims[d] <= x.dims[d] || index.count() == 0;
  if (!valid) b.refuse("index " + dims_text(index) + " does not fit " + dims_text(x) + ".");
  IndexedView view{x, index, {index, x.dims[dim], x.strides[dim], false}};
  std::copy(index.dims, index.dims + index.rank, view.x.dims);
  view.x.strides[dim] = 0;
  return view;
}

Tensor gather(Build& b) {
  if (b.out().count() == 0) return b.out();  // an empty index may have any rank
  return add_gather(b, indexed_view_along(b, b.in(0), b.in(1), checked_dim(b, b.in(0))));
}

// Scatters `values` into the view of the result.
Tensor add_scatter(Build& b, const IndexedView& view, const Tensor& values, ScatterFn fn) {
  const Tensor& out = view.x;  // a view of the result
  if (view.x.count() == 0) return out;
  IndexJob* job = view.source.job(b);
  for (int d = 0; d < out.rank; ++d)
    job->loop.push(out.dims[d], out.strides[d], broadcast_stride(values, out.rank, d), view.index.strides[d]);
  job->loop.merge();
  constexpr int64_t min_split = 8;
  int64_t largest = min_split;
  for (int d = 0; d < job->loop.rank; ++d)
    if (job->loop.strides[0][d] && job->loop.dims[d] >= largest) largest = job->loop.dims[job->split = d];
  Tensor result = out;
  if (result.buffer < 0) {  // nothing to write to; the run reports that every index is out of range
    result.rank = 0;
    b.allocate(result);
  }
  b.step(scatter_kernel(fn, out.dtype), job, result, {&values, &view.index}, 4.0 * static_cast<double>(out.count()));
  return out;
}

Tensor copy_of(Build& b, const Tensor& x) {
  Tensor out = b.out();
  if (!same_dims(x, out)) b.refuse("result " + dims_text(out) + " is not " + dims_text(x) + ".");
  b.allocate(out);
  b.copy_into(out, x);
  return out;
}

template <ScatterFn fn>
Tensor index_put(Build& b) {
  const Tensor& values = b.in(1);
  const std::vector<int64_t> dims = b.sizes("dims");
  const Tensor out = copy_of(b, b.in(0));
  const IndexedView view = indexed_view(b, out, 2, dims, true);
  if (!broadcastable(values, view.x)) b.refuse("values " + dims_text(values) + " do not fit " + dims_text(view.x) + ".");
  add_scatter(b, view, values, fn);
  return out;
}

Tensor scatter(Build& b, ScatterFn fn) {
  const Tensor &indices = b.in(1), &source = b.in(2);
  const int64_t dim = checked_dim(b, b.in(0));
  bool valid = source.rank == indices.rank;
  for (int d = 0; d < indices.rank && valid; ++d) valid = indices.dims[d] <= source.dims[d] || indices.count() == 0;
  if (!valid) b.refuse("index " + dims_text(indices) + " does not fit the source " + dims_text(source) + ".");
  const Tensor out = copy_of(b, b.in(0));
  const IndexedView view = indexed_view_along(b, out, indices, dim);
  Tensor values = source;  // restricted to the shape of the index
  std::copy(indices.dims, indices.dims + indices.rank, values.dims);
  add_scatter(b, view, values, fn);
  return out;
}

Tensor scatter_reduce(Build& b) {
  constexpr ScatterFn kinds[] = {ScatterFn::add, ScatterFn::prod, ScatterFn::amax, ScatterFn::amin};
  return scatter(b, kinds[b.choice("reduce", {"sum", "prod", "amax", "amin"})]);
}

Tensor flatnonzero(Build& b) {
  const Tensor x = b.contiguous(b.in(0));
  Tensor out = b.out();
  if (out.rank != 1 || out.count() != x.count())
    b.refuse("result " + dims_text(out) + " does not have one element for each of " + dims_text(x) + ".");
  if (out.count() == 0) return out;
  b.allocate(out);
  auto* job = b.make<NonzeroJob>();
  job->count = x.count();
  b.step(nonzero_kernel(), job, out, {&x}, static_cast<double>(out.count()));
  return out;
}

Tensor embedding_bag(Build& b) {
  const Tensor &table = b.in(0), &indices = b.in(1), &offsets = b.in(2);
  Tensor out = b.out();
  auto* job = b.make<EmbeddingBagJob>();
  job->mode = static_cast<BagMode>(b.choice("mode", {"sum", "mean", "max"}));
  bool fit = table.rank == 2 && indices.rank == 1 && offsets.rank == 1 && out.rank == 2 && out.dims[1] == table.dims[1] &&
             out.dims[0] == offsets.dims[0] - (b.flag("include_last_offset") ? 1 : 0);
  if (!fit)
    b.refuse("offsets " + dims_text(offsets) + " do not take rows of " + dims_text(table) + " to " + dims_text(out) + ".");
  if (b.has(3) && (job->mode != BagMode::sum || !same_dims(b.in(3), indices)))
    b.refuse("weights " + dims_text(b.in(3)) + " need the mode sum and the shape " + dims_text(indices) + ".");
  if (out.count() == 0) return out;
  const DType type = compute_type(table.dtype);
  job->bags = out.dims[0];
  job->offsets = offsets.dims[0];
  job->count = indices.dims[0];
  job->rows = table.dims[0];
  job->columns = table.dims[1];
  if (b.attr("padding_idx")) job->padding = b.size("padding_idx");
  job->write = converter(type, table.dtype);
  const Tensor rows = b.contiguous(table), positions = b.contiguous(b.cast(indices, DType::i64)),
               starts = b.contiguous(b.cast(offsets, DType::i64)),
               factors = b.has(3) ? b.contiguous(b.cast(b.in(3), type)) : Tensor();
  b.allocate(out);
  b.step(embedding_bag_kernel(table.dtype), job, out, {&rows, &positions, &starts, &factors},
         2.0 * static_cast<double>(job->count) * static_cast<double>(job->columns) + static_cast<double>(out.count()));
  return out;
}

constexpr OpBuilder kOps[] = {
    {"embedding", embedding},
    {"flatnonzero", flatnonzero},
    {"index_select", index_select},
    {"index", index},
    {"gather", gather},
    {"index_put", index_put<ScatterFn::set>},
    {"index_add", index_put<ScatterFn::add>},
    {"scatter", [](Build& b) { return scatter(b, ScatterFn::set); }},
    {"scatter_reduce", scatter_reduce},
    {"embedding_bag", embedding_bag},
};

}  // namespace

bool reads_packed_rows(const Program& program, const Node& node, const Weight& w) {
  const bool columns = w.step == 1 && w.column == w.k;  // the constant is stored as [n, k], so its rows are columns of the panels
  const bool same_dtype = w.keeps_float16 || program.values[w.value].dtype == DType::f32;
  return node.op == "embedding" && node.ins[0] == w.value && columns && same_dtype;
}

OpTable gather_scatter_ops() { return {kOps, std::size(kOps)}; }

}  // namespace keepdim::ggml
