// Convolutions of NCHW images, for weights that are not packed (conv_channels_last.cpp has the others), by implicit GEMM: im2col
// columns are packed for a few pixels at a time, so that the im2col matrix is not materialised. Depthwise convolutions and other
// dtypes use a direct kernel along image rows.
#include "ggml/kernels/conv_pool.h"
#include "ggml/kernels/gemm_microkernel.h"

namespace keepdim::ggml {
namespace {

constexpr int64_t kDepth = 256;  // k (channels * taps) per packed panel
constexpr int64_t kPanels = 4;   // panels of kNR pixels each
constexpr int64_t kPixels = kPanels * kNR;
constexpr int64_t kRows = 240;      // weight rows that fit in the L2 cache; a multiple of kMR
constexpr int64_t kLocalRows = 48;  // weight rows per gathered block; a multiple of kMR
static_assert(kRows % kMR == 0 && kLocalRows % kMR == 0);

// One phase per spatial dim; output pixels of the phase are numbered in row-major order.
struct PhaseGrid {
  const Phase* dim[kSpatialDims];
  int64_t pixels, taps_per_channel;

  PhaseGrid(const ConvJob& job, int64_t index) : pixels(1), taps_per_channel(1) {
    for (int d = kSpatialDims - 1; d >= 0; --d) {
      dim[d] = job.phase[d] + index % job.phases[d];
      index /= job.phases[d];
      pixels *= dim[d]->count;
      taps_per_channel *= dim[d]->taps;
    }
  }
};

// Consecutive pixels of one row of a grid, within one block of pixels.
struct Segment {
  int64_t at, row, plane, column, count;  // at: index in the block
};

int64_t split_segments(const PhaseGrid& grid, Span pixels, Segment* list) {
  const int64_t width = grid.dim[2]->count, height = grid.dim[1]->count;
  int64_t n = 0;
  for (int64_t p = pixels.begin; p < pixels.end;) {
    const int64_t column = p % width, row = p / width;
    const int64_t count = std::min(width - column, pixels.end - p);
    list[n++] = {p - pixels.begin, row % height, row / height, column, count};
    p += count;
  }
  return n;
}

// im2col panels [kPanels, rows, kNR]; rows are channels * taps.
struct PackedPanels {
  float* data;
  int64_t rows;

