// Crossover sizes between kernels. The defaults were measured on the development machine; `keepdim tune` measures them on the
// current one, and plans built afterwards use the new values.
#pragma once
#include <cstdint>
#include <map>
#include <string>

#include "core/program.h"

namespace keepdim::ggml {

int64_t few_rows(DType weight);   // up to this many rows gemv on the weight's own format; above, gemm (f32, int16 or int8 panels)
int64_t ggml_rows(bool aligned);  // below this many rows ggml_mul_mat for f32; `aligned`: its tiles divide the matrix
int64_t work_per_thread();        // multiply-adds that justify one more thread

std::map<std::string, int64_t> thresholds();                         // by name, for instance "few_rows.q8_0"
void set_thresholds(const std::map<std::string, int64_t>& changed);  // throws for an unknown name or a negative value

}  // namespace keepdim::ggml
