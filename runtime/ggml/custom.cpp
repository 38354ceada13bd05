// The elementwise kernel. Like all kernels here: run by ggml's threads through ggml_custom_4d, for any strides and any
// rank, with the same bits whatever the number of threads; a kernel cannot fail, except through RunError.
#include "loops.h"

namespace keepdim::ggml {
namespace {

constexpr int64_t kChunk = 512;  // elements that stay in the first cache between reading, computing and writing

// Operands that lie as the function reads them are used in place; others go through a chunk of the type it computes in.
void map(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const MapJob*>(userdata);
  const int last = job.loop.rank - 1;
  const int64_t out_stride = job.loop.strides[0][last];
  const bool out_direct = !job.write && out_stride == job.width[0];
  bool chunked = !out_direct;
  bool direct[kMaxOperands];
  unsigned single = 0;
  for (int o = 1; o <= job.operands; ++o) {
    const int64_t stride = job.loop.strides[o][last];
    direct[o] = !job.read[o] && stride == job.width[o];
    if (stride == 0) single |= 1u << (o - 1);
    else chunked |= !direct[o];
  }
  alignas(64) char room[kMaxOperands][kChunk * sizeof(int64_t)];
  each_run(job.loop, ith, nth, [&](int64_t n, const int64_t* offset) {
    const void* x[kMaxOperands - 1] = {};
    for (int o = 1; o <= job.operands; ++o) {
      char* from = at<char>(job.data[o], offset[o]);
      x[o - 1] = from;
      if (single >> (o - 1) & 1 && job.read[o]) {
        job.read[o](room[o], 0, from, 0, 1);
        x[o - 1] = room[o];
      }
    }
    char* to = at<char>(job.data[0], offset[0]);
    const int64_t step = chunked ? kChunk : n;
    for (int64_t begin = 0; begin < n; begin += step) {
      const int64_t m = std::min(step, n - begin);
      for (int o = 1; o <= job.operands; ++o) {
        if (single >> (o - 1) & 1) continue;
        const int64_t stride = job.loop.strides[o][last];
        char* from = at<char>(job.data[o], offset[o] + begin * stride);
        if (direct[o]) {
          x[o - 1] = from;
        } else {
          const Convert read = job.read[o] ? job.read[o] : job.move[o];
          read(room[o], job.width[o], from, stride, m);
          x[o - 1] = room[o];
        }
      }
      char* y = to + begin * out_stride;
      job.block(job, out_direct ? y : room[0], x, single, m);
      if (!out_direct) (job.write ? job.write : job.move[0])(y, out_stride, room[0], job.width[0], m);
    }
  });
}

}  // namespace

Kernel map_kernel() { return map; }

}  // namespace keepdim::ggml
