// How kernels walk over strided operands, and the arithmetic that more than one of them needs.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>

#include "build.h"

namespace keepdim::ggml {

constexpr int64_t kGrain = 2048;  // elements below which splitting a run costs more than it gives

struct Span {
  int64_t begin, end;
};

inline Span share(int64_t count, int ith, int nth) {
  return {count / nth * ith + std::min<int64_t>(count % nth, ith),
          count / nth * (ith + 1) + std::min<int64_t>(count % nth, ith + 1)};
}

// Byte offsets of all operands at one position of the outer dims, moved on without divisions.
struct Odometer {
  const Loop& loop;
  const int rank;  // of the dims walked over
  int64_t index[kMaxRank] = {};
  int64_t offset[kMaxOperands] = {};

  Odometer(const Loop& loop, int rank, int64_t start) : loop(loop), rank(rank) {
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

inline int64_t outer_count(const Loop& loop) {
  int64_t rows = 1;
  for (int d = 0; d + 1 < loop.rank; ++d) rows *= loop.dims[d];
  return rows;
}

// Calls body(n, offsets) for runs along the innermost dim, this thread's share of them; `work` is an element's. Runs are
// not split below `least` elements.
template <class Body>
void each_run(const Loop& loop, int64_t work, int ith, int nth, Body&& body, int64_t least = 1) {
  const int last = loop.rank - 1;
  const int64_t n = loop.dims[last], rows = outer_count(loop);
  if (n <= 0 || rows <= 0) return;
  if (rows * n * work < 2 * kGrain) {
    if (ith) return;
    nth = 1;
  }
  const int64_t most = std::clamp<int64_t>(n * work / kGrain, 1, std::max<int64_t>(1, n / least));
  const int64_t parts = rows >= nth ? 1 : std::min<int64_t>((nth + rows - 1) / rows, most);
  const Span span = share(rows * parts, ith, nth);
  Odometer at(loop, last, span.begin / parts);
  int64_t part = span.begin % parts;
  for (int64_t i = span.begin; i < span.end; ++i) {
    const Span run = share(n, static_cast<int>(part), static_cast<int>(parts));
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
void each_run(const Loop& loop, int ith, int nth, Body&& body) {
  each_run(loop, 1, ith, nth, std::forward<Body>(body));
}

// Calls body(position, offsets) for every position of the whole nest, this thread's share of them.
template <class Body>
void each_row(const Loop& loop, int64_t work, int ith, int nth, Body&& body) {
  const int64_t rows = loop.count();
  if (rows <= 0) return;
  if (rows * work < 2 * kGrain) {
    if (ith) return;
    nth = 1;
  }
  const Span span = share(rows, ith, nth);
  Odometer at(loop, loop.rank, span.begin);
  for (int64_t i = span.begin; i < span.end; ++i, at.next()) body(i, at.offset);
}

// The same, but threads take positions as they come, more at a time while there are many: for units that take long. True
// in one thread, when all of them are done.
template <class Body>
bool each_unit(const Job& job, const Loop& loop, int64_t work, int ith, int nth, Body&& body) {
  const int64_t count = loop.count();
  if (nth == 1 || count * work < 2 * kGrain) {
    each_row(loop, work, ith, nth, std::forward<Body>(body));
    return ith == 0;
  }
  Units& units = job.units;
  for (int64_t begin = units.next.load(std::memory_order_relaxed); begin < count;) {
    const int64_t end = begin + std::max<int64_t>(1, (count - begin) / (4 * nth));
    if (!units.next.compare_exchange_weak(begin, end, std::memory_order_relaxed)) continue;
    Odometer at(loop, loop.rank, begin);
    for (int64_t i = begin; i < end; ++i, at.next()) body(i, at.offset);
    begin = units.next.load(std::memory_order_relaxed);
  }
  if (units.left.fetch_add(1, std::memory_order_acq_rel) + 1 < nth) return false;
  units.left.store(0, std::memory_order_relaxed);
  units.next.store(0, std::memory_order_relaxed);
  return true;
}

// Rows that are computed, in order: so many, or those that are listed.
struct Rows {
  const int64_t* list;  // nullptr: the first, second, ..
  int64_t count;

  int64_t operator[](int64_t i) const { return list ? list[i] : i; }
  bool adjoin(Span some) const { return !list || list[some.end - 1] - list[some.begin] == some.end - some.begin - 1; }
  Rows within(Span rows) const {  // only with a list
    const int64_t* first = std::lower_bound(list, list + count, rows.begin);
    return {first, std::lower_bound(first, list + count, rows.end) - first};
  }
};

// Those that an operand lists out of so many, with -1 behind the last; without it all. None where it is no such list.
inline Rows rows_of(const Job& job, const void* operand, int64_t most) {
  const auto* list = static_cast<const int64_t*>(operand);
  if (!list) return {nullptr, most};
  const int64_t count = std::find(list, list + most, -1) - list;
  bool fine = true;
  for (int64_t i = 0, before = -1; i < count; before = list[i++]) fine = fine & (list[i] > before) & (list[i] < most);
  if (!fine) job.fail(0, "what lists its rows is not in order, or beyond them.");
  return {list, fine ? count : 0};
}

// Calls body(row) for the others of `some`.
template <class Body>
void for_others(const Rows& rows, Span some, Body&& body) {
  if (!rows.list) return;
  const Rows own = rows.within(some);
  int64_t next = 0;
  for (int64_t r = some.begin; r < some.end; ++r)
    if (next < own.count && own[next] == r) ++next;
    else body(r);
}

template <class T>
T* at(void* base, int64_t offset) {
  return reinterpret_cast<T*>(static_cast<char*>(base) + offset);
}

template <class To, class From>
To bits(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  std::memcpy(&y, &x, sizeof(y));
  return y;
}

// e^x as e^r * 2^n with |r| <= ln 2 / 2.
struct Exponential {
  float power;  // of r
  int32_t n;
};
inline Exponential exponential_of(float x) {
  const float shifted = x * 1.44269504f + 12582912.0f;
  const float n = shifted - 12582912.0f;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  return {p * (r * r) + r + 1.0f, bits<int32_t>(shifted) - bits<int32_t>(12582912.0f)};
}
inline float power_of_two(int32_t n) { return bits<float>(static_cast<uint32_t>(n + 127) << 23); }

// Within 2 ulp, with the limits of expf.
inline float fast_exp(float x) {
  x = x < -104.0f ? -104.0f : x;
  x = x > 89.0f ? 89.0f : x;
  const auto [power, n] = exponential_of(x);
  const int32_t half = n >> 1;  // in two factors: the ends of the range are beyond one exponent
  return power * power_of_two(half) * power_of_two(n - half);
}

inline float fast_tanh(float x) {
  const float t = std::fabs(x), s = x * x;
  float p = -5.70498872745e-3f;
  p = p * s + 2.06390887954e-2f;
  p = p * s - 5.37397155531e-2f;
  p = p * s + 1.33314422036e-1f;
  p = p * s - 3.33332819422e-1f;
  const float small = p * s * x + x;
  const float large = std::copysign(1.0f - 2.0f / (fast_exp(2.0f * t) + 1.0f), x);
  return t < 0.625f ? small : large;
}

inline float fast_erf(float x) {
  const float t = std::fabs(x), s = x * x;
  float r = -1.72853470e-5f * t + 3.83197126e-4f;
  r = r * s + (-3.88396438e-3f * t + 2.42546219e-2f);
  r = r * t - 1.06777877e-1f;
  r = r * t - 6.34846687e-1f;
  r = r * t - 1.28717512e-1f;
  r = r * t - t;
  const auto [power, n] = exponential_of(r < -87.0f ? -87.0f : r);  // r <= 0, and beyond this all is 1
  const float large = std::copysign(1.0f - power * power_of_two(n), x);
  float q = -5.96761703e-4f;
  q = q * s + 4.99119423e-3f;
  q = q * s - 2.67681349e-2f;
  q = q * s + 1.12819925e-1f;
  q = q * s - 3.76125336e-1f;
  q = q * s + 1.28379166e-1f;
  const float small = q * x + x;
  return t > 0.927734375f ? large : small;
}

// Of the normal distribution, from -inf to x; within 4e-8. Its logarithm below zero is nearly a polynomial.
inline float fast_normal_integral(float x) {
  const float t = std::fabs(x);
  float p = -1.60694285e-8f;
  p = p * t + 4.99527516e-7f;
  p = p * t - 6.62925004e-6f;
  p = p * t + 4.76672794e-5f;
  p = p * t - 1.76716087e-4f;
  p = p * t - 3.30095609e-5f;
  p = p * t + 4.85261949e-3f;
  p = p * t - 3.63729857e-2f;
  p = p * t - 3.18300426e-1f;
  p = p * t - 7.97885418e-1f;
  p = p * t - 6.93147182e-1f;
  const auto [power, n] = exponential_of(p < -87.0f ? -87.0f : p);
  const float rest = p < -87.0f ? 0.0f : power * power_of_two(n);
  return x > 0 ? 1.0f - rest : rest;
}

template <class T>
using Unsigned = std::conditional_t<sizeof(T) < sizeof(int), unsigned,
                                    std::make_unsigned_t<std::conditional_t<std::is_integral_v<T>, T, int>>>;

// Integers wrap, as in torch: the arithmetic is done unsigned, and of narrow ones not in int, which they would become.
template <class T, class Op>
T wrap(T a, T b, Op op) {
  if constexpr (std::is_integral_v<T>)
    return static_cast<T>(op(static_cast<Unsigned<T>>(a), static_cast<Unsigned<T>>(b)));
  else
    return op(a, b);
}

struct Add { template <class T> static T f(T a, T b) { return wrap(a, b, [](auto x, auto y) { return x + y; }); } };
struct Mul { template <class T> static T f(T a, T b) { return wrap(a, b, [](auto x, auto y) { return x * y; }); } };
struct Maximum { template <class T> static T f(T a, T b) { return ((a > b) | (a != a)) ? a : b; } };  // a NaN wins
struct Minimum { template <class T> static T f(T a, T b) { return ((a < b) | (a != a)) ? a : b; } };

}  // namespace keepdim::ggml
