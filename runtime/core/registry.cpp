#include "core/registry.h"

#include <dlfcn.h>
#include <unistd.h>

#include <deque>

#include "core/lock.h"

namespace keepdim {

namespace {

struct Registry {
  TableLock lock;
  std::deque<EngineInfo> engines;  // deque: references stay valid
  std::vector<void (*)(const EngineInfo&)> hooks;
};

Registry& registry() {                      // created on first use, independent of static initialisation order
  static Registry* const r = new Registry;  // never destroyed: delegates may outlive static destruction
  return *r;
}

}  // namespace

void register_engine(const EngineInfo& info) {
  Registry& r = registry();
  std::vector<void (*)(const EngineInfo&)> hooks;
  const EngineInfo* kept = nullptr;
  {
    const std::lock_guard<TableLock> guard(r.lock);
    for (const EngineInfo& e : r.engines) {
      if (std::string_view(e.name) == info.name) {
        fail(Code::internal, std::string("[load] engine '") + info.name + "': it is registered already.");
      }
    }
    r.engines.push_back(info);
    kept = &r.engines.back();
    hooks = r.hooks;
  }
  for (auto* hook : hooks) hook(*kept);
}

void on_engine(void (*hook)(const EngineInfo& info)) {
  Registry& r = registry();
  std::vector<const EngineInfo*> known;
  {
    const std::lock_guard<TableLock> guard(r.lock);
    r.hooks.push_back(hook);
    for (const EngineInfo& e : r.engines) known.push_back(&e);
  }
  for (const EngineInfo* e : known) hook(*e);
}

namespace {

const EngineInfo* find_registered(std::string_view name) {
  Registry& r = registry();
  const std::lock_guard<TableLock> guard(r.lock);
  for (const EngineInfo& e : r.engines)
    if (name == e.name) return &e;
  return nullptr;
}

// Loads the library of an engine, which registers it.
void load_library(const std::string& name) {
  static Lock* const lock = new Lock("engine");
  const std::lock_guard<Lock> guard(*lock);
  if (find_registered(name)) return;
  Dl_info here;
  if (!dladdr(reinterpret_cast<void*>(&load_library), &here) || !here.dli_fname) return;
  const std::string folder = std::string(here.dli_fname),
                    path = folder.substr(0, folder.find_last_of('/') + 1) + "libkeepdim_" + name + ".so";
  if (access(path.c_str(), F_OK) != 0) {
    fail(Code::not_supported,
         "[load] engine '" + name + "': keepdim was built without it. Build it in a source checkout with: make " + name + ".");
  }
  if (!dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) {
    fail(Code::not_supported, "[load] engine '" + name + "': its library cannot be loaded (" + dlerror() +
                                  "). Install the extra: pip install 'keepdim[" + name + "]'.");
  }
}

}  // namespace

const EngineInfo& find_engine(std::string_view name) {
  if (const EngineInfo* found = find_registered(name)) return *found;
  for (const EngineName& external : kExternalEngines)
    if (name == external.name) load_library(external.name);
  if (const EngineInfo* found = find_registered(name)) return *found;
  std::string names;
  for (const std::string& known : engine_names()) names += (names.empty() ? "" : ", ") + known;
  fail(Code::not_supported,
       "[load] engine '" + std::string(name) + "': unknown engine (known: " + (names.empty() ? "none" : names) + ").");
}

std::vector<std::string> engine_names() {
  Registry& r = registry();
  const std::lock_guard<TableLock> guard(r.lock);
  std::vector<std::string> names;
  for (const EngineInfo& e : r.engines) names.push_back(e.name);
  return names;
}

}  // namespace keepdim
