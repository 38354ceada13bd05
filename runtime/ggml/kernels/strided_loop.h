// Loops over strided operands with a static or dynamic split among threads, and the functions that reductions use.
#pragma once
#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

#include "ggml/job.h"
#include "ggml/simd/fast_math.h"

namespace keepdim::ggml {

constexpr int64_t kGrain = 2048;  // minimum elements per thread

// Half-open range [begin, end).
struct Span {
  int64_t begin, end;
};

// Part i of `count` items split into n parts whose sizes differ by at most one.
inline Span split_range(int64_t count, int ith, int nth) {
  return {count / nth * ith + std::min<int64_t>(count % nth, ith),
          count / nth * (ith + 1) + std::min<int64_t>(count % nth, ith + 1)};
}

// Byte offsets of all operands at one position of the first `rank` dims of a loop. Advances without divisions.
struct StridedIterator {
  const Loop& loop;
  const int rank;
  int64_t index[kMaxRank] = {};
  int64_t offset[kMaxOperands] = {};

  StridedIterator(const Loop& loop, int rank, int64_t start) : loop(loop), rank(rank) {
    for (int d = rank - 1; d >= 0 && start; --d) {
      index[d] = start % loop.dims[d];
      start /= loop.dims[d];
      for (int o = 0; o < kMaxOperands; ++o) offset[o] += index[d] * loop.strides[o][d];
    }
  }
  void next() {
    for (int d = rank - 1; d >= 0; --d) {
      for (int o = 0; o < kMaxOperands; ++o) offset[o] += loop.strides[o][d];
      if (++index[d] < loop.dims[d]) return;
      for (int o = 0; o < kMaxOperands; ++o) offset[o] -= index[d] * loop.strides[o][d];
      index[d] = 0;
    }
  }
};

// Number of positions of all dims but the innermost.
inline int64_t outer_count(const Loop& loop) {
  int64_t rows = 1;
  for (int d = 0; d + 1 < loop.rank; ++d) rows *= loop.dims[d];
  return rows;
}

// Calls body(n, offsets) for this thread's part of the runs along the innermost dim. `work` is the cost per element. With
// fewer rows than threads a run is split, but not below `min_run` elements.
template <class Body>
void for_each_run(const Loop& loop, int64_t work, int ith, int nth, Body&& body, int64_t min_run = 1) {
  const int last = loop.rank - 1;
  const int64_t n = loop.dims[last], rows = outer_count(loop);
  if (n <= 0 || rows <= 0) return;
  if (rows * n * work < 2 * kGrain) {
    if (ith) return;
    nth = 1;
  }
  const int64_t max_parts = std::clamp<int64_t>(n * work / kGrain, 1, std::max<int64_t>(1, n / min_run));
  const int64_t parts = rows >= nth ? 1 : std::min<int64_t>((nth + rows - 1) / rows, max_parts);
  const Span span = split_range(rows * parts, ith, nth);
  StridedIterator at(loop, last, span.begin / parts);
  int64_t part = span.begin % parts;
  for (int64_t i = span.begin; i < span.end; ++i) {
    const Span run = split_range(n, static_cast<int>(part), static_cast<int>(parts));
    int64_t offset[kMaxOperands];
    for (int o = 0; o < kMaxOperands; ++o) offset[o] = at.offset[o] + run.begin * loop.strides[o][last];
    body(run.end - run.begin, offset);
    if (++part == parts) {
      part = 0;
      at.next();
    }
  }
}

template <class Body>
void for_each_run(const Loop& loop, int ith, int nth, Body&& body) {
  for_each_run(loop, 1, ith, nth, std::forward<Body>(body));
}

// Calls body(rows, offsets) for this thread's part of the two innermost dims: some rows of whole runs. For short runs.
template <class Body>
void for_each_plane(const Loop& loop, int ith, int nth, Body&& body) {
  const int tall = loop.rank - 2;
  const int64_t rows = outer_count(loop), height = loop.dims[tall];
  if (rows <= 0 || loop.dims[tall + 1] <= 0) return;
  if (rows * loop.dims[tall + 1] < 2 * kGrain) {
    if (ith) return;
    nth = 1;
  }
  const Span span = split_range(rows, ith, nth);
  StridedIterator at(loop, tall, span.begin / height);
  int64_t first = span.begin % height;
  for (int64_t i = span.begin; i < span.end; at.next()) {
    const int64_t count = std::min(height - first, span.end - i);
    int64_t offset[kMaxOperands];
    for (int o = 0; o < kMaxOperands; ++o) offset[o] = at.offset[o] + first * loop.strides[o][tall];
    body(count, offset);
    i += count;
    first = 0;
  }
}

// memcpy for runs that are often short.
inline void copy_bytes(char* y, const char* x, int64_t bytes) {
  if (bytes > 256) {
    std::memcpy(y, x, bytes);
  } else if (bytes >= 16) {
    for (int64_t i = 0; i + 16 < bytes; i += 16) std::memcpy(y + i, x + i, 16);
    std::memcpy(y + bytes - 16, x + bytes - 16, 16);
  } else if (bytes >= 8) {
    std::memcpy(y, x, 8);
    std::memcpy(y + bytes - 8, x + bytes - 8, 8);
  } else if (bytes >= 4) {
    std::memcpy(y, x, 4);
    std::memcpy(y + bytes - 4, x + bytes - 4, 4);
  } else {
    for (int64_t i = 0; i < bytes; ++i) y[i] = x[i];
  }
}

// Calls body(position, offsets) for this thread's part of all positions of the loop (static split).
template <class Body>
void for_each_row(const Loop& loop, int64_t work, int ith, int nth, Body&& body) {
  const int64_t rows = loop.count();
  if (rows <= 0) return;
  if (rows * work < 2 * kGrain) {
    if (ith) return;
    nth = 1;
  }
  const Span span = split_range(rows, ith, nth);
  StridedIterator at(loop, loop.rank, span.begin);
  for (int64_t i = span.begin; i < span.end; ++i, at.next()) body(i, at.offset);
}

// The same with dynamic scheduling, for expensive work items. A thread takes the items of its own share first, in chunks that
// shrink towards the end, and then helps with the other shares: in each step of a plan it computes the same part of the images
// and rows, which are still in its cache. Returns true in the last thread to finish, after all items are done.
template <class Body>
bool for_each_dynamic(const Job& job, const Loop& loop, int64_t work, int ith, int nth, Body&& body) {
  const int64_t count = loop.count();
  if (nth == 1 || count * work < 2 * kGrain) {
    for_each_row(loop, work, ith, nth, std::forward<Body>(body));
    return ith == 0;
  }
  WorkCounter& counter = *job.work_counter;
  const int shares = std::min(nth, WorkCounter::kShares), threads = (nth + shares - 1) / shares;  // per share
  for (int turn = 0; turn < shares; ++turn) {
    const int share = (ith + turn) % shares;
    const Span items = split_range(count, share, shares);
    std::atomic<int64_t>& taken = counter.shares[share].taken;
    for (int64_t first = taken.load(std::memory_order_relaxed); first < items.end - items.begin;) {
      const int64_t left = items.end - items.begin - first, chunk = std::max<int64_t>(1, left / (4 * threads));
      if (!taken.compare_exchange_weak(first, first + chunk, std::memory_order_relaxed)) continue;
      StridedIterator at(loop, loop.rank, items.begin + first);
      for (int64_t i = first; i < first + chunk; ++i, at.next()) body(items.begin + i, at.offset);
      first = taken.load(std::memory_order_relaxed);
    }
  }
  if (counter.finished.fetch_add(1, std::memory_order_acq_rel) + 1 < nth) return false;
  counter.finished.store(0, std::memory_order_relaxed);
  for (WorkCounter::Share& share : counter.shares) share.taken.store(0, std::memory_order_relaxed);
  return true;
}

// Row indices to compute, in increasing order: the first `count` rows, or those of a list.
struct Rows {
  const int64_t* list;  // nullptr: 0, 1, 2, …
  int64_t count;

