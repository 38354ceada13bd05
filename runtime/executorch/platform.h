// Hooks for ExecuTorch's log and abort, installed while our threads run ExecuTorch code.
#pragma once
#include <cstdint>
#include <string>

namespace executorch::runtime { class EventTracer; }

namespace keepdim {

// Thrown instead of an abort of ExecuTorch (a failed ET_CHECK).
struct Aborted {};

// Error that ExecuTorch logged on this thread. Its error codes do not say which check failed; only the log message does. The
// running instruction comes from the tracer.
struct LoggedError {
  std::string check;                     // first log message of the failed instruction
  bool from_executor = false;            // logged by ExecuTorch's instruction loop, not by a kernel
  int64_t chain = -1, instruction = -1;  // -1: none was running
};

// While alive, captures the log of this thread and turns aborts into `Aborted`. Other threads log and abort as before. When the
// last scope ends, ExecuTorch's platform layer is restored.
class ExecutorchScope {
 public:
  explicit ExecutorchScope(executorch::runtime::EventTracer* tracer = nullptr);  // knows the running instruction
  ~ExecutorchScope();
  ExecutorchScope(const ExecutorchScope&) = delete;
  ExecutorchScope& operator=(const ExecutorchScope&) = delete;

  static const LoggedError& logged_error();  // since the outermost scope of this thread began

 private:
  executorch::runtime::EventTracer* const outer_tracer_;
};

}  // namespace keepdim
