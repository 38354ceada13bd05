// GGUF files of strangers: whether every count, length and offset in one fits into it.
#pragma once
#include <string>

#include "error.h"

namespace keepdim {

// Throws the first thing that is wrong. Readers may then believe what the file says of its own sizes.
KEEPDIM_API void check_gguf(const std::string& path);

}  // namespace keepdim
