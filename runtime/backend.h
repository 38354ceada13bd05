// What the ExecuTorch side of this library can be asked.
#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "error.h"

namespace keepdim {

// ExecuTorch's answer to the registration of each engine's backend, by backend id; 0 is ok.
KEEPDIM_API std::vector<std::pair<std::string, uint32_t>> backend_status();

}  // namespace keepdim
