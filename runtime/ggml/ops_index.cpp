// Rows that read or write at positions which are data. An index out of range is an error of the call.
#include <algorithm>

#include "ops.h"

namespace keepdim::ggml {
namespace {

// One index tensor, how far apart in x what it counts is, and how many there are.
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

// Several indices into x, as one of bytes.
Index combine(Build& b, const std::vector<Index>& indices, Tensor shape) {
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

// The part of x that indices of the dims `dims` choose: the dims that are not indexed, with those of the indices in
// the place of the first one, or in front of all when they do not lie together. Strides of the indexed part are 0.
struct Part {
  Tensor x;      // [.., index dims, ..]
  Tensor index;  // the same dims, stride 0 where x is walked over
  Index source;
};

Part part_of(Build& b, const Tensor& x, size_t first, const std::vector<int64_t>& dims, bool wrap) {
  const size_t count = b.ins() - first;
  bool valid = count == dims.size() && count > 0;
  for (size_t i = 0; i < dims.size() && valid; ++i)
    valid = dims[i] >= 0 && dims[i] < x.rank && (i == 0 || dims[i] > dims[i - 1]);
  if (!valid) b.refuse("dims are not " + std::to_string(count) + " sorted dims of " + dims_text(x) + ".");
  Tensor shape;  // of the indices together
  for (size_t i = first; i < b.ins(); ++i) shape.rank = std::max(shape.rank, b.in(i).rank);
  std::fill(shape.dims, shape.dims + shape.rank, 1);
  std::vector<Index> indices;
  for (size_t i = 0; i < count; ++i) {
    const Tensor& t = b.in(first + i);
    for (int d = 0; d < t.rank; ++d) {
      int64_t& size = shape.dims[shape.rank - t.rank + d];
      if (size == 1) size = t.dims[d];
    }
    indices.push_back({t, x.dims[dims[i]], x.strides[dims[i]], wrap});
  }
  for (size_t i = 0; i < count; ++i)
    if (!fits(b.in(first + i), shape))
      b.refuse("index " + dims_text(b.in(first + i)) + " does not broadcast to " + dims_text(shape) + ".");
  if (shape.rank + x.rank - static_cast<int>(count) > kMaxRank)
    b.refuse("the result has more than " + std::to_string(kMaxRank) + " dims.");

  Part part;
  part.source = combine(b, indices, shape);
  part.x = x;
  part.x.rank = 0;
  part.index = part.source.tensor;
  part.index.rank = 0;
  const auto push = [&](int64_t size, int64_t in_x, int64_t in_index) {
    part.x.dims[part.x.rank] = part.index.dims[part.x.rank] = size;
    part.x.strides[part.x.rank++] = in_x;
    part.index.strides[part.index.rank++] = in_index;
  };
  const auto push_indices = [&] {
    const Tensor& t = part.source.tensor;
    for (int d = 0; d < shape.rank; ++d) {
      const int own = d - (shape.rank - t.rank);
      push(shape.dims[d], 0, own >= 0 && t.dims[own] != 1 ? t.strides[own] : 0);
    }
  };
  const bool together = dims.back() - dims.front() == static_cast<int64_t>(count) - 1;
  if (!together) push_indices();
  for (int d = 0; d < x.rank; ++d) {
    if (together && d == dims.front()) push_indices();
    if (std::find(dims.begin(), dims.end(), d) == dims.end()) push(x.dims[d], x.strides[d], 0);
  }
  return part;
}

Tensor read(Build& b, const Part& part) {
  Tensor out = b.out();
  if (!same_dims(part.x, out)) b.refuse("result " + dims_text(out) + " is not " + dims_text(part.x) + ".");
  b.allocate(out);
  if (out.buffer < 0) return out;
  IndexJob* job = part.source.job(b);
  job->loop = broadcast(out, {&part.x, &part.index});
  b.step(gather_kernel(dtype_bytes(out.dtype)), job, out, {&part.x, &part.index},
         3.0 * static_cast<double>(out.count()));
  return out;
}

Tensor index(Build& b) { return read(b, part_of(b, b.in(0), 1, b.sizes("dims"), true)); }
Tensor index_select(Build& b) {
  if (b.in(1).rank > 1) b.refuse("the index " + dims_text(b.in(1)) + " is no list.");
  return read(b, part_of(b, b.in(0), 1, {need_dim(b, b.in(0))}, false));
}

// Rows of a weight in another dtype, half or quantised, or in panels.
Tensor stored_rows(Build& b) {
  const Tensor &w = b.in(0), &index = b.in(1);
  Tensor out = b.out();
  Tensor expected = index;
  if (w.rank == 2 && index.rank < kMaxRank) expected.dims[expected.rank++] = w.dims[1];
  if (w.rank != 2 || !same_dims(expected, out))
    b.refuse("result " + dims_text(out) + " is not made of rows of " + dims_text(w) + " at " + dims_text(index) + ".");
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
  job->stored = stored(w.dtype);
  job->wide = index.dtype == DType::i64;
  b.step(lookup_kernel(), job, out, {&rows, &from}, 3.0 * static_cast<double>(out.count()));
  return b.cast(out, b.out().dtype);
}

Tensor embedding(Build& b) {
  if (b.in(0).rank < 1) b.refuse("the weight has no rows.");
  if (b.packed() || b.in(0).dtype != b.out().dtype) return stored_rows(b);
  return read(b, part_of(b, b.in(0), 1, {0}, false));
}

// x and an index of its rank: along `dim` the index says where, elsewhere the position is its own.
Part part_along(Build& b, const Tensor& x, const Tensor& index, int64_t dim) {
  bool valid = x.rank == index.rank;
  for (int d = 0; d < x.rank && valid; ++d) valid = d == dim || index.dims[d] <= x.dims[d] || index.count() == 0;
  if (!valid) b.refuse("index " + dims_text(index) + " does not fit " + dims_text(x) + ".");
  Part part{x, index, {index, x.dims[dim], x.strides[dim], false}};
  std::copy(index.dims, index.dims + index.rank, part.x.dims);
  part.x.strides[dim] = 0;
  return part;
}

Tensor gather(Build& b) {
  if (b.out().count() == 0) return b.out();  // an index without elements may have any rank
  return read(b, part_along(b, b.in(0), b.in(1), need_dim(b, b.in(0))));
}

// Writes `values` over a copy of x, which has become `out`.
Tensor write(Build& b, const Part& part, const Tensor& values, Put put) {
  const Tensor& out = part.x;  // a view of the result
  if (part.x.count() == 0) return out;
  IndexJob* job = part.source.job(b);
  for (int d = 0; d < out.rank; ++d) {
    const int own = d - (out.rank - values.rank);
    job->loop.push(out.dims[d], out.strides[d], own >= 0 && values.dims[own] != 1 ? values.strides[own] : 0,
                   part.index.strides[d]);
  }
  job->loop.merge();
  constexpr int64_t few = 8;
  int64_t largest = few;
  for (int d = 0; d < job->loop.rank; ++d)
    if (job->loop.strides[0][d] && job->loop.dims[d] >= largest) largest = job->loop.dims[job->split = d];
  Tensor result = out;
  if (result.buffer < 0) {  // there is no place to write to; that every index is out of range is seen in the run
    result.rank = 0;
    b.allocate(result);
  }
  b.step(scatter_kernel(put, out.dtype), job, result, {&values, &part.index}, 4.0 * static_cast<double>(out.count()));
  return out;
}

Tensor copy_of(Build& b, const Tensor& x) {
  Tensor out = b.out();
  if (!same_dims(x, out)) b.refuse("result " + dims_text(out) + " is not " + dims_text(x) + ".");
  b.allocate(out);
  b.copy_into(out, x);
  return out;
}

template <Put put>
Tensor index_put(Build& b) {
  const Tensor& values = b.in(1);
  const std::vector<int64_t> dims = b.sizes("dims");
  const Tensor out = copy_of(b, b.in(0));
  const Part part = part_of(b, out, 2, dims, true);
  if (!fits(values, part.x)) b.refuse("values " + dims_text(values) + " do not fit " + dims_text(part.x) + ".");
  write(b, part, values, put);
  return out;
}

Tensor scatter(Build& b, Put put) {
  const Tensor &indices = b.in(1), &source = b.in(2);
  const int64_t dim = need_dim(b, b.in(0));
  bool valid = source.rank == indices.rank;
  for (int d = 0; d < indices.rank && valid; ++d) valid = indices.dims[d] <= source.dims[d] || indices.count() == 0;
  if (!valid) b.refuse("index " + dims_text(indices) + " does not fit the source " + dims_text(source) + ".");
  const Tensor out = copy_of(b, b.in(0));
  const Part part = part_along(b, out, indices, dim);
  Tensor values = source;  // the part of it that has an index
  std::copy(indices.dims, indices.dims + indices.rank, values.dims);
  write(b, part, values, put);
  return out;
}

Tensor scatter_reduce(Build& b) {
  constexpr Put kinds[] = {Put::add, Put::prod, Put::amax, Put::amin};
  return scatter(b, kinds[b.choice("reduce", {"sum", "prod", "amax", "amin"})]);
}

Tensor flatnonzero(Build& b) {
  const Tensor x = b.contiguous(b.in(0));
  Tensor out = b.out();
  if (out.rank != 1 || out.count() != x.count()) b.refuse("result " + dims_text(out) + " does not count " + dims_text(x) + ".");
  if (out.count() == 0) return out;
  b.allocate(out);
  auto* job = b.make<ListJob>();
  job->count = x.count();
  b.step(list_kernel(), job, out, {&x}, static_cast<double>(out.count()));
  return out;
}

constexpr Row kRows[] = {
    {"embedding", embedding},
    {"flatnonzero", flatnonzero},
    {"index_select", index_select},
    {"index", index},
    {"gather", gather},
    {"index_put", index_put<Put::set>},
    {"index_add", index_put<Put::add>},
    {"scatter", [](Build& b) { return scatter(b, Put::set); }},
    {"scatter_reduce", scatter_reduce},
};

}  // namespace

bool looks_up(const Program& program, const Node& node, const Weight& w) {
  const bool columns = w.step == 1 && w.column == w.k;  // that the rows of the constant are
  return node.op == "embedding" && node.ins[0] == w.value && columns && program.values[w.value].dtype == DType::f32;
}

Table index_rows() { return {kRows, std::size(kRows)}; }

}  // namespace keepdim::ggml
