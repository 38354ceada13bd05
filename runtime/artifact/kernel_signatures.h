// Argument types of ExecuTorch's kernels, which neither its loader nor the kernels check.
#pragma once
#include <string>

namespace keepdim {

// One letter per argument of a kernel (cmake/kernel_arguments.py), prefixed by "?" if optional and "!" if written; in a call the
// results follow the arguments. Kernels over sizes (`over_sizes`): types of the operands, then of the result; "x" is an integer
// or float, "=" is an integer if all operands are, otherwise a float; "." is any scalar, ":" the type of the previous operand.
// nullptr if ExecuTorch has no such kernel.
const char* kernel_signature(const std::string& kernel, bool* over_sizes);

}  // namespace keepdim
