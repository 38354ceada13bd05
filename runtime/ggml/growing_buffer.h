// Memory of an engine that grows with the largest plan.
#pragma once
#include <cstddef>

namespace keepdim::ggml {

constexpr size_t kAlign = 64;
constexpr size_t kHugePage = size_t{1} << 21;  // fewer TLB misses when streaming weights

constexpr size_t round_up(size_t bytes, size_t to = kAlign) { return (bytes + to - 1) / to * to; }

// Aligned, and only grows; the contents are undefined after that. A large buffer grows in place, in address space that it has
// reserved: pages that were used already stay, since to touch a new page costs as much as hundreds of multiplications.
class GrowingBuffer {
 public:
  GrowingBuffer() = default;
  ~GrowingBuffer() { release(); }
  GrowingBuffer(const GrowingBuffer&) = delete;
  GrowingBuffer& operator=(const GrowingBuffer&) = delete;

  char* reserve(size_t bytes);  // fails if there is not so much memory
  size_t bytes() const { return bytes_; }

 private:
  void map(size_t size);
  void touch(size_t size);
  void release();

  char* data_ = nullptr;
  size_t bytes_ = 0;
  void* start_ = nullptr;  // of the mapping
  size_t mapped_ = 0;      // reserved from `data_` on; 0: allocated
};

}  // namespace keepdim::ggml