  // Calls body(to, j, n) for pieces of pixels `part` of a segment, split at panel boundaries; `to` is their address in row 0.
  template <class Body>
  void each_piece(const Segment& s, Span part, Body&& body) const {
    for (int64_t j = part.begin; j < part.end;) {
      const int64_t at = s.at + j, n = std::min(part.end - j, kNR - at % kNR);
      body(data + at / kNR * (rows * kNR) + at % kNR, j, n);
      j += n;
    }
  }
};

// One kernel tap for channels [first, last), those whose row is in the packed slice; k: row of the first channel.
struct PackedTap {
  const Tap &z, &y, &x;
  int64_t first, last, k;
};

// Packs one tap for the pixels of one segment and all channels of the tap; pixels outside of the image are 0.
inline void pack_tap(const ConvJob& job, const PhaseGrid& grid, const float* x, const PackedTap& tap, const Segment& s,
                     const PackedPanels& panels) {
  const int64_t taps = grid.taps_per_channel, plane = job.in[0] * job.in[1] * job.in[2], stride = grid.dim[2]->stride;
  const int64_t z = s.plane * grid.dim[0]->stride + tap.z.offset, y = s.row * grid.dim[1]->stride + tap.y.offset;
  const int64_t first = tap.first, last = tap.last, k = tap.k;
  Span valid{std::clamp<int64_t>(tap.x.begin - s.column, 0, s.count), std::clamp<int64_t>(tap.x.end - s.column, 0, s.count)};
  if (z < 0 || z >= job.in[0] || y < 0 || y >= job.in[1]) valid = {0, 0};
  const float* from = x + first * plane + (z * job.in[1] + y) * job.in[2] + s.column * stride + tap.x.offset;
  const auto zero = [&](float* to, int64_t, int64_t n) {
    to += k * kNR;
    for (int64_t ch = first; ch < last; ++ch, to += taps * kNR) std::fill(to, to + n, 0.0f);
  };
  panels.each_piece(s, {0, valid.begin}, zero);
  panels.each_piece(s, valid, [&](float* to, int64_t j, int64_t n) {
    to += k * kNR;
    const float* source = from + j * stride;
    if (stride == 1 && n == kNR) {
      for (int64_t ch = first; ch < last; ++ch, to += taps * kNR, source += plane) std::memcpy(to, source, kNR * sizeof(float));
    } else if (stride == 2 && n == kNR) {
      for (int64_t ch = first; ch < last; ++ch, to += taps * kNR, source += plane)
        for (int l = 0; l < kNR; ++l) to[l] = source[2 * l];
    } else {
      for (int64_t ch = first; ch < last; ++ch, to += taps * kNR, source += plane)
        for (int64_t l = 0; l < n; ++l) to[l] = source[l * stride];
    }
  });
  panels.each_piece(s, {valid.end, s.count}, zero);
}

// Packs rows [depth.begin, depth.end) of the im2col matrix [channels * taps, pixels] for the given pixels.
void pack(const ConvJob& job, const PhaseGrid& grid, const float* x, Span depth, Span pixels, float* panels) {
  const int64_t taps = grid.taps_per_channel;
  const PackedPanels to{panels, depth.end - depth.begin};
  Segment segments[kPixels];
  const int64_t count = split_segments(grid, pixels, segments);
  int64_t tap = 0;
  for (int64_t a = 0; a < grid.dim[0]->taps; ++a)
    for (int64_t b = 0; b < grid.dim[1]->taps; ++b)
      for (int64_t c = 0; c < grid.dim[2]->taps; ++c, ++tap) {
        const int64_t first = (std::max<int64_t>(depth.begin - tap, 0) + taps - 1) / taps;
        const int64_t last = depth.end > tap ? (depth.end - tap + taps - 1) / taps : 0;
        if (first >= last) continue;
        const PackedTap one{
            grid.dim[0]->tap[a], grid.dim[1]->tap[b], grid.dim[2]->tap[c], first, last, first * taps + tap - depth.begin};
        for (int64_t i = 0; i < count; ++i) pack_tap(job, grid, x, one, segments[i], to);
      }
}

// to [rows, depth] = weight rows restricted to the taps of the grid (transposed convolution).
void gather_weight(const ConvJob& job, const PhaseGrid& grid, const char* w, Span rows, Span depth, float* to) {
  const int64_t taps = grid.taps_per_channel, n = depth.end - depth.begin;
  for (int64_t k = depth.begin; k < depth.end; ++k) {
    const int64_t tap = k % taps, c = tap % grid.dim[2]->taps, rest = tap / grid.dim[2]->taps;
    const int64_t b = rest % grid.dim[1]->taps, a = rest / grid.dim[1]->taps;
    const int64_t position = (grid.dim[0]->tap[a].position * job.kernel[1] + grid.dim[1]->tap[b].position) * job.kernel[2] +
                             grid.dim[2]->tap[c].position;
    const char* from = w + k / taps * job.w_channel + position * static_cast<int64_t>(sizeof(float));
    for (int64_t r = rows.begin; r < rows.end; ++r)
      to[(r - rows.begin) * n + k - depth.begin] = *reinterpret_cast<const float*>(from + r * job.w_row);
  }
}

// Per-thread buffers.
struct ThreadBuffers {
  alignas(64) float panels[kPixels * kDepth];
  float weight[kLocalRows * kDepth * 2];
  float result[kLocalRows * kPixels];
  const char* gathered = nullptr;  // weight rows that are in `weight`, by the address of the first
};

// y [rows, pixels] = weight [rows, depth] @ panels [depth, pixels] + bias, or += if `accumulate`.
void multiply_panels(const MicrokernelArgs& first, int64_t rows, const float* bias, bool accumulate, int64_t pixels) {
  float start[kMR * kNR];
  for (int64_t p = 0; p < pixels; p += kNR) {
    MicrokernelArgs args = first;
    args.columns = std::min<int64_t>(kNR, pixels - p);
    args.b = first.b + p * first.depth;
    for (int64_t r = 0; r < rows; r += kMR) {
      const int64_t height = std::min<int64_t>(kMR, rows - r);
      args.y = first.y + r * args.y_pitch + p;
      args.a = first.a + r * args.a_row;
      args.init = args.y;
      args.init_pitch = args.y_pitch;
      if (!accumulate) {
        for (int64_t i = 0; i < height; ++i) std::fill(start + i * kNR, start + (i + 1) * kNR, bias ? bias[r + i] : 0.0f);
        args.init = start;
        args.init_pitch = kNR;
      }
      if (args.columns == kNR)
        run_microkernel<2, true>(args, height);
      else
        run_microkernel<2, false>(args, height);
    }
  }
}

// A block of pixels of a grid that covers the whole result: written in place.
void dense_block(const ConvJob& job, const PhaseGrid& grid, const float* x, const char* w, const float* bias, float* y, Span rows,
                 Span pixels, ThreadBuffers& buffers) {
  const int64_t depth = job.channels * grid.taps_per_channel, n = pixels.end - pixels.begin;
  int64_t k = 0;
  do {
    MicrokernelArgs args;
    args.depth = std::min(kDepth, depth - k);
    args.a_row = job.w_row;
    args.a_step = sizeof(float);
    args.b = buffers.panels;
    args.b_step = kNR;
    args.y_pitch = grid.pixels;
    pack(job, grid, x, {k, k + args.depth}, pixels, buffers.panels);
    for (int64_t r = rows.begin; r < rows.end; r += kRows) {
      args.y = y + r * grid.pixels + pixels.begin;
      args.a = w + r * job.w_row + k * args.a_step;
      multiply_panels(args, std::min(kRows, rows.end - r), bias ? bias + r : nullptr, k > 0, n);
    }
    k += kDepth;
  } while (k < depth);
}

// The same for a grid with gaps (transposed convolution). The weights are gathered, once for all pixels if they fit.
void scattered_block(const ConvJob& job, const PhaseGrid& grid, const float* x, const char* w, const float* bias, float* y,
                     Span rows, Span pixels, ThreadBuffers& buffers) {
  const int64_t depth = job.channels * grid.taps_per_channel, n = pixels.end - pixels.begin, height = rows.end - rows.begin;
  const bool cached = height * depth <= static_cast<int64_t>(std::size(buffers.weight));
  const char* key = w + rows.begin * job.w_row;
  if (cached && buffers.gathered != key) gather_weight(job, grid, w, rows, {0, depth}, buffers.weight);
  buffers.gathered = cached ? key : nullptr;
  int64_t k = 0;
  do {
    MicrokernelArgs args;
    args.depth = std::min(kDepth, depth - k);
    args.a = reinterpret_cast<const char*>(buffers.weight + (cached ? k : 0));
    args.a_row = (cached ? depth : args.depth) * static_cast<int64_t>(sizeof(float));
    args.a_step = sizeof(float);
    args.b = buffers.panels;
    args.b_step = kNR;
    args.y = buffers.result;
    args.y_pitch = kPixels;
    pack(job, grid, x, {k, k + args.depth}, pixels, buffers.panels);
    if (!cached) gather_weight(job, grid, w, rows, {k, k + args.depth}, buffers.weight);
    multiply_panels(args, height, bias ? bias + rows.begin : nullptr, k > 0, n);
    k += kDepth;
  } while (k < depth);
  const int64_t plane = job.out[0] * job.out[1] * job.out[2];
  Segment segments[kPixels];
  const int64_t count = split_segments(grid, pixels, segments);
  for (int64_t i = 0; i < count; ++i) {
    const Segment& s = segments[i];
    const int64_t z = grid.dim[0]->first + s.plane * grid.dim[0]->step;
    const int64_t v = grid.dim[1]->first + s.row * grid.dim[1]->step;
    const int64_t step = grid.dim[2]->step, u = grid.dim[2]->first + s.column * step;
    float* to = y + rows.begin * plane + (z * job.out[1] + v) * job.out[2] + u;
    for (int64_t h = 0; h < height; ++h, to += plane)
      for (int64_t j = 0; j < s.count; ++j) to[j * step] = buffers.result[h * kPixels + s.at + j];
  }
}

void conv(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const ConvJob*>(userdata);
  const int64_t in_plane = job.in[0] * job.in[1] * job.in[2], out_plane = job.out[0] * job.out[1] * job.out[2];
  const int64_t phases = job.phases[0] * job.phases[1] * job.phases[2];
  const int64_t images = job.batch * job.groups, tiles = (job.rows + kMR - 1) / kMR;
  ThreadBuffers buffers;
  for (int64_t phase = 0; phase < phases; ++phase) {
    const PhaseGrid grid(job, phase);
    const int64_t blocks = (grid.pixels + kPixels - 1) / kPixels;
    const bool dense = grid.pixels == out_plane && job.w_channel == grid.taps_per_channel * static_cast<int64_t>(sizeof(float));
    // Dense: rows are split only if there are too few other work items, since each part packs the pixels again. Gathered
    // rows are split by the size of their buffer.
    int64_t parts = dense ? 1 : (job.rows + kLocalRows - 1) / kLocalRows;
    const int64_t units = images * blocks * parts;
    if (nth > 1 && units > 0 && units < 4 * nth) parts = std::min(tiles, parts * ((4 * nth + units - 1) / units));
    buffers.gathered = nullptr;
    const Span span = split_range(images * blocks * parts, ith, nth);
    for (int64_t i = span.begin; i < span.end; ++i) {
      // Consecutive work items share pixels (dense) or gathered rows.
      const int64_t part = dense ? i % parts : i / blocks % parts, block = dense ? i / parts % blocks : i % blocks;
      const int64_t image = i / parts / blocks, group = image % job.groups;
      const Span cut = split_range(tiles, static_cast<int>(part), static_cast<int>(parts));
      const Span rows{cut.begin * kMR, std::min(cut.end * kMR, job.rows)};
      const Span pixels{block * kPixels, std::min((block + 1) * kPixels, grid.pixels)};
      const float* x = static_cast<const float*>(job.data[1]) + image * job.channels * in_plane;
      const char* w = static_cast<const char*>(job.data[2]) + group * job.w_group;
      const float* bias = job.data[3] ? static_cast<const float*>(job.data[3]) + group * job.rows : nullptr;
      float* y = static_cast<float*>(job.data[0]) + image * job.rows * out_plane;
      (dense ? dense_block : scattered_block)(job, grid, x, w, bias, y, rows, pixels, buffers);
    }
  }
}

// ---- direct convolution along image rows

constexpr int64_t kRowChunk = 256;  // outputs per chunk of a row

// One output row of one output channel: the weighted sum of shifted input rows.
template <class T>
void direct_row(const ConvJob& job, const PhaseGrid& grid, const T* x, const char* w, T bias, T* y, int64_t z, int64_t v) {
  const int64_t plane = job.in[0] * job.in[1] * job.in[2], stride = grid.dim[2]->stride, step = grid.dim[2]->step;
  for (int64_t j0 = 0; j0 < grid.dim[2]->count; j0 += kRowChunk) {
    const int64_t n = std::min(kRowChunk, grid.dim[2]->count - j0);
    T sum[kRowChunk];
    std::fill(sum, sum + n, bias);
    for (int64_t channel = 0; channel < job.channels; ++channel)
      for (int64_t a = 0; a < grid.dim[0]->taps; ++a)
        for (int64_t b = 0; b < grid.dim[1]->taps; ++b) {
          const Tap &ta = grid.dim[0]->tap[a], &tb = grid.dim[1]->tap[b];
          const int64_t iz = z * grid.dim[0]->stride + ta.offset, iv = v * grid.dim[1]->stride + tb.offset;
          if (iz < 0 || iz >= job.in[0] || iv < 0 || iv >= job.in[1]) continue;
          const T* row = x + channel * plane + (iz * job.in[1] + iv) * job.in[2];
          const T* weight = reinterpret_cast<const T*>(w + channel * job.w_channel) +
                            (ta.position * job.kernel[1] + tb.position) * job.kernel[2];
          for (int64_t c = 0; c < grid.dim[2]->taps; ++c) {
            const Tap& along = grid.dim[2]->tap[c];
            const int64_t begin = std::max(along.begin - j0, int64_t{0}), end = std::min(along.end - j0, n);
            const T factor = weight[along.position];
            const T* from = row + j0 * stride + along.offset;
            if (stride == 1)
              for (int64_t j = begin; j < end; ++j) sum[j] += factor * from[j];
            else
              for (int64_t j = begin; j < end; ++j) sum[j] += factor * from[stride * j];
          }
        }
    T* to = y + grid.dim[2]->first + j0 * step;
    for (int64_t j = 0; j < n; ++j) to[j * step] = sum[j];
  }
}

// ---- depthwise convolution of 2-d images

constexpr int64_t kBandIn = 16384;  // elements of a padded input band
constexpr int64_t kBandOut = 4096;  // elements of the output computed from it
constexpr int64_t kMaxTaps = 128;
constexpr int64_t kBandStep = 4 * kVector;  // elements per iteration

// Copies a band of input rows with padding, de-interleaved by the stride: inputs of adjacent outputs become adjacent, so that
// each tap is one shifted multiply-add over the whole band.
template <class T>
struct Band {
  const Phase &phase_y, &phase_x;
  int64_t taps = 0, pitch = 0, rows = 0;  // rows: output rows per band
  int64_t plane = 0, used = 0;            // elements per stride remainder; elements used in `image`
  bool fits = false;
  alignas(64) T image[kBandIn], band_out[kBandOut];

