// Gather and scatter. An index out of range fails the call; nothing is read or written for it.
#include "ggml/kernels/gather_scatter.h"

#include "ggml/kernels/strided_loop.h"

namespace keepdim::ggml {
namespace {

[[gnu::noinline, gnu::cold]] int64_t out_of_range(const IndexJob& job, int64_t index_value, int64_t offset) {
  const std::string low = std::to_string(job.wrap ? -job.limit : 0), high = std::to_string(job.limit - 1);
  job.fail(offset, "index " + std::to_string(index_value) + " is " +
                       (job.limit ? "out of range " + low + ".." + high : "not in an empty dim") + ".");
  return -1;
}

// Maps the index at a byte offset of the index tensor to a byte offset in the indexed tensor; -1 if out of range. I is the
// index type.
template <class I>
struct IndexToOffset {
  const IndexJob& job;
  const char* data;
  const int64_t limit, scale, wrap;

  IndexToOffset(const IndexJob& job, int operand)
      : job(job),
        data(static_cast<const char*>(job.data[operand])),
        limit(job.limit),
        scale(job.scale),
        wrap(job.wrap ? job.limit : 0) {}

  // Calls body(i, byte offset) for n indices that are `step` bytes apart, and invalid(i) for those out of range. One loop: it
  // costs less than locating a block of indices and then using it. `unit`: a scale to be compiled for.
  template <int64_t unit, class Body, class Invalid>
  void each(int64_t offset, int64_t step, int64_t n, Body&& body, Invalid&& invalid) const {
    const auto run = [&](auto bytes, auto factor) __attribute__((always_inline)) {
      constexpr int64_t kAtOnce = 4;  // checked together
      const char* const from = data + offset;
      const auto end = static_cast<uint64_t>(limit);
      const int64_t add = wrap;
      const auto index_at = [=](int64_t i) __attribute__((always_inline)) {
        const int64_t value = *reinterpret_cast<const I*>(from + i * bytes);
        return static_cast<uint64_t>(value + (value >> 63 & add));
      };
      const auto one = [&](int64_t i) {
        const int64_t to = (*this)(offset + i * bytes);
        to < 0 ? invalid(i) : body(i, to);
      };
      int64_t i = 0;
      for (; i + kAtOnce <= n; i += kAtOnce) {
        const uint64_t a = index_at(i), b = index_at(i + 1), c = index_at(i + 2), d = index_at(i + 3);
        if (__builtin_expect((a < end) & (b < end) & (c < end) & (d < end), 1)) {
          body(i, static_cast<int64_t>(a) * factor);
          body(i + 1, static_cast<int64_t>(b) * factor);
          body(i + 2, static_cast<int64_t>(c) * factor);
          body(i + 3, static_cast<int64_t>(d) * factor);
        } else {
          for (int64_t j = i; j < i + kAtOnce; ++j) one(j);
        }
      }
      for (; i < n; ++i) one(i);
    };
    constexpr std::integral_constant<int64_t, sizeof(I)> adjacent;
    constexpr std::integral_constant<int64_t, unit> known;
    if (step != adjacent)
      run(step, scale);
    else if (scale == known)
      run(adjacent, known);
    else
      run(adjacent, scale);
  }

