// Convolutions of channels-last images. A general convolution is an implicit matrix product: rows are output pixels, whose
// inputs are read in place through one pointer per tap, columns are output channels of the packed weight. Depthwise convolutions
// and other narrow groups are vectorised along the channels of all groups.
#include "ggml/kernels/conv_epilogue.h"

namespace keepdim::ggml {
namespace {

constexpr int64_t kChunk = 512;          // products summed in registers before they are added to the result
constexpr int64_t kFewPixels = 4 * kMR;  // of a block whose weights stay in the L2 cache
constexpr int64_t kManyPixels = 192;     // of a block whose weights are streamed: the more, the less often
constexpr int64_t kL2Floats = 128 * 1024;

// One phase of each spatial dim: its output pixels as one list, its taps as another.
struct PixelGrid {
  const Phase* dim[kSpatialDims];
  int64_t pixels = 1;

  PixelGrid(const ChannelsLastConvJob& job, int64_t phase) {
    for (int d = kSpatialDims - 1; d >= 0; --d) {
      dim[d] = job.phase[d] + phase % job.phases[d];
      phase /= job.phases[d];
      pixels *= dim[d]->count;
    }
  }
};

// Output pixels [begin, end) of one row of a grid.
template <class Body>
void for_each_row_part(const PixelGrid& grid, Span pixels, Body&& body) {
  const int64_t width = grid.dim[2]->count, height = grid.dim[1]->count;
  for (int64_t p = pixels.begin; p < pixels.end;) {
    const int64_t column = p % width, row = p / width;
    const int64_t count = std::min(width - column, pixels.end - p);
    body(p - pixels.begin, row / height, row % height, Span{column, column + count});
    p += count;
  }
}

// Input addresses of a block of output pixels: [tap, pixel]. Outside of the image they point to zeros.
class InputPointers {
 public:
  InputPointers(const ChannelsLastConvJob& job, const PixelGrid& grid) : job_(job), grid_(grid) {}

  int64_t taps() const { return grid_.dim[0]->taps * grid_.dim[1]->taps * (job_.merged ? 1 : grid_.dim[2]->taps); }

  void fill(const float* x, Span pixels, const float** to, int64_t pitch) const {
    int64_t t = 0;
    for (int64_t a = 0; a < grid_.dim[0]->taps; ++a)
      for (int64_t b = 0; b < grid_.dim[1]->taps; ++b)
        for (int64_t c = 0; c < (job_.merged ? 1 : grid_.dim[2]->taps); ++c)
          fill_tap(x, grid_.dim[0]->tap[a], grid_.dim[1]->tap[b], grid_.dim[2]->tap[c], pixels, to + pitch * t++);
  }

  // Offset of a tap's weights in a panel.
  int64_t weight_offset(int64_t t) const {
    const int64_t columns = job_.merged ? 1 : grid_.dim[2]->taps;
    const int64_t c = t % columns, b = t / columns % grid_.dim[1]->taps, a = t / columns / grid_.dim[1]->taps;
    const int64_t position = (grid_.dim[0]->tap[a].position * job_.kernel[1] + grid_.dim[1]->tap[b].position) * job_.kernel[2] +
                             grid_.dim[2]->tap[c].position;
    return position * job_.channels * kNR;
  }

 private:
  void fill_tap(const float* x, const Tap& z, const Tap& y, const Tap& u, Span pixels, const float** to) const {
    const int64_t pixel = job_.groups * job_.channels, step = grid_.dim[2]->stride * pixel;
    for_each_row_part(grid_, pixels, [&](int64_t at, int64_t plane, int64_t row, Span columns) {
      const int64_t iz = plane * grid_.dim[0]->stride + z.offset, iy = row * grid_.dim[1]->stride + y.offset;
      Span valid{std::clamp(u.begin, columns.begin, columns.end), std::clamp(u.end, columns.begin, columns.end)};
      if (iz < 0 || iz >= job_.in[0] || iy < 0 || iy >= job_.in[1] || valid.begin > valid.end) valid = {columns.end, columns.end};
      const float** p = to + at;
      for (int64_t j = columns.begin; j < valid.begin; ++j) *p++ = job_.zeros;
      const float* from = x + ((iz * job_.in[1] + iy) * job_.in[2] + u.offset) * pixel + valid.begin * step;
      for (int64_t j = valid.begin; j < valid.end; ++j, from += step) *p++ = from;
      for (int64_t j = valid.end; j < columns.end; ++j) *p++ = job_.zeros;
    });
  }

