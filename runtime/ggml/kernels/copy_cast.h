// Jobs of the cast, copy and fill kernels.
#pragma once
#include "ggml/job.h"

namespace keepdim::ggml {

// Converts n elements between dtypes, or copies them if the dtypes are equal. Strides in bytes.
using Convert = void (*)(void* y, int64_t y_stride, const void* x, int64_t x_stride, int64_t n);
Convert converter(DType from, DType to);

struct CastJob : Job {
  Convert convert = nullptr;
};
struct FillJob : Job {
  Scalar start, step;  // y[i] = start + i * step
};
struct TriangleJob : Job {                  // tril and triu; `loop` runs over matrices and rows; the result is contiguous
  int64_t rows = 0, columns = 0, step = 0;  // step: byte stride between columns of x
  int64_t diagonal = 0;
  bool upper = false;
};

// Kernels; nullptr for an unsupported dtype.
Kernel cast_kernel();                  // CastJob
Kernel copy_kernel(size_t width);      // Job
Kernel fill_kernel(DType dtype);       // FillJob; the result is contiguous
Kernel triangle_kernel(size_t width);  // TriangleJob

}  // namespace keepdim::ggml
