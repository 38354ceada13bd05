// Reserves address space for a buffer, and commits what is used of it.
#include "ggml/growing_buffer.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <string>

#include "core/error.h"

namespace keepdim::ggml {
namespace {

constexpr size_t kAddressSpace = size_t{1} << 34;  // reserved for a buffer; a larger one moves when it grows
constexpr size_t kMapped = size_t{1} << 17;        // from here on a buffer has pages of its own
constexpr size_t kTouched = size_t{1} << 22;       // larger growth is used little by little

}  // namespace

char* GrowingBuffer::reserve(size_t bytes) {
  if (bytes <= bytes_) return data_;
  const bool large = bytes >= kHugePage;
  const size_t size = round_up(bytes), align = large ? kHugePage : kAlign;
  if (size > mapped_) {
    release();
    if (size >= kMapped) map(size);
    if (!data_) data_ = static_cast<char*>(std::aligned_alloc(align, round_up(size, align)));
  }
  // Only what is used is committed, so that the system can refuse more than there is.
  if (!data_ || (mapped_ && mprotect(data_, size, PROT_READ | PROT_WRITE) != 0))
    fail(Code::out_of_memory, "[run] ggml: " + std::to_string(size) + " bytes could not be allocated.");
  if (large) madvise(data_, size / kHugePage * kHugePage, MADV_HUGEPAGE);  // best effort
  if (mapped_) touch(size);
  bytes_ = size;
  return data_;
}

// Gets the new pages in one call of the system, which is cheaper than a fault for each. Best effort: a page is there when it is
// written, at the latest.
void GrowingBuffer::touch(size_t size) {
#ifdef MADV_POPULATE_WRITE
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE)), begin = bytes_ / page * page;
  if (size - begin <= kTouched) madvise(data_ + begin, round_up(size, page) - begin, MADV_POPULATE_WRITE);
#endif
}

// Leaves no buffer if the system refuses the address space.
void GrowingBuffer::map(size_t size) {
  const size_t wanted = std::max(size, kAddressSpace);
  void* start = mmap(nullptr, wanted + kHugePage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (start == MAP_FAILED) return;
  start_ = start;
  mapped_ = wanted;
  data_ = reinterpret_cast<char*>(round_up(reinterpret_cast<size_t>(start), kHugePage));
}

void GrowingBuffer::release() {
  if (mapped_)
    munmap(start_, mapped_ + kHugePage);
  else
    std::free(data_);
  data_ = nullptr;
  bytes_ = mapped_ = 0;
}

}  // namespace keepdim::ggml
