// A matrix product of our own, for what ggml's takes only after copies or slowly: a second operand along n, rows of
// any length, batches. Panels of the second operand are packed once when it is a weight, else as they are needed.
#include <tuple>

#include "tile.h"

namespace keepdim::ggml {
namespace {

constexpr int64_t kDepth = 256;  // of a panel, which stays in the first cache
// Of one that was packed before: where tiles are high it is quicker to read it from the second than results more often.
constexpr int64_t kPackedDepth = kHeight > 8 ? 384 : kDepth;

// b[k, c] for depth * kWidth elements, with zeros beyond `columns`.
void pack(float* panel, const char* b, int64_t step, int64_t column, int64_t depth, int64_t columns) {
  if (columns < kWidth) std::fill(panel, panel + depth * kWidth, 0.0f);
  if (column == sizeof(float)) {
    for (int64_t k = 0; k < depth; ++k) std::memcpy(panel + k * kWidth, b + k * step, columns * sizeof(float));
    return;
  }
  for (int64_t c = 0; c < columns; ++c) {
    const char* from = b + c * column;
    float* to = panel + c;
    for (int64_t k = 0; k < depth; ++k) to[k * kWidth] = *reinterpret_cast<const float*>(from + k * step);
  }
}

// The same of columns that are rows in another dtype.
void unpack(float* panel, const ProductJob& job, const char* b, int64_t depth, int64_t columns) {
  alignas(64) float rows[8][kDepth + kVector];  // not all of them in the same places of the cache
  for (int64_t first = 0; first < kWidth; first += 8) {
    for (int64_t c = 0; c < 8; ++c) {
      if (first + c < columns) job.stored->read(b + (first + c) * job.b_column, rows[c], depth);
      else std::fill(rows[c], rows[c] + depth, 0.0f);
    }
    int64_t k = 0;
    for (; k + 8 <= depth; k += 8) transpose(rows[0] + k, kDepth + kVector, panel + k * kWidth + first, kWidth);
    for (; k < depth; ++k)
      for (int64_t c = 0; c < 8; ++c) panel[k * kWidth + first + c] = rows[c][k];
  }
}

// Where a thread reads the rows of the first operand, a tile at a time. Those of a tile that do not follow each other are
// copied, once for all panels of the result that the thread makes of them. So are rows at multiples of a page: they are in
// the same few places of the first cache, where they push each other out.
class Apart {
 public:
  Apart(const ProductJob& job, const Rows& rows) : job_(job), rows_(rows), pitch_(job.k + kVector) {}

  // Takes some rows of the matrix at `a`. False where there is no memory for those that have to be copied.
  bool take(const char* a, Span some) {
    if (a == a_ && some.begin == some_.begin) return true;
    const int64_t count = some.end - some.begin;
    const bool few = count <= 4 || count * pitch_ > kMost;
    const bool adjoin = rows_.adjoin(some);
    close_ = !few && job_.a_row && job_.a_row % 4096 == 0 && job_.a_step == sizeof(float);
    copy_ = close_ || !adjoin ? scratch(count * pitch_) : nullptr;
    if (!copy_ && !adjoin) {
      a_ = nullptr;  // none are taken, so the next panel asks again
      return false;
    }
    close_ = close_ && copy_;
    a_ = a;
    some_ = some;
    if (!copy_) return true;
    for (int64_t r = some.begin; r < some.end; r += kHeight) {
      const Span tile{r, std::min(r + kHeight, some.end)};
      for (int64_t i = r; i < tile.end && in_copy(tile); ++i)
        std::memcpy(copy_ + (i - some.begin) * pitch_, a + rows_[i] * job_.a_row, job_.k * sizeof(float));
    }
    return true;
  }

  // Where the first row of a tile begins and the pitch, in bytes.
  std::pair<const char*, int64_t> at(Span tile) const {
    if (!in_copy(tile)) return {a_ + rows_[tile.begin] * job_.a_row, job_.a_row};
    return {reinterpret_cast<const char*>(copy_ + (tile.begin - some_.begin) * pitch_), pitch_ * sizeof(float)};
  }

 private:
  static constexpr int64_t kMost = 1 << 21;  // floats: what a thread keeps for it stays small
  bool in_copy(Span tile) const { return close_ || !rows_.adjoin(tile); }

