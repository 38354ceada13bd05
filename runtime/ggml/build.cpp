// Build: creates a ggml graph with a static memory layout from the nodes of a program.
#include "ggml/build.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <numeric>

#include "ggml/thresholds.h"

namespace keepdim::ggml {
namespace {

constexpr int64_t kAlign = 64;
constexpr size_t kChunk = 32 * 1024;        // maximum chunk size of a pool, except for
constexpr size_t kMaxReserve = 256 * 1024;  // the first, which is as large as the jobs of the plan before
constexpr double kSharedWork = 5'000;       // multiply-adds of a step that justify waiting for other threads

// Dim i of channels-last images from the innermost one on: channels, then the last spatial dim, .., the batch.
int channels_last_dim(int rank, int i) { return i == 0 ? 1 : i == rank - 1 ? 0 : rank - i; }

int64_t align(int64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

}  // namespace

// ---- tensors and loops

int64_t Tensor::count() const {
  int64_t n = 1;
  for (int d = 0; d < rank; ++d) n *= dims[d];
  return n;
}

bool Tensor::contiguous() const {
  const auto block = static_cast<int64_t>(dtype_block(dtype));
  int64_t stride = width();
  for (int d = rank - 1; d >= 0; --d) {
    if (dims[d] != 1 && strides[d] != stride) return false;
    stride *= d == rank - 1 ? dims[d] / block : dims[d];
  }
  return true;
}

void Tensor::pack() {
  const auto block = static_cast<int64_t>(dtype_block(dtype));
  int64_t stride = width();
  for (int d = rank - 1; d >= 0; --d) {
    strides[d] = stride;
    stride *= d == rank - 1 ? dims[d] / block : dims[d];
  }
}

void Loop::push(int64_t size, int64_t result, int64_t first, int64_t second, int64_t third) {
  dims[rank] = size;
  strides[0][rank] = result;
  strides[1][rank] = first;
  strides[2][rank] = second;
  strides[3][rank] = third;
  ++rank;
}

void Loop::merge() {
  int kept = 0;
  for (int d = 0; d < rank; ++d) {
    if (dims[d] == 1) continue;
    bool mergeable = kept > 0;
    for (int o = 0; o < kMaxOperands && mergeable; ++o) mergeable = strides[o][kept - 1] == strides[o][d] * dims[d];
    if (!mergeable) ++kept;
    dims[kept - 1] = mergeable ? dims[kept - 1] * dims[d] : dims[d];
    for (int o = 0; o < kMaxOperands; ++o) strides[o][kept - 1] = strides[o][d];
  }
  rank = kept;
  if (rank == 0) push(1, 0);
}

int64_t Loop::count() const {
  int64_t n = 1;
  for (int d = 0; d < rank; ++d) n *= dims[d];
  return n;
}

bool broadcastable(const Tensor& x, const Tensor& out) {
  if (x.rank > out.rank) return false;
  for (int d = 0; d < x.rank; ++d) {
    const int64_t size = x.dims[x.rank - 1 - d];
    if (size != 1 && size != out.dims[out.rank - 1 - d]) return false;
  }
  return true;
}

bool same_dims(const Tensor& a, const Tensor& b) { return a.rank == b.rank && std::equal(a.dims, a.dims + a.rank, b.dims); }

bool is_channels_last(const Tensor& t) {
  Tensor stored = t;
  if (t.rank < 3 || t.contiguous()) return false;
  set_channels_last(stored);
  return same_layout(t, stored);
}

bool orders_channels_last(const Tensor& t) {
  if (t.rank < 3 || t.contiguous() || t.strides[1] != t.width()) return false;
  int64_t least = t.width();
  for (int i = 0; i < t.rank; ++i) {
    const int d = channels_last_dim(t.rank, i);
    if (t.dims[d] == 1) continue;
    if (t.strides[d] < least) return false;
    least = t.strides[d] * t.dims[d];
  }
  return true;
}

bool same_layout(const Tensor& a, const Tensor& b) {
  if (!same_dims(a, b)) return false;
  for (int d = 0; d < a.rank; ++d)
    if (a.dims[d] != 1 && a.strides[d] != b.strides[d]) return false;
  return true;
}

void set_channels_last(Tensor& t) {
  int64_t stride = t.width();
  for (int i = 0; i < t.rank; ++i) {
    const int d = channels_last_dim(t.rank, i);
    t.strides[d] = stride;
    stride *= t.dims[d];
  }
}

std::string dims_text(const Tensor& t) {
  std::string text = "[";
  for (int d = 0; d < t.rank; ++d) text += (d ? ", " : "") + std::to_string(t.dims[d]);
  return text + "]";
}

Loop broadcast(const Tensor& out, std::initializer_list<const Tensor*> ins) {
  Loop loop;
  int order[kMaxRank];  // of memory: the innermost run is contiguous whatever the layout
  std::iota(order, order + out.rank, 0);
  std::stable_sort(order, order + out.rank, [&](int a, int b) { return out.strides[a] > out.strides[b]; });
  for (int i = 0; i < out.rank; ++i) {
    const int d = order[i];
    int64_t strides[kMaxOperands - 1] = {};
    int o = 0;
    for (const Tensor* x : ins) strides[o++] = broadcast_stride(*x, out.rank, d);
    loop.push(out.dims[d], out.strides[d], strides[0], strides[1], strides[2]);
  }
  loop.merge();
  return loop;
}

// ---- plan

void RunError::set(const void* failed, int64_t at, const std::string& what) {
  std::lock_guard<std::mutex> lock(mutex);
  if (job && (job != failed || position <= at)) return;
  job = failed;
  position = at;
  sentence = what;
}

void Job::fail(int64_t position, const std::string& fact) const {
  error->set(this, position, "[run] " + node->op + " '" + *name + "': " + fact);
}

void JobPool::add_chunk(size_t bytes) {
  chunks_.emplace_back(new char[bytes]);
  next_ = chunks_.back().get();
  left_ = bytes;
  bytes_ += bytes;
}

void JobPool::reserve(size_t bytes) {
  if (bytes) add_chunk(bytes);
}

void* JobPool::allocate(size_t bytes) {
  bytes = (bytes + 15) / 16 * 16;
  if (bytes > left_) add_chunk(std::max(bytes, std::min(kChunk, bytes_ + 2048)));
  void* taken = next_;
  next_ += bytes;
  left_ -= bytes;
  return taken;
}

size_t GgmlPlan::bytes() const {
  const size_t places = in_arena.capacity() + in_inputs.capacity() + in_outputs.capacity();
  const size_t lists = places * sizeof(PointerPatch) + data.capacity() * sizeof(Data) + steps.capacity() * sizeof(Step) +
                       last_nodes.capacity() * sizeof(last_nodes[0]);
  return sizeof(*this) + block_bytes + pool.bytes() + lists;
}

// ---- the current node

Build::Build(const Program& program, const std::vector<const void*>& constants) : program_(program), constants_(constants) {}

const Attr* Build::attr(const char* name) const {
  size_t i = 0;
  for (const AttrRule& rule : node_->rule->attrs) {
    if (std::strcmp(rule.name, name) == 0) return node_->attrs[i];
    ++i;
  }
  return nullptr;
}

std::vector<int64_t> Build::sizes(const char* name) const {
  std::vector<int64_t> list;
  for (DimId id : std::get<std::vector<DimId>>(*attr(name))) list.push_back(sizes_[id]);
  return list;
}

int Build::choice(const char* name, std::initializer_list<const char*> known) const {
  const auto& text = std::get<std::string>(*attr(name));
  const auto* found = std::find(known.begin(), known.end(), text);
  if (found == known.end()) refuse(std::string(name) + " = '" + text + "' is not known.");
  return static_cast<int>(found - known.begin());
}

Scalar Build::scalar(const char* name) {
  Scalar result;
  const auto* id = std::get_if<DimId>(attr(name));
  if (!id) {
    result.real = number(name);
    return result;
  }
  result.is_integer = true;
  result.integer = sizes_[*id];
  bool data = false;
  for (const AttrRule& rule : node_->rule->attrs) data |= rule.data && std::strcmp(rule.name, name) == 0;
  if (data && !program_.contract.dims.is_constant(*id)) {
    auto* where = static_cast<int64_t*>(plan_->pool.allocate(sizeof(int64_t)));
    plan_->data.push_back({*id, where});
    result.data = where;
  }
  return result;
}

void Build::refuse(const std::string& fact) const {
  fail(Code::invalid_program, "[build] " + node_->node->op + " '" + name() + "': " + fact);
}

// ---- buffers and steps

int64_t Build::checked_bytes(const Tensor& t) const {
  int64_t bytes = t.width();
  bool empty = false;
  for (int d = 0; d < t.rank; ++d) {  // strides of an empty tensor must not overflow either
    empty |= t.dims[d] == 0;
    if (__builtin_mul_overflow(bytes, std::max<int64_t>(t.dims[d], 1), &bytes)) over_limit(INT64_MAX);
  }
  if (bytes > INT64_MAX - kAlign) over_limit(bytes);
  return empty ? 0 : bytes;
}

Tensor Build::shape_of(int32_t value) const {
  const Value& v = program_.values[value];
  Tensor t;
  t.dtype = v.dtype;
  t.rank = static_cast<int>(v.dims.size());
  for (int d = 0; d < t.rank; ++d) t.dims[d] = sizes_[v.dims[d]];
  checked_bytes(t);
  t.pack();
  return t;
}

int32_t Build::add_buffer(Buffer::Kind kind, int32_t index, int64_t bytes) {
  Buffer buffer;
  buffer.kind = kind;
  buffer.index = index;
  buffer.bytes = bytes;
  buffers_.push_back(buffer);
  return static_cast<int32_t>(buffers_.size()) - 1;
}

void Build::allocate(Tensor& out) {
  const int64_t bytes = checked_bytes(out);
  if (bytes > limit_) over_limit(bytes);
  out.buffer = bytes ? add_buffer(Buffer::Kind::arena, -1, bytes) : -1;
  out.offset = 0;
}

void* Build::allocate_table(int64_t count, int64_t width) {
  int64_t bytes = 0, total = 0;
  if (__builtin_mul_overflow(count, width, &bytes) ||
      __builtin_add_overflow(bytes, static_cast<int64_t>(plan_->pool.bytes()), &total))
    over_limit(INT64_MAX);
  if (total > limit_) over_limit(total);
  return plan_->pool.allocate(static_cast<size_t>(bytes));
}

// A context of its own, for `tensors` tensors and `more_bytes`.
ggml_context* Build::add_context(size_t tensors, size_t more_bytes) {
  const size_t bytes = tensors * ggml_tensor_overhead() + more_bytes;
  plan_->blocks.emplace_back(new char[bytes]);
  plan_->block_bytes += bytes;
  plan_->contexts.emplace_back(ggml_init({bytes, plan_->blocks.back().get(), true}));
  return plan_->contexts.back().get();
}

void Build::add_reference(void** where, const Tensor& t) {
  if (t.buffer >= 0) references_.push_back({where, t.buffer, t.offset});
}

void Build::add_step(const Step& step, const Tensor& out, std::initializer_list<const Tensor*> ins, uint8_t inplace,
                     ggml_tensor* product) {
  const auto index = static_cast<int32_t>(steps_.size());
  StepBuffers buffers{out.buffer, {}, inplace, product};
  std::fill(std::begin(buffers.ins), std::end(buffers.ins), -1);
  buffers_[out.buffer].last = index;
  int i = 0;
  for (const Tensor* x : ins) {
    buffers.ins[i++] = x->buffer;
    if (x->buffer >= 0) buffers_[x->buffer].last = index;
  }
  steps_.push_back(buffers);
  plan_->steps.push_back(step);
}

void Build::step(Kernel kernel, Job* job, const Tensor& out, std::initializer_list<const Tensor*> ins, double cost,
                 bool elementwise) {
  if (!kernel)
    fail(Code::internal, "[build] " + (node_ ? node_->node->op + " '" + name() + "'" : "result") + ": no kernel for its dtype.");
  job->error = &plan_->error;
  job->work_counter = &plan_->work_counter;
  if (node_) job->node = node_->node, job->name = &name();  // without a node: a copy to an output
  add_reference(&job->data[0], out);
  int i = 0;
  uint8_t inplace = 0;
  for (const Tensor* x : ins) {
    const bool same = elementwise && x->offset == 0 && x->width() == out.width() && same_layout(*x, out);
    inplace |= static_cast<uint8_t>(same << i);
    add_reference(&job->data[++i], *x);
  }
  work_ += cost;
  if (cost >= kSharedWork) shared_work_ += cost;
  add_step({kernel, job, job->node, cost >= kSharedWork}, out, ins, inplace);
}

Tensor Build::map(ElementwiseFn fn, DType type, DType result_type, Tensor out, std::initializer_list<const Tensor*> ins,
                  const MapJob& scalars, double cost) {
  if (!fn) fail(Code::internal, "[build] " + node_->node->op + " '" + name() + "': no function for its dtype.");
  for (const Tensor* x : ins)  // images stay in the layout that convolutions gave them
    if (same_dims(*x, out) && orders_channels_last(*x)) set_channels_last(out);
  allocate(out);
  if (out.buffer < 0) return out;
  auto* job = make<MapJob>();
  *job = scalars;
  job->fn = fn;
  job->loop = broadcast(out, ins);
  job->width[0] = static_cast<int64_t>(dtype_bytes(result_type));
  job->write = out.dtype == result_type ? nullptr : converter(result_type, out.dtype);
  job->strided_copy[0] = converter(result_type, result_type);
  for (const Tensor* x : ins) {
    const int o = ++job->operands;
    const DType as = job->condition && o == 1 ? DType::boolean : type;
    job->width[o] = static_cast<int64_t>(dtype_bytes(as));
    job->read[o] = x->dtype == as ? nullptr : converter(x->dtype, as);
    job->strided_copy[o] = converter(as, as);
  }
  const Kernel kernel = has_transposed(*job) ? map_tiles_kernel() : repeated_row(*job) ? map_rows_kernel() : map_kernel();
  step(kernel, job, out, ins, cost * static_cast<double>(out.count()), true);
  return out;
}

Tensor Build::cast(const Tensor& x, DType dtype) {
  if (x.dtype == dtype) return x;
  Tensor out = x;
  out.dtype = dtype;
  orders_channels_last(x) ? set_channels_last(out) : out.pack();
  allocate(out);
  if (out.buffer < 0) return out;
  auto* job = make<CastJob>();
  job->convert = converter(x.dtype, dtype);
  job->loop = broadcast(out, {&x});
  step(cast_kernel(), job, out, {&x}, 4.0 * static_cast<double>(out.count()), true);
  return out;
}

void Build::copy_into(Tensor out, const Tensor& x) {
  if (out.buffer < 0) return;
  auto* job = make<Job>();
  job->loop = broadcast(out, {&x});
  step(copy_kernel(dtype_bytes(x.dtype)), job, out, {&x}, 2.0 * static_cast<double>(out.count()));
}

Tensor Build::contiguous(const Tensor& x) {
  if (x.contiguous()) return x;
  Tensor out = x;
  out.pack();
  allocate(out);
  copy_into(out, x);
  return out;
}

Tensor Build::channels_last(const Tensor& x) {
  Tensor out = x;
  set_channels_last(out);
  if (same_layout(x, out)) return x;
  allocate(out);
  copy_into(out, x);
  return out;
}

Tensor Build::fill(Tensor out, Scalar start, Scalar stride) {
  allocate(out);
  if (out.buffer < 0) return out;
  auto* job = make<FillJob>();
  job->start = start;
  job->step = stride;
  job->loop = broadcast(out, {});
  step(fill_kernel(out.dtype), job, out, {}, static_cast<double>(out.count()));
  return out;
}

Tensor Build::mul_mat(Tensor out, const Tensor& weight, const Tensor& rows, int64_t m, const Loop& batch) {
  const int64_t k = weight.dims[weight.rank - 1], n = weight.dims[weight.rank - 2];
  // ggml uses 32-bit row sizes.
  if (k > INT32_MAX || n > INT32_MAX) refuse("a product over rows of " + std::to_string(k) + " is too large.");
  allocate(out);
  ggml_context* ctx = add_context(3);
  const int64_t inner = batch.rank > 0 ? batch.dims[batch.rank - 1] : 1;
  const int64_t outer = batch.rank > 1 ? batch.dims[0] : 1;
  const int64_t inner_step = batch.rank > 0 ? batch.strides[2][batch.rank - 1] : 0;
  const int64_t outer_step = batch.rank > 1 ? batch.strides[2][0] : 0;
  const int64_t row_step = n > 1 ? weight.strides[weight.rank - 2] : k * 4;
  ggml_tensor* w = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, k, n, inner_step ? inner : 1, outer_step ? outer : 1);
  w->nb[1] = static_cast<size_t>(row_step);
  w->nb[2] = static_cast<size_t>(inner_step ? inner_step : row_step * n);
  w->nb[3] = static_cast<size_t>(outer_step ? outer_step : row_step * n);
  ggml_tensor* x = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, k, m, inner, outer);
  ggml_tensor* y = ::ggml_mul_mat(ctx, w, x);
  add_reference(&w->data, weight);
  add_reference(&x->data, rows);
  add_reference(&y->data, out);
  const double cost = static_cast<double>(out.count()) * static_cast<double>(k);
  work_ += cost;
  shared_work_ += cost;  // ggml shares every product
  y->flags |= GGML_TENSOR_FLAG_COMPUTE;
  add_step({nullptr, nullptr, node_->node, true}, out, {&weight, &rows}, 0, y);
  return out;
}

