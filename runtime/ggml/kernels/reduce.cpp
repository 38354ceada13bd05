// Reductions. f32 sums are flushed to f64 every few thousand elements to bound the rounding error. Chunk boundaries depend on
// sizes only, so that results are bitwise independent of the number of threads.
#include "ggml/kernels/reduce.h"

#include <limits>

#include "ggml/simd/lanes.h"

namespace keepdim::ggml {
namespace {

constexpr int64_t kColumns = kReduceColumns;
constexpr int64_t kRows = 64;  // rows accumulated in T before flushing to Acc
constexpr int64_t kMaxShortRun = 64;

// Size of the first reduced dim in one chunk.
int64_t chunk_size(const ReduceJob& job, int64_t chunk) {
  return job.chunk ? std::min(job.chunk, job.inner.dims[0] - chunk * job.chunk) : job.inner.dims[0];
}

// The loop over the reduced dims, restricted to one chunk.
Loop chunk_loop(const ReduceJob& job, int64_t chunk) {
  Loop part = job.inner;
  part.dims[0] = chunk_size(job, chunk);
  return part;
}

// Reduces elements T, or (x - shift)^2 if `squares`, with F to results Out.
template <class F, class T, class Out, bool squares>
struct Reduction {
  using R = Lanes<F, T>;
  using Acc = typename R::Acc;

  const ReduceJob& job;
  const Loop& kept = job.loop;
  const int last = job.inner.rank - 1, tail = kept.rank - 1;  // innermost reduced dim; innermost kept dim
  const int64_t sx = job.inner.strides[1][last];
  // Columns that are accumulated in registers at once, in vectors: at most half of the registers.
  static constexpr int kBlockVectors = std::min<int>(kVector, kColumns / R::kCount);

  // x: an element or a vector of them; shift: likewise, or a single number
  template <class X, class S>
  static X term(X x, S shift) {
    if constexpr (squares)
      return (x - shift) * (x - shift);
    else
      return x;
  }
  T shift_at(int64_t offset) const { return squares ? *at<T>(job.data[2], offset) : T(0); }
  Out finish(Acc a) const {
    if constexpr (std::is_floating_point_v<Acc>)
      return static_cast<Out>(job.divisor == 1 ? a : a / job.divisor);
    else
      return static_cast<Out>(a);
  }

  // Many short runs: kCount of them are reduced together, a lane each.
  bool has_short_runs() const {
    return last == 0 && sx == sizeof(T) && tail >= 0 && !job.chunk && job.count > 0 && job.count <= kMaxShortRun &&
           kept.dims[tail] >= R::kCount / 2;
  }

  void short_runs(int64_t runs, const int64_t* offset) const {
    constexpr int64_t width = R::kCount;
    using V = VectorOf<T>;
    alignas(64) T tile[kMaxShortRun * width] = {}, sums[width];
    const int64_t n = job.count;
    for (int64_t first = 0; first < runs; first += width) {
      const int64_t count = std::min(width, runs - first);
      transpose_rows(at<T>(job.data[1], offset[1] + first * kept.strides[1][tail]), kept.strides[1][tail], count, n, tile);
      V shift = {};
      for (int64_t r = 0; r < count && squares; ++r) shift[r] = shift_at(offset[2] + (first + r) * kept.strides[2][tail]);
      const auto lane = [&](int64_t i) {
        const V x = load_vector(tile + i * width);
        return squares ? (x - shift) * (x - shift) : x;
      };
      V sum[2] = {lane(0), V{} + R::template identity<T>()};
      int64_t i = 1;
      for (; i + 2 <= n; i += 2) sum[1] = F::f(sum[1], lane(i)), sum[0] = F::f(sum[0], lane(i + 1));
      if (i < n) sum[1] = F::f(sum[1], lane(i));
      store_vector(sums, F::f(sum[0], sum[1]));
      for (int64_t r = 0; r < count; ++r)
        *at<Out>(job.data[0], offset[0] + (first + r) * kept.strides[0][tail]) = finish(static_cast<Acc>(sums[r]));
    }
  }

  bool kept_is_contiguous() const {
    return sx != sizeof(T) && kept.strides[1][tail] == sizeof(T) && kept.strides[0][tail] == sizeof(Out);
  }

  // to[j] = reduction of column j of some rows, for `vectors` vectors of columns, in registers. Explicit vectors, since compilers
  // do not vectorise the comparisons of Maximum and Minimum.
  template <int vectors>
  static void reduce_vectors(const T* const* rows, int64_t count, const T* shift, int64_t j, T* to) {
    constexpr int lanes = R::kCount;
    VectorOf<T> sum[vectors];
#pragma GCC unroll 16
    for (int v = 0; v < vectors; ++v) sum[v] = VectorOf<T>{} + R::template identity<T>();
    for (int64_t i = 0; i < count; ++i) {
      const T* const x = rows[i] + j;
#pragma GCC unroll 16
      for (int v = 0; v < vectors; ++v)
        sum[v] = F::f(sum[v], VectorOf<T>(term(load_vector(x + v * lanes), load_vector(shift + j + v * lanes))));
    }
#pragma GCC unroll 16
    for (int v = 0; v < vectors; ++v) store_vector(to + j + v * lanes, sum[v]);
  }

