// Jobs of the image kernels: convolution, pooling, resampling, padding, grid_sample, fold. Images have three spatial dims,
// outermost first; missing ones have size 1.
#pragma once
#include <limits>

#include "core/geometry.h"
#include "ggml/kernels/elementwise.h"
#include "ggml/kernels/strided_loop.h"

namespace keepdim::ggml {

constexpr int kSpatialDims = 3;

// The outputs of one spatial dim that use the same kernel taps: first, first + step, … Output j reads the input at
// j * stride + tap.offset if that is in bounds. A convolution has one phase; a transposed one has a phase per remainder modulo
// its stride (sub-pixel decomposition), so that no inserted zeros are multiplied.
struct Tap {
  int64_t position, offset;  // kernel index; input offset
  int64_t begin, end;        // outputs j that read inside of the input
};
struct Phase {
  int64_t first = 0, step = 1, count = 0, stride = 1;
  int64_t taps = 0;
  const Tap* tap = nullptr;
};

struct ConvJob : Job {                                    // input and result are contiguous
  int64_t batch = 0, groups = 1, channels = 0, rows = 0;  // input and output channels (rows) per group
  int64_t in[kSpatialDims] = {}, out[kSpatialDims] = {}, kernel[kSpatialDims] = {};
  int64_t w_group = 0, w_row = 0, w_channel = 0;  // byte strides of the weight; its spatial dims are contiguous
  int64_t phases[kSpatialDims] = {};
  const Phase* phase[kSpatialDims] = {};
  bool transposed = false;
};

// Weight of a convolution by groups; strides in elements, its taps are contiguous.
struct ConvWeight {
  int64_t groups = 1, channels = 0, columns = 0, taps = 0;  // channels and columns (of the result): of one group
  int64_t group = 0, column = 0, channel = 0;
  bool narrow = false;    // groups of few channels, packed as [taps, channels, columns of all groups]
  bool winograd = false;  // packed by pack_winograd_weight
};

// An activation that is computed in registers. Gated: x * f(x), as hardswish and silu.
struct ConvFunction {
  enum class Kind : uint8_t { none, clamp, hardsigmoid, sigmoid } kind = Kind::none;
  bool gated = false;
  float low = 0, high = std::numeric_limits<float>::infinity();  // of clamp
};

// Images are channels-last: x [batch, d, h, w, channels of all groups]; y and the residual alike. Operands: x, bias, residual.
struct ChannelsLastConvJob : Job {
  int64_t batch = 0, groups = 1, channels = 0, columns = 0;  // channels and columns (of the result): of one group
  int64_t in[kSpatialDims] = {}, out[kSpatialDims] = {}, kernel[kSpatialDims] = {};
  int64_t phases[kSpatialDims] = {};
  const Phase* phase[kSpatialDims] = {};
  int64_t padding[2] = {};             // Winograd: before the image, along h and w
  bool merged = false;                 // taps along w are adjacent inputs, and never outside of the image: one run
  const float* packed = nullptr;       // pack_conv_weight
  const float* zeros = nullptr;        // a run of them
  ConvFunction function;               // of the result
  ElementwiseFn activation = nullptr;  // then applied to it
};

// Rows of an image with columns of zeros around them: x [batch, channels, lines, width] or channels-last → y [batch, lines,
// padded width, channels].
struct PadColumnsJob : Job {
  int64_t batch = 0, channels = 0, lines = 0, width = 0;
  int64_t left = 0, padded = 0;  // columns of zeros before the image; width of y
  bool channels_last = false;    // x is stored so
};

struct PoolJob : Job {  // input and result are contiguous
  int64_t planes = 0;
  int64_t channels = 1;  // innermost; above 1 for channels-last images
  int64_t in[kSpatialDims] = {}, out[kSpatialDims] = {}, step[kSpatialDims] = {};
  const Window* window[kSpatialDims] = {};
  int64_t divisor = 0;  // 0: the product of the window weights
  int skipped = 0;      // last spatial dims of size 1 that the arrays do not have
  // Taps along the innermost dim if the windows have a constant stride; otherwise no taps.
  Phase row;
};

// Padding and nearest: y[n, i1, i2, …] = x[n, table1[i1], table2[i2], …], or `value` if any entry is -1. Tables hold byte
// offsets.
struct RemapJob : Job {
  int rank = 0;
  int64_t image = 0;  // bytes of x[n]
  int64_t dims[kMaxRank] = {};
  const int64_t* table[kMaxRank] = {};
  Span run{0, 0};               // range of the last dim that is contiguous in x
  int64_t width = 0, unit = 0;  // bytes per element; bytes per scalar inside of it
  char value[8] = {};
};

struct ResampleJob : Job {  // input and result are contiguous
  int64_t planes = 0;
  int64_t in[kSpatialDims] = {}, out[kSpatialDims] = {}, taps[kSpatialDims] = {};
  const Sample* sample[kSpatialDims] = {};
};

// Group norm and batch norm over x [rows, channels, size]. Operands: x; weight, bias, mean, variance [groups * channels].
// Without mean and variance the statistics are computed per row. Row r uses channel group r % groups.
struct ChannelNormJob : Job {
  int64_t rows = 0, channels = 0, size = 0, groups = 1;
  double eps = 0;
};

enum class GridPadding : uint8_t { zeros, clamp, reflect };

// Samples images at the points of a grid [batch, .., rank] in [-1, 1]. Image, grid and result are contiguous.
struct GridSampleJob : Job {
  int64_t batch = 0, channels = 0, points = 0;  // points: per image
  int rank = 2;
  int64_t in[kSpatialDims] = {};  // the `rank` spatial dims
  GridPadding padding_mode = GridPadding::zeros;
  bool align_corners = false;  // -1 and 1 are the centres, not the edges, of the outermost pixels
};

// col2im: sums patches [batch, channels * kernel, blocks] into images; both are contiguous.
struct FoldJob : Job {
  int64_t planes = 0;  // batch * channels
  int64_t size[2] = {}, kernel[2] = {}, stride[2] = {}, padding[2] = {}, dilation[2] = {}, blocks[2] = {};
};

// Kernels; nullptr for an unsupported dtype.
Kernel conv_kernel();                        // ConvJob, f32: implicit GEMM
Kernel conv_channels_last_kernel();          // ChannelsLastConvJob, f32
Kernel narrow_groups_kernel(int64_t width);  // ChannelsLastConvJob, f32, `width` channels and columns per group
Kernel pad_columns_kernel();                 // PadColumnsJob, f32
Kernel conv_winograd_kernel();               // ChannelsLastConvJob, f32: 3 x 3, stride 1
bool fits_winograd(const ConvWeight& w);     // whether it is faster, for a 3 x 3 weight of two spatial dims
int64_t packed_winograd_floats(const ConvWeight& w);
void pack_winograd_weight(float* packed, const float* weight, const ConvWeight& w);
bool has_narrow_groups(const ConvWeight& w, const int64_t* kernel);
int64_t packed_conv_floats(const ConvWeight& w);
void pack_conv_weight(float* packed, const float* weight, const ConvWeight& w);
Kernel direct_conv_kernel(DType dtype);     // ConvJob: direct convolution, for depthwise and for other dtypes
Kernel max_pool_kernel(DType dtype);        // PoolJob
Kernel max_pool_index_kernel(DType dtype);  // PoolJob, the result is i64
Kernel avg_pool_kernel(DType dtype);        // PoolJob
Kernel remap_kernel(int64_t width);         // RemapJob
Kernel resample_kernel();                   // ResampleJob, f32
Kernel channel_norm_kernel(DType dtype);    // ChannelNormJob
// Group norm of channels-last images, ChannelNormJob with one row per image and all its channels, f32. Operands of the second:
// x, weight, bias, and the result of the first [rows, blocks, 2, channels]: means and sums of squares.
Kernel block_statistics_kernel();
Kernel normalise_pixels_kernel();
int64_t block_count(int64_t pixels);               // blocks of pixels of an image
Kernel grid_sample_kernel(int taps, DType dtype);  // GridSampleJob; taps along a dim: 1 nearest, 2 linear, 4 cubic
Kernel fold_kernel(DType dtype);                   // FoldJob

}  // namespace keepdim::ggml
