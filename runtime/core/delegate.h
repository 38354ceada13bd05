// A loaded delegate: verify → bind → check → plan → run. Independent of ExecuTorch and of engine libraries.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/engine.h"
#include "core/lock.h"
#include "core/plan_cache.h"
#include "core/program.h"
#include "core/states.h"

namespace keepdim {

struct Counters {
  uint64_t id = 0;  // delegate id, unique in the process, increasing
  std::string engine;
  uint64_t calls = 0;
  uint64_t built = 0, reused = 0, evicted = 0;
  uint64_t plans = 0, plan_bytes = 0, arena_bytes = 0, weight_bytes = 0, packed_bytes = 0, state_bytes = 0;
};

// Callbacks to the caller: resize an output and get its memory, or set an integer output.
class Outputs {
 public:
  virtual ~Outputs() = default;
  virtual void* resize(size_t output, const int64_t* sizes, size_t rank) = 0;
  virtual void set_integer(size_t output, int64_t value) = 0;
};

class KEEPDIM_API Delegate {
 public:
  Delegate(
      const EngineInfo& engine, std::string_view json, const Weights& weights,
      std::shared_ptr<States> states = std::make_shared<States>(), const Release& release = [](const std::string&) {});
  ~Delegate();
  Delegate(const Delegate&) = delete;
  Delegate& operator=(const Delegate&) = delete;

  const Program& program() const { return program_; }
  // Calls are serialised. Throws Error; the delegate stays usable.
  void run(const Argument* args, size_t count, Outputs& outputs, Trace* trace = nullptr);
  Counters counters() const;                    // as of the last call
  uint64_t id() const { return counters_.id; }  // unique in the process
  void clear_plans();

 private:
  Weights load_weights(const Weights& weights, const Release& release);
  void add_key_dims(int32_t id);
  void collect_key_dims(const std::vector<Node>& nodes);
  Plan& plan(Trace* trace);  // for sizes_; cached or built
  void publish();            // makes the counters readable without waiting for a running call

  const EngineInfo& info_;
  const Program program_;
  mutable Lock lock_{"delegate"};
  std::vector<DimId> key_dims_;
  std::shared_ptr<States> states_;
  std::map<std::string, std::unique_ptr<char[]>> copies_;  // copies of misaligned weights
  std::unique_ptr<Engine> engine_;
  PlanCache cache_;  // declared after the engine: plans are destroyed first
  Counters counters_;
  std::vector<int64_t> bound_, sizes_;  // of the current call: symbols; all dims
  PlanCache::Key key_;
  std::vector<const void*> inputs_;
  std::vector<void*> outputs_;
  std::vector<int64_t> shape_;
};

KEEPDIM_API std::vector<Counters> live_counters();  // of all live delegates, by id

}  // namespace keepdim