// ---- plan construction

void Build::over_limit(int64_t bytes) const {
  keepdim::over_limit("ggml", program_.contract, sizes_, bytes == INT64_MAX ? SIZE_MAX : static_cast<size_t>(bytes),
                      static_cast<size_t>(limit_));
}

void Build::add_value(size_t i) {
  const Value& value = program_.values[i];
  Tensor t = shape_of(static_cast<int32_t>(i));
  const int64_t bytes = checked_bytes(t);
  const auto kind = value.kind == Value::Kind::input ? Buffer::Kind::input : Buffer::Kind::constant;
  if (bytes) t.buffer = add_buffer(kind, static_cast<int32_t>(i), bytes);
  values_[i] = t;
}

// Adds the values whose size is the same in every plan, and lists the others.
void Build::sort_values() {
  values_.assign(program_.values.size(), Tensor());
  buffers_.clear();
  varying_values_.clear();
  for (size_t i = 0; i < values_.size(); ++i) {
    const Value& value = program_.values[i];
    if (value.kind == Value::Kind::temp || dtype_bytes(value.dtype) == 0) continue;
    if (value.dims.size() > kMaxRank) continue;  // not used by any node (checked at load)
    const auto is_fixed = [&](DimId id) { return program_.contract.dims.is_constant(id); };
    if (std::all_of(value.dims.begin(), value.dims.end(), is_fixed))
      add_value(i);
    else
      varying_values_.push_back(i);
  }
  fixed_buffers_ = buffers_.size();
}

