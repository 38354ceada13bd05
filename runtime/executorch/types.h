// ExecuTorch types and conversions shared by the adapters in this folder.
#pragma once
#include <executorch/runtime/core/error.h>
#include <executorch/runtime/core/evalue.h>
#include <executorch/runtime/core/exec_aten/exec_aten.h>
#include <executorch/runtime/core/exec_aten/util/scalar_type_util.h>

#include <cstring>
#include <vector>

#include "core/program.h"

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

inline ScalarType to_scalar_type(DType dtype) {
  static constexpr ScalarType types[] = {ScalarType::Float, ScalarType::Half, ScalarType::BFloat16, ScalarType::Double,
                                         ScalarType::Char,  ScalarType::Byte, ScalarType::Short,    ScalarType::Int,
                                         ScalarType::Long,  ScalarType::Bool};
  return types[static_cast<size_t>(dtype)];
}

// Kind of a value that is neither a tensor nor an integer, for error messages.
inline const char* kind_name(const et::EValue& value) {
  return value.isBool() ? "a bool" : value.isDouble() ? "a double" : value.isNone() ? "none" : "another kind of value";
}

// Whether the tensor is contiguous; strides of dims of size 1 are ignored.
inline bool is_contiguous(const Tensor& t) {
  int64_t stride = 1;
  for (ssize_t d = t.dim() - 1; d >= 0; --d) {
    if (t.size(d) == 0) return true;
    if (t.size(d) != 1 && t.strides()[d] != stride) return false;
    stride *= t.size(d);
  }
  return true;
}

inline void copy_contiguous(const Tensor& t, std::vector<char>& out) {
  const size_t width = t.element_size(), rank = static_cast<size_t>(t.dim());
  const char* from = static_cast<const char*>(t.const_data_ptr());
  out.resize(t.nbytes());
  std::vector<int64_t> index(rank, 0);
  for (size_t i = 0; i < out.size(); i += width) {
    int64_t offset = 0;
    for (size_t d = 0; d < rank; ++d) offset += index[d] * t.strides()[d];
    std::memcpy(out.data() + i, from + offset * static_cast<int64_t>(width), width);
    for (size_t d = rank; d-- > 0 && ++index[d] == t.size(d);) index[d] = 0;
  }
}

}  // namespace keepdim
