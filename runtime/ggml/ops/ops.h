// Op tables by family, and shape checks shared by the op builders.
#pragma once
#include <iterator>

#include "ggml/build.h"

namespace keepdim::ggml {

// ---- op tables, one file per family

struct OpTable {
  const OpBuilder* ops;
  size_t count;
};
OpTable elementwise_ops();
OpTable matmul_ops();
OpTable reduce_ops();
OpTable shape_ops();
OpTable gather_scatter_ops();
OpTable rope_ops();
OpTable conv_pool_ops();

// ---- shape checks

inline void check_broadcast(Build& b, const Tensor& x) {
  if (broadcastable(x, b.out())) return;
  b.refuse("operand " + dims_text(x) + " does not broadcast to " + dims_text(b.out()) + ".");
}

inline Tensor check_same_shape(Build& b) {
  if (!same_dims(b.in(0), b.out())) b.refuse("input " + dims_text(b.in(0)) + " is not " + dims_text(b.out()) + ".");
  return b.in(0);
}

inline int64_t checked_dim(Build& b, const Tensor& x) {
  const int64_t dim = b.size("dim");
  if (dim < 0 || dim >= x.rank) b.refuse("dim " + std::to_string(dim) + " is out of range for " + dims_text(x) + ".");
  return dim;
}

Tensor add_bias(Build& b, const Tensor& x, const Tensor& bias);    // elementwise.cpp; x [.., n] + bias [n]
ElementwiseFn activation_fn(const std::string& name, DType type);  // elementwise.cpp; nullptr if unknown
ActivationFormat activation_format(DType weight, int64_t rows);    // matmul.cpp; of linear with a quantised weight
ElementwiseFn pow_fn(DType type);                                  // elementwise.cpp; the exponent is the job's first scalar

}  // namespace keepdim::ggml
