// Image ops: convolution, pooling, padding, resampling, group and batch norm, grid_sample, fold.
#include "ggml/kernels/conv_pool.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>
#include <utility>

#include "ggml/ops/ops.h"

namespace keepdim::ggml {
namespace {

constexpr int64_t kMaxTaps = 16;  // maximum window size that is reduced tap by tap

// An attribute per spatial dim, padded to kSpatialDims with `fill`.
struct SpatialAttr {
  int64_t size[kSpatialDims];

  SpatialAttr(Build& b, const char* name, int rank, int64_t fill, int64_t min_value) {
    const std::vector<DimId>& list = b.dims(name);
    if (list.size() != static_cast<size_t>(rank))
      b.refuse(std::string(name) + " has " + std::to_string(list.size()) + " numbers for " + std::to_string(rank) +
               " spatial dims.");
    std::fill(size, size + kSpatialDims, fill);
    for (int i = 0; i < rank; ++i) {
      const int64_t n = size[kSpatialDims - rank + i] = b.size(list[i]);
      if (n < min_value || n > INT32_MAX) b.refuse(std::string(name) + " = " + std::to_string(n) + " is out of range.");
    }
  }
  int64_t operator[](int d) const { return size[d]; }
};

void copy_spatial_dims(const Tensor& x, int rank, int64_t* to) {
  std::fill(to, to + kSpatialDims, int64_t{1});
  std::copy(x.dims + x.rank - rank, x.dims + x.rank, to + kSpatialDims - rank);
}

// ---- convolutions

void check_conv(Build& b, int rank, int64_t groups, bool transposed) {
  const Tensor &x = b.in(0), &w = b.in(1), &out = b.out();
  if (rank < 1 || rank > kSpatialDims || w.rank != x.rank || out.rank != x.rank)
    b.refuse("weight " + dims_text(w) + " does not fit input " + dims_text(x) + ".");
  const int64_t from = w.dims[transposed ? 0 : 1], to = w.dims[transposed ? 1 : 0];
  const bool fit = groups > 0 && x.dims[1] % groups == 0 && x.dims[1] / (transposed ? 1 : groups) == from &&
                   out.dims[1] % groups == 0 && out.dims[1] / (transposed ? groups : 1) == to;
  if (!fit || x.dims[0] != out.dims[0])
    b.refuse("weight " + dims_text(w) + " in " + std::to_string(groups) + " groups does not take " + dims_text(x) + " to " +
             dims_text(out) + ".");
  if (b.has(2) && (b.in(2).rank != 1 || b.in(2).dims[0] != out.dims[1]))
    b.refuse("bias " + dims_text(b.in(2)) + " does not fit result " + dims_text(out) + ".");
}

// Tap with its range of outputs j for which the input j * stride + offset is in [0, size).
Tap make_tap(const Phase& phase, int64_t position, int64_t offset, int64_t size) {
  const int64_t begin = offset >= 0 ? 0 : (phase.stride - 1 - offset) / phase.stride;
  const int64_t end = offset >= size ? 0 : (size - 1 - offset) / phase.stride + 1;
  return {position, offset, std::min(begin, phase.count), std::min(end, phase.count)};
}

// Phases and taps of one spatial dim, in kernel order.
template <class Job>
void add_phases(Build& b, Job& job, int d, int64_t stride, int64_t padding, int64_t dilation, bool transposed) {
  static constexpr Tap kOneTap{0, 0, 0, 1};
  static constexpr Phase kOnePhase{0, 1, 1, 1, 1, &kOneTap};  // of a dim that the image does not have
  const int64_t out = job.out[d];
  if (job.in[d] == 1 && out == 1 && job.kernel[d] == 1 && padding == 0) {
    job.phases[d] = 1;
    job.phase[d] = &kOnePhase;
    return;
  }
  job.phases[d] = transposed ? std::clamp<int64_t>(out, 1, stride) : 1;
  auto* phases = b.table<Phase>(job.phases[d]);
  auto* taps = b.table<Tap>(job.kernel[d]);
  for (int64_t p = 0; p < job.phases[d]; ++p) {
    Phase& phase = phases[p];
    phase.first = p;
    phase.step = transposed ? stride : 1;
    phase.count = out > p ? (out - p - 1) / phase.step + 1 : 0;
    phase.stride = transposed ? 1 : stride;
    phase.tap = taps;
    for (int64_t k = 0; k < job.kernel[d]; ++k) {
      const int64_t at = transposed ? p + padding - k * dilation : k * dilation - padding;
      if (transposed && at % stride) continue;
      *taps++ = make_tap(phase, k, transposed ? at / stride : at, job.in[d]);
      ++phase.taps;
    }
  }
  job.phase[d] = phases;
}

// Attributes of a convolution.
struct ConvAttrs {
  int rank;
  int skipped = 0;  // last spatial dims that the arrays and the job do not have: skip_last_dims
  int64_t groups;
  bool transposed;
  SpatialAttr stride, padding, dilation;

