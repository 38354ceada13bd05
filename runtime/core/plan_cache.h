// LRU cache of plans with a byte limit.
#pragma once
#include <cstdint>
#include <list>
#include <memory>
#include <unordered_map>
#include <vector>

#include "core/engine.h"

namespace keepdim {

// Keyed by the values of the dims that the build reads. Compares full keys, not only hashes; evicts least recently used plans.
class PlanCache {
 public:
  using Key = std::vector<int64_t>;
  Plan* find(const Key& key);
  // Keeps the new plan even if it alone exceeds the limit. Returns the number of evicted plans.
  size_t insert(const Key& key, std::unique_ptr<Plan> plan, size_t limit);
  size_t size() const { return plans_.size(); }
  size_t bytes() const { return bytes_; }
  void clear();

 private:
  struct Hash {
    size_t operator()(const Key& key) const;
  };
  struct Entry {
    Key key;
    std::unique_ptr<Plan> plan;
    size_t bytes;
  };
  std::list<Entry> plans_;  // most recently used first
  std::unordered_map<Key, std::list<Entry>::iterator, Hash> index_;
  size_t bytes_ = 0;
};

}  // namespace keepdim
