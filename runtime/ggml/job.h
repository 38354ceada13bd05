// Argument of a kernel: pointers, a loop nest, and error reporting.
#pragma once
#include <ggml-cpu.h>
#include <ggml.h>

#include <atomic>
#include <mutex>
#include <type_traits>

#include "ggml/tensor.h"

namespace keepdim::ggml {

constexpr int kMaxData = 10;  // maximum pointers per kernel, including the result

using Kernel = ggml_custom_op_t;

// A scalar argument of a kernel: a constant, or the value of a dim, read at run time.
struct Scalar {
  const int64_t* data = nullptr;
  double real = 0;
  int64_t integer = 0;
  bool is_integer = false;

  template <class T>
  T as() const {
    if (data) return static_cast<T>(*data);
    if (is_integer) return static_cast<T>(integer);
    return std::is_integral_v<T> ? static_cast<T>(truncate(real)) : static_cast<T>(real);
  }
};

// Error of a run; kernels cannot throw across ggml's threads. Keeps the error of the first failing step and, within it, of the
// lowest position, so that the message does not depend on thread scheduling.
struct RunError {
  std::mutex mutex;
  const void* job = nullptr;
  int64_t position = 0;
  std::string sentence;

  void set(const void* failed, int64_t at, const std::string& what);
};

// Shared counters for dynamic scheduling, one set for all steps of a plan. Every thread enters every kernel; the last one to
// finish resets them for the next step.
struct WorkCounter {
  static constexpr int kShares = 8;
  struct Share {  // a thread's items; on a cache line of its own
    std::atomic<int64_t> taken{0};
    char padding[56];
  };
  Share shares[kShares];
  std::atomic<int> finished{0};  // threads that found no more work
};

// Argument of a kernel. `data` is patched before each run; the rest is set when the plan is built.
struct Job {
  void* data[kMaxData] = {};  // result, operands
  Loop loop;
  RunError* error = nullptr;
  WorkCounter* work_counter = nullptr;
  const Node* node = nullptr;
  const std::string* name = nullptr;  // name of the result

  void fail(int64_t position, const std::string& fact) const;  // "[run] op 'name': fact"
};

}  // namespace keepdim::ggml
