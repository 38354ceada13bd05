// The MLX engine: weights and states as MLX's arrays, plans that hold what sizes decide, and the run itself, which puts
// the program together and evaluates it once.
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <unordered_map>

#include "lock.h"
#include "op.h"
#include "weights.h"

namespace keepdim {
namespace mlx {
namespace {

constexpr Table (*kTables[])() = {map_rows, shape_rows, reduce_rows, index_rows, product_rows, window_rows, sample_rows};

void check(const Program& program) {
  check_program(program, "mlx", [](const std::string& op) { return find_row(op) != nullptr; });
}

std::vector<std::string> row_names() {
  std::vector<std::string> names;
  for (auto* table : kTables)
    for (size_t i = 0; i < table().count; ++i) names.emplace_back(table().rows[i].name);
  return names;
}

// What an engine's arrays are computed on. MLX else makes a stream for every thread that calls it, with a thread of its own
// that never ends. A delegate runs one call at a time; streams of one that is gone serve the next.
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
  // The threads of a stream do not follow a process into its fork: a call there would wait for them without end.
  static void check_process() {
    static const pid_t first = getpid();
    if (getpid() == first) return;
    fail(Code::not_supported, "[run] mlx: was used before this process was forked, and its threads are not in it. Start processes with spawn.");
  }
  static TableLock& lock() { return *new_once<TableLock>(); }
  static std::vector<std::vector<mx::Stream>>& idle() { return *new_once<std::vector<std::vector<mx::Stream>>>(); }
  template <class T>
  static T* new_once() {  // never destroyed: engines may end after this library's statics
    static T* const one = new T();
    return one;
  }
  std::vector<mx::Stream> all_;
};

struct MlxPlan final : Plan {
  std::vector<Step> steps;                               // of the branches taken
  std::vector<std::pair<int32_t, int32_t>> same;         // results of a cond, and what they are
  std::vector<size_t> same_before;                       // how many of those stand before a step
  size_t needs = 0;                                      // bytes alive at once, at most
  size_t bytes() const override { return sizeof(*this) + steps.size() * (sizeof(Step) + 64); }
};

class MlxEngine final : public Engine {
 public:
  MlxEngine(const Program& program, const Weights& weights, const Release& release) : program_(program) {
    fixed_.arrays.resize(program.values.size());
    fixed_.packed.resize(program.values.size());
    fixed_.states.resize(program.values.size());
    streams_.use();
    load(weights, release);
  }

  std::unique_ptr<Plan> build(const int64_t* sizes, size_t memory_limit) override;
  void run(Plan& plan, const Call& call) override;
  size_t arena_bytes() const override { return 0; }  // MLX has one pool of memory for the whole process
  size_t packed_bytes() const override { return own_bytes_; }

 private:
  void load(const Weights& weights, const Release& release);
  void add_steps(MlxPlan& plan, const std::vector<Node>& nodes, const int64_t* sizes);
  mx::Shape shape_of(const Value& value, const int64_t* sizes) const;
  size_t bytes_of(int32_t id, const int64_t* sizes, size_t limit) const;
  void note_last_uses(MlxPlan& plan) const;
  size_t most_alive(const MlxPlan& plan, const int64_t* sizes, size_t limit) const;
  void put_together(const MlxPlan& plan, const Call& call, Values& values) const;
  void give(const Call& call, std::vector<std::optional<Array>>& results) const;
  void save_states();

