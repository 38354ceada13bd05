// Quantisation of weights with ggml's quantisers (ggml/kernels/gemv_quant.cpp).
#pragma once
#include "core/program.h"

namespace keepdim {

// x [rows, k]; k is a multiple of the block size.
KEEPDIM_API void quantise(DType dtype, const float* x, int64_t rows, int64_t k, void* y);
KEEPDIM_API void dequantise(DType dtype, const void* x, int64_t rows, int64_t k, float* y);

}  // namespace keepdim