void Build::start(const int64_t* sizes, size_t limit) {
  sizes_ = sizes;
  limit_ = static_cast<int64_t>(std::min<size_t>(limit, INT64_MAX));
  plan_ = std::make_unique<GgmlPlan>();
  plan_->steps.reserve(steps_before_);
  plan_->pool.reserve(std::min({pool_before_, kMaxReserve, limit}));
  steps_.clear();
  references_.clear();
  work_ = shared_work_ = 0;
  if (values_.empty()) sort_values();
  buffers_.resize(fixed_buffers_);
  for (size_t i : varying_values_) add_value(i);
}

void Build::add_node(const ResolvedNode& node) {
  node_ = &node;
  widened_.clear();
  const OpRule& rule = *node.rule;
  const int32_t id = node.node->outs[0];
  const Tensor wanted = shape_of(id);
  out_ = wanted;
  if (rule.widen) {
    if (rule.type_of_result() == 'T') out_.dtype = compute_type(wanted.dtype);
    out_.pack();
  }
  if (rule.widen && !node.builder->reads_any) {
    std::vector<Tensor> seen(ins());
    for (size_t i = 0; i < ins(); ++i)
      if (has(i))  // a packed weight is not read again
        seen[i] = rule.type_of(i) == 'T' && !(node.packed && i == 1) ? cast(in(i), compute_type(in(i).dtype)) : in(i);
    widened_ = std::move(seen);
  }
  Tensor result = node.builder->build(*this);
  if (result.dtype != out_.dtype || !same_dims(result, out_))
    fail(Code::internal, "[build] " + node.node->op + " '" + name() + "': built " + dims_text(result) + " " +
                             dtype_name(result.dtype) + ", the program says " + dims_text(out_) + " " + dtype_name(out_.dtype) +
                             ".");
  values_[id] = cast(result, wanted.dtype);
}

