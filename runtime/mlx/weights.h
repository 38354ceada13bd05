// Memory of others as MLX's arrays: inputs, weights, states.
#pragma once
#include "op.h"

namespace keepdim::mlx {

// An array over memory that outlives it. `copied`: MLX could not use it there and does not read it again.
Array wrap(const void* data, const mx::Shape& shape, DType dtype, bool* copied);
// A quantised weight in MLX's own form, which has exactly the same numbers; `packs`: whether there is one.
bool packs(DType dtype);
Packed pack(DType dtype, const void* data, const mx::Shape& shape);
Array widened(DType dtype, const void* data, const mx::Shape& shape);  // the others: f32
// The array of a state, the same for all delegates that share its memory.
std::shared_ptr<State> state_of(const Bytes& bytes, DType dtype, const mx::Shape& shape);

}  // namespace keepdim::mlx
