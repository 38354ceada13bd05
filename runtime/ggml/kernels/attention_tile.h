// Shared by attention_prefill.cpp (many queries) and attention_decode.cpp (few queries).
#pragma once
#include <limits>

#include "ggml/kernels/attention.h"
#include "ggml/kernels/gemm_microkernel.h"

namespace keepdim::ggml {

constexpr int64_t kKeys = 64;  // keys per tile, whose scores fit in the L1 cache
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Number of keys, and number of keys before the first query. Read from the position operand if there is a KV cache.
struct KeyRange {
  int64_t keys, past;
  bool causal;
};

constexpr int64_t kMaxDecodeQueries = 8;  // total over the query heads of one KV head
void attend_decode(const AttentionJob& job, const KeyRange& range, int ith, int nth);  // up to kMaxDecodeQueries

// Byte offset of the mask for a KV head.
inline int64_t mask_offset(const AttentionJob& job, int64_t head) {
  int64_t offset = 0;
  for (int d = job.loop.rank - 1; d >= 0; --d) {
    offset += head % job.loop.dims[d] * job.mask_batch[d];
    head /= job.loop.dims[d];
  }
  return offset;
}

// 1 / sum of softmax weights. A query without visible keys gives 0 if `safe`, else NaN (0 / 0).
inline float inverse_weight(const AttentionJob& job, float weight) {
  return weight == 0 && (job.safe || job.keys == 0) ? 0.0f : 1.0f / weight;
}

// e^x for x <= 0. Denormal results are flushed to 0; NaN propagates.
inline Vector exponential(Vector x) {
  using IntVector = int32_t __attribute__((vector_size(sizeof(Vector))));
  constexpr float low = -87.0f, shift = 12582912.0f;  // adding this rounds to an integer in the low mantissa bits
  const Vector z = x < low ? Vector{} + low : x;
  const Vector shifted = z * 1.44269504f + shift;
  const Vector n = shifted - shift;
  const Vector r = (z - n * 0.693359375f) + n * 2.12194440e-4f;
  Vector p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const IntVector power = (bit_cast<IntVector>(shifted) << 23) + bit_cast<int32_t>(1.0f);
  return x < low ? Vector{} : p * bit_cast<Vector>(power);
}

inline float mask_value(const AttentionJob& job, const char* at) {
  return job.bool_mask ? (*at ? 0.0f : -kInfinity) : *reinterpret_cast<const float*>(at);
}

// Without `safe`, a bool mask replaces the score by -inf even if the score is NaN.
inline bool replaces_score(const AttentionJob& job) { return job.bool_mask && !job.safe; }
inline float masked(const AttentionJob& job, float score, float value) {
  return replaces_score(job) && value < 0 ? value : score + value;
}

// y [rows, pitch] = x [rows, n] in f32, zero-padded.
inline void gather_rows(float* y, int64_t pitch, const WeightFormat* format, const char* x, int64_t rows, int64_t n, int64_t row,
                        int64_t step) {
  for (int64_t r = 0; r < rows; ++r, y += pitch, x += row) {
    std::fill(y + n, y + pitch, 0.0f);
    if (format)
      format->to_float(x, y, n);
    else if (step == sizeof(float))
      std::memcpy(y, x, n * sizeof(float));
    else
      for (int64_t i = 0; i < n; ++i) y[i] = *reinterpret_cast<const float*>(x + i * step);
  }
}

// RoPE of one row [n]: x * cos + rotate_half(x) * sin. The workspace has 2 * n floats; the result is in the first n.
inline float* apply_rope(float* workspace, const char* x, int64_t step, int64_t n, const float* cos, const float* sin) {
  const float* row = reinterpret_cast<const float*>(x);
  if (step != sizeof(float)) {
    gather_rows(workspace + n, n, nullptr, x, 1, n, 0, step);
    row = workspace + n;
  }
  const int64_t half = n / 2;
#pragma GCC ivdep
  for (int64_t i = 0; i < half; ++i) {
    workspace[i] = row[i] * cos[i] - row[i + half] * sin[i];
    workspace[i + half] = row[i + half] * cos[i + half] + row[i] * sin[i + half];
  }
  return workspace;
}

}  // namespace keepdim::ggml
