// One way to fail: a sentence "[stage] subject: fact (values). remedy", thrown inside the runtime,
// caught at its borders (backend.cpp, python.cpp), kept per thread for whoever reports it.
#pragma once
#include <cstdint>
#include <stdexcept>
#include <string>

#define KEEPDIM_API __attribute__((visibility("default")))

namespace keepdim {

enum class Code : uint8_t {
  invalid_program,   // the file is wrong: refused at load
  invalid_argument,  // the call is wrong: out of contract, wrong dtype, wrong rank, index out of range
  not_supported,     // an op or a form of it that the engine does not have
  out_of_memory,     // over the memory limit, or the allocation failed
  internal,          // a broken promise of our own
};

class KEEPDIM_API Error : public std::runtime_error {
 public:
  Error(Code code, const std::string& sentence) : std::runtime_error(sentence), code(code) {}
  const Code code;
};

[[noreturn]] KEEPDIM_API void fail(Code code, const std::string& sentence);

// The sentence of this thread's last failure; empty when there was none since `clear_last_error`.
KEEPDIM_API void set_last_error(const std::string& sentence) noexcept;
KEEPDIM_API const std::string& last_error() noexcept;
KEEPDIM_API void clear_last_error() noexcept;

}  // namespace keepdim
