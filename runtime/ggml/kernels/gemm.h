// Jobs of the matrix product kernels, and weight formats.
#pragma once
#include "core/engine.h"
#include "ggml/kernels/elementwise.h"

namespace keepdim::ggml {

// Storage format of a weight that is not f32: 16-bit floats or quantised blocks.
struct WeightFormat {
  int64_t block, bytes;                                    // elements and bytes per block
  void (*to_float)(const void* x, float* y, int64_t n);    // n elements to f32; n is a multiple of `block`
  void (*from_float)(const float* x, void* y, int64_t n);  // nullptr: the format is read-only

  int64_t bytes_of(int64_t n) const { return n / block * bytes; }
};
const WeightFormat* weight_format(DType dtype);  // gemv_quant.cpp; nullptr for other dtypes

// y [m, n] = a [m, k] @ b [k, n] + bias [n]; `loop` runs over the batch, y is contiguous. Operands: a, b, bias and an
// optional list of the rows that are used (i64 [m], terminated by -1); other rows of y are unspecified (computed or 0).
struct MatmulJob : Job {
  int64_t m = 0, n = 0, k = 0;
  int64_t a_row = 0, a_step = 0;         // byte strides of a along m and k
  int64_t b_step = 0, b_column = 0;      // byte strides of b along k and n
  const float* packed = nullptr;         // b packed into panels (pack_weight, pack_float16); nullptr: not packed
  const WeightFormat* format = nullptr;  // of b if it is not f32; b is then stored as [n, k]
  DType type = DType::f32;               // of b
  DType result = DType::f32;             // of y; others than f32 only with gemm_float16_kernel
  ElementwiseFn activation = nullptr;    // applied to y
};

Kernel matmul_kernel(DType dtype);  // MatmulJob; nullptr for an unsupported dtype
Kernel gemv_kernel();               // MatmulJob, f32: small m, 16-bit or quantised weight
ActivationFormat gemv_activation_format(DType weight);
Kernel gemm_int16_kernel(DType weight);  // MatmulJob, f32: large m, quantised weight; nullptr if not supported
// MatmulJob, f32: K-quant, iq4_nl or iq4_xs weight, m > 1; nullptr if not supported. The last operand is the workspace that
// quantise_rows_kernel filled, or nothing: then every thread quantises the rows, which for small m costs less than another step.
Kernel gemm_int8_kernel(DType weight);
Kernel quantise_rows_kernel();  // MatmulJob
int64_t quantised_rows_bytes(int64_t m, int64_t k);
// MatmulJob: weight of 16-bit floats, packed by pack_float16, which keeps them; rows and result are contiguous. Rows are f32, or
// bf16 for a bf16 weight if multiplies_bf16_rows().
Kernel gemm_float16_kernel();
bool multiplies_bf16_rows();
int64_t packed_float16_bytes(DType dtype, int64_t k, int64_t n);
void pack_float16(uint16_t* packed, const uint16_t* weight, DType dtype, int64_t k, int64_t n);  // weight [n, k]
void read_packed_float16(const uint16_t* packed, DType dtype, int64_t k, int64_t column, float* y);
int64_t packed_floats(int64_t k, int64_t n);
void read_packed(const float* packed, int64_t k, int64_t column, float* y);  // y [k] = one column
// Packs weight [k, n] into panels [n / kNR, k, kNR]; strides in bytes.
void pack_weight(float* packed, const void* weight, int64_t k, int64_t n, int64_t step, int64_t column);

}  // namespace keepdim::ggml
