// Inputs, weights and states as MLX arrays.
#pragma once
#include "mlx/op.h"

namespace keepdim::mlx {

// Wraps memory that outlives the array. `copied`: MLX made a copy and does not read the memory again.
Array wrap(const void* data, const mx::Shape& shape, DType dtype, bool* copied);
// Repacks a quantised weight into MLX's format, without loss. has_mlx_format: whether the dtype can be repacked.
bool has_mlx_format(DType dtype);
QuantisedWeight pack(DType dtype, const void* data, const mx::Shape& shape);
Array dequantised(DType dtype, const void* data, const mx::Shape& shape);  // other dtypes: expanded to f32
// The state of a key, shared by all delegates that share its memory.
std::shared_ptr<State> state_of(const Bytes& bytes, DType dtype, const mx::Shape& shape);

}  // namespace keepdim::mlx
