// What this build is made for, and whether the CPU it runs on has it.
#pragma once
#include <string>

#include "error.h"

namespace keepdim {

struct BuildInfo {
  const char* cpu;  // "native": the CPU it was built on, or "x86-64-v3"
  const char* ggml;
};
KEEPDIM_API BuildInfo build_info();

// A sentence that names what the CPU lacks; empty when it lacks nothing.
KEEPDIM_API std::string cpu_problem();

}  // namespace keepdim
