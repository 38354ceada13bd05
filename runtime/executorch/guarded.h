// Boundary to ExecuTorch: exceptions become ExecuTorch errors; the message is stored per thread and logged.
#pragma once
#include <executorch/runtime/platform/log.h>

#include <new>

#include "executorch/types.h"

namespace keepdim {

inline et::Error to_executorch(Code code) {
  switch (code) {
    case Code::invalid_program: return et::Error::InvalidProgram;
    case Code::invalid_argument: return et::Error::InvalidArgument;
    case Code::not_supported: return et::Error::NotSupported;
    case Code::out_of_memory: return et::Error::MemoryAllocationFailed;
    case Code::internal: return et::Error::Internal;
  }
  return et::Error::Internal;
}

inline et::Error report(Code code, const char* sentence) noexcept {
  set_last_error(sentence);
  ET_LOG(Error, "%s", sentence);
  return to_executorch(code);
}

// Runs `body` and converts exceptions to an error code.
template <typename Body>
et::Error guarded(const Body& body) noexcept {
  try {
    body();
    return et::Error::Ok;
  } catch (const Error& e) {
    return report(e.code, e.what());
  } catch (const std::bad_alloc&) {
    return report(Code::out_of_memory, "[run] delegate: the system has no memory left.");
  } catch (const std::exception& e) {
    return report(Code::internal, e.what());
  } catch (...) {
    return report(Code::internal, "[run] delegate: an unknown exception.");
  }
}

}  // namespace keepdim
