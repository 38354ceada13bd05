// Elementwise kernel. Like all kernels here it runs on ggml's threads through ggml_custom_4d, supports any strides and rank,
// is bitwise deterministic for any number of threads, and reports errors only through RunError.
#include "ggml/kernels/elementwise.h"

#include "ggml/kernels/gemm_microkernel.h"

namespace keepdim::ggml {
namespace {

constexpr int64_t kChunk = 512;      // elements per chunk; a chunk of all operands fits in the L1 cache
constexpr int64_t kRepeated = 1024;  // elements of a repeated row

// Contiguous operands in the compute dtype are used in place; others are converted chunk by chunk.
void map(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const MapJob*>(userdata);
  const int last = job.loop.rank - 1;
  const int64_t out_stride = job.loop.strides[0][last];
  const bool out_direct = !job.write && out_stride == job.width[0];
  bool chunked = !out_direct;
  bool direct[kMaxOperands];
  unsigned broadcast_mask = 0;
  for (int o = 1; o <= job.operands; ++o) {
    const int64_t stride = job.loop.strides[o][last];
    direct[o] = !job.read[o] && stride == job.width[o];
    if (stride == 0)
      broadcast_mask |= 1u << (o - 1);
    else
      chunked |= !direct[o];
  }
  alignas(64) char buffer[kMaxOperands][kChunk * sizeof(int64_t)];
  for_each_run(job.loop, ith, nth, [&](int64_t n, const int64_t* offset) {
    const void* x[kMaxOperands - 1] = {};
    for (int o = 1; o <= job.operands; ++o) {
      char* from = at<char>(job.data[o], offset[o]);
      x[o - 1] = from;
      if (broadcast_mask >> (o - 1) & 1 && job.read[o]) {
        job.read[o](buffer[o], 0, from, 0, 1);
        x[o - 1] = buffer[o];
      }
    }
    char* to = at<char>(job.data[0], offset[0]);
    const int64_t step = chunked ? kChunk : n;
    for (int64_t begin = 0; begin < n; begin += step) {
      const int64_t m = std::min(step, n - begin);
      for (int o = 1; o <= job.operands; ++o) {
        if (broadcast_mask >> (o - 1) & 1) continue;
        const int64_t stride = job.loop.strides[o][last];
        char* from = at<char>(job.data[o], offset[o] + begin * stride);
        if (direct[o]) {
          x[o - 1] = from;
        } else {
          const Convert read = job.read[o] ? job.read[o] : job.strided_copy[o];
          read(buffer[o], job.width[o], from, stride, m);
          x[o - 1] = buffer[o];
        }
      }
      char* y = to + begin * out_stride;
      job.fn(job, out_direct ? y : buffer[0], x, broadcast_mask, m);
      if (!out_direct) (job.write ? job.write : job.strided_copy[0])(y, out_stride, buffer[0], job.width[0], m);
    }
  });
}

// A short row that is the same for many rows of the other operands, as a factor per channel: it is repeated in a buffer, so
// that one call computes several rows.
void map_rows(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const MapJob*>(userdata);
  const int last = job.loop.rank - 1, repeated = repeated_row(job);
  const int64_t n = job.loop.dims[last], rows = job.loop.dims[last - 1], width = job.width[repeated];
  const int64_t group = std::clamp<int64_t>(kRepeated / n, 1, rows), groups = (rows + group - 1) / group;
  unsigned broadcast_mask = 0;
  for (int o = 1; o <= job.operands; ++o)
    if (job.loop.strides[o][last] == 0) broadcast_mask |= 1u << (o - 1);
  Loop units = job.loop;  // groups of rows
  units.rank = last;
  units.dims[last - 1] = groups;
  for (auto& strides : units.strides) strides[last - 1] *= group;
  alignas(64) char buffer[kRepeated * sizeof(int64_t)];
  const char* filled = nullptr;
  for_each_row(units, group * n, ith, nth, [&](int64_t unit, const int64_t* offset) {
    const void* x[kMaxOperands - 1] = {};
    for (int o = 1; o <= job.operands; ++o) x[o - 1] = at<char>(job.data[o], offset[o]);
    const char* row = static_cast<const char*>(x[repeated - 1]);
    if (std::exchange(filled, row) != row)
      for (int64_t r = 0; r < group; ++r) std::memcpy(buffer + r * n * width, row, n * width);
    x[repeated - 1] = buffer;
    const int64_t count = std::min(group, rows - unit % groups * group);
    job.fn(job, at<char>(job.data[0], offset[0]), x, broadcast_mask, count * n);
  });
}

// ---- transposed operands

constexpr int64_t kTileRows = 16, kTileColumns = 128;

// to [rows, columns] = from, whose rows are adjacent elements; `pitch` bytes between its columns.
template <class T>
void read_transposed(T* to, const char* from, int64_t pitch, int64_t rows, int64_t columns) {
  int64_t c = 0;
  if constexpr (sizeof(T) == sizeof(float))
    for (; c + 8 <= columns && rows == kTileRows; c += 8)
      for (int64_t r = 0; r < kTileRows; r += 8)
        transpose(reinterpret_cast<const float*>(from + c * pitch) + r, pitch / static_cast<int64_t>(sizeof(float)),
                  reinterpret_cast<float*>(to) + r * kTileColumns + c, kTileColumns);
  for (; c < columns; ++c) {
    const T* column = reinterpret_cast<const T*>(from + c * pitch);
    for (int64_t r = 0; r < rows; ++r) to[r * kTileColumns + c] = column[r];
  }
}

void read_transposed(char* to, int64_t width, const char* from, int64_t pitch, int64_t rows, int64_t columns) {
  switch (width) {
    case 1: return read_transposed(reinterpret_cast<uint8_t*>(to), from, pitch, rows, columns);
    case 2: return read_transposed(reinterpret_cast<uint16_t*>(to), from, pitch, rows, columns);
    case 4: return read_transposed(reinterpret_cast<uint32_t*>(to), from, pitch, rows, columns);
    default: return read_transposed(reinterpret_cast<uint64_t*>(to), from, pitch, rows, columns);
  }
}

// Operands whose adjacent elements are in adjacent rows are read in tiles: each cache line once.
void map_tiles(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const MapJob*>(userdata);
  const int last = job.loop.rank - 1;
  const int64_t rows = job.loop.dims[last - 1], columns = job.loop.dims[last], groups = (rows + kTileRows - 1) / kTileRows;
  unsigned broadcast_mask = 0;
  for (int o = 1; o <= job.operands; ++o)
    if (job.loop.strides[o][last] == 0) broadcast_mask |= 1u << (o - 1);
  Loop units = job.loop;  // groups of rows
  units.rank = last;
  units.dims[last - 1] = groups;
  for (auto& strides : units.strides) strides[last - 1] *= kTileRows;
  alignas(64) char tile[kMaxOperands][kTileRows * kTileColumns * sizeof(int64_t)];
  for_each_row(units, kTileRows * columns, ith, nth, [&](int64_t unit, const int64_t* offset) {
    const int64_t height = std::min(kTileRows, rows - unit % groups * kTileRows);
    for (int64_t c = 0; c < columns; c += kTileColumns) {
      const int64_t count = std::min(kTileColumns, columns - c);
      const char* x[kMaxOperands];
      int64_t row[kMaxOperands];
      for (int o = 0; o <= job.operands; ++o) {
        const int64_t step = job.loop.strides[o][last];
        x[o] = at<char>(job.data[o], offset[o] + c * step);
        row[o] = job.loop.strides[o][last - 1];
        if (step == 0 || step == job.width[o]) continue;
        read_transposed(tile[o], job.width[o], x[o], step, height, count);
        x[o] = tile[o];
        row[o] = kTileColumns * job.width[o];
      }
      for (int64_t r = 0; r < height; ++r) {
        const void* in[kMaxOperands - 1] = {};
        for (int o = 1; o <= job.operands; ++o) in[o - 1] = x[o] + r * row[o];
        job.fn(job, const_cast<char*>(x[0]) + r * row[0], in, broadcast_mask, count);
      }
    }
  });
}

}  // namespace

bool has_transposed(const MapJob& job) {
  const Loop& loop = job.loop;
  const int last = loop.rank - 1;
  if (loop.rank < 2 || job.write || loop.strides[0][last] != job.width[0]) return false;
  bool transposed = false;
  for (int o = 1; o <= job.operands; ++o) {
    const int64_t step = loop.strides[o][last];
    if (job.read[o]) return false;
    if (step == 0 || step == job.width[o]) continue;
    if (loop.strides[o][last - 1] != job.width[o] || step < 0) return false;
    transposed = true;
  }
  return transposed && loop.dims[last] >= 8 && loop.dims[last - 1] >= 8;
}

int repeated_row(const MapJob& job) {
  const Loop& loop = job.loop;
  const int last = loop.rank - 1;
  if (loop.rank < 2 || loop.dims[last] > kRepeated / 2 || job.write) return 0;
  int repeated = 0;
  for (int o = 0; o <= job.operands; ++o) {
    const int64_t stride = loop.strides[o][last], row = loop.strides[o][last - 1];
    const bool direct = !job.read[o] && stride == job.width[o];
    if (direct && row == stride * loop.dims[last]) continue;         // rows follow each other
    if (o > 0 && stride == 0 && row == 0 && !job.read[o]) continue;  // one element
    if (o == 0 || !direct || row != 0 || repeated) return 0;
    repeated = o;
  }
  return repeated;
}

Kernel map_kernel() { return map; }
Kernel map_rows_kernel() { return map_rows; }
Kernel map_tiles_kernel() { return map_tiles; }

}  // namespace keepdim::ggml
