// Convolutions of channels-last images. A general convolution is an implicit matrix product: rows are output pixels, whose
// inputs are read in place through one pointer per tap, columns are output channels of the packed weight. Depthwise convolutions
// and other narrow groups are vectorised along the channels of all groups.
#include "ggml/kernels/conv_epilogue.h"

namespace keepdim::ggml {
namespace {

constexpr int64_t kChunk = 512;                // products summed in registers before they are added to the result
constexpr int64_t kFewPixels = 4 * kMR;        // least pixels of a block
constexpr int64_t kMostPixels = 32 * kMR;      // most pixels of a block
constexpr int64_t kL1Floats = 6 * 1024;        // inputs of a block whose weights stay in the L2 cache
constexpr int64_t kL2Floats = 128 * 1024;      // inputs of a block whose weights are streamed: the more, the less often
constexpr int64_t kWeightFloats = 128 * 1024;  // weights that stay in the L2 cache

// One phase of each spatial dim: the output pixels of all images as one list, its taps as another.
struct PixelGrid {
  const Phase* dim[kSpatialDims];
  int64_t pixels;

  PixelGrid(const ChannelsLastConvJob& job, int64_t phase) : pixels(job.batch) {
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

template <class T>
void fill_addresses(T* first, int64_t step, int64_t count, T** to) {
  for (int64_t i = 0; i < count; ++i, first += step) to[i] = first;
}

// Input addresses of a block of output pixels: [tap, pixel]. Outside of the image they point to zeros. With `copy`, the inputs
// are copied there, `pitch` elements from pixel to pixel: the part of a line that adjacent outputs read, for each line of taps.
class InputPointers {
 public:
  InputPointers(const ChannelsLastConvJob& job, const PixelGrid& grid, float* copy, int64_t pitch)
      : job_(job), grid_(grid), copy_(copy), pixel_(copy ? pitch : job.groups * job.channels) {}

  int64_t taps() const { return grid_.dim[0]->taps * grid_.dim[1]->taps * (job_.merged ? 1 : grid_.dim[2]->taps); }

  void fill(const float* x, Span pixels, const float** to, int64_t pitch) {
    const int64_t planes = grid_.dim[0]->count;
    for_each_row_part(grid_, pixels, [&](int64_t at, int64_t plane, int64_t row, Span columns) {
      const float** tap = to + at;
      for (int64_t a = 0; a < grid_.dim[0]->taps; ++a)
        for (int64_t b = 0; b < grid_.dim[1]->taps; ++b) {
          const int64_t iz = plane % planes * grid_.dim[0]->stride + grid_.dim[0]->tap[a].offset;
          const int64_t iy = row * grid_.dim[1]->stride + grid_.dim[1]->tap[b].offset;
          const bool inside = iz >= 0 && iz < job_.in[0] && iy >= 0 && iy < job_.in[1];
          const int64_t line_index = (plane / planes * job_.in[0] + iz) * job_.in[1] + iy;
          const float* line = inside ? x + line_index * job_.in[2] * job_.groups * job_.channels : nullptr;
          if (line && copy_) line = copy_part(line, columns);
          for (int64_t c = 0; c < (job_.merged ? 1 : grid_.dim[2]->taps); ++c, tap += pitch)
            fill_row(line, grid_.dim[2]->tap[c], columns, tap);
        }
    });
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
  // Copies the pixels of a line that adjacent outputs read. Returns where the copy of the whole line would begin.
  const float* copy_part(const float* line, Span columns) {
    const Phase& along = *grid_.dim[2];
    const int64_t low = along.tap[0].offset, high = along.tap[along.taps - 1].offset;  // in kernel order, forward
    const int64_t begin = std::max<int64_t>(0, columns.begin * along.stride + low);
    const int64_t end = std::min(job_.in[2], (columns.end - 1) * along.stride + high + 1);
    const float* const base = copy_ - begin * pixel_;
    for (int64_t i = begin; i < end; ++i, copy_ += pixel_)
      std::memcpy(copy_, line + i * job_.groups * job_.channels, job_.channels * sizeof(float));
    return base;
  }

  // Addresses of one tap for adjacent outputs; `line` is nullptr outside of the image.
  void fill_row(const float* line, const Tap& tap, Span columns, const float** to) const {
    const int64_t stride = grid_.dim[2]->stride;
    Span valid{columns.end, columns.end};
    if (line) valid = {std::clamp(tap.begin, columns.begin, columns.end), std::clamp(tap.end, columns.begin, columns.end)};
    if (valid.begin > valid.end) valid = {columns.end, columns.end};
    std::fill_n(to, valid.begin - columns.begin, job_.zeros);
    if (valid.begin < valid.end)
      fill_addresses(line + (valid.begin * stride + tap.offset) * pixel_, stride * pixel_, valid.end - valid.begin,
                     to + (valid.begin - columns.begin));
    std::fill_n(to + (valid.end - columns.begin), columns.end - valid.end, job_.zeros);
  }

  const ChannelsLastConvJob& job_;
  const PixelGrid& grid_;
  float* copy_;
  const int64_t pixel_;
};

// A panel of up to kNR columns of the result, for some pixels.
struct ConvPanel {
  const float* const* x;  // [taps, pitch]: input addresses, those of the first tile's pixels first
  int64_t pitch;
  float* const* y;  // addresses of the pixels of the result
  const float* weight;
  const int64_t* weight_offset;  // [taps]
  int64_t taps, depth;           // products of each tap
  const float* bias;             // [columns], or nullptr
  int64_t residual;              // elements from y to the residual; 0: none
  int64_t first, columns;
  const ConvFunction* function;
};

// Long sums round less when they are summed in parts of about kChunk products.
struct ConvPart {
  Span taps, depth;
  bool first, last;
};

template <class Body>
void for_each_part(int64_t taps, int64_t depth, Body&& body) {
  const int64_t taps_at_once = std::clamp<int64_t>(kChunk / std::max<int64_t>(depth, 1), 1, std::max<int64_t>(taps, 1));
  const int64_t parts = std::max<int64_t>(1, depth / kChunk), depth_at_once = (depth + parts - 1) / parts;
  ConvPart part{{0, 0}, {0, 0}, true, false};
  do {
    part.taps = {part.taps.end, std::min(taps, part.taps.end + taps_at_once)};
    part.depth.end = 0;
    do {
      part.depth = {part.depth.end, std::min(depth, part.depth.end + depth_at_once)};
      part.last = part.taps.end >= taps && part.depth.end >= depth;
      body(part);
      part.first = false;
    } while (part.depth.end < depth);
  } while (part.taps.end < taps);
}

// Rows of up to `vectors` vectors in memory. `partial`: the last vector has fewer columns than lanes.
template <int vectors, bool partial>
struct TileColumns {
  int64_t last;  // columns of the last vector

  explicit TileColumns(int64_t columns) : last(columns - (vectors - 1) * kVector) {}
  Vector read(const float* row, int v) const {
    return partial && v + 1 == vectors ? load_first(row + v * kVector, last) : load(row + v * kVector);
  }
  void write(float* row, int v, Vector x) const {
    if (partial && v + 1 == vectors)
      store_first(row + v * kVector, x, last);
    else
      store(row + v * kVector, x);
  }
};

// acc[i] = sum over the taps and depths of a part of x[tap][i][k] * weight[tap, k].
template <int height, int vectors>
inline __attribute__((always_inline)) void multiply_tile(const ConvPanel& p, const ConvPart& part, const float* const* x,
                                                         Vector (&acc)[height][vectors]) {
  // Small tiles use several accumulators to hide the FMA latency.
  constexpr int sums = height * vectors >= 8 ? 1 : height * vectors >= 4 ? 2 : 4;
  Vector sum[sums][height][vectors] = {};
  for (int64_t tap = part.taps.begin; tap < part.taps.end; ++tap) {
    const float* const* rows = x + tap * p.pitch;
    const float* a[height];
#pragma GCC unroll 16
    for (int r = 0; r < height; ++r) a[r] = rows[r] + part.depth.begin;
    const float* b = p.weight + p.weight_offset[tap] + part.depth.begin * kNR;
    const auto step = [&](int64_t k, Vector(&to)[height][vectors]) {
      Vector columns[vectors];
      for (int v = 0; v < vectors; ++v) columns[v] = load(b + v * kVector);
      for (int v = 0; v < vectors; ++v) __builtin_prefetch(b + kAhead * kNR + v * kVector);
#pragma GCC unroll 16
      for (int r = 0; r < height; ++r) {
        const float value = a[r][k];
        for (int v = 0; v < vectors; ++v) to[r][v] += value * columns[v];
      }
      b += kNR;
    };
    const int64_t depth = part.depth.end - part.depth.begin;
    int64_t k = 0;
    if constexpr (sums > 1)
      for (; k + sums <= depth; k += sums)
#pragma GCC unroll 4
        for (int i = 0; i < sums; ++i) step(k + i, sum[i]);
    for (; k < depth; ++k) step(k, sum[0]);
  }
#pragma GCC unroll 16
  for (int r = 0; r < height; ++r)
    for (int v = 0; v < vectors; ++v) acc[r][v] = sum[0][r][v];
#pragma GCC unroll 4
  for (int i = 1; i < sums; ++i)
#pragma GCC unroll 16
    for (int r = 0; r < height; ++r)
      for (int v = 0; v < vectors; ++v) acc[r][v] += sum[i][r][v];
}

// y[i, c] = function(bias[c] + residual[i, c] + sum over taps and k of x[tap][i][k] * weight[tap, k, c]), for `height` pixels.
// Not inlined: the addresses of its rows need all registers.
template <int height, int vectors, bool partial>
__attribute__((noinline)) void conv_tile(const ConvPanel& p, const ConvPart& part, const float* const* x, float* const* y) {
  Vector acc[height][vectors];
  multiply_tile(p, part, x, acc);
  const TileColumns<vectors, partial> columns(p.columns);
  const auto add_rows = [&](int64_t offset) __attribute__((always_inline)) {
#pragma GCC unroll 16
    for (int r = 0; r < height; ++r)
      for (int v = 0; v < vectors; ++v) acc[r][v] += columns.read(y[r] + offset, v);
  };
  if (!part.first) add_rows(p.first);
  if (part.last) {
    if (p.bias) {
      Vector bias[vectors];
      for (int v = 0; v < vectors; ++v) bias[v] = columns.read(p.bias, v);
#pragma GCC unroll 16
      for (int r = 0; r < height; ++r)
        for (int v = 0; v < vectors; ++v) acc[r][v] += bias[v];
    }
    if (p.residual) add_rows(p.first + p.residual);
    apply(*p.function, acc);
  }
#pragma GCC unroll 16
  for (int r = 0; r < height; ++r)
    for (int v = 0; v < vectors; ++v) columns.write(y[r] + p.first, v, acc[r][v]);
  if (!part.last) return;
  const auto row = [&](int i) { return y[i / vectors] + p.first; };
  apply_in_memory(
      *p.function, height * vectors, [&](int i) { return columns.read(row(i), i % vectors); },
      [&](int i, Vector x) { columns.write(row(i), i % vectors, x); });
}

using ConvTile = void (*)(const ConvPanel&, const ConvPart&, const float* const* x, float* const* y);

template <int vectors, bool partial, int... height>
ConvTile conv_tile_for(int64_t rows, std::integer_sequence<int, height...>) {
  static constexpr ConvTile kernels[] = {conv_tile<height + 1, vectors, partial>...};
  return kernels[rows - 1];
}

ConvTile conv_tile_for(int64_t rows, int64_t columns) {
  constexpr auto heights = std::make_integer_sequence<int, kMR>();
  if (columns % kVector) return columns > kVector ? conv_tile_for<2, true>(rows, heights) : conv_tile_for<1, true>(rows, heights);
  return columns > kVector ? conv_tile_for<2, false>(rows, heights) : conv_tile_for<1, false>(rows, heights);
}

// All pixels of a panel, in tiles whose heights differ by at most one.
void run_conv_panel(const ConvPanel& p, int64_t pixels) {
  const int64_t tiles = (pixels + kMR - 1) / kMR, height = pixels / tiles, higher = pixels - height * tiles;
  const auto run = [&](int64_t rows, int64_t begin, int64_t end) {
    if (begin == end) return;
    const ConvTile tile = conv_tile_for(rows, p.columns);
    for_each_part(p.taps, p.depth, [&](const ConvPart& part) {
      for (int64_t i = begin; i < end; i += rows) tile(p, part, p.x + i, p.y + i);
    });
  };
  run(height + 1, 0, (height + 1) * higher);
  run(height, (height + 1) * higher, pixels);
}

// Addresses of a block's output pixels.
void fill_outputs(const ChannelsLastConvJob& job, const PixelGrid& grid, float* y, Span pixels, float** to) {
  const int64_t pixel = job.groups * job.columns, planes = grid.dim[0]->count;
  for_each_row_part(grid, pixels, [&](int64_t at, int64_t plane, int64_t row, Span columns) {
    const int64_t z = plane / planes * job.out[0] + grid.dim[0]->first + plane % planes * grid.dim[0]->step;
    const int64_t v = grid.dim[1]->first + row * grid.dim[1]->step;
    const int64_t u = grid.dim[2]->first + columns.begin * grid.dim[2]->step;
    fill_addresses(y + ((z * job.out[1] + v) * job.out[2] + u) * pixel, grid.dim[2]->step * pixel, columns.end - columns.begin,
                   to + at);
  });
}

// How a convolution is split into units of work: block of pixels, group, phase, part of the columns.
struct ConvUnits {
  int64_t phases, taps, depth, k, panels;                      // products of a tap and of all; panels of columns
  int64_t blocks = 1, block_pixels = 0, parts = 1, count = 0;  // all phases have the block count of the largest
  // The inputs of a block are copied: pixels at a multiple of half a page would conflict in a few sets of the L1 cache.
  bool copies;
  int64_t copied_pixels;

  ConvUnits(const ChannelsLastConvJob& job, int nth)
      : phases(job.phases[0] * job.phases[1] * job.phases[2]),
        taps(job.kernel[0] * job.kernel[1] * job.kernel[2]),
        depth(job.merged ? job.kernel[2] * job.channels : job.channels),
        k(taps * job.channels),
        panels((job.columns + kNR - 1) / kNR) {
    const int64_t in_pixels = job.in[0] * job.in[1] * job.in[2], out_pixels = job.out[0] * job.out[1] * job.out[2];
    const int64_t ratio = std::max<int64_t>(1, in_pixels / std::max<int64_t>(out_pixels, 1));
    const int64_t floats = k * job.columns > kWeightFloats ? kL2Floats : kL1Floats;
    const int64_t most = std::clamp(floats / std::max<int64_t>(1, job.channels * ratio), kFewPixels, kMostPixels);
    const PixelGrid largest(job, 0);
    blocks = std::max<int64_t>(1, (largest.pixels + most / 2) / most);
    const int64_t same = job.groups * phases;  // units of the same pixels
    if (nth > 1 && k * job.columns <= kWeightFloats) {
      // Equal shares of whole blocks, so that a thread reads the pixels that it wrote in the step before.
      const int64_t wanted = (std::max(blocks, (4 * nth + same - 1) / same) + nth - 1) / nth * nth;
      blocks = std::max(blocks, std::min(wanted, largest.pixels / kFewPixels / nth * nth));
    }
    block_pixels = (largest.pixels + blocks - 1) / blocks + 1;
    const int64_t units = same * blocks;
    if (nth > 1 && units < 4 * nth && units % nth) parts = std::min(panels, (4 * nth + units - 1) / units);
    count = units * parts;
    const int64_t step = job.phase[2]->stride * job.groups * job.channels * static_cast<int64_t>(sizeof(float));
    copies = phases == 1 && !job.merged && step % 2048 == 0 && depth >= 2 * kNR && panels * taps >= 4;
    const Phase& along = *job.phase[2];
    const int64_t reach = along.taps ? along.tap[along.taps - 1].offset - along.tap[0].offset + 1 : 0;
    copies = copies && reach > 0;
    // A block touches at most `lines` rows of outputs.
    const int64_t lines = block_pixels / std::max<int64_t>(1, along.count) + 2;
    copied_pixels = copies ? job.kernel[0] * job.kernel[1] * (block_pixels * along.stride + lines * reach) : 0;
  }
  int64_t pitch() const { return depth + kVector; }  // of copied pixels
};

// The addresses of a block of pixels, and its inputs if they are copied.
class ConvBlock {
 public:
  static int64_t floats(const ConvUnits& u) {
    const int64_t addresses = u.taps * u.block_pixels + u.taps + u.block_pixels;
    return static_cast<int64_t>(sizeof(void*) / sizeof(float)) * addresses + u.copied_pixels * u.pitch();
  }
  ConvBlock(float* memory, const ConvUnits& u)
      : rows_(reinterpret_cast<const float**>(memory)),
        weight_offset_(reinterpret_cast<int64_t*>(rows_ + u.taps * u.block_pixels)),
        y_(reinterpret_cast<float**>(weight_offset_ + u.taps)),
        copy_(reinterpret_cast<float*>(y_ + u.block_pixels)) {}

  void fill(const ChannelsLastConvJob& job, const ConvUnits& u, const PixelGrid& grid, const float* x, float* y, Span pixels) {
    count_ = pixels.end - pixels.begin;
    InputPointers inputs(job, grid, u.copies ? copy_ : nullptr, u.pitch());
    taps_ = inputs.taps();
    depth_ = u.depth;
    inputs.fill(x, pixels, rows_, count_);
    for (int64_t t = 0; t < taps_; ++t) weight_offset_[t] = inputs.weight_offset(t);
    fill_outputs(job, grid, y, pixels, y_);
  }

  // Everything but weight, bias, residual and columns.
  ConvPanel panel() const {
    ConvPanel p{};
    p.x = rows_;
    p.pitch = count_;
    p.y = y_;
    p.weight_offset = weight_offset_;
    p.taps = taps_;
    p.depth = depth_;
    return p;
  }
  int64_t pixels() const { return count_; }
  float* pixel(int64_t i) const { return y_[i]; }

 private:
  const float** rows_;  // [taps, pixels]
  int64_t* weight_offset_;
  float** y_;
  float* copy_;
  int64_t count_ = 0, taps_ = 0, depth_ = 0;
};

void conv_channels_last(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const ChannelsLastConvJob*>(userdata);
  const int64_t results = job.batch * job.out[0] * job.out[1] * job.out[2] * job.groups * job.columns;
  static const MapJob no_scalars{};
  const ConvUnits u(job, nth);
  float* memory = scratch(ConvBlock::floats(u));
  if (!memory) return job.fail(0, "out of memory for its pixels. Free memory, or call with smaller sizes.");
  ConvBlock block(memory, u);
  Loop loop;
  loop.push(u.count, 0);
  int64_t filled = -1;
  for_each_dynamic(job, loop, results / u.count * u.k + 1, ith, nth, [&](int64_t unit, const int64_t*) {
    const int64_t part = unit % u.parts, phase = unit / u.parts % u.phases, group = unit / u.parts / u.phases % job.groups;
    const int64_t at = unit / u.parts / u.phases / job.groups;
    if (std::exchange(filled, unit / u.parts) != unit / u.parts) {
      const PixelGrid grid(job, phase);
      block.fill(job, u, grid, static_cast<const float*>(job.data[1]) + group * job.channels,
                 static_cast<float*>(job.data[0]) + group * job.columns,
                 split_range(grid.pixels, static_cast<int>(at), static_cast<int>(u.blocks)));
    }
    if (block.pixels() == 0) return;
    const Span panels = split_range(u.panels, static_cast<int>(part), static_cast<int>(u.parts));
    ConvPanel p = block.panel();
    p.residual = job.data[3] ? static_cast<const float*>(job.data[3]) - static_cast<const float*>(job.data[0]) : 0;
    p.function = &job.function;
    for (int64_t i = panels.begin; i < panels.end; ++i) {
      p.weight = job.packed + (group * u.panels + i) * u.k * kNR;
      p.first = i * kNR;
      p.columns = std::min<int64_t>(kNR, job.columns - p.first);
      p.bias = job.data[2] ? static_cast<const float*>(job.data[2]) + group * job.columns + p.first : nullptr;
      run_conv_panel(p, block.pixels());
    }
    if (!job.activation) return;
    const int64_t first = panels.begin * kNR, columns = std::min(panels.end * kNR, job.columns) - first;
    const bool adjacent = job.groups == 1 && u.phases == 1 && u.parts == 1;  // all of the block is one run
    for (int64_t r = 0; r < (adjacent ? 1 : block.pixels()); ++r) {
      const void* x = block.pixel(r) + first;
      job.activation(no_scalars, block.pixel(r) + first, &x, 0, adjacent ? block.pixels() * columns : columns);
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
  Span channels;  // to compute: all, or whole vectors of them
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

// Bias, residual and activation of the sums [vectors, pixels] for channels from c on.
template <int vectors, int pixels>
inline __attribute__((always_inline)) void write_group_tile(const GroupTile& t, int64_t c, Vector (&acc)[vectors][pixels]) {
#pragma GCC unroll 8
  for (int v = 0; v < vectors; ++v) {
    const int64_t at = c + v * kVector;
    const Vector bias = t.bias ? load(t.bias + at) : Vector{};
#pragma GCC unroll 8
    for (int p = 0; p < pixels; ++p) {
      acc[v][p] += bias;
      if (t.residual) acc[v][p] += load(t.residual + p * t.pixel + at);
    }
  }
  apply(*t.function, acc);
#pragma GCC unroll 8
  for (int v = 0; v < vectors; ++v)
#pragma GCC unroll 8
    for (int p = 0; p < pixels; ++p) store(t.y + p * t.pixel + c + v * kVector, acc[v][p]);
  const auto address = [&](int i) { return t.y + i % pixels * t.pixel + c + i / pixels * kVector; };
  apply_in_memory(
      *t.function, vectors * pixels, [&](int i) { return load(address(i)); }, [&](int i, Vector x) { store(address(i), x); });
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
  write_group_tile(t, c, acc);
}

// All channels of some pixels. The last vector overlaps the one before: the same sums again.
template <int width, int pixels, int vectors>
void group_pixels(const GroupTile& t) {
  int64_t c = t.channels.begin;
  for (; c + vectors * kVector <= t.channels.end; c += vectors * kVector) group_tile<width, pixels, vectors>(t, c);
  for (; c + kVector <= t.channels.end; c += kVector) group_tile<width, pixels, 1>(t, c);
  if (c < t.channels.end) group_tile<width, pixels, 1>(t, t.channels.end - kVector);
}

// The taps of output j that are inside the image: adjacent ones.
Span taps_inside(const Phase& p, int64_t j) {
  int64_t begin = 0, end = p.taps;
  while (begin < end && (j < p.tap[begin].begin || j >= p.tap[begin].end)) ++begin;
  while (end > begin && (j < p.tap[end - 1].begin || j >= p.tap[end - 1].end)) --end;
  return {begin, end};
}

// ---- depthwise: groups of one channel, with adjacent taps along w

// A row of a depthwise convolution. The tile has its window rows, weight, bias, residual and result from the first pixel on.
struct DepthwiseRow {
  GroupTile tile;
  int64_t in, out;  // widths
  int64_t offset;   // input of the first output's first tap: negative with padding
};

// y[p, c] for adjacent pixels and a vector of channels; inputs are loaded once for all pixels that share them. With `edge`, only
// inputs in `inside` are in the image.
template <int taps, int stride, int pixels, bool edge>
void depthwise_tile(const GroupTile& t, int64_t x_offset, Span inside, int64_t c) {
  Vector acc[1][pixels] = {};
  for (int64_t h = 0; h < t.height; ++h) {
    const float* const x = t.rows[h] + x_offset + c;
    const float* const w = t.weight + h * t.weight_row + c;
    Vector weight[taps];
#pragma GCC unroll 8
    for (int k = 0; k < taps; ++k) weight[k] = load(w + k * t.pixel);
#pragma GCC unroll 32
    for (int i = 0; i < (pixels - 1) * stride + taps; ++i) {
      if (edge && (i < inside.begin || i >= inside.end)) continue;
      const Vector in = load(x + i * t.pixel);
#pragma GCC unroll 8
      for (int k = 0; k < taps; ++k)
        if (i >= k && (i - k) % stride == 0 && (i - k) / stride < pixels) acc[0][(i - k) / stride] += in * weight[k];
    }
  }
  write_group_tile(t, c, acc);
}

template <int taps, int stride, int pixels>
void depthwise_row(const DepthwiseRow& row) {
  constexpr int64_t reads = (pixels - 1) * stride + taps;
  GroupTile t = row.tile;
  for (int64_t u = 0; u < row.out; u += pixels) {
    u = std::min(u, row.out - pixels);  // the last tile overlaps the one before: the same sums again
    const int64_t at = u * stride + row.offset;
    const Span inside{std::max<int64_t>(0, -at), std::min(reads, row.in - at)};
    const auto tile = inside.end - inside.begin == reads ? depthwise_tile<taps, stride, pixels, false>
                                                         : depthwise_tile<taps, stride, pixels, true>;
    t.y = row.tile.y + u * t.pixel;
    t.residual = row.tile.residual ? row.tile.residual + u * t.pixel : nullptr;
    int64_t c = t.channels.begin;
    for (; c + kVector <= t.channels.end; c += kVector) tile(t, at * t.pixel, inside, c);
    if (c < t.channels.end) tile(t, at * t.pixel, inside, t.channels.end - kVector);
  }
}

using DepthwiseRowFn = void (*)(const DepthwiseRow&);

// The tile width that computes the fewest pixels twice.
template <int taps, int stride>
DepthwiseRowFn depthwise_row_for(int64_t out) {
  if (out >= 8 && (out + 7) / 8 * 8 <= (out + 6) / 7 * 7) return depthwise_row<taps, stride, 8>;
  return out >= 7 ? depthwise_row<taps, stride, 7> : out >= 4 ? depthwise_row<taps, stride, 4> : depthwise_row<taps, stride, 1>;
}

// nullptr: no kernel for such rows.
DepthwiseRowFn depthwise_row_for(const ChannelsLastConvJob& job) {
  const Phase& along = *job.phase[2];
  if (job.channels != 1 || (along.taps > 1 && along.tap[1].offset != along.tap[0].offset + 1)) return nullptr;
  switch (along.taps * 10 + along.stride) {
    case 31: return depthwise_row_for<3, 1>(job.out[2]);
    case 32: return depthwise_row_for<3, 2>(job.out[2]);
    case 51: return depthwise_row_for<5, 1>(job.out[2]);
    case 52: return depthwise_row_for<5, 2>(job.out[2]);
    case 71: return depthwise_row_for<7, 1>(job.out[2]);
    default: return nullptr;
  }
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
  const DepthwiseRowFn depthwise = width == 1 ? depthwise_row_for(job) : nullptr;
  // Few rows: each thread computes some of the channels, as of the convolutions around it.
  const int64_t lines = job.batch * job.out[1], vectors = channels / kVector;
  const bool by_channels = nth > 1 && lines < 4 * nth && channels % kVector == 0 && vectors >= nth && !job.activation;
  const int parts = by_channels ? nth : 1;
  Loop loop;
  loop.push(parts, 0);
  loop.push(lines, 0);
  const int64_t work = job.out[2] * channels / parts * width * job.kernel[1] * job.kernel[2];
  for_each_row(loop, work, ith, nth, [&](int64_t position, const int64_t*) {
    const int64_t unit = position % lines, v = unit % job.out[1], image = unit / job.out[1];
    const Span part = split_range(vectors, static_cast<int>(position / lines), parts), taps_down = taps_inside(down, v);
    const float* line[kMaxWindowRows];
    for (int64_t h = taps_down.begin; h < taps_down.end; ++h)
      line[h] = static_cast<const float*>(job.data[1]) + (image * job.in[1] + v * down.stride + down.tap[h].offset) * row;
    float* const y = static_cast<float*>(job.data[0]) + unit * job.out[2] * channels;
    const float* const residual = job.data[3] ? static_cast<const float*>(job.data[3]) + unit * job.out[2] * channels : nullptr;
    const float* rows[kMaxWindowRows];
    GroupTile t{};
    t.rows = rows;
    t.height = taps_down.end - taps_down.begin;
    t.tap_step = along.taps > 1 ? (along.tap[1].offset - along.tap[0].offset) * channels : 0;
    t.pixel = channels;
    t.step = along.stride * channels;
    t.weight_row = job.kernel[2] * width * channels;
    t.bias = static_cast<const float*>(job.data[2]);
    t.function = &job.function;
    t.channels = by_channels ? Span{part.begin * kVector, part.end * kVector} : Span{0, channels};
    if (depthwise) {
      t.rows = line + taps_down.begin;
      t.weight = job.packed + taps_down.begin * t.weight_row;
      t.y = y;
      t.residual = residual;
      depthwise({t, job.in[2], job.out[2], along.tap[0].offset});
    }
    for (int64_t u = depthwise ? job.out[2] : 0; u < job.out[2];) {
      const bool several = u >= whole.begin && u + kPixels <= whole.end;
      const Span taps = taps_inside(along, u);
      t.row_taps = taps.end - taps.begin;
      for (int64_t h = 0; h < t.height && t.row_taps; ++h)
        rows[h] = line[taps_down.begin + h] + (u * along.stride + along.tap[taps.begin].offset) * channels;
      t.weight = job.packed + taps_down.begin * t.weight_row + taps.begin * width * channels;
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
