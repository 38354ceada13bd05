// The ggml engine: weights, one arena and one work buffer for all plans of a delegate, and the run itself.
#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <optional>
#include <tuple>
#include <utility>

#include "build.h"
#include "ggml_engine.h"
#include "lock.h"
#include "splits.h"

namespace keepdim {
namespace ggml {
namespace {

constexpr size_t kAlign = 64;
constexpr size_t kHuge = size_t{1} << 21;  // of a large page: weights that are streamed through meet fewer of them

constexpr size_t rounded(size_t bytes, size_t to = kAlign) { return (bytes + to - 1) / to * to; }

thread_local int guarded = 0;
ggml_abort_callback_t previous_callback = nullptr;

// The second net: rows check before they call ggml, so nothing should come here.
void on_abort(const char* message) {
  if (guarded) throw Error(Code::internal, std::string("[build] ggml: ") + message);
  if (previous_callback) previous_callback(message);
  std::fprintf(stderr, "%s\n", message);  // ggml ends the process when this returns
}

// Aligned bytes that only grow; what they held is lost when they do.
class Memory {
 public:
  ~Memory() { std::free(data_); }
  Memory() = default;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  char* reserve(size_t bytes) {
    if (bytes <= bytes_) return data_;
    std::free(data_);
    bytes_ = 0;
    const size_t align = bytes < kHuge ? kAlign : kHuge;
    data_ = static_cast<char*>(std::aligned_alloc(align, rounded(bytes, align)));
    if (!data_)
      fail(Code::out_of_memory, "[run] ggml: " + std::to_string(rounded(bytes)) + " bytes could not be allocated.");
    madvise(data_, bytes / kHuge * kHuge, MADV_HUGEPAGE);  // whole ones; a system without them says no, and that is all
    bytes_ = rounded(bytes);
    return data_;
  }
  size_t bytes() const { return bytes_; }

 private:
  char* data_ = nullptr;
  size_t bytes_ = 0;
};

// Threads wait for each other after every step. Where other processes have the cores, a step takes as long as it takes
// until all are scheduled, and one thread alone is many times faster.
class Crowd {
 public:
  int threads(int wanted) { return wanted > 1 && alone_ > 0 ? (--alone_, 1) : wanted; }

  // A run with several threads took so long. Twice in a row far more than before, or than it can need: crowded.
  void note(GgmlPlan& plan, double seconds) {
    const double usual = std::min(plan.best, plan.work / kSlowest);
    plan.best = std::min(plan.best, seconds);
    slow_ = seconds > kLongest && seconds > 4 * usual ? slow_ + 1 : 0;
    if (slow_ == 0) next_ = kFirst;
    if (slow_ < 2) return;
    alone_ = next_;
    next_ = std::min(2 * next_, kMost);
  }

 private:
  static constexpr double kLongest = 1e-3;  // seconds; less is not worth it
  static constexpr double kSlowest = 1e9;   // multiply-adds a second that any two threads reach
  static constexpr int kFirst = 16, kMost = 256;
  int slow_ = 0, alone_ = 0, next_ = kFirst;  // slow runs in a row; runs left with one thread; and the next time
};

// ggml asks after each of its nodes whether to go on: that is when the next one begins. Steps of one node are one event.
struct Watch {
  const GgmlPlan& plan;
  Trace& trace;
  int64_t last = trace.now();
  size_t next = 0;

