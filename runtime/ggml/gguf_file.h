// Validation of untrusted GGUF files: every count, length and offset must lie within the file.
#pragma once
#include <string>

#include "core/error.h"

namespace keepdim {

// Throws on the first error. Afterwards readers may trust the sizes in the file.
KEEPDIM_API void check_gguf(const std::string& path);

}  // namespace keepdim
