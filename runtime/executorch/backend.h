// Status of the ExecuTorch backends of this library.
#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"

namespace keepdim {

// ExecuTorch's error code from registering the backend of each engine, by backend id; 0 is ok.
KEEPDIM_API std::vector<std::pair<std::string, uint32_t>> backend_status();

}  // namespace keepdim
