// Registry of engines: built in, or loaded from their own library.
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "core/engine.h"

namespace keepdim {

// Engines in a separate library, libkeepdim_<name>.so next to this one, which registers them when loaded.
struct EngineName {
  const char *name, *backend_id;
};
constexpr EngineName kExternalEngines[] = {{"mlx", "KeepdimMlx"}};

KEEPDIM_API void register_engine(const EngineInfo& info);          // throws on a duplicate name
KEEPDIM_API const EngineInfo& find_engine(std::string_view name);  // loads its library if needed; throws if unknown
KEEPDIM_API std::vector<std::string> engine_names();
// Calls `hook` for every engine, already registered or registered later.
KEEPDIM_API void on_engine(void (*hook)(const EngineInfo& info));

}  // namespace keepdim