  explicit Band(const ConvJob& job) : phase_y(*job.phase[1]), phase_x(*job.phase[2]) {
    const bool flat = job.in[0] == 1 && job.out[0] == 1 && job.kernel[0] == 1;
    if (job.transposed || job.channels != 1 || !flat || job.phase[0]->tap->offset != 0) return;
    if (phase_y.stride > kBandIn || phase_x.stride > kBandIn) return;
    taps = phase_y.taps * phase_x.taps;
    pitch = (tap_extent(phase_x) + (phase_x.count - 1) * phase_x.stride) / phase_x.stride + 1;
    if (taps > kMaxTaps || pitch > kBandOut - kBandStep) return;
    rows = std::min((kBandOut - kBandStep) / pitch, phase_y.count);
    plane = ((tap_extent(phase_y) + (rows - 1) * phase_y.stride) / phase_y.stride + 1) * pitch;
    used = plane * phase_y.stride * phase_x.stride + tap_extent(phase_x) / phase_x.stride +
           kBandStep;  // the last iteration reads past the end
    fits = used <= kBandIn;
  }
  static int64_t tap_extent(const Phase& p) { return p.tap[p.taps - 1].offset - p.tap->offset; }

  void read(const ConvJob& job, const T* x, int64_t first) {
    std::fill(image, image + used, T(0));
    const int64_t top = first * phase_y.stride + phase_y.tap->offset, left = phase_x.tap->offset, s = phase_x.stride;
    for (int64_t r = 0; r <= tap_extent(phase_y) + (rows - 1) * phase_y.stride; ++r) {
      if (top + r < 0 || top + r >= job.in[1]) continue;
      const T* row = x + (top + r) * job.in[2];
      for (int64_t p = 0; p < s; ++p) {
        T* to = image + (r % phase_y.stride * s + p) * plane + r / phase_y.stride * pitch;
        // q for which column left + p + q * s is in bounds
        const int64_t begin = left + p >= 0 ? 0 : (s - 1 - left - p) / s;
        const int64_t end = std::min(pitch, left + p >= job.in[2] ? 0 : (job.in[2] - 1 - left - p) / s + 1);
        if (s == 1 && end > begin)
          std::memcpy(to + begin, row + left + begin, (end - begin) * sizeof(T));
        else
          for (int64_t q = begin; q < end; ++q) to[q] = row[left + p + q * s];
      }
    }
  }

