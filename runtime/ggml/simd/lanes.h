// Reduces a contiguous run with a fixed number of lanes, so that it vectorises and is bitwise independent of the compiler.
#pragma once
#include <limits>

#include "ggml/kernels/strided_loop.h"

namespace keepdim::ggml {

constexpr int kLanes = 32;            // several independent vectors hide the latency of F
constexpr int kShortLanes = 4;        // lanes for runs shorter than kLanes
constexpr int64_t kLaneBlock = 4096;  // elements summed in T before flushing to Acc

template <class F, class T>
struct Lanes {
  static constexpr bool sums = std::is_same_v<F, Add>;
  using Acc = std::conditional_t<sums && std::is_floating_point_v<T>, double, T>;

  template <class A>
  static A identity() {  // the identity of F
    using Limits = std::numeric_limits<A>;
    if (sums) return A(0);
    if (std::is_same_v<F, Mul>) return A(1);
    const A highest = Limits::has_infinity ? Limits::infinity() : Limits::max();
    const A lowest = Limits::has_infinity ? -Limits::infinity() : Limits::lowest();
    return std::is_same_v<F, Maximum> ? lowest : highest;
  }

  // lanes = F(lanes, terms) as an explicit vector: compilers do not vectorise the comparisons of Maximum and Minimum.
  static void accumulate(T* lanes, const T* terms) {
    typedef T Vector __attribute__((vector_size(kShortLanes * sizeof(T))));
    Vector a, b;
    std::memcpy(&a, lanes, sizeof(a));
    std::memcpy(&b, terms, sizeof(b));
    a = F::f(a, b);
    std::memcpy(lanes, &a, sizeof(a));
  }

  static Acc run(const T* x, int64_t n) {
    return run(x, n, [](T v) { return v; });
  }

  // Reduces term(x[i]) over all i.
  template <class Term>
  static Acc run(const T* x, int64_t n, Term&& term) {
    Acc total = identity<Acc>();
    if (n < kLanes) {
      T lanes[kShortLanes], terms[kShortLanes];
      std::fill(lanes, lanes + kShortLanes, identity<T>());
      int64_t i = 0;
      if constexpr (std::is_floating_point_v<T>) {  // gcc 12 miscompiles this for integers with AVX-512
        for (; i + kShortLanes <= n; i += kShortLanes) {
          for (int l = 0; l < kShortLanes; ++l) terms[l] = term(x[i + l]);
          accumulate(lanes, terms);
        }
      }
      for (; i < n; ++i) lanes[0] = F::f(lanes[0], term(x[i]));
      return static_cast<Acc>(F::f(F::f(lanes[0], lanes[1]), F::f(lanes[2], lanes[3])));
    }
    for (int64_t begin = 0; begin < n; begin += kLaneBlock, x += kLaneBlock) {
      const int64_t m = std::min(kLaneBlock, n - begin);
      T lanes[kLanes];
      std::fill(lanes, lanes + kLanes, identity<T>());
      int64_t i = 0;
      for (; i + kLanes <= m; i += kLanes)
        for (int l = 0; l < kLanes; ++l) lanes[l] = F::f(lanes[l], term(x[i + l]));
      for (; i < m; ++i) lanes[0] = F::f(lanes[0], term(x[i]));
      Acc wide[kLanes];
      std::copy(lanes, lanes + kLanes, wide);
      for (int half = kLanes / 2; half; half /= 2)
        for (int l = 0; l < half; ++l) wide[l] = F::f(wide[l], wide[l + half]);
      total = F::f(total, wide[0]);
    }
    return total;
  }
};

}  // namespace keepdim::ggml
