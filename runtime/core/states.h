// Persistent state (KV caches), shared by the delegates of one file.
#pragma once
#include <memory>
#include <string>
#include <unordered_map>

#include "core/engine.h"
#include "core/lock.h"

namespace keepdim {

// State buffers by key, zero-initialised. Delegates of one file share them and run one at a time.
class KEEPDIM_API States {
 public:
  Bytes find(const std::string& key, size_t bytes);  // same key, same memory; throws if the size differs
  size_t bytes() const;

 private:
  struct Memory {
    std::unique_ptr<char, void (*)(void*)> data;
    size_t bytes;
    std::shared_ptr<void> engine_data;
  };
  mutable Lock lock_{"state"};
  std::unordered_map<std::string, Memory> all_;
  size_t bytes_ = 0;
};

}  // namespace keepdim
