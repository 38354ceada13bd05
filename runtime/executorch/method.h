// A method of a .pte, loaded and run through ExecuTorch without its Python runtime: inputs are used in place, planned memory is
// committed only when touched, and the method stays usable after a failed call.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "artifact/pte.h"
#include "core/lock.h"
#include "core/program.h"

namespace keepdim {

// One input of an ExecuTorch method, including constants (float, bool, none).
struct MethodInput {
  enum class Kind : uint8_t { argument, number, boolean, none } kind = Kind::argument;
  Argument argument{DType::integer};  // a contiguous tensor, or an integer
  double number = 0;
  bool boolean = false;
};

// Receives the results of a call, in order.
class KEEPDIM_API ResultSink {
 public:
  virtual ~ResultSink() = default;
  virtual void* tensor(DType dtype, const int64_t* sizes, size_t rank) = 0;  // returns the memory to write to
  virtual void integer(int64_t value) = 0;
  virtual void number(double value) = 0;
  virtual void boolean(bool value) = 0;
  virtual void text(const std::string& value) = 0;
  virtual void none() = 0;
};

using Spans = std::map<std::string, std::pair<int64_t, int64_t>>;  // key → offset, bytes

// Weights in an external file: its path, and the location of each weight.
struct MappedWeights {
  std::string path;  // empty: none
  Spans spans;
};

// Profiling event of a call: an ExecuTorch kernel, a delegate, or a node inside a delegate.
struct MethodEvent {
  std::string name;
  std::string metadata;  // reported by the delegate
  int64_t start, end;    // nanoseconds
  bool delegated;        // inside a delegate
};

class KEEPDIM_API Method {
 public:
  Method(std::shared_ptr<const PteFile> file, const std::string& name, const MappedWeights& weights = {});
  ~Method();
  Method(const Method&) = delete;
  Method& operator=(const Method&) = delete;

  // Calls are serialised.
  void run(const MethodInput* inputs, size_t count, ResultSink& results, std::vector<MethodEvent>* events = nullptr);
  size_t planned_bytes() const {
    return planned_bytes_;
  }  // memory planned by ExecuTorch outside of delegates, at the upper bounds

 private:
  struct Loaded;
  void load();

  const std::shared_ptr<const PteFile> file_;
  const std::string name_;
  const MappedWeights weights_;
  Lock lock_{"method"};
  std::unique_ptr<Loaded> loaded_;  // nullptr after an aborted call; the next call loads it again
  size_t planned_bytes_ = 0;
};

}  // namespace keepdim
