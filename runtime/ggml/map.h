// Elementwise functions over blocks of contiguous elements: `one` and `two` make a Block of a functor. The functor is
// a template over the type it computes in; S is what is stored: a 16-bit float is computed in f32, others as they are.
#pragma once
#include "half.h"

namespace keepdim::ggml {

template <class F>
F make_functor(const MapJob& job) {
  if constexpr (std::is_constructible_v<F, const MapJob&>) return F(job);
  else return F();
}

// y[i] = f(x[i]…)
template <class S, class F, class... X>
void map_run(void* out, int64_t n, F&& f, const X*... x) {
  if constexpr (kIsHalf<S>) {
    map_half(static_cast<S*>(out), n, f, x...);
  } else {
    auto* y = static_cast<decltype(f(X()...))*>(out);
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) y[i] = f(x[i]...);
  }
}

// y[i] = value
template <class S, class R>
void fill_run(void* out, int64_t n, R value) {
  if constexpr (kIsHalf<S>) {
    std::fill(static_cast<S*>(out), static_cast<S*>(out) + n, narrow<S>(value));
  } else {
    std::fill(static_cast<R*>(out), static_cast<R*>(out) + n, value);
  }
}

template <template <class> class F, class S>
void one(const MapJob& job, void* out, const void* const* in, unsigned single, int64_t n) {
  using T = Computed<S>;
  const auto f = make_functor<F<T>>(job);
  const S* x = static_cast<const S*>(in[0]);
  if (single) fill_run<S>(out, n, f(widen(*x)));
  else map_run<S>(out, n, [&](T a) { return f(a); }, x);
}

// The second operand is a tensor's, or the first number of the job.
template <template <class> class F, class S>
void two(const MapJob& job, void* out, const void* const* in, unsigned single, int64_t n) {
  using T = Computed<S>;
  const auto f = make_functor<F<T>>(job);
  const S* a = static_cast<const S*>(in[0]);
  const S* b = job.has[0] ? nullptr : static_cast<const S*>(in[1]);
  const bool one_a = single & 1, one_b = job.has[0] || single & 2;
  if (one_b) {
    const T c = job.has[0] ? job.scalar[0].as<T>() : widen(*b);
    if (one_a) fill_run<S>(out, n, f(widen(*a), c));
    else map_run<S>(out, n, [&](T x) { return f(x, c); }, a);
  } else if (one_a) {
    const T c = widen(*a);
    map_run<S>(out, n, [&](T x) { return f(c, x); }, b);
  } else {
    map_run<S>(out, n, [&](T x, T y) { return f(x, y); }, a, b);
  }
}

// Chunk by chunk: `quick` where the test is true of every element, else `full`. T: of operands and result.
template <class T, Block test, Block quick, Block full>
void by_chunk(const MapJob& job, void* out, const void* const* in, unsigned single, int64_t n) {
  constexpr int64_t chunk = 256;
  bool passed[chunk];
  for (int64_t begin = 0; begin < n; begin += chunk) {
    const int64_t m = std::min(chunk, n - begin);
    const void* x[kMaxOperands - 1] = {};
    for (int o = 0; o < job.operands; ++o) x[o] = static_cast<const T*>(in[o]) + (single >> o & 1 ? 0 : begin);
    test(job, passed, x, single, m);
    (std::memchr(passed, 0, m) ? full : quick)(job, static_cast<T*>(out) + begin, x, single, m);
  }
}

}  // namespace keepdim::ggml
