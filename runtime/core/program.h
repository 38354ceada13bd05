// Program at run time: parsed once from JSON, verified, in flat arrays.
// The format is that of keepdim/ir/program.py; both sides verify the same rules.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "core/contract.h"

namespace keepdim {

constexpr int kFormatVersion = 1;

// In JSON an integer is a DimId, a list of integers is a list of DimIds, and a number with a decimal point is a float; the
// strings "inf", "-inf" and "nan" are also accepted as floats (number_of).
using Attr = std::variant<bool, DimId, double, std::string, std::vector<DimId>>;

struct Value {
  enum class Kind : uint8_t { input, constant, state, temp } kind;
  std::string name;
  DType dtype;
  std::vector<DimId> dims;
  std::string key;  // key of the weight or state; empty otherwise
};

constexpr int32_t kNone = -1;  // a missing optional operand

struct Region;

struct Node {
  std::string op;
  std::vector<int32_t> ins;
  std::vector<int32_t> outs;
  std::map<std::string, Attr> attrs;
  std::vector<Region> regions;
};

// A nested block of nodes over the program's values; its results become the outs of the owning node.
struct Region {
  std::vector<Node> nodes;
  std::vector<int32_t> results;
};

class KEEPDIM_API Program {
 public:
  Contract contract;
  std::vector<Value> values;  // the contract's inputs first, in order; then the rest as in the file
  std::vector<Node> nodes;
  std::vector<int32_t> results;  // one per contract output; kNone for an integer output

  std::string describe(const Node& node) const;  // "silu 'silu_1' [s, 64] f32", for errors

  static Program parse(std::string_view json);  // verified
};

}  // namespace keepdim
