#include "mlx/weights.h"

#include <cstring>

#include "core/quant.h"

namespace keepdim::mlx {
namespace {

float float16_at(const uint8_t* p) {
  mx::float16_t value;
  std::memcpy(&value, p, sizeof(value));
  return static_cast<float>(value);
}

}  // namespace

Array wrap(const void* data, const mx::Shape& shape, DType dtype, bool* copied) {
  *copied = true;
  if (count_of(shape) == 0) return mx::zeros(shape, to_mlx(dtype));
  const auto released = std::make_shared<bool>(false);
  Array array(const_cast<void*>(data), shape, to_mlx(dtype), [released](void*) { *released = true; });
  *copied = *released;
  return array;
}

bool has_mlx_format(DType dtype) { return dtype == DType::q8_0 || dtype == DType::q4_0 || dtype == DType::q4_1; }

// Blocks of 32: q8_0 is d * q, q4_0 is d * (q - 8), q4_1 is d * q + m. ggml stores elements 0..15 in the low nibbles and 16..31
// in the high nibbles; MLX stores them in order.
QuantisedWeight pack(DType dtype, const void* data, const mx::Shape& shape) {
  const int bits = dtype == DType::q8_0 ? 8 : 4;
  const int64_t blocks = count_of(shape) / kGroup, bytes = static_cast<int64_t>(dtype_bytes(dtype)),
                head = dtype == DType::q4_1 ? 4 : 2;
  std::vector<uint8_t> quants(static_cast<size_t>(blocks * kGroup * bits / 8));
  std::vector<float> scales(static_cast<size_t>(blocks)), biases(static_cast<size_t>(blocks));
  for (int64_t b = 0; b < blocks; ++b) {
    const uint8_t* block = static_cast<const uint8_t*>(data) + b * bytes;
    const float d = float16_at(block);
    scales[b] = d;
    biases[b] = dtype == DType::q8_0 ? -128 * d : dtype == DType::q4_0 ? -8 * d : float16_at(block + 2);
    uint8_t* to = quants.data() + b * kGroup * bits / 8;
    const uint8_t* from = block + head;
    if (bits == 8) {
      for (int i = 0; i < kGroup; ++i) to[i] = static_cast<uint8_t>(from[i] ^ 0x80);  // int8 to uint8 with offset 128
    } else {
      for (int i = 0; i < kGroup / 4; ++i) {
        to[i] = static_cast<uint8_t>((from[2 * i] & 15) | (from[2 * i + 1] & 15) << 4);
        to[i + kGroup / 4] = static_cast<uint8_t>(from[2 * i] >> 4 | (from[2 * i + 1] >> 4) << 4);
      }
    }
  }
  const int rows = shape[0], groups = shape[1] / kGroup;
  const auto* packed_u32 = reinterpret_cast<const uint32_t*>(quants.data());
  return QuantisedWeight{Array(packed_u32, {rows, groups * kGroup * bits / 32}, mx::uint32),
                         Array(scales.data(), {rows, groups}, mx::float32), Array(biases.data(), {rows, groups}, mx::float32),
                         bits};
}

Array dequantised(DType dtype, const void* data, const mx::Shape& shape) {
  const int64_t k = shape.back(), rows = k ? count_of(shape) / k : 0;
  std::vector<float> values(static_cast<size_t>(rows * k));
  dequantise(dtype, data, rows, k, values.data());
  return Array(values.data(), shape, mx::float32);
}

std::shared_ptr<State> state_of(const Bytes& bytes, DType dtype, const mx::Shape& shape) {
  if (*bytes.engine_data) return std::static_pointer_cast<State>(*bytes.engine_data);
  std::shared_ptr<State> state;
  if (dtype == DType::q8_0) {
    mx::Shape groups = shape;
    groups.back() /= kGroup;
    state = std::make_shared<State>(State{mx::zeros(shape, mx::int8), mx::zeros(groups, mx::float16)});
    mx::eval(state->data, *state->scales);
  } else {
    state = std::make_shared<State>(State{mx::zeros(shape, to_mlx(dtype)), std::nullopt});
    mx::eval(state->data);
  }
  *bytes.engine_data = state;
  return state;
}

}  // namespace keepdim::mlx
