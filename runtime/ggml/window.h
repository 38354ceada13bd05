// Jobs of the kernels that slide over images: convolutions, pools, resampling, padding. An image has three spatial
// dims, outermost first; those that a node does not have are of size 1.
#pragma once
#include "../geometry.h"
#include "loops.h"

namespace keepdim::ggml {

constexpr int kSpace = 3;

// The outputs of one spatial dim that share their taps: `first`, `first + step`, …; for the j-th of them the input is
// read at j * stride + tap.offset, where that is inside. A convolution has one phase; a transposed one has one for each
// remainder of its stride, so that no zero is multiplied.
struct Tap {
  int64_t position, offset;  // in the kernel; in the input
  int64_t begin, end;        // the j for which that is inside
};
struct Phase {
  int64_t first = 0, step = 1, count = 0, stride = 1;
  int64_t taps = 0;
  const Tap* tap = nullptr;
};

struct ConvJob : Job {  // images and result are contiguous
  int64_t batch = 0, groups = 1, channels = 0, rows = 0;  // channels and rows (of the result): of one group
  int64_t in[kSpace] = {}, out[kSpace] = {}, kernel[kSpace] = {};
  int64_t w_group = 0, w_row = 0, w_channel = 0;  // byte strides of the weight; its kernel is contiguous
  int64_t phases[kSpace] = {};
  const Phase* phase[kSpace] = {};
  bool transposed = false;
};

struct PoolJob : Job {  // images and result are contiguous
  int64_t planes = 0;
  int64_t in[kSpace] = {}, out[kSpace] = {}, step[kSpace] = {};
  const Window* window[kSpace] = {};
  int64_t divisor = 0;  // 0: the product of the weights
  // Of windows at equal distances, the taps along the innermost dim; none where they differ.
  Phase row;
};

// y[n, i1, i2, …] = x[n, table1[i1], table2[i2], …], or `value` where one of them is -1. A table holds byte offsets.
struct RemapJob : Job {
  int rank = 0;
  int64_t image = 0;  // bytes of x[n]
  int64_t dims[kMaxRank] = {};
  const int64_t* table[kMaxRank] = {};
  Span run{0, 0};  // of the last dim: read from neighbours
  int64_t width = 0, unit = 0;  // bytes of an element; of one number in it
  char value[8] = {};
};

struct ResampleJob : Job {  // images and result are contiguous
  int64_t planes = 0;
  int64_t in[kSpace] = {}, out[kSpace] = {}, taps[kSpace] = {};
  const Sample* sample[kSpace] = {};
};

// Each of `rows` has `channels` of `size` elements. Operands: x, weight, bias, mean, variance, all of the channels; where
// mean is missing, it and the variance are the row's own. `groups` of channels have weights of their own.
struct ChannelJob : Job {
  int64_t rows = 0, channels = 0, size = 0, groups = 1;
  double eps = 0;
};

// Kernels; nullptr for a dtype that they do not have.
Kernel conv_kernel();                       // ConvJob, f32: tiles of a matrix product
Kernel direct_conv_kernel(DType dtype);     // ConvJob: sums of shifted rows, for groups of one channel and other dtypes
Kernel max_pool_kernel(DType dtype);        // PoolJob
Kernel max_pool_index_kernel(DType dtype);  // PoolJob, the result is i64
Kernel avg_pool_kernel(DType dtype);        // PoolJob
Kernel remap_kernel(int64_t width);         // RemapJob
Kernel resample_kernel();                   // ResampleJob, f32
Kernel channel_norm_kernel(DType dtype);    // ChannelJob

}  // namespace keepdim::ggml
