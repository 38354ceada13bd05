// Job of the row-wise kernels: softmax, norms, cumsum and cumprod.
#pragma once
#include "ggml/job.h"

namespace keepdim::ggml {

struct RowwiseJob : Job {   // `loop` runs over the rows
  int64_t size = 0;         // row length
  int64_t strides[2] = {};  // byte strides along a row of the result and of x
  double eps = 0;
};

// Kernels; nullptr for an unsupported dtype.
Kernel softmax_kernel(DType dtype);      // RowwiseJob
Kernel log_softmax_kernel(DType dtype);  // RowwiseJob
Kernel layer_norm_kernel(DType dtype);   // RowwiseJob; rows of x are contiguous
Kernel rms_norm_kernel(DType dtype);     // RowwiseJob; rows of x are contiguous
Kernel cumsum_kernel(DType dtype);       // RowwiseJob
Kernel cumprod_kernel(DType dtype);      // RowwiseJob

}  // namespace keepdim::ggml