// For a cond, adds only the branch taken at these sizes.
void Build::add_nodes(const std::vector<ResolvedNode>& nodes) {
  for (const ResolvedNode& node : nodes) {
    if (!is_cond(*node.node)) {
      add_node(node);
      continue;
    }
    const Region& region = taken_region(*node.node, sizes_);
    add_nodes(node.regions[&region - node.node->regions.data()]);
    const std::vector<int32_t>& results = region.results;
    for (size_t i = 0; i < results.size(); ++i) values_[node.node->outs[i]] = values_[results[i]];
  }
}

// An output is computed directly in the caller's memory, unless it is a view or its buffer is already another output; then it
// is copied.
void Build::add_output(size_t output) {
  const int32_t id = program_.results[output];
  if (id == kNone) return;
  const Tensor& t = values_[id];
  if (t.buffer < 0) return;
  Buffer& buffer = buffers_[t.buffer];
  const auto index = static_cast<int32_t>(output);
  if (buffer.kind == Buffer::Kind::arena && t.offset == 0 && t.contiguous() && checked_bytes(t) == buffer.bytes) {
    buffer.kind = Buffer::Kind::output;
    buffer.index = index;
    return;
  }
  const int64_t bytes = checked_bytes(t);
  if (bytes > limit_) over_limit(bytes);
  Tensor out = t;
  out.pack();
  out.offset = 0;
  out.buffer = add_buffer(Buffer::Kind::output, index, bytes);
  copy_into(out, t);
}

