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

// A register of T, and the same at any address: only memory has that type, since a compiler may forget its alignment.
template <class T>
struct Register {
  static constexpr int count = kVector * sizeof(float) / sizeof(T);
  typedef T Vector __attribute__((vector_size(kVector * sizeof(float))));
  typedef T Anywhere __attribute__((vector_size(kVector * sizeof(float)), aligned(alignof(T)), may_alias));
};
template <class T>
using VectorOf = typename Register<T>::Vector;
template <class T>
VectorOf<T> load_vector(const T* x) { return *reinterpret_cast<const typename Register<T>::Anywhere*>(x); }
template <class T>
void store_vector(T* y, VectorOf<T> x) { *reinterpret_cast<typename Register<T>::Anywhere*>(y) = x; }
using Vector = VectorOf<float>;

inline Vector load(const float* x) { return load_vector(x); }
inline void store(float* y, Vector x) { store_vector(y, x); }

// Lane i of the result is lane Order::lane(i) of a and b, one after the other.
template <class Order, int... i>
Vector shuffled(Vector a, Vector b, std::integer_sequence<int, i...>) { return __builtin_shufflevector(a, b, Order::lane(i)...); }
template <class Order>
Vector shuffled(Vector a, Vector b) { return shuffled<Order>(a, b, std::make_integer_sequence<int, kVector>()); }

using Eight = float __attribute__((vector_size(32), aligned(alignof(float)), may_alias));

// to[k, c] = rows[c][k] for eight of both, of whatever 32 bits.
inline void transpose(const float* from, int64_t row, float* to, int64_t pitch) {
  Eight a[8], b[8];
  for (int r = 0; r < 8; ++r) a[r] = *reinterpret_cast<const Eight*>(from + r * row);
  for (int r = 0; r < 8; r += 2) {
    b[r] = __builtin_shufflevector(a[r], a[r + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    b[r + 1] = __builtin_shufflevector(a[r], a[r + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
  for (int r = 0; r < 8; r += 4)
    for (int i = 0; i < 2; ++i) {
      a[r + 2 * i] = __builtin_shufflevector(b[r + i], b[r + 2 + i], 0, 1, 8, 9, 4, 5, 12, 13);
      a[r + 2 * i + 1] = __builtin_shufflevector(b[r + i], b[r + 2 + i], 2, 3, 10, 11, 6, 7, 14, 15);
    }
  for (int r = 0; r < 4; ++r) {
    *reinterpret_cast<Eight*>(to + r * pitch) = __builtin_shufflevector(a[r], a[r + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    *reinterpret_cast<Eight*>(to + (r + 4) * pitch) = __builtin_shufflevector(a[r], a[r + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
}

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

// The product's function, where it has one, of some rows and columns of its result; of all at once where there are no gaps.
inline void activate(const ProductJob& job, float* y, int64_t pitch, int64_t rows, int64_t columns) {
  static const MapJob no_numbers{};
  if (pitch == columns) columns *= std::exchange(rows, 1);
  for (int64_t r = 0; job.activation && r < rows; ++r, y += pitch) {
    const void* x = y;
    job.activation(no_numbers, y, &x, 0, columns);
  }
}

constexpr int64_t kBlock = 64 * 1024;  // elements of the first operand that stay in the second cache

// Some rows of a product and kWidth columns of it, or what is left of them.
struct Panel {
  Span rows;
  int64_t first, columns;
};

// Calls body(panel, offsets) for every panel of a result of so many rows, this thread's share of them. The rows are cut
// where the cache asks for it, at so many elements of the first operand, and further when there is too little else to
// share out.
template <class Body>
void each_panel(const ProductJob& job, int64_t rows, int64_t block, int64_t height, int ith, int nth, Body&& body) {
  const int64_t panels = (job.n + kWidth - 1) / kWidth, tiles = (rows + height - 1) / height;
  const int64_t most = std::max<int64_t>(4 * height, block / std::max<int64_t>(job.k, 1));
  int64_t parts = (rows + most - 1) / most;
  const int64_t units = job.loop.count() * panels * parts;
  if (nth > 1 && units < 4 * nth) parts = std::min(tiles, parts * ((4 * nth + units - 1) / units));
  Loop loop = job.loop;
  loop.push(parts, 0, 0, 0);
  loop.push(panels, kWidth * static_cast<int64_t>(sizeof(float)), 0, kWidth * job.b_column);
  each_unit(job, loop, kWidth * job.k * (rows / parts + 1), ith, nth, [&](int64_t position, const int64_t* offset) {
    const int64_t first = position % panels * kWidth, part = position / panels % parts;
    const Span span = share(tiles, static_cast<int>(part), static_cast<int>(parts));
    body({{span.begin * height, std::min(span.end * height, rows)}, first, std::min<int64_t>(kWidth, job.n - first)}, offset);
  });
}

}  // namespace keepdim::ggml