  int64_t operator()(int64_t offset) const {
    const int64_t index_value = *reinterpret_cast<const I*>(data + offset);
    const int64_t index = index_value + (index_value >> 63 & wrap);
    if (__builtin_expect(static_cast<uint64_t>(index) < static_cast<uint64_t>(limit), 1)) return index * scale;
    return out_of_range(job, index_value, offset);
  }
};

// Calls body with the IndexToOffset of the index dtype.
template <class Body>
void with_index(const IndexJob& job, int operand, Body&& body) {
  if (job.wide)
    body(IndexToOffset<int64_t>(job, operand));
  else
    body(IndexToOffset<int32_t>(job, operand));
}

// Combines several index tensors: adds the byte offsets of one index to those of the previous ones; -1 propagates.
void offsets(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const IndexJob*>(userdata);
  const int last = job.loop.rank - 1;
  const int64_t sy = job.loop.strides[0][last], sx = job.loop.strides[1][last], sb = job.loop.strides[2][last];
  with_index(job, 1, [&](const auto& locate) {
    for_each_run(job.loop, ith, nth, [&](int64_t n, const int64_t* offset) {
      for (int64_t i = 0; i < n; ++i) {
        const int64_t here = locate(offset[1] + i * sx);
        const int64_t before = job.data[2] ? *at<int64_t>(job.data[2], offset[2] + i * sb) : 0;
        *at<int64_t>(job.data[0], offset[0] + i * sy) = here < 0 || before < 0 ? -1 : here + before;
      }
    });
  });
}

// n elements, each with its own index.
template <class T, class L>
void gather_elements(const L& locate, int64_t n, char* y, int64_t sy, char* x, int64_t sx, int64_t index, int64_t si) {
  const auto read = [&](auto y_step, auto x_step) __attribute__((always_inline)) {
    locate.template each<sizeof(T)>(
        index, si, n,
        [=](int64_t i, int64_t from) __attribute__((always_inline)) { *at<T>(y, i * y_step) = *at<T>(x, i * x_step + from); },
        [=](int64_t i) { *at<T>(y, i * y_step) = T(0); });
  };
  if (sy == sizeof(T) && sx == 0)
    read(std::integral_constant<int64_t, sizeof(T)>(), std::integral_constant<int64_t, 0>());
  else
    read(sy, sx);
}

constexpr int64_t kSharedIndices = 1024;  // indices of several rows that are located at once

// Rows of n elements that share their indices.
template <class T, class L>
void gather_columns(const IndexJob& job, const L& locate, int64_t rows, int64_t n, const int64_t* offset) {
  const int last = job.loop.rank - 1;
  const auto& strides = job.loop.strides;
  const int64_t sy = strides[0][last], sx = strides[1][last], si = strides[2][last];
  const int64_t y_row = strides[0][last - 1], x_row = strides[1][last - 1];
  int64_t from[kSharedIndices];
  for (int64_t begin = 0; begin < n; begin += kSharedIndices) {
    const int64_t m = std::min(kSharedIndices, n - begin);
    bool valid = true;
    locate.template each<sizeof(T)>(
        offset[2] + begin * si, si, m, [&](int64_t i, int64_t to) __attribute__((always_inline)) { from[i] = to + i * sx; },
        [&](int64_t) { valid = false; });
    char* y = at<char>(job.data[0], offset[0] + begin * sy);
    char* x = at<char>(job.data[1], offset[1] + begin * sx);
    int64_t r = 0;
    for (; valid && r + 4 <= rows; r += 4, y += 4 * y_row, x += 4 * x_row)
      for (int64_t i = 0; i < m; ++i)
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) *at<T>(y, k * y_row + i * sy) = *at<T>(x, k * x_row + from[i]);
    for (; r < rows; ++r, y += y_row, x += x_row)
      for (int64_t i = 0; i < m; ++i) *at<T>(y, i * sy) = valid ? *at<T>(x, from[i]) : T(0);
  }
}

// Rows of n elements, each row with its own index.
template <class T, class L>
void gather_rows(const IndexJob& job, const L& locate, int64_t rows, int64_t n, const int64_t* offset) {
  const int last = job.loop.rank - 1;
  const auto& strides = job.loop.strides;
  constexpr int64_t w = sizeof(T);
  const int64_t sy = strides[0][last], sx = strides[1][last];
  for (int64_t r = 0; r < rows; ++r) {
    char* const y = at<char>(job.data[0], offset[0] + r * strides[0][last - 1]);
    const int64_t from = locate(offset[2] + r * strides[2][last - 1]);
    if (from < 0) {
      for (int64_t i = 0; i < n; ++i) *at<T>(y, i * sy) = T(0);
      continue;
    }
    char* const x = at<char>(job.data[1], offset[1] + r * strides[1][last - 1] + from);
    if (sy == w && sx == w)
      copy_bytes(y, x, n * w);
    else
      for (int64_t i = 0; i < n; ++i) *at<T>(y, i * sy) = *at<T>(x, i * sx);
  }
}

template <class T>
void gather(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const IndexJob*>(userdata);
  const int last = job.loop.rank - 1;
  const int64_t sy = job.loop.strides[0][last], sx = job.loop.strides[1][last], si = job.loop.strides[2][last];
  with_index(job, 2, [&](const auto& locate) {
    if (si == 0 && last > 0) {
      const int64_t n = job.loop.dims[last];
      return for_each_plane(job.loop, ith, nth,
                            [&](int64_t rows, const int64_t* offset) { gather_rows<T>(job, locate, rows, n, offset); });
    }
    if (last > 0 && job.loop.strides[2][last - 1] == 0 && job.loop.dims[last - 1] >= 4 * nth) {
      const int64_t n = job.loop.dims[last];
      return for_each_plane(job.loop, ith, nth,
                            [&](int64_t rows, const int64_t* offset) { gather_columns<T>(job, locate, rows, n, offset); });
    }
    for_each_run(job.loop, ith, nth, [&](int64_t n, const int64_t* offset) {
      gather_elements<T>(locate, n, at<char>(job.data[0], offset[0]), sy, at<char>(job.data[1], offset[1]), sx, offset[2], si);
    });
  });
}

struct Assign {
  template <class T> static T f(T, T b) { return b; }
};

// Work of one thread in a scatter: a slice of one loop dim, or the whole loop restricted to a range of target offsets. Either
// way, elements with the same target are applied in order, independent of the number of threads.
struct ScatterShare {
  Loop loop;
  int64_t base[3] = {};  // byte offsets of the slice
  Span owned;            // target byte offsets that this thread writes
  bool owns_all = true;
  bool idle = false;

