// What follows the sums of a channels-last convolution in registers: the cheap activations.
#pragma once
#include "ggml/kernels/conv_pool.h"
#include "ggml/kernels/gemm_microkernel.h"

namespace keepdim::ggml {

// The function of the result that is computed in registers. NaN stays NaN.
struct Epilogue {
  const Vector low, high, offset, scale;
  const bool gated, scaled;

  explicit Epilogue(const ConvFunction* f)
      : low(Vector{} + f->low),
        high(Vector{} + f->high),
        offset(Vector{} + f->offset),
        scale(Vector{} + f->scale),
        gated(f->gated),
        scaled(f->scale != 1) {}

  Vector operator()(Vector x) const {
    Vector y = scaled ? x + offset : x;
    y = y < low ? low : y;
    y = y > high ? high : y;
    if (scaled) y *= scale;
    return gated ? x * y : y;
  }
};

}  // namespace keepdim::ggml
