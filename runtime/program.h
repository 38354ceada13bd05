// Contract and Program as the runtime holds them: parsed once from JSON, verified, flat.
// The format is the one of keepdim/program.py; the rules of verify() are the same on both sides.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "dims.h"

namespace keepdim {

constexpr int kFormatVersion = 1;

// `integer` is a host integer (an argument or result that is no tensor); its one dim is its value.
// `python` is any other constant argument (None, a string, a flag); only the method's contract has it.
// From q8_0 on: ggml's blocks of quantised weights, which only constants and states have.
enum class DType : uint8_t {
  f32, f16, bf16, f64, i8, u8, i16, i32, i64, boolean, integer, python,
  q8_0, q4_0, q4_1, q5_0, q5_1, q4_k, q5_k, q6_k
};

KEEPDIM_API const char* dtype_name(DType dtype);
KEEPDIM_API size_t dtype_bytes(DType dtype);  // of an element, or of a block; 0 for integer and python
KEEPDIM_API size_t dtype_block(DType dtype);  // elements of a block; 1 where each is its own
KEEPDIM_API size_t dtype_align(DType dtype);  // of the address of its data
inline bool is_quantised(DType dtype) { return dtype >= DType::q8_0; }
KEEPDIM_API bool find_dtype(std::string_view name, DType* dtype);  // false: there is none of that name

// An input or output of a contract.
struct Spec {
  std::string name;
  DType dtype;
  std::vector<DimId> dims;
};

// Where a symbol's value is read: place = mul * symbol + add, with mul and add over earlier symbols.
struct Source {
  enum class Kind : uint8_t { size, integer, item } kind;
  uint32_t input = 0;
  uint32_t index = 0;  // the dim (size) or the flat element (item)
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
  std::string sentence;  // why it has to hold, for the reader
};

// One argument of a call, as a host sees it.
struct Argument {
  DType dtype;
  size_t rank = 0;
  const int64_t* sizes = nullptr;
  const void* data = nullptr;  // contiguous; needed for item sources and for the run
  int64_t value = 0;           // of an integer argument
  // Reads one element where `data` is no plain memory but a host's object (Python's tensors).
  int64_t (*item)(const void* data, size_t index) = nullptr;
};

class KEEPDIM_API Contract {
 public:
  DimTable dims;
  std::vector<Symbol> symbols;  // those that the inputs show first
  size_t known = 0;             // how many of them; data decides the rest, and the outputs show them
  std::vector<Spec> inputs;
  std::vector<Constraint> constraints;
  std::vector<Spec> outputs;
  std::vector<Constraint> ensures;  // what must hold after a run

  // Binds the symbols from the arguments, checks dtype, rank, every size, every range and every
  // constraint, and evaluates their dims into `values`; the symbols' own values go to `bound`.
  // Throws the first thing that is wrong as a sentence.
  void bind(const Argument* args, size_t count, std::vector<int64_t>& bound, std::vector<int64_t>& values) const;
  // The same for the results of a run, after `bind`: what data decided, and what must hold of it.
  void bind_results(const Argument* results, size_t count, std::vector<int64_t>& bound, std::vector<int64_t>& values) const;
  std::string text(DimId id) const;

  static Contract parse(std::string_view json);  // verified

 private:
  // One end of a call: its arguments with what they have to be, and the symbols that are read from them.
  struct End {
    const char* stage;
    const char* what;  // "input", "output"
    const std::vector<Spec>& specs;
    size_t first, last;  // symbols
    const std::vector<Constraint>& constraints;
  };
  End inputs_end() const { return {"[bind] ", "input", inputs, 0, known, constraints}; }
  End outputs_end() const { return {"[check] ", "output", outputs, known, symbols.size(), ensures}; }
  void bind_end(const End& end, const Argument* args, size_t count, std::vector<int64_t>& bound, std::vector<int64_t>& values) const;
  void check_spec(const End& end, size_t i, const Argument& arg) const;
  int64_t solve(const End& end, const Symbol& symbol, const Argument* args, const int64_t* bound) const;
  void check_sizes(const End& end, const Argument* args, const std::vector<int64_t>& bound, const std::vector<int64_t>& values) const;
  std::vector<std::string> names() const;
  std::string name_text(const End& end, size_t i) const;  // "input 0 'x'"
  std::string where(const Symbol& symbol) const;          // "input 0 'x' dim 1"
  std::string place(const Symbol& symbol) const;   // "2*s + 1": what stands there
  // "s = 17 from input 0 'x' dim 1, …" for every symbol of these dims.
  std::string origins(const std::vector<DimId>& ids, const std::vector<int64_t>& bound) const;
};

// In JSON an integer is a DimId, a list of integers is a list of them, and a number with a point is a float;
// the strings "inf", "-inf" and "nan" are floats too when read through Node::number.
using Attr = std::variant<bool, DimId, double, std::string, std::vector<DimId>>;

struct Value {
  enum class Kind : uint8_t { input, constant, state, temp } kind;
  std::string name;
  DType dtype;
  std::vector<DimId> dims;
  std::string key;  // of the weight or state; empty otherwise
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

// A body of nodes over the program's values; its results stand for the owning node's outs.
struct Region {
  std::vector<Node> nodes;
  std::vector<int32_t> results;
};

class KEEPDIM_API Program {
 public:
  Contract contract;
  std::vector<Value> values;  // the contract's inputs first, in order; then the rest as in the file
  std::vector<Node> nodes;
  std::vector<int32_t> results;  // one per contract output; kNone where the output is an integer

  std::string describe(const Node& node) const;  // "silu 'silu_1' [s, 64] f32", for errors

  static Program parse(std::string_view json);  // verified
};

}  // namespace keepdim
