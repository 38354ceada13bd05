// Dims: integer expressions over symbols, in one table in topological order.
// Same semantics as keepdim/dims.py: checked int64, floor division and modulo as in Python.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "error.h"

namespace keepdim {

using DimId = uint32_t;

enum class DimOp : uint8_t { constant, symbol, add, mul, floordiv, mod, max, min };

struct DimNode {
  DimOp op;
  int64_t value = 0;            // the constant, or the symbol's index
  uint32_t first = 0, count = 0;  // operands: DimTable::args[first, first + count)
};

// Inclusive; an empty side is infinite.
struct Bounds {
  std::optional<int64_t> lo, hi;
};

class KEEPDIM_API DimTable {
 public:
  // Appends a node after checking arity, references and, from the operands' bounds, that it can never
  // overflow or divide by zero. `symbols` holds the range of every symbol.
  void push(DimOp op, int64_t value, const std::vector<DimId>& args, const std::vector<Bounds>& symbols);

  size_t size() const { return nodes_.size(); }
  const DimNode& node(DimId id) const { return nodes_[id]; }
  const DimId* args(DimId id) const { return args_.data() + nodes_[id].first; }
  const Bounds& bounds(DimId id) const { return bounds_[id]; }
  bool is_constant(DimId id) const { return nodes_[id].op == DimOp::constant; }
  // The highest symbol index the dim depends on, or -1: what must be bound before it can be evaluated.
  int last_symbol(DimId id) const { return last_symbol_[id]; }

  // Every dim that needs only the first `known` symbols, in order. `out` has room for size() values. Returns the first
  // dim whose value does not fit int64.
  std::optional<DimId> try_eval(const int64_t* symbols, size_t known, int64_t* out) const;
  // Every dim, with that as an error.
  void eval(const int64_t* symbols, int64_t* out) const;
  // One dim, for sources that need it before all symbols are known.
  int64_t eval_one(DimId id, const int64_t* symbols) const;
  // "2*s + 1", with `names` for the symbols; the same text as Python's str(Dim), cut short where it is very long.
  std::string text(DimId id, const std::vector<std::string>& names) const;

 private:
  bool apply(DimId id, const int64_t* symbols, int64_t* values) const;
  std::vector<DimNode> nodes_;
  std::vector<DimId> args_;
  std::vector<Bounds> bounds_;
  std::vector<int> last_symbol_;
};

}  // namespace keepdim
