// The ggml engine's own header: strided tensors, kernels and the `Build` that the rows of ops.cpp write to.
// Dims are in torch's order everywhere; the reversal to ggml's `ne` happens in Build::mul_mat alone.
#pragma once
#include <atomic>
#include <ggml-cpu.h>
#include <ggml.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <vector>

#include "../engine.h"
#include "../rules.h"

namespace keepdim::ggml {

constexpr int kMaxOperands = 4;  // of a loop, the result included
constexpr int kMaxData = 10;     // of one kernel, the result included

// A strided view of one buffer. Permute, slice, select and expand are views of any rank, without a copy.
struct Tensor {
  DType dtype = DType::f32;
  int rank = 0;
  int32_t buffer = -1;  // -1: no elements, no bytes
  int64_t offset = 0;   // in bytes
  int64_t dims[kMaxRank] = {};
  int64_t strides[kMaxRank] = {};  // in bytes; 0 repeats

  int64_t count() const;
  bool contiguous() const;
  int64_t width() const { return static_cast<int64_t>(dtype_bytes(dtype)); }  // of a block, where it has them
  void pack();  // strides of a contiguous tensor
};

// A nest of loops, outermost first, with adjacent dims merged where every operand allows it.
struct Loop {
  int rank = 0;
  int64_t dims[kMaxRank];
  int64_t strides[kMaxOperands][kMaxRank];  // of the result, then of the operands; in bytes

  void push(int64_t size, int64_t result, int64_t first = 0, int64_t second = 0, int64_t third = 0);
  void merge();  // leaves at least one dim
  int64_t count() const;
};

// A number that a kernel reads when it runs: baked, or a dim's value of that call.
struct Scalar {
  const int64_t* data = nullptr;
  double real = 0;
  int64_t whole = 0;
  bool is_whole = false;

  template <class T>
  T as() const {
    if (data) return static_cast<T>(*data);
    if (is_whole) return static_cast<T>(whole);
    return std::is_integral_v<T> ? static_cast<T>(truncate(real)) : static_cast<T>(real);
  }
};

// What went wrong in a run; kernels cannot throw across ggml's threads. The first step wins, and in it the lowest
// position, so that the sentence does not depend on the threads.
struct RunError {
  std::mutex mutex;
  const void* job = nullptr;
  int64_t position = 0;
  std::string sentence;

  void set(const void* failed, int64_t at, const std::string& what);
};

// What threads take their units from, as they come: a core that is slower for a while takes fewer. The last to leave
// winds it back for the next run; every thread comes to every kernel.
struct Units {
  std::atomic<int64_t> next{0};
  std::atomic<int> left{0};  // threads that found nothing more

  Units() = default;
  Units(const Units&) {}
  Units& operator=(const Units&) { return *this; }
};

// What a kernel gets. `data` is patched before a run; the rest is fixed by the build.
struct Job {
  mutable Units units;
  void* data[kMaxData] = {};  // result, operands
  Loop loop;
  RunError* error = nullptr;
  const Node* node = nullptr;
  const std::string* name = nullptr;  // of the result

