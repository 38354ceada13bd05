// Reduces a contiguous run in a fixed number of lanes, as explicit vectors: compilers do not vectorise the comparisons of Maximum
// and Minimum.
#pragma once
#include <limits>

#include "ggml/kernels/strided_loop.h"
#include "ggml/simd/vector.h"

namespace keepdim::ggml {

constexpr int64_t kLaneBlock = 4096;  // elements summed in T before flushing to Acc

template <class F, class T>
struct Lanes {
  static constexpr bool sums = std::is_same_v<F, Add>;
  using Acc = std::conditional_t<sums && std::is_floating_point_v<T>, double, T>;
  using V = VectorOf<T>;
  static constexpr int kCount = Register<T>::count;
  // Independent vectors hide the latency of F: that of a comparison and a blend is longer.
  static constexpr int kVectors = sums || std::is_same_v<F, Mul> ? 4 : 8;

  template <class A>
  static A identity() {  // the identity of F
    using Limits = std::numeric_limits<A>;
    if (sums) return A(0);
    if (std::is_same_v<F, Mul>) return A(1);
    const A highest = Limits::has_infinity ? Limits::infinity() : Limits::max();
    const A lowest = Limits::has_infinity ? -Limits::infinity() : Limits::lowest();
    return std::is_same_v<F, Maximum> ? lowest : highest;
  }

  static Acc run(const T* x, int64_t n) {
    return run(x, n, [](auto v) { return v; });
  }

  // Reduces term(x[i]) over all i; term takes a T, or a vector of them.
  template <class Term>
  static Acc run(const T* x, int64_t n, Term&& term) {
    Acc total = identity<Acc>();
    for (int64_t begin = 0; begin < n; begin += kLaneBlock)
      total = F::f(total, block(x + begin, std::min(kLaneBlock, n - begin), term));
    return total;
  }

 private:
  template <class Term>
  static Acc block(const T* x, int64_t n, Term&& term) {
    const V none = V{} + identity<T>();
    V sum[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sum[v] = none;
    int64_t i = 0;
    for (; i + kVectors * kCount <= n; i += kVectors * kCount)
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sum[v] = F::f(sum[v], V(term(load_vector(x + i + v * kCount))));
    for (; i + kCount <= n; i += kCount) sum[0] = F::f(sum[0], V(term(load_vector(x + i))));
    alignas(64) T lanes[kCount];
    if constexpr (kVectors == 8)
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) sum[v] = F::f(sum[v], sum[v + 4]);
    store_vector(lanes, F::f(F::f(sum[0], sum[1]), F::f(sum[2], sum[3])));
    for (int l = 0; i < n; ++i, ++l) lanes[l] = F::f(lanes[l], T(term(x[i])));
    Acc wide[kCount];
    std::copy(lanes, lanes + kCount, wide);
    for (int half = kCount / 2; half; half /= 2)
      for (int l = 0; l < half; ++l) wide[l] = F::f(wide[l], wide[l + half]);
    return wide[0];
  }
};

}  // namespace keepdim::ggml
