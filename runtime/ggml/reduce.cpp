// Reductions. Sums of f32 go through f64 every few thousand elements, so that their error does not grow with the
// length. What is reduced is split in chunks by its size alone, so that the bits do not depend on the threads.
#include <limits>

#include "lanes.h"

namespace keepdim::ggml {
namespace {

constexpr int64_t kColumns = 256;  // reduced at once
constexpr int64_t kRows = 64;      // of them added up in their own type before the sum moves on

// The part of `inner` that a result is made of: the result's chunk is the outermost dim of `loop`.
Loop part_of(const ReduceJob& job, int64_t chunk) {
  Loop part = job.inner;
  if (job.chunk) part.dims[0] = std::min(job.chunk, part.dims[0] - chunk * job.chunk);
  return part;
}

template <class F, class T, class Out, bool squares>
void reduce(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const ReduceJob*>(userdata);
  using R = Lanes<F, T>;
  using Acc = typename R::Acc;
  const Loop& kept = job.loop;
  const int last = job.inner.rank - 1, tail = kept.rank - 1;
  const int64_t sx = job.inner.strides[1][last];
  const auto finish = [&](Acc a) {
    if constexpr (std::is_floating_point_v<Acc>) return static_cast<Out>(job.divisor == 1 ? a : a / job.divisor);
    else return static_cast<Out>(a);
  };
  const auto term = [](T x, T shift) -> T { return squares ? (x - shift) * (x - shift) : x; };
  const auto shift_at = [&](int64_t offset) { return squares ? *at<T>(job.data[2], offset) : T(0); };

  if (sx != sizeof(T) && kept.strides[1][tail] == sizeof(T) && kept.strides[0][tail] == sizeof(Out)) {
    // What is kept is contiguous: whole rows are added up, a block of columns at a time.
    each_run(kept, job.count, ith, nth, [&](int64_t count, const int64_t* offset) {
      const Loop inner = part_of(job, offset[0] / job.chunk_bytes);
      const int64_t rows = job.count ? inner.count() : 0;
      // Rows of few columns that lie one after the other are taken several at a time, as one wide row.
      const bool dense = inner.rank == 1 && sx == count * static_cast<int64_t>(sizeof(T));
      const int64_t group = dense ? std::clamp<int64_t>(kColumns / count, 1, std::max<int64_t>(rows, 1)) : 1;
      for (int64_t c0 = 0; c0 < count; c0 += kColumns) {
        const int64_t c = std::min(kColumns, count - c0), wide = c * group;
        Acc acc[kColumns];
        T block[kColumns], shift[kColumns];
        std::fill(acc, acc + wide, R::template first<Acc>());
        for (int64_t j = 0; j < wide; ++j) shift[j] = shift_at(offset[2] + (c0 + j % c) * kept.strides[2][tail]);
        Odometer row(inner, inner.rank, 0);
        const auto take = [&](int64_t begin, int64_t end, int64_t step, int64_t width) {
          for (int64_t i = begin; i < end;) {
            std::fill(block, block + width, R::template first<T>());
            for (const int64_t last_row = std::min(end, i + kRows * step); i < last_row; i += step) {
              const int64_t at_row = dense ? i * sx : row.offset[1];
              const T* x = at<T>(job.data[1], offset[1] + at_row) + c0;
              for (int64_t j = 0; j < width; ++j) block[j] = F::f(block[j], term(x[j], shift[j]));
              if (!dense) row.next();
            }
            for (int64_t j = 0; j < width; ++j) acc[j] = F::f(acc[j], static_cast<Acc>(block[j]));
          }
        };
        const int64_t grouped = rows / group * group;
        take(0, grouped, group, wide);
        take(grouped, rows, 1, c);
        for (int64_t j = c; j < wide; ++j) acc[j % c] = F::f(acc[j % c], acc[j]);
        Out* y = at<Out>(job.data[0], offset[0]) + c0;
        for (int64_t j = 0; j < c; ++j) y[j] = finish(acc[j]);
      }
    }, kColumns);  // how few columns are grouped must not depend on the threads
    return;
  }
  each_row(kept, job.count, ith, nth, [&](int64_t, const int64_t* offset) {
    const Loop inner = part_of(job, offset[0] / job.chunk_bytes);
    const int64_t n = inner.dims[last], rows = job.count ? outer_count(inner) : 0;
    const T shift = shift_at(offset[2]);
    Acc acc = R::template first<Acc>();
    Odometer row(inner, last, 0);
    for (int64_t r = 0; r < rows; ++r, row.next()) {
      T* x = at<T>(job.data[1], offset[1] + row.offset[1]);
      if (sx == sizeof(T)) {
        acc = F::f(acc, R::run(x, n, [&](T v) { return term(v, shift); }));
      } else {
        for (int64_t i = 0; i < n; ++i) acc = F::f(acc, static_cast<Acc>(term(*at<T>(x, i * sx), shift)));
      }
    }
    *at<Out>(job.data[0], offset[0]) = finish(acc);
  });
}

// ---- the position of the largest or smallest: the first of equals, and a NaN before all

template <class F, class T>
bool beats(T a, T b) {
  if (a != a) return b == b;
  return std::is_same_v<F, Maximum> ? a > b : a < b;
}

template <class F, class T>
struct Best {
  T value;
  int64_t position;