  static void reduce_rows(const T* const* rows, int64_t count, const T* shift, int64_t width, T* to) {
    constexpr int lanes = R::kCount;
    int64_t j = 0;
    for (; j + kBlockVectors * lanes <= width; j += kBlockVectors * lanes)
      reduce_vectors<kBlockVectors>(rows, count, shift, j, to);
    for (; j + 4 * lanes <= width; j += 4 * lanes) reduce_vectors<4>(rows, count, shift, j, to);
    for (; j + lanes <= width; j += lanes) reduce_vectors<1>(rows, count, shift, j, to);
    // Row by row, as the vectors: compilers contract products and sums alike, and all columns round alike.
    std::fill(to + j, to + width, R::template identity<T>());
    for (int64_t i = 0; i < count && j < width; ++i)
      for (int64_t k = j; k < width; ++k) to[k] = F::f(to[k], term(rows[i][k], shift[k]));
  }

  // `count` adjacent results: accumulates rows, a block of kColumns columns at a time.
  void columns(int64_t count, const int64_t* offset) const {
    const Loop inner = chunk_loop(job, offset[0] / job.chunk_bytes);
    const int64_t rows = job.count ? inner.count() : 0;
    // Few columns and adjacent rows: several rows are treated as one wide row.
    const bool dense = inner.rank == 1 && sx == count * static_cast<int64_t>(sizeof(T));
    const int64_t group = dense ? std::clamp<int64_t>(kColumns / count, 1, std::max<int64_t>(rows, 1)) : 1;
    for (int64_t c0 = 0; c0 < count; c0 += kColumns) {
      const int64_t c = std::min(kColumns, count - c0), wide = c * group;
      Acc acc[kColumns];
      T block[kColumns], shift[kColumns];
      std::fill(acc, acc + wide, R::template identity<Acc>());
      for (int64_t g = 0; g < wide; g += c)
        for (int64_t j = 0; j < c; ++j) shift[g + j] = shift_at(offset[2] + (c0 + j) * kept.strides[2][tail]);
      StridedIterator row(inner, inner.rank, 0);
      const auto accumulate_rows = [&](int64_t begin, int64_t end, int64_t step, int64_t width) {
        const T* list[kRows];
        for (int64_t i = begin; i < end;) {
          int64_t n = 0;
          for (; n < kRows && i < end; ++n, i += step) {
            list[n] = at<const T>(job.data[1], offset[1] + (dense ? i * sx : row.offset[1])) + c0;
            if (!dense) row.next();
          }
          reduce_rows(list, n, shift, width, block);
          for (int64_t j = 0; j < width; ++j) acc[j] = F::f(acc[j], static_cast<Acc>(block[j]));
        }
      };
      const int64_t grouped = rows / group * group;
      accumulate_rows(0, grouped, group, wide);
      accumulate_rows(grouped, rows, 1, c);
      for (int64_t g = c; g < wide; g += c)
        for (int64_t j = 0; j < c; ++j) acc[j] = F::f(acc[j], acc[g + j]);
      Out* y = at<Out>(job.data[0], offset[0]) + c0;
      for (int64_t j = 0; j < c; ++j) y[j] = finish(acc[j]);
    }
  }

  // One result of a run that is converted block by block.
  void converted_run(const int64_t* offset) const {
    T block[kLaneBlock];
    const int64_t n = chunk_size(job, offset[0] / job.chunk_bytes);
    Acc acc = R::template identity<Acc>();
    for (int64_t begin = 0; begin < n; begin += kLaneBlock) {
      const int64_t m = std::min(kLaneBlock, n - begin);
      job.read(block, sizeof(T), at<char>(job.data[1], offset[1] + begin * job.width), job.width, m);
      acc = F::f(acc, R::run(block, m));
    }
    *at<Out>(job.data[0], offset[0]) = finish(acc);
  }

