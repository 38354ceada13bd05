// Rows of ops over images: convolutions, pools, padding, resampling, norms of channels.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "ops.h"
#include "window.h"

namespace keepdim::ggml {
namespace {

constexpr int64_t kMaxTaps = 16;  // of windows that are added up tap by tap

// The spatial dims of a node as kSpace of them: `fill` for those that it does not have.
struct Space {
  int64_t size[kSpace];

  Space(Build& b, const char* name, int rank, int64_t fill, int64_t least) {
    const std::vector<int64_t> list = b.sizes(name);
    if (list.size() != static_cast<size_t>(rank))
      b.refuse(std::string(name) + " has " + std::to_string(list.size()) + " numbers for " + std::to_string(rank) +
               " spatial dims.");
    std::fill(size, size + kSpace, fill);
    std::copy(list.begin(), list.end(), size + kSpace - rank);
    for (int64_t n : list)
      if (n < least || n > INT32_MAX) b.refuse(std::string(name) + " = " + std::to_string(n) + " is out of range.");
  }
  int64_t operator[](int d) const { return size[d]; }
};

void take_space(const Tensor& x, int rank, int64_t* to) {
  std::fill(to, to + kSpace, int64_t{1});
  std::copy(x.dims + x.rank - rank, x.dims + x.rank, to + kSpace - rank);
}

// ---- convolutions

void check_conv(Build& b, int rank, int64_t groups, bool transposed) {
  const Tensor &x = b.in(0), &w = b.in(1), &out = b.out();
  if (rank < 1 || rank > kSpace || w.rank != x.rank || out.rank != x.rank)
    b.refuse("weight " + dims_text(w) + " does not fit input " + dims_text(x) + ".");
  const int64_t from = w.dims[transposed ? 0 : 1], to = w.dims[transposed ? 1 : 0];
  const bool fit = groups > 0 && x.dims[1] % groups == 0 && x.dims[1] / (transposed ? 1 : groups) == from &&
                   out.dims[1] % groups == 0 && out.dims[1] / (transposed ? groups : 1) == to;
  if (!fit || x.dims[0] != out.dims[0])
    b.refuse("weight " + dims_text(w) + " in " + std::to_string(groups) + " groups does not take " + dims_text(x) +
             " to " + dims_text(out) + ".");
  if (b.has(2) && (b.in(2).rank != 1 || b.in(2).dims[0] != out.dims[1]))
    b.refuse("bias " + dims_text(b.in(2)) + " does not fit result " + dims_text(out) + ".");
}

// With the outputs for which the input at j * stride + offset is one of `size`.
Tap tap_of(const Phase& phase, int64_t position, int64_t offset, int64_t size) {
  const int64_t begin = offset >= 0 ? 0 : (phase.stride - 1 - offset) / phase.stride;
  const int64_t end = offset >= size ? 0 : (size - 1 - offset) / phase.stride + 1;
  return {position, offset, std::min(begin, phase.count), std::min(end, phase.count)};
}

// The taps of all phases of one spatial dim, in the order of the kernel.
void add_phases(Build& b, ConvJob& job, int d, int64_t stride, int64_t padding, int64_t dilation, bool transposed) {
  const int64_t out = job.out[d];
  if (!convolves({job.kernel[d], stride, padding, dilation}, job.in[d], out, transposed))
    b.refuse("result " + dims_text(b.out()) + " is not that of " + dims_text(b.in(0)) + " and weight " +
             dims_text(b.in(1)) + ".");
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
      *taps++ = tap_of(phase, k, transposed ? at / stride : at, job.in[d]);
      ++phase.taps;
    }
  }
  job.phase[d] = phases;
}

