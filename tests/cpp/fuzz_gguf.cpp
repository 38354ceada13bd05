// libFuzzer target for GGUF files: validation of counts, lengths and offsets.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <string>

#include "ggml/gguf_file.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const int file = memfd_create("fuzz.gguf", 0);
  if (file < 0 || write(file, data, size) != static_cast<ssize_t>(size)) return 0;
  try {
    keepdim::check_gguf("/proc/self/fd/" + std::to_string(file));
  } catch (const keepdim::Error&) {
  }
  close(file);
  return 0;
}
