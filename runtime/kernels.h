// ExecuTorch's kernels in this process, which run what no delegate does. Some of them end the process where an operand is not
// what they expect; here they get a check of their own first.
#pragma once
#include <string>
#include <vector>

#include "error.h"

namespace executorch::runtime {
struct Kernel;
}

namespace keepdim {

KEEPDIM_API std::vector<std::string> kernel_names();  // "aten::add.out", …
std::vector<executorch::runtime::Kernel> checked_kernels();

}  // namespace keepdim