  void compute(const T* weight, T bias, int64_t count) {
    int64_t shift[kMaxTaps], t = 0;
    for (int64_t a = 0; a < phase_y.taps; ++a)
      for (int64_t b = 0; b < phase_x.taps; ++b) {
        const int64_t r = phase_y.tap[a].offset - phase_y.tap->offset, c = phase_x.tap[b].offset - phase_x.tap->offset;
        shift[t++] =
            (r % phase_y.stride * phase_x.stride + c % phase_x.stride) * plane + r / phase_y.stride * pitch + c / phase_x.stride;
      }
    using Lanes = VectorOf<T>;
    using Unaligned = typename Register<T>::Unaligned;
    constexpr int64_t width = Register<T>::count;
    static_assert(kBandStep % (4 * width) == 0);
    for (int64_t i = 0; i < count * pitch; i += 4 * width) {
      Lanes s0 = Lanes{} + bias, s1 = s0, s2 = s0, s3 = s0;
      for (int64_t k = 0; k < taps; ++k) {
        const T factor = weight[k];
        const auto* from = reinterpret_cast<const Unaligned*>(image + shift[k] + i);
        s0 += factor * from[0], s1 += factor * from[1], s2 += factor * from[2], s3 += factor * from[3];
      }
      auto* to = reinterpret_cast<Unaligned*>(band_out + i);
      to[0] = s0, to[1] = s1, to[2] = s2, to[3] = s3;
    }
  }

