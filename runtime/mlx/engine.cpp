// The MLX engine: weights and states as MLX arrays, plans with evaluated shapes, and the run, which builds the MLX graph and
// evaluates it once.
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <unordered_map>

#include "core/lock.h"
#include "core/registry.h"
#include "mlx/op.h"
#include "mlx/weights.h"

namespace keepdim {
namespace mlx {
namespace {

constexpr OpTable (*kTables[])() = {elementwise_ops, shape_ops, reduce_ops, gather_scatter_ops, matmul_ops, conv_pool_ops};

void check(const Program& program) {
  check_program(program, "mlx", [](const std::string& op) { return find_builder(op) != nullptr; });
}

std::vector<std::string> op_names() {
  std::vector<std::string> names;
  for (auto* table : kTables)
    for (size_t i = 0; i < table().count; ++i) names.emplace_back(table().ops[i].name);
  return names;
}

// MLX streams of one engine. By default MLX creates a stream, with a thread that never ends, for every calling thread. Delegates
// run one call at a time, so that each engine needs one set; sets of destroyed engines are reused.
class Streams {
 public:
  Streams() {
    const std::lock_guard<TableLock> guard(lock());
    check_process();
    if (!idle().empty()) {
      all_ = std::move(idle().back());
      idle().pop_back();
      return;
    }
    all_.push_back(mx::new_thread_unsafe_stream(mx::default_device()));
    if (mx::default_device() != mx::Device::cpu) all_.push_back(mx::new_thread_unsafe_stream(mx::Device::cpu));  // for f64
  }
  ~Streams() {
    const std::lock_guard<TableLock> guard(lock());
    idle().push_back(std::move(all_));
  }
  Streams(const Streams&) = delete;
  Streams& operator=(const Streams&) = delete;
  void use() const {
    check_process();
    for (const mx::Stream& stream : all_) mx::set_default_stream(stream);
  }

 private:
  // The threads of a stream do not survive a fork: a call in the child would wait for them forever.
  static void check_process() {
    static const pid_t first = getpid();
    if (getpid() == first) return;
    fail(Code::not_supported,
         "[run] mlx: was used before this process was forked, and its threads are not in it. Start processes with spawn.");
  }
  static TableLock& lock() { return *new_once<TableLock>(); }
  static std::vector<std::vector<mx::Stream>>& idle() { return *new_once<std::vector<std::vector<mx::Stream>>>(); }
  template <class T>
  static T* new_once() {  // never destroyed: engines may outlive this library's statics
    static T* const one = new T();
    return one;
  }
  std::vector<mx::Stream> all_;
};

struct MlxPlan final : Plan {
  std::vector<Step> steps;                           // of the taken branches
  std::vector<std::pair<int32_t, int32_t>> aliases;  // (out of a cond, value that it equals)
  std::vector<size_t> aliases_before;                // number of aliases before each step
  size_t required_bytes = 0;                         // peak bytes of live arrays
  size_t bytes() const override { return sizeof(*this) + steps.size() * (sizeof(Step) + 64); }
};

class MlxEngine final : public Engine {
 public:
  MlxEngine(const Program& program, const Weights& weights, const Release& release) : program_(program) {
    persistent_.arrays.resize(program.values.size());
    persistent_.packed.resize(program.values.size());
    persistent_.states.resize(program.values.size());
    streams_.use();
    load(weights, release);
  }

  std::unique_ptr<Plan> build(const int64_t* sizes, size_t memory_limit) override;
  void run(Plan& plan, const Call& call) override;
  size_t arena_bytes() const override { return 0; }  // MLX has one process-wide memory pool
  size_t packed_bytes() const override { return packed_bytes_; }

 private:
  void load(const Weights& weights, const Release& release);
  void add_steps(MlxPlan& plan, const std::vector<Node>& nodes, const int64_t* sizes);
  mx::Shape shape_of(const Value& value, const int64_t* sizes) const;
  size_t bytes_of(int32_t id, const int64_t* sizes, size_t limit) const;
  void mark_last_uses(MlxPlan& plan) const;
  size_t peak_bytes(const MlxPlan& plan, const int64_t* sizes, size_t limit) const;
  void build_graph(const MlxPlan& plan, const Call& call, Values& values) const;
  void copy_outputs(const Call& call, std::vector<std::optional<Array>>& results) const;
  void save_states();

