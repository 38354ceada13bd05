#include "core/error.h"

namespace keepdim {

namespace { thread_local std::string last; }

void fail(Code code, const std::string& sentence) { throw Error(code, sentence); }

void set_last_error(const std::string& sentence) noexcept {
  try {
    last = sentence;
  } catch (...) {
    last.clear();  // out of memory for the message
  }
}

const std::string& last_error() noexcept { return last; }

void clear_last_error() noexcept { last.clear(); }

}  // namespace keepdim