  ScatterShare(const IndexJob& job, int ith, int nth) : loop(job.loop), owned{0, job.limit} {
    // One index per element: scanning all indices costs as much as the scatter itself, so one thread does it all.
    const bool single = job.split < 0 && loop.strides[2][loop.rank - 1];
    if (loop.count() < 2 * kGrain || single) {
      idle = ith > 0;
    } else if (job.split < 0) {
      owned = split_range(job.limit, ith, nth);
      owns_all = nth == 1;
    } else {
      const Span part = split_range(loop.dims[job.split], ith, nth);
      loop.dims[job.split] = part.end - part.begin;
      for (int o = 0; o < 3; ++o) base[o] = part.begin * loop.strides[o][job.split];
    }
    owned.begin *= job.scale;
    owned.end *= job.scale;
  }
  bool owns(int64_t position) const { return position >= owned.begin && position < owned.end; }
};

// n elements, each with its own index.
template <class F, class T, class L>
void scatter_elements(const ScatterShare& s, const L& locate, int64_t n, char* y, char* x, int64_t index,
                      const int64_t (&step)[3]) {
  const auto update_owned = [&](auto owns, auto y_step, auto x_step) __attribute__((always_inline)) {
    const auto update = [=](int64_t i, int64_t to) __attribute__((always_inline)) {
      if (!owns(to)) return;
      T& element = *at<T>(y, i * y_step + to);
      element = F::f(element, *at<T>(x, i * x_step));
    };
    locate.template each<sizeof(T)>(index, step[2], n, update, [](int64_t) {});
  };
  const Span owned = s.owned;
  const auto all = [](int64_t) { return true; };
  if (!s.owns_all)
    update_owned([=](int64_t to) { return to >= owned.begin && to < owned.end; }, step[0], step[1]);
  else if (step[0] == 0 && step[1] == sizeof(T))
    update_owned(all, std::integral_constant<int64_t, 0>(), std::integral_constant<int64_t, sizeof(T)>());
  else
    update_owned(all, step[0], step[1]);
}

// n elements that share one index.
template <class F, class T>
void scatter_run(int64_t n, char* y, char* x, const int64_t (&step)[3]) {
  if (step[0] == sizeof(T) && step[1] == sizeof(T)) {
    T* to = reinterpret_cast<T*>(y);
    const T* from = reinterpret_cast<const T*>(x);
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) to[i] = F::f(to[i], from[i]);
  } else {
    for (int64_t i = 0; i < n; ++i) *at<T>(y, i * step[0]) = F::f(*at<T>(y, i * step[0]), *at<T>(x, i * step[1]));
  }
}

