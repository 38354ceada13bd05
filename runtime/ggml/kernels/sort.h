// Job of the sort kernels.
#pragma once
#include "ggml/job.h"

namespace keepdim::ggml {

struct SortJob : Job {                    // rows are contiguous
  int64_t rows = 0, size = 0, top_k = 0;  // top_k: row length of the result
  bool descending = false;
};

int64_t sort_key_bytes(DType dtype);    // size of a key with its position
bool sort_needs_scratch(int64_t size);  // whether rows of this size need a second buffer of keys
Kernel sort_keys_kernel(DType dtype);   // SortJob: contiguous x to keys
Kernel sort_kernel(DType dtype);        // SortJob: keys (modified in place) to positions

}  // namespace keepdim::ggml
