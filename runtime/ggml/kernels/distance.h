// Job of the distance kernels (cdist, pdist).
#pragma once
#include "ggml/kernels/elementwise.h"

namespace keepdim::ggml {

// y [rows, columns] = p-norm of a[i] - b[j]; `loop` runs over the batch, the result is contiguous.
struct DistanceJob : Job {
  int64_t rows = 0, columns = 0, size = 0;               // size: coordinates per point
  int64_t a_row = 0, a_step = 0, b_row = 0, b_step = 0;  // in bytes
  bool condensed = false;                                // pdist: only j > i, stored row by row
  ElementwiseFn power = nullptr;                         // x^p, for norms other than 0, 1, 2 and inf
  MapJob exponent, root;
};

Kernel distance_kernel(double p, DType dtype);  // DistanceJob; nullptr for an unsupported dtype

}  // namespace keepdim::ggml