  const ChannelsLastConvJob& job_;
  const PixelGrid& grid_;
};

struct ConvTile {
  const float* const* rows;  // [taps, pitch] input addresses, those of the tile's pixels first
  int64_t pitch;
  const float* panel;
  const int64_t* weight_offset;  // [taps]
  int64_t taps, first, depth;    // products [first, first + depth) of each tap
  bool more, last;               // adds to y; applies the epilogue
  float* const* y;
  const float* bias;  // [columns], or nullptr
  int64_t residual;   // elements from y to the residual; 0: none
  int64_t columns;
  const ConvFunction* function;
};

// y[r, c] = function(bias[c] + residual[r, c] + sum over taps and k of rows[tap][r][k] * panel[tap, k, c]).
template <int height, int vectors, bool full_width>
void conv_microkernel(const ConvTile& t) {
  Vector acc[height][vectors] = {};
  for (int64_t tap = 0; tap < t.taps; ++tap) {
    const float* const* rows = t.rows + tap * t.pitch;
    const float* a[height];
#pragma GCC unroll 16
    for (int r = 0; r < height; ++r) a[r] = rows[r] + t.first;
    const float* b = t.panel + t.weight_offset[tap] + t.first * kNR;
    for (int64_t k = 0; k < t.depth; ++k, b += kNR) {
      Vector columns[vectors];
      for (int v = 0; v < vectors; ++v) columns[v] = load(b + v * kVector);
#pragma GCC unroll 16
      for (int r = 0; r < height; ++r) {
        const float value = a[r][k];
        for (int v = 0; v < vectors; ++v) acc[r][v] += value * columns[v];
      }
    }
  }
  const size_t row_bytes = t.columns * sizeof(float);
  const auto read = [&](const float* from, Vector(&to)[vectors]) {
    if constexpr (full_width) {
      for (int v = 0; v < vectors; ++v) to[v] = load(from + v * kVector);
    } else {
      for (int v = 0; v < vectors; ++v) to[v] = Vector{};
      std::memcpy(to, from, row_bytes);
    }
  };
  Vector bias[vectors] = {};
  if (t.last && t.bias) read(t.bias, bias);
  const Epilogue epilogue(t.function);
#pragma GCC unroll 16
  for (int r = 0; r < height; ++r) {
    float* const y = t.y[r];
    Vector more[vectors];
    if (t.more) {
      read(y, more);
      for (int v = 0; v < vectors; ++v) acc[r][v] += more[v];
    }
    if (t.last) {
      for (int v = 0; v < vectors; ++v) acc[r][v] += bias[v];
      if (t.residual) {
        read(y + t.residual, more);
        for (int v = 0; v < vectors; ++v) acc[r][v] += more[v];
      }
      for (int v = 0; v < vectors; ++v) acc[r][v] = epilogue(acc[r][v]);
    }
    if constexpr (full_width) {
      for (int v = 0; v < vectors; ++v) store(y + v * kVector, acc[r][v]);
    } else {
      std::memcpy(y, acc[r], row_bytes);
    }
  }
}

using ConvMicrokernel = void (*)(const ConvTile&);

template <int vectors, bool full_width, int... height>
ConvMicrokernel conv_microkernel_for(int64_t rows, std::integer_sequence<int, height...>) {
  static constexpr ConvMicrokernel kernels[] = {conv_microkernel<height + 1, vectors, full_width>...};
  return kernels[rows - 1];
}

void run_conv_tile(const ConvTile& t, int64_t rows) {
  constexpr auto heights = std::make_integer_sequence<int, kMR>();
  if (t.columns == kNR)
    conv_microkernel_for<2, true>(rows, heights)(t);
  else if (t.columns > kVector)
    conv_microkernel_for<2, false>(rows, heights)(t);
  else if (t.columns == kVector)
    conv_microkernel_for<1, true>(rows, heights)(t);
  else
    conv_microkernel_for<1, false>(rows, heights)(t);
}

// A tile over all taps, in chunks of about kChunk products: long sums round less when they are summed in parts.
void sum_conv_tile(ConvTile t, int64_t taps, int64_t depth, int64_t rows) {
  const float* const* all_rows = t.rows;
  const int64_t* all_offsets = t.weight_offset;
  const int64_t taps_at_once = std::clamp<int64_t>(kChunk / std::max<int64_t>(depth, 1), 1, std::max<int64_t>(taps, 1));
  t.more = false;
  int64_t tap = 0;
  do {
    t.taps = std::min(taps_at_once, taps - tap);
    t.rows = all_rows + tap * t.pitch;
    t.weight_offset = all_offsets + tap;
    const int64_t chunks = std::max<int64_t>(1, depth / kChunk);
    for (int64_t c = 0; c < chunks; ++c) {
      const Span k = split_range(depth, static_cast<int>(c), static_cast<int>(chunks));
      t.first = k.begin;
      t.depth = k.end - k.begin;
      t.last = tap + t.taps >= taps && c + 1 == chunks;
      run_conv_tile(t, rows);
      t.more = true;
    }
    tap += t.taps;
  } while (tap < taps);
}

// Addresses of a block's output pixels.
void fill_outputs(const ChannelsLastConvJob& job, const PixelGrid& grid, float* y, Span pixels, float** to) {
  const int64_t pixel = job.groups * job.columns;
  for_each_row_part(grid, pixels, [&](int64_t at, int64_t plane, int64_t row, Span columns) {
    const int64_t z = grid.dim[0]->first + plane * grid.dim[0]->step, v = grid.dim[1]->first + row * grid.dim[1]->step;
    for (int64_t j = columns.begin; j < columns.end; ++j) {
      const int64_t u = grid.dim[2]->first + j * grid.dim[2]->step;
      to[at + j - columns.begin] = y + ((z * job.out[1] + v) * job.out[2] + u) * pixel;
    }
  });
}

struct ConvBlock {
  const float** rows;  // [taps, pixels]
  int64_t* weight_offset;
  float** y;

