// Op signatures: operands, dtypes, attributes. One table for all engines, checked when a program is loaded. Shapes are checked
// by the op builders of each engine on the evaluated sizes.
#pragma once
#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "core/program.h"

namespace keepdim {

constexpr int kMaxRank = 8;

using TypeMask = uint32_t;
constexpr TypeMask bit(DType dtype) { return static_cast<TypeMask>(1u << static_cast<int>(dtype)); }
constexpr TypeMask kF32 = bit(DType::f32);
constexpr TypeMask kFloats = kF32 | bit(DType::f64) | bit(DType::f16) | bit(DType::bf16);
constexpr TypeMask kIntegers =
    bit(DType::i64) | bit(DType::i32) | bit(DType::i16) | bit(DType::i8) | bit(DType::u8) | bit(DType::boolean);
constexpr TypeMask kAll = kFloats | kIntegers;
constexpr TypeMask kFloat32Or16 = kF32 | bit(DType::f16) | bit(DType::bf16);
constexpr TypeMask kNumbers = kAll & ~bit(DType::boolean);

// Compute type of a dtype: f32, f64, i64 or i32.
constexpr DType compute_type(DType dtype) {
  switch (dtype) {
    case DType::f32:
    case DType::f16:
    case DType::bf16: return DType::f32;
    case DType::f64:
    case DType::i64: return dtype;
    default: return is_quantised(dtype) ? DType::f32 : DType::i32;
  }
}

// Truncates to int64; out of range and NaN give INT64_MIN, as cvttsd2si does.
inline int64_t truncate(double x) {
  const bool representable = x >= -9223372036854775808.0 && x < 9223372036854775808.0;
  return representable ? static_cast<int64_t>(x) : INT64_MIN;
}

enum class AttrKind : uint8_t { size, sizes, number, real, flag, text };  // number: a value of the node's dtype

struct AttrRule {
  const char* name;
  AttrKind kind;
  bool required;
  bool data = false;  // a dim is read at run time and is not part of the plan key
};

// `types` has a letter per operand (the last one repeats), then > and the letter of the result. T: one dtype of `allowed`,
// the same for all T; *: any dtype of `allowed`; b: bool; i: index (i64 or i32); l: i64; m: T or bool; S: state; w: T or, if the
// compute type is f32, a 16-bit or quantised weight.
struct OpRule {
  int min_ins, max_ins;  // max -1: any number
  uint8_t optional;      // bit i: operand i may be missing
  const char* types;
  TypeMask allowed;
  std::initializer_list<AttrRule> attrs;
  bool widen = false;  // operands T are cast to the compute type, and the result back

  KEEPDIM_API char type_of(size_t operand) const;
  KEEPDIM_API char type_of_result() const;
};

KEEPDIM_API const OpRule* find_rule(const std::string& op);  // nullptr if unknown
// Whether kernels read this attribute at run time; such a dim is not part of the plan key.
KEEPDIM_API bool is_data(const std::string& op, const std::string& attr);

inline bool is_cond(const Node& node) { return node.op == "cond"; }  // the only op without a builder: its regions are built
// Region of a cond that is taken at these sizes.
KEEPDIM_API const Region& taken_region(const Node& cond, const int64_t* sizes);
KEEPDIM_API double number_of(const Attr& value, const int64_t* sizes);  // value of a numeric attribute

// Throws if the engine does not support an op (`has`) or if a node violates its rule.
KEEPDIM_API void check_program(const Program& program, const char* engine, bool (*has)(const std::string& op));

}  // namespace keepdim
