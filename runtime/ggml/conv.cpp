// Convolutions. Columns of the image are packed for a few pixels at a time and multiplied as they are needed, so no
// matrix of them is ever in memory; groups of one channel go along the rows of the image instead.
#include "tile.h"
#include "window.h"

namespace keepdim::ggml {
namespace {

constexpr int64_t kDepth = 256;  // products that are packed at once
constexpr int64_t kPanels = 4;   // of kWidth pixels each
constexpr int64_t kPixels = kPanels * kWidth;
constexpr int64_t kRows = 240;      // rows of the weight that stay in the second cache; whole tiles
constexpr int64_t kLocalRows = 48;  // rows that are gathered first; whole tiles
static_assert(kRows % kHeight == 0 && kLocalRows % kHeight == 0);

// One phase of each dim, and its pixels as one list.
struct Grid {
  const Phase* dim[kSpace];
  int64_t pixels, positions;

  Grid(const ConvJob& job, int64_t index) : pixels(1), positions(1) {
    for (int d = kSpace - 1; d >= 0; --d) {
      dim[d] = job.phase[d] + index % job.phases[d];
      index /= job.phases[d];
      pixels *= dim[d]->count;
      positions *= dim[d]->taps;
    }
  }
};

// Pixels of one row of a grid, all inside one block.
struct Segment {
  int64_t at, row, plane, column, count;  // at: in the block
};

int64_t segments_of(const Grid& grid, Span pixels, Segment* list) {
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

// Products [depth.begin, depth.end) of the pixels, in panels: panel[p][k][column]. k counts channels, in each the taps.
void pack(const ConvJob& job, const Grid& grid, const float* x, Span depth, Span pixels, float* panels) {
  const int64_t taps = grid.positions, rows = depth.end - depth.begin;
  const int64_t plane = job.in[0] * job.in[1] * job.in[2];
  Segment segments[kPixels];
  const int64_t count = segments_of(grid, pixels, segments);
  // One segment reaches over panels; what it writes is cut there.
  const auto each_part = [&](const Segment& s, Span part, auto&& body) {
    for (int64_t j = part.begin; j < part.end;) {
      const int64_t at = s.at + j, n = std::min(part.end - j, kWidth - at % kWidth);
      body(panels + at / kWidth * (rows * kWidth) + at % kWidth, j, n);
      j += n;
    }
  };
  int64_t tap = 0;
  for (int64_t a = 0; a < grid.dim[0]->taps; ++a)
    for (int64_t b = 0; b < grid.dim[1]->taps; ++b)
      for (int64_t c = 0; c < grid.dim[2]->taps; ++c, ++tap) {
        // The channels for which this tap is in the span.
        const int64_t first = (std::max<int64_t>(depth.begin - tap, 0) + taps - 1) / taps;
        const int64_t last = depth.end > tap ? (depth.end - tap + taps - 1) / taps : 0;
        if (first >= last) continue;
        const int64_t k = first * taps + tap - depth.begin, stride = grid.dim[2]->stride;
        for (int64_t i = 0; i < count; ++i) {
          const Segment& s = segments[i];
          const int64_t z = s.plane * grid.dim[0]->stride + grid.dim[0]->tap[a].offset;
          const int64_t y = s.row * grid.dim[1]->stride + grid.dim[1]->tap[b].offset;
          const int64_t start = s.column * stride + grid.dim[2]->tap[c].offset;
          const Tap& along = grid.dim[2]->tap[c];
          Span valid{std::clamp<int64_t>(along.begin - s.column, 0, s.count),
                     std::clamp<int64_t>(along.end - s.column, 0, s.count)};
          if (z < 0 || z >= job.in[0] || y < 0 || y >= job.in[1]) valid = {0, 0};
          const float* from = x + first * plane + (z * job.in[1] + y) * job.in[2] + start;
          const auto zero = [&](float* to, int64_t, int64_t n) {
            to += k * kWidth;
            for (int64_t ch = first; ch < last; ++ch, to += taps * kWidth) std::fill(to, to + n, 0.0f);
          };
          each_part(s, {0, valid.begin}, zero);
          each_part(s, valid, [&](float* to, int64_t j, int64_t n) {
            to += k * kWidth;
            const float* source = from + j * stride;
            if (stride == 1 && n == kWidth) {
              for (int64_t ch = first; ch < last; ++ch, to += taps * kWidth, source += plane)
                std::memcpy(to, source, kWidth * sizeof(float));
            } else if (stride == 2 && n == kWidth) {
              for (int64_t ch = first; ch < last; ++ch, to += taps * kWidth, source += plane)
                for (int l = 0; l < kWidth; ++l) to[l] = source[2 * l];
            } else {
              for (int64_t ch = first; ch < last; ++ch, to += taps * kWidth, source += plane)
                for (int64_t l = 0; l < n; ++l) to[l] = source[l * stride];
            }
          });
          each_part(s, {valid.end, s.count}, zero);
        }
      }
}

// weight[r, k] of a grid's own taps, for a transposed convolution: [rows][depth].
void gather_weight(const ConvJob& job, const Grid& grid, const char* w, Span rows, Span depth, float* to) {
  const int64_t taps = grid.positions, n = depth.end - depth.begin;
  for (int64_t k = depth.begin; k < depth.end; ++k) {
    const int64_t tap = k % taps, c = tap % grid.dim[2]->taps, rest = tap / grid.dim[2]->taps;
    const int64_t b = rest % grid.dim[1]->taps, a = rest / grid.dim[1]->taps;
    const int64_t position = (grid.dim[0]->tap[a].position * job.kernel[1] + grid.dim[1]->tap[b].position) *
                                 job.kernel[2] + grid.dim[2]->tap[c].position;
    const char* from = w + k / taps * job.w_channel + position * static_cast<int64_t>(sizeof(float));
    for (int64_t r = rows.begin; r < rows.end; ++r)
      to[(r - rows.begin) * n + k - depth.begin] = *reinterpret_cast<const float*>(from + r * job.w_row);
  }
}

// What a thread has beside the operands.
struct Room {
  alignas(64) float panels[kPixels * kDepth];
  float weight[kLocalRows * kDepth * 2];
  float result[kLocalRows * kPixels];
  const char* gathered = nullptr;  // the first of the rows in `weight`
};

// tile.y = rows of the weight times the packed panels, added to the bias or to what stands there.
void multiply_panels(const Tile& first, int64_t rows, const float* bias, bool more, int64_t pixels) {
  float start[kHeight * kWidth];
  for (int64_t p = 0; p < pixels; p += kWidth) {
    Tile tile = first;
    tile.columns = std::min<int64_t>(kWidth, pixels - p);
    tile.b = first.b + p * first.depth;
    for (int64_t r = 0; r < rows; r += kHeight) {
      const int64_t height = std::min<int64_t>(kHeight, rows - r);
      tile.y = first.y + r * tile.y_pitch + p;
      tile.a = first.a + r * tile.a_row;
      tile.start = tile.y;
      tile.start_pitch = tile.y_pitch;
      if (!more) {
        for (int64_t i = 0; i < height; ++i)
          std::fill(start + i * kWidth, start + (i + 1) * kWidth, bias ? bias[r + i] : 0.0f);
        tile.start = start;
        tile.start_pitch = kWidth;
      }
      if (tile.columns == kWidth) multiply_rows<2, true>(tile, height);
      else multiply_rows<2, false>(tile, height);
    }
  }
}

// Pixels of a result that lies along the grid: written where it belongs.
void whole_block(const ConvJob& job, const Grid& grid, const float* x, const char* w, const float* bias, float* y,
                 Span rows, Span pixels, Room& room) {
  const int64_t depth = job.channels * grid.positions, n = pixels.end - pixels.begin;
  int64_t k = 0;
  do {
    Tile tile;
    tile.depth = std::min(kDepth, depth - k);
    tile.a_row = job.w_row;
    tile.a_step = sizeof(float);
    tile.b = room.panels;
    tile.b_step = kWidth;
    tile.y_pitch = grid.pixels;
    pack(job, grid, x, {k, k + tile.depth}, pixels, room.panels);
    for (int64_t r = rows.begin; r < rows.end; r += kRows) {
      tile.y = y + r * grid.pixels + pixels.begin;
      tile.a = w + r * job.w_row + k * tile.a_step;
      multiply_panels(tile, std::min(kRows, rows.end - r), bias ? bias + r : nullptr, k > 0, n);
    }
    k += kDepth;
  } while (k < depth);
}

// The same for a grid with gaps, whose weights have gaps too; they are gathered once for all pixels where they fit.
void scattered_block(const ConvJob& job, const Grid& grid, const float* x, const char* w, const float* bias, float* y,
                     Span rows, Span pixels, Room& room) {
  const int64_t depth = job.channels * grid.positions, n = pixels.end - pixels.begin, height = rows.end - rows.begin;
  const bool kept = height * depth <= static_cast<int64_t>(std::size(room.weight));
  const char* key = w + rows.begin * job.w_row;
  if (kept && room.gathered != key) gather_weight(job, grid, w, rows, {0, depth}, room.weight);
  room.gathered = kept ? key : nullptr;
  int64_t k = 0;
  do {
    Tile tile;
    tile.depth = std::min(kDepth, depth - k);
    tile.a = reinterpret_cast<const char*>(room.weight + (kept ? k : 0));
    tile.a_row = (kept ? depth : tile.depth) * static_cast<int64_t>(sizeof(float));
    tile.a_step = sizeof(float);
    tile.b = room.panels;
    tile.b_step = kWidth;
    tile.y = room.result;
    tile.y_pitch = kPixels;
    pack(job, grid, x, {k, k + tile.depth}, pixels, room.panels);
    if (!kept) gather_weight(job, grid, w, rows, {k, k + tile.depth}, room.weight);
    multiply_panels(tile, height, bias ? bias + rows.begin : nullptr, k > 0, n);
    k += kDepth;
  } while (k < depth);
  const int64_t plane = job.out[0] * job.out[1] * job.out[2];
  Segment segments[kPixels];
  const int64_t count = segments_of(grid, pixels, segments);
  for (int64_t i = 0; i < count; ++i) {
    const Segment& s = segments[i];
    const int64_t z = grid.dim[0]->first + s.plane * grid.dim[0]->step;
    const int64_t v = grid.dim[1]->first + s.row * grid.dim[1]->step;
    const int64_t step = grid.dim[2]->step, u = grid.dim[2]->first + s.column * step;
    float* to = y + rows.begin * plane + (z * job.out[1] + v) * job.out[2] + u;
    for (int64_t h = 0; h < height; ++h, to += plane)
      for (int64_t j = 0; j < s.count; ++j) to[j * step] = room.result[h * kPixels + s.at + j];
  }
}

void conv(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const ConvJob*>(userdata);
  const int64_t in_plane = job.in[0] * job.in[1] * job.in[2], out_plane = job.out[0] * job.out[1] * job.out[2];
  const int64_t phases = job.phases[0] * job.phases[1] * job.phases[2];
  const int64_t images = job.batch * job.groups, tiles = (job.rows + kHeight - 1) / kHeight;
  Room room;
  for (int64_t phase = 0; phase < phases; ++phase) {
    const Grid grid(job, phase);
    const int64_t blocks = (grid.pixels + kPixels - 1) / kPixels;
    const bool whole = grid.pixels == out_plane && job.w_channel == grid.positions * static_cast<int64_t>(sizeof(float));
    // Rows that lie as they are read are cut only when there is too little else to share out: each part packs for
    // itself. Others are cut as there is room for them.
    int64_t parts = whole ? 1 : (job.rows + kLocalRows - 1) / kLocalRows;
    const int64_t units = images * blocks * parts;
    if (nth > 1 && units > 0 && units < 4 * nth) parts = std::min(tiles, parts * ((4 * nth + units - 1) / units));
    room.gathered = nullptr;
    const Span span = share(images * blocks * parts, ith, nth);
    for (int64_t i = span.begin; i < span.end; ++i) {
      // Blocks that share packed pixels follow each other; or those that share gathered rows.
      const int64_t part = whole ? i % parts : i / blocks % parts, block = whole ? i / parts % blocks : i % blocks;
      const int64_t image = i / parts / blocks, group = image % job.groups;
      const Span cut = share(tiles, static_cast<int>(part), static_cast<int>(parts));
      const Span rows{cut.begin * kHeight, std::min(cut.end * kHeight, job.rows)};
      const Span pixels{block * kPixels, std::min((block + 1) * kPixels, grid.pixels)};
      const float* x = static_cast<const float*>(job.data[1]) + image * job.channels * in_plane;
      const char* w = static_cast<const char*>(job.data[2]) + group * job.w_group;
      const float* bias = job.data[3] ? static_cast<const float*>(job.data[3]) + group * job.rows : nullptr;
      float* y = static_cast<float*>(job.data[0]) + image * job.rows * out_plane;
      (whole ? whole_block : scattered_block)(job, grid, x, w, bias, y, rows, pixels, room);
    }
  }
}

// ---- along the rows of the image

constexpr int64_t kRun = 256;  // outputs summed at once

// One row of a grid's outputs of one channel: the sum of shifted rows of the image.
template <class T>
void direct_row(const ConvJob& job, const Grid& grid, const T* x, const char* w, T bias, T* y, int64_t z, int64_t v) {
  const int64_t plane = job.in[0] * job.in[1] * job.in[2], stride = grid.dim[2]->stride, step = grid.dim[2]->step;
  for (int64_t j0 = 0; j0 < grid.dim[2]->count; j0 += kRun) {
    const int64_t n = std::min(kRun, grid.dim[2]->count - j0);
    T sum[kRun];
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

// ---- one plane with one kernel

constexpr int64_t kImage = 16384;  // elements of a part of the padded image
constexpr int64_t kMade = 4096;    // of the result made of it
constexpr int64_t kMaxTaps = 128;
constexpr int64_t kLong = 4 * kVector;  // elements made at once

// A band of the image is copied with its padding, and with strides undone: what is read for neighbouring outputs lies
// side by side, so that every tap is one shift of the whole band.
template <class T>
struct Band {
  const Phase &down, &along;
  int64_t taps = 0, pitch = 0, rows = 0;  // rows: of the result, in a band
  int64_t plane = 0, used = 0;            // elements of one remainder of the strides; of the image
  bool fits = false;
  alignas(64) T image[kImage], made[kMade];

  explicit Band(const ConvJob& job) : down(*job.phase[1]), along(*job.phase[2]) {
    const bool flat = job.in[0] == 1 && job.out[0] == 1 && job.kernel[0] == 1;
    if (job.transposed || job.channels != 1 || !flat || job.phase[0]->tap->offset != 0) return;
    if (down.stride > kImage || along.stride > kImage) return;
    taps = down.taps * along.taps;
    pitch = (reach(along) + (along.count - 1) * along.stride) / along.stride + 1;
    if (taps > kMaxTaps || pitch > kMade - kLong) return;
    rows = std::min((kMade - kLong) / pitch, down.count);
    plane = ((reach(down) + (rows - 1) * down.stride) / down.stride + 1) * pitch;
    used = plane * down.stride * along.stride + reach(along) / along.stride + kLong;  // the last run reads on
    fits = used <= kImage;
  }
  static int64_t reach(const Phase& p) { return p.tap[p.taps - 1].offset - p.tap->offset; }

  void read(const ConvJob& job, const T* x, int64_t first) {
    std::fill(image, image + used, T(0));
    const int64_t top = first * down.stride + down.tap->offset, left = along.tap->offset, s = along.stride;
    for (int64_t r = 0; r <= reach(down) + (rows - 1) * down.stride; ++r) {
      if (top + r < 0 || top + r >= job.in[1]) continue;
      const T* row = x + (top + r) * job.in[2];
      for (int64_t p = 0; p < s; ++p) {
        T* to = image + (r % down.stride * s + p) * plane + r / down.stride * pitch;
        // column left + p + q * s is inside
        const int64_t begin = left + p >= 0 ? 0 : (s - 1 - left - p) / s;
        const int64_t end = std::min(pitch, left + p >= job.in[2] ? 0 : (job.in[2] - 1 - left - p) / s + 1);
        if (s == 1 && end > begin) std::memcpy(to + begin, row + left + begin, (end - begin) * sizeof(T));
        else for (int64_t q = begin; q < end; ++q) to[q] = row[left + p + q * s];
      }
    }
  }

  void make(const T* weight, T bias, int64_t count) {
    int64_t shift[kMaxTaps], t = 0;
    for (int64_t a = 0; a < down.taps; ++a)
      for (int64_t b = 0; b < along.taps; ++b) {
        const int64_t r = down.tap[a].offset - down.tap->offset, c = along.tap[b].offset - along.tap->offset;
        shift[t++] = (r % down.stride * along.stride + c % along.stride) * plane + r / down.stride * pitch +
                     c / along.stride;
      }
    using Lanes = VectorOf<T>;
    using Anywhere = typename Register<T>::Anywhere;
    constexpr int64_t width = Register<T>::count;
    static_assert(kLong % (4 * width) == 0);
    for (int64_t i = 0; i < count * pitch; i += 4 * width) {
      Lanes s0 = Lanes{} + bias, s1 = s0, s2 = s0, s3 = s0;
      for (int64_t k = 0; k < taps; ++k) {
        const T factor = weight[k];
        const auto* from = reinterpret_cast<const Anywhere*>(image + shift[k] + i);
        s0 += factor * from[0], s1 += factor * from[1], s2 += factor * from[2], s3 += factor * from[3];
      }
      auto* to = reinterpret_cast<Anywhere*>(made + i);
      to[0] = s0, to[1] = s1, to[2] = s2, to[3] = s3;
    }
  }

  void run(const ConvJob& job, const T* x, const T* weight, T bias, T* y) {
    for (int64_t first = 0; first < down.count; first += rows) {
      const int64_t count = std::min(rows, down.count - first);
      read(job, x, first);
      make(weight, bias, count);
      for (int64_t r = 0; r < count; ++r)
        std::memcpy(y + (first + r) * along.count, made + r * pitch, along.count * sizeof(T));
    }
  }
};

template <class T>
void direct_conv(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const ConvJob*>(userdata);
  const int64_t in_plane = job.in[0] * job.in[1] * job.in[2], out_plane = job.out[0] * job.out[1] * job.out[2];
  const int64_t phases = job.phases[0] * job.phases[1] * job.phases[2], all = job.groups * job.rows;
  const Span span = share(job.batch * all, ith, nth);
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
      const Grid grid(job, phase);
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
    case DType::i64: return direct_conv<uint64_t>;  // integers wrap
    case DType::i32: return direct_conv<uint32_t>;
    default: return nullptr;
  }
}

}  // namespace keepdim::ggml
