// Engine interface. The core knows engines only through this header; an engine registers itself with `register_engine`
// (registry.h), from this library or another one.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/options.h"
#include "core/program.h"

namespace keepdim {

// Bytes of a weight or state; valid until released, or for the lifetime of the engine.
struct Bytes {
  const void* data = nullptr;
  size_t size = 0;
  std::shared_ptr<void>* engine_data = nullptr;  // states: slot for the engine's representation, shared like the bytes
};
using Weights = std::function<Bytes(const std::string& key)>;  // throws if the key is missing
using Release = std::function<void(const std::string& key)>;   // the engine will not read the bytes again

// Timing of one call, on the host's clock.
struct Trace {
  struct Event {
    const Node* node;  // nullptr: not attributable to a node
    int64_t start, end;
  };
  int64_t (*now)();
  Event build = {nullptr, 0, 0};  // plan construction, if the plan was not cached
  std::vector<Event> nodes;       // in execution order
};

struct Call {
  const int64_t* sizes;       // value of every dim
  const void* const* inputs;  // one per contract input; nullptr for integers
  void* const* outputs;       // one per contract output; nullptr for integers
  Trace* trace = nullptr;     // optional
};

// An engine graph built for one set of sizes; used only by `run` of its engine.
class Plan {
 public:
  virtual ~Plan() = default;
  virtual size_t bytes() const = 0;  // memory held by the plan, for the cache limit
};

// One per delegate: owns weights, state and the arena shared by its plans.
class Engine {
 public:
  virtual ~Engine() = default;
  // Building reads sizes and attributes, never tensor data. `memory_limit` is enforced before allocating.
  virtual std::unique_ptr<Plan> build(const int64_t* sizes, size_t memory_limit) = 0;
  virtual void run(Plan& plan, const Call& call) = 0;
  virtual size_t arena_bytes() const = 0;
  virtual size_t packed_bytes() const { return 0; }  // packed weights
};

// How activations are rounded for the product with a quantised weight.
struct ActivationFormat {
  int bits;       // 32: not rounded
  int64_t block;  // elements per scale
};

struct EngineInfo {
  const char* name;        // "ggml"
  const char* backend_id;  // "KeepdimGgml", as stored in files
  // Throws for an unsupported program at load: unknown op, wrong arity, dtype or attribute.
  void (*check)(const Program& program);
  std::unique_ptr<Engine> (*create)(const Program& program, const Weights& weights, const Release& release);
  std::vector<std::string> (*ops)();  // names of all supported ops, for tests and docs
  // Crossover sizes between kernels, by name. A change affects plans built afterwards.
  std::map<std::string, int64_t> (*thresholds)();
  void (*set_thresholds)(const std::map<std::string, int64_t>& changed);
  bool (*widens)(DType dtype) = nullptr;  // whether quantised weights of this dtype are expanded to f32 at load; nullptr: none
  ActivationFormat (*activation_format)(DType weight, int64_t rows) = nullptr;  // nullptr: never rounded
};

}  // namespace keepdim
