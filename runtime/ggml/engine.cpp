// The ggml engine: weight packing, the arena and work buffer shared by all plans of a delegate, and calls of a plan, whose steps
// step_sequence.cpp runs.
#include "ggml/engine.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <optional>
#include <tuple>
#include <utility>

#include "core/lock.h"
#include "core/registry.h"
#include "ggml/build.h"
#include "ggml/growing_buffer.h"
#include "ggml/kernels/gemm.h"
#include "ggml/ops/ops.h"
#include "ggml/thresholds.h"

namespace keepdim {
namespace ggml {
namespace {

thread_local int guard_depth = 0;
ggml_abort_callback_t previous_callback = nullptr;

// Second line of defence: op builders check before they call ggml, so this should not be reached.
void on_abort(const char* message) {
  if (guard_depth) throw Error(Code::internal, std::string("[build] ggml: ") + message);
  if (previous_callback) previous_callback(message);
  std::fprintf(stderr, "%s\n", message);  // ggml aborts the process when this returns
}

// Threads wait for each other around every step that they share. On a machine whose cores are busy with other processes, each
// barrier waits until all threads are scheduled, and a single thread is much faster. Falls back to one thread for a while if that
// happens.
class ContentionBackoff {
 public:
  int threads(int wanted) { return wanted > 1 && single_runs_ > 0 ? (--single_runs_, 1) : wanted; }

  // Records the time of a multi-threaded run. Two runs in a row that are far slower than expected mean contention.
  void record(GgmlPlan& plan, double seconds) {
    const double expected = std::min(plan.best, plan.work / kMinThroughput);
    plan.best = std::min(plan.best, seconds);
    slow_runs_ = seconds > kMinSeconds && seconds > 4 * expected ? slow_runs_ + 1 : 0;
    if (slow_runs_ == 0) backoff_runs_ = kMinBackoff;
    if (slow_runs_ < 2) return;
    single_runs_ = backoff_runs_;
    backoff_runs_ = std::min(2 * backoff_runs_, kMaxBackoff);
  }

 private:
  static constexpr double kMinSeconds = 1e-3;    // shorter runs are ignored
  static constexpr double kMinThroughput = 1e9;  // multiply-adds per second; a lower bound for two threads
  static constexpr int kMinBackoff = 16, kMaxBackoff = 256;
  int slow_runs_ = 0, single_runs_ = 0,
      backoff_runs_ = kMinBackoff;  // consecutive slow runs; remaining single-threaded runs; length of the next backoff
};

// Receives ggml's abort callback, which is called after every node of the graph. Sequences of steps have recorded their times.
struct GraphTimer {
  const GgmlPlan& plan;
  NodeTimer nodes;
  size_t next = 0;

  static bool tick(void* data) {
    auto& timer = *static_cast<GraphTimer*>(data);
    timer.nodes.tick(timer.plan.last_nodes[timer.next++]);
    return false;
  }
};

class GgmlEngine final : public Engine {
 public:
  GgmlEngine(const Program& program, const Weights& weights, const Release& release)
      : program_(program), nodes_(resolve(program.nodes)), constants_(load(weights)), build_(program_, constants_) {
    pack(release);
  }

  std::unique_ptr<Plan> build(const int64_t* sizes, size_t memory_limit) override {
    return build_.build(nodes_, sizes, memory_limit);
  }

  void run(Plan& any, const Call& call) override {
    auto& plan = static_cast<GgmlPlan&>(any);
    for (const auto& data : plan.data) *data.where = call.sizes[data.dim];
    patch(plan, call);
    compute(plan, call.trace);
    if (plan.error.job) {
      plan.error.job = nullptr;
      fail(Code::invalid_argument, plan.error.sentence);
    }
  }

  size_t arena_bytes() const override { return arena_.bytes() + work_.bytes(); }
  size_t packed_bytes() const override { return packed_bytes_; }

 private:
  std::vector<const void*> load(const Weights& weights);
  std::map<std::string, size_t> count_reads();
  void pack(const Release& release);
  size_t packed_size(const Weight& w) const;
  void pack_one(const Weight& w, float* to, std::vector<float>& widened);
  void patch(GgmlPlan& plan, const Call& call);
  void compute(GgmlPlan& plan, Trace* trace);

