// Flash attention for few queries (decode), bound by the memory bandwidth of keys and values: a lane is an element of a row,
// and every row is read once, in place, for all queries of its KV head. Long contexts are split into parts among threads;
// the last thread to finish merges the partial results.
#include "ggml/kernels/attention_tile.h"
#include "ggml/simd/quant_blocks.h"

namespace keepdim::ggml {
namespace {

constexpr int kQueriesAtOnce = 4;                  // queries whose accumulators fit in registers
constexpr int kBlockVectors = kBlock32 / kVector;  // vectors per q8_0 block
constexpr int64_t kMinTiles = 2, kMaxUnits = 64;   // minimum tiles per part; maximum work items over all heads
constexpr int64_t kMaxParts = 16;                  // maximum parts per KV head

// ---- row formats: read<n> loads vectors [i, i + n) of a row as f32

struct RowsF32 {
  static constexpr bool blocks = false;  // whether every row is a multiple of kBlockVectors vectors
  template <int n>
  static void read(const char* row, int64_t i, Vector (&x)[n]) {
    for (int v = 0; v < n; ++v) x[v] = load(reinterpret_cast<const float*>(row) + (i + v) * kVector);
  }
};

#ifdef __AVX2__
struct RowsF16 {
  static constexpr bool blocks = false;
  template <int n>
  static void read(const char* row, int64_t i, Vector (&x)[n]) {
    for (int v = 0; v < n; ++v) {
      const char* from = row + (i + v) * kVector * 2;
#ifdef __AVX512F__
      x[v] = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#else
      x[v] = _mm256_cvtph_ps(load128(from));
#endif
    }
  }
};

struct RowsQ8 {  // q8_0
  static constexpr bool blocks = true;
  template <int n>
  static void read(const char* row, int64_t i, Vector (&x)[n]) {
    const auto& block = reinterpret_cast<const BlockQ8*>(row)[i / kBlockVectors];
    const int8_t* from = block.q + i % kBlockVectors * kVector;
    const float scale = _cvtsh_ss(block.d);
    for (int v = 0; v < n; ++v, from += kVector) {
#ifdef __AVX512F__
      x[v] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load128(from))) * scale;
#else
      x[v] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)))) * scale;
#endif
    }
  }
};
#endif

// ---- the queries of one KV head

// Queries of one KV head; rows are zero-padded to a multiple of kVector.
struct QueryGroup {
  int64_t count, width, value_width;
  float *rows, *scores, *sum;  // [count, width], scaled; [count, kKeys]; [count, value_width]
  float max_score[kMaxDecodeQueries], weight_sum[kMaxDecodeQueries];  // running maximum of scores and sum of softmax weights
  int64_t key_begin[kMaxDecodeQueries], key_end[kMaxDecodeQueries];   // range of keys of each query
  const char* mask[kMaxDecodeQueries];
};

constexpr int64_t round_up(int64_t n) { return (n + kVector - 1) / kVector * kVector; }

// In each group of four lanes: two lanes of a interleaved with two of b (the first or the last two).
template <int first>
struct InterleavePairs {
  static constexpr int lane(int i) { return i / 4 * 4 + i % 4 / 2 + i % 2 * kVector + first; }
};
// Every other group of four lanes of a and b.
template <int first>
struct AlternateFours {
  static constexpr int lane(int i) { return i / 4 * 8 + i % 4 + first; }
};

// Lane i of the result is the horizontal sum of x[i]: first within groups of four lanes, then over the groups.
Vector lane_sum(const Vector (&x)[kVector]) {
  const auto add_pairs = [&](Vector a, Vector b) {
    return shuffle_lanes<InterleavePairs<0>>(a, b) + shuffle_lanes<InterleavePairs<2>>(a, b);
  };
  const auto add_fours = [&](Vector a, Vector b) {
    return shuffle_lanes<AlternateFours<0>>(a, b) + shuffle_lanes<AlternateFours<4>>(a, b);
  };
  const auto reduce_four = [&](int i) { return add_pairs(add_pairs(x[i], x[i + 2]), add_pairs(x[i + 1], x[i + 3])); };
  if constexpr (kVector == 16)
    return add_fours(add_fours(reduce_four(0), reduce_four(4)), add_fours(reduce_four(8 % kVector), reduce_four(12 % kVector)));
  else
    return add_fours(reduce_four(0), reduce_four(4));
}

