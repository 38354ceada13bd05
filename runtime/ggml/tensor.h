// Strided tensors and loop nests. Dims are in torch's order.
#pragma once
#include <cstdint>
#include <initializer_list>
#include <string>

#include "core/op_rules.h"

namespace keepdim::ggml {

constexpr int kMaxOperands = 4;  // per loop, including the result

// A strided view of a buffer. Permute, slice, select and expand are views, without a copy.
struct Tensor {
  DType dtype = DType::f32;
  int rank = 0;
  int32_t buffer = -1;  // -1: none (empty tensor)
  int64_t offset = 0;   // in bytes
  int64_t dims[kMaxRank] = {};
  int64_t strides[kMaxRank] = {};  // in bytes; 0 along broadcast dims

  int64_t count() const;
  bool contiguous() const;
  int64_t width() const { return static_cast<int64_t>(dtype_bytes(dtype)); }  // bytes per element, or per block if quantised
  void pack();                                                                // sets contiguous strides
};

// A loop nest over up to kMaxOperands strided operands, outermost dim first.
struct Loop {
  int rank = 0;
  int64_t dims[kMaxRank];
  int64_t strides[kMaxOperands][kMaxRank];  // result, then operands; in bytes

  void push(int64_t size, int64_t result, int64_t first = 0, int64_t second = 0, int64_t third = 0);
  void merge();  // merges adjacent dims where all operands allow it; leaves at least one dim
  int64_t count() const;
};

bool broadcastable(const Tensor& x, const Tensor& out);  // whether x broadcasts to out (torch's rule)
bool same_dims(const Tensor& a, const Tensor& b);
bool same_layout(const Tensor& a, const Tensor& b);  // equal dims, and strides where they matter
bool is_channels_last(const Tensor& t);              // stored so, and not contiguous
bool orders_channels_last(const Tensor& t);          // so ordered, maybe with gaps: channels of a larger image
void set_channels_last(Tensor& t);                   // [batch, channels, spatial dims]: strides with the channels innermost
std::string dims_text(const Tensor& t);              // "[3, 48]"
// Stride of x along dim d of a shape of `rank` dims that x is broadcast to; 0 along broadcast dims.
inline int64_t broadcast_stride(const Tensor& x, int rank, int d) {
  const int x_dim = d - (rank - x.rank);
  return x_dim >= 0 && x.dims[x_dim] != 1 ? x.strides[x_dim] : 0;
}
// Loop over `out`, in the order of its memory, with the operands broadcast to it, merged.
Loop broadcast(const Tensor& out, std::initializer_list<const Tensor*> ins);

}  // namespace keepdim::ggml
