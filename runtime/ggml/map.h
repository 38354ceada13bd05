// Elementwise functions over blocks of contiguous elements: `one` and `two` make a Block of a functor. The functor is
// a template over the type it computes in: f32 (which also serves f16 and bf16), f64, i64, i32 (all narrower integers).
#pragma once
#include "loops.h"

namespace keepdim::ggml {

template <class F>
F make_functor(const MapJob& job) {
  if constexpr (std::is_constructible_v<F, const MapJob&>) return F(job);
  else return F();
}

template <template <class> class F, class T>
void one(const MapJob& job, void* out, const void* const* in, unsigned single, int64_t n) {
  const auto f = make_functor<F<T>>(job);
  using R = decltype(f(T()));
  R* y = static_cast<R*>(out);
  const T* x = static_cast<const T*>(in[0]);
  if (single) return std::fill(y, y + n, f(*x)), void();
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) y[i] = f(x[i]);
}

// The second operand is a tensor's, or the first number of the job.
template <template <class> class F, class T>
void two(const MapJob& job, void* out, const void* const* in, unsigned single, int64_t n) {
  const auto f = make_functor<F<T>>(job);
  using R = decltype(f(T(), T()));
  R* y = static_cast<R*>(out);
  const T number = job.has[0] ? job.scalar[0].as<T>() : T(0);
  const T* a = static_cast<const T*>(in[0]);
  const T* b = job.has[0] ? &number : static_cast<const T*>(in[1]);
  const bool one_a = single & 1, one_b = job.has[0] || single & 2;
  if (one_a && one_b) {
    std::fill(y, y + n, f(*a, *b));
  } else if (one_b) {
    const T c = *b;
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) y[i] = f(a[i], c);
  } else if (one_a) {
    const T c = *a;
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) y[i] = f(c, b[i]);
  } else {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) y[i] = f(a[i], b[i]);
  }
}

}  // namespace keepdim::ggml
