// Contract at run time: dtypes, specs, symbols with their sources, constraints. Parsed and verified by program.cpp.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/dims.h"

namespace keepdim {

// `integer` is a host integer (an argument or result that is not a tensor); its one dim is its value.
// `python` is any other constant argument (None, a string, a flag); only in the contract of a method.
// From q8_0 on: ggml's quantised block formats, for constants and states only.
enum class DType : uint8_t {
  f32,
  f16,
  bf16,
  f64,
  i8,
  u8,
  i16,
  i32,
  i64,
  boolean,
  integer,
  python,
  q8_0,
  q4_0,
  q4_1,
  q5_0,
  q5_1,
  q4_k,
  q5_k,
  q6_k,
  iq4_nl,
  iq4_xs
};
constexpr size_t kDTypeCount = static_cast<size_t>(DType::iq4_xs) + 1;

KEEPDIM_API const char* dtype_name(DType dtype);
KEEPDIM_API size_t dtype_bytes(DType dtype);  // per element, or per block; 0 for integer and python
KEEPDIM_API size_t dtype_block(DType dtype);  // elements per block; 1 if not quantised
KEEPDIM_API size_t dtype_align(DType dtype);  // required alignment of the data in bytes
inline bool is_quantised(DType dtype) { return dtype >= DType::q8_0; }
KEEPDIM_API bool find_dtype(std::string_view name, DType* dtype);  // false if unknown

// An input or output of a contract.
struct Spec {
  std::string name;
  DType dtype;
  std::vector<DimId> dims;
};

// Where a symbol is bound: the value read is mul * symbol + add, with mul and add over earlier symbols.
struct Source {
  enum class Kind : uint8_t { size, integer, item } kind;
  uint32_t input = 0;
  uint32_t index = 0;  // dim (size) or flat element index (item)
  DimId mul = 0, add = 0;
};

struct Symbol {
  std::string name;
  Bounds range;
  Source source;
};

enum class Cmp : uint8_t { eq, ne, lt, le, gt, ge };

struct Constraint {
  DimId lhs;
  Cmp cmp;
  DimId rhs;
  std::string sentence;  // explanation for error messages
};

// One argument of a call, as passed by the host.
struct Argument {
  DType dtype;
  size_t rank = 0;
  const int64_t* sizes = nullptr;
  const void* data = nullptr;  // contiguous; required for item sources and for running
  int64_t value = 0;           // value of an integer argument
  // Reads one element if `data` is a host object (a Python tensor) instead of plain memory.
  int64_t (*item)(const void* data, size_t index) = nullptr;
};

class KEEPDIM_API Contract {
 public:
  DimTable dims;
  std::vector<Symbol> symbols;  // symbols bound by inputs first
  size_t input_symbols = 0;     // number of those; the others are data-dependent and bound by outputs
  std::vector<Spec> inputs;
  std::vector<Constraint> constraints;
  std::vector<Spec> outputs;
  std::vector<Constraint> ensures;  // constraints checked after a run

  // Binds the symbols from the arguments into `bound`, checks dtypes, ranks, sizes, ranges and constraints, and evaluates all
  // dims into `values`. Throws on the first violation.
  void bind(const Argument* args, size_t count, std::vector<int64_t>& bound, std::vector<int64_t>& values) const;
  // The same for the results of a run, after `bind`: binds data-dependent symbols and checks `ensures`.
  void bind_results(const Argument* results, size_t count, std::vector<int64_t>& bound, std::vector<int64_t>& values) const;
  std::string text(DimId id) const;

  static Contract parse(std::string_view json);  // verified

 private:
  // Inputs or outputs of a call: their specs, and the symbols and constraints that they determine.
  struct CallSide {
    const char* stage;
    const char* what;  // "input", "output"
    const std::vector<Spec>& specs;
    size_t first, last;  // range of symbols
    const std::vector<Constraint>& constraints;
  };
  CallSide inputs_side() const { return {"[bind] ", "input", inputs, 0, input_symbols, constraints}; }
  CallSide outputs_side() const { return {"[check] ", "output", outputs, input_symbols, symbols.size(), ensures}; }
  void bind_side(const CallSide& side, const Argument* args, size_t count, std::vector<int64_t>& bound,
                 std::vector<int64_t>& values) const;
  void check_spec(const CallSide& side, size_t i, const Argument& arg) const;
  int64_t solve(const CallSide& side, const Symbol& symbol, const Argument* args, const int64_t* bound) const;
  void check_sizes(const CallSide& side, const Argument* args, const std::vector<int64_t>& bound,
                   const std::vector<int64_t>& values) const;
  std::vector<std::string> names() const;
  std::string name_text(const CallSide& side, size_t i) const;  // "input 0 'x'"
  std::string where(const Symbol& symbol) const;                // "input 0 'x' dim 1"
  std::string expression(const Symbol& symbol) const;           // "2*s + 1": the expression at the symbol's source
  // "s = 17 from input 0 'x' dim 1, …" for every symbol that these dims depend on.
  std::string origins(const std::vector<DimId>& ids, const std::vector<int64_t>& bound) const;
};

}  // namespace keepdim
