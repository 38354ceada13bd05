// Mutexes that a fork cannot leave locked for ever: the threads that held them are not in the new process.
#pragma once
#include <mutex>

#include "error.h"

namespace keepdim {

// Protects an object in use for as long as a call may take. In a forked process, one that another thread held refuses with
// a sentence: what it protects is in the middle of something that nobody will finish.
class KEEPDIM_API Lock {
 public:
  explicit Lock(const char* subject);  // what it protects, for the sentence
  ~Lock();
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

  void lock();
  void unlock() { mutex_.unlock(); }

 private:
  friend void after_fork();
  std::mutex mutex_;
  const char* const subject_;
  bool lost_ = false;  // held by a thread that is not in this process
};

// Protects a table of the process for a moment. A fork waits for it, so that the new process finds the table whole. Never
// destroyed; while it is held, no other table is locked.
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

KEEPDIM_API bool forked();  // whether this process was forked after it loaded this library

}  // namespace keepdim
