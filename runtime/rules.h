// What an op takes: operands, dtypes, attributes. One table for all engines, checked when a program is loaded; shapes are
// checked by each engine's row on the evaluated sizes.
#pragma once
#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "program.h"

namespace keepdim {

constexpr int kMaxRank = 8;

using TypeMask = uint32_t;
constexpr TypeMask bit(DType dtype) { return static_cast<TypeMask>(1u << static_cast<int>(dtype)); }
constexpr TypeMask kF32 = bit(DType::f32);
constexpr TypeMask kFloats = kF32 | bit(DType::f64) | bit(DType::f16) | bit(DType::bf16);
constexpr TypeMask kIntegers =
    bit(DType::i64) | bit(DType::i32) | bit(DType::i16) | bit(DType::i8) | bit(DType::u8) | bit(DType::boolean);
constexpr TypeMask kAll = kFloats | kIntegers;
constexpr TypeMask kHalfOrSingle = kF32 | bit(DType::f16) | bit(DType::bf16);
constexpr TypeMask kNumbers = kAll & ~bit(DType::boolean);

// The type that a dtype is computed in: f32, f64, i64 or i32.
constexpr DType compute_type(DType dtype) {
  switch (dtype) {
    case DType::f32: case DType::f16: case DType::bf16: return DType::f32;
    case DType::f64: case DType::i64: return dtype;
    default: return is_quantised(dtype) ? DType::f32 : DType::i32;
  }
}

// Truncates; what no int64 holds becomes the lowest, as the hardware does.
inline int64_t truncate(double x) {
  const bool held = x >= -9223372036854775808.0 && x < 9223372036854775808.0;
  return held ? static_cast<int64_t>(x) : INT64_MIN;
}

enum class AttrKind : uint8_t { size, sizes, number, real, flag, text };  // number: of the node's dtype

struct AttrRule {
  const char* name;
  AttrKind kind;
  bool required;
  bool data = false;  // a dim is read when the plan runs, and is no part of its key
};

// `types` has a letter for each operand (the last serves all that follow), then > and one for the result:
// T one dtype of `allowed` for all, * any of `allowed`, b bool, i an index (i64 or i32), l i64, m T or bool, S a state,
// w T or, where that is computed in f32, a half or quantised weight.
struct Rule {
  int min_ins, max_ins;  // max -1: any number
  uint8_t optional;      // bit i: operand i may be missing
  const char* types;
  TypeMask allowed;
  std::initializer_list<AttrRule> attrs;
  bool widen = false;  // the row sees T as the type it is computed in; casts stand around it

  KEEPDIM_API char type_of(size_t operand) const;
  KEEPDIM_API char type_of_result() const;
};

KEEPDIM_API const Rule* find_rule(const std::string& op);  // nullptr when there is none
// Whether rows read this attribute as data at run time; such a dim is no part of the plan's key.
KEEPDIM_API bool is_data(const std::string& op, const std::string& attr);

inline bool is_cond(const Node& node) { return node.op == "cond"; }  // the one op without rows: its regions are built
// The region of a cond that is taken at these sizes.
KEEPDIM_API const Region& taken(const Node& cond, const int64_t* sizes);
KEEPDIM_API double number_of(const Attr& value, const int64_t* sizes);  // of an attribute that is a number

// Refuses a program with an op that the engine has no row for (`has`), or whose nodes break their rules.
KEEPDIM_API void check_program(const Program& program, const char* engine, bool (*has)(const std::string& op));

}  // namespace keepdim
