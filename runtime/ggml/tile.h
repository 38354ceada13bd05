// The tile that all products are made of: a few rows of one operand, as they lie, times packed columns of the other.
#pragma once
#include <cstdlib>
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

// A register of T, at any address.
template <class T>
struct Register {
  static constexpr int count = kVector * sizeof(float) / sizeof(T);
  typedef T Vector __attribute__((vector_size(kVector * sizeof(float)), aligned(alignof(T)), may_alias));
};
template <class T>
using VectorOf = typename Register<T>::Vector;
template <class T>
VectorOf<T> load_vector(const T* x) { return *reinterpret_cast<const VectorOf<T>*>(x); }
template <class T>
void store_vector(T* y, VectorOf<T> x) { *reinterpret_cast<VectorOf<T>*>(y) = x; }
using Vector = VectorOf<float>;

inline Vector load(const float* x) { return *reinterpret_cast<const Vector*>(x); }
inline void store(float* y, Vector x) { *reinterpret_cast<Vector*>(y) = x; }

// Floats of the calling thread that only grow; nullptr when there is no memory.
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
// `dense`: a's steps and b's columns follow each other without gaps.
template <int height, int vectors, bool whole, bool dense>
void multiply(const Tile& t) {
  // Few rows go through several sums, or each step would wait for the one before.
  constexpr int sums = height * vectors >= 8 ? 1 : height * vectors >= 4 ? 2 : 4;
  Vector acc[sums][height][vectors] = {};
  const size_t row_bytes = t.columns * sizeof(float);
  const int64_t a_step = dense ? sizeof(float) : t.a_step, b_step = dense ? vectors * kVector : t.b_step;
  const char* a = t.a;
  const float* b = t.b;
  const auto step = [&](Vector (&to)[height][vectors]) {
    Vector columns[vectors];
    for (int v = 0; v < vectors; ++v) columns[v] = load(b + v * kVector);
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
  // What is there already is added last: sums of a part alone round less.
  if constexpr (whole) {
#pragma GCC unroll 16
    for (int r = 0; r < height; ++r)
      for (int v = 0; v < vectors; ++v)
        store(t.y + r * t.y_pitch + v * kVector, acc[0][r][v] + load(t.start + r * t.start_pitch + v * kVector));
  } else {
    for (int r = 0; r < height; ++r) {
      Vector start[vectors] = {};
      std::memcpy(start, t.start + r * t.start_pitch, row_bytes);
      for (int v = 0; v < vectors; ++v) start[v] += acc[0][r][v];
      std::memcpy(t.y + r * t.y_pitch, start, row_bytes);
    }
  }
}

template <int vectors, bool whole, bool dense, int... height>
void multiply_rows(const Tile& tile, int64_t rows, std::integer_sequence<int, height...>) {
  static constexpr void (*kernels[])(const Tile&) = {multiply<height + 1, vectors, whole, dense>...};
  kernels[rows - 1](tile);
}

// 1 to kHeight rows.
template <int vectors, bool whole>
void multiply_rows(const Tile& tile, int64_t rows) {
  constexpr auto heights = std::make_integer_sequence<int, kHeight>();
  if (tile.a_step == sizeof(float) && tile.b_step == vectors * kVector)
    multiply_rows<vectors, whole, true>(tile, rows, heights);
  else
    multiply_rows<vectors, whole, false>(tile, rows, heights);
}

}  // namespace keepdim::ggml