  void fail(int64_t position, const std::string& fact) const;  // "[run] op 'name': fact"
};

// n elements from one dtype to another, or of the same; strides in bytes.
using Convert = void (*)(void* y, int64_t y_stride, const void* x, int64_t x_stride, int64_t n);
Convert converter(DType from, DType to);  // move.cpp

// y = f(x…) for n contiguous elements; bit i of `single`: operand i is one element for all.
struct MapJob;
using Block = void (*)(const MapJob& job, void* y, const void* const* x, unsigned single, int64_t n);

struct MapJob : Job {
  Block block = nullptr;
  int operands = 0;
  Convert read[kMaxOperands] = {}, write = nullptr;  // nullptr: the dtype is the one computed in
  Convert move[kMaxOperands] = {};                   // of the result, then of the operands: only the stride differs
  int64_t width[kMaxOperands] = {};                  // of what the block reads and writes
  Scalar scalar[2];                                  // numbers of the function
  bool has[2] = {false, false};
  bool condition = false;  // the first operand is read as bool, whatever the others are
};
struct CopyJob : Job {
  Convert convert = nullptr;
};
struct FillJob : Job {
  Scalar start, step;  // start + i * step
};
struct ReduceJob : Job {  // `loop` is over what is kept: result, x, and a shift or what chunks gave
  Loop inner;             // over what is reduced
  int64_t count = 0;      // elements that become one
  int64_t chunk = 0;      // rows of inner's first dim in a chunk, where what is reduced is split
  int64_t chunk_bytes = INT64_MAX;  // of one chunk's results; chunks are the outermost dim of `loop`
  double divisor = 1;               // of sums
};
struct RowJob : Job {  // softmax, norms, running sums: `loop` is over the rows
  int64_t size = 0;    // of a row
  int64_t strides[2] = {};
  double eps = 0;
};
struct SortJob : Job {   // rows of keys beside each other
  int64_t rows = 0, size = 0, taken = 0;  // taken: the first of each row's result
  bool descending = false;
};
// Gathers: `loop` has the result, x and the index; scatters: the result, the source and the index. What is indexed has
// stride 0 along the index.
struct IndexJob : Job {
  int64_t limit = 0, scale = 0;  // an index below limit is at `scale` bytes times it
  bool wide = false;             // 64-bit indices
  bool wrap = false;             // negative ones count from the end
  int split = -1;                // of a scatter: the dim whose parts are written by different threads
};
struct ListJob : Job {  // the positions of what is not 0, in order, then -1
  int64_t count = 0;
};
// How weights lie that are not f32: in blocks, or each on its own.
struct Stored {
  int64_t block, bytes;
  void (*read)(const void* x, float* y, int64_t n);   // n elements, of whole blocks, as f32
  void (*write)(const float* x, void* y, int64_t n);  // nullptr where only files have them

