// Memory of an engine that grows with the largest plan.
#pragma once
#include <sys/mman.h>

#include <cstdlib>
#include <string>

#include "core/error.h"

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

  char* reserve(size_t bytes) {
    if (bytes <= bytes_) return data_;
    const bool large = bytes >= kHugePage;
    const size_t size = round_up(bytes, large ? kHugePage : kAlign);
    if (size > mapped_) {
      release();
      if (large) map(size);
      if (!data_) data_ = static_cast<char*>(std::aligned_alloc(large ? kHugePage : kAlign, size));
    }
    // Only what is used is committed, so that the system can refuse more than there is.
    if (!data_ || (mapped_ && mprotect(data_, size, PROT_READ | PROT_WRITE) != 0))
      fail(Code::out_of_memory, "[run] ggml: " + std::to_string(size) + " bytes could not be allocated.");
    if (large) madvise(data_, size, MADV_HUGEPAGE);  // best effort
    bytes_ = size;
    return data_;
  }
  size_t bytes() const { return bytes_; }

 private:
  static constexpr size_t kAddressSpace = size_t{1} << 34;  // reserved for a buffer; a larger one moves when it grows

  // Reserves address space without memory; leaves no buffer if that is refused.
  void map(size_t size) {
    const size_t wanted = size > kAddressSpace ? size : kAddressSpace;
    void* start = mmap(nullptr, wanted + kHugePage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED) return;
    start_ = start;
    mapped_ = wanted;
    data_ = reinterpret_cast<char*>(round_up(reinterpret_cast<size_t>(start), kHugePage));
  }
  void release() {
    if (mapped_)
      munmap(start_, mapped_ + kHugePage);
    else
      std::free(data_);
    data_ = nullptr;
    bytes_ = mapped_ = 0;
  }

  char* data_ = nullptr;
  size_t bytes_ = 0;
  void* start_ = nullptr;  // of the mapping
  size_t mapped_ = 0;      // reserved from `data_` on; 0: allocated
};

}  // namespace keepdim::ggml
