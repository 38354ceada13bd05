// Jobs of the gather, scatter and embedding kernels.
#pragma once
#include "ggml/kernels/copy_cast.h"
#include "ggml/kernels/gemm.h"

namespace keepdim::ggml {

enum class ScatterFn : uint8_t { set, add, prod, amax, amin };

// Operands of `loop`: result, x, index for gather; result, source, index for scatter. The indexed operand has stride 0 along
// the indexed dims.
struct IndexJob : Job {
  int64_t limit = 0, scale = 0;  // valid indices are below `limit`; byte offset = index * scale
  bool wide = false;             // 64-bit indices
  bool wrap = false;             // negative indices count from the end
  int split = -1;                // scatter: loop dim that is split among threads; -1: none
};
struct NonzeroJob : Job {  // positions of the nonzero elements in order, padded with -1
  int64_t count = 0;
};
struct LookupJob : Job {                  // embedding lookup as f32; result and index are contiguous
  int64_t rows = 0, size = 0, limit = 0;  // indices; elements per row; rows of the weight
  const float* packed = nullptr;          // the packed weight, whose columns are the rows to read
  const WeightFormat* format = nullptr;
  DType type = DType::f32;  // of the weight
  bool wide = false;        // 64-bit indices
};

enum class BagMode : uint8_t { sum, mean, max };

// Operands: table [rows, columns], indices i64 [count], offsets i64 [offsets], per-sample weights [count].
struct EmbeddingBagJob : Job {
  int64_t bags = 0, count = 0, rows = 0, columns = 0;  // count: number of indices; rows, columns: of the table
  int64_t offsets = 0;                                 // number of offsets: bags, or bags + 1 with include_last_offset
  int64_t padding = -1;                                // padding index, skipped; -1: none
  BagMode mode = BagMode::sum;
  Convert write = nullptr;  // conversion from the compute type
};

// Kernels; nullptr for an unsupported dtype.
Kernel nonzero_kernel();                           // NonzeroJob
Kernel offset_kernel();                            // IndexJob: accumulates byte offsets of several indices
Kernel gather_kernel(size_t width);                // IndexJob
Kernel scatter_kernel(ScatterFn fn, DType dtype);  // IndexJob; `set` supports any dtype
Kernel lookup_kernel();                            // LookupJob
Kernel embedding_bag_kernel(DType dtype);          // EmbeddingBagJob

}  // namespace keepdim::ggml