  // One result: reduces along the innermost reduced dim, row by row.
  void rows(const int64_t* offset) const {
    if (last == 0 && sx == sizeof(T) && job.count) {  // a single run, which may be short: without a loop nest
      const T shift = shift_at(offset[2]);
      const int64_t n = chunk_size(job, offset[0] / job.chunk_bytes);
      const Acc sum = R::run(at<T>(job.data[1], offset[1]), n, [&](auto v) { return term(v, shift); });
      *at<Out>(job.data[0], offset[0]) = finish(F::f(R::template identity<Acc>(), sum));
      return;
    }
    const Loop inner = chunk_loop(job, offset[0] / job.chunk_bytes);
    const int64_t n = inner.dims[last], rows = job.count ? outer_count(inner) : 0;
    const T shift = shift_at(offset[2]);
    Acc acc = R::template identity<Acc>();
    StridedIterator row(inner, last, 0);
    for (int64_t r = 0; r < rows; ++r, row.next()) {
      T* x = at<T>(job.data[1], offset[1] + row.offset[1]);
      if (sx == sizeof(T)) {
        acc = F::f(acc, R::run(x, n, [&](auto v) { return term(v, shift); }));
      } else {
        for (int64_t i = 0; i < n; ++i) acc = F::f(acc, static_cast<Acc>(term(*at<T>(x, i * sx), shift)));
      }
    }
    *at<Out>(job.data[0], offset[0]) = finish(acc);
  }
};

template <class F, class T, class Out, bool squares>
void reduce(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const ReduceJob*>(userdata);
  const Reduction<F, T, Out, squares> r{job};
  if (job.read)
    return for_each_row(job.loop, job.count, ith, nth, [&](int64_t, const int64_t* offset) { r.converted_run(offset); });
  if (r.kept_is_contiguous()) {
    // Runs of at least kColumns: the grouping of narrow columns must not depend on the number of threads.
    for_each_run(
        job.loop, job.count, ith, nth, [&](int64_t count, const int64_t* offset) { r.columns(count, offset); }, kColumns);
    return;
  }
  if (r.has_short_runs()) {
    const auto body = [&](int64_t runs, const int64_t* offset) { r.short_runs(runs, offset); };
    return for_each_run(job.loop, job.count, ith, nth, body, Register<T>::count);
  }
  for_each_row(job.loop, job.count, ith, nth, [&](int64_t, const int64_t* offset) { r.rows(offset); });
}

// ---- argmax and argmin: the first of equal elements; NaN wins

template <class F, class T>
bool is_better(T a, T b) {
  if (a != a) return b == b;
  return std::is_same_v<F, Maximum> ? a > b : a < b;
}

template <class F, class T>
struct ArgBest {
  T value;
  int64_t position;