  static bool tick(void* data) {
    auto& watch = *static_cast<Watch*>(data);
    std::vector<Trace::Event>& nodes = watch.trace.nodes;
    const Node* node = watch.next < watch.plan.makers.size() ? watch.plan.makers[watch.next++] : nullptr;
    const int64_t now = watch.trace.now();
    if (nodes.empty() || nodes.back().node != node) nodes.push_back({node, watch.last, now});
    nodes.back().end = watch.last = now;
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
  void pack(const Release& release);
  void patch(GgmlPlan& plan, const Call& call);
  void compute(GgmlPlan& plan, Trace* trace);

  const Program& program_;
  std::vector<Resolved> nodes_;
  const std::vector<const void*> constants_;  // by value id
  Build build_;
  Memory arena_, work_;
  Crowd crowd_;
  Memory packed_;  // weights of products
  size_t packed_bytes_ = 0;
};

std::vector<const void*> GgmlEngine::load(const Weights& weights) {
  std::vector<const void*> constants(program_.values.size(), nullptr);
  for (size_t i = 0; i < program_.values.size(); ++i) {
    const Value& value = program_.values[i];
    if (value.kind != Value::Kind::constant && value.kind != Value::Kind::state) continue;
    constants[i] = weights(value.key).data;  // aligned for its dtype by the core
  }
  return constants;
}

// Weights of products, once, as the product reads them, in one piece of memory. An original that nothing else reads is let
// go, one at a time and the largest first, so that there is never much more in memory than in the end.
void GgmlEngine::pack(const Release& release) {
  std::map<std::string, size_t> reads;  // of originals, by key
  const auto count = [&](int32_t id) {
    if (id != kNone && program_.values[id].kind == Value::Kind::constant) ++reads[program_.values[id].key];
  };
  for_each(nodes_, [&](const Resolved& node) {
    for (int32_t id : node.node->ins) count(id);
    for (const Region& region : node.node->regions)
      for (int32_t id : region.results) count(id);
  });
  for (int32_t id : program_.results) count(id);

  using Form = std::tuple<int32_t, int64_t, int64_t>;  // value, stride and depth: one may be read both ways
  std::map<Form, float*> forms;
  std::vector<std::pair<Weight, Resolved*>> products;
  const auto bytes_of = [](const Weight& w) { return rounded(packed_floats(w.k, w.n) * sizeof(float)); };
  for_each(nodes_, [&](Resolved& node) {
    const Weight w = weight_of(program_, *node.node);
    if (w.value == kNone) return;
    products.emplace_back(w, &node);
    if (forms.emplace(Form{w.value, w.step, w.k}, nullptr).second) packed_bytes_ += bytes_of(w);
  });
  const auto larger = [](const auto& a, const auto& b) { return a.first.k * a.first.n > b.first.k * b.first.n; };
  std::stable_sort(products.begin(), products.end(), larger);
  char* next = packed_.reserve(packed_bytes_);

  std::vector<float> wide;
  for (const auto& product : products) {
    const Weight& w = product.first;
    const Value& value = program_.values[w.value];
    size_t& left = reads[value.key];
    float*& to = forms[{w.value, w.step, w.k}];
    if (!to) {
      const void* data = constants_[w.value];
      if (value.dtype != DType::f32) {
        wide.resize(static_cast<size_t>(w.k * w.n));
        const auto bytes = static_cast<int64_t>(dtype_bytes(value.dtype));
        converter(value.dtype, DType::f32)(wide.data(), sizeof(float), data, bytes, w.k * w.n);
        data = wide.data();
      }
      to = reinterpret_cast<float*>(std::exchange(next, next + bytes_of(w)));
      constexpr int64_t width = sizeof(float);
      pack_weight(to, data, w.k, w.n, w.step * width, w.column * width);
      for_each(nodes_, [&](Resolved& other) {
        if (!looks_up(program_, *other.node, w)) return;
        other.packed = to;
        --left;
      });
    }
    product.second->packed = to;
    if (--left == 0) release(value.key);
  }
}

void GgmlEngine::patch(GgmlPlan& plan, const Call& call) {
  char* arena = arena_.reserve(static_cast<size_t>(plan.arena_bytes));
  if (plan.arena != arena) {
    for (const Place& p : plan.in_arena) *p.where = arena + p.offset;
    plan.arena = arena;
  }
  for (const Place& p : plan.in_inputs) {
    auto* data = static_cast<char*>(const_cast<void*>(call.inputs[p.index]));
    const Value& value = program_.values[p.index];
    if (!data || reinterpret_cast<uintptr_t>(data) % dtype_bytes(value.dtype))
      fail(Code::invalid_argument, "[run] input " + std::to_string(p.index) + " '" + value.name +
                                       "': its data is missing or not aligned to " + dtype_name(value.dtype) + ".");
    *p.where = data + p.offset;
  }
  for (const Place& p : plan.in_outputs) {
    auto* data = static_cast<char*>(call.outputs[p.index]);
    const Spec& spec = program_.contract.outputs[p.index];
    if (!data || reinterpret_cast<uintptr_t>(data) % dtype_bytes(spec.dtype))
      fail(Code::invalid_argument, "[run] output " + std::to_string(p.index) + " '" + spec.name +
                                       "': its data is missing or not aligned to " + dtype_name(spec.dtype) + ".");
    *p.where = data + p.offset;
  }
}

void GgmlEngine::compute(GgmlPlan& plan, Trace* trace) {
  const int threads = crowd_.threads(std::min(plan.threads, thread_limit()));
  if (threads != plan.compute.n_threads) plan.compute = ggml_graph_plan(plan.graph, threads, nullptr);
  plan.compute.work_data = reinterpret_cast<uint8_t*>(work_.reserve(plan.compute.work_size));
  ggml_cplan traced = plan.compute;
  std::optional<Watch> watch;
  if (trace) {
    traced.abort_callback = Watch::tick;
    traced.abort_callback_data = &watch.emplace(Watch{plan, *trace});
  }
  const auto start = std::chrono::steady_clock::now();
  if (ggml_graph_compute(plan.graph, &traced) != GGML_STATUS_SUCCESS)
    fail(Code::internal, "[run] ggml: the graph was not computed.");
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  if (threads > 1) crowd_.note(plan, took.count());
}

}  // namespace

int thread_limit() {
  // Threads do not follow a process into its fork, and libgomp, which torch uses too, would wait there for those it had.
  if (forked()) return 1;
  const int wanted = options().threads;
  if (wanted > 0) return std::min(wanted, 512);
  static const int available = [] {
    cpu_set_t set;
    return sched_getaffinity(0, sizeof(set), &set) == 0 ? std::max(1, CPU_COUNT(&set)) : 1;
  }();
  return available;
}

Guard::Guard() { ++guarded; }
Guard::~Guard() { --guarded; }

}  // namespace ggml

const EngineInfo& ggml_engine() {
  static const EngineInfo info{
      "ggml",
      "KeepdimGgml",
      ggml::check,
      [](const Program& program, const Weights& weights, const Release& release) -> std::unique_ptr<Engine> {
        return std::make_unique<ggml::GgmlEngine>(program, weights, release);
      },
      ggml::row_names,
      ggml::splits,
      ggml::set_splits,
  };
  return info;
}

void register_ggml_engine() {
  register_engine(ggml_engine());
  ggml::previous_callback = ggml_set_abort_callback(ggml::on_abort);
}

}  // namespace keepdim
