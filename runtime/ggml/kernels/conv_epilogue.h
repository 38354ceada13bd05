// Activations that are computed on the sums of a channels-last convolution while they are in registers.
#pragma once
#include "ggml/kernels/conv_pool.h"
#include "ggml/kernels/gemm_microkernel.h"

namespace keepdim::ggml {

// acc[i] = f(acc[i]) for all i.
template <int height, int vectors, class F>
inline __attribute__((always_inline)) void update_all(Vector (&acc)[height][vectors], F&& f) {
#pragma GCC unroll 16
  for (int r = 0; r < height; ++r)
    for (int v = 0; v < vectors; ++v) acc[r][v] = f(acc[r][v]);
}

// The same for functions that need many registers: a loop over memory.
template <int height, int vectors, class F>
inline __attribute__((always_inline)) void update_in_memory(Vector (&acc)[height][vectors], F&& f) {
  Vector all[height * vectors];
#pragma GCC unroll 32
  for (int i = 0; i < height * vectors; ++i) all[i] = acc[i / vectors][i % vectors];
#pragma GCC unroll 2
  for (int i = 0; i < height * vectors; ++i) all[i] = f(all[i]);
#pragma GCC unroll 32
  for (int i = 0; i < height * vectors; ++i) acc[i / vectors][i % vectors] = all[i];
}

// NaN stays NaN.
inline Vector clamp(Vector x, Vector low, Vector high) {
  x = x < low ? low : x;
  return x > high ? high : x;
}

template <int height, int vectors>
inline __attribute__((always_inline)) void apply(const ConvFunction& f, Vector (&acc)[height][vectors]) {
  switch (f.kind) {
    case ConvFunction::Kind::none: return;
    case ConvFunction::Kind::clamp: {
      const Vector low = Vector{} + f.low, high = Vector{} + f.high;
      return update_all(acc, [&](Vector x) { return clamp(x, low, high); });
    }
    case ConvFunction::Kind::hardsigmoid: {
      const auto gate = [](Vector x) { return clamp(x + 3.0f, Vector{}, Vector{} + 6.0f) * (1.0f / 6); };
      return f.gated ? update_all(acc, [&](Vector x) { return x * gate(x); }) : update_all(acc, gate);
    }
    case ConvFunction::Kind::sigmoid: {
      const auto gate = [](Vector x) { return 1.0f / (1.0f + fast_exp(-x)); };
      return f.gated ? update_in_memory(acc, [&](Vector x) { return x * gate(x); }) : update_in_memory(acc, gate);
    }
  }
}

}  // namespace keepdim::ggml
