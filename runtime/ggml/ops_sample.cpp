// Rows of samples of an image, patches added up, distances between points, and bags of a table's rows.
#include <algorithm>
#include <cmath>

#include "ops.h"
#include "sample.h"

namespace keepdim::ggml {
namespace {

// ---- images

Tensor grid_sample(Build& b) {
  const Tensor &x = b.in(0), &grid = b.in(1);
  Tensor out = b.out();
  const int rank = x.rank - 2;
  bool fit = (rank == 2 || rank == 3) && grid.rank == x.rank && out.rank == x.rank && grid.dims[rank + 1] == rank &&
             grid.dims[0] == x.dims[0] && out.dims[0] == x.dims[0] && out.dims[1] == x.dims[1];
  for (int d = 0; fit && d < rank; ++d) fit = grid.dims[d + 1] == out.dims[d + 2];
  if (!fit) b.refuse("grid " + dims_text(grid) + " does not take " + dims_text(x) + " to " + dims_text(out) + ".");
  auto* job = b.make<GridJob>();
  const int taps = 1 << b.choice("mode", {"nearest", "bilinear", "bicubic"});
  job->border = static_cast<Border>(b.choice("padding_mode", {"zeros", "border", "reflection"}));
  job->corners = b.flag("align_corners");
  if (rank == 3 && taps == 4) b.refuse("bicubic is for images of two dims.");
  if (out.count() == 0) return out;
  job->rank = rank;
  job->batch = x.dims[0];
  job->channels = x.dims[1];
  std::copy(x.dims + 2, x.dims + x.rank, job->in);
  const int64_t images = job->batch * job->channels, plane = x.count() / images;
  if (plane < 1 || plane > INT32_MAX) b.refuse("an image of " + dims_text(x) + " is empty or too large.");
  job->places = out.count() / images;
  const Tensor image = b.contiguous(x), places = b.contiguous(grid);
  b.allocate(out);
  b.step(grid_sample_kernel(taps, x.dtype), job, out, {&image, &places},
         3 * static_cast<double>(out.count()) * std::pow(taps, rank));
  return out;
}

void take_two(Build& b, const char* name, int64_t least, int64_t* to) {
  const std::vector<int64_t> list = b.sizes(name);
  for (int64_t n : list)
    if (n < least || n > INT32_MAX) b.refuse(std::string(name) + " = " + std::to_string(n) + " is out of range.");
  if (list.size() != 2) b.refuse(std::string(name) + " has " + std::to_string(list.size()) + " numbers, expected 2.");
  std::copy(list.begin(), list.end(), to);
}

Tensor fold(Build& b) {
  const Tensor& x = b.in(0);
  Tensor out = b.out();
  auto* job = b.make<FoldJob>();
  take_two(b, "kernel", 1, job->kernel);
  take_two(b, "stride", 1, job->stride);
  take_two(b, "padding", 0, job->padding);
  take_two(b, "dilation", 1, job->dilation);
  bool fit = x.rank >= 2 && out.rank == x.rank + 1;
  for (int d = 0; fit && d + 2 < x.rank; ++d) fit = x.dims[d] == out.dims[d];
  __int128 blocks = 1;
  for (int d = 0; fit && d < 2; ++d) {
    job->size[d] = out.dims[x.rank - 1 + d];
    const __int128 count = stops({job->kernel[d], job->stride[d], job->padding[d], job->dilation[d]}, job->size[d]);
    fit = count > 0 && count < INT64_MAX;
    job->blocks[d] = static_cast<int64_t>(count);
    blocks *= count;
  }
  fit = fit && x.dims[x.rank - 1] == blocks && x.dims[x.rank - 2] % job->kernel[0] == 0 &&
        x.dims[x.rank - 2] / job->kernel[0] == static_cast<__int128>(out.dims[x.rank - 2]) * job->kernel[1];
  if (!fit) b.refuse("patches " + dims_text(x) + " are not those of " + dims_text(out) + ".");
  if (out.count() == 0) return out;
  job->planes = out.count() / (job->size[0] * job->size[1]);
  const Tensor patches = b.contiguous(x);
  b.allocate(out);
  b.step(fold_kernel(x.dtype), job, out, {&patches}, 2.0 * static_cast<double>(x.count()));
  return out;
}

// ---- distances

// Between the points of x and of y, both [.., points, size]; the loop of the job is over the batch.
Tensor distances(Build& b, DistanceJob* job, Tensor out, const Tensor& x, const Tensor& y, double results) {
  const double p = b.number("p");
  if (!(p >= 0)) b.refuse("p = " + std::to_string(p) + " is negative.");
  if (out.count() == 0) return out;
  job->rows = x.dims[x.rank - 2], job->columns = y.dims[y.rank - 2], job->size = x.dims[x.rank - 1];
  job->a_row = x.strides[x.rank - 2], job->a_step = x.strides[x.rank - 1];
  job->b_row = y.strides[y.rank - 2], job->b_step = y.strides[y.rank - 1];
  const bool power = p > 0 && p != 1 && p != 2 && !std::isinf(p);
  job->power = power_block(x.dtype);
  job->exponent.has[0] = job->root.has[0] = true;
  job->exponent.scalar[0].real = p;
  job->root.scalar[0].real = power ? 1 / p : 1;
  b.allocate(out);
  const double work = results * (static_cast<double>(job->size) + 1);
  b.step(distance_kernel(p, x.dtype), job, out, {&x, &y}, (power ? 30 : 2) * work);
  return out;
}

Tensor cdist(Build& b) {
  const Tensor &x = b.in(0), &y = b.in(1), &out = b.out();
  const int last = out.rank - 1;
  Tensor batch = out, from = x, to = y;
  bool fit = x.rank >= 2 && y.rank >= 2 && last >= 1 && x.dims[x.rank - 1] == y.dims[y.rank - 1] &&
             out.dims[last - 1] == x.dims[x.rank - 2] && out.dims[last] == y.dims[y.rank - 2];
  batch.rank -= 2, from.rank -= 2, to.rank -= 2;
  fit = fit && fits(from, batch) && fits(to, batch);
  if (!fit) b.refuse(dims_text(out) + " are not the distances of " + dims_text(x) + " and " + dims_text(y) + ".");
  auto* job = b.make<DistanceJob>();
  job->loop = broadcast(batch, {&from, &to});
  return distances(b, job, out, x, y, static_cast<double>(out.count()));
}

Tensor pdist(Build& b) {
  const Tensor &x = b.in(0), &out = b.out();
  const int64_t n = x.rank == 2 ? x.dims[0] : 0;
  if (x.rank != 2 || out.rank != 1 || out.dims[0] != static_cast<__int128>(n) * (n - 1) / 2)
    b.refuse(dims_text(out) + " are not the distances in " + dims_text(x) + ".");
  auto* job = b.make<DistanceJob>();
  job->pairs = true;
  job->loop.push(1, 0);
  return distances(b, job, out, x, x, static_cast<double>(out.count()));
}

// ---- bags

Tensor embedding_bag(Build& b) {
  const Tensor &table = b.in(0), &indices = b.in(1), &offsets = b.in(2);
  Tensor out = b.out();
  auto* job = b.make<BagJob>();
  job->bag = static_cast<Bag>(b.choice("mode", {"sum", "mean", "max"}));
  bool fit = table.rank == 2 && indices.rank == 1 && offsets.rank == 1 && out.rank == 2 &&
             out.dims[1] == table.dims[1] && out.dims[0] == offsets.dims[0] - (b.flag("include_last_offset") ? 1 : 0);
  if (!fit)
    b.refuse("offsets " + dims_text(offsets) + " do not take rows of " + dims_text(table) + " to " + dims_text(out) +
             ".");
  if (b.has(3) && (job->bag != Bag::sum || !same_dims(b.in(3), indices)))
    b.refuse("weights " + dims_text(b.in(3)) + " are not those of a sum of " + dims_text(indices) + ".");
  if (out.count() == 0) return out;
  const DType type = compute_type(table.dtype);
  job->bags = out.dims[0];
  job->offsets = offsets.dims[0];
  job->count = indices.dims[0];
  job->rows = table.dims[0];
  job->columns = table.dims[1];
  if (b.attr("padding_idx")) job->padding = b.size("padding_idx");
  job->write = converter(type, table.dtype);
  const Tensor rows = b.contiguous(table), places = b.contiguous(b.cast(indices, DType::i64)),
               starts = b.contiguous(b.cast(offsets, DType::i64)),
               factors = b.has(3) ? b.contiguous(b.cast(b.in(3), type)) : Tensor();
  b.allocate(out);
  b.step(bag_kernel(table.dtype), job, out, {&rows, &places, &starts, &factors},
         2.0 * static_cast<double>(job->count) * static_cast<double>(job->columns) + static_cast<double>(out.count()));
  return out;
}

constexpr Row kRows[] = {
    {"grid_sample", grid_sample},
    {"fold", fold},
    {"cdist", cdist},
    {"pdist", pdist},
    {"embedding_bag", embedding_bag},
};

}  // namespace

Table sample_rows() { return {kRows, std::size(kRows)}; }

}  // namespace keepdim::ggml
