// GEMM microkernel: kMR rows of a, read in place, times kNR packed columns of b. Shared by gemm, conv, attention and recurrent.
#pragma once
#include <cstdlib>
#include <memory>
#include <utility>

#include "ggml/kernels/gemm.h"
#include "ggml/kernels/strided_loop.h"
#include "ggml/simd/vector.h"

namespace keepdim::ggml {

// Register tile [kMR, kNR]: two vectors wide, as many rows as registers allow.
constexpr int kMR = kVector > 8 ? 12 : 6;
constexpr int kNR = 2 * kVector;
constexpr int kAhead = 16;  // rows of a panel ahead of which it is prefetched to the L1 cache

// Scratch memory of the calling thread; grows on demand, never shrinks. nullptr if the allocation failed.
inline float* scratch(int64_t floats) {
  struct Free {
    void operator()(float* data) const { std::free(data); }
  };
  static thread_local std::unique_ptr<float, Free> data;
  static thread_local int64_t size = 0;
  if (floats > size) {
    constexpr int64_t line = 64 / sizeof(float);
    floats = (floats + line - 1) / line * line;
    data.reset(static_cast<float*>(std::aligned_alloc(64, floats * sizeof(float))));
    size = data ? floats : 0;
  }
  return data.get();
}

// Rows of a for the microkernel, kMR at a time. Non-adjacent rows are copied, once for all panels that the thread computes
// from them. So are rows whose stride is a multiple of the page size: they would conflict in a few L1 cache sets.
class GatheredRows {
 public:
  // `reserved`: floats that the caller needs beside the copies; elements of a are `a_step` bytes wide.
  GatheredRows(const MatmulJob& job, const Rows& rows, int64_t width = sizeof(float), int64_t reserved = 0)
      : job_(job), rows_(rows), width_(width), pitch_(job.k * width + 64), reserved_(reserved) {}

  // Selects rows `span` of the matrix at `a`, copying them if needed. Returns false if the allocation failed.
  bool gather(const char* a, Span span) {
    if (a == a_ && span.begin == span_.begin) return true;
    const int64_t count = span.end - span.begin;
    const bool too_small = count <= 4 || count * pitch_ > kMaxBytes;
    const bool adjacent = rows_.adjacent(span);
    copy_all_ = !too_small && job_.a_row && job_.a_row % 4096 == 0 && job_.a_step == width_;
    const bool copies = copy_all_ || !adjacent;
    const int64_t floats = reserved_ + (copies ? (count * pitch_ + 3) / 4 : 0);
    memory_ = floats ? scratch(floats) : nullptr;
    copy_ = copies && memory_ ? reinterpret_cast<char*>(memory_ + reserved_) : nullptr;
    if ((reserved_ && !memory_) || (!copy_ && !adjacent)) {
      a_ = nullptr;  // nothing gathered: the next panel tries again
      return false;
    }
    copy_all_ = copy_all_ && copy_;
    a_ = a;
    span_ = span;
    if (!copy_) return true;
    for (int64_t r = span.begin; r < span.end; r += kMR) {
      const Span tile{r, std::min(r + kMR, span.end)};
      for (int64_t i = r; i < tile.end && in_copy(tile); ++i)
        std::memcpy(copy_ + (i - span.begin) * pitch_, a + rows_[i] * job_.a_row, job_.k * width_);
    }
    return true;
  }

  // Address of the first row of a tile, and row stride in bytes.
  std::pair<const char*, int64_t> tile_rows(Span tile) const {
    if (!in_copy(tile)) return {a_ + rows_[tile.begin] * job_.a_row, job_.a_row};
    return {copy_ + (tile.begin - span_.begin) * pitch_, pitch_};
  }

  float* reserved() const { return memory_; }

 private:
  static constexpr int64_t kMaxBytes = 1 << 23;  // bound on the per-thread scratch memory
  bool in_copy(Span tile) const { return copy_all_ || !rows_.adjacent(tile); }