  int64_t bytes_of(int64_t n) const { return n / block * bytes; }
};
const Stored* stored(DType dtype);  // quant.cpp; nullptr when it is not read so

struct LookupJob : Job {  // rows of a weight as f32; the result and the index are contiguous
  int64_t rows = 0, size = 0, limit = 0;  // how many are read, of how many elements, out of how many
  const float* packed = nullptr;          // the weight in panels, where they are columns
  const Stored* stored = nullptr;
  bool wide = false;  // 64-bit indices
};
struct TriangleJob : Job {  // `loop` is over the matrices and their rows; the result is contiguous
  int64_t rows = 0, columns = 0, step = 0;  // step: bytes between columns of x
  int64_t diagonal = 0;
  bool upper = false;
};
// [m, k] @ [k, n] + [n]; `loop` is over the batch, the result is contiguous. A list of rows (i64 [m], -1 behind the last)
// says which of them anybody reads: the others may be computed, or be 0.
struct ProductJob : Job {
  int64_t m = 0, n = 0, k = 0;
  int64_t a_row = 0, a_step = 0;     // byte strides of the first operand's m and k
  int64_t b_step = 0, b_column = 0;  // byte strides of the second operand's k and n
  const float* packed = nullptr;     // the second operand in panels, instead of as it lies
  const Stored* stored = nullptr;    // the second operand is no f32, and its columns are rows that lie so
  DType type = DType::f32;           // of the second operand
  Block activation = nullptr;        // of the result
};
// `loop` is over the batch and the heads of keys and values; operands q, k, v, mask, how many keys were there before the
// queries' own (i64: each query then sees those and its own up to itself), cosines and sines to turn the queries by, room
// for parts, and a list of the queries of all batches that anybody reads, as a product has one of its rows.
struct AttentionJob : Job {
  int64_t group = 1;       // heads of queries for each head of keys
  int64_t queries = 0, keys = 0, width = 0, value_width = 0;
  int64_t window = 0;      // of keys that a query sees, up to its own; 0: all
  int64_t q_head = 0, q_row = 0, q_step = 0;  // all strides in bytes
  int64_t k_row = 0, k_step = 0, v_row = 0, v_step = 0, y_head = 0, y_row = 0;
  int64_t mask_batch[kMaxRank] = {}, mask_head = 0, mask_row = 0, mask_step = 0;
  const Stored* stored = nullptr;  // keys and values, where they are not f32
  int64_t turn_row = 0;    // bytes between rows of cosines and sines, where queries are turned by them
  float scale = 1;
  bool causal = false, bool_mask = false;
  bool safe = true;  // as torch's own attention; false: as it is written by hand, where a row of -inf gives NaN
};

// New keys and values behind the filled rows of their caches. Data: key cache, keys, how many rows are filled (i64),
// values, value cache, and cosines and sines to turn the keys by. `loop`: key cache, keys, values, value cache.
struct StoreJob : Job {
  int64_t rows = 0, limit = 0;             // new ones; of the caches
  int64_t size[2] = {};                    // elements of a row, of keys and of values; all that follows likewise
  int64_t row[2] = {}, x_row[2] = {}, x_step[2] = {};  // strides in bytes: of the cache, of what is new
  const Stored* stored = nullptr;  // of the caches, where they are not f32
  int64_t turn_row = 0;  // bytes between rows of cosines and sines
};

struct ScanJob : Job {  // operands: gates of the input [steps, batch, gates * size], weight, bias, first state, first cell
  int64_t steps = 0, batch = 0, size = 0;
  const float* packed = nullptr;  // the weight in panels; else the second operand is
  bool reverse = false;
};

using Kernel = ggml_custom_op_t;

enum class Fn : uint8_t { sum, squares, prod, amax, amin, any, all };
enum class Cell : uint8_t { lstm, gru, rnn_tanh, rnn_relu };
enum class Put : uint8_t { set, add, prod, amax, amin };

// Each gives nullptr for a dtype it does not have.
Kernel map_kernel();                                       // MapJob
Kernel cast_kernel();                                      // CopyJob
Kernel copy_kernel(size_t width);                          // Job
Kernel fill_kernel(DType dtype);                           // FillJob; the result is contiguous
Kernel triangle_kernel(size_t width);                      // TriangleJob
Kernel reduce_kernel(Fn fn, DType from, DType to);         // ReduceJob
Kernel position_kernel(Fn fn, DType dtype);                // ReduceJob: of the largest or smallest
Kernel best_position_kernel(Fn fn, DType dtype);           // ReduceJob: out of those of chunks
Kernel softmax_kernel(DType dtype);                        // RowJob
Kernel log_softmax_kernel(DType dtype);                    // RowJob
Kernel layer_norm_kernel(DType dtype);                     // RowJob; rows of x are contiguous
Kernel rms_norm_kernel(DType dtype);                       // RowJob
Kernel scan_kernel(Fn fn, DType dtype);                    // RowJob: running sums and products
int64_t sort_bytes(DType dtype);                           // of one key with its position
bool sort_needs_room(int64_t size);                        // as much again for the keys, to sort rows of this size
Kernel sort_keys_kernel(DType dtype);                      // SortJob: x, contiguous, to keys
Kernel sort_kernel(DType dtype);                           // SortJob: keys, changed in place, to positions
Kernel list_kernel();                                      // ListJob
Kernel offset_kernel();                                    // IndexJob: an index to bytes, added to what is there
Kernel gather_kernel(size_t width);                        // IndexJob
Kernel scatter_kernel(Put put, DType dtype);               // IndexJob; set takes any dtype
Kernel product_kernel(DType dtype);                        // ProductJob
Kernel few_rows_kernel();                                  // ProductJob with few rows and a stored weight, f32
Kernel words_kernel(DType weight);                         // ProductJob with many rows and such a weight; nullptr for most
Kernel lookup_kernel();                                    // LookupJob
int64_t packed_floats(int64_t k, int64_t n);
void read_packed(const float* packed, int64_t k, int64_t column, float* y);  // k elements
// Panels of weight[k, n]; strides in bytes.
void pack_weight(float* packed, const void* weight, int64_t k, int64_t n, int64_t step, int64_t column);
Kernel attention_kernel();                                 // AttentionJob, f32
int64_t attention_room(const AttentionJob& job);           // floats for parts of the keys, its last operand
Kernel store_kernel();                                     // StoreJob
Kernel recurrent_kernel(Cell cell);                        // ScanJob, f32
Kernel pack_kernel();                                      // ScanJob: a weight [batch, size] into panels

// Memory for jobs and for ggml's tensors, freed with the plan.
class Pool {
 public:
  void* take(size_t bytes);
  template <class T>
  T* make() {
    static_assert(std::is_trivially_destructible_v<T>);
    return new (take(sizeof(T))) T();
  }
  size_t bytes() const { return bytes_; }