  void take(T x, int64_t i) {
    if (beats<F>(x, value)) value = x, position = i;
  }
};

// Block by block: the block's own best says whether to look for its place.
template <class F, class T>
void take_run(Best<F, T>& best, const T* x, int64_t n, int64_t position) {
  constexpr int64_t block = 1024;
  for (int64_t begin = 0; begin < n; begin += block) {
    const int64_t m = std::min(block, n - begin);
    const T top = static_cast<T>(Lanes<F, T>::run(x + begin, m));
    if (!beats<F>(top, best.value)) continue;
    int64_t i = 0;
    while (i < m && x[begin + i] != top && !(top != top && x[begin + i] != x[begin + i])) ++i;
    best = {top, position + begin + i};
  }
}

template <class F, class T>
void reduce_position(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const ReduceJob*>(userdata);
  const Loop& kept = job.loop;
  const int last = job.inner.rank - 1, tail = kept.rank - 1;
  const int64_t sx = job.inner.strides[1][last];
  const int64_t step = job.inner.dims[0] ? job.count / job.inner.dims[0] * job.chunk : 0;  // elements of a chunk

  if (sx != sizeof(T) && kept.strides[1][tail] == sizeof(T) && kept.strides[0][tail] == sizeof(int64_t)) {
    each_run(kept, job.count, ith, nth, [&](int64_t count, const int64_t* offset) {
      const int64_t chunk = offset[0] / job.chunk_bytes;
      const Loop inner = part_of(job, chunk);
      const int64_t rows = inner.count();
      for (int64_t c0 = 0; c0 < count; c0 += kColumns) {
        const int64_t c = std::min(kColumns, count - c0);
        T value[kColumns];
        int64_t* y = at<int64_t>(job.data[0], offset[0]) + c0;
        Odometer row(inner, inner.rank, 0);
        for (int64_t i = 0; i < rows; ++i, row.next()) {
          const T* x = at<T>(job.data[1], offset[1] + row.offset[1]) + c0;
          for (int64_t j = 0; j < c; ++j) {
            const bool better = i == 0 || beats<F>(x[j], value[j]);
            value[j] = better ? x[j] : value[j];
            y[j] = better ? chunk * step + i : y[j];
          }
        }
      }
    });
    return;
  }
  each_row(kept, job.count, ith, nth, [&](int64_t, const int64_t* offset) {
    const int64_t chunk = offset[0] / job.chunk_bytes;
    const Loop inner = part_of(job, chunk);
    const int64_t n = inner.dims[last], rows = outer_count(inner);
    Best<F, T> best{*at<T>(job.data[1], offset[1]), chunk * step};
    Odometer row(inner, last, 0);
    for (int64_t r = 0; r < rows; ++r, row.next()) {
      const int64_t position = chunk * step + r * n;
      T* x = at<T>(job.data[1], offset[1] + row.offset[1]);
      if (sx == sizeof(T)) take_run(best, x, n, position);
      else
        for (int64_t i = 0; i < n; ++i) best.take(*at<T>(x, i * sx), position + i);
    }
    *at<int64_t>(job.data[0], offset[0]) = best.position;
  });
}

// The best of the chunks' positions: `loop` has the result, x and the positions; those of the next chunk are
// `chunk_bytes` further.
template <class F, class T>
void best_position(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const ReduceJob*>(userdata);
  each_row(job.loop, job.count, ith, nth, [&](int64_t, const int64_t* offset) {
    const auto position = [&](int64_t chunk) { return *at<int64_t>(job.data[2], offset[2] + chunk * job.chunk_bytes); };
    const auto value = [&](int64_t i) {
      return *at<T>(job.data[1], offset[1] + Odometer(job.inner, job.inner.rank, i).offset[1]);
    };
    Best<F, T> best{value(position(0)), position(0)};
    for (int64_t chunk = 1; chunk < job.count; ++chunk) best.take(value(position(chunk)), position(chunk));
    *at<int64_t>(job.data[0], offset[0]) = best.position;
  });
}

template <class Visit>
Kernel by_type(DType dtype, Visit&& visit) {
  switch (dtype) {
    case DType::f32: return visit(float());
    case DType::f64: return visit(double());
    case DType::i64: return visit(int64_t());
    case DType::i32: return visit(int32_t());
    default: return nullptr;
  }
}

// Sums of floats also between f32 and f64: chunks are kept in f64.
template <bool squares>
Kernel sum_kernel(DType from, DType to) {
  if (from == DType::f32 && to == DType::f64) return reduce<Add, float, double, squares>;
  if (from == DType::f64 && to == DType::f32) return reduce<Add, double, float, squares>;
  if (from != to) return nullptr;
  return by_type(from, [](auto x) -> Kernel { return reduce<Add, decltype(x), decltype(x), squares>; });
}

template <class F>
Kernel same_kernel(DType dtype) {
  return by_type(dtype, [](auto x) -> Kernel { return reduce<F, decltype(x), decltype(x), false>; });
}

}  // namespace

Kernel reduce_kernel(Fn fn, DType from, DType to) {
  switch (fn) {
    case Fn::sum: return sum_kernel<false>(from, to);
    case Fn::squares: return sum_kernel<true>(from, to);
    case Fn::prod: return same_kernel<Mul>(from);
    case Fn::amax: return same_kernel<Maximum>(from);
    case Fn::amin: return same_kernel<Minimum>(from);
    case Fn::any: return reduce<Maximum, bool, bool, false>;
    case Fn::all: return reduce<Minimum, bool, bool, false>;
    default: return nullptr;
  }
}

Kernel position_kernel(Fn fn, DType dtype) {
  return by_type(dtype, [&](auto x) -> Kernel {
    using T = decltype(x);
    return fn == Fn::amax ? reduce_position<Maximum, T> : reduce_position<Minimum, T>;
  });
}

Kernel best_position_kernel(Fn fn, DType dtype) {
  return by_type(dtype, [&](auto x) -> Kernel {
    using T = decltype(x);
    return fn == Fn::amax ? best_position<Maximum, T> : best_position<Minimum, T>;
  });
}

}  // namespace keepdim::ggml
