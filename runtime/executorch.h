// What backend.cpp and method.cpp share of ExecuTorch's types. No other file includes ExecuTorch's headers.
#pragma once
#include <executorch/runtime/core/error.h>
#include <executorch/runtime/core/evalue.h>
#include <executorch/runtime/core/exec_aten/exec_aten.h>
#include <executorch/runtime/core/exec_aten/util/scalar_type_util.h>

#include "program.h"

namespace keepdim {

namespace et = executorch::runtime;
using executorch::aten::ScalarType;
using executorch::aten::SizesType;
using executorch::aten::Tensor;

inline bool to_dtype(ScalarType type, DType* out) {
  switch (type) {
    case ScalarType::Float: *out = DType::f32; return true;
    case ScalarType::Half: *out = DType::f16; return true;
    case ScalarType::BFloat16: *out = DType::bf16; return true;
    case ScalarType::Double: *out = DType::f64; return true;
    case ScalarType::Char: *out = DType::i8; return true;
    case ScalarType::Byte: *out = DType::u8; return true;
    case ScalarType::Short: *out = DType::i16; return true;
    case ScalarType::Int: *out = DType::i32; return true;
    case ScalarType::Long: *out = DType::i64; return true;
    case ScalarType::Bool: *out = DType::boolean; return true;
    default: return false;
  }
}

// Whether the elements lie in memory in the order of the dims; dims of size 1 do not matter.
inline bool is_contiguous(const Tensor& t) {
  int64_t stride = 1;
  for (ssize_t d = t.dim() - 1; d >= 0; --d) {
    if (t.size(d) == 0) return true;
    if (t.size(d) != 1 && t.strides()[d] != stride) return false;
    stride *= t.size(d);
  }
  return true;
}

}  // namespace keepdim