  int64_t operator[](int64_t i) const { return list ? list[i] : i; }
  bool adjacent(Span span) const { return !list || list[span.end - 1] - list[span.begin] == span.end - span.begin - 1; }
  Rows within(Span rows) const {  // the listed rows inside `rows`; requires a list
    const int64_t* first = std::lower_bound(list, list + count, rows.begin);
    return {first, std::lower_bound(first, list + count, rows.end) - first};
  }
};

// Reads a list of row indices (i64, terminated by -1); without one, all `row_count` rows. An invalid list reports an error
// and gives no rows.
inline Rows parse_row_list(const Job& job, const void* operand, int64_t row_count) {
  const auto* list = static_cast<const int64_t*>(operand);
  if (!list) return {nullptr, row_count};
  const int64_t count = std::find(list, list + row_count, -1) - list;
  bool valid = true;
  for (int64_t i = 0, before = -1; i < count; before = list[i++]) valid = valid & (list[i] > before) & (list[i] < row_count);
  if (!valid) job.fail(0, "the list of its rows is not sorted, or out of range.");
  return {list, valid ? count : 0};
}

// Calls body(row) for the rows of `span` that are not in the list.
template <class Body>
void for_each_unlisted(const Rows& rows, Span span, Body&& body) {
  if (!rows.list) return;
  const Rows listed = rows.within(span);
  int64_t next = 0;
  for (int64_t r = span.begin; r < span.end; ++r)
    if (next < listed.count && listed[next] == r)
      ++next;
    else
      body(r);
}

template <class T>
T* at(void* base, int64_t offset) {
  return reinterpret_cast<T*>(static_cast<char*>(base) + offset);
}

template <class T>
using Unsigned = std::conditional_t<sizeof(T) < sizeof(int), unsigned,
                                    std::make_unsigned_t<std::conditional_t<std::is_integral_v<T>, T, int>>>;

// Integer arithmetic wraps around, as in torch: computed in unsigned types, since signed overflow is undefined (also for
// narrow types, which are promoted to int).
template <class T, class Op>
T wrap(T a, T b, Op op) {
  if constexpr (std::is_integral_v<T>)
    return static_cast<T>(op(static_cast<Unsigned<T>>(a), static_cast<Unsigned<T>>(b)));
  else
    return op(a, b);
}

struct Add {
  template <class T> static T f(T a, T b) {
    return wrap(a, b, [](auto x, auto y) { return x + y; });
  }
};
struct Mul {
  template <class T> static T f(T a, T b) {
    return wrap(a, b, [](auto x, auto y) { return x * y; });
  }
};
struct Maximum {
  template <class T> static T f(T a, T b) { return ((a > b) | (a != a)) ? a : b; }
};  // propagates NaN
struct Minimum {
  template <class T> static T f(T a, T b) { return ((a < b) | (a != a)) ? a : b; }
};

}  // namespace keepdim::ggml