  const Program& program_;
  Streams streams_;
  Values fixed_;                            // weights and states
  std::map<int32_t, Packed> packed_;
  size_t own_bytes_ = 0;
};

// Weights are read where they lie where MLX can do that, on Apple's GPUs; it says that it made a copy by letting go of the
// original, which the host then can, too.
void MlxEngine::load(const Weights& weights, const Release& release) {
  std::map<std::string, int> left;  // by key: values that need it yet, and those that read it where it lies
  for (const Value& value : program_.values) left[value.key] += value.kind == Value::Kind::constant;
  for (size_t i = 0; i < program_.values.size(); ++i) {
    const Value& value = program_.values[i];
    const auto id = static_cast<int32_t>(i);
    if (value.kind != Value::Kind::constant && value.kind != Value::Kind::state) continue;
    const Bytes bytes = weights(value.key);
    const mx::Shape shape = shape_of(value, nullptr);
    if (value.kind == Value::Kind::state) {
      fixed_.states[i] = state_of(bytes, value.dtype, shape);
      continue;
    }
    bool copied = true;
    if (is_quantised(value.dtype)) {
      if (packs(value.dtype) && shape.size() == 2) {
        const Packed& packed = packed_.emplace(id, pack(value.dtype, bytes.data, shape)).first->second;
        fixed_.packed[i] = &packed;
        own_bytes_ += packed.quants.nbytes() + packed.scales.nbytes() + packed.biases.nbytes();
      } else {
        fixed_.arrays[i] = widened(value.dtype, bytes.data, shape);
        own_bytes_ += fixed_.arrays[i]->nbytes();
      }
    } else {
      fixed_.arrays[i] = wrap(bytes.data, shape, value.dtype, &copied);
      if (copied) own_bytes_ += bytes.size;
    }
    if (copied && --left[value.key] == 0) release(value.key);
  }
}

mx::Shape MlxEngine::shape_of(const Value& value, const int64_t* sizes) const {
  mx::Shape shape;
  for (DimId id : value.dims) {
    const int64_t size = sizes ? sizes[id] : program_.contract.dims.node(id).value;
    if (size > INT32_MAX)
      fail(Code::not_supported, "[plan] mlx: '" + value.name + "' has a size of " + std::to_string(size) + ", and MLX counts with 32 bits. Call it with smaller sizes.");
    shape.push_back(static_cast<int32_t>(size));
  }
  return shape;
}

// ---- plans

std::unique_ptr<Plan> MlxEngine::build(const int64_t* sizes, size_t memory_limit) {
  auto plan = std::make_unique<MlxPlan>();
  add_steps(*plan, program_.nodes, sizes);
  plan->same_before.push_back(plan->same.size());
  note_last_uses(*plan);
  plan->needs = most_alive(*plan, sizes, memory_limit);
  return plan;
}

void MlxEngine::add_steps(MlxPlan& plan, const std::vector<Node>& nodes, const int64_t* sizes) {
  for (const Node& node : nodes) {
    if (is_cond(node)) {
      const Region& region = taken(node, sizes);
      add_steps(plan, region.nodes, sizes);
      for (size_t i = 0; i < node.outs.size(); ++i) plan.same.emplace_back(node.outs[i], region.results[i]);
      continue;
    }
    const Value& value = program_.values[node.outs[0]];
    plan.same_before.push_back(plan.same.size());
    plan.steps.push_back({&node, find_row(node.op), find_rule(node.op), shape_of(value, sizes), value.dtype, {}});
  }
}

// An array that is still held is not overwritten by what follows from it.
void MlxEngine::note_last_uses(MlxPlan& plan) const {
  std::vector<char> read(program_.values.size(), 0);
  for (int32_t id : program_.results)
    if (id != kNone) read[id] = 1;
  for (const auto& [out, from] : plan.same) read[from] = 1;
  for (auto step = plan.steps.rbegin(); step != plan.steps.rend(); ++step)
    for (int32_t id : step->node->ins)
      if (id != kNone && !read[id]) read[id] = 1, step->done.push_back(id);
}

size_t MlxEngine::bytes_of(int32_t id, const int64_t* sizes, size_t limit) const {
  const Value& value = program_.values[id];
  size_t bytes = dtype_bytes(value.dtype);
  for (DimId dim : value.dims)
    if (__builtin_mul_overflow(bytes, static_cast<size_t>(sizes[dim]), &bytes)) over_limit("mlx", program_.contract, sizes, SIZE_MAX, limit);
  return bytes;
}

// What is alive at once, at most, before anything is allocated.
size_t MlxEngine::most_alive(const MlxPlan& plan, const int64_t* sizes, size_t limit) const {
  size_t alive = 0, most = 0;
  for (const Step& step : plan.steps) {
    if (__builtin_add_overflow(alive, bytes_of(step.node->outs[0], sizes, limit), &alive)) alive = SIZE_MAX;
    most = std::max(most, alive);
    if (most > limit) over_limit("mlx", program_.contract, sizes, most, limit);
    for (int32_t id : step.done)
      if (program_.values[id].kind == Value::Kind::temp) alive -= std::min(alive, bytes_of(id, sizes, limit));
  }
  return most;
}

// ---- runs

// MLX's threads write to what malloc gives, and die of nullptr: whether there is enough is asked before.
void need_memory(size_t bytes) {
  constexpr size_t small = size_t{1} << 26;  // what is there anyway, and what rows make beside their results
  if (bytes < small) return;
  const auto there = [bytes] {
    const std::unique_ptr<void, void (*)(void*)> room(std::malloc(bytes + small), std::free);
    return room != nullptr;
  };
  if (there()) return;
  mx::clear_cache();
  if (!there()) fail(Code::out_of_memory, "[run] mlx: " + std::to_string(bytes) + " bytes could not be allocated. Free some, or call it with smaller sizes.");
}

// A node's own time, where it is asked for: it is computed on its own then, with what it changes.
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

void MlxEngine::put_together(const MlxPlan& plan, const Call& call, Values& values) const {
  for (size_t i = 0; i < program_.contract.inputs.size(); ++i) {
    const Value& value = program_.values[i];
    if (value.dtype == DType::integer) continue;
    const mx::Shape shape = shape_of(value, call.sizes);
    if (!call.inputs[i] && count_of(shape))
      fail(Code::invalid_argument, "[run] input " + std::to_string(i) + " '" + value.name + "': its data is missing.");
    bool copied = false;
    values.arrays[i] = wrap(call.inputs[i], shape, value.dtype, &copied);
    if (!copied) values.callers.push_back(*values.arrays[i]);
  }
  size_t same = 0;
  const auto name_results = [&](size_t count) {
    for (; same < count; ++same) {
      const auto [out, from] = plan.same[same];
      values.arrays[out] = values.arrays[from];
    }
  };
  for (size_t i = 0; i < plan.steps.size(); ++i) {
    const Step& step = plan.steps[i];
    name_results(plan.same_before[i]);
    for (int32_t id : step.node->ins)  // a state is what the nodes before made of it
      if (id != kNone && values.states[id] && !values.states[id]->scales) values.arrays[id] = values.states[id]->data;
    std::optional<Array> made;
    {
      Op op(program_, step, call.sizes, values);
      for (int32_t id : step.node->ins)
        if (id != kNone && values.states[id]) values.arrays[id].reset();
      made = op.run();
    }
    values.arrays[step.node->outs[0]] = std::move(made);
    if (call.trace) evaluate(*step.node, values, *call.trace);
    for (int32_t id : step.done)
      if (program_.values[id].kind == Value::Kind::temp || program_.values[id].kind == Value::Kind::input) values.arrays[id].reset();
  }
  name_results(plan.same_before.back());
}

void MlxEngine::run(Plan& any, const Call& call) {
  const auto& plan = static_cast<const MlxPlan&>(any);
  streams_.use();
  try {
    std::vector<std::optional<Array>> results(program_.results.size());
    std::vector<Array> all;
    std::vector<Doubt> doubts;
    std::vector<Array> callers;
    {
      Values values = fixed_;
      put_together(plan, call, values);
      for (size_t i = 0; i < results.size(); ++i) {
        if (const int32_t id = program_.results[i]; id != kNone) {
          if (!values.arrays[id]) fail(Code::internal, "[run] mlx: result " + std::to_string(i) + " was not made.");
          all.push_back(*(results[i] = mx::contiguous(*values.arrays[id])));
        }
      }
      doubts = std::move(values.doubts);
      callers = std::move(values.callers);
    }  // what is not held any more can be overwritten while it is computed
    for (const Doubt& doubt : doubts) all.push_back(doubt.fine);
    for (const auto& state : fixed_.states) {
      if (!state) continue;
      all.push_back(state->data);
      if (state->scales) all.push_back(*state->scales);
    }
    need_memory(plan.needs);
    mx::eval(all);
    for (Doubt& doubt : doubts)
      if (!doubt.fine.item<bool>()) fail(Code::invalid_argument, doubt.sentence());
    give(call, results);
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

void MlxEngine::give(const Call& call, std::vector<std::optional<Array>>& results) const {
  for (size_t i = 0; i < results.size(); ++i) {
    if (!results[i] || results[i]->nbytes() == 0) continue;
    if (!call.outputs[i]) fail(Code::invalid_argument, "[run] output " + std::to_string(i) + " '" + program_.contract.outputs[i].name + "': its data is missing.");
    std::memcpy(call.outputs[i], results[i]->data<char>(), results[i]->nbytes());
  }
}

// A state that a failed call left without a value begins again as zeros; one that has a value keeps it.
void MlxEngine::save_states() {
  for (const auto& state : fixed_.states) {
    if (!state) continue;
    const auto made = [](Array& x) {
      try {
        mx::eval(x);
      } catch (const std::exception&) {
        x = mx::zeros(x.shape(), x.dtype());
        mx::eval(x);
      }
    };
    made(state->data);
    if (state->scales) made(*state->scales);
  }
}

}  // namespace

const Row* find_row(const std::string& op) {
  static const auto index = [] {
    std::unordered_map<std::string, const Row*> map;
    for (auto* table : kTables)
      for (size_t i = 0; i < table().count; ++i)
        if (const Row& row = table().rows[i]; !find_rule(row.name) || !map.emplace(row.name, &row).second)
          fail(Code::internal, std::string("[load] mlx: two rows of the name ") + row.name + ", or no rule.");
    return map;
  }();
  const auto it = index.find(op);
  return it == index.end() ? nullptr : it->second;
}

namespace {

// When the library is loaded.
const bool registered = [] {
  register_engine({
      "mlx",
      "KeepdimMlx",
      check,
      [](const Program& program, const Weights& weights, const Release& release) -> std::unique_ptr<Engine> {
        return std::make_unique<MlxEngine>(program, weights, release);
      },
      row_names,
      [] { return std::map<std::string, int64_t>{}; },
      [](const std::map<std::string, int64_t>& changed) {
        if (!changed.empty()) fail(Code::invalid_argument, "[options] split '" + changed.begin()->first + "': mlx has none of that name.");
      },
      [](DType dtype) { return !packs(dtype); },
  });
  return true;
}();

}  // namespace
}  // namespace mlx
}  // namespace keepdim
