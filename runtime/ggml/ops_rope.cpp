// Rotary positions: y = x * cos + rotated(x) * sin, where rotated(x) is the second half of a row negated, then the first.
#include <algorithm>

#include "loops.h"
#include "ops.h"

namespace keepdim::ggml {
namespace {

struct RopeJob : Job {  // `loop` is over the rows
  int64_t half = 0;
  int64_t strides[kMaxOperands] = {};  // along a row, in bytes
};

template <class T>
void rope(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const RopeJob*>(userdata);
  const int64_t half = job.half, *strides = job.strides;
  const bool packed = std::all_of(strides, strides + kMaxOperands, [](int64_t s) { return s == sizeof(T); });
  each_row(job.loop, 8 * half, ith, nth, [&](int64_t, const int64_t* offset) {
    T* row[kMaxOperands];
    for (int o = 0; o < kMaxOperands; ++o) row[o] = at<T>(job.data[o], offset[o]);
    auto [y, x, cos, sin] = row;
    // The result may be written over an operand: both halves are read before either is written.
    if (packed) {
#pragma GCC ivdep
      for (int64_t i = 0; i < half; ++i) {
        const T a = x[i], b = x[i + half];
        const T first = a * cos[i] - b * sin[i], second = b * cos[i + half] + a * sin[i + half];
        y[i] = first;
        y[i + half] = second;
      }
      return;
    }
    const auto get = [&](int o, int64_t i) -> T& { return *at<T>(row[o], i * strides[o]); };
    for (int64_t i = 0, j = half; i < half; ++i, ++j) {
      const T a = get(1, i), b = get(1, j);
      const T first = a * get(2, i) - b * get(3, i), second = b * get(2, j) + a * get(3, j);
      get(0, i) = first;
      get(0, j) = second;
    }
  });
}

Tensor rope_row(Build& b) {
  const Tensor x = same_shape(b);
  need_fit(b, b.in(1));
  need_fit(b, b.in(2));
  const int last = x.rank - 1;
  if (last < 0 || x.dims[last] % 2) b.refuse("a row of " + dims_text(x) + " has no two halves.");
  Tensor out = b.out();
  b.allocate(out);
  if (out.buffer < 0) return out;
  auto* job = b.make<RopeJob>();
  job->half = x.dims[last] / 2;
  const Tensor* operands[] = {&out, &x, &b.in(1), &b.in(2)};
  int64_t strides[kMaxOperands];
  for (int d = 0; d < x.rank; ++d) {
    for (int o = 0; o < kMaxOperands; ++o) {
      const Tensor& t = *operands[o];
      const int own = d - (x.rank - t.rank);
      strides[o] = own >= 0 && t.dims[own] != 1 ? t.strides[own] : 0;
    }
    if (d == last) std::copy(strides, strides + kMaxOperands, job->strides);
    else job->loop.push(x.dims[d], strides[0], strides[1], strides[2], strides[3]);
  }
  job->loop.merge();
  const Kernel kernel = x.dtype == DType::f64 ? rope<double> : rope<float>;
  b.step(kernel, job, out, {&x, &b.in(1), &b.in(2)}, 4.0 * static_cast<double>(out.count()), true);
  return out;
}

constexpr Row kRows[] = {
    {"rope", rope_row},
};

}  // namespace

Table rope_rows() { return {kRows, std::size(kRows)}; }

}  // namespace keepdim::ggml
