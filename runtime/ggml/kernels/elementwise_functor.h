// `unary_loop` and `binary_loop` turn a scalar functor into an ElementwiseFn. The functor is a template over the compute
// type; S is the storage type. 16-bit floats are computed in f32, other types in their own type.
#pragma once
#include "ggml/kernels/elementwise.h"
#include "ggml/simd/float16.h"

namespace keepdim::ggml {

template <class F>
F make_functor(const MapJob& job) {
  if constexpr (std::is_constructible_v<F, const MapJob&>)
    return F(job);
  else
    return F();
}

// y[i] = f(x[i]…)
template <class S, class F, class... X>
void map_run(void* out, int64_t n, F&& f, const X*... x) {
  if constexpr (kIsFloat16<S>) {
    map_float16(static_cast<S*>(out), n, f, x...);
  } else {
    auto* y = static_cast<decltype(f(X()...))*>(out);
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) y[i] = f(x[i]...);
  }
}

// y[i] = value
template <class S, class R>
void fill_run(void* out, int64_t n, R value) {
  if constexpr (kIsFloat16<S>) {
    std::fill(static_cast<S*>(out), static_cast<S*>(out) + n, narrow<S>(value));
  } else {
    std::fill(static_cast<R*>(out), static_cast<R*>(out) + n, value);
  }
}

template <template <class> class F, class S>
void unary_loop(const MapJob& job, void* out, const void* const* in, unsigned broadcast_mask, int64_t n) {
  using T = ComputeType<S>;
  const auto f = make_functor<F<T>>(job);
  const S* x = static_cast<const S*>(in[0]);
  if (broadcast_mask)
    fill_run<S>(out, n, f(widen(*x)));
  else
    map_run<S>(out, n, [&](T a) { return f(a); }, x);
}

// The second operand is a tensor or the job's first scalar.
template <template <class> class F, class S>
void binary_loop(const MapJob& job, void* out, const void* const* in, unsigned broadcast_mask, int64_t n) {
  using T = ComputeType<S>;
  const auto f = make_functor<F<T>>(job);
  const S* a = static_cast<const S*>(in[0]);
  const S* b = job.has_scalar[0] ? nullptr : static_cast<const S*>(in[1]);
  const bool broadcast_a = broadcast_mask & 1, broadcast_b = job.has_scalar[0] || broadcast_mask & 2;
  if (broadcast_b) {
    const T c = job.has_scalar[0] ? job.scalar[0].as<T>() : widen(*b);
    if (broadcast_a)
      fill_run<S>(out, n, f(widen(*a), c));
    else
      map_run<S>(out, n, [&](T x) { return f(x, c); }, a);
  } else if (broadcast_a) {
    const T c = widen(*a);
    map_run<S>(out, n, [&](T x) { return f(c, x); }, b);
  } else {
    map_run<S>(out, n, [&](T x, T y) { return f(x, y); }, a, b);
  }
}

// Per chunk: runs `fast` if `test` is true for every element, else `full`. T is the type of the operands and the result.
template <class T, ElementwiseFn test, ElementwiseFn fast, ElementwiseFn full>
void dispatch_by_chunk(const MapJob& job, void* out, const void* const* in, unsigned broadcast_mask, int64_t n) {
  constexpr int64_t chunk = 256;
  bool passed[chunk];
  for (int64_t begin = 0; begin < n; begin += chunk) {
    const int64_t m = std::min(chunk, n - begin);
    const void* x[kMaxOperands - 1] = {};
    for (int o = 0; o < job.operands; ++o) x[o] = static_cast<const T*>(in[o]) + (broadcast_mask >> o & 1 ? 0 : begin);
    test(job, passed, x, broadcast_mask, m);
    (std::memchr(passed, 0, m) ? full : fast)(job, static_cast<T*>(out) + begin, x, broadcast_mask, m);
  }
}

}  // namespace keepdim::ggml
