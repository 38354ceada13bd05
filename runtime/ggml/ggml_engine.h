// The ggml engine, for whoever registers engines. Includes no ggml header.
#pragma once
#include "../engine.h"

namespace keepdim {

const EngineInfo& ggml_engine();
void register_ggml_engine();  // once per process

// Rows of k elements, whole blocks each, by ggml's own quantisers; quant.cpp.
KEEPDIM_API void quantise(DType dtype, const float* x, int64_t rows, int64_t k, void* y);
KEEPDIM_API void dequantise(DType dtype, const void* x, int64_t rows, int64_t k, float* y);

}  // namespace keepdim
