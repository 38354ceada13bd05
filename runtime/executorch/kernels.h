// ExecuTorch's registered kernels, for ops outside of delegates. Some of them abort the process on unexpected operands; here
// they are wrapped with a check.
#pragma once
#include <string>
#include <vector>

#include "core/error.h"

namespace executorch::runtime { struct Kernel; }

namespace keepdim {

KEEPDIM_API std::vector<std::string> kernel_names();  // "aten::add.out", …
std::vector<executorch::runtime::Kernel> checked_kernels();

}  // namespace keepdim