 private:
  std::vector<std::unique_ptr<char[]>> chunks_;
  char* next_ = nullptr;
  size_t left_ = 0, bytes_ = 0;
};

struct FreeContext {
  void operator()(ggml_context* ctx) const { ggml_free(ctx); }
};
using Context = std::unique_ptr<ggml_context, FreeContext>;

struct Place {  // a pointer of the plan, and where it points to
  void** where;
  int64_t offset;
  int32_t index;  // of the input or output
};

struct GgmlPlan final : Plan {
  std::vector<std::unique_ptr<char[]>> blocks;  // under the contexts
  std::vector<Context> contexts;
  Pool pool;
  ggml_cgraph* graph = nullptr;
  ggml_cplan compute = {};
  int threads = 1;  // worth using
  double work = 0, best = 1e300;  // multiply-adds; seconds of the fastest run with several threads
  int64_t arena_bytes = 0;
  const char* arena = nullptr;  // that the pointers are patched for
  std::vector<Place> in_arena, in_inputs, in_outputs;
  std::vector<const Node*> makers;  // of the graph's nodes, in their order
  struct Data {
    DimId dim;
    int64_t* where;
  };
  std::vector<Data> data;
  RunError error;
  size_t block_bytes = 0;

  size_t bytes() const override;
};

class Build;
struct Row {
  const char* name;
  Tensor (*build)(Build& b);
};

const Row* find_row(const std::string& op);  // ops.cpp; nullptr when there is none
std::vector<std::string> row_names();
void check(const Program& program);

// A node with its row and its attributes in the order of the row's rule; made once when a program is loaded.
struct Resolved {
  const Row* row;
  const Rule* rule;
  const Node* node;
  const Attr* attrs[8];
  const float* packed = nullptr;  // its weight in panels, when it is a constant
  std::vector<std::vector<Resolved>> regions;  // of a cond, which has no row
};
std::vector<Resolved> resolve(const std::vector<Node>& nodes);

template <class F>
void for_each(std::vector<Resolved>& nodes, const F& f) {  // those inside regions too
  for (Resolved& node : nodes) {
    f(node);
    for (auto& region : node.regions) for_each(region, f);
  }
}

// A constant that a node multiplies by, as the matrix [k, n] that it reads.
struct Weight {
  int32_t value = kNone;  // kNone: there is none
  int64_t k = 0, n = 0;
  int64_t step = 0, column = 0;  // strides in elements
};
Weight weight_of(const Program& program, const Node& node);  // ops_product.cpp
// Whether a node reads rows of the same constant, and finds them in its panels.
bool looks_up(const Program& program, const Node& node, const Weight& w);  // ops_index.cpp

// One plan under construction. Rows read operands and attributes, check their shapes, and add kernels.
class Build {
 public:
  Build(const Program& program, const std::vector<const void*>& constants);

  std::unique_ptr<GgmlPlan> build(const std::vector<Resolved>& nodes, const int64_t* sizes, size_t limit);

  // For rows: the node under construction.
  size_t ins() const { return node_->node->ins.size(); }
  bool is_state(size_t i) const { return program_.values[node_->node->ins[i]].kind == Value::Kind::state; }
  bool has(size_t i) const { return i < ins() && node_->node->ins[i] != kNone; }
  const Tensor& in(size_t i) const { return widened_.empty() ? values_[node_->node->ins[i]] : widened_[i]; }
  const Tensor& out() const { return out_; }  // contiguous, no buffer yet
  const std::string& name() const { return program_.values[node_->node->outs[0]].name; }
  const Rule& rule() const { return *node_->rule; }
  const float* packed() const { return node_->packed; }
  const Attr* attr(const char* name) const;  // nullptr when it is missing
  int64_t size(const char* name) const { return sizes_[std::get<DimId>(*attr(name))]; }
  std::vector<int64_t> sizes(const char* name) const;
  double number(const char* name) const { return number_of(*attr(name), sizes_); }
  bool flag(const char* name) const { return attr(name) && std::get<bool>(*attr(name)); }
  Scalar scalar(const char* name);
  int choice(const char* name, std::initializer_list<const char*> known) const;  // the position of its text among them
  [[noreturn]] void refuse(const std::string& fact) const;

