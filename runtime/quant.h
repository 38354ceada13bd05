// Weights in blocks, for whoever reads or makes them; ggml's own quantisers do it (ggml/quant.cpp).
#pragma once
#include "program.h"

namespace keepdim {

// Rows of k elements, whole blocks each.
KEEPDIM_API void quantise(DType dtype, const float* x, int64_t rows, int64_t k, void* y);
KEEPDIM_API void dequantise(DType dtype, const void* x, int64_t rows, int64_t k, float* y);

}  // namespace keepdim
