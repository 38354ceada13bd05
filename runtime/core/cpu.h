// Target of this build, and whether the CPU supports it.
#pragma once
#include <string>

#include "core/error.h"

namespace keepdim {

struct BuildInfo {
  const char* cpu;  // "native": the CPU it was built on, or "x86-64-v3"
  const char* ggml;
};
KEEPDIM_API BuildInfo build_info();

// Error message that names missing CPU features; empty if there are none.
KEEPDIM_API std::string cpu_error();

}  // namespace keepdim
