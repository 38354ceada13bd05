// Errors: a message "[stage] subject: fact (values). remedy", thrown inside the runtime, caught at its boundaries (executorch/,
// python/), and stored per thread.
#pragma once
#include <cstdint>
#include <stdexcept>
#include <string>

#define KEEPDIM_API __attribute__((visibility("default")))

namespace keepdim {

enum class Code : uint8_t {
  invalid_program,   // the file is invalid
  invalid_argument,  // the call is invalid: out of contract, wrong dtype or rank, index out of range
  not_supported,     // the engine does not support an op or a variant of it
  out_of_memory,     // memory limit exceeded, or allocation failed
  internal,          // a bug in keepdim
};

class KEEPDIM_API Error : public std::runtime_error {
 public:
  Error(Code code, const std::string& sentence) : std::runtime_error(sentence), code(code) {}
  const Code code;
};

[[noreturn]] KEEPDIM_API void fail(Code code, const std::string& sentence);

// Message of the last failure on this thread; empty if there was none since `clear_last_error`.
KEEPDIM_API void set_last_error(const std::string& sentence) noexcept;
KEEPDIM_API const std::string& last_error() noexcept;
KEEPDIM_API void clear_last_error() noexcept;

}  // namespace keepdim
