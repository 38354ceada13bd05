// Fork-safe mutexes: a mutex held by another thread at fork would stay locked forever in the child process.
#pragma once
#include <mutex>

#include "core/error.h"

namespace keepdim {

// Protects an object for the duration of a call. If another thread held it at fork, locking it in the child throws: the
// protected object is in an inconsistent state.
class KEEPDIM_API Lock {
 public:
  explicit Lock(const char* subject);  // name of the protected object, for the error message
  ~Lock();
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

  void lock();
  void unlock() { mutex_.unlock(); }

 private:
  friend void after_fork();
  std::mutex mutex_;
  const char* const subject_;
  bool lost_ = false;  // held by a thread of the parent process at fork
};

// Protects a process-wide table for a short time. A fork waits for it, so that the child sees a consistent table. Never
// destroyed; no other table is locked while it is held.
class KEEPDIM_API TableLock {
 public:
  TableLock();
  TableLock(const TableLock&) = delete;
  TableLock& operator=(const TableLock&) = delete;

  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  std::mutex mutex_;
};

KEEPDIM_API bool forked();  // whether this process is a fork of one that had loaded this library

}  // namespace keepdim
