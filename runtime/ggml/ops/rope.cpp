// Rotary position embedding: y = x * cos + rotate_half(x) * sin, where rotate_half([a, b]) = [-b, a].
#include <algorithm>

#include "ggml/kernels/strided_loop.h"
#include "ggml/ops/ops.h"

namespace keepdim::ggml {
namespace {

struct RopeJob : Job {  // `loop` runs over the rows
  int64_t half = 0;
  int64_t strides[kMaxOperands] = {};  // byte strides along a row
};

template <class T>
void rope(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const RopeJob*>(userdata);
  const int64_t half = job.half, *strides = job.strides;
  const bool packed = std::all_of(strides, strides + kMaxOperands, [](int64_t s) { return s == sizeof(T); });
  for_each_row(job.loop, 8 * half, ith, nth, [&](int64_t, const int64_t* offset) {
    T* row[kMaxOperands];
    for (int o = 0; o < kMaxOperands; ++o) row[o] = at<T>(job.data[o], offset[o]);
    auto [y, x, cos, sin] = row;
    // The result may alias an operand: both elements are read before either is written.
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

Tensor rope_op(Build& b) {
  const Tensor x = check_same_shape(b);
  check_broadcast(b, b.in(1));
  check_broadcast(b, b.in(2));
  const int last = x.rank - 1;
  if (last < 0 || x.dims[last] % 2) b.refuse("the last dim of " + dims_text(x) + " is not even.");
  Tensor out = b.out();
  b.allocate(out);
  if (out.buffer < 0) return out;
  auto* job = b.make<RopeJob>();
  job->half = x.dims[last] / 2;
  const Tensor* operands[] = {&out, &x, &b.in(1), &b.in(2)};
  int64_t strides[kMaxOperands];
  for (int d = 0; d < x.rank; ++d) {
    for (int o = 0; o < kMaxOperands; ++o) strides[o] = broadcast_stride(*operands[o], x.rank, d);
    if (d == last)
      std::copy(strides, strides + kMaxOperands, job->strides);
    else
      job->loop.push(x.dims[d], strides[0], strides[1], strides[2], strides[3]);
  }
  job->loop.merge();
  const Kernel kernel = x.dtype == DType::f64 ? rope<double> : rope<float>;
  b.step(kernel, job, out, {&x, &b.in(1), &b.in(2)}, 4.0 * static_cast<double>(out.count()), true);
  return out;
}

constexpr OpBuilder kOps[] = {
    {"rope", rope_op},
};

}  // namespace

OpTable rope_ops() { return {kOps, std::size(kOps)}; }

}  // namespace keepdim::ggml
