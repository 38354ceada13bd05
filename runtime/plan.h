// A loaded delegate: verify → bind → check → plan → run. Knows neither ExecuTorch nor any engine's library.
#pragma once
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "engine.h"
#include "lock.h"
#include "program.h"

namespace keepdim {

struct Counters {
  uint64_t id = 0;      // of the delegate, unique in the process, in order of loading
  std::string engine;
  uint64_t calls = 0;
  uint64_t built = 0, reused = 0, evicted = 0;
  uint64_t plans = 0, plan_bytes = 0, arena_bytes = 0, weight_bytes = 0, packed_bytes = 0, state_bytes = 0;
};

// Plans by the values of the dims that building reads. The whole key is compared; least recently used go first.
class PlanCache {
 public:
  using Key = std::vector<int64_t>;
  Plan* find(const Key& key);
  // Keeps the plan just added even if it alone is over the limit. Returns how many were evicted.
  size_t insert(const Key& key, std::unique_ptr<Plan> plan, size_t limit);
  size_t size() const { return plans_.size(); }
  size_t bytes() const { return bytes_; }
  void clear();

 private:
  struct Hash {
    size_t operator()(const Key& key) const;
  };
  struct Entry {
    Key key;
    std::unique_ptr<Plan> plan;
    size_t bytes;
  };
  std::list<Entry> plans_;  // most recently used first
  std::unordered_map<Key, std::list<Entry>::iterator, Hash> index_;
  size_t bytes_ = 0;
};

// What stays between calls, by key: zeros at first. Delegates of one file share it; they are run one at a time.
class KEEPDIM_API States {
 public:
  Bytes find(const std::string& key, size_t bytes);  // the same memory for the same key; another size is an error
  size_t bytes() const;

 private:
  struct Memory {
    std::unique_ptr<char, void (*)(void*)> data;
    size_t bytes;
    std::shared_ptr<void> own;
  };
  mutable Lock lock_{"state"};
  std::unordered_map<std::string, Memory> all_;
  size_t bytes_ = 0;
};

// The caller's side of one output: make it this size, say where to write.
class Outputs {
 public:
  virtual ~Outputs() = default;
  virtual void* resize(size_t output, const int64_t* sizes, size_t rank) = 0;
  virtual void set_integer(size_t output, int64_t value) = 0;
};

class KEEPDIM_API Delegate {
 public:
  Delegate(const EngineInfo& engine, std::string_view json, const Weights& weights,
           std::shared_ptr<States> states = std::make_shared<States>(), const Release& release = [](const std::string&) {});
  ~Delegate();
  Delegate(const Delegate&) = delete;
  Delegate& operator=(const Delegate&) = delete;

  const Program& program() const { return program_; }
  // One call at a time; others wait. Throws Error; the delegate stays usable.
  void run(const Argument* args, size_t count, Outputs& outputs, Trace* trace = nullptr);
  Counters counters() const;  // as they were after the last call
  uint64_t id() const { return counters_.id; }  // unique in the process
  void clear_plans();

 private:
  Weights checked(const Weights& weights, const Release& release);
  void add_key(int32_t id);
  void collect_key(const std::vector<Node>& nodes);
  Plan& plan(Trace* trace);  // for sizes_, found or built
  void publish();            // the counters, for others to read without waiting for a call

  const EngineInfo& info_;
  const Program program_;
  mutable Lock lock_{"delegate"};
  std::vector<DimId> key_dims_;
  std::shared_ptr<States> states_;
  std::map<std::string, std::unique_ptr<char[]>> copies_;  // of weights whose memory is not aligned
  std::unique_ptr<Engine> engine_;
  PlanCache cache_;  // after the engine: plans go first
  Counters counters_;
  std::vector<int64_t> bound_, sizes_;  // of the call under way: symbols, and all dims
  PlanCache::Key key_;
  std::vector<const void*> inputs_;
  std::vector<void*> outputs_;
  std::vector<int64_t> shape_;
};

KEEPDIM_API std::vector<Counters> live_counters();  // of every living delegate, by id

}  // namespace keepdim
