// The plan of the ggml engine, and Build, which creates it from a program and sizes through the op builders in ops/.
// Dims are in torch's order; only Build::mul_mat reverses them to ggml's `ne`.
#pragma once
#include <ggml-cpu.h>
#include <ggml.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "core/engine.h"
#include "core/op_rules.h"
#include "ggml/kernels/conv_pool.h"
#include "ggml/kernels/elementwise.h"
#include "ggml/kernels/gemm.h"
#include "ggml/step_sequence.h"

namespace keepdim::ggml {

// Bump allocator for jobs and tables, freed with the plan.
class JobPool {
 public:
  void reserve(size_t bytes);  // in one chunk, before anything is allocated
  void* allocate(size_t bytes);
  // Members without an initialiser, such as the strides of a Loop, are not written: a plan is built in memory that no cache has.
  template <class T>
  T* make() {
    static_assert(std::is_trivially_destructible_v<T>);
    return new (allocate(sizeof(T))) T;
  }
  size_t bytes() const { return bytes_; }
  size_t used() const { return bytes_ - left_; }

 private:
  void add_chunk(size_t bytes);

  std::vector<std::unique_ptr<char[]>> chunks_;
  char* next_ = nullptr;
  size_t left_ = 0, bytes_ = 0;
};

struct FreeContext {
  void operator()(ggml_context* ctx) const { ggml_free(ctx); }
};
using Context = std::unique_ptr<ggml_context, FreeContext>;

struct PointerPatch {  // a pointer to set before a run: base + offset
  void** where;
  int64_t offset;
  int32_t index;  // of the input or output that is the base
};

struct GgmlPlan final : Plan {
  std::vector<std::unique_ptr<char[]>> blocks;  // memory of the contexts
  std::vector<Context> contexts;
  JobPool pool;
  ggml_cgraph* graph = nullptr;
  ggml_cplan compute = {};
  int threads = 1;                // maximum worth using
  double work = 0, best = 1e300;  // multiply-adds; fastest multi-threaded run in seconds
  int64_t arena_bytes = 0;
  const char* arena = nullptr;  // arena that in_arena is currently patched for
  std::vector<PointerPatch> in_arena, in_inputs, in_outputs;
  std::vector<Step> steps;
  std::vector<const Node*> last_nodes;  // of each node of the graph: the node of its last step
  struct Data {                         // a dim that kernels read at run time
    DimId dim;
    int64_t* where;
  };
  std::vector<Data> data;
  Barrier barrier;
  NodeTimer* timer = nullptr;  // of the current run, if it is traced
  RunError error;
  WorkCounter work_counter;
  size_t block_bytes = 0;

  size_t bytes() const override;
};

class Build;
struct OpBuilder {
  const char* name;
  Tensor (*build)(Build& b);
  bool reads_any = false;  // casts the operands that the rule widens to their compute types itself
};

const OpBuilder* find_builder(const std::string& op);  // ops/ops.cpp; nullptr if unknown
std::vector<std::string> op_names();
void check(const Program& program);

// A node with its builder, and its attributes in the order of its rule. Created once when a program is loaded.
struct ResolvedNode {
  const OpBuilder* builder;
  const OpRule* rule;
  const Node* node;
  const Attr* attrs[8];
  const float* packed = nullptr;                   // packed weight, if it is a constant
  bool winograd = false;                           // it is packed for Winograd
  std::vector<std::vector<ResolvedNode>> regions;  // of a cond, which has no builder
};
std::vector<ResolvedNode> resolve(const std::vector<Node>& nodes);

template <class F>
void for_each(std::vector<ResolvedNode>& nodes, const F& f) {  // including nodes inside regions
  for (ResolvedNode& node : nodes) {
    f(node);
    for (auto& region : node.regions) for_each(region, f);
  }
}

// Constant right-hand side of a matrix product, as [k, n], or constant weight of a convolution.
struct Weight {
  int32_t value = kNone;  // kNone: not a constant
  int64_t k = 0, n = 0;
  int64_t step = 0, column = 0;  // strides in elements
  ConvWeight conv = {};          // has taps if it is of a convolution
  bool keeps_float16 = false;    // packed without widening it to f32

  bool is_conv() const { return conv.taps > 0; }
};
Weight weight_of(const Program& program, const Node& node);       // ops/matmul.cpp
Weight conv_weight_of(const Program& program, const Node& node);  // ops/conv_pool.cpp
// Whether an embedding can read its rows from the packed panels of the same constant.
bool reads_packed_rows(const Program& program, const Node& node, const Weight& w);  // ops/gather_scatter.cpp

// A plan under construction. Op builders read operands and attributes, check shapes, and add steps.
class Build {
 public:
  Build(const Program& program, const std::vector<const void*>& constants);

  std::unique_ptr<GgmlPlan> build(const std::vector<ResolvedNode>& nodes, const int64_t* sizes, size_t limit);

