// Registration of the ggml engine. Does not include ggml headers.
#pragma once
#include "core/engine.h"

namespace keepdim {

const EngineInfo& ggml_engine();
void register_ggml_engine();  // once per process

}  // namespace keepdim
