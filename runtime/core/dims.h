// Dims: integer expressions over symbols, in one table in topological order (operands first).
// Same semantics as keepdim/shapes/dim.py: checked int64, floor division and modulo as in Python.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/error.h"

namespace keepdim {

using DimId = uint32_t;

enum class DimOp : uint8_t { constant, symbol, add, mul, floordiv, mod, max, min };

struct DimNode {
  DimOp op;
  int64_t value = 0;              // the constant, or the symbol's index
  uint32_t first = 0, count = 0;  // operands: DimTable::args[first, first + count)
};

// Inclusive; nullopt is unbounded.
struct Bounds {
  std::optional<int64_t> lo, hi;
};

class KEEPDIM_API DimTable {
 public:
  // Appends a node after checking arity and references, and, from the bounds of the operands, that its bounds do not overflow
  // and that it cannot divide by zero. `symbols`: range of every symbol.
  void push(DimOp op, int64_t value, const std::vector<DimId>& args, const std::vector<Bounds>& symbols);

  size_t size() const { return nodes_.size(); }
  const DimNode& node(DimId id) const { return nodes_[id]; }
  const DimId* args(DimId id) const { return args_.data() + nodes_[id].first; }
  const Bounds& bounds(DimId id) const { return bounds_[id]; }
  bool is_constant(DimId id) const { return nodes_[id].op == DimOp::constant; }
  // Highest symbol index that the dim depends on, or -1.
  int last_symbol(DimId id) const { return last_symbol_[id]; }

  // Evaluates every dim that depends only on the first `known` symbols; `out` has size() elements. Returns the first dim whose
  // value overflows int64.
  std::optional<DimId> try_eval(const int64_t* symbols, size_t known, int64_t* out) const;
  // Evaluates every dim; throws on overflow.
  void eval(const int64_t* symbols, int64_t* out) const;
  // Evaluates one dim, before all symbols are known.
  int64_t eval_one(DimId id, const int64_t* symbols) const;
  // "2*s + 1", with symbol `names`; the same text as Python's str(Dim), truncated if very long.
  std::string text(DimId id, const std::vector<std::string>& names) const;

 private:
  bool apply(DimId id, const int64_t* symbols, int64_t* values) const;
  std::vector<DimNode> nodes_;
  std::vector<DimId> args_;
  std::vector<Bounds> bounds_;
  std::vector<int> last_symbol_;
};

}  // namespace keepdim