// In-place: lets the result of a step reuse the memory of an operand whose last use is this step. Returns whether it did.
bool Build::reuse_operand(int32_t index) {
  const StepBuffers& step = steps_[index];
  for (int i = 0; i < kMaxData - 1; ++i) {
    if (!(step.inplace >> i & 1) || step.ins[i] < 0) continue;
    Buffer& operand = buffers_[step.ins[i]];
    const bool last_use = operand.kind == Buffer::Kind::arena && operand.last == index;
    if (!last_use || operand.bytes != buffers_[step.out].bytes) continue;
    bool other_view = false;
    for (int j = 0; j < kMaxData - 1; ++j) other_view |= step.ins[j] == step.ins[i] && !(step.inplace >> j & 1);
    if (other_view) continue;
    buffers_[step.out].offset = operand.offset;
    operand.last = -1;  // ownership moves to the result: not freed after this step
    return true;
  }
  return false;
}

// Best-fit allocator for the arena; keeps the free gaps sorted by offset.
class Build::ArenaLayout {
 public:
  explicit ArenaLayout(std::vector<Gap>& gaps) : gaps_(gaps) { gaps_.clear(); }

  int64_t top() const { return top_; }

  // Returns the offset of a new buffer, or -1 if the arena size overflows int64.
  int64_t take(int64_t bytes) {
    auto best = gaps_.end();
    for (auto gap = gaps_.begin(); gap != gaps_.end(); ++gap)
      if (gap->bytes >= bytes && (best == gaps_.end() || gap->bytes < best->bytes)) best = gap;
    if (best == gaps_.end()) {
      const int64_t offset = top_;
      return __builtin_add_overflow(top_, bytes, &top_) ? -1 : offset;
    }
    const int64_t offset = best->offset;
    best->offset += bytes;
    best->bytes -= bytes;
    if (best->bytes == 0) gaps_.erase(best);
    return offset;
  }