float lane_sum(Vector x) {
  float total = 0;
  for (int l = 0; l < kVector; ++l) total += x[l];
  return total;
}

// sums += products of n vectors of two keys with the queries.
template <class Rows, int n, int columns>
inline void add_products(Vector (&sums)[2][columns], const char* const (&keys)[2], const float* queries, int64_t pitch,
                         int64_t i) {
  Vector x[2][n];
  for (int r = 0; r < 2; ++r) Rows::template read<n>(keys[r], i, x[r]);
#pragma GCC unroll 4
  for (int v = 0; v < n; ++v)
#pragma GCC unroll 4
    for (int c = 0; c < columns; ++c) {
      const Vector query = load(queries + c * pitch + (i + v) * kVector);
      for (int r = 0; r < 2; ++r) sums[r][c] += x[r][v] * query;
    }
}

// Scores of `columns` queries with all keys of a tile, two keys at a time. Scores past the last key are undefined.
template <class Rows, int columns>
void score(const QueryGroup& q, int64_t first, const char* k, int64_t row, int64_t keys) {
  constexpr int n = columns > 3 ? kBlockVectors / 2 : kBlockVectors;
  const int64_t vectors = q.width / kVector;
  const float* queries = q.rows + first * q.width;
  for (int64_t j = 0; j < keys; j += kVector) {
    Vector all[columns][kVector];
    for (int64_t r = 0; r < kVector; r += 2) {
      const char* const pair[] = {k + std::min(j + r, keys - 1) * row, k + std::min(j + r + 1, keys - 1) * row};
      Vector sums[2][columns] = {};
      int64_t i = 0;
      for (; i + n <= vectors; i += n) add_products<Rows, n>(sums, pair, queries, q.width, i);
      if constexpr (!Rows::blocks)
        for (; i < vectors; ++i) add_products<Rows, 1>(sums, pair, queries, q.width, i);
      for (int c = 0; c < columns; ++c) all[c][r] = sums[0][c], all[c][r + 1] = sums[1][c];
    }
    for (int c = 0; c < columns; ++c) store(q.scores + (first + c) * kKeys + j, lane_sum(all[c]));
  }
}

template <class Rows, int n, int columns>
inline void add_value_vectors(const float* weights, float* sum, int64_t pitch, const char* v, int64_t row, int64_t keys,
                              int64_t i) {
  Vector sums[columns][n];
  for (int c = 0; c < columns; ++c)
    for (int e = 0; e < n; ++e) sums[c][e] = load(sum + c * pitch + (i + e) * kVector);
  for (int64_t j = 0; j < keys; ++j, v += row) {
    Vector x[n];
    Rows::template read<n>(v, i, x);
#pragma GCC unroll 4
    for (int e = 0; e < n; ++e)
#pragma GCC unroll 4
      for (int c = 0; c < columns; ++c) sums[c][e] += weights[c * kKeys + j] * x[e];
  }
  for (int c = 0; c < columns; ++c)
    for (int e = 0; e < n; ++e) store(sum + c * pitch + (i + e) * kVector, sums[c][e]);
}

// sum [columns, value_width] += softmax weights [columns, keys] @ values [keys, value_width].
template <class Rows, int columns>
void add_values(const QueryGroup& q, int64_t first, const char* v, int64_t row, int64_t keys) {
  constexpr int n = columns * kBlockVectors > 12 ? kBlockVectors / 2 : kBlockVectors;  // as many accumulators as fit in registers
  const int64_t vectors = q.value_width / kVector;
  const float* weights = q.scores + first * kKeys;
  float* sum = q.sum + first * q.value_width;
  int64_t i = 0;
  for (; i + n <= vectors; i += n) add_value_vectors<Rows, n, columns>(weights, sum, q.value_width, v, row, keys, i);
  if constexpr (!Rows::blocks)
    for (; i < vectors; ++i) add_value_vectors<Rows, 1, columns>(weights, sum, q.value_width, v, row, keys, i);
}

