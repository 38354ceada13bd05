// What the rows of every family share: checks of shapes; and the families' tables.
#pragma once
#include <iterator>

#include "build.h"

namespace keepdim::ggml {

// ---- the families, one file each

struct Table {
  const Row* rows;
  size_t count;
};
Table map_rows();
Table product_rows();
Table reduce_rows();
Table shape_rows();
Table index_rows();
Table rope_rows();
Table window_rows();
Table sample_rows();

// ---- checks that rows begin with

inline void need_fit(Build& b, const Tensor& x) {
  if (fits(x, b.out())) return;
  b.refuse("operand " + dims_text(x) + " does not broadcast to " + dims_text(b.out()) + ".");
}

inline Tensor same_shape(Build& b) {
  if (!same_dims(b.in(0), b.out())) b.refuse("input " + dims_text(b.in(0)) + " is not " + dims_text(b.out()) + ".");
  return b.in(0);
}

inline int64_t need_dim(Build& b, const Tensor& x) {
  const int64_t dim = b.size("dim");
  if (dim < 0 || dim >= x.rank) b.refuse("dim " + std::to_string(dim) + " is none of " + dims_text(x) + ".");
  return dim;
}

Tensor add_bias(Build& b, const Tensor& x, const Tensor& bias);  // ops_map.cpp; a row [n] added to each of x [.., n]
Block activation_block(const std::string& name, DType type);  // ops_map.cpp; nullptr when there is none
Block power_block(DType type);  // ops_map.cpp; to the job's first number

}  // namespace keepdim::ggml