Tensor conv(Build& b) {
  const Tensor &x = b.in(0), &w = b.in(1);
  Tensor out = b.out();
  const int rank = x.rank - 2;
  const int64_t groups = b.size("groups");
  const bool transposed = b.flag("transposed");
  check_conv(b, rank, groups, transposed);
  const Space stride(b, "stride", rank, 1, 1), padding(b, "padding", rank, 0, 0), dilation(b, "dilation", rank, 1, 1);
  auto* job = b.make<ConvJob>();
  job->batch = x.dims[0];
  job->groups = groups;
  job->transposed = transposed;
  job->channels = x.count() ? x.dims[1] / groups : 0;  // of an empty image nothing is read
  job->rows = out.dims[1] / groups;
  take_space(x, rank, job->in);
  take_space(out, rank, job->out);
  take_space(w, rank, job->kernel);
  bool pointwise = !transposed;  // its images are rows
  for (int d = 0; d < kSpace; ++d) {
    add_phases(b, *job, d, stride[d], padding[d], dilation[d], transposed);
    pointwise &= job->kernel[d] == 1 && stride[d] == 1 && padding[d] == 0;
  }
  if (out.count() == 0) return out;
  if (pointwise) {
    const int64_t pixels = job->in[0] * job->in[1] * job->in[2];
    for (int d = 0; d < kSpace; ++d) {
      job->in[d] = job->out[d] = d + 1 < kSpace ? 1 : pixels;
      add_phases(b, *job, d, 1, 0, 1, false);
    }
  }
  const Tensor image = b.contiguous(x), weight = b.contiguous(w), bias = b.has(2) ? b.contiguous(b.in(2)) : Tensor();
  const int64_t positions = job->channels ? job->kernel[0] * job->kernel[1] * job->kernel[2] * w.width() : 0;
  job->w_row = transposed ? positions : positions * job->channels;
  job->w_channel = transposed ? positions * job->rows : positions;
  job->w_group = job->channels * job->rows * positions;
  b.allocate(out);
  const bool direct = job->channels == 1 || x.dtype != DType::f32;
  const double products = static_cast<double>(out.count()) * static_cast<double>(job->channels) *
                          static_cast<double>(positions / w.width());
  b.step(direct ? direct_conv_kernel(x.dtype) : conv_kernel(), job, out, {&image, &weight, &bias}, products);
  return out;
}

// ---- pools