  const Program& program_;
  Streams streams_;
  Values persistent_;  // weights and states
  std::map<int32_t, QuantisedWeight> packed_;
  size_t packed_bytes_ = 0;
};

// Weights are used in place where MLX supports it (Apple GPUs). Otherwise MLX copies them and releases the original, which the
// host can then release as well.
void MlxEngine::load(const Weights& weights, const Release& release) {
  std::map<std::string, int> pending;  // by key: values that still need the host's bytes
  for (const Value& value : program_.values) pending[value.key] += value.kind == Value::Kind::constant;
  for (size_t i = 0; i < program_.values.size(); ++i) {
    const Value& value = program_.values[i];
    const auto id = static_cast<int32_t>(i);
    if (value.kind != Value::Kind::constant && value.kind != Value::Kind::state) continue;
    const Bytes bytes = weights(value.key);
    const mx::Shape shape = shape_of(value, nullptr);
    if (value.kind == Value::Kind::state) {
      persistent_.states[i] = state_of(bytes, value.dtype, shape);
      continue;
    }
    bool copied = true;
    if (is_quantised(value.dtype)) {
      if (has_mlx_format(value.dtype) && shape.size() == 2) {
        const QuantisedWeight& packed = packed_.emplace(id, pack(value.dtype, bytes.data, shape)).first->second;
        persistent_.packed[i] = &packed;
        packed_bytes_ += packed.quants.nbytes() + packed.scales.nbytes() + packed.biases.nbytes();
      } else {
        persistent_.arrays[i] = dequantised(value.dtype, bytes.data, shape);
        packed_bytes_ += persistent_.arrays[i]->nbytes();
      }
    } else {
      persistent_.arrays[i] = wrap(bytes.data, shape, value.dtype, &copied);
      if (copied) packed_bytes_ += bytes.size;
    }
    if (copied && --pending[value.key] == 0) release(value.key);
  }
}

mx::Shape MlxEngine::shape_of(const Value& value, const int64_t* sizes) const {
  mx::Shape shape;
  for (DimId id : value.dims) {
    const int64_t size = sizes ? sizes[id] : program_.contract.dims.node(id).value;
    if (size > INT32_MAX)
      fail(Code::not_supported, "[plan] mlx: '" + value.name + "' has a size of " + std::to_string(size) +
                                    ", and MLX counts with 32 bits. Call it with smaller sizes.");
    shape.push_back(static_cast<int32_t>(size));
  }
  return shape;
}

// ---- plans

std::unique_ptr<Plan> MlxEngine::build(const int64_t* sizes, size_t memory_limit) {
  auto plan = std::make_unique<MlxPlan>();
  add_steps(*plan, program_.nodes, sizes);
  plan->aliases_before.push_back(plan->aliases.size());
  mark_last_uses(*plan);
  plan->required_bytes = peak_bytes(*plan, sizes, memory_limit);
  return plan;
}

void MlxEngine::add_steps(MlxPlan& plan, const std::vector<Node>& nodes, const int64_t* sizes) {
  for (const Node& node : nodes) {
    if (is_cond(node)) {
      const Region& region = taken_region(node, sizes);
      add_steps(plan, region.nodes, sizes);
      for (size_t i = 0; i < node.outs.size(); ++i) plan.aliases.emplace_back(node.outs[i], region.results[i]);
      continue;
    }
    const Value& value = program_.values[node.outs[0]];
    plan.aliases_before.push_back(plan.aliases.size());
    plan.steps.push_back({&node, find_builder(node.op), find_rule(node.op), shape_of(value, sizes), value.dtype, {}});
  }
}

// Marks last uses, so that arrays are released early: MLX reuses a buffer only if nothing else references it.
void MlxEngine::mark_last_uses(MlxPlan& plan) const {
  std::vector<char> read(program_.values.size(), 0);
  for (int32_t id : program_.results)
    if (id != kNone) read[id] = 1;
  for (const auto& [out, from] : plan.aliases) read[from] = 1;
  for (auto step = plan.steps.rbegin(); step != plan.steps.rend(); ++step)
    for (int32_t id : step->node->ins)
      if (id != kNone && !read[id]) read[id] = 1, step->last_uses.push_back(id);
}

size_t MlxEngine::bytes_of(int32_t id, const int64_t* sizes, size_t limit) const {
  const Value& value = program_.values[id];
  size_t bytes = dtype_bytes(value.dtype);
  for (DimId dim : value.dims)
    if (__builtin_mul_overflow(bytes, static_cast<size_t>(sizes[dim]), &bytes))
      over_limit("mlx", program_.contract, sizes, SIZE_MAX, limit);
  return bytes;
}

// Peak bytes of live arrays; checks the limit before anything is allocated.
size_t MlxEngine::peak_bytes(const MlxPlan& plan, const int64_t* sizes, size_t limit) const {
  size_t live = 0, peak = 0;
  for (const Step& step : plan.steps) {
    if (__builtin_add_overflow(live, bytes_of(step.node->outs[0], sizes, limit), &live)) live = SIZE_MAX;
    peak = std::max(peak, live);
    if (peak > limit) over_limit("mlx", program_.contract, sizes, peak, limit);
    for (int32_t id : step.last_uses)
      if (program_.values[id].kind == Value::Kind::temp) live -= std::min(live, bytes_of(id, sizes, limit));
  }
  return peak;
}

// ---- runs

// MLX does not check its allocations (a failed one crashes its threads), so probe beforehand.
void check_memory(size_t bytes) {
  constexpr size_t slack = size_t{1} << 26;  // always available; covers temporaries of op builders
  if (bytes < slack) return;
  const auto can_allocate = [bytes] {
    const std::unique_ptr<void, void (*)(void*)> probe(std::malloc(bytes + slack), std::free);
    return probe != nullptr;
  };
  if (can_allocate()) return;
  mx::clear_cache();
  if (!can_allocate())
    fail(Code::out_of_memory,
         "[run] mlx: " + std::to_string(bytes) + " bytes could not be allocated. Free some, or call it with smaller sizes.");
}

// For profiling: evaluates a node, and the states that it updates, on its own and records its time.
void evaluate(const Node& node, const Values& values, Trace& trace) {
  std::vector<Array> all{*values.arrays[node.outs[0]]};
  for (int32_t id : node.ins) {
    if (id == kNone || !values.states[id]) continue;
    all.push_back(values.states[id]->data);
    if (values.states[id]->scales) all.push_back(*values.states[id]->scales);
  }
  const int64_t start = trace.now();
  mx::eval(all);
  trace.nodes.push_back({&node, start, trace.now()});
}

void MlxEngine::build_graph(const MlxPlan& plan, const Call& call, Values& values) const {
  for (size_t i = 0; i < program_.contract.inputs.size(); ++i) {
    const Value& value = program_.values[i];
    if (value.dtype == DType::integer) continue;
    const mx::Shape shape = shape_of(value, call.sizes);
    if (!call.inputs[i] && count_of(shape))
      fail(Code::invalid_argument, "[run] input " + std::to_string(i) + " '" + value.name + "': its data is missing.");
    bool copied = false;
    values.arrays[i] = wrap(call.inputs[i], shape, value.dtype, &copied);
    if (!copied) values.caller_inputs.push_back(*values.arrays[i]);
  }
  size_t next_alias = 0;
  const auto apply_aliases = [&](size_t count) {
    for (; next_alias < count; ++next_alias) {
      const auto [out, from] = plan.aliases[next_alias];
      values.arrays[out] = values.arrays[from];
    }
  };
  for (size_t i = 0; i < plan.steps.size(); ++i) {
    const Step& step = plan.steps[i];
    apply_aliases(plan.aliases_before[i]);
    for (int32_t id : step.node->ins)  // current value of a state, after earlier nodes
      if (id != kNone && values.states[id] && !values.states[id]->scales) values.arrays[id] = values.states[id]->data;
    std::optional<Array> result;
    {
      Op op(program_, step, call.sizes, values);
      for (int32_t id : step.node->ins)
        if (id != kNone && values.states[id]) values.arrays[id].reset();
      result = op.run();
    }
    values.arrays[step.node->outs[0]] = std::move(result);
    if (call.trace) evaluate(*step.node, values, *call.trace);
    for (int32_t id : step.last_uses)
      if (program_.values[id].kind == Value::Kind::temp || program_.values[id].kind == Value::Kind::input)
        values.arrays[id].reset();
  }
  apply_aliases(plan.aliases_before.back());
}

void MlxEngine::run(Plan& any, const Call& call) {
  const auto& plan = static_cast<const MlxPlan&>(any);
  streams_.use();
  try {
    std::vector<std::optional<Array>> results(program_.results.size());
    std::vector<Array> all;
    std::vector<DeferredCheck> deferred_checks;
    std::vector<Array> caller_inputs;
    {
      Values values = persistent_;
      build_graph(plan, call, values);
      for (size_t i = 0; i < results.size(); ++i) {
        if (const int32_t id = program_.results[i]; id != kNone) {
          if (!values.arrays[id]) fail(Code::internal, "[run] mlx: result " + std::to_string(i) + " was not made.");
          all.push_back(*(results[i] = mx::contiguous(*values.arrays[id])));
        }
      }
      deferred_checks = std::move(values.deferred_checks);
      caller_inputs = std::move(values.caller_inputs);
    }  // releases intermediate arrays, so that MLX can reuse their buffers during evaluation
    for (const DeferredCheck& check : deferred_checks) all.push_back(check.ok);
    for (const auto& state : persistent_.states) {
      if (!state) continue;
      all.push_back(state->data);
      if (state->scales) all.push_back(*state->scales);
    }
    check_memory(plan.required_bytes);
    mx::eval(all);
    for (DeferredCheck& check : deferred_checks)
      if (!check.ok.item<bool>()) fail(Code::invalid_argument, check.sentence());
    copy_outputs(call, results);
  } catch (const Error&) {
    save_states();
    throw;
  } catch (const std::bad_alloc&) {
    save_states();
    fail(Code::out_of_memory, "[run] mlx: the system has no memory left. Free some, or call it with smaller sizes.");
  } catch (const std::exception& e) {
    save_states();
    std::string fact = e.what();
    while (!fact.empty() && fact.back() == '.') fact.pop_back();
    fail(Code::internal, "[run] mlx: " + fact + ". Please report this, with the program that keepdim inspect prints.");
  }
}

void MlxEngine::copy_outputs(const Call& call, std::vector<std::optional<Array>>& results) const {
  for (size_t i = 0; i < results.size(); ++i) {
    if (!results[i] || results[i]->nbytes() == 0) continue;
    if (!call.outputs[i])
      fail(Code::invalid_argument,
           "[run] output " + std::to_string(i) + " '" + program_.contract.outputs[i].name + "': its data is missing.");
    std::memcpy(call.outputs[i], results[i]->data<char>(), results[i]->nbytes());
  }
}

// After a failed call: keeps the states that can be evaluated and resets the others to zeros.
void MlxEngine::save_states() {
  for (const auto& state : persistent_.states) {
    if (!state) continue;
    const auto eval_or_reset = [](Array& x) {
      try {
        mx::eval(x);
      } catch (const std::exception&) {
        x = mx::zeros(x.shape(), x.dtype());
        mx::eval(x);
      }
    };
    eval_or_reset(state->data);
    if (state->scales) eval_or_reset(*state->scales);
  }
}

}  // namespace

const OpBuilder* find_builder(const std::string& op) {
  static const auto index = [] {
    std::unordered_map<std::string, const OpBuilder*> map;
    for (auto* table : kTables)
      for (size_t i = 0; i < table().count; ++i)
        if (const OpBuilder& op = table().ops[i]; !find_rule(op.name) || !map.emplace(op.name, &op).second)
          fail(Code::internal, std::string("[load] mlx: two builders or no rule for the op ") + op.name + ".");
    return map;
  }();
  const auto it = index.find(op);
  return it == index.end() ? nullptr : it->second;
}

namespace {

// Runs when the library is loaded.
const bool registered = [] {
  register_engine({
      "mlx",
      "KeepdimMlx",
      check,
      [](const Program& program, const Weights& weights, const Release& release) -> std::unique_ptr<Engine> {
        return std::make_unique<MlxEngine>(program, weights, release);
      },
      op_names,
      [] { return std::map<std::string, int64_t>{}; },
      [](const std::map<std::string, int64_t>& changed) {
        if (!changed.empty())
          fail(Code::invalid_argument,
               "[options] threshold '" + changed.begin()->first + "': unknown on mlx, which has no thresholds.");
      },
      [](DType dtype) { return !has_mlx_format(dtype); },
  });
  return true;
}();

}  // namespace
}  // namespace mlx
}  // namespace keepdim
