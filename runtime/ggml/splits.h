// Sizes at which one way of computing becomes better than another. The numbers here were measured where the engine was
// written; `keepdim tune` measures them on a machine, and every plan that is built later goes by those.
#pragma once
#include <cstdint>
#include <map>
#include <string>

#include "../program.h"

namespace keepdim::ggml {

int64_t few_rows(DType weight);          // up to so many, a stored weight is multiplied as it lies; above, in panels of f32
int64_t ggml_rows(bool whole);           // below so many, ggml's f32 product; `whole`: its tiles divide the matrix
int64_t work_per_thread();               // multiply-adds that pay for one more thread

std::map<std::string, int64_t> splits();                         // all by name: "few_rows.q8_0"
void set_splits(const std::map<std::string, int64_t>& changed);  // an unknown name or a negative number is refused

}  // namespace keepdim::ggml