// `make` gives the window of one output of one spatial dim.
template <class Make>
Tensor pool(Build& b, Kernel kernel, PoolJob* job, int rank, Make&& make) {
  const Tensor& x = b.in(0);
  Tensor out = b.out();
  bool fits = x.rank == out.rank && x.rank >= rank;
  for (int d = 0; fits && d < x.rank - rank; ++d) fits = x.dims[d] == out.dims[d];
  if (!fits) b.refuse("result " + dims_text(out) + " is no pool of " + dims_text(x) + ".");
  if (out.count() == 0) return out;
  const Tensor image = b.contiguous(x);
  b.allocate(out);  // before anything as long as it: it may be too large
  take_space(x, rank, job->in);
  take_space(out, rank, job->out);
  double work = static_cast<double>(out.count());
  for (int d = 0; d < kSpace; ++d) {
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
  job->planes = out.count() / (job->out[0] * job->out[1] * job->out[2]);
  b.step(kernel, job, out, {&image}, 2 * work);
  return out;
}

// Windows along the innermost dim as taps, where they are few enough for it.
void add_row(Build& b, PoolJob& job, int64_t size, int64_t stride, int64_t padding) {
  constexpr int last = kSpace - 1;
  if (size > kMaxTaps) return;
  job.row.stride = stride;
  job.row.count = job.out[last];
  job.row.taps = size;
  auto* taps = b.table<Tap>(size);
  for (int64_t k = 0; k < size; ++k) taps[k] = tap_of(job.row, k, k * job.step[last] - padding, job.in[last]);
  job.row.tap = taps;
}

// Windows of one size at equal distances.
Tensor sliding_pool(Build& b, Kernel kernel) {
  const bool with_padding = b.flag("count_include_pad");
  const auto rank = static_cast<int>(b.sizes("kernel").size());
  if (rank < 1 || rank > kSpace) b.refuse("has " + std::to_string(rank) + " spatial dims.");
  const Space size(b, "kernel", rank, 1, 1), stride(b, "stride", rank, 1, 1), padding(b, "padding", rank, 0, 0);
  auto* job = b.make<PoolJob>();
  std::fill(job->step, job->step + kSpace, int64_t{1});
  if (b.attr("dilation")) {
    const Space dilation(b, "dilation", rank, 1, 1);
    std::copy(dilation.size, dilation.size + kSpace, job->step);
  }
  if (b.attr("divisor")) job->divisor = b.size("divisor");
  const Tensor out = pool(b, kernel, job, rank, [&](int d, int64_t o) {
    return window_of({size[d], stride[d], padding[d], job->step[d]}, job->in[d], o, with_padding);
  });
  if (out.buffer >= 0) add_row(b, *job, size[kSpace - 1], stride[kSpace - 1], padding[kSpace - 1]);
  return out;
}

// Windows that share out the whole input.
Tensor adaptive_pool(Build& b, Kernel kernel) {
  auto* job = b.make<PoolJob>();
  std::fill(job->step, job->step + kSpace, int64_t{1});
  const int64_t rank = b.size("axes");
  if (rank < 1 || rank > kSpace) b.refuse("has " + std::to_string(rank) + " spatial dims.");
  return pool(b, kernel, job, static_cast<int>(rank),
              [&](int d, int64_t o) { return share_of(job->in[d], job->out[d], o); });
}

// ---- padding and resampling

// x read through a table of positions for each of its last dims; -1 is `value`, of the dtype of x.
template <class Position>
Tensor remap(Build& b, int rank, const Scalar& value, Position&& position) {
  const Tensor& x = b.in(0);
  Tensor out = b.out();
  bool fits = x.rank == out.rank && x.rank >= rank;
  for (int d = 0; fits && d < x.rank - rank; ++d) fits = x.dims[d] == out.dims[d];
  if (!fits) b.refuse("result " + dims_text(out) + " is not made of " + dims_text(x) + ".");
  if (out.count() == 0) return out;
  b.allocate(out);  // before anything as long as it: it may be too large
  auto* job = b.make<RemapJob>();
  // Dims before the first that changes are one, and so are those after the last, with the element.
  const auto changes = [&](int d) {
    bool same = x.dims[d] == out.dims[d];
    for (int64_t o = 0; same && o < out.dims[d] && d >= x.rank - rank; ++o) same = position(d, o) == o;
    return !same;
  };
  int first = 0, last = x.rank - 1;
  while (first < x.rank && !changes(first)) ++first;
  while (last > first && !changes(last)) --last;
  if (first == x.rank) return x;
  job->width = job->unit = out.width();
  for (int d = last + 1; d < x.rank; ++d) job->width *= out.dims[d];
  job->rank = last - first + 2;
  job->dims[0] = 1;
  for (int d = 0; d < first; ++d) job->dims[0] *= out.dims[d];
  job->image = job->width;
  for (int d = last; d >= first; --d) {
    auto* table = b.table<int64_t>(out.dims[d]);
    for (int64_t o = 0; o < out.dims[d]; ++o) {
      const int64_t from = d < x.rank - rank ? o : position(d, o);
      if (from >= x.dims[d]) b.refuse("reads behind dim " + std::to_string(d) + " of " + dims_text(x) + ".");
      table[o] = from < 0 ? -1 : from * job->image;
    }
    job->dims[d - first + 1] = out.dims[d];
    job->table[d - first + 1] = table;
    job->image *= x.dims[d];
  }
  // The longest run of neighbours.
  const int64_t* row = job->table[job->rank - 1];
  for (int64_t begin = 0, n = job->dims[job->rank - 1]; begin < n;) {
    int64_t end = begin + 1;
    while (end < n && row[begin] >= 0 && row[end] == row[end - 1] + job->width) ++end;
    if (row[begin] >= 0 && end - begin > job->run.end - job->run.begin) job->run = {begin, end};
    begin = end;
  }
  const auto filled = static_cast<int64_t>(sizeof(job->value)) / job->unit;  // an element may be several numbers
  if (value.is_whole) converter(DType::i64, x.dtype)(job->value, job->unit, &value.whole, 0, filled);
  else converter(DType::f64, x.dtype)(job->value, job->unit, &value.real, 0, filled);
  const Tensor source = b.contiguous(x);
  b.step(remap_kernel(job->width), job, out, {&source}, static_cast<double>(out.count()));
  return out;
}

Tensor pad(Build& b) {
  const Tensor& x = b.in(0);
  const auto mode = static_cast<Padding>(b.choice("mode", {"constant", "reflect", "replicate", "circular"}));
  const std::vector<int64_t> before = b.sizes("before");
  const auto rank = static_cast<int>(before.size());
  if (rank < 1 || rank > x.rank) b.refuse(std::to_string(rank) + " dims are padded of " + dims_text(x) + ".");
  for (int64_t n : before)
    if (n < -INT32_MAX || n > INT32_MAX) b.refuse("before = " + std::to_string(n) + " is out of range.");
  return remap(b, rank, b.scalar("value"), [&](int d, int64_t o) {
    const int64_t from = padded(mode, x.dims[d], o - before[d - (x.rank - rank)]);
    if (from == kTooFar) b.refuse("the padding of dim " + std::to_string(d) + " is too large for " + dims_text(x) + ".");
    return from;
  });
}

// Outputs per input of a spatial dim, counted from the outermost that the node has; 0 where nobody said.
double given_scale(Build& b, int index) {
  static const char* names[] = {"scale_0", "scale_1", "scale_2"};
  return index >= 0 && b.attr(names[index]) ? b.number(names[index]) : 0;
}

int space_rank(Build& b) {
  const int rank = b.in(0).rank - 2;
  if (rank < 1 || rank > kSpace) b.refuse("input " + dims_text(b.in(0)) + " is no batch of images.");
  return rank;
}

template <class T>
Tensor nearest(Build& b) {
  const Tensor &x = b.in(0), &out = b.out();
  const int rank = space_rank(b);
  const bool exact = b.flag("exact");
  if (out.count() && x.count() == 0) b.refuse("input " + dims_text(x) + " is empty.");
  return remap(b, rank, {}, [&](int d, int64_t o) {
    return nearest_to(o, x.dims[d], scale_of<T>(given_scale(b, d - 2), x.dims[d], out.dims[d]), exact);
  });
}

Tensor resample(Build& b) {
  const Tensor& x = b.in(0);
  Tensor out = b.out();
  const int rank = space_rank(b);
  const int taps = b.choice("mode", {"linear", "cubic"}) ? 4 : 2;
  if (out.rank != x.rank || out.dims[0] != x.dims[0] || out.dims[1] != x.dims[1])
    b.refuse("result " + dims_text(out) + " is not made of " + dims_text(x) + ".");
  if (out.count() == 0) return out;
  if (x.count() == 0) b.refuse("input " + dims_text(x) + " is empty.");
  b.allocate(out);  // before anything as long as it: it may be too large
  auto* job = b.make<ResampleJob>();
  take_space(x, rank, job->in);
  take_space(out, rank, job->out);
  job->planes = x.dims[0] * x.dims[1];
  double work = 2 * static_cast<double>(out.count());
  for (int d = 0; d < kSpace; ++d) {
    auto* samples = b.table<Sample>(job->out[d]);
    job->taps[d] = d < kSpace - rank ? 1 : taps;
    if (job->taps[d] == 1) {
      samples[0] = {{0}, {1}};
    } else {
      const Resampled dim{job->in[d], job->out[d], taps, b.flag("align_corners"), given_scale(b, d - (kSpace - rank))};
      for (int64_t o = 0; o < dim.out; ++o) samples[o] = dim.at(o);
    }
    job->sample[d] = samples;
    work *= static_cast<double>(job->taps[d]);
  }
  const Tensor image = b.contiguous(x);
  b.step(resample_kernel(), job, out, {&image}, work);
  return out;
}

// ---- norms of channels

Tensor channel_norm(Build& b, int64_t groups, bool given) {
  const Tensor x = same_shape(b);
  if (x.rank < 2 || groups < 1 || x.dims[1] % groups)
    b.refuse("the channels of " + dims_text(x) + " are no " + std::to_string(groups) + " groups.");
  for (size_t i = 1; i < b.ins(); ++i)
    if (b.has(i) && (b.in(i).rank != 1 || b.in(i).dims[0] != x.dims[1]))
      b.refuse("operand " + dims_text(b.in(i)) + " does not fit the channels of " + dims_text(x) + ".");
  Tensor out = b.out();
  if (out.count() == 0) return out;
  Tensor numbers[4];
  for (size_t i = 1; i < b.ins(); ++i)
    if (b.has(i)) numbers[i - 1] = b.contiguous(b.in(i));
  const Tensor image = b.contiguous(x);
  auto* job = b.make<ChannelJob>();
  job->groups = groups;
  job->rows = x.dims[0] * groups;
  job->channels = x.dims[1] / groups;
  job->size = x.count() / (x.dims[0] * x.dims[1]);
  job->eps = b.number("eps");
  b.allocate(out);
  b.step(channel_norm_kernel(x.dtype), job, out, {&image, numbers, numbers + 1, numbers + 2, numbers + 3},
         (given ? 2.0 : 6.0) * static_cast<double>(out.count()), true);
  return out;
}

constexpr Row kRows[] = {
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
};

}  // namespace

Table window_rows() { return {kRows, std::size(kRows)}; }

}  // namespace keepdim::ggml