void add_mask(const AttentionJob& job, const QueryGroup& q, int64_t c, int64_t first, int64_t keys) {
  const char* mask = q.mask[c] + first * job.mask_step;
  if (job.bool_mask && job.mask_step == 1 && !std::memchr(mask, 0, keys)) return;
  float* scores = q.scores + c * kKeys;
  for (int64_t j = 0; j < keys; ++j) scores[j] = masked(job, scores[j], mask_value(job, mask + j * job.mask_step));
}

// Online softmax of one query: scores become weights; the running sum is rescaled to the new maximum.
void softmax_step(QueryGroup& q, int64_t c, int64_t keys) {
  float* scores = q.scores + c * kKeys;
  Vector most = Vector{} + q.max_score[c];
  for (int64_t j = 0; j < keys; j += kVector) {
    const Vector score = load(scores + j);
    most = score > most ? score : most;
  }
  float max = q.max_score[c];
  for (int l = 0; l < kVector; ++l) max = most[l] > max ? most[l] : max;
  const float from = max == -kInfinity ? 0.0f : max;  // no visible key yet: all weights are 0
  const float scale = exponential(Vector{} + (q.max_score[c] - from))[0];
  Vector total = {};
  for (int64_t j = 0; j < keys; j += kVector) {
    const Vector weight = exponential(load(scores + j) - from);
    store(scores + j, weight);
    total += weight;
  }
  q.max_score[c] = max;
  q.weight_sum[c] = q.weight_sum[c] * scale + lane_sum(total);
  if (scale == 1) return;
  float* sum = q.sum + c * q.value_width;
  for (int64_t e = 0; e < q.value_width; ++e) sum[e] *= scale;
}

// ---- keys and values, a tile at a time

// Processes one to kQueriesAtOnce queries, from `first` on, with the rows of a tile.
using TileKernel = void (*)(const QueryGroup& q, int64_t first, const char* rows, int64_t row, int64_t keys);

struct TileKernels {
  TileKernel score[kQueriesAtOnce], add_values[kQueriesAtOnce];
};
template <class Rows>
constexpr TileKernels kTileKernels = {{score<Rows, 1>, score<Rows, 2>, score<Rows, 3>, score<Rows, 4>},
                                      {add_values<Rows, 1>, add_values<Rows, 2>, add_values<Rows, 3>, add_values<Rows, 4>}};

// Kernels that read rows in place; nullptr: the rows have to be copied to f32 first.
const TileKernels* kernels_of(const WeightFormat* type, int64_t width, int64_t step) {
  if (width % kVector) return nullptr;
  if (!type) return step == sizeof(float) ? &kTileKernels<RowsF32> : nullptr;
#ifdef __AVX2__
  if (type == weight_format(DType::f16)) return &kTileKernels<RowsF16>;
  if (type == weight_format(DType::q8_0)) return &kTileKernels<RowsQ8>;
#endif
  return nullptr;
}

struct RowSource {  // keys or values of one KV head
  const AttentionJob& job;
  const TileKernels* kernels;
  const char* data;
  int64_t row, step, width;  // strides in bytes
  float* copy;               // nullptr: rows are read in place

  const char* tile(int64_t first, int64_t keys) const {
    const char* rows = data + first * row;
    if (!copy) return rows;
    gather_rows(copy, round_up(width), job.format, rows, keys, width, row, step);
    return reinterpret_cast<char*>(copy);
  }
  int64_t pitch() const { return copy ? round_up(width) * static_cast<int64_t>(sizeof(float)) : row; }
};

// Calls run(first, n - 1) for groups of n <= kQueriesAtOnce queries.
template <class Run>
void for_each_group(int64_t count, Run&& run) {
  for (int64_t first = 0; first < count; first += kQueriesAtOnce)
    run(first, std::min<int64_t>(kQueriesAtOnce, count - first) - 1);
}

// All queries with one tile of keys and values.
void attend(const AttentionJob& job, QueryGroup& q, const RowSource& k, const RowSource& v, int64_t first, int64_t keys) {
  const char* rows = k.tile(first, keys);
  for_each_group(q.count, [&](int64_t c, int64_t index) { k.kernels->score[index](q, c, rows, k.pitch(), keys); });
  for (int64_t c = 0; c < q.count; ++c) {
    if (job.data[AttentionJob::mask]) add_mask(job, q, c, first, keys);
    float* scores = q.scores + c * kKeys;
    std::fill(scores, scores + std::clamp<int64_t>(q.key_begin[c] - first, 0, keys), -kInfinity);
    std::fill(scores + std::clamp<int64_t>(q.key_end[c] - first, 0, keys), scores + round_up(keys), -kInfinity);
    softmax_step(q, c, keys);
  }
  rows = v.tile(first, keys);
  for_each_group(q.count, [&](int64_t c, int64_t index) { v.kernels->add_values[index](q, c, rows, v.pitch(), keys); });
}

