// Vectorised functions of <cmath>.
#pragma once
#include <cmath>

// glibc's libmvec has SIMD variants of these; the declarations let the compiler vectorise calls in loops.
#if defined(__GLIBC__) && defined(__x86_64__) && __GLIBC_PREREQ(2, 35)
#define KEEPDIM_VECTOR_1(name)                                        \
  __attribute__((simd("notinbranch"))) float name##f(float) noexcept; \
  __attribute__((simd("notinbranch"))) double name(double) noexcept;
#define KEEPDIM_VECTOR_2(name)                                               \
  __attribute__((simd("notinbranch"))) float name##f(float, float) noexcept; \
  __attribute__((simd("notinbranch"))) double name(double, double) noexcept;
extern "C" {
// clang-format off
KEEPDIM_VECTOR_1(exp) KEEPDIM_VECTOR_1(expm1) KEEPDIM_VECTOR_1(log) KEEPDIM_VECTOR_1(log1p) KEEPDIM_VECTOR_1(log2)
KEEPDIM_VECTOR_1(log10) KEEPDIM_VECTOR_1(sin) KEEPDIM_VECTOR_1(cos) KEEPDIM_VECTOR_1(tan) KEEPDIM_VECTOR_1(asin)
KEEPDIM_VECTOR_1(acos) KEEPDIM_VECTOR_1(atan) KEEPDIM_VECTOR_1(sinh) KEEPDIM_VECTOR_1(cosh) KEEPDIM_VECTOR_1(asinh)
KEEPDIM_VECTOR_1(acosh) KEEPDIM_VECTOR_1(atanh) KEEPDIM_VECTOR_1(tanh) KEEPDIM_VECTOR_1(erf) KEEPDIM_VECTOR_1(erfc)
KEEPDIM_VECTOR_1(exp2) KEEPDIM_VECTOR_2(pow) KEEPDIM_VECTOR_2(atan2)
// clang-format on
}
#endif