  const Program& program_;
  std::vector<ResolvedNode> nodes_;
  const std::vector<const void*> constants_;  // by value id
  Build build_;
  GrowingBuffer arena_, work_;
  ContentionBackoff backoff_;
  GrowingBuffer packed_;  // packed weights of matrix products
  size_t packed_bytes_ = 0;
};

std::vector<const void*> GgmlEngine::load(const Weights& weights) {
  std::vector<const void*> constants(program_.values.size(), nullptr);
  for (size_t i = 0; i < program_.values.size(); ++i) {
    const Value& value = program_.values[i];
    if (value.kind != Value::Kind::constant && value.kind != Value::Kind::state) continue;
    constants[i] = weights(value.key).data;  // aligned for its dtype by core/delegate.cpp
  }
  return constants;
}

// Number of uses of each constant by nodes and results, by key.
std::map<std::string, size_t> GgmlEngine::count_reads() {
  std::map<std::string, size_t> reads;
  const auto count = [&](int32_t id) {
    if (id != kNone && program_.values[id].kind == Value::Kind::constant) ++reads[program_.values[id].key];
  };
  for_each(nodes_, [&](const ResolvedNode& node) {
    for (int32_t id : node.node->ins) count(id);
    for (const Region& region : node.node->regions)
      for (int32_t id : region.results) count(id);
  });
  for (int32_t id : program_.results) count(id);
  return reads;
}

size_t GgmlEngine::packed_size(const Weight& w) const {
  const DType dtype = program_.values[w.value].dtype;
  const int64_t bytes = w.is_conv()       ? packed_conv_floats(w.conv) * static_cast<int64_t>(sizeof(float))
                        : w.keeps_float16 ? packed_float16_bytes(dtype, w.k, w.n)
                                          : packed_floats(w.k, w.n) * static_cast<int64_t>(sizeof(float));
  return round_up(static_cast<size_t>(bytes));
}

// Packs a weight into panels at `to`, converting it to f32 first if needed.
void GgmlEngine::pack_one(const Weight& w, float* to, std::vector<float>& widened) {
  const Value& value = program_.values[w.value];
  const void* data = constants_[w.value];
  if (w.keeps_float16)
    return pack_float16(reinterpret_cast<uint16_t*>(to), static_cast<const uint16_t*>(data), value.dtype, w.k, w.n);
  if (value.dtype != DType::f32) {
    widened.resize(static_cast<size_t>(w.k * w.n));
    const auto bytes = static_cast<int64_t>(dtype_bytes(value.dtype));
    converter(value.dtype, DType::f32)(widened.data(), sizeof(float), data, bytes, w.k * w.n);
    data = widened.data();
  }
  if (w.is_conv()) return pack_conv_weight(to, static_cast<const float*>(data), w.conv);
  constexpr int64_t width = sizeof(float);
  pack_weight(to, data, w.k, w.n, w.step * width, w.column * width);
}

// Packs the weights of matrix products into one allocation. An original without other uses is released right after packing,
// largest first, to keep the peak memory low.
void GgmlEngine::pack(const Release& release) {
  using Layout = std::tuple<int32_t, int64_t, int64_t, bool>;  // value, step, k, 16 bits: one value may have several layouts
  const auto layout_of = [](const Weight& w) { return Layout{w.value, w.step, w.k, w.keeps_float16}; };
  std::map<Layout, float*> panels;
  std::vector<std::pair<Weight, ResolvedNode*>> products;
  for_each(nodes_, [&](ResolvedNode& node) {
    const Weight w = weight_of(program_, *node.node);
    if (w.value == kNone) return;
    products.emplace_back(w, &node);
    if (panels.emplace(layout_of(w), nullptr).second) packed_bytes_ += packed_size(w);
  });
  const auto larger = [](const auto& a, const auto& b) { return a.first.k * a.first.n > b.first.k * b.first.n; };
  std::stable_sort(products.begin(), products.end(), larger);

  char* next = packed_.reserve(packed_bytes_);
  std::map<std::string, size_t> reads = count_reads();
  std::vector<float> widened;
  for (const auto& [w, node] : products) {
    const std::string& key = program_.values[w.value].key;
    size_t& left = reads[key];
    float*& to = panels[layout_of(w)];
    if (!to) {
      to = reinterpret_cast<float*>(std::exchange(next, next + packed_size(w)));
      pack_one(w, to, widened);
      for_each(nodes_, [&, &weight = w](ResolvedNode& other) {
        if (!reads_packed_rows(program_, *other.node, weight)) return;
        other.packed = to;
        --left;
      });
    }
    node->packed = to;
    node->winograd = w.conv.winograd;
    if (--left == 0) release(key);
  }
}

void GgmlEngine::patch(GgmlPlan& plan, const Call& call) {
  char* arena = arena_.reserve(static_cast<size_t>(plan.arena_bytes));
  if (plan.arena != arena) {
    for (const PointerPatch& p : plan.in_arena) *p.where = arena + p.offset;
    plan.arena = arena;
  }
  for (const PointerPatch& p : plan.in_inputs) {
    auto* data = static_cast<char*>(const_cast<void*>(call.inputs[p.index]));
    const Value& value = program_.values[p.index];
    if (!data || reinterpret_cast<uintptr_t>(data) % dtype_bytes(value.dtype))
      fail(Code::invalid_argument, "[run] input " + std::to_string(p.index) + " '" + value.name +
                                       "': its data is missing or not aligned to " + dtype_name(value.dtype) + ".");
    *p.where = data + p.offset;
  }
  for (const PointerPatch& p : plan.in_outputs) {
    auto* data = static_cast<char*>(call.outputs[p.index]);
    const Spec& spec = program_.contract.outputs[p.index];
    if (!data || reinterpret_cast<uintptr_t>(data) % dtype_bytes(spec.dtype))
      fail(Code::invalid_argument, "[run] output " + std::to_string(p.index) + " '" + spec.name +
                                       "': its data is missing or not aligned to " + dtype_name(spec.dtype) + ".");
    *p.where = data + p.offset;
  }
}

void GgmlEngine::compute(GgmlPlan& plan, Trace* trace) {
  const int threads = backoff_.threads(std::min(plan.threads, thread_limit()));
  if (threads != plan.compute.n_threads) plan.compute = ggml_graph_plan(plan.graph, threads, nullptr);
  plan.compute.work_data = reinterpret_cast<uint8_t*>(work_.reserve(plan.compute.work_size));
  ggml_cplan traced = plan.compute;
  std::optional<GraphTimer> timer;
  if (trace) {
    traced.abort_callback = GraphTimer::tick;
    traced.abort_callback_data = &timer.emplace(GraphTimer{plan, {*trace}});
  }
  plan.timer = timer ? &timer->nodes : nullptr;
  const auto start = std::chrono::steady_clock::now();
  if (ggml_graph_compute(plan.graph, &traced) != GGML_STATUS_SUCCESS)
    fail(Code::internal, "[run] ggml: the graph was not computed.");
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  if (threads > 1) backoff_.record(plan, took.count());
}

}  // namespace

int thread_limit() {
  // Threads do not survive a fork, and libgomp, which torch uses too, would wait for its old threads.
  if (forked()) return 1;
  const int wanted = options().threads;
  if (wanted > 0) return std::min(wanted, 512);
  static const int available = [] {
    cpu_set_t set;
    return sched_getaffinity(0, sizeof(set), &set) == 0 ? std::max(1, CPU_COUNT(&set)) : 1;
  }();
  return available;
}

AbortGuard::AbortGuard() { ++guard_depth; }
AbortGuard::~AbortGuard() { --guard_depth; }

}  // namespace ggml

const EngineInfo& ggml_engine() {
  static const EngineInfo info{
      "ggml",
      "KeepdimGgml",
      ggml::check,
      [](const Program& program, const Weights& weights, const Release& release) -> std::unique_ptr<Engine> {
        return std::make_unique<ggml::GgmlEngine>(program, weights, release);
      },
      ggml::op_names,
      ggml::thresholds,
      ggml::set_thresholds,
      nullptr,
      ggml::activation_format,
  };
  return info;
}

void register_ggml_engine() {
  register_engine(ggml_engine());
  ggml::previous_callback = ggml_set_abort_callback(ggml::on_abort);
}

}  // namespace keepdim