  const ProductJob& job_;
  const Rows& rows_;
  const int64_t pitch_;
  const char* a_ = nullptr;
  Span some_{0, 0};
  float* copy_ = nullptr;
  bool close_ = false;
};

// What one panel's product needs to know: the result and the second operand at its first element.
struct Part {
  float* y;
  const char* b;
  const float *packed, *bias;
  const Rows& rows;
  const Apart& first;  // operand
  Span some;           // of the rows
  int64_t columns;
};

void copy_columns(float* y, const float* x, int64_t columns) {
  if (columns < kWidth) {
    std::memcpy(y, x, columns * sizeof(float));
    return;
  }
  for (int c = 0; c < kWidth; c += kVector) store(y + c, load(x + c));
}

void panel_product(const ProductJob& job, const Part& part) {
  alignas(64) float panel[kDepth * kWidth], own[kHeight * kWidth] = {};
  static constexpr float zeros[kWidth] = {};
  // Few rows do not pay for packing what can be read in place.
  const bool direct = part.columns == kWidth && job.b_column == sizeof(float) && part.some.end - part.some.begin <= 2 * kHeight;
  const int64_t deepest = part.packed ? kPackedDepth : kDepth, slices = std::max<int64_t>(1, (job.k + deepest - 1) / deepest);
  for (int64_t s = 0; s < slices; ++s) {
    const Span span = job.stored ? Span{s * deepest, std::min(job.k, (s + 1) * deepest)}  // of whole blocks
                                 : share(job.k, static_cast<int>(s), static_cast<int>(slices));
    const int64_t k = span.begin;
    Tile tile;
    tile.depth = span.end - k;
    tile.columns = part.columns;
    const bool activated = job.activation && s + 1 == slices;
    tile.a_step = job.a_step;
    tile.b_step = kWidth;
    if (part.packed) {
      tile.b = part.packed + k * kWidth;
    } else if (job.stored) {
      unpack(panel, job, part.b + job.stored->bytes_of(k), tile.depth, part.columns);
      tile.b = panel;
    } else if (direct) {
      tile.b = reinterpret_cast<const float*>(part.b + k * job.b_step);
      tile.b_step = job.b_step / static_cast<int64_t>(sizeof(float));
    } else {
      pack(panel, part.b + k * job.b_step, job.b_step, job.b_column, tile.depth, part.columns);
      tile.b = panel;
    }
    for (int64_t r = part.some.begin; r < part.some.end; r += kHeight) {
      const int64_t height = std::min<int64_t>(kHeight, part.some.end - r);
      const auto row = [&](int64_t i) { return part.y + part.rows[r + i] * job.n; };
      const bool adjoin = part.rows.adjoin({r, r + height});
      const bool aside = activated || !adjoin;  // in a tile of its own
      tile.y = aside ? own : row(0);
      tile.y_pitch = aside ? kWidth : job.n;
      tile.start = k ? row(0) : part.bias ? part.bias : zeros;
      tile.start_pitch = k ? job.n : 0;
      for (int64_t i = 0; i < height; ++i) {  // results are in no cache yet
        __builtin_prefetch(row(i), 1);
        __builtin_prefetch(row(i) + kVector, 1);
      }
      if (k && !adjoin) {
        for (int64_t i = 0; i < height; ++i) copy_columns(own + i * kWidth, row(i), part.columns);
        tile.start = own;
        tile.start_pitch = kWidth;
      }
      std::tie(tile.a, tile.a_row) = part.first.at({r, r + height});
      tile.a += k * job.a_step;
      if (part.columns == kWidth) multiply_rows<2, true>(tile, height);
      else multiply_rows<2, false>(tile, height);
      if (!aside) continue;
      if (activated) activate(job, own, kWidth, height, kWidth);
      for (int64_t i = 0; i < height; ++i) copy_columns(row(i), own + i * kWidth, part.columns);
    }
  }
}

void product(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const ProductJob*>(userdata);
  const Rows rows = rows_of(job, job.data[4], job.m);
  auto* y = static_cast<float*>(job.data[0]);
  for_others(rows, share(job.m, ith, nth), [&](int64_t r) { std::fill_n(y + r * job.n, job.n, 0.0f); });
  if (rows.count == 0) return;
  Apart first(job, rows);
  // What has to be widened first is read for more rows at a time.
  const int64_t block = job.stored ? 4 * kBlock : kBlock;
  each_panel(job, rows.count, block, kHeight, ith, nth, [&](const Panel& p, const int64_t* offset) {
    if (!first.take(at<char>(job.data[1], offset[1]), p.rows)) return job.fail(0, "there is no memory for its rows.");
    panel_product(job, {at<float>(job.data[0], offset[0]), job.packed ? nullptr : at<char>(job.data[2], offset[2]),
                        job.packed ? job.packed + p.first * job.k : nullptr,
                        job.data[3] ? static_cast<const float*>(job.data[3]) + p.first : nullptr, rows, first, p.rows,
                        p.columns});
  });
}

// The same for other dtypes, where nothing is known to be in a hurry.
template <class T>
void plain_product(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const ProductJob*>(userdata);
  Loop loop = job.loop;
  loop.push(job.m, job.n * static_cast<int64_t>(sizeof(T)), job.a_row, 0);
  each_row(loop, job.n * job.k, ith, nth, [&](int64_t, const int64_t* offset) {
    T* y = at<T>(job.data[0], offset[0]);
    const char* a = at<char>(job.data[1], offset[1]);
    const char* b = at<char>(job.data[2], offset[2]);
    if (job.data[3]) std::memcpy(y, job.data[3], job.n * sizeof(T));
    else std::fill(y, y + job.n, T(0));
    for (int64_t k = 0; k < job.k; ++k) {
      const T value = *reinterpret_cast<const T*>(a + k * job.a_step);
      const char* row = b + k * job.b_step;
      for (int64_t c = 0; c < job.n; ++c)
        y[c] = Add::f(y[c], Mul::f(value, *reinterpret_cast<const T*>(row + c * job.b_column)));
    }
  });
}

}  // namespace

void read_packed(const float* packed, int64_t k, int64_t column, float* y) {
  const float* from = packed + column / kWidth * kWidth * k + column % kWidth;
  for (int64_t i = 0; i < k; ++i) y[i] = from[i * kWidth];
}

int64_t packed_floats(int64_t k, int64_t n) { return (n + kWidth - 1) / kWidth * kWidth * k; }

void pack_weight(float* packed, const void* weight, int64_t k, int64_t n, int64_t step, int64_t column) {
  for (int64_t c = 0; c < n; c += kWidth)
    pack(packed + c * k, static_cast<const char*>(weight) + c * column, step, column, k, std::min<int64_t>(kWidth, n - c));
}

Kernel product_kernel(DType dtype) {
  switch (dtype) {
    case DType::f32: return product;
    case DType::f64: return plain_product<double>;
    case DType::i64: return plain_product<int64_t>;
    case DType::i32: return plain_product<int32_t>;
    default: return nullptr;
  }
}

}  // namespace keepdim::ggml
