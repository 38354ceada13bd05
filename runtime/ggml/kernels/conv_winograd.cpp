// Winograd convolution F(2x2, 3x3) of channels-last images, stride 1: a tile of 4 x 4 inputs gives 2 x 2 results with 16
// multiplications per pair of channels instead of 36. Transforms only add and subtract, so it rounds about as a direct
// convolution does. Tiles are computed in blocks: inputs are transformed to 16 matrices [tiles, channels], each is multiplied
// with the transformed weight of its position, a panel of columns at a time, and the products are transformed back. A tile with
// an infinity or NaN, which the transforms would spread, is computed directly.
#include "ggml/kernels/conv_epilogue.h"

namespace keepdim::ggml {
namespace {

constexpr int kIn = 4, kOut = 2;  // side of a tile
constexpr int kPositions = kIn * kIn;
constexpr int64_t kTileFloats = 192 * 1024;  // transformed inputs of a block: fit in the L2 cache
constexpr int64_t kMaxTiles = 8 * kMR;       // of a block

// y = B^T x for four values of one row or column.
inline void transform_input(const Vector& a, const Vector& b, const Vector& c, const Vector& d, Vector* y, int step) {
  y[0] = a - c;
  y[step] = b + c;
  y[2 * step] = c - b;
  y[3 * step] = b - d;
}

// Blocks of adjacent tiles of one image: whole groups of kMR tiles, so that the rows of a product, and its rounding, do not
// depend on the number of threads.
struct TileGrid {
  int64_t rows, columns, count, groups, block, blocks;

  TileGrid(const ChannelsLastConvJob& job, int nth)
      : rows((job.out[1] + kOut - 1) / kOut),
        columns((job.out[2] + kOut - 1) / kOut),
        count(rows * columns),
        groups((count + kMR - 1) / kMR) {
    const int64_t most = std::clamp<int64_t>(kTileFloats / (kPositions * job.channels) / kMR, 1, kMaxTiles / kMR);
    blocks = std::max<int64_t>(1, (groups + most - 1) / most);
    if (job.batch % nth) blocks = std::min(groups, (blocks + nth - 1) / nth * nth);  // equal shares of whole blocks
    block = (groups + blocks - 1) / blocks * kMR;
  }

  Span tiles(int64_t i) const {
    const Span part = split_range(groups, static_cast<int>(i), static_cast<int>(blocks));
    return {part.begin * kMR, std::min(part.end * kMR, count)};
  }
};

// One block: tiles [first, first + count) of an image.
class WinogradBlock {
 public:
  WinogradBlock(const ChannelsLastConvJob& job, const TileGrid& grid, float* memory)
      : job_(job), grid_(grid), in_(memory), products_(memory + kPositions * grid.block * job.channels) {}

  static int64_t floats(const ChannelsLastConvJob& job, const TileGrid& grid) {
    return kPositions * grid.block * (job.channels + kNR);
  }

  void transform_inputs(int64_t image, Span tiles) {
    const auto* x = static_cast<const float*>(job_.data[1]) + image * job_.in[1] * job_.in[2] * job_.channels;
    for (int64_t t = tiles.begin; t < tiles.end; ++t) {
      const int64_t row = t / grid_.columns * kOut - job_.padding[0], column = t % grid_.columns * kOut - job_.padding[1];
      const float* from[kPositions];
      for (int i = 0; i < kPositions; ++i) {
        const int64_t h = row + i / kIn, w = column + i % kIn;
        const bool inside = h >= 0 && h < job_.in[1] && w >= 0 && w < job_.in[2];
        from[i] = inside ? x + (h * job_.in[2] + w) * job_.channels : job_.zeros;
      }
      finite_[t - tiles.begin] = transform_tile(from, in_ + (t - tiles.begin) * job_.channels);
    }
  }

  // All positions of one panel of columns.
  void multiply(int64_t panel, int64_t tiles) {
    static constexpr float zeros[kNR] = {};
    const int64_t panels = (job_.columns + kNR - 1) / kNR;
    MicrokernelArgs args{};
    args.y_pitch = kNR;
    args.init = zeros;
    args.a_row = job_.channels * static_cast<int64_t>(sizeof(float));
    args.a_step = sizeof(float);
    args.b_step = kNR;
    args.depth = job_.channels;
    args.columns = kNR;
    for (int64_t i = 0; i < kPositions; ++i) {
      args.b = job_.packed + (i * panels + panel) * job_.channels * kNR;
      for (int64_t t = 0; t < tiles; t += kMR) {
        args.a = reinterpret_cast<const char*>(in_ + (i * grid_.block + t) * job_.channels);
        args.y = products_ + (i * grid_.block + t) * kNR;
        run_microkernel<2, true>(args, std::min<int64_t>(kMR, tiles - t));
      }
    }
  }