  const MatmulJob& job_;
  const Rows& rows_;
  const int64_t width_, pitch_, reserved_;  // bytes of an element and between rows of the copy
  const char* a_ = nullptr;
  Span span_{0, 0};
  float* memory_ = nullptr;
  char* copy_ = nullptr;
  bool copy_all_ = false;
};

struct MicrokernelArgs {
  float* y;
  int64_t y_pitch;    // in elements
  const float* init;  // initial value of the sums: zeros, bias or y
  int64_t init_pitch;
  const char* a;
  int64_t a_row, a_step;  // in bytes
  const float* b;
  int64_t b_step;  // in elements
  int64_t depth, columns;
};

// y [height, columns] = init + a [height, depth] @ b [depth, vectors * kVector]. `full_width`: columns is the full width of b.
// `dense`: a is contiguous along k and b has no gaps between rows.
template <int height, int vectors, bool full_width, bool dense>
void microkernel(const MicrokernelArgs& t) {
  // Small tiles use several accumulators to hide the FMA latency.
  constexpr int sums = height * vectors >= 8 ? 1 : height * vectors >= 4 ? 2 : 4;
  Vector acc[sums][height][vectors] = {};
  const size_t row_bytes = t.columns * sizeof(float);
  const int64_t a_step = dense ? sizeof(float) : t.a_step, b_step = dense ? vectors * kVector : t.b_step;
  const char* a = t.a;
  const float* b = t.b;
  const auto step = [&](Vector(&to)[height][vectors]) {
    Vector columns[vectors];
    for (int v = 0; v < vectors; ++v) columns[v] = load(b + v * kVector);
    if constexpr (dense)
      for (int v = 0; v < vectors; ++v) __builtin_prefetch(b + kAhead * kNR + v * kVector);
#pragma GCC unroll 16
    for (int r = 0; r < height; ++r) {
      const float value = *reinterpret_cast<const float*>(a + r * t.a_row);
      for (int v = 0; v < vectors; ++v) to[r][v] += value * columns[v];
    }
    a += a_step;
    b += b_step;
  };
  constexpr int unroll = sums;
  int64_t k = 0;
  for (; k + unroll <= t.depth; k += unroll) {
#pragma GCC unroll 4
    for (int i = 0; i < unroll; ++i) step(acc[i % sums]);
  }
  for (; k < t.depth; ++k) step(acc[0]);
#pragma GCC unroll 4
  for (int i = 1; i < sums; ++i)
#pragma GCC unroll 16
    for (int r = 0; r < height; ++r)
      for (int v = 0; v < vectors; ++v) acc[0][r][v] += acc[i][r][v];
  // init is added last to reduce rounding error.
  if constexpr (full_width) {
#pragma GCC unroll 16
    for (int r = 0; r < height; ++r)
      for (int v = 0; v < vectors; ++v)
        store(t.y + r * t.y_pitch + v * kVector, acc[0][r][v] + load(t.init + r * t.init_pitch + v * kVector));
  } else {
    for (int r = 0; r < height; ++r) {
      Vector start[vectors] = {};
      std::memcpy(start, t.init + r * t.init_pitch, row_bytes);
      for (int v = 0; v < vectors; ++v) start[v] += acc[0][r][v];
      std::memcpy(t.y + r * t.y_pitch, start, row_bytes);
    }
  }
}

template <int vectors, bool full_width, bool dense, int... height>
void run_microkernel(const MicrokernelArgs& args, int64_t rows, std::integer_sequence<int, height...>) {
  static constexpr void (*kernels[])(const MicrokernelArgs&) = {microkernel<height + 1, vectors, full_width, dense>...};
  kernels[rows - 1](args);
}

// Runs the microkernel for 1 to kMR rows.
template <int vectors, bool full_width>
void run_microkernel(const MicrokernelArgs& args, int64_t rows) {
  constexpr auto heights = std::make_integer_sequence<int, kMR>();
  if (args.a_step == sizeof(float) && args.b_step == vectors * kVector)
    run_microkernel<vectors, full_width, true>(args, rows, heights);
  else
    run_microkernel<vectors, full_width, false>(args, rows, heights);
}

// Applies the activation, if any, to y [rows, columns]; in one call if y is contiguous.
inline void activate(const MatmulJob& job, float* y, int64_t pitch, int64_t rows, int64_t columns) {
  static const MapJob no_scalars{};
  if (pitch == columns) columns *= std::exchange(rows, 1);
  for (int64_t r = 0; job.activation && r < rows; ++r, y += pitch) {
    const void* x = y;
    job.activation(no_scalars, y, &x, 0, columns);
  }
}

constexpr int64_t kBlock = 64 * 1024;  // elements of a that fit in the L2 cache

// A block of the result: some rows, and up to kNR columns from `first` on.
struct PanelSpan {
  Span rows;
  int64_t first, columns;
};

// Calls body(panel, offsets) for the panels of y [rows, n], dynamically scheduled. Rows are split at `block` elements of a to
// fit the cache, and further if there are too few panels to balance the threads.
template <class Body>
void for_each_panel(const MatmulJob& job, int64_t rows, int64_t block, int64_t height, int ith, int nth, Body&& body) {
  const int64_t panels = (job.n + kNR - 1) / kNR, tiles = (rows + height - 1) / height;
  const int64_t max_rows = std::max<int64_t>(4 * height, block / std::max<int64_t>(job.k, 1));
  int64_t parts = (rows + max_rows - 1) / max_rows;
  const int64_t units = job.loop.count() * panels * parts;
  if (nth > 1 && units < 4 * nth) parts = std::min(tiles, parts * ((4 * nth + units - 1) / units));
  Loop loop = job.loop;
  loop.push(parts, 0, 0, 0);
  loop.push(panels, kNR * static_cast<int64_t>(sizeof(float)), 0, kNR * job.b_column);
  for_each_dynamic(job, loop, kNR * job.k * (rows / parts + 1), ith, nth, [&](int64_t position, const int64_t* offset) {
    const int64_t first = position % panels * kNR, part = position / panels % parts;
    const Span span = split_range(tiles, static_cast<int>(part), static_cast<int>(parts));
    body({{span.begin * height, std::min(span.end * height, rows)}, first, std::min<int64_t>(kNR, job.n - first)}, offset);
  });
}

}  // namespace keepdim::ggml
