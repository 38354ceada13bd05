#include "core/lock.h"

#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <vector>

namespace keepdim {

namespace {

struct Locks {
  std::array<TableLock*, 32> tables{};
  std::atomic<size_t> count{0};  // number of tables
  std::mutex mutex;              // protects `objects`; locked last
  std::vector<Lock*> objects;
};

Locks& locks() {
  static Locks* const all = new Locks;
  return *all;
}

std::atomic<bool> is_forked{false};

void before_fork() {
  Locks& all = locks();
  for (size_t i = 0; i < all.count; ++i) all.tables[i]->lock();
  all.mutex.lock();
}

void release() {
  Locks& all = locks();
  all.mutex.unlock();
  for (size_t i = all.count; i-- > 0;) all.tables[i]->unlock();
}

}  // namespace

void after_fork() {
  is_forked = true;
  for (Lock* lock : locks().objects) {
    if (lock->mutex_.try_lock()) {
      lock->mutex_.unlock();
    } else {
      lock->lost_ = true;
    }
  }
  release();
}

namespace { const int registered = pthread_atfork(before_fork, release, after_fork); }

Lock::Lock(const char* subject) : subject_(subject) {
  std::lock_guard<std::mutex> guard(locks().mutex);
  locks().objects.push_back(this);
}

Lock::~Lock() {
  std::lock_guard<std::mutex> guard(locks().mutex);
  auto& all = locks().objects;
  all.erase(std::remove(all.begin(), all.end(), this), all.end());
}

void Lock::lock() {
  if (lost_) {
    fail(Code::not_supported, std::string("[fork] ") + subject_ +
                                  ": another thread was using it when this process was forked. "
                                  "Load the file in the new process, or start processes with spawn.");
  }
  mutex_.lock();
}

TableLock::TableLock() {
  Locks& all = locks();
  std::lock_guard<std::mutex> guard(all.mutex);
  if (all.count >= all.tables.size()) fail(Code::internal, "[load] library: too many tables.");
  all.tables[all.count] = this;
  ++all.count;
}

bool forked() { return is_forked; }

}  // namespace keepdim
