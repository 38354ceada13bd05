// Jobs of the kernels that read at places which are data (samples of an image, bags of rows), of distances, and of
// patches that are added up.
#pragma once
#include "tile.h"
#include "window.h"

namespace keepdim::ggml {

enum class Border : uint8_t { zeros, clamp, reflect };

// An image read at the places of a grid [batch, .., rank] of [-1, 1]. Image, grid and result are contiguous.
struct GridJob : Job {
  int64_t batch = 0, channels = 0, places = 0;  // places: of one image's grid
  int rank = 2;
  int64_t in[kSpace] = {};  // the rank spatial dims
  Border border = Border::zeros;
  bool corners = false;  // -1 and 1 are the centres of the outermost pixels, not their edges
};

// Patches [batch, channels * kernel, blocks] added up to images; both are contiguous.
struct FoldJob : Job {
  int64_t planes = 0;  // images times channels
  int64_t size[2] = {}, kernel[2] = {}, stride[2] = {}, padding[2] = {}, dilation[2] = {}, blocks[2] = {};
};

// y[i, j] = |a[i] - b[j]| in the norm p; `loop` is over the batch, the result is contiguous.
struct DistanceJob : Job {
  int64_t rows = 0, columns = 0, size = 0;               // size: of a point
  int64_t a_row = 0, a_step = 0, b_row = 0, b_step = 0;  // in bytes
  bool pairs = false;                                    // only j > i, in the order of the rows
  Block power = nullptr;                                 // for other norms, with the number p or 1 / p
  MapJob exponent, root;
};

enum class Bag : uint8_t { sum, mean, max };

// Rows of a table added up by bags. Operands: the table, i64 indices, i64 offsets of the bags, a factor for each index.
struct BagJob : Job {
  int64_t bags = 0, count = 0, rows = 0, columns = 0;  // count: of indices; rows and columns: of the table
  int64_t offsets = 0;                                 // as many as bags, or one more: the end
  int64_t padding = -1;                                // an index that is left out
  Bag bag = Bag::sum;
  Convert write = nullptr;                             // of what was computed
};

// Kernels; nullptr for a dtype that they do not have.
Kernel grid_sample_kernel(int taps, DType dtype);  // GridJob; taps along a dim: 1 nearest, 2 linear, 4 cubic
Kernel fold_kernel(DType dtype);                   // FoldJob
Kernel distance_kernel(double p, DType dtype);     // DistanceJob
Kernel bag_kernel(DType dtype);                    // BagJob

}  // namespace keepdim::ggml