// ---- work items

Span visible_keys(const AttentionJob& job, const KeyRange& range, int64_t row) {
  const int64_t end = range.causal ? std::min(range.past + row + 1, range.keys) : range.keys;
  return {job.window ? std::max<int64_t>(0, end - job.window) : 0, end};
}

int64_t tiles_of(Span keys) { return (keys.end - keys.begin + kKeys - 1) / kKeys; }

// Number of parts that the keys of a head are split into. Independent of the number of threads, for deterministic results.
int64_t parts_of(const AttentionJob& job, int64_t tiles) {
  const int64_t most = std::min(kMaxParts, kMaxUnits / std::max<int64_t>(job.loop.count(), 1));
  return std::clamp<int64_t>(tiles / kMinTiles, 1, std::max<int64_t>(most, 1));
}

// Size of a partial result: per query the maximum score, the sum of weights and the weighted values.
int64_t part_floats(const AttentionJob& job) { return job.group * job.queries * (2 + round_up(job.value_width)); }

void init_queries(const AttentionJob& job, const KeyRange& range, QueryGroup& q, const char* from, const char* mask,
                  float* workspace) {
  for (int64_t c = 0; c < q.count; ++c) {
    const int64_t head = c / job.queries, row = c % job.queries;
    const char* x = from + head * job.q_head + row * job.q_row;
    int64_t step = job.q_step;
    if (job.data[AttentionJob::cos]) {
      const int64_t rope = row * job.rope_pitch;
      x = reinterpret_cast<char*>(apply_rope(workspace, x, step, job.width, at<float>(job.data[AttentionJob::cos], rope),
                                             at<float>(job.data[AttentionJob::sin], rope)));
      step = sizeof(float);
    }
    float* to = q.rows + c * q.width;
    for (int64_t e = 0; e < job.width; ++e) to[e] = *reinterpret_cast<const float*>(x + e * step) * job.scale;
    std::fill(to + job.width, to + q.width, 0.0f);
    q.mask[c] = mask + head * job.mask_head + row * job.mask_row;
    const Span keys = visible_keys(job, range, row);
    q.key_begin[c] = keys.begin;
    q.key_end[c] = keys.end;
    q.max_score[c] = -kInfinity;
    q.weight_sum[c] = 0;
  }
  std::fill(q.sum, q.sum + q.count * q.value_width, 0.0f);
}

void write_output(const AttentionJob& job, const float* sum, float weight, int64_t c, char* y) {
  auto* to = reinterpret_cast<float*>(y + c / job.queries * job.y_head + c % job.queries * job.y_row);
  const float scale = inverse_weight(job, weight);
  for (int64_t e = 0; e < job.value_width; ++e) to[e] = sum[e] * scale;
}

