// Job of the reduction kernels.
#pragma once
#include "ggml/kernels/copy_cast.h"

namespace keepdim::ggml {

constexpr int64_t kReduceColumns = 256;  // adjacent results that are computed together

enum class ReduceFn : uint8_t { sum, squares, prod, amax, amin, any, all };

// `loop` runs over the kept dims; operands: result, x, and the shift (variance) or the chunk results (argreduce).
struct ReduceJob : Job {
  Loop inner;                       // over the reduced dims
  int64_t count = 0;                // elements per result
  int64_t chunk = 0;                // chunk size along the first dim of `inner`; 0: not chunked
  int64_t chunk_bytes = INT64_MAX;  // bytes of the results of one chunk; chunks are the outermost dim of `loop`
  double divisor = 1;               // sums are divided by this
  Convert read = nullptr;           // conversion of x to the compute type; for a single contiguous reduced dim
  int64_t width = 0;                // bytes of an element of x, with `read`
};

// Kernels; nullptr for an unsupported dtype.
Kernel reduce_kernel(ReduceFn fn, DType from, DType to);  // ReduceJob
Kernel argreduce_kernel(ReduceFn fn, DType dtype);        // ReduceJob: argmax (amax) or argmin (amin)
Kernel argreduce_merge_kernel(ReduceFn fn, DType dtype);  // ReduceJob: merges the positions of chunks

}  // namespace keepdim::ggml
