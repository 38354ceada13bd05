// A method of a .pte, loaded and run through ExecuTorch without its Python runtime: inputs are used where they lie,
// planned memory is committed only as far as it is touched, and one failed call leaves the next one working.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lock.h"
#include "program.h"
#include "pte.h"

namespace keepdim {

// One input of ExecuTorch's method. Constants of the method (a number, a flag, none) are inputs too.
struct MethodInput {
  enum class Kind : uint8_t { argument, number, truth, none } kind = Kind::argument;
  Argument argument{DType::integer};  // a contiguous tensor, or an integer
  double number = 0;
  bool truth = false;
};

// Takes the results of one call, in order.
class KEEPDIM_API ResultSink {
 public:
  virtual ~ResultSink() = default;
  virtual void* tensor(DType dtype, const int64_t* sizes, size_t rank) = 0;  // where to write it
  virtual void integer(int64_t value) = 0;
  virtual void number(double value) = 0;
  virtual void truth(bool value) = 0;
  virtual void text(const std::string& value) = 0;
  virtual void none() = 0;
};

using Spans = std::map<std::string, std::pair<int64_t, int64_t>>;  // key → offset, bytes

// Weights that a .pte does not hold: the file they lie in, and where.
struct MappedWeights {
  std::string path;  // empty: there are none
  Spans spans;
};

// One thing that took time in a call: a kernel of ExecuTorch, a delegate, or a node inside one.
struct MethodEvent {
  std::string name;
  std::string about;  // what a delegate says about its own
  int64_t start, end; // nanoseconds
  bool delegated;     // inside a delegate
};

class KEEPDIM_API Method {
 public:
  Method(std::shared_ptr<const PteFile> file, const std::string& name, const MappedWeights& weights = {});
  ~Method();
  Method(const Method&) = delete;
  Method& operator=(const Method&) = delete;

  // One call at a time; others wait.
  void run(const MethodInput* inputs, size_t count, ResultSink& results, std::vector<MethodEvent>* events = nullptr);
  size_t planned_bytes() const { return planned_bytes_; }  // what ExecuTorch planned outside the delegates, at the upper bounds

 private:
  struct Loaded;
  void load();

  const std::shared_ptr<const PteFile> file_;
  const std::string name_;
  const MappedWeights weights_;
  Lock lock_{"method"};
  std::unique_ptr<Loaded> loaded_;  // nullptr: a call left it half done, and the next one loads it anew
  size_t planned_bytes_ = 0;
};

}  // namespace keepdim