// One range of keys of one KV head. Stores a partial result in `part`, or writes the output if it is nullptr.
void run_unit(const AttentionJob& job, const KeyRange& range, Span keys, const int64_t* offset, int64_t mask_offset,
              float* part) {
  QueryGroup q;
  q.count = job.group * job.queries;
  q.width = round_up(job.width);
  q.value_width = round_up(job.value_width);
  const TileKernels* kernels[] = {kernels_of(job.format, job.width, job.k_step),
                                  kernels_of(job.format, job.value_width, job.v_step)};
  const int64_t copies[] = {kernels[0] ? 0 : kKeys * q.width, kernels[1] ? 0 : kKeys * q.value_width};
  float* workspace = scratch(q.count * (q.width + kKeys + q.value_width) + copies[0] + copies[1] + 2 * job.width);
  if (!workspace) return job.fail(0, "out of memory for its tiles. Free memory, or call with smaller sizes.");
  q.rows = workspace;
  q.scores = q.rows + q.count * q.width;
  q.sum = q.scores + q.count * kKeys;
  float* copy = q.sum + q.count * q.value_width;
  const auto source = [&](int i, int64_t row, int64_t step, int64_t width, float* to) {
    const bool in_place = kernels[i] != nullptr;
    return RowSource{job,
                     in_place ? kernels[i] : &kTileKernels<RowsF32>,
                     at<char>(job.data[AttentionJob::k + i], offset[2 + i]),
                     row,
                     step,
                     width,
                     in_place ? nullptr : to};
  };
  const RowSource k = source(0, job.k_row, job.k_step, job.width, copy);
  const RowSource v = source(1, job.v_row, job.v_step, job.value_width, copy + copies[0]);
  init_queries(job, range, q, at<char>(job.data[AttentionJob::q], offset[1]),
               static_cast<const char*>(job.data[AttentionJob::mask]) + mask_offset, copy + copies[0] + copies[1]);
  for (int64_t first = keys.begin; first < keys.end; first += kKeys)
    attend(job, q, k, v, first, std::min(kKeys, keys.end - first));
  for (int64_t c = 0; c < q.count; ++c) {
    const float* sum = q.sum + c * q.value_width;
    if (!part) {
      write_output(job, sum, q.weight_sum[c], c, at<char>(job.data[AttentionJob::out], offset[0]));
      continue;
    }
    float* to = part + c * (2 + q.value_width);
    to[0] = q.max_score[c];
    to[1] = q.weight_sum[c];
    std::copy(sum, sum + q.value_width, to + 2);
  }
}

// Merges the partial results of one KV head into the output; overwrites the first one.
void merge_parts(const AttentionJob& job, float* all, int64_t parts, char* y) {
  const int64_t pitch = part_floats(job), width = round_up(job.value_width);
  for (int64_t c = 0; c < job.group * job.queries; ++c, all += 2 + width) {
    float max = -kInfinity, weight = 0;
    for (int64_t p = 0; p < parts; ++p) max = std::max(max, all[p * pitch]);
    const float from = max == -kInfinity ? 0.0f : max;
    float* sum = all + 2;
    for (int64_t p = 0; p < parts; ++p) {
      const float* part = all + p * pitch;
      const float scale = exponential(Vector{} + (part[0] - from))[0];
      weight += part[1] * scale;
      for (int64_t e = 0; e < width; ++e) sum[e] = (p ? sum[e] : 0.0f) + part[2 + e] * scale;
    }
    write_output(job, sum, weight, c, y);
  }
}

}  // namespace

int64_t attention_scratch(const AttentionJob& job) {
  if (job.group * job.queries > kMaxDecodeQueries) return 0;
  const int64_t parts = parts_of(job, tiles_of({0, job.keys}));
  return parts > 1 ? job.loop.count() * parts * part_floats(job) : 0;
}

void attend_decode(const AttentionJob& job, const KeyRange& range, int ith, int nth) {
  const Span keys = {visible_keys(job, range, 0).begin, visible_keys(job, range, job.queries - 1).end};
  const int64_t tiles = tiles_of(keys), parts = parts_of(job, tiles), floats = part_floats(job);
  auto* partials = static_cast<float*>(job.data[AttentionJob::scratch]);
  Loop loop = job.loop;
  loop.push(parts, 0);
  const int64_t work = (job.width + job.value_width) * (keys.end - keys.begin) / parts * job.group * job.queries;
  const bool last = for_each_dynamic(job, loop, work, ith, nth, [&](int64_t position, const int64_t* offset) {
    const Span part = split_range(tiles, static_cast<int>(position % parts), static_cast<int>(parts));
    const Span part_keys = {keys.begin + part.begin * kKeys, std::min(keys.end, keys.begin + part.end * kKeys)};
    run_unit(job, range, part_keys, offset, mask_offset(job, position / parts),
             parts > 1 ? partials + position * floats : nullptr);
  });
  if (!last || parts == 1) return;
  StridedIterator head(job.loop, job.loop.rank, 0);
  for (int64_t i = 0; i < job.loop.count(); ++i, head.next())
    merge_parts(job, partials + i * parts * floats, parts, at<char>(job.data[AttentionJob::out], head.offset[0]));
}

}  // namespace keepdim::ggml
