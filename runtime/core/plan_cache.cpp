#include "core/plan_cache.h"

namespace keepdim {

size_t PlanCache::Hash::operator()(const Key& key) const {
  uint64_t h = 0x9e3779b97f4a7c15u ^ key.size();
  for (int64_t v : key) {
    h ^= static_cast<uint64_t>(v) + 0x9e3779b97f4a7c15u + (h << 6) + (h >> 2);
    h *= 0xff51afd7ed558ccdu;
  }
  return static_cast<size_t>(h ^ (h >> 32));
}

Plan* PlanCache::find(const Key& key) {
  const auto it = index_.find(key);
  if (it == index_.end()) return nullptr;
  plans_.splice(plans_.begin(), plans_, it->second);
  return plans_.front().plan.get();
}

size_t PlanCache::insert(const Key& key, std::unique_ptr<Plan> plan, size_t limit) {
  const size_t bytes = plan->bytes();
  plans_.push_front({key, std::move(plan), bytes});
  index_[key] = plans_.begin();
  bytes_ += bytes;
  size_t evicted = 0;
  for (; bytes_ > limit && plans_.size() > 1; ++evicted) {
    bytes_ -= plans_.back().bytes;
    index_.erase(plans_.back().key);
    plans_.pop_back();
  }
  return evicted;
}

void PlanCache::clear() {
  index_.clear();
  plans_.clear();
  bytes_ = 0;
}

}  // namespace keepdim