  // Frees a buffer and coalesces adjacent gaps.
  void release(int64_t offset, int64_t bytes) {
    const auto before = [](const Gap& gap, int64_t o) { return gap.offset < o; };
    auto at = std::lower_bound(gaps_.begin(), gaps_.end(), offset, before);
    if (at != gaps_.begin() && std::prev(at)->offset + std::prev(at)->bytes == offset) {
      --at;
      at->bytes += bytes;
    } else {
      at = gaps_.insert(at, {offset, bytes});
    }
    const auto next = std::next(at);
    if (next != gaps_.end() && at->offset + at->bytes == next->offset) {
      at->bytes += next->bytes;
      gaps_.erase(next);
    }
    if (at->offset + at->bytes == top_) top_ = at->offset, gaps_.erase(at);
  }

 private:
  std::vector<Gap>& gaps_;
  int64_t top_ = 0;
};

// Assigns arena offsets in step order by lifetime. An operand that no step has written is scratch memory of its step.
void Build::place_buffers() {
  ArenaLayout arena(gaps_);
  for (int32_t i = 0; i < static_cast<int32_t>(steps_.size()); ++i) {
    const StepBuffers& step = steps_[i];
    for (int o = 0; o < kMaxData; ++o) {
      const int32_t b = o ? step.ins[o - 1] : step.out;
      if (b < 0 || buffers_[b].kind != Buffer::Kind::arena || buffers_[b].placed) continue;
      buffers_[b].placed = true;
      if (o == 0 && reuse_operand(i)) continue;
      buffers_[b].offset = arena.take(align(buffers_[b].bytes));
      if (buffers_[b].offset < 0) over_limit(INT64_MAX);
      plan_->arena_bytes = std::max(plan_->arena_bytes, arena.top());
    }
    for (int o = 0; o < kMaxData; ++o) {
      const int32_t b = o ? step.ins[o - 1] : step.out;
      if (b < 0 || buffers_[b].kind != Buffer::Kind::arena || buffers_[b].last != i) continue;
      buffers_[b].last = -1;
      arena.release(buffers_[b].offset, align(buffers_[b].bytes));
    }
  }
}

