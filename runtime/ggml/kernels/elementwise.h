// Job of the elementwise kernel.
#pragma once
#include "ggml/kernels/copy_cast.h"

namespace keepdim::ggml {

// y = f(x…) for n contiguous elements. Bit i of `broadcast_mask` set: operand i is a single element used for all n.
struct MapJob;
using ElementwiseFn = void (*)(const MapJob& job, void* y, const void* const* x, unsigned broadcast_mask, int64_t n);

struct MapJob : Job {
  ElementwiseFn fn = nullptr;
  int operands = 0;
  Convert read[kMaxOperands] = {}, write = nullptr;  // dtype conversions; nullptr if already in the compute dtype
  Convert strided_copy[kMaxOperands] = {};           // same-dtype copies to and from contiguous chunks; index 0: result
  int64_t width[kMaxOperands] = {};                  // element size in bytes of what `fn` reads and writes
  Scalar scalar[2];                                  // scalar attributes of the function
  bool has_scalar[2] = {false, false};
  bool condition = false;  // the first operand is bool (where)
};

Kernel map_kernel();        // MapJob
Kernel map_rows_kernel();   // MapJob with a repeated row
Kernel map_tiles_kernel();  // MapJob with transposed operands
bool has_transposed(const MapJob& job);
int repeated_row(const MapJob& job);  // operand with one short row for all rows of the others; 0: none, or no gain

}  // namespace keepdim::ggml
