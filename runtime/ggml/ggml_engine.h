// The ggml engine, for whoever registers engines. Includes no ggml header.
#pragma once
#include "../engine.h"

namespace keepdim {

const EngineInfo& ggml_engine();
void register_ggml_engine();  // once per process

}  // namespace keepdim
