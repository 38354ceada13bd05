// MLX engine: interface of the op builders. A builder maps arrays to an array lazily; MLX evaluates the whole program at once.
#pragma once
#include <mlx/mlx.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "core/engine.h"
#include "core/op_rules.h"

namespace keepdim::mlx {

namespace mx = ::mlx::core;
using Array = mx::array;
using Axes = std::vector<int>;

mx::Dtype to_mlx(DType dtype);
std::string dims_text(const mx::Shape& shape);  // "[3, 48]"

// A weight in MLX's quantised format: w = scale * q + bias for groups of 32 along a row.
struct QuantisedWeight {
  Array quants, scales, biases;  // [n, k * bits / 32] u32, [n, k / 32], [n, k / 32]
  int bits;
};
constexpr int kGroup = 32;

// Persistent state (KV cache). q8_0 is stored as int8 `data` with a scale per 32 elements.
struct State {
  Array data;
  std::optional<Array> scales;
};

// A check that depends on data: evaluated after the run.
struct DeferredCheck {
  Array ok;                               // bool scalar
  std::function<std::string()> sentence;  // error message if false
};

// Arrays of all values while the graph of a call is built.
struct Values {
  std::vector<std::optional<Array>> arrays;    // by value id
  std::vector<const QuantisedWeight*> packed;  // by value id; nullptr if not quantised
  std::vector<std::shared_ptr<State>> states;  // by value id
  std::vector<DeferredCheck> deferred_checks;
  std::vector<Array> caller_inputs;  // inputs in the caller's memory; held so that MLX does not reuse their buffers
};

// A node with its evaluated shape; created when a plan is built.
struct OpBuilder;
struct Step {
  const Node* node;
  const OpBuilder* builder;
  const OpRule* rule;
  mx::Shape shape;                 // of the result
  DType dtype;                     // of the result
  std::vector<int32_t> last_uses;  // values whose last use is this step
};

// Context of one node for its builder.
class Op {
 public:
  Op(const Program& program, const Step& step, const int64_t* sizes, Values& values);

  size_t ins() const { return step_.node->ins.size(); }
  bool has(size_t i) const { return i < ins() && step_.node->ins[i] != kNone; }
  const Array& in(size_t i) const;  // cast to its compute type if the rule says so
  const QuantisedWeight* packed(size_t i) const { return values_.packed[step_.node->ins[i]]; }
  State* state(size_t i) const { return values_.states[step_.node->ins[i]].get(); }
  DType dtype_of(size_t i) const { return program_.values[step_.node->ins[i]].dtype; }
  const mx::Shape& shape() const { return step_.shape; }
  int rank() const { return static_cast<int>(step_.shape.size()); }
  DType type() const { return type_; }  // dtype that the builder returns
  mx::Dtype dtype() const { return to_mlx(type_); }

  const Attr* attr(const char* name) const;  // nullptr if missing
  int64_t size(const char* name) const { return sizes_[std::get<DimId>(*attr(name))]; }
  std::vector<int64_t> sizes(const char* name) const;
  Axes axes(const char* name, int rank) const;  // checked as distinct dims of an array of that rank
  int axis(int rank) const;                     // the attribute `dim`
  double number(const char* name) const { return number_of(*attr(name), sizes_); }
  bool flag(const char* name) const { return attr(name) && std::get<bool>(*attr(name)); }
  const std::string& text(const char* name) const { return std::get<std::string>(*attr(name)); }
  int choice(const char* name, std::initializer_list<const char*> known) const;
  Array scalar(const char* name, DType dtype) const;  // a scalar attribute as an array

  // Clips an index to the valid range; out-of-range values are reported after the run.
  Array index(const Array& given, int64_t limit, bool wrap);
  void expect(const Array& ok, std::function<std::string()> fact);  // deferred check; `fact` is the message
  [[noreturn]] void refuse(const std::string& fact) const;
  [[noreturn]] void fail_run(const std::string& fact) const;  // error in the data of this call

  Array run();  // builds the result, checks its shape and casts it to the program's dtype

 private:
  std::string name() const { return program_.values[step_.node->outs[0]].name; }

  const Program& program_;
  const Step& step_;
  const int64_t* sizes_;
  Values& values_;
  DType type_;
  std::vector<std::optional<Array>> operands_;
};

struct OpBuilder {
  const char* name;
  Array (*build)(Op& op);
  bool widen = false;  // 16-bit floats are computed in f32, narrow integers in i32
};

struct OpTable {
  const OpBuilder* ops;
  size_t count;
};
OpTable elementwise_ops();
OpTable shape_ops();
OpTable reduce_ops();
OpTable gather_scatter_ops();
OpTable matmul_ops();
OpTable conv_pool_ops();
const OpBuilder* find_builder(const std::string& op);  // engine.cpp; nullptr if unknown

// ---- helpers shared by op families

inline int rank_of(const Array& x) { return static_cast<int>(x.ndim()); }
Array slice_axis(const Array& x, int axis, int from, int to);              // x[from:to] along one dim
inline Array equal_part(const Array& x, int axis, int index, int count) {  // part `index` of `count` equal parts
  const int size = x.shape(axis) / count;
  return slice_axis(x, axis, index * size, (index + 1) * size);
}

// Maximum elements of a temporary inside a builder. Larger ones are computed in chunks, so that the results of the nodes
// determine the peak memory.
constexpr int64_t kMaxTempElements = int64_t{1} << 22;
// Number of items per chunk out of `count`, if each needs `elements_each` elements.
inline int chunk_size(int64_t count, int64_t elements_each) {
  return static_cast<int>(
      std::clamp<int64_t>(kMaxTempElements / std::max<int64_t>(elements_each, 1), 1, std::max<int64_t>(count, 1)));
}
// Concatenates compute(from, to) over all chunks of `count` along an axis.
template <class Make>
Array concatenate_chunks(int count, int64_t elements_each, int axis, const Make& compute) {
  const int step = chunk_size(count, elements_each);
  std::vector<Array> parts;
  for (int from = 0; from < count; from += step) parts.push_back(compute(from, std::min(from + step, count)));
  return parts.size() == 1 ? parts[0] : mx::concatenate(parts, axis);
}

Array general_matmul(const Array& x, const Array& y);  // ops/matmul.cpp; [.., m, k] @ [.., k, n]
Array number(double value, mx::Dtype dtype);
inline Array scalar_like(const Array& like, double value) { return number(value, like.dtype()); }
inline Array integer(int64_t value, mx::Dtype dtype) { return mx::astype(Array(value, mx::int64), dtype); }
Array host_array(const std::vector<int64_t>& values, mx::Shape shape);  // i64
Array activate(const Array& x, const std::string& name);                // ops/elementwise.cpp; activations of the op linear
Array pow_scalar(const Array& x, double exponent);                      // ops/elementwise.cpp
Array exponential(const Array& x);                                      // ops/elementwise.cpp
Array sum_keepdims(const Array& x, const Axes& dims);                   // ops/reduce.cpp; reduced dims are kept with size 1
Array mean_of_rows(const Array& rows);                                  // ops/reduce.cpp; [n, k] → [n, 1]
Array rotate_half(const Array& x);                                      // ops/matmul.cpp; [a, b] → [-b, a]
int64_t count_of(const mx::Shape& shape);

}  // namespace keepdim::mlx
