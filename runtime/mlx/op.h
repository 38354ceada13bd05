// The MLX engine's own header: what a row sees of its node. A row takes arrays to an array; MLX computes nothing until
// the whole program stands, and then only what is asked for.
#pragma once
#include <mlx/mlx.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "../engine.h"
#include "../rules.h"

namespace keepdim::mlx {

namespace mx = ::mlx::core;
using Array = mx::array;
using Axes = std::vector<int>;

mx::Dtype to_mlx(DType dtype);
std::string dims_text(const mx::Shape& shape);  // "[3, 48]"

// A weight in MLX's own quantised form: w = scale * q + bias for groups of 32 along a row.
struct Packed {
  Array quants, scales, biases;  // [n, k * bits / 32] u32, [n, k / 32], [n, k / 32]
  int bits;
};
constexpr int kGroup = 32;

// What stays between calls. Blocks of q8_0 are whole numbers with a scale for each 32 of them.
struct State {
  Array data;
  std::optional<Array> scales;
};

// What only data can show to be wrong: looked at after the run.
struct Doubt {
  Array fine;                            // one bool
  std::function<std::string()> sentence;  // for where it is not
};

// What a weight, state or result is while a program is put together.
struct Values {
  std::vector<std::optional<Array>> arrays;       // by value id
  std::vector<const Packed*> packed;              // likewise; nullptr for most
  std::vector<std::shared_ptr<State>> states;     // likewise
  std::vector<Doubt> doubts;
  std::vector<Array> callers;  // inputs in the caller's own memory: held, so that nothing is written there
};

// A node with what its sizes decide; made when a plan is built.
struct Row;
struct Step {
  const Node* node;
  const Row* row;
  const Rule* rule;
  mx::Shape shape;           // of the result
  DType dtype;               // of the result
  std::vector<int32_t> done;  // values that nothing reads after this
};

// One node while its row runs.
class Op {
 public:
  Op(const Program& program, const Step& step, const int64_t* sizes, Values& values);

  size_t ins() const { return step_.node->ins.size(); }
  bool has(size_t i) const { return i < ins() && step_.node->ins[i] != kNone; }
  const Array& in(size_t i) const;  // cast to the type it is computed in, where the rule says so
  const Packed* packed(size_t i) const { return values_.packed[step_.node->ins[i]]; }
  State* state(size_t i) const { return values_.states[step_.node->ins[i]].get(); }
  DType stored(size_t i) const { return program_.values[step_.node->ins[i]].dtype; }
  const mx::Shape& shape() const { return step_.shape; }
  int rank() const { return static_cast<int>(step_.shape.size()); }
  DType type() const { return type_; }  // that the row makes
  mx::Dtype dtype() const { return to_mlx(type_); }

  const Attr* attr(const char* name) const;  // nullptr when it is missing
  int64_t size(const char* name) const { return sizes_[std::get<DimId>(*attr(name))]; }
  std::vector<int64_t> sizes(const char* name) const;
  Axes axes(const char* name, int rank) const;  // as dims of something of that rank
  int axis(int rank) const;                     // the attribute `dim`
  double number(const char* name) const { return number_of(*attr(name), sizes_); }
  bool flag(const char* name) const { return attr(name) && std::get<bool>(*attr(name)); }
  const std::string& text(const char* name) const { return std::get<std::string>(*attr(name)); }
  int choice(const char* name, std::initializer_list<const char*> known) const;
  Array scalar(const char* name, DType dtype) const;  // a number, of any of the dtypes

  // An index that is safe to read and write with; that it was out of range is seen after the run.
  Array index(const Array& given, int64_t limit, bool wrap);
  void expect(const Array& fine, std::function<std::string()> fact);  // the fact is for where it is not
  [[noreturn]] void refuse(const std::string& fact) const;
  [[noreturn]] void fault(const std::string& fact) const;  // of this call's data

  Array run();  // the row's result, checked and in the dtype that the program says

 private:
  std::string name() const { return program_.values[step_.node->outs[0]].name; }

  const Program& program_;
  const Step& step_;
  const int64_t* sizes_;
  Values& values_;
  DType type_;
  std::vector<std::optional<Array>> seen_;
};

struct Row {
  const char* name;
  Array (*build)(Op& op);
  bool widen = false;  // half precision is computed in f32 here, narrow integers in i32
};

struct Table {
  const Row* rows;
  size_t count;
};
Table map_rows();
Table shape_rows();
Table reduce_rows();
Table index_rows();
Table product_rows();
Table window_rows();
Table sample_rows();
const Row* find_row(const std::string& op);  // engine.cpp; nullptr when there is none

// ---- what rows of several families use

inline int rank_of(const Array& x) { return static_cast<int>(x.ndim()); }
Array span(const Array& x, int axis, int from, int to);  // x[from:to] of one dim
inline Array part(const Array& x, int axis, int index, int count) {  // one of so many equal ones
  const int size = x.shape(axis) / count;
  return span(x, axis, index * size, (index + 1) * size);
}

// Elements that a row makes at a time beside operands and result. What would take more is made in parts: the sum of what
// nodes give is then what a plan needs.
constexpr int64_t kAtOnce = int64_t{1} << 22;
// How many of `count` are made at a time, where each takes so many elements.
inline int at_once(int64_t count, int64_t each) {
  return static_cast<int>(std::clamp<int64_t>(kAtOnce / std::max<int64_t>(each, 1), 1, std::max<int64_t>(count, 1)));
}
// make(from, to) for all parts of `count`, one behind the other along an axis.
template <class Make>
Array in_parts(int count, int64_t each, int axis, const Make& make) {
  const int step = at_once(count, each);
  std::vector<Array> parts;
  for (int from = 0; from < count; from += step) parts.push_back(make(from, std::min(from + step, count)));
  return parts.size() == 1 ? parts[0] : mx::concatenate(parts, axis);
}

Array product(const Array& x, const Array& y);  // ops_product.cpp; [.., m, k] @ [.., k, n]
Array number(double value, mx::Dtype dtype);
inline Array whole(int64_t value, mx::Dtype dtype) { return mx::astype(Array(value, mx::int64), dtype); }
Array host(const std::vector<int64_t>& values, mx::Shape shape);  // i64
Array activate(const Array& x, const std::string& name);          // ops_map.cpp; the names that a linear layer knows
Array pow_number(const Array& x, double exponent);                // ops_map.cpp
Array exponential(const Array& x);                                // ops_map.cpp
Array total(const Array& x, const Axes& dims);                    // ops_reduce.cpp; the dims stay as 1
Array mean_of_rows(const Array& rows);                             // ops_reduce.cpp; [n, k] → [n, 1]
Array rotated(const Array& x);                                    // ops_product.cpp; second half negated, then the first
int64_t count_of(const mx::Shape& shape);

}  // namespace keepdim::mlx
