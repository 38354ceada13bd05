#include "core/states.h"

#include <cstdlib>

namespace keepdim {

Bytes States::find(const std::string& key, size_t bytes) {
  constexpr size_t align = 64;
  const std::lock_guard<Lock> guard(lock_);
  auto it = all_.find(key);
  if (it == all_.end()) {
    // calloc: zero pages are committed only when touched.
    char* data = static_cast<char*>(std::calloc(bytes + align, 1));
    if (!data)
      fail(Code::out_of_memory, "[load] state '" + key + "': " + std::to_string(bytes) +
                                    " bytes could not be allocated. Free memory, or lower with a smaller state.");
    it = all_.emplace(key, Memory{{data, std::free}, bytes, nullptr}).first;
    bytes_ += bytes;
  }
  if (it->second.bytes != bytes) {
    fail(Code::invalid_program, "[load] state '" + key + "': " + std::to_string(bytes) +
                                    " bytes expected, another delegate of the file has " + std::to_string(it->second.bytes) +
                                    ". Lower the model again.");
  }
  const auto address = reinterpret_cast<uintptr_t>(it->second.data.get());
  return {reinterpret_cast<void*>((address + align - 1) / align * align), bytes, &it->second.engine_data};
}

size_t States::bytes() const {
  const std::lock_guard<Lock> guard(lock_);
  return bytes_;
}

}  // namespace keepdim
