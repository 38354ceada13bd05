// Reading and writing at positions which are data. An index out of range is an error of the call: nothing is read or
// written for it.
#include "loops.h"

namespace keepdim::ggml {
namespace {

[[gnu::noinline, gnu::cold]] int64_t out_of_range(const IndexJob& job, int64_t given, int64_t offset) {
  const std::string low = std::to_string(job.wrap ? -job.limit : 0), high = std::to_string(job.limit - 1);
  job.fail(offset, "index " + std::to_string(given) + " is " +
                       (job.limit ? "out of range " + low + ".." + high : "not in an empty dim") + ".");
  return -1;
}

// Where the index at a byte offset points to, in bytes; -1 when it is out of range. I: the index's type.
template <class I>
struct Locate {
  const IndexJob& job;
  const char* data;
  const int64_t limit, scale, wrap;

  Locate(const IndexJob& job, int operand)
      : job(job), data(static_cast<const char*>(job.data[operand])), limit(job.limit), scale(job.scale),
        wrap(job.wrap ? job.limit : 0) {}

  int64_t operator()(int64_t offset) const {
    const int64_t given = *reinterpret_cast<const I*>(data + offset);
    const int64_t index = given + (given < 0 ? wrap : 0);
    if (__builtin_expect(static_cast<uint64_t>(index) < static_cast<uint64_t>(limit), 1)) return index * scale;
    return out_of_range(job, given, offset);
  }
};

// Calls body with the Locate of the index's type.
template <class Body>
void with_index(const IndexJob& job, int operand, Body&& body) {
  if (job.wide) body(Locate<int64_t>(job, operand));
  else body(Locate<int32_t>(job, operand));
}

// Several indices of one element: their bytes are added up, and -1 stays.
void offsets(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const IndexJob*>(userdata);
  const int last = job.loop.rank - 1;
  const int64_t sy = job.loop.strides[0][last], sx = job.loop.strides[1][last], sb = job.loop.strides[2][last];
  with_index(job, 1, [&](const auto& locate) {
    each_run(job.loop, ith, nth, [&](int64_t n, const int64_t* offset) {
      for (int64_t i = 0; i < n; ++i) {
        const int64_t here = locate(offset[1] + i * sx);
        const int64_t before = job.data[2] ? *at<int64_t>(job.data[2], offset[2] + i * sb) : 0;
        *at<int64_t>(job.data[0], offset[0] + i * sy) = here < 0 || before < 0 ? -1 : here + before;
      }
    });
  });
}

template <class T>
void gather(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const IndexJob*>(userdata);
  const int last = job.loop.rank - 1;
  constexpr int64_t w = sizeof(T);
  const int64_t sy = job.loop.strides[0][last], sx = job.loop.strides[1][last], si = job.loop.strides[2][last];
  with_index(job, 2, [&](const auto& locate) {
    each_run(job.loop, ith, nth, [&](int64_t n, const int64_t* offset) {
      char* y = at<char>(job.data[0], offset[0]);
      if (si) {
        char* x = static_cast<char*>(job.data[1]) + offset[1];
        for (int64_t i = 0; i < n; ++i) {
          const int64_t from = locate(offset[2] + i * si);
          *at<T>(y, i * sy) = from < 0 ? T(0) : *at<T>(x, i * sx + from);
        }
        return;
      }
      const int64_t from = locate(offset[2]);
      if (from < 0) {
        for (int64_t i = 0; i < n; ++i) *at<T>(y, i * sy) = T(0);
        return;
      }
      char* x = at<char>(job.data[1], offset[1] + from);
      if (sy == w && sx == w) std::memcpy(y, x, n * w);
      else
        for (int64_t i = 0; i < n; ++i) *at<T>(y, i * sy) = *at<T>(x, i * sx);
    });
  });
}

struct Last { template <class T> static T f(T, T b) { return b; } };

// Each thread walks over all of the source, or over its part of a dim along which nothing meets; what it writes to is
// its own. So elements that meet are taken in their order, whatever the number of threads.
template <class F, class T>
void scatter(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const IndexJob*>(userdata);
  Loop loop = job.loop;
  const int last = loop.rank - 1;
  int64_t base[3] = {};
  Span own{0, job.limit};  // indices that this thread writes to
  // One index an element: to look at all of them takes a thread as long as to write them all.
  const bool alone = job.split < 0 && loop.strides[2][last];
  if (loop.count() < 2 * kGrain || alone) {
    if (ith) return;
  } else if (job.split < 0) {
    own = share(job.limit, ith, nth);
  } else {
    const Span part = share(loop.dims[job.split], ith, nth);
    loop.dims[job.split] = part.end - part.begin;
    for (int o = 0; o < 3; ++o) base[o] = part.begin * loop.strides[o][job.split];
  }
  own.begin *= job.scale;
  own.end *= job.scale;
  const int64_t sy = loop.strides[0][last], sx = loop.strides[1][last], si = loop.strides[2][last];
  // Where every element of a run goes to a row of its own, few columns at a time: their rows stay in the cache.
  constexpr int64_t columns = 32;
  const int64_t size = loop.dims[last], step = si && sy ? columns : std::max<int64_t>(size, 1);
  with_index(job, 2, [&](const auto& locate) {
    for (int64_t c = 0; c < size; c += step) {
      loop.dims[last] = std::min(step, size - c);
      each_run(loop, 0, 1, [&](int64_t n, const int64_t* offset) {
        char* y = static_cast<char*>(job.data[0]) + base[0] + offset[0] + c * sy;
        char* x = at<char>(job.data[1], base[1] + offset[1] + c * sx);
        const int64_t index = base[2] + offset[2] + c * si;
        if (si) {
          for (int64_t i = 0; i < n; ++i) {
            const int64_t to = locate(index + i * si);
            if (to < own.begin || to >= own.end) continue;
            T& element = *at<T>(y, i * sy + to);
            element = F::f(element, *at<T>(x, i * sx));
          }
          return;
        }
        const int64_t to = locate(index);
        if (to < own.begin || to >= own.end) return;
        y += to;
        if (sy == sizeof(T) && sx == sizeof(T)) {
          T* to_run = reinterpret_cast<T*>(y);
          const T* from = reinterpret_cast<const T*>(x);
#pragma GCC ivdep
          for (int64_t i = 0; i < n; ++i) to_run[i] = F::f(to_run[i], from[i]);
        } else {
          for (int64_t i = 0; i < n; ++i) *at<T>(y, i * sy) = F::f(*at<T>(y, i * sy), *at<T>(x, i * sx));
        }
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

// One thread: where a position goes depends on all before it.
void list(ggml_tensor*, int ith, int, void* userdata) {
  const auto& job = *static_cast<const ListJob*>(userdata);
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

Kernel list_kernel() { return list; }
Kernel offset_kernel() { return offsets; }

Kernel gather_kernel(size_t width) {
  return width == 1 ? gather<uint8_t> : width == 2 ? gather<uint16_t> : width == 4 ? gather<uint32_t> : gather<uint64_t>;
}

Kernel scatter_kernel(Put put, DType dtype) {
  switch (put) {
    case Put::add: return scatter_of<Add>(dtype);
    case Put::prod: return scatter_of<Mul>(dtype);
    case Put::amax: return scatter_of<Maximum>(dtype);
    case Put::amin: return scatter_of<Minimum>(dtype);
    default: break;
  }
  const size_t width = dtype_bytes(dtype);
  return width == 1   ? scatter<Last, uint8_t>
         : width == 2 ? scatter<Last, uint16_t>
         : width == 4 ? scatter<Last, uint32_t>
                      : scatter<Last, uint64_t>;
}

}  // namespace keepdim::ggml