// Sets pointers to constants; those to the arena, inputs and outputs are patched before a run.
void Build::resolve_references() {
  size_t count[4] = {};
  for (const Reference& r : references_) ++count[static_cast<int>(buffers_[r.buffer].kind)];
  plan_->in_arena.reserve(count[static_cast<int>(Buffer::Kind::arena)]);
  plan_->in_inputs.reserve(count[static_cast<int>(Buffer::Kind::input)]);
  plan_->in_outputs.reserve(count[static_cast<int>(Buffer::Kind::output)]);
  for (const Reference& r : references_) {
    const Buffer& buffer = buffers_[r.buffer];
    const PointerPatch patch{r.where, r.offset + buffer.offset, buffer.index};
    switch (buffer.kind) {
      case Buffer::Kind::arena: plan_->in_arena.push_back(patch); break;
      case Buffer::Kind::input: plan_->in_inputs.push_back(patch); break;
      case Buffer::Kind::output: plan_->in_outputs.push_back(patch); break;
      case Buffer::Kind::constant: *r.where = static_cast<char*>(const_cast<void*>(constants_[buffer.index])) + r.offset; break;
    }
  }
}

// Makes a node of each product by ggml, and of each sequence of other steps between them.
void Build::make_graph() {
  const std::vector<Step>& steps = plan_->steps;
  size_t nodes = 0;
  for (size_t i = 0; i < steps.size(); ++i) nodes += i == 0 || !steps[i].kernel || !steps[i - 1].kernel;
  const size_t count = std::max<size_t>(nodes, 1);
  ggml_context* ctx = add_context(nodes, ggml_graph_overhead_custom(count, false));
  plan_->graph = ggml_new_graph_custom(ctx, count, false);
  plan_->last_nodes.reserve(nodes);
  for (size_t first = 0, end = 0; first < steps.size(); first = end) {
    for (end = first + 1; steps[first].kernel && end < steps.size() && steps[end].kernel;) ++end;
    ggml_tensor* tensor = steps_[first].product;
    if (!tensor) {
      auto* sequence = make<StepSequence>();
      *sequence = {&steps[first], end - first, &plan_->barrier, &plan_->timer};
      // The tensor only carries the sequence; shapes and pointers are in its jobs.
      tensor = ggml_custom_4d(ctx, GGML_TYPE_I8, 1, 1, 1, 1, nullptr, 0, run_sequence, GGML_N_TASKS_MAX, sequence);
      tensor->flags |= GGML_TENSOR_FLAG_COMPUTE;
    }
    ggml_graph_add_node(plan_->graph, tensor);
    plan_->last_nodes.push_back(steps[end - 1].node);
  }
}