  // For op builders: the current node.
  size_t ins() const { return node_->node->ins.size(); }
  bool is_state(size_t i) const { return program_.values[node_->node->ins[i]].kind == Value::Kind::state; }
  bool has(size_t i) const { return i < ins() && node_->node->ins[i] != kNone; }
  const Tensor& in(size_t i) const { return widened_.empty() ? values_[node_->node->ins[i]] : widened_[i]; }
  const Tensor& out() const { return out_; }  // contiguous, not allocated yet
  const std::string& name() const { return program_.values[node_->node->outs[0]].name; }
  const OpRule& rule() const { return *node_->rule; }
  const float* packed() const { return node_->packed; }
  bool winograd() const { return node_->winograd; }
  const Attr* attr(const char* name) const;  // nullptr if missing
  int64_t size(DimId dim) const { return sizes_[dim]; }
  int64_t size(const char* name) const { return sizes_[std::get<DimId>(*attr(name))]; }
  const std::vector<DimId>& dims(const char* name) const { return std::get<std::vector<DimId>>(*attr(name)); }
  std::vector<int64_t> sizes(const char* name) const;
  double number(const char* name) const { return number_of(*attr(name), sizes_); }
  bool flag(const char* name) const { return attr(name) && std::get<bool>(*attr(name)); }
  Scalar scalar(const char* name);
  int choice(const char* name, std::initializer_list<const char*> known) const;  // index of the attribute's value in `known`
  [[noreturn]] void refuse(const std::string& fact) const;

  // Add steps and return their results. Without elements, no step is added and the result has no buffer.
  Tensor contiguous(const Tensor& x);     // x itself if already contiguous
  Tensor channels_last(const Tensor& x);  // x itself when it is stored so
  Tensor fill(Tensor out, Scalar start, Scalar step);
  Tensor cast(const Tensor& x, DType dtype);  // x itself if it has this dtype
  // Elementwise: `fn` reads elements of `type` and writes elements of `result_type`.
  Tensor map(ElementwiseFn fn, DType type, DType result_type, Tensor out, std::initializer_list<const Tensor*> ins,
             const MapJob& scalars, double cost);
  void copy_into(Tensor out, const Tensor& x);  // `out` is allocated
  void allocate(Tensor& out);                   // assigns a new buffer
  // out[b, i, j] = sum over k of rows[b, i, k] * weight[b, j, k]; out and rows are contiguous.
  Tensor mul_mat(Tensor out, const Tensor& weight, const Tensor& rows, int64_t m, const Loop& batch);
  // Generic step: `kernel` writes `out` from `ins`. `job` is created by `make`.
  template <class T>
  T* make() {
    return plan_->pool.make<T>();
  }
  template <class T>
  T* table(int64_t count) {  // lookup table for kernels, in the plan's pool
    static_assert(std::is_trivially_destructible_v<T>);
    T* all = static_cast<T*>(allocate_table(count, sizeof(T)));
    for (int64_t i = 0; i < count; ++i) new (all + i) T();
    return all;
  }
  void step(Kernel kernel, Job* job, const Tensor& out, std::initializer_list<const Tensor*> ins, double cost,
            bool elementwise = false);

 private:
  struct Buffer {
    enum class Kind : uint8_t { arena, input, output, constant } kind;
    bool placed = false;
    int32_t index = -1;  // of the input, output or value
    int32_t last = -1;   // last step that uses it
    int64_t bytes = 0, offset = 0;
  };
  struct StepBuffers {
    int32_t out;
    int32_t ins[kMaxData - 1];
    uint8_t inplace;       // bit i: the result may overwrite operand i
    ggml_tensor* product;  // of a step that ggml computes
  };
  struct Gap {
    int64_t offset, bytes;
  };
  class ArenaLayout;
  struct Reference {
    void** where;
    int32_t buffer;
    int64_t offset;
  };

  Tensor shape_of(int32_t value) const;
  int32_t add_buffer(Buffer::Kind kind, int32_t index, int64_t bytes);
  int64_t checked_bytes(const Tensor& t) const;
  void* allocate_table(int64_t count, int64_t width);
  ggml_context* add_context(size_t tensors, size_t more_bytes = 0);
  void add_reference(void** where, const Tensor& t);
  void add_step(const Step& step, const Tensor& out, std::initializer_list<const Tensor*> ins, uint8_t inplace,
                ggml_tensor* product = nullptr);
  void add_value(size_t value);
  void sort_values();
  void start(const int64_t* sizes, size_t limit);
  void add_nodes(const std::vector<ResolvedNode>& nodes);
  void add_node(const ResolvedNode& node);
  void add_output(size_t output);
  void place_buffers();
  void resolve_references();
  void make_graph();
  void choose_threads();
  bool reuse_operand(int32_t step);
  void finish();
  [[noreturn]] void over_limit(int64_t bytes) const;

  const Program& program_;
  const std::vector<const void*>& constants_;
  const int64_t* sizes_ = nullptr;
  int64_t limit_ = 0;
  std::unique_ptr<GgmlPlan> plan_;
  const ResolvedNode* node_ = nullptr;
  Tensor out_;
  std::vector<Tensor> widened_;  // operands cast to their compute types, if the rule says so
  std::vector<Tensor> values_;
  std::vector<Buffer> buffers_;
  size_t fixed_buffers_ = 0;                   // of constants, states and inputs of a fixed size: the same in every plan
  std::vector<size_t> varying_values_;         // inputs whose size is not fixed
  size_t steps_before_ = 0, pool_before_ = 0;  // steps and bytes of jobs of the plan before
  std::vector<StepBuffers> steps_;             // of the steps of the plan
  std::vector<Reference> references_;
  std::vector<Gap> gaps_;
  double work_ = 0, shared_work_ = 0;  // of all steps; of those worth computing by several threads
};

int thread_limit();  // from the options

// While alive, turns an abort of ggml on this thread into an Error.
class AbortGuard {
 public:
  AbortGuard();
  ~AbortGuard();
};

}  // namespace keepdim::ggml