  explicit ConvAttrs(Build& b)
      : rank(b.in(0).rank - 2),
        groups(b.size("groups")),
        transposed((check_conv(b, rank, groups, b.flag("transposed")), b.flag("transposed"))),
        stride(b, "stride", rank, 1, 1),
        padding(b, "padding", rank, 0, 0),
        dilation(b, "dilation", rank, 1, 1) {}
};

// A last dim of size 1, as of a 1-d convolution that is written as a 2-d one, would make runs of one pixel: the dims before
// it take its place.
template <class Job>
void skip_last_dims(Job& job, ConvAttrs& a) {
  constexpr int last = kSpatialDims - 1;
  const auto skip = [](int64_t* x, int64_t fill) {
    std::rotate(x, x + last, x + kSpatialDims);
    x[0] = fill;
  };
  while (a.skipped + 1 < a.rank && job.in[last] == 1 && job.out[last] == 1 && job.kernel[last] == 1 && a.padding[last] == 0) {
    for (int64_t* x : {job.in, job.out, job.kernel, a.stride.size, a.dilation.size}) skip(x, 1);
    skip(a.padding.size, 0);
    ++a.skipped;
  }
}

// Sizes, phases and taps of a convolution. With `flat`, a kernel of size 1 sees the images as one row of pixels, or each of them
// if channels are not the innermost dim.
template <class Job>
void set_geometry(Build& b, Job& job, ConvAttrs& a, bool flat = true) {
  job.batch = b.in(0).dims[0];
  job.groups = a.groups;
  copy_spatial_dims(b.in(0), a.rank, job.in);
  copy_spatial_dims(b.out(), a.rank, job.out);
  copy_spatial_dims(b.in(1), a.rank, job.kernel);
  skip_last_dims(job, a);
  flat = flat && !a.transposed;
  for (int d = 0; d < kSpatialDims; ++d) {
    if (!is_conv_size({job.kernel[d], a.stride[d], a.padding[d], a.dilation[d]}, job.in[d], job.out[d], a.transposed))
      b.refuse("result " + dims_text(b.out()) + " does not fit input " + dims_text(b.in(0)) + " and weight " +
               dims_text(b.in(1)) + ".");
    flat = flat && job.kernel[d] == 1 && a.stride[d] == 1 && a.padding[d] == 0;
  }
  if (flat) {
    int64_t pixels = job.in[0] * job.in[1] * job.in[2];
    if constexpr (std::is_same_v<Job, ChannelsLastConvJob>) pixels *= std::exchange(job.batch, 1);
    for (int d = 0; d < kSpatialDims; ++d) job.in[d] = job.out[d] = d + 1 < kSpatialDims ? 1 : pixels;
  }
  for (int d = 0; d < kSpatialDims; ++d) add_phases(b, job, d, a.stride[d], a.padding[d], a.dilation[d], a.transposed);
}

double conv_cost(Build& b) {
  const Tensor& w = b.in(1);
  return static_cast<double>(b.out().count()) * static_cast<double>(w.count()) /
         static_cast<double>(w.dims[b.flag("transposed") ? 1 : 0]);
}

// Few channels: taps along w are merged into one run of adjacent inputs. Columns of zeros around the image keep the run
// inside it. Returns the padded image; sizes and taps of the job follow it.
Tensor merge_columns(Build& b, ChannelsLastConvJob& job, const ConvAttrs& a, const Tensor& x) {
  constexpr int w = kSpatialDims - 1;
  const int last = a.rank + 1 - a.skipped;
  const int64_t width = (job.out[w] - 1) * a.stride[w] + job.kernel[w];  // what the outputs read
  const bool channels_last = is_channels_last(x);
  const Tensor image = channels_last ? x : b.contiguous(x);
  Tensor padded = image;
  padded.dims[last] = std::max(width, a.padding[w] + job.in[w]);
  const bool is_last = channels_last || job.channels == 1;  // one channel: both layouts are the same
  if (!is_last || padded.dims[last] != image.dims[last]) {
    set_channels_last(padded);
    b.allocate(padded);
    auto* pad = b.make<PadColumnsJob>();
    pad->batch = job.batch;
    pad->channels = job.channels;
    pad->lines = job.in[0] * job.in[1];
    pad->width = job.in[w];
    pad->left = a.padding[w];
    pad->padded = padded.dims[last];
    pad->channels_last = is_last;
    b.step(pad_columns_kernel(), pad, padded, {&image}, static_cast<double>(padded.count()));
  }
  job.merged = true;
  job.in[w] = padded.dims[last];
  auto* tap = b.table<Tap>(1);
  auto* phase = b.table<Phase>(1);
  tap->end = phase->count = job.out[w];
  phase->stride = a.stride[w];
  phase->taps = 1;
  phase->tap = tap;
  job.phase[w] = phase;
  return padded;
}

ConvWeight conv_weight(const int64_t* dims, int rank, int64_t groups, bool transposed) {
  ConvWeight w;
  w.groups = groups;
  w.taps = std::accumulate(dims + 2, dims + rank, int64_t{1}, std::multiplies<>());
  w.channels = transposed ? dims[0] / groups : dims[1];
  w.columns = transposed ? dims[1] : dims[0] / groups;
  w.channel = (transposed ? dims[1] : 1) * w.taps;
  w.column = (transposed ? 1 : dims[1]) * w.taps;
  w.group = w.channels * w.columns * w.taps;
  int64_t kernel[kSpatialDims] = {1, 1, 1};
  std::copy(dims + 2, dims + rank, kernel + kSpatialDims + 2 - rank);
  w.narrow = groups > 1 && !transposed && has_narrow_groups(w, kernel);
  return w;
}

// Common activations are computed in registers, others on the block of results that a thread has just written.
void set_activation(Build& b, ChannelsLastConvJob& job) {
  using Kind = ConvFunction::Kind;
  const Attr* attr = b.attr("activation");
  if (!attr) return;
  const auto& name = std::get<std::string>(*attr);
  if (name == "relu" || name == "relu6") {
    job.function.kind = Kind::clamp;
    if (name == "relu6") job.function.high = 6;
  } else if (name == "hardsigmoid" || name == "hardswish") {
    job.function.kind = Kind::hardsigmoid;
    job.function.gated = name == "hardswish";
  } else if (name == "sigmoid" || name == "silu") {
    job.function.kind = Kind::sigmoid;
    job.function.gated = name == "silu";
  } else {
    job.activation = activation_fn(name, DType::f32);
    if (!job.activation) b.refuse("activation '" + name + "' is not supported.");
  }
}

// Whether some tap of some output is outside of the image.
bool has_padding(const ChannelsLastConvJob& job) {
  for (int d = 0; d < kSpatialDims; ++d)
    for (int64_t p = 0; p < job.phases[d]; ++p)
      for (int64_t t = 0; t < job.phase[d][p].taps; ++t)
        if (const Tap& tap = job.phase[d][p].tap[t]; tap.begin > 0 || tap.end < job.phase[d][p].count) return true;
  return false;
}

// A convolution whose constant weight is packed: images are channels-last from here on.
Tensor conv_channels_last(Build& b, ConvAttrs& a) {
  constexpr int64_t few_channels = 16;  // so few that taps are merged into longer runs
  auto* job = b.make<ChannelsLastConvJob>();
  Tensor out = b.out();
  set_channels_last(out);
  job->channels = b.in(0).dims[1] / a.groups;
  job->columns = out.dims[1] / a.groups;
  job->packed = b.packed();
  const ConvWeight w = conv_weight(b.in(1).dims, b.in(1).rank, a.groups, a.transposed);
  set_geometry(b, *job, a, !w.narrow);
  set_activation(b, *job);
  const bool adjacent = !a.transposed && a.groups == 1 && a.dilation[kSpatialDims - 1] == 1;
  const bool merged = adjacent && job->channels < few_channels && job->kernel[2] > 1;
  const Tensor image = merged ? merge_columns(b, *job, a, b.in(0)) : b.channels_last(b.in(0));
  if (b.winograd() || has_padding(*job)) job->zeros = b.table<float>(job->channels * (job->merged ? job->kernel[2] : 1));
  const Tensor bias = b.has(2) ? b.contiguous(b.in(2)) : Tensor();
  const Tensor residual = b.has(3) ? b.channels_last(b.in(3)) : Tensor();
  b.allocate(out);
  Kernel kernel = w.narrow ? narrow_groups_kernel(job->channels) : conv_channels_last_kernel();
  if (b.winograd()) {
    std::copy(a.padding.size + 1, a.padding.size + kSpatialDims, job->padding);
    kernel = conv_winograd_kernel();
  }
  b.step(kernel, job, out, {&image, &bias, &residual}, conv_cost(b));
  return out;
}

// Any weight and dtype, on images as they are in torch.
Tensor conv_channels_first(Build& b, ConvAttrs& a) {
  const Tensor &x = b.in(0), &w = b.in(1);
  Tensor out = b.out();
  auto* job = b.make<ConvJob>();
  job->transposed = a.transposed;
  job->channels = x.count() ? x.dims[1] / a.groups : 0;  // an empty input contributes nothing
  job->rows = out.dims[1] / a.groups;
  set_geometry(b, *job, a);
  const Tensor image = b.contiguous(x), weight = b.contiguous(w), bias = b.has(2) ? b.contiguous(b.in(2)) : Tensor();
  const int64_t positions = job->channels ? job->kernel[0] * job->kernel[1] * job->kernel[2] * w.width() : 0;
  job->w_row = a.transposed ? positions : positions * job->channels;
  job->w_channel = a.transposed ? positions * job->rows : positions;
  job->w_group = job->channels * job->rows * positions;
  b.allocate(out);
  const bool direct = job->channels == 1 || x.dtype != DType::f32;
  b.step(direct ? direct_conv_kernel(x.dtype) : conv_kernel(), job, out, {&image, &weight, &bias}, conv_cost(b));
  if (b.has(3)) out = add_bias(b, out, b.in(3));
  if (const Attr* name = b.attr("activation")) {
    const ElementwiseFn fn = activation_fn(std::get<std::string>(*name), out.dtype);
    if (!fn) b.refuse("activation '" + std::get<std::string>(*name) + "' is not supported.");
    out = b.map(fn, out.dtype, out.dtype, out, {&out}, {}, 10);
  }
  return out;
}

Tensor conv(Build& b) {
  ConvAttrs attrs(b);
  if (b.has(3) && !same_dims(b.in(3), b.out()))
    b.refuse("residual " + dims_text(b.in(3)) + " is not " + dims_text(b.out()) + ".");
  if (b.out().count() == 0) return b.out();
  const bool packed = b.packed() && b.in(0).dtype == DType::f32 && b.in(0).count() > 0;
  return packed ? conv_channels_last(b, attrs) : conv_channels_first(b, attrs);
}

// ---- pooling

// A last dim of size 1 would make rows of one element: the dims before it take its place.
void skip_last_dims(PoolJob& job) {
  constexpr int last = kSpatialDims - 1;
  const Window* const one = job.window[last];
  while (job.skipped < last && job.in[last] == 1 && job.out[last] == 1 && one[0].weight == 1) {
    for (int d = last; d > 0; --d) {
      job.in[d] = job.in[d - 1], job.out[d] = job.out[d - 1], job.step[d] = job.step[d - 1];
      job.window[d] = job.window[d - 1];
    }
    job.in[0] = job.out[0] = job.step[0] = 1;
    job.window[0] = one;
    ++job.skipped;
  }
}

// `make(d, o)` returns the window of output o of spatial dim d.
template <class Make>
Tensor pool(Build& b, Kernel kernel, PoolJob* job, int rank, Make&& make) {
  const Tensor& x = b.in(0);
  Tensor out = b.out();
  bool fits = x.rank == out.rank && x.rank >= rank;
  for (int d = 0; fits && d < x.rank - rank; ++d) fits = x.dims[d] == out.dims[d];
  if (!fits) b.refuse("result " + dims_text(out) + " is not a pool of " + dims_text(x) + ".");
  if (out.count() == 0) return out;
  const bool pixels = x.rank == rank + 2 && is_channels_last(x) && x.dims[1] > 1 && out.dtype == x.dtype;
  const Tensor image = pixels ? x : b.contiguous(x);
  if (pixels) set_channels_last(out);
  b.allocate(out);  // before tables of its size, so that the memory limit is checked first
  if (pixels) job->channels = x.dims[1];
  copy_spatial_dims(x, rank, job->in);
  copy_spatial_dims(out, rank, job->out);
  double work = static_cast<double>(out.count());
  for (int d = 0; d < kSpatialDims; ++d) {
    auto* windows = b.table<Window>(job->out[d]);
    int64_t widest = 0;
    for (int64_t o = 0; o < job->out[d]; ++o) {
      windows[o] = make(d, o);
      if (!windows[o].valid(job->in[d], job->step[d]))
        b.refuse("window " + std::to_string(o) + " of result " + dims_text(out) + " is outside of " + dims_text(x) + ".");
      widest = std::max(widest, windows[o].end - windows[o].begin);
    }
    job->window[d] = windows;
    work *= static_cast<double>(widest);
  }
  if (!pixels) skip_last_dims(*job);
  job->planes = out.count() / (job->out[0] * job->out[1] * job->out[2] * job->channels);
  b.step(kernel, job, out, {&image}, 2 * work);
  return out;
}

// Describes the windows along the innermost dim by taps, if they are small enough.
void add_row_taps(Build& b, PoolJob& job, int64_t size, int64_t stride, int64_t padding) {
  constexpr int last = kSpatialDims - 1;
  if (size > kMaxTaps) return;
  job.row.stride = stride;
  job.row.count = job.out[last];
  job.row.taps = size;
  auto* taps = b.table<Tap>(size);
  for (int64_t k = 0; k < size; ++k) taps[k] = make_tap(job.row, k, k * job.step[last] - padding, job.in[last]);
  job.row.tap = taps;
}

// Pooling with a fixed window size and stride.
Tensor sliding_pool(Build& b, Kernel kernel) {
  const bool with_padding = b.flag("count_include_pad");
  const auto rank = static_cast<int>(b.sizes("kernel").size());
  if (rank < 1 || rank > kSpatialDims) b.refuse("has " + std::to_string(rank) + " spatial dims.");
  const SpatialAttr size(b, "kernel", rank, 1, 1), stride(b, "stride", rank, 1, 1), padding(b, "padding", rank, 0, 0);
  auto* job = b.make<PoolJob>();
  std::fill(job->step, job->step + kSpatialDims, int64_t{1});
  if (b.attr("dilation")) {
    const SpatialAttr dilation(b, "dilation", rank, 1, 1);
    std::copy(dilation.size, dilation.size + kSpatialDims, job->step);
  }
  if (b.attr("divisor")) job->divisor = b.size("divisor");
  const Tensor out = pool(b, kernel, job, rank, [&](int d, int64_t o) {
    return window_of({size[d], stride[d], padding[d], job->step[d]}, job->in[d], o, with_padding);
  });
  const int last = kSpatialDims - 1 - job->skipped;
  if (out.buffer >= 0) add_row_taps(b, *job, size[last], stride[last], padding[last]);
  return out;
}

// Adaptive pooling: windows that cover the whole input.
Tensor adaptive_pool(Build& b, Kernel kernel) {
  auto* job = b.make<PoolJob>();
  std::fill(job->step, job->step + kSpatialDims, int64_t{1});
  const int64_t rank = b.size("axes");
  if (rank < 1 || rank > kSpatialDims) b.refuse("has " + std::to_string(rank) + " spatial dims.");
  return pool(b, kernel, job, static_cast<int>(rank),
              [&](int d, int64_t o) { return adaptive_window(job->in[d], job->out[d], o); });
}

// ---- padding and resampling

// Longest range of the last dim that is contiguous in x.
Span longest_run(const RemapJob& job) {
  const int64_t* row = job.table[job.rank - 1];
  Span longest{0, 0};
  for (int64_t begin = 0, n = job.dims[job.rank - 1]; begin < n;) {
    int64_t end = begin + 1;
    while (end < n && row[begin] >= 0 && row[end] == row[end - 1] + job.width) ++end;
    if (row[begin] >= 0 && end - begin > longest.end - longest.begin) longest = {begin, end};
    begin = end;
  }
  return longest;
}

void set_remap_value(RemapJob& job, const Scalar& value, DType dtype) {
  const auto count = static_cast<int64_t>(sizeof(job.value)) / job.unit;  // an element may be several scalars
  if (value.is_integer)
    converter(DType::i64, dtype)(job.value, job.unit, &value.integer, 0, count);
  else
    converter(DType::f64, dtype)(job.value, job.unit, &value.real, 0, count);
}

// Reads x through an index table per dim, for the last `rank` dims; index -1 gives `value`.
template <class Position>
Tensor remap(Build& b, int rank, const Scalar& value, Position&& position) {
  const Tensor& x = b.in(0);
  Tensor out = b.out();
  bool fits = x.rank == out.rank && x.rank >= rank;
  for (int d = 0; fits && d < x.rank - rank; ++d) fits = x.dims[d] == out.dims[d];
  if (!fits) b.refuse("result " + dims_text(out) + " does not fit input " + dims_text(x) + ".");
  if (out.count() == 0) return out;
  const bool pixels = x.rank >= rank + 2 && is_channels_last(x);
  if (pixels) set_channels_last(out);
  b.allocate(out);  // before tables of its size, so that the limit is checked first
  auto* job = b.make<RemapJob>();
  int order[kMaxRank];  // of the dims in memory
  std::iota(order, order + x.rank, 0);
  if (pixels) std::rotate(order + 1, order + 2, order + x.rank);
  const auto changes = [&](int d) {
    bool same = x.dims[d] == out.dims[d];
    for (int64_t o = 0; same && o < out.dims[d] && d >= x.rank - rank; ++o) same = position(d, o) == o;
    return !same;
  };
  // Dims before the first remapped one are merged into one; those after the last become part of the element.
  int first = 0, last = x.rank - 1;
  while (first < x.rank && !changes(order[first])) ++first;
  while (last > first && !changes(order[last])) --last;
  if (first == x.rank) return x;
  job->width = job->unit = out.width();
  for (int i = last + 1; i < x.rank; ++i) job->width *= out.dims[order[i]];
  job->rank = last - first + 2;
  job->dims[0] = 1;
  for (int i = 0; i < first; ++i) job->dims[0] *= out.dims[order[i]];
  job->image = job->width;
  for (int i = last; i >= first; --i) {
    const int d = order[i];
    auto* table = b.table<int64_t>(out.dims[d]);
    for (int64_t o = 0; o < out.dims[d]; ++o) {
      const int64_t from = d < x.rank - rank ? o : position(d, o);
      if (from >= x.dims[d]) b.refuse("reads past the end of dim " + std::to_string(d) + " of " + dims_text(x) + ".");
      table[o] = from < 0 ? -1 : from * job->image;
    }
    job->dims[i - first + 1] = out.dims[d];
    job->table[i - first + 1] = table;
    job->image *= x.dims[d];
  }
  job->run = longest_run(*job);
  set_remap_value(*job, value, x.dtype);
  const Tensor source = pixels ? x : b.contiguous(x);
  b.step(remap_kernel(job->width), job, out, {&source}, static_cast<double>(out.count()));
  return out;
}

Tensor pad(Build& b) {
  const Tensor& x = b.in(0);
  const auto mode = static_cast<Padding>(b.choice("mode", {"constant", "reflect", "replicate", "circular"}));
  const std::vector<int64_t> before = b.sizes("before");
  const auto rank = static_cast<int>(before.size());
  if (rank < 1 || rank > x.rank)
    b.refuse("padding of " + std::to_string(rank) + " dims does not fit input " + dims_text(x) + ".");
  for (int64_t n : before)
    if (n < -INT32_MAX || n > INT32_MAX) b.refuse("before = " + std::to_string(n) + " is out of range.");
  return remap(b, rank, b.scalar("value"), [&](int d, int64_t o) {
    const int64_t from = padded_index(mode, x.dims[d], o - before[d - (x.rank - rank)]);
    if (from == kTooSmall) b.refuse("the padding of dim " + std::to_string(d) + " is too large for " + dims_text(x) + ".");
    return from;
  });
}

// Explicit scale factor of a spatial dim (0 is the outermost of the node); 0 if not given.
double explicit_scale(Build& b, int index) {
  static const char* names[] = {"scale_0", "scale_1", "scale_2"};
  return index >= 0 && b.attr(names[index]) ? b.number(names[index]) : 0;
}

int spatial_rank(Build& b) {
  const int rank = b.in(0).rank - 2;
  if (rank < 1 || rank > kSpatialDims) b.refuse("input " + dims_text(b.in(0)) + " is not a batch of images.");
  return rank;
}

template <class T>
Tensor nearest(Build& b) {
  const Tensor &x = b.in(0), &out = b.out();
  const int rank = spatial_rank(b);
  const bool exact = b.flag("exact");
  if (out.count() && x.count() == 0) b.refuse("input " + dims_text(x) + " is empty.");
  return remap(b, rank, {}, [&](int d, int64_t o) {
    return nearest_index(o, x.dims[d], resample_scale<T>(explicit_scale(b, d - 2), x.dims[d], out.dims[d]), exact);
  });
}

Tensor resample(Build& b) {
  const Tensor& x = b.in(0);
  Tensor out = b.out();
  const int rank = spatial_rank(b);
  const int taps = b.choice("mode", {"linear", "cubic"}) ? 4 : 2;
  if (out.rank != x.rank || out.dims[0] != x.dims[0] || out.dims[1] != x.dims[1])
    b.refuse("result " + dims_text(out) + " does not fit input " + dims_text(x) + ".");
  if (out.count() == 0) return out;
  if (x.count() == 0) b.refuse("input " + dims_text(x) + " is empty.");
  b.allocate(out);  // before tables of its size, so that the memory limit is checked first
  auto* job = b.make<ResampleJob>();
  copy_spatial_dims(x, rank, job->in);
  copy_spatial_dims(out, rank, job->out);
  job->planes = x.dims[0] * x.dims[1];
  double work = 2 * static_cast<double>(out.count());
  for (int d = 0; d < kSpatialDims; ++d) {
    auto* samples = b.table<Sample>(job->out[d]);
    job->taps[d] = d < kSpatialDims - rank ? 1 : taps;
    if (job->taps[d] == 1) {
      samples[0] = {{0}, {1}};
    } else {
      const ResampleDim dim{job->in[d], job->out[d], taps, b.flag("align_corners"), explicit_scale(b, d - (kSpatialDims - rank))};
      for (int64_t o = 0; o < dim.out; ++o) samples[o] = dim.at(o);
    }
    job->sample[d] = samples;
    work *= static_cast<double>(job->taps[d]);
  }
  const Tensor image = b.contiguous(x);
  b.step(resample_kernel(), job, out, {&image}, work);
  return out;
}

// ---- group and batch norm

// In two steps, so that all threads work on one image: statistics of blocks of pixels, then the result.
Tensor group_norm_channels_last(Build& b, const Tensor& x, int64_t groups, const Tensor* params) {
  Tensor out = b.out(), statistics;
  set_channels_last(out);
  const int64_t pixels = x.count() / (x.dims[0] * x.dims[1]);
  statistics.dtype = DType::f32;
  statistics.rank = 1;
  statistics.dims[0] = x.dims[0] * block_count(pixels) * 2 * x.dims[1];
  statistics.pack();
  b.allocate(statistics);
  b.allocate(out);
  for (int step = 0; step < 2; ++step) {
    auto* job = b.make<ChannelNormJob>();
    job->rows = x.dims[0];
    job->groups = groups;
    job->channels = x.dims[1];
    job->size = pixels;
    job->eps = b.number("eps");
    if (step == 0)
      b.step(block_statistics_kernel(), job, statistics, {&x}, 4.0 * static_cast<double>(x.count()));
    else
      b.step(normalise_pixels_kernel(), job, out, {&x, params, params + 1, &statistics}, 2.0 * static_cast<double>(x.count()));
  }
  return out;
}

Tensor channel_norm(Build& b, int64_t groups, bool given_stats) {
  const Tensor x = check_same_shape(b);
  if (x.rank < 2 || groups < 1 || x.dims[1] % groups)
    b.refuse("the channels of " + dims_text(x) + " are not divisible into " + std::to_string(groups) + " groups.");
  for (size_t i = 1; i < b.ins(); ++i)
    if (b.has(i) && (b.in(i).rank != 1 || b.in(i).dims[0] != x.dims[1]))
      b.refuse("operand " + dims_text(b.in(i)) + " does not fit the channels of " + dims_text(x) + ".");
  Tensor out = b.out();
  if (out.count() == 0) return out;
  Tensor params[4];
  for (size_t i = 1; i < b.ins(); ++i)
    if (b.has(i)) params[i - 1] = b.contiguous(b.in(i));
  if (!given_stats && x.dtype == DType::f32 && is_channels_last(x)) return group_norm_channels_last(b, x, groups, params);
  const Tensor image = b.contiguous(x);
  auto* job = b.make<ChannelNormJob>();
  job->groups = groups;
  job->rows = x.dims[0] * groups;
  job->channels = x.dims[1] / groups;
  job->size = x.count() / (x.dims[0] * x.dims[1]);
  job->eps = b.number("eps");
  b.allocate(out);
  b.step(channel_norm_kernel(x.dtype), job, out, {&image, params, params + 1, params + 2, params + 3},
         (given_stats ? 2.0 : 6.0) * static_cast<double>(out.count()), true);
  return out;
}

// ---- grid_sample and fold

Tensor grid_sample(Build& b) {
  const Tensor &x = b.in(0), &grid = b.in(1);
  Tensor out = b.out();
  const int rank = x.rank - 2;
  bool fit = (rank == 2 || rank == 3) && grid.rank == x.rank && out.rank == x.rank && grid.dims[rank + 1] == rank &&
             grid.dims[0] == x.dims[0] && out.dims[0] == x.dims[0] && out.dims[1] == x.dims[1];
  for (int d = 0; fit && d < rank; ++d) fit = grid.dims[d + 1] == out.dims[d + 2];
  if (!fit) b.refuse("grid " + dims_text(grid) + " does not take " + dims_text(x) + " to " + dims_text(out) + ".");
  auto* job = b.make<GridSampleJob>();
  const int taps = 1 << b.choice("mode", {"nearest", "bilinear", "bicubic"});
  job->padding_mode = static_cast<GridPadding>(b.choice("padding_mode", {"zeros", "border", "reflection"}));
  job->align_corners = b.flag("align_corners");
  if (rank == 3 && taps == 4) b.refuse("bicubic needs images of two dims.");
  if (out.count() == 0) return out;
  job->rank = rank;
  job->batch = x.dims[0];
  job->channels = x.dims[1];
  std::copy(x.dims + 2, x.dims + x.rank, job->in);
  const int64_t images = job->batch * job->channels, plane = x.count() / images;
  if (plane < 1 || plane > INT32_MAX) b.refuse("an image of " + dims_text(x) + " is empty or too large.");
  job->points = out.count() / images;
  const Tensor image = b.contiguous(x), points = b.contiguous(grid);
  b.allocate(out);
  b.step(grid_sample_kernel(taps, x.dtype), job, out, {&image, &points},
         3 * static_cast<double>(out.count()) * std::pow(taps, rank));
  return out;
}

void copy_pair(Build& b, const char* name, int64_t min_value, int64_t* to) {
  const std::vector<int64_t> list = b.sizes(name);
  for (int64_t n : list)
    if (n < min_value || n > INT32_MAX) b.refuse(std::string(name) + " = " + std::to_string(n) + " is out of range.");
  if (list.size() != 2) b.refuse(std::string(name) + " has " + std::to_string(list.size()) + " numbers, expected 2.");
  std::copy(list.begin(), list.end(), to);
}

Tensor fold(Build& b) {
  const Tensor& x = b.in(0);
  Tensor out = b.out();
  auto* job = b.make<FoldJob>();
  copy_pair(b, "kernel", 1, job->kernel);
  copy_pair(b, "stride", 1, job->stride);
  copy_pair(b, "padding", 0, job->padding);
  copy_pair(b, "dilation", 1, job->dilation);
  bool fit = x.rank >= 2 && out.rank == x.rank + 1;
  for (int d = 0; fit && d + 2 < x.rank; ++d) fit = x.dims[d] == out.dims[d];
  __int128 blocks = 1;
  for (int d = 0; fit && d < 2; ++d) {
    job->size[d] = out.dims[x.rank - 1 + d];
    const __int128 count = window_count({job->kernel[d], job->stride[d], job->padding[d], job->dilation[d]}, job->size[d]);
    fit = count > 0 && count < INT64_MAX;
    job->blocks[d] = static_cast<int64_t>(count);
    blocks *= count;
  }
  fit = fit && x.dims[x.rank - 1] == blocks && x.dims[x.rank - 2] % job->kernel[0] == 0 &&
        x.dims[x.rank - 2] / job->kernel[0] == static_cast<__int128>(out.dims[x.rank - 2]) * job->kernel[1];
  if (!fit) b.refuse("patches " + dims_text(x) + " do not fold to " + dims_text(out) + ".");
  if (out.count() == 0) return out;
  job->planes = out.count() / (job->size[0] * job->size[1]);
  const Tensor patches = b.contiguous(x);
  b.allocate(out);
  b.step(fold_kernel(x.dtype), job, out, {&patches}, 2.0 * static_cast<double>(x.count()));
  return out;
}

constexpr OpBuilder kOps[] = {
    {"conv", conv},
    {"max_pool", [](Build& b) { return sliding_pool(b, max_pool_kernel(b.in(0).dtype)); }},
    {"max_pool_index", [](Build& b) { return sliding_pool(b, max_pool_index_kernel(b.in(0).dtype)); }},
    {"avg_pool", [](Build& b) { return sliding_pool(b, avg_pool_kernel(b.in(0).dtype)); }},
    {"adaptive_max_pool", [](Build& b) { return adaptive_pool(b, max_pool_kernel(b.in(0).dtype)); }},
    {"adaptive_max_pool_index", [](Build& b) { return adaptive_pool(b, max_pool_index_kernel(b.in(0).dtype)); }},
    {"adaptive_avg_pool", [](Build& b) { return adaptive_pool(b, avg_pool_kernel(b.in(0).dtype)); }},
    {"pad", pad},
    {"nearest", [](Build& b) { return b.in(0).dtype == DType::f64 ? nearest<double>(b) : nearest<float>(b); }},
    {"resample", resample},
    {"group_norm", [](Build& b) { return channel_norm(b, b.size("groups"), false); }},
    {"batch_norm", [](Build& b) { return channel_norm(b, 1, true); }},
    {"grid_sample", grid_sample},
    {"fold", fold},
};

}  // namespace

Weight conv_weight_of(const Program& program, const Node& node) {
  Weight w;
  const Value& value = program.values[node.ins[1]];
  const DimTable& dims = program.contract.dims;
  const DimId groups = std::get<DimId>(node.attrs.at("groups"));
  const size_t rank = value.dims.size();
  if (value.kind != Value::Kind::constant || compute_type(value.dtype) != DType::f32 || is_quantised(value.dtype)) return w;
  if (rank < 3 || rank > kSpatialDims + 2 || !dims.is_constant(groups)) return w;
  int64_t size[kSpatialDims + 2];
  for (size_t d = 0; d < rank; ++d) {
    if (!dims.is_constant(value.dims[d]) || dims.node(value.dims[d]).value < 1) return w;
    size[d] = dims.node(value.dims[d]).value;
  }
  const bool transposed = std::get<bool>(node.attrs.at("transposed"));
  if (dims.node(groups).value < 1 || size[0] % dims.node(groups).value) return w;
  ConvWeight c = conv_weight(size, static_cast<int>(rank), dims.node(groups).value, transposed);
  if (c.groups > 1 && !c.narrow && c.columns < 16) return w;  // most lanes would be idle
  const auto all_ones = [&](const char* attr) {
    const auto& list = std::get<std::vector<DimId>>(node.attrs.at(attr));
    return std::all_of(list.begin(), list.end(), [&](DimId d) { return dims.is_constant(d) && dims.node(d).value == 1; });
  };
  const bool side3 = rank == 4 && size[2] == 3 && size[3] == 3;
  c.winograd = side3 && !transposed && all_ones("stride") && all_ones("dilation") && fits_winograd(c);
  w.value = node.ins[1];
  w.k = size[1] * c.taps;
  w.n = size[0];
  w.step = c.winograd ? -3 : transposed ? -2 : -1;  // one for each layout, unlike any product's
  w.conv = c;
  return w;
}

OpTable conv_pool_ops() { return {kOps, std::size(kOps)}; }

}  // namespace keepdim::ggml