  void update(T x, int64_t i) {
    if (is_better<F>(x, value)) value = x, position = i;
  }
};

// Reduces block by block; the position is searched only if a block improves on the best so far.
template <class F, class T>
void update_run(ArgBest<F, T>& best, const T* x, int64_t n, int64_t position) {
  constexpr int64_t block = 1024;
  for (int64_t begin = 0; begin < n; begin += block) {
    const int64_t m = std::min(block, n - begin);
    const T block_best = static_cast<T>(Lanes<F, T>::run(x + begin, m));
    if (!is_better<F>(block_best, best.value)) continue;
    int64_t i = 0;
    while (i < m && x[begin + i] != block_best && !(block_best != block_best && x[begin + i] != x[begin + i])) ++i;
    best = {block_best, position + begin + i};
  }
}

// Position of the first element of a chunk.
int64_t first_position(const ReduceJob& job, int64_t chunk) {
  return chunk * (job.inner.dims[0] ? job.count / job.inner.dims[0] * job.chunk : 0);
}

// `count` adjacent results: compares rows with the best so far, a block of columns at a time.
template <class F, class T>
void argreduce_columns(const ReduceJob& job, int64_t count, const int64_t* offset) {
  const int64_t chunk = offset[0] / job.chunk_bytes, start = first_position(job, chunk);
  const Loop inner = chunk_loop(job, chunk);
  const int64_t rows = inner.count();
  for (int64_t c0 = 0; c0 < count; c0 += kColumns) {
    const int64_t c = std::min(kColumns, count - c0);
    T value[kColumns];
    int64_t* y = at<int64_t>(job.data[0], offset[0]) + c0;
    StridedIterator row(inner, inner.rank, 0);
    for (int64_t i = 0; i < rows; ++i, row.next()) {
      const T* x = at<T>(job.data[1], offset[1] + row.offset[1]) + c0;
      for (int64_t j = 0; j < c; ++j) {
        const bool better = i == 0 || is_better<F>(x[j], value[j]);
        value[j] = better ? x[j] : value[j];
        y[j] = better ? start + i : y[j];
      }
    }
  }
}

// One result, row by row along the innermost reduced dim.
template <class F, class T>
void argreduce_rows(const ReduceJob& job, const int64_t* offset) {
  const int last = job.inner.rank - 1;
  const int64_t sx = job.inner.strides[1][last];
  const int64_t chunk = offset[0] / job.chunk_bytes, start = first_position(job, chunk);
  ArgBest<F, T> best{*at<T>(job.data[1], offset[1]), start};
  if (last == 0 && sx == sizeof(T)) {  // a single run, which may be short: without a loop nest
    update_run(best, at<T>(job.data[1], offset[1]), chunk_size(job, chunk), start);
    *at<int64_t>(job.data[0], offset[0]) = best.position;
    return;
  }
  const Loop inner = chunk_loop(job, chunk);
  const int64_t n = inner.dims[last], rows = outer_count(inner);
  StridedIterator row(inner, last, 0);
  for (int64_t r = 0; r < rows; ++r, row.next()) {
    const int64_t position = start + r * n;
    T* x = at<T>(job.data[1], offset[1] + row.offset[1]);
    if (sx == sizeof(T))
      update_run(best, x, n, position);
    else
      for (int64_t i = 0; i < n; ++i) best.update(*at<T>(x, i * sx), position + i);
  }
  *at<int64_t>(job.data[0], offset[0]) = best.position;
}

template <class F, class T>
void argreduce(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const ReduceJob*>(userdata);
  const Loop& kept = job.loop;
  const int tail = kept.rank - 1;
  const bool contiguous = kept.strides[1][tail] == sizeof(T) && kept.strides[0][tail] == sizeof(int64_t);
  if (job.inner.strides[1][job.inner.rank - 1] != sizeof(T) && contiguous)
    for_each_run(kept, job.count, ith, nth, [&](int64_t n, const int64_t* offset) { argreduce_columns<F, T>(job, n, offset); });
  else
    for_each_row(kept, job.count, ith, nth, [&](int64_t, const int64_t* offset) { argreduce_rows<F, T>(job, offset); });
}

// Merges the positions of the chunks. Operands of `loop`: result, x, positions; consecutive chunks are `chunk_bytes` apart.
template <class F, class T>
void argreduce_merge(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const ReduceJob*>(userdata);
  for_each_row(job.loop, job.count, ith, nth, [&](int64_t, const int64_t* offset) {
    const auto position = [&](int64_t chunk) { return *at<int64_t>(job.data[2], offset[2] + chunk * job.chunk_bytes); };
    const auto value = [&](int64_t i) {
      return *at<T>(job.data[1], offset[1] + StridedIterator(job.inner, job.inner.rank, i).offset[1]);
    };
    ArgBest<F, T> best{value(position(0)), position(0)};
    for (int64_t chunk = 1; chunk < job.count; ++chunk) best.update(value(position(chunk)), position(chunk));
    *at<int64_t>(job.data[0], offset[0]) = best.position;
  });
}

template <class Visit>
Kernel dispatch_dtype(DType dtype, Visit&& visit) {
  switch (dtype) {
    case DType::f32: return visit(float());
    case DType::f64: return visit(double());
    case DType::i64: return visit(int64_t());
    case DType::i32: return visit(int32_t());
    default: return nullptr;
  }
}

// Sums also convert between f32 and f64, since chunk results are stored in f64.
template <bool squares>
Kernel sum_kernel(DType from, DType to) {
  if (from == DType::f32 && to == DType::f64) return reduce<Add, float, double, squares>;
  if (from == DType::f64 && to == DType::f32) return reduce<Add, double, float, squares>;
  if (from != to) return nullptr;
  return dispatch_dtype(from, [](auto x) -> Kernel { return reduce<Add, decltype(x), decltype(x), squares>; });
}

template <class F>
Kernel same_dtype_kernel(DType dtype) {
  return dispatch_dtype(dtype, [](auto x) -> Kernel { return reduce<F, decltype(x), decltype(x), false>; });
}

}  // namespace

Kernel reduce_kernel(ReduceFn fn, DType from, DType to) {
  switch (fn) {
    case ReduceFn::sum: return sum_kernel<false>(from, to);
    case ReduceFn::squares: return sum_kernel<true>(from, to);
    case ReduceFn::prod: return same_dtype_kernel<Mul>(from);
    case ReduceFn::amax: return same_dtype_kernel<Maximum>(from);
    case ReduceFn::amin: return same_dtype_kernel<Minimum>(from);
    case ReduceFn::any: return reduce<Maximum, uint8_t, uint8_t, false>;
    case ReduceFn::all: return reduce<Minimum, uint8_t, uint8_t, false>;
    default: return nullptr;
  }
}

Kernel argreduce_kernel(ReduceFn fn, DType dtype) {
  return dispatch_dtype(dtype, [&](auto x) -> Kernel {
    using T = decltype(x);
    return fn == ReduceFn::amax ? argreduce<Maximum, T> : argreduce<Minimum, T>;
  });
}

Kernel argreduce_merge_kernel(ReduceFn fn, DType dtype) {
  return dispatch_dtype(dtype, [&](auto x) -> Kernel {
    using T = decltype(x);
    return fn == ReduceFn::amax ? argreduce_merge<Maximum, T> : argreduce_merge<Minimum, T>;
  });
}

}  // namespace keepdim::ggml
