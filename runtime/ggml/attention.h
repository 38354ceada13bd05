// What attention of many queries (attention.cpp) and of few (few_queries.cpp) have in common.
#pragma once
#include <limits>

#include "tile.h"

namespace keepdim::ggml {

constexpr int64_t kKeys = 64;  // of a tile, whose scores stay in the first cache
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// How many keys there are, and how many of them lie before the queries' own; decided by data where there is a cache.
struct Reach {
  int64_t keys, before;
  bool causal;
};

constexpr int64_t kFewQueries = 8;  // of all heads that share keys
void few_queries(const AttentionJob& job, const Reach& reach, int ith, int nth);  // up to so many

// Of the mask, at a head of keys.
inline int64_t mask_offset(const AttentionJob& job, int64_t head) {
  int64_t offset = 0;
  for (int d = job.loop.rank - 1; d >= 0; --d) {
    offset += head % job.loop.dims[d] * job.mask_batch[d];
    head /= job.loop.dims[d];
  }
  return offset;
}

// A query that sees nothing gets zeros; by hand it is 0 / 0.
inline float inverse_weight(const AttentionJob& job, float weight) {
  return weight == 0 && (job.safe || job.keys == 0) ? 0.0f : 1.0f / weight;
}

// e^x for x <= 0; what is below the normal numbers becomes 0, a NaN stays one.
inline Vector exponential(Vector x) {
  using Whole = int32_t __attribute__((vector_size(sizeof(Vector))));
  constexpr float low = -87.0f, shift = 12582912.0f;  // its last bits count in ones
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
  const Whole power = (bits<Whole>(shifted) << 23) + bits<int32_t>(1.0f);
  return x < low ? Vector{} : p * bits<Vector>(power);
}

inline float mask_value(const AttentionJob& job, const char* at) {
  return job.bool_mask ? (*at ? 0.0f : -kInfinity) : *reinterpret_cast<const float*>(at);
}

// By hand a bool mask puts -inf whatever the score was, a NaN too.
inline bool replaces(const AttentionJob& job) { return job.bool_mask && !job.safe; }
inline float masked(const AttentionJob& job, float score, float value) {
  return replaces(job) && value < 0 ? value : score + value;
}

// A copy in f32, with zeros between the rows.
inline void gather_rows(float* y, int64_t pitch, const Stored* stored, const char* x, int64_t rows, int64_t n, int64_t row,
                        int64_t step) {
  for (int64_t r = 0; r < rows; ++r, y += pitch, x += row) {
    std::fill(y + n, y + pitch, 0.0f);
    if (stored) stored->read(x, y, n);
    else if (step == sizeof(float)) std::memcpy(y, x, n * sizeof(float));
    else for (int64_t i = 0; i < n; ++i) y[i] = *reinterpret_cast<const float*>(x + i * step);
  }
}

// A row times its cosines, plus its halves swapped, the first of them negated, times its sines. In room for two rows.
inline float* turned(float* room, const char* x, int64_t step, int64_t n, const float* cos, const float* sin) {
  const float* row = reinterpret_cast<const float*>(x);
  if (step != sizeof(float)) {
    gather_rows(room + n, n, nullptr, x, 1, n, 0, step);
    row = room + n;
  }
  const int64_t half = n / 2;
#pragma GCC ivdep
  for (int64_t i = 0; i < half; ++i) {
    room[i] = row[i] * cos[i] - row[i + half] * sin[i];
    room[i + half] = row[i + half] * cos[i + half] + row[i] * sin[i + half];
  }
  return room;
}

}  // namespace keepdim::ggml