  static int64_t floats(int64_t taps, int64_t pixels) {
    return static_cast<int64_t>(sizeof(void*) / sizeof(float)) * (taps * pixels + taps + pixels);
  }
  ConvBlock(float* memory, int64_t taps, int64_t pixels)
      : rows(reinterpret_cast<const float**>(memory)),
        weight_offset(reinterpret_cast<int64_t*>(rows + taps * pixels)),
        y(reinterpret_cast<float**>(weight_offset + taps)) {}
};

void conv_channels_last(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const ChannelsLastConvJob*>(userdata);
  const int64_t in_image = job.in[0] * job.in[1] * job.in[2] * job.groups * job.channels;
  const int64_t out_image = job.out[0] * job.out[1] * job.out[2] * job.groups * job.columns;
  const int64_t phases = job.phases[0] * job.phases[1] * job.phases[2], panels = (job.columns + kNR - 1) / kNR;
  const int64_t kernel = job.kernel[0] * job.kernel[1] * job.kernel[2], k = kernel * job.channels;
  const int64_t depth = job.merged ? job.kernel[2] * job.channels : job.channels;
  static const MapJob no_scalars{};
  // Units: image, group, phase, block of pixels, part of the columns. All phases have the block count of the largest.
  const PixelGrid largest(job, 0);
  const bool streamed = k * job.columns > kL2Floats;
  const int64_t most = streamed ? kManyPixels : kFewPixels;
  const int64_t blocks = std::max<int64_t>(1, (largest.pixels + most / 2) / most);
  int64_t parts = 1;
  const int64_t units = job.batch * job.groups * phases * blocks;
  if (nth > 1 && units < 4 * nth) parts = std::min(panels, (4 * nth + units - 1) / units);
  const int64_t block_pixels = (largest.pixels + blocks - 1) / blocks + 1;
  float* memory = scratch(ConvBlock::floats(kernel, block_pixels));
  if (!memory) return job.fail(0, "out of memory for its pixels. Free memory, or call with smaller sizes.");
  const ConvBlock block(memory, kernel, block_pixels);
  Loop loop;
  loop.push(units * parts, 0);
  int64_t filled = -1;
  for_each_dynamic(job, loop, out_image * job.batch / (units * parts) * k + 1, ith, nth, [&](int64_t unit, const int64_t*) {
    const int64_t part = unit % parts, at = unit / parts % blocks, phase = unit / parts / blocks % phases;
    const int64_t group = unit / parts / blocks / phases % job.groups, image = unit / parts / blocks / phases / job.groups;
    const PixelGrid grid(job, phase);
    const Span pixels = split_range(grid.pixels, static_cast<int>(at), static_cast<int>(blocks));
    const int64_t count = pixels.end - pixels.begin;
    if (count == 0) return;
    const InputPointers inputs(job, grid);
    const int64_t taps = inputs.taps();
    if (std::exchange(filled, unit / parts) != unit / parts) {
      inputs.fill(static_cast<const float*>(job.data[1]) + image * in_image + group * job.channels, pixels, block.rows, count);
      for (int64_t t = 0; t < taps; ++t) block.weight_offset[t] = inputs.weight_offset(t);
      fill_outputs(job, grid, static_cast<float*>(job.data[0]) + image * out_image + group * job.columns, pixels, block.y);
    }
    const Span panel = split_range(panels, static_cast<int>(part), static_cast<int>(parts));
    const int64_t tiles = (count + kMR - 1) / kMR;
    ConvTile t{};
    t.pitch = count;
    t.weight_offset = block.weight_offset;
    t.residual = job.data[3] ? static_cast<const float*>(job.data[3]) - static_cast<const float*>(job.data[0]) : 0;
    t.function = &job.function;
    float* y[kMR];
    t.y = y;
    for (int64_t p = panel.begin; p < panel.end; ++p) {
      t.panel = job.packed + (group * panels + p) * k * kNR;
      t.columns = std::min<int64_t>(kNR, job.columns - p * kNR);
      t.bias = job.data[2] ? static_cast<const float*>(job.data[2]) + group * job.columns + p * kNR : nullptr;
      for (int64_t i = 0; i < tiles; ++i) {
        const Span rows = split_range(count, static_cast<int>(i), static_cast<int>(tiles));
        t.rows = block.rows + rows.begin;
        for (int64_t r = rows.begin; r < rows.end; ++r) y[r - rows.begin] = block.y[r] + p * kNR;
        sum_conv_tile(t, taps, depth, rows.end - rows.begin);
      }
    }
    if (!job.activation) return;
    const int64_t first = panel.begin * kNR, columns = std::min(panel.end * kNR, job.columns) - first;
    const bool adjacent = job.groups == 1 && phases == 1 && parts == 1;  // all of the block is one run
    for (int64_t r = 0; r < (adjacent ? 1 : count); ++r) {
      const void* x = block.y[r] + first;
      job.activation(no_scalars, block.y[r] + first, &x, 0, adjacent ? count * columns : columns);
    }
  });
}

// ---- images of few channels

// y [width, channels] = x [channels, width], whose channels are `plane` elements apart.
template <int channels>
void interleave(float* __restrict y, const float* __restrict x, int64_t plane, int64_t width) {
  for (int64_t w = 0; w < width; ++w)
    for (int c = 0; c < channels; ++c) y[w * channels + c] = x[c * plane + w];
}

void interleave(float* y, const float* x, int64_t plane, int64_t width, int64_t channels) {
  switch (channels) {
    case 1: std::memcpy(y, x, width * sizeof(float)); return;
    case 2: return interleave<2>(y, x, plane, width);
    case 3: return interleave<3>(y, x, plane, width);
    case 4: return interleave<4>(y, x, plane, width);
    default:
      for (int64_t c = 0; c < channels; ++c)
        for (int64_t w = 0; w < width; ++w) y[w * channels + c] = x[c * plane + w];
  }
}

void pad_columns(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const PadColumnsJob*>(userdata);
  Loop loop;
  loop.push(job.batch * job.lines, 0);
  for_each_row(loop, job.padded * job.channels, ith, nth, [&](int64_t unit, const int64_t*) {
    const int64_t image = unit / job.lines, line = unit % job.lines, row = job.width * job.channels;
    float* y = static_cast<float*>(job.data[0]) + unit * job.padded * job.channels;
    const auto* x = static_cast<const float*>(job.data[1]) + image * job.lines * row;
    y = std::fill_n(y, job.left * job.channels, 0.0f);
    if (job.channels_last)
      std::memcpy(y, x + line * row, row * sizeof(float));
    else
      interleave(y, x + line * job.width, job.lines * job.width, job.width, job.channels);
    std::fill_n(y + row, (job.padded - job.left - job.width) * job.channels, 0.0f);
  });
}

// ---- narrow groups

constexpr int kPixels = 4;  // output pixels of the microkernel
constexpr int64_t kMaxWindowRows = 64;

// Lane i of the result is lane j of its group of `width` lanes.
template <int width, int j>
struct InGroup {
  static constexpr int lane(int i) { return i / width * width + j; }
};

struct GroupTile {
  const float* const* rows;  // [height of the window] first input pixel of each row
  const float* weight;       // [taps of a row, width, channels] for the first row
  int64_t row_taps, height, tap_step, weight_row, pixel, step;
  float* y;
  const float *bias, *residual;
  const ConvFunction* function;
};

// acc[p] += x[p], channel j of each group in all lanes of the group, times weight[j].
template <int pixels, int width, int... j>
void add_group_products(Vector (&acc)[pixels], const Vector (&x)[pixels], const float* weight, int64_t step,
                        std::integer_sequence<int, j...>) {
  const auto add = [&](auto order, int channel) {
    const Vector w = load(weight + channel * step);
#pragma GCC unroll 8
    for (int p = 0; p < pixels; ++p) acc[p] += (width == 1 ? x[p] : shuffle_lanes<decltype(order)>(x[p], x[p])) * w;
  };
  (add(InGroup<width, j>(), j), ...);
}

// y[p, c] for `pixels` adjacent output pixels and some vectors of channels; groups have `width` channels and columns.
template <int width, int pixels, int vectors>
void group_tile(const GroupTile& t, int64_t c) {
  Vector acc[vectors][pixels] = {};
  for (int64_t h = 0; h < t.height; ++h) {
    const float* x = t.rows[h] + c;
    const float* w = t.weight + h * t.weight_row + c;
    for (int64_t k = 0; k < t.row_taps; ++k, x += t.tap_step, w += width * t.pixel)
#pragma GCC unroll 8
      for (int v = 0; v < vectors; ++v) {
        Vector in[pixels];
#pragma GCC unroll 8
        for (int p = 0; p < pixels; ++p) in[p] = load(x + p * t.step + v * kVector);
        add_group_products<pixels, width>(acc[v], in, w + v * kVector, t.pixel, std::make_integer_sequence<int, width>());
      }
  }
  const Epilogue epilogue(t.function);
#pragma GCC unroll 8
  for (int v = 0; v < vectors; ++v) {
    const int64_t at = c + v * kVector;
    const Vector bias = t.bias ? load(t.bias + at) : Vector{};
#pragma GCC unroll 8
    for (int p = 0; p < pixels; ++p) {
      Vector y = acc[v][p] + bias;
      if (t.residual) y += load(t.residual + p * t.pixel + at);
      store(t.y + p * t.pixel + at, epilogue(y));
    }
  }
}

// All channels of some pixels. The last vector overlaps the one before: the same sums again.
template <int width, int pixels, int vectors>
void group_pixels(const GroupTile& t) {
  int64_t c = 0;
  for (; c + vectors * kVector <= t.pixel; c += vectors * kVector) group_tile<width, pixels, vectors>(t, c);
  for (; c + kVector <= t.pixel; c += kVector) group_tile<width, pixels, 1>(t, c);
  if (c < t.pixel) group_tile<width, pixels, 1>(t, t.pixel - kVector);
}

// The taps of output j that are inside the image: adjacent ones.
Span taps_inside(const Phase& p, int64_t j) {
  int64_t begin = 0, end = p.taps;
  while (begin < end && (j < p.tap[begin].begin || j >= p.tap[begin].end)) ++begin;
  while (end > begin && (j < p.tap[end - 1].begin || j >= p.tap[end - 1].end)) --end;
  return {begin, end};
}

template <int width>
void conv_narrow_groups(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const ChannelsLastConvJob*>(userdata);
  static const MapJob no_scalars{};
  const Phase &down = *job.phase[1], &along = *job.phase[2];
  const int64_t channels = job.groups * width, row = job.in[2] * channels;
  Span whole{0, job.out[2]};  // pixels whose window is inside the image along w: computed several at a time
  for (int64_t k = 0; k < along.taps; ++k)
    whole = {std::max(whole.begin, along.tap[k].begin), std::min(whole.end, along.tap[k].end)};
  Loop loop;
  loop.push(job.batch * job.out[1], 0);
  const int64_t work = job.out[2] * channels * width * job.kernel[1] * job.kernel[2];
  for_each_row(loop, work, ith, nth, [&](int64_t unit, const int64_t*) {
    const int64_t v = unit % job.out[1], image = unit / job.out[1];
    const Span lines = taps_inside(down, v);
    const float* line[kMaxWindowRows];
    for (int64_t h = lines.begin; h < lines.end; ++h)
      line[h] = static_cast<const float*>(job.data[1]) + (image * job.in[1] + v * down.stride + down.tap[h].offset) * row;
    float* const y = static_cast<float*>(job.data[0]) + unit * job.out[2] * channels;
    const float* const residual = job.data[3] ? static_cast<const float*>(job.data[3]) + unit * job.out[2] * channels : nullptr;
    const float* rows[kMaxWindowRows];
    GroupTile t{};
    t.rows = rows;
    t.height = lines.end - lines.begin;
    t.tap_step = along.taps > 1 ? (along.tap[1].offset - along.tap[0].offset) * channels : 0;
    t.pixel = channels;
    t.step = along.stride * channels;
    t.weight_row = job.kernel[2] * width * channels;
    t.bias = static_cast<const float*>(job.data[2]);
    t.function = &job.function;
    for (int64_t u = 0; u < job.out[2];) {
      const bool several = u >= whole.begin && u + kPixels <= whole.end;
      const Span taps = taps_inside(along, u);
      t.row_taps = taps.end - taps.begin;
      for (int64_t h = 0; h < t.height && t.row_taps; ++h)
        rows[h] = line[lines.begin + h] + (u * along.stride + along.tap[taps.begin].offset) * channels;
      t.weight = job.packed + lines.begin * t.weight_row + taps.begin * width * channels;
      t.y = y + u * channels;
      t.residual = residual ? residual + u * channels : nullptr;
      several ? group_pixels<width, kPixels, 1>(t) : group_pixels<width, 1, kPixels>(t);
      u += several ? kPixels : 1;
    }
    const void* made = y;
    if (job.activation) job.activation(no_scalars, y, &made, 0, job.out[2] * channels);
  });
}

}  // namespace

Kernel conv_channels_last_kernel() { return conv_channels_last; }
Kernel pad_columns_kernel() { return pad_columns; }

Kernel narrow_groups_kernel(int64_t width) {
  switch (width) {
    case 1: return conv_narrow_groups<1>;
    case 2: return conv_narrow_groups<2>;
    case 4: return conv_narrow_groups<4>;
    case 8: return kVector > 8 ? conv_narrow_groups<8> : nullptr;
    default: return nullptr;
  }
}

bool has_narrow_groups(const ConvWeight& w, const int64_t* kernel) {
  return w.channels == w.columns && narrow_groups_kernel(w.channels) && w.groups * w.channels >= kVector && kernel[0] == 1 &&
         kernel[1] <= kMaxWindowRows;
}

int64_t packed_conv_floats(const ConvWeight& w) {
  if (w.winograd) return packed_winograd_floats(w);
  return w.narrow ? w.taps * w.channels * w.groups * w.columns : w.groups * packed_floats(w.taps * w.channels, w.columns);
}

void pack_conv_weight(float* packed, const float* weight, const ConvWeight& w) {
  if (w.winograd) return pack_winograd_weight(packed, weight, w);
  const int64_t k = w.taps * w.channels, panels = (w.columns + kNR - 1) / kNR, columns = w.groups * w.columns;
  std::fill(packed, packed + packed_conv_floats(w), 0.0f);
  for (int64_t g = 0; g < w.groups; ++g)
    for (int64_t n = 0; n < w.columns; ++n) {
      float* to = w.narrow ? packed + g * w.columns + n : packed + (g * panels + n / kNR) * k * kNR + n % kNR;
      const int64_t step = w.narrow ? columns : kNR;
      const float* from = weight + g * w.group + n * w.column;
      for (int64_t t = 0; t < w.taps; ++t)
        for (int64_t c = 0; c < w.channels; ++c) to[(t * w.channels + c) * step] = from[c * w.channel + t];
    }
}

}  // namespace keepdim::ggml
