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

template <int height, int vectors>
inline __attribute__((always_inline)) void apply(const ConvFunction& f, Vector (&acc)[height][vectors]) {
  switch (f.kind) {
    case ConvFunction::Kind::none: return;
    case ConvFunction::Kind::clamp: {
      const Vector low = Vector{} + f.low, high = Vector{} + f.high;
      return update_all(acc, [&](Vector x) { return clamp(x, low, high); });
    }
    case ConvFunction::Kind::hardsigmoid: {
      const auto gate = [](Vector x) { return clamp<Vector>(x + 3.0f, Vector{}, Vector{} + 6.0f) * (1.0f / 6); };
      return f.gated ? update_all(acc, [&](Vector x) { return x * gate(x); }) : update_all(acc, gate);
    }
    case ConvFunction::Kind::sigmoid: return;  // needs too many registers: see apply_in_memory
  }
}

// The functions that apply() leaves out, on `count` vectors that have been stored: read(i) and write(i, x) access vector i.
template <class Read, class Write>
inline __attribute__((always_inline)) void apply_in_memory(const ConvFunction& f, int count, Read&& read, Write&& write) {
  if (f.kind != ConvFunction::Kind::sigmoid) return;
  const auto update = [&](auto&& function) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int i = 0; i < count; ++i) write(i, function(read(i)));
  };
  f.gated ? update([](Vector x) { return x * fast_sigmoid(x); }) : update([](Vector x) { return fast_sigmoid(x); });
}

}  // namespace keepdim::ggml