void Build::choose_threads() {
  const double threads = shared_work_ / static_cast<double>(std::max<int64_t>(work_per_thread(), 1));
  plan_->work = work_;
  plan_->threads = static_cast<int>(std::clamp(threads, 1.0, 512.0));
}

void Build::finish() {
  place_buffers();
  resolve_references();
  make_graph();
  choose_threads();
  plan_->compute = ggml_graph_plan(plan_->graph, std::min(plan_->threads, thread_limit()), nullptr);
  int64_t total = plan_->arena_bytes;
  const int64_t plan_bytes = static_cast<int64_t>(plan_->bytes() + plan_->compute.work_size);
  if (__builtin_add_overflow(total, plan_bytes, &total)) over_limit(INT64_MAX);
  if (total > limit_) over_limit(total);
  steps_before_ = steps_.size();
  pool_before_ = plan_->pool.used();
}

std::unique_ptr<GgmlPlan> Build::build(const std::vector<ResolvedNode>& nodes, const int64_t* sizes, size_t limit) {
  const AbortGuard guard;
  try {
    start(sizes, limit);
    add_nodes(nodes);
    for (size_t i = 0; i < program_.results.size(); ++i) add_output(i);
    finish();
  } catch (...) {
    plan_.reset();
    values_.clear();  // maybe incomplete
    throw;
  }
  return std::move(plan_);
}

}  // namespace keepdim::ggml