  void run(const ConvJob& job, const T* x, const T* weight, T bias, T* y) {
    for (int64_t first = 0; first < phase_y.count; first += rows) {
      const int64_t count = std::min(rows, phase_y.count - first);
      read(job, x, first);
      compute(weight, bias, count);
      for (int64_t r = 0; r < count; ++r)
        std::memcpy(y + (first + r) * phase_x.count, band_out + r * pitch, phase_x.count * sizeof(T));
    }
  }
};

template <class T>
void direct_conv(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const ConvJob*>(userdata);
  const int64_t in_plane = job.in[0] * job.in[1] * job.in[2], out_plane = job.out[0] * job.out[1] * job.out[2];
  const int64_t phases = job.phases[0] * job.phases[1] * job.phases[2], all = job.groups * job.rows;
  const Span span = split_range(job.batch * all, ith, nth);
  Band<T> band(job);
  for (int64_t i = span.begin; i < span.end; ++i) {
    const int64_t image = i / all, group = i % all / job.rows, row = i % job.rows;
    const T* x = static_cast<const T*>(job.data[1]) + (image * job.groups + group) * job.channels * in_plane;
    const char* w = static_cast<const char*>(job.data[2]) + group * job.w_group + row * job.w_row;
    const T bias = job.data[3] ? static_cast<const T*>(job.data[3])[group * job.rows + row] : T(0);
    T* y = static_cast<T*>(job.data[0]) + i * out_plane;
    if (band.fits) {
      band.run(job, x, reinterpret_cast<const T*>(w), bias, y);
      continue;
    }
    for (int64_t phase = 0; phase < phases; ++phase) {
      const PhaseGrid grid(job, phase);
      for (int64_t z = 0; z < grid.dim[0]->count; ++z)
        for (int64_t v = 0; v < grid.dim[1]->count; ++v) {
          const int64_t oz = grid.dim[0]->first + z * grid.dim[0]->step;
          const int64_t ov = grid.dim[1]->first + v * grid.dim[1]->step;
          direct_row(job, grid, x, w, bias, y + (oz * job.out[1] + ov) * job.out[2], z, v);
        }
    }
  }
}

}  // namespace

Kernel conv_kernel() { return conv; }

Kernel direct_conv_kernel(DType dtype) {
  switch (dtype) {
    case DType::f32: return direct_conv<float>;
    case DType::f64: return direct_conv<double>;
    case DType::i64: return direct_conv<uint64_t>;  // unsigned: integer arithmetic wraps
    case DType::i32: return direct_conv<uint32_t>;
    default: return nullptr;
  }
}

}  // namespace keepdim::ggml
