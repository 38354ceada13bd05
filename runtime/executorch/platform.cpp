#include "executorch/platform.h"

#include <executorch/runtime/core/event_tracer.h>
#include <executorch/runtime/platform/platform.h>
#include <executorch/runtime/platform/runtime.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "core/error.h"
#include "core/lock.h"
#include "executorch/types.h"

namespace keepdim {

namespace {

struct ThreadState {
  int depth = 0;
  et::EventTracer* tracer = nullptr;
  LoggedError logged;
};
thread_local ThreadState thread_state;

// Functions that were installed before ours.
std::atomic<pal_emit_log_message_method> original_emit{nullptr};
std::atomic<pal_abort_method> original_abort{nullptr};

void capture_log(et_timestamp_t time, et_pal_log_level_t level, const char* file, const char* function, size_t line,
                 const char* message, size_t length) {
  if (thread_state.depth > 0 && (level == et_pal_log_level_t::kError || level == et_pal_log_level_t::kFatal)) {
    LoggedError& logged = thread_state.logged;
    const int64_t chain = thread_state.tracer ? static_cast<int64_t>(thread_state.tracer->current_chain_id()) : -1;
    const int64_t instruction = chain < 0 ? -1 : static_cast<int64_t>(thread_state.tracer->current_debug_handle());
    if (logged.check.empty() || logged.chain != chain || logged.instruction != instruction) {
      logged = {std::string(message, length), file != nullptr && std::strcmp(file, "method.cpp") == 0, chain, instruction};
    }
  }
  if (const auto emit = original_emit.load()) emit(time, level, file, function, line, message, length);
}

void throw_on_abort() {
  if (thread_state.depth > 0) throw Aborted();
  if (const auto end = original_abort.load()) end();
  std::abort();
}

// Atomic compare-and-swap: other threads may read the table at any time without a lock.
template <typename F>
bool exchange_if(F& entry, F expected, F desired) {
  return __atomic_compare_exchange_n(&entry, &expected, desired, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}

// Number of threads with an active scope. (In a forked child the parent's threads stay counted, so the hooks stay installed.)
struct ActiveScopes {
  TableLock lock;
  size_t count = 0;
};

ActiveScopes& active_scopes() {
  static ActiveScopes* const all = new ActiveScopes;
  return *all;
}

// Not register_pal: it logs, and cannot be undone.
et::PalImpl& pal_table() { return *const_cast<et::PalImpl*>(et::get_pal_impl()); }

void install_hooks() {
  static const bool ready = (et::runtime_init(), true);
  (void)ready;
  ActiveScopes& all = active_scopes();
  const std::lock_guard<TableLock> guard(all.lock);
  if (all.count++ > 0) return;
  et::PalImpl& pal = pal_table();
  if (pal.emit_log_message != capture_log) original_emit = pal.emit_log_message;
  if (pal.abort != throw_on_abort) original_abort = pal.abort;
  exchange_if<pal_emit_log_message_method>(pal.emit_log_message, original_emit, capture_log);
  exchange_if<pal_abort_method>(pal.abort, original_abort, throw_on_abort);
}

// Keeps functions that someone else has installed in the meantime.
void restore_hooks() {
  ActiveScopes& all = active_scopes();
  const std::lock_guard<TableLock> guard(all.lock);
  if (--all.count > 0) return;
  exchange_if<pal_emit_log_message_method>(pal_table().emit_log_message, capture_log, original_emit);
  exchange_if<pal_abort_method>(pal_table().abort, throw_on_abort, original_abort);
}

}  // namespace

ExecutorchScope::ExecutorchScope(et::EventTracer* tracer) : outer_tracer_(thread_state.tracer) {
  clear_last_error();
  if (thread_state.depth == 0) {
    install_hooks();
    thread_state.logged = {};
  }
  ++thread_state.depth;
  thread_state.tracer = tracer;
}

ExecutorchScope::~ExecutorchScope() {
  thread_state.tracer = outer_tracer_;
  if (--thread_state.depth == 0) restore_hooks();
}

const LoggedError& ExecutorchScope::logged_error() { return thread_state.logged; }

}  // namespace keepdim
