// What the rows of every family share: dtypes, rules, checks of shapes; and the families' tables.
#pragma once
#include <iterator>

#include "build.h"

namespace keepdim::ggml {

constexpr TypeMask bit(DType dtype) { return static_cast<TypeMask>(1u << static_cast<int>(dtype)); }
constexpr TypeMask kF32 = bit(DType::f32);
constexpr TypeMask kFloats = kF32 | bit(DType::f64) | bit(DType::f16) | bit(DType::bf16);
constexpr TypeMask kIntegers =
    bit(DType::i64) | bit(DType::i32) | bit(DType::i16) | bit(DType::i8) | bit(DType::u8) | bit(DType::boolean);
constexpr TypeMask kAll = kFloats | kIntegers;
constexpr TypeMask kHalfOrSingle = kF32 | bit(DType::f16) | bit(DType::bf16);
constexpr TypeMask kNumbers = kAll & ~bit(DType::boolean);

// ---- rules

using Attrs = std::initializer_list<AttrRule>;
constexpr AttrRule kDim{"dim", AttrKind::size, true};
constexpr Attrs kOther = {{"other", AttrKind::number, false, true}};
constexpr Attrs kDimOnly = {kDim};
constexpr Attrs kDims = {{"dims", AttrKind::sizes, true}};

constexpr Rule unary(TypeMask types, Attrs attrs = {}, bool widen = false) {
  return {1, 1, 0, "T>T", types, attrs, widen};
}
constexpr Rule source(TypeMask types, Attrs attrs) { return {0, 0, 0, ">T", types, attrs}; }

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