  // Results of one panel of columns.
  void transform_outputs(int64_t image, Span tiles, int64_t panel) {
    const int64_t first = panel * kNR, columns = std::min<int64_t>(kNR, job_.columns - first);
    alignas(64) float bias[kNR] = {}, out[kOut * kOut][kNR];
    if (job_.data[2]) std::memcpy(bias, static_cast<const float*>(job_.data[2]) + first, columns * sizeof(float));
    for (int64_t t = tiles.begin; t < tiles.end; ++t) {
      const float* from = products_ + (t - tiles.begin) * kNR;
      if (!finite_[t - tiles.begin]) multiply_directly(image, t, panel, bias, out);
      for (int v = 0; v < kNR && finite_[t - tiles.begin]; v += kVector) {
        Vector y[kOut][kOut];
        transform_products(from + v, y);
        for (int i = 0; i < kOut * kOut; ++i) store(out[i] + v, y[i / kOut][i % kOut] + load(bias + v));
      }
      write(image, t, first, columns, out);
    }
  }

 private:
  // V = B^T d B, for all channels. Returns whether all d are finite.
  bool transform_tile(const float* const (&from)[kPositions], float* to) {
    const int64_t pitch = grid_.block * job_.channels;
    Vector zeros = {};  // 0 * inf is NaN
    for (int64_t c = 0; c < job_.channels; c += kVector) {
      Vector rows[kPositions], all[kPositions];
#pragma GCC unroll 4
      for (int i = 0; i < kIn; ++i)  // columns of d
        transform_input(load(from[i] + c), load(from[4 + i] + c), load(from[8 + i] + c), load(from[12 + i] + c), rows + i, kIn);
#pragma GCC unroll 4
      for (int i = 0; i < kIn; ++i)
        transform_input(rows[4 * i], rows[4 * i + 1], rows[4 * i + 2], rows[4 * i + 3], all + 4 * i, 1);
#pragma GCC unroll 16
      for (int i = 0; i < kPositions; ++i) store(to + i * pitch + c, all[i]);
      zeros += 0.0f * (all[0] + all[3] + all[5] + all[12] + all[15]);  // every d is in one of them
    }
    bool finite = true;
    for (int i = 0; i < kVector; ++i) finite = finite && zeros[i] == 0;
    return finite;
  }

  // One weight of the 3 x 3, from the transformed ones: g0 = u0, g1 = u1 - u2, g2 = u3.
  float weight(int64_t panel, int64_t tap, int64_t channel, int64_t column) const {
    constexpr float inverse[3][kIn] = {{1, 0, 0, 0}, {0, 1, -1, 0}, {0, 0, 0, 1}};
    const int64_t panels = (job_.columns + kNR - 1) / kNR;
    float sum = 0;
    for (int i = 0; i < kPositions; ++i)
      if (const float f = inverse[tap / 3][i / kIn] * inverse[tap % 3][i % kIn]; f != 0)
        sum += f * job_.packed[((i * panels + panel) * job_.channels + channel) * kNR + column];
    return sum;
  }

  // The results of a tile without transforms: slow, and rarely needed.
  void multiply_directly(int64_t image, int64_t t, int64_t panel, const float* bias, float (&out)[kOut * kOut][kNR]) {
    const auto* x = static_cast<const float*>(job_.data[1]) + image * job_.in[1] * job_.in[2] * job_.channels;
    for (auto& row : out) std::memcpy(row, bias, sizeof(row));
    for (int64_t tap = 0; tap < 9; ++tap)
      for (int64_t c = 0; c < job_.channels; ++c)
        for (int64_t n = 0; n < kNR; ++n) {
          const float w = weight(panel, tap, c, n);
          for (int i = 0; i < kOut * kOut; ++i) {
            const int64_t h = t / grid_.columns * kOut - job_.padding[0] + i / kOut + tap / 3;
            const int64_t u = t % grid_.columns * kOut - job_.padding[1] + i % kOut + tap % 3;
            if (h >= 0 && h < job_.in[1] && u >= 0 && u < job_.in[2])
              out[i][n] += w * x[(h * job_.in[2] + u) * job_.channels + c];
          }
        }
  }

  // y = A^T m A.
  void transform_products(const float* m, Vector (&y)[kOut][kOut]) {
    const int64_t pitch = grid_.block * kNR;
    Vector half[kOut][kIn];
#pragma GCC unroll 4
    for (int i = 0; i < kIn; ++i) {
      const Vector a = load(m + i * pitch), b = load(m + (4 + i) * pitch), c = load(m + (8 + i) * pitch);
      half[0][i] = a + b + c;
      half[1][i] = b - c - load(m + (12 + i) * pitch);
    }
#pragma GCC unroll 2
    for (int i = 0; i < kOut; ++i) {
      y[i][0] = half[i][0] + half[i][1] + half[i][2];
      y[i][1] = half[i][1] - half[i][2] - half[i][3];
    }
  }

