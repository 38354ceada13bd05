// Process-wide options, and the memory limit of plans.
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/program.h"

namespace keepdim {

// May be changed at any time; takes effect at the next use.
struct Options {
  int threads;           // 0: all CPUs available to the process
  int64_t memory_limit;  // bytes per plan in total; 0: three quarters of physical memory
  int64_t plan_limit;    // bytes of cached plans per delegate
};
KEEPDIM_API Options options();
KEEPDIM_API size_t memory_limit();  // effective limit in bytes
KEEPDIM_API void set_options(const Options& options);

// Throws for a plan that needs `bytes`; SIZE_MAX: overflow.
[[noreturn]] KEEPDIM_API void over_limit(const char* engine, const Contract& contract, const int64_t* sizes, size_t bytes,
                                         size_t limit);

}  // namespace keepdim
