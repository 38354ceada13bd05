// The tile that all products are made of: a few rows of one operand, as they lie, times packed columns of the other.
#pragma once
#include <utility>

#include "loops.h"

namespace keepdim::ggml {

// A tile of the result is one or two vectors wide and as high as the registers allow.
#ifdef __AVX512F__
constexpr int kHeight = 12, kVector = 16;
#else
constexpr int kHeight = 6, kVector = 8;
#endif
constexpr int kWidth = 2 * kVector;
using Vector = float __attribute__((vector_size(kVector * sizeof(float)), aligned(alignof(float)), may_alias));

struct Tile {
  float* y;
  int64_t y_pitch;     // in elements
  const float* start;  // what the products are added to: zeros, the bias or y itself
  int64_t start_pitch;
  const char* a;
  int64_t a_row, a_step;  // in bytes
  const float* b;
  int64_t b_step;  // in elements
  int64_t depth, columns;
};

// y[r, c] = start[r, c] + sum over k of a[r, k] * b[k, c]. b has `vectors` of columns, y and start have `columns`.
template <int height, int vectors, bool whole>
void multiply(const Tile& t) {
  Vector acc[height][vectors] = {};
  const size_t row_bytes = (whole ? vectors * kVector : t.columns) * sizeof(float);
  for (int r = 0; r < height; ++r) std::memcpy(acc[r], t.start + r * t.start_pitch, row_bytes);
  const char* a = t.a;
  const float* b = t.b;
  for (int64_t k = 0; k < t.depth; ++k, a += t.a_step, b += t.b_step) {
    Vector columns[vectors];
    for (int v = 0; v < vectors; ++v) columns[v] = *reinterpret_cast<const Vector*>(b + v * kVector);
#pragma GCC unroll 16
    for (int r = 0; r < height; ++r) {
      const float value = *reinterpret_cast<const float*>(a + r * t.a_row);
      for (int v = 0; v < vectors; ++v) acc[r][v] += value * columns[v];
    }
  }
  for (int r = 0; r < height; ++r) std::memcpy(t.y + r * t.y_pitch, acc[r], row_bytes);
}

template <int vectors, bool whole, int... height>
void multiply_rows(const Tile& tile, int64_t rows, std::integer_sequence<int, height...>) {
  static constexpr void (*kernels[])(const Tile&) = {multiply<height + 1, vectors, whole>...};
  kernels[rows - 1](tile);
}

// 1 to kHeight rows.
template <int vectors, bool whole>
void multiply_rows(const Tile& tile, int64_t rows) {
  multiply_rows<vectors, whole>(tile, rows, std::make_integer_sequence<int, kHeight>());
}

}  // namespace keepdim::ggml