template <class F, class T>
void scatter(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const IndexJob*>(userdata);
  ScatterShare s(job, ith, nth);
  if (s.idle) return;
  Loop& loop = s.loop;
  const int last = loop.rank - 1;
  const int64_t step[3] = {loop.strides[0][last], loop.strides[1][last], loop.strides[2][last]};
  // If the elements of a run go to different rows, and the rows do not fit in the cache, few columns are processed at a time. Of
  // rows that fit this is slower: the addresses of a column are often congruent, and conflict in a few sets of the cache.
  constexpr int64_t columns = 32, cache_bytes = 8 << 20;
  const int64_t size = loop.dims[last];
  const bool narrow = step[2] && step[0] && job.limit * job.scale > cache_bytes;
  const int64_t width = narrow ? columns : std::max<int64_t>(size, 1);
  with_index(job, 2, [&](const auto& locate) {
    for (int64_t c = 0; c < size; c += width) {
      loop.dims[last] = std::min(width, size - c);
      for_each_run(loop, 0, 1, [&](int64_t n, const int64_t* offset) {
        char* y = static_cast<char*>(job.data[0]) + s.base[0] + offset[0] + c * step[0];
        char* x = at<char>(job.data[1], s.base[1] + offset[1] + c * step[1]);
        const int64_t index = s.base[2] + offset[2] + c * step[2];
        if (step[2]) return scatter_elements<F, T>(s, locate, n, y, x, index, step);
        const int64_t to = locate(index);
        if (s.owns(to)) scatter_run<F, T>(n, y + to, x, step);
      });
    }
  });
}

template <class F>
Kernel scatter_of(DType dtype) {
  switch (dtype) {
    case DType::f32: return scatter<F, float>;
    case DType::f64: return scatter<F, double>;
    case DType::i64: return scatter<F, int64_t>;
    case DType::i32: return scatter<F, int32_t>;
    default: return nullptr;
  }
}

// Single-threaded: each output position depends on all previous elements.
void nonzero(ggml_tensor*, int ith, int, void* userdata) {
  const auto& job = *static_cast<const NonzeroJob*>(userdata);
  if (ith) return;
  const auto* x = static_cast<const uint8_t*>(job.data[1]);
  auto* y = static_cast<int64_t*>(job.data[0]);
  int64_t found = 0;
  for (int64_t i = 0; i < job.count; ++i) {
    y[found] = i;
    found += x[i] != 0;
  }
  std::fill(y + found, y + job.count, -1);
}

}  // namespace

Kernel nonzero_kernel() { return nonzero; }
Kernel offset_kernel() { return offsets; }

Kernel gather_kernel(size_t width) {
  return width == 1 ? gather<uint8_t> : width == 2 ? gather<uint16_t> : width == 4 ? gather<uint32_t> : gather<uint64_t>;
}

Kernel scatter_kernel(ScatterFn fn, DType dtype) {
  switch (fn) {
    case ScatterFn::add: return scatter_of<Add>(dtype);
    case ScatterFn::prod: return scatter_of<Mul>(dtype);
    case ScatterFn::amax: return scatter_of<Maximum>(dtype);
    case ScatterFn::amin: return scatter_of<Minimum>(dtype);
    default: break;
  }
  const size_t width = dtype_bytes(dtype);
  return width == 1   ? scatter<Assign, uint8_t>
         : width == 2 ? scatter<Assign, uint16_t>
         : width == 4 ? scatter<Assign, uint32_t>
                      : scatter<Assign, uint64_t>;
}

}  // namespace keepdim::ggml