  // Residual, activation, and the pixels of the tile that are inside the result.
  void write(int64_t image, int64_t t, int64_t first, int64_t columns, float (&out)[kOut * kOut][kNR]) {
    static const MapJob no_scalars{};
    const auto* residual = static_cast<const float*>(job_.data[3]);
    float* to[kOut * kOut];
    for (int i = 0; i < kOut * kOut; ++i) {
      const int64_t h = t / grid_.columns * kOut + i / kOut, w = t % grid_.columns * kOut + i % kOut;
      const int64_t at = ((image * job_.out[1] + h) * job_.out[2] + w) * job_.columns + first;
      to[i] = h < job_.out[1] && w < job_.out[2] ? static_cast<float*>(job_.data[0]) + at : nullptr;
      if (!to[i]) continue;
      alignas(64) float more[kNR] = {};
      const float* add = residual ? residual + at : more;
      if (columns < kNR && residual) add = static_cast<const float*>(std::memcpy(more, add, columns * sizeof(float)));
      Vector sums[1][kNR / kVector];
      for (int v = 0; v < kNR / kVector; ++v) sums[0][v] = load(out[i] + v * kVector) + load(add + v * kVector);
      apply(job_.function, sums);
      for (int v = 0; v < kNR / kVector; ++v) store(out[i] + v * kVector, sums[0][v]);
    }
    apply_in_memory(
        job_.function, kOut * kOut * (kNR / kVector), [&](int i) { return load(out[0] + i * kVector); },
        [&](int i, Vector x) { store(out[0] + i * kVector, x); });
    if (job_.activation) {
      const void* x = out;
      job_.activation(no_scalars, out, &x, 0, kOut * kOut * kNR);
    }
    for (int i = 0; i < kOut * kOut; ++i) {
      if (!to[i]) continue;
      if (columns == kNR)
        for (int v = 0; v < kNR; v += kVector) store(to[i] + v, load(out[i] + v));
      else
        std::memcpy(to[i], out[i], columns * sizeof(float));
    }
  }

  const ChannelsLastConvJob& job_;
  const TileGrid& grid_;
  float *const in_, *const products_;  // [positions, tiles of a block, channels], [positions, tiles of a block, kNR]
  bool finite_[kMaxTiles];             // whether a tile has finite inputs
};

void conv_winograd(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const ChannelsLastConvJob*>(userdata);
  const TileGrid grid(job, nth);
  float* memory = scratch(WinogradBlock::floats(job, grid));
  if (!memory) return job.fail(0, "out of memory for its tiles. Free memory, or call with smaller sizes.");
  WinogradBlock block(job, grid, memory);
  const int64_t panels = (job.columns + kNR - 1) / kNR, units = job.batch * grid.blocks;
  const int64_t parts = nth > 1 && units < 4 * nth ? std::min(panels, (4 * nth + units - 1) / units) : 1;
  Loop loop;
  loop.push(units * parts, 0);
  int64_t filled = -1;
  const int64_t work = grid.block * kPositions * job.channels * job.columns / parts + 1;
  for_each_dynamic(job, loop, work, ith, nth, [&](int64_t unit, const int64_t*) {
    const int64_t part = unit % parts, at = unit / parts, image = at / grid.blocks;
    const Span tiles = grid.tiles(at % grid.blocks);
    if (tiles.end == tiles.begin) return;
    if (std::exchange(filled, at) != at) block.transform_inputs(image, tiles);
    const Span panel = split_range(panels, static_cast<int>(part), static_cast<int>(parts));
    for (int64_t p = panel.begin; p < panel.end; ++p) {
      block.multiply(p, tiles.end - tiles.begin);
      block.transform_outputs(image, tiles, p);
    }
  });
}

}  // namespace

Kernel conv_winograd_kernel() { return conv_winograd; }

bool fits_winograd(const ConvWeight& w) {
  constexpr int64_t most = 256 * 256;  // pairs of channels; beyond it, reading the larger weight costs more than is saved
  return w.groups == 1 && w.taps == 9 && w.channels % kVector == 0 && w.channels >= 2 * kVector && w.columns >= kNR &&
         w.channels * w.columns <= most;
}

int64_t packed_winograd_floats(const ConvWeight& w) { return kPositions * packed_floats(w.channels, w.columns); }

// U = G g G^T, in panels [position, columns / kNR, channels, kNR].
void pack_winograd_weight(float* packed, const float* weight, const ConvWeight& w) {
  constexpr double g[kIn][3] = {{1, 0, 0}, {0.5, 0.5, 0.5}, {0.5, -0.5, 0.5}, {0, 0, 1}};
  const int64_t panels = (w.columns + kNR - 1) / kNR;
  std::fill(packed, packed + packed_winograd_floats(w), 0.0f);
  for (int64_t n = 0; n < w.columns; ++n)
    for (int64_t c = 0; c < w.channels; ++c) {
      const float* from = weight + n * w.column + c * w.channel;
      float* to = packed + (n / kNR * w.channels + c) * kNR + n % kNR;
      for (int i = 0; i < kPositions; ++i) {
        double sum = 0;
        for (int k = 0; k < 9; ++k) sum += g[i / kIn][k / 3] * g[i % kIn][k % 3] * from[k];
        to[i * panels * w.channels * kNR] = static_cast<float>(sum);
      }
    }
}

}  // namespace keepdim::ggml
