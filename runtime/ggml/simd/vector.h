// SIMD vectors as the vector extensions of GCC and clang, as wide as the CPU's registers.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace keepdim::ggml {

#ifdef __AVX512F__
constexpr int kVector = 16;  // floats in a vector
#else
constexpr int kVector = 8;
#endif

// SIMD vector of T, and its unaligned variant, which is used only for loads and stores.
template <class T>
struct Register {
  static constexpr int count = kVector * sizeof(float) / sizeof(T);
  typedef T Vector __attribute__((vector_size(kVector * sizeof(float))));
  typedef T Unaligned __attribute__((vector_size(kVector * sizeof(float)), aligned(alignof(T)), may_alias));
};
template <class T>
using VectorOf = typename Register<T>::Vector;
template <class T>
VectorOf<T> load_vector(const T* x) {
  return *reinterpret_cast<const typename Register<T>::Unaligned*>(x);
}
template <class T>
void store_vector(T* y, VectorOf<T> x) {
  *reinterpret_cast<typename Register<T>::Unaligned*>(y) = x;
}
using Vector = VectorOf<float>;

inline Vector load(const float* x) { return load_vector(x); }
inline void store(float* y, Vector x) { store_vector(y, x); }

// The first `count` lanes, at least 1; the others are 0, and are not stored.
inline Vector load_first(const float* x, int64_t count) {
#if defined(__AVX512F__)
  return reinterpret_cast<Vector>(_mm512_maskz_loadu_ps(static_cast<__mmask16>(0xffff >> (kVector - count)), x));
#else
  Vector y = {};
  std::memcpy(&y, x, count * sizeof(float));
  return y;
#endif
}
inline void store_first(float* y, Vector x, int64_t count) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(y, static_cast<__mmask16>(0xffff >> (kVector - count)), reinterpret_cast<__m512>(x));
#else
  std::memcpy(y, &x, count * sizeof(float));
#endif
}

// x within [low, high]; NaN stays NaN. F is float or Vector. gcc compiles the comparisons of vectors to masks and blends.
template <class F>
inline __attribute__((always_inline)) F clamp(F x, F low, F high) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<F, Vector>)
    return reinterpret_cast<F>(
        _mm512_min_ps(reinterpret_cast<__m512>(high), _mm512_max_ps(reinterpret_cast<__m512>(low), reinterpret_cast<__m512>(x))));
#elif defined(__AVX2__)
  if constexpr (std::is_same_v<F, Vector>)
    return reinterpret_cast<F>(
        _mm256_min_ps(reinterpret_cast<__m256>(high), _mm256_max_ps(reinterpret_cast<__m256>(low), reinterpret_cast<__m256>(x))));
#endif
  x = x < low ? low : x;
  return x > high ? high : x;
}

// Lane i of the result is lane Order::lane(i) of [a, b].
template <class Order, int... i>
Vector shuffle_lanes(Vector a, Vector b, std::integer_sequence<int, i...>) {
  return __builtin_shufflevector(a, b, Order::lane(i)...);
}
template <class Order>
Vector shuffle_lanes(Vector a, Vector b) {
  return shuffle_lanes<Order>(a, b, std::make_integer_sequence<int, kVector>());
}

using Float8 = float __attribute__((vector_size(32), aligned(alignof(float)), may_alias));

// to [8, 8] = transpose of from [8, 8], for any 32-bit type; row strides in elements.
inline void transpose(const float* from, int64_t row, float* to, int64_t pitch) {
  Float8 a[8], b[8];
  for (int r = 0; r < 8; ++r) a[r] = *reinterpret_cast<const Float8*>(from + r * row);
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
    *reinterpret_cast<Float8*>(to + r * pitch) = __builtin_shufflevector(a[r], a[r + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    *reinterpret_cast<Float8*>(to + (r + 4) * pitch) = __builtin_shufflevector(a[r], a[r + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
}

// tile [columns, kVector floats' worth of T] = transpose of `rows` rows of `columns` elements that are `pitch` bytes apart. Rows
// that are missing keep what the tile had.
template <class T>
void transpose_rows(const void* from, int64_t pitch, int64_t rows, int64_t columns, T* tile) {
  constexpr int64_t width = Register<T>::count;
  int64_t c = 0;
  if constexpr (sizeof(T) == sizeof(float))
    for (; c + 8 <= columns && rows == width; c += 8)
      for (int64_t r = 0; r < width; r += 8)
        transpose(reinterpret_cast<const float*>(static_cast<const char*>(from) + r * pitch) + c,
                  pitch / static_cast<int64_t>(sizeof(float)), reinterpret_cast<float*>(tile) + c * width + r, width);
  for (int64_t r = 0; r < rows; ++r) {
    const T* x = reinterpret_cast<const T*>(static_cast<const char*>(from) + r * pitch);
    for (int64_t i = c; i < columns; ++i) tile[i * width + r] = x[i];
  }
}

// The inverse: rows of `columns` elements from a tile.
template <class T>
void store_transposed_rows(const T* tile, int64_t rows, int64_t columns, void* to, int64_t pitch) {
  constexpr int64_t width = Register<T>::count;
  int64_t c = 0;
  if constexpr (sizeof(T) == sizeof(float))
    for (; c + 8 <= columns && rows == width; c += 8)
      for (int64_t r = 0; r < width; r += 8)
        transpose(reinterpret_cast<const float*>(tile) + c * width + r, width,
                  reinterpret_cast<float*>(static_cast<char*>(to) + r * pitch) + c, pitch / static_cast<int64_t>(sizeof(float)));
  for (int64_t r = 0; r < rows; ++r) {
    T* y = reinterpret_cast<T*>(static_cast<char*>(to) + r * pitch);
    for (int64_t i = c; i < columns; ++i) y[i] = tile[i * width + r];
  }
}

}  // namespace keepdim::ggml