  // New results. Each is empty, and adds nothing, when it has no elements.
  Tensor contiguous(const Tensor& x);  // x itself when it is
  Tensor fill(Tensor out, Scalar start, Scalar step);
  Tensor cast(const Tensor& x, DType dtype);  // x itself when it has it
  // `block` computes in `type` and makes elements of `made`.
  Tensor map(Block block, DType type, DType made, Tensor out, std::initializer_list<const Tensor*> ins,
             const MapJob& numbers, double cost);
  void copy_into(Tensor out, const Tensor& x);  // `out` has a buffer
  void allocate(Tensor& out);                   // gives it a buffer of its own
  // out[b, i, j] = sum over k of rows[b, i, k] * weight[b, j, k]; out and rows are contiguous.
  Tensor mul_mat(Tensor out, const Tensor& weight, const Tensor& rows, int64_t m, const Loop& batch);
  // The general step: `kernel` writes `out` from `ins`. `job` is from `make`.
  template <class T>
  T* make() { return plan_->pool.make<T>(); }
  template <class T>
  T* table(int64_t count) {  // for kernels, in the plan's memory
    static_assert(std::is_trivially_destructible_v<T>);
    T* all = static_cast<T*>(take_table(count, sizeof(T)));
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
    int32_t last = -1;   // the last step that touches it
    int64_t bytes = 0, offset = 0;
  };
  struct Step {
    ggml_tensor* node;
    int32_t out;
    int32_t ins[kMaxData - 1];
    uint8_t inplace;  // bit i: the result may be written over operand i
    const Node* maker;
  };
  struct Reference {
    void** where;
    int32_t buffer;
    int64_t offset;
  };

  Tensor shape_of(int32_t value) const;
  int32_t add_buffer(Buffer::Kind kind, int32_t index, int64_t bytes);
  int64_t checked_bytes(const Tensor& t) const;
  void* take_table(int64_t count, int64_t width);
  ggml_context* context();
  void refer(void** where, const Tensor& t);
  void add_step(ggml_tensor* node, const Tensor& out, std::initializer_list<const Tensor*> ins, uint8_t inplace);
  void start(const int64_t* sizes, size_t limit);
  void add_nodes(const std::vector<Resolved>& nodes);
  void add_node(const Resolved& node);
  void add_result(size_t output);
  void place_buffers();
  bool reuse_operand(int32_t step);
  void finish();
  [[noreturn]] void over_limit(int64_t bytes) const;

  const Program& program_;
  const std::vector<const void*>& constants_;
  const int64_t* sizes_ = nullptr;
  int64_t limit_ = 0;
  std::unique_ptr<GgmlPlan> plan_;
  const Resolved* node_ = nullptr;
  Tensor out_;
  std::vector<Tensor> widened_;  // the operands, where the row does not see them as they are
  std::vector<Tensor> values_;
  std::vector<Buffer> buffers_;
  std::vector<Step> steps_;
  std::vector<Reference> references_;
  struct Gap {
    int64_t offset, bytes;
  };
  std::vector<Gap> gaps_;
  size_t tensors_left_ = 0, tensors_used_ = 0;
  double work_ = 0;
};

bool fits(const Tensor& x, const Tensor& out);  // right-aligned, every size equal or 1
bool same_dims(const Tensor& a, const Tensor& b);
std::string dims_text(const Tensor& t);  // "[3, 48]"
Loop broadcast(const Tensor& out, std::initializer_list<const Tensor*> ins);
int thread_limit();  // from the options

// Turns an abort of ggml into an Error while it lives, on this thread.
class Guard {
 public:
  Guard();
  ~Guard();
};

}  // namespace keepdim::ggml
