// How a run of elements becomes one: in lanes, so that it is vectorised and its bits do not depend on the compiler.
#pragma once
#include <limits>

#include "loops.h"

namespace keepdim::ggml {

constexpr int kLanes = 32;  // four vectors, so that one sum does not wait for the one before
constexpr int kFew = 4;     // for runs shorter than that
constexpr int64_t kLaneBlock = 4096;  // elements summed in f32 before the sum moves to f64

template <class F, class T>
struct Lanes {
  static constexpr bool sums = std::is_same_v<F, Add>;
  using Acc = std::conditional_t<sums && std::is_floating_point_v<T>, double, T>;

  template <class A>
  static A first() {  // what changes nothing
    using Limits = std::numeric_limits<A>;
    if (sums) return A(0);
    if (std::is_same_v<F, Mul>) return A(1);
    const A top = Limits::has_infinity ? Limits::infinity() : Limits::max();
    const A bottom = Limits::has_infinity ? -Limits::infinity() : Limits::lowest();
    return std::is_same_v<F, Maximum> ? bottom : top;
  }

  // As one vector: compilers do not put comparisons together by themselves.
  static void take(T* lanes, const T* terms) {
    typedef T Vector __attribute__((vector_size(kFew * sizeof(T))));
    Vector a, b;
    std::memcpy(&a, lanes, sizeof(a));
    std::memcpy(&b, terms, sizeof(b));
    a = F::f(a, b);
    std::memcpy(lanes, &a, sizeof(a));
  }

  static Acc run(const T* x, int64_t n) {
    return run(x, n, [](T v) { return v; });
  }

  // Of term(x) for every x.
  template <class Term>
  static Acc run(const T* x, int64_t n, Term&& term) {
    Acc total = first<Acc>();
    if (n < kLanes) {
      T lanes[kFew], terms[kFew];
      std::fill(lanes, lanes + kFew, first<T>());
      int64_t i = 0;
      if constexpr (std::is_floating_point_v<T>) {  // of integers gcc 12 loses some of the lanes with AVX-512
        for (; i + kFew <= n; i += kFew) {
          for (int l = 0; l < kFew; ++l) terms[l] = term(x[i + l]);
          take(lanes, terms);
        }
      }
      for (; i < n; ++i) lanes[0] = F::f(lanes[0], term(x[i]));
      return static_cast<Acc>(F::f(F::f(lanes[0], lanes[1]), F::f(lanes[2], lanes[3])));
    }
    for (int64_t begin = 0; begin < n; begin += kLaneBlock, x += kLaneBlock) {
      const int64_t m = std::min(kLaneBlock, n - begin);
      T lanes[kLanes];
      std::fill(lanes, lanes + kLanes, first<T>());
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
