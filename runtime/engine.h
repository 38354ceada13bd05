// What an engine is. The core knows engines only through this header and the registry below;
// an engine adds itself with one `register_engine` call, from this library or from another one.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "program.h"

namespace keepdim {

// A weight's bytes, alive until they are released, or as long as the engine that asked for them.
struct Bytes {
  const void* data = nullptr;
  size_t size = 0;
  std::shared_ptr<void>* own = nullptr;  // of a state: room for an engine's own form of it, shared as the bytes are
};
using Weights = std::function<Bytes(const std::string& key)>;  // throws when the key is missing
using Release = std::function<void(const std::string& key)>;   // its bytes are not read again

// Process-wide settings; every field may be changed at any time and is read at the next use.
struct Options {
  int threads;            // 0: as many as the process may run on
  int64_t memory_limit;   // bytes one plan may need in all; 0: three quarters of the machine's memory
  int64_t plan_limit;     // bytes of built plans kept per delegate
};
KEEPDIM_API Options options();
KEEPDIM_API size_t memory_limit();  // in bytes, whatever the options leave open
KEEPDIM_API void set_options(const Options& options);

// Where the time of one call goes, on the clock of the host that asks.
struct Trace {
  struct Event {
    const Node* node;  // nullptr: no node's own work
    int64_t start, end;
  };
  int64_t (*now)();
  Event build = {nullptr, 0, 0};  // of the plan, where it was not there
  std::vector<Event> nodes;       // in the order in which they ran
};

struct Call {
  const int64_t* sizes;        // every dim's value
  const void* const* inputs;   // one per contract input; nullptr for integers
  void* const* outputs;        // one per contract output; nullptr for integers
  Trace* trace = nullptr;      // where asked for
};

// A built engine graph for one set of sizes. Only its engine's `run` uses it.
class Plan {
 public:
  virtual ~Plan() = default;
  virtual size_t bytes() const = 0;  // what the plan itself keeps, for the cache's limit
};

// One per delegate: holds weights, state and the arena that all its plans share.
class Engine {
 public:
  virtual ~Engine() = default;
  // Building reads sizes and attributes, never tensor data. `memory_limit` is enforced before allocating.
  virtual std::unique_ptr<Plan> build(const int64_t* sizes, size_t memory_limit) = 0;
  virtual void run(Plan& plan, const Call& call) = 0;
  virtual size_t arena_bytes() const = 0;
  virtual size_t packed_bytes() const { return 0; }  // of weights in the engine's own layout
};

struct EngineInfo {
  const char* name;        // "ggml"
  const char* backend_id;  // "KeepdimGgml", as it stands in files
  // Refuses a program at load: unknown op, wrong arity, dtype or attribute.
  void (*check)(const Program& program);
  std::unique_ptr<Engine> (*create)(const Program& program, const Weights& weights, const Release& release);
  std::vector<std::string> (*ops)();  // names of all rows, for tests and docs
  // Sizes at which it changes from one way of computing to another, by name; a change is for plans built later.
  std::map<std::string, int64_t> (*splits)();
  void (*set_splits)(const std::map<std::string, int64_t>& changed);
  bool (*widens)(DType dtype) = nullptr;  // whether weights in such blocks become f32 when they are loaded; nullptr: none do
};

// Engines with a library of their own, libkeepdim_<name>.so beside this one, which registers them when it is loaded.
struct EngineName {
  const char *name, *backend_id;
};
constexpr EngineName kBeside[] = {{"mlx", "KeepdimMlx"}};

KEEPDIM_API void register_engine(const EngineInfo& info);  // a second one of the same name is an error
KEEPDIM_API const EngineInfo& find_engine(std::string_view name);  // loads its library where it has one; throws when there is none
KEEPDIM_API std::vector<std::string> engine_names();
// Refuses a plan that needs so many bytes; SIZE_MAX: more than can be counted.
[[noreturn]] KEEPDIM_API void over_limit(const char* engine, const Contract& contract, const int64_t* sizes, size_t bytes, size_t limit);
// Calls `hook` for every engine, those already registered and those still to come.
KEEPDIM_API void on_engine(void (*hook)(const EngineInfo& info));

}  // namespace keepdim
