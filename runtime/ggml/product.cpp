// A matrix product of our own, for what ggml's takes only after copies or slowly: a second operand along n, rows of
// any length, batches. Panels of the second operand are packed as they are needed, so its strides do not matter.
#include "tile.h"

namespace keepdim::ggml {
namespace {

constexpr int64_t kDepth = 256;  // of a packed panel, which stays in the first cache
constexpr int64_t kRows = 240;   // of the first operand, which stay in the second; whole tiles

// b[k, c] for depth * kWidth elements, with zeros beyond `columns`.
void pack(float* panel, const char* b, const ProductJob& job, int64_t depth, int64_t columns) {
  if (columns < kWidth) std::fill(panel, panel + depth * kWidth, 0.0f);
  if (job.b_column == sizeof(float)) {
    for (int64_t k = 0; k < depth; ++k) std::memcpy(panel + k * kWidth, b + k * job.b_step, columns * sizeof(float));
    return;
  }
  for (int64_t c = 0; c < columns; ++c) {
    const char* from = b + c * job.b_column;
    float* to = panel + c;
    for (int64_t k = 0; k < depth; ++k) to[k * kWidth] = *reinterpret_cast<const float*>(from + k * job.b_step);
  }
}

// Rows [begin, end) of one panel's columns.
void panel_product(const ProductJob& job, float* y, const char* a, const char* b, const float* bias, Span rows,
                   int64_t columns) {
  alignas(64) float panel[kDepth * kWidth];
  static constexpr float zeros[kWidth] = {};
  // Few rows do not pay for packing what can be read in place.
  const bool direct = columns == kWidth && job.b_column == sizeof(float) && rows.end - rows.begin <= 2 * kHeight;
  for (int64_t k = 0; k < job.k; k += kDepth) {
    Tile tile;
    tile.depth = std::min(kDepth, job.k - k);
    tile.columns = columns;
    tile.y_pitch = job.n;
    tile.a_row = job.a_row;
    tile.a_step = job.a_step;
    const char* bk = b + k * job.b_step;
    if (!direct) pack(panel, bk, job, tile.depth, columns);
    tile.b = direct ? reinterpret_cast<const float*>(bk) : panel;
    tile.b_step = direct ? job.b_step / static_cast<int64_t>(sizeof(float)) : kWidth;
    for (int64_t r = rows.begin; r < rows.end; r += kHeight) {
      tile.y = y + r * job.n;
      tile.start = k ? tile.y : bias ? bias : zeros;
      tile.start_pitch = k ? job.n : 0;
      tile.a = a + r * job.a_row + k * job.a_step;
      const int64_t height = std::min<int64_t>(kHeight, rows.end - r);
      if (columns == kWidth) multiply_rows<2, true>(tile, height);
      else multiply_rows<2, false>(tile, height);
    }
  }
}

void product(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const ProductJob*>(userdata);
  const int64_t panels = (job.n + kWidth - 1) / kWidth, tiles = (job.m + kHeight - 1) / kHeight;
  // The rows are cut where the cache asks for it, and further when there is too little else to share out.
  int64_t parts = (job.m + kRows - 1) / kRows;
  const int64_t units = job.loop.count() * panels * parts;
  if (nth > 1 && units < 4 * nth) parts = std::min(tiles, parts * ((4 * nth + units - 1) / units));
  constexpr int64_t w = sizeof(float);
  Loop loop = job.loop;
  loop.push(parts, 0, 0, 0);
  loop.push(panels, kWidth * w, 0, kWidth * job.b_column);
  each_row(loop, kWidth * job.k * (job.m / parts + 1), ith, nth, [&](int64_t position, const int64_t* offset) {
    const int64_t panel = position % panels, part = position / panels % parts;
    const Span span = share(tiles, static_cast<int>(part), static_cast<int>(parts));
    const Span rows{span.begin * kHeight, std::min(span.end * kHeight, job.m)};
    const float* bias = job.data[3] ? static_cast<const float*>(job.data[3]) + panel * kWidth : nullptr;
    const int64_t columns = std::min<int64_t>(kWidth, job.n - panel * kWidth);
    panel_product(job, at<float>(job.data[0], offset[0]), at<char>(job.data[1], offset[1]),
                  at<char>(job.data[2], offset[2]), bias, rows, columns);
  });
}

}  // namespace

Kernel product_kernel() { return product; }

}  // namespace keepdim::ggml
