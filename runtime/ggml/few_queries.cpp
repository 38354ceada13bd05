// Attention of few queries, where reading keys and values is what it costs: a lane is an element of a row, which is read
// once for all queries, as it lies. A long run of keys is cut into parts for all threads; the last to finish puts them
// together.
#include "attention.h"
#include "quant.h"

namespace keepdim::ggml {
namespace {

constexpr int kAtOnce = 4;                      // queries whose sums stay in registers
constexpr int kGroup = kBlock32 / kVector;      // vectors of a block
constexpr int64_t kTiles = 2, kUnits = 64;      // tiles of a part, at least; units over all heads, at most
constexpr int64_t kMostParts = 16;              // of one head

// ---- rows: `n` vectors of one from its i-th on

struct Singles {
  static constexpr bool blocks = false;  // whether all rows are whole groups
  template <int n>
  static void read(const char* row, int64_t i, Vector (&x)[n]) {
    for (int v = 0; v < n; ++v) x[v] = load(reinterpret_cast<const float*>(row) + (i + v) * kVector);
  }
};

#ifdef __AVX2__
struct Halves {
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

struct Eights {  // q8_0
  static constexpr bool blocks = true;
  template <int n>
  static void read(const char* row, int64_t i, Vector (&x)[n]) {
    const auto& block = reinterpret_cast<const BlockQ8*>(row)[i / kGroup];
    const int8_t* from = block.q + i % kGroup * kVector;
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

// ---- the queries of one head of keys

// All rows are whole vectors, with zeros behind what there is.
struct Queries {
  int64_t count, width, value_width;
  float *rows, *scores, *sum;  // [count, width], scaled; [count, kKeys]; [count, value_width]
  float top[kFewQueries], weight[kFewQueries];  // the largest score so far, the sum of the weights
  int64_t begin[kFewQueries], limit[kFewQueries];  // keys that a query may see
  const char* mask[kFewQueries];
};

constexpr int64_t whole(int64_t n) { return (n + kVector - 1) / kVector * kVector; }

// The lanes of a and b in fours: the first two of each in turn, or its last two.
template <int first>
struct OfFour {
  static constexpr int lane(int i) { return i / 4 * 4 + i % 4 / 2 + i % 2 * kVector + first; }
};
// Every other four of the lanes of a and b.
template <int first>
struct Fours {
  static constexpr int lane(int i) { return i / 4 * 8 + i % 4 + first; }
};

// The sums over the lanes of each of x: first within fours of lanes, then over those.
Vector across(const Vector (&x)[kVector]) {
  const auto halves = [&](Vector a, Vector b) { return shuffled<OfFour<0>>(a, b) + shuffled<OfFour<2>>(a, b); };
  const auto pairs = [&](Vector a, Vector b) { return shuffled<Fours<0>>(a, b) + shuffled<Fours<4>>(a, b); };
  const auto four = [&](int i) { return halves(halves(x[i], x[i + 2]), halves(x[i + 1], x[i + 3])); };
  if constexpr (kVector == 16) return pairs(pairs(four(0), four(4)), pairs(four(8 % kVector), four(12 % kVector)));
  else return pairs(four(0), four(4));
}

float across(Vector x) {
  float total = 0;
  for (int l = 0; l < kVector; ++l) total += x[l];
  return total;
}

template <class Rows, int n, int columns>
inline void add_products(Vector (&sums)[2][columns], const char* const (&keys)[2], const float* queries, int64_t pitch, int64_t i) {
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

// Scores of some queries with all keys of a tile, two of them at a time; behind the last there is anything.
template <class Rows, int columns>
void score(const Queries& q, int64_t first, const char* k, int64_t row, int64_t keys) {
  constexpr int n = columns > 3 ? kGroup / 2 : kGroup;
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
    for (int c = 0; c < columns; ++c) store(q.scores + (first + c) * kKeys + j, across(all[c]));
  }
}

template <class Rows, int n, int columns>
inline void add_vectors(const float* weights, float* sum, int64_t pitch, const char* v, int64_t row, int64_t keys, int64_t i) {
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

// Values of a tile by the weights of some queries.
template <class Rows, int columns>
void add_values(const Queries& q, int64_t first, const char* v, int64_t row, int64_t keys) {
  constexpr int n = columns * kGroup > 12 ? kGroup / 2 : kGroup;  // what the registers hold
  const int64_t vectors = q.value_width / kVector;
  const float* weights = q.scores + first * kKeys;
  float* sum = q.sum + first * q.value_width;
  int64_t i = 0;
  for (; i + n <= vectors; i += n) add_vectors<Rows, n, columns>(weights, sum, q.value_width, v, row, keys, i);
  if constexpr (!Rows::blocks)
    for (; i < vectors; ++i) add_vectors<Rows, 1, columns>(weights, sum, q.value_width, v, row, keys, i);
}

void add_mask(const AttentionJob& job, const Queries& q, int64_t c, int64_t first, int64_t keys) {
  const char* mask = q.mask[c] + first * job.mask_step;
  if (job.bool_mask && job.mask_step == 1 && !std::memchr(mask, 0, keys)) return;
  float* scores = q.scores + c * kKeys;
  for (int64_t j = 0; j < keys; ++j) scores[j] = masked(job, scores[j], mask_value(job, mask + j * job.mask_step));
}

// Scores of one query become weights; its sum so far is scaled to the new largest score.
void weigh(Queries& q, int64_t c, int64_t keys) {
  float* scores = q.scores + c * kKeys;
  Vector most = Vector{} + q.top[c];
  for (int64_t j = 0; j < keys; j += kVector) {
    const Vector score = load(scores + j);
    most = score > most ? score : most;
  }
  float top = q.top[c];
  for (int l = 0; l < kVector; ++l) top = most[l] > top ? most[l] : top;
  const float from = top == -kInfinity ? 0.0f : top;  // nothing to see yet: all weights are 0
  const float scale = exponential(Vector{} + (q.top[c] - from))[0];
  Vector total = {};
  for (int64_t j = 0; j < keys; j += kVector) {
    const Vector weight = exponential(load(scores + j) - from);
    store(scores + j, weight);
    total += weight;
  }
  q.top[c] = top;
  q.weight[c] = q.weight[c] * scale + across(total);
  if (scale == 1) return;
  float* sum = q.sum + c * q.value_width;
  for (int64_t e = 0; e < q.value_width; ++e) sum[e] *= scale;
}

// ---- keys and values, a tile at a time

// Some queries with rows of a tile.
using Step = void (*)(const Queries& q, int64_t first, const char* rows, int64_t row, int64_t keys);

struct Steps {
  Step score[kAtOnce], add_values[kAtOnce];
};
template <class Rows>
constexpr Steps kSteps = {{score<Rows, 1>, score<Rows, 2>, score<Rows, 3>, score<Rows, 4>},
                          {add_values<Rows, 1>, add_values<Rows, 2>, add_values<Rows, 3>, add_values<Rows, 4>}};

// How rows are read where they lie; nullptr: only from a copy.
const Steps* steps_of(const Stored* type, int64_t width, int64_t step) {
  if (width % kVector) return nullptr;
  if (!type) return step == sizeof(float) ? &kSteps<Singles> : nullptr;
#ifdef __AVX2__
  if (type == stored(DType::f16)) return &kSteps<Halves>;
  if (type == stored(DType::q8_0)) return &kSteps<Eights>;
#endif
  return nullptr;
}

struct Source {  // keys or values
  const AttentionJob& job;
  const Steps* steps;
  const char* data;
  int64_t row, step, width;  // strides in bytes
  float* copy;               // nullptr: they are read where they lie

  const char* tile(int64_t first, int64_t keys) const {
    const char* rows = data + first * row;
    if (!copy) return rows;
    gather_rows(copy, whole(width), job.stored, rows, keys, width, row, step);
    return reinterpret_cast<char*>(copy);
  }
  int64_t pitch() const { return copy ? whole(width) * static_cast<int64_t>(sizeof(float)) : row; }
};

template <class Run>
void in_turns(int64_t count, Run&& run) {
  for (int64_t first = 0; first < count; first += kAtOnce) run(first, std::min<int64_t>(kAtOnce, count - first) - 1);
}

void attend(const AttentionJob& job, Queries& q, const Source& k, const Source& v, int64_t first, int64_t keys) {
  const char* rows = k.tile(first, keys);
  in_turns(q.count, [&](int64_t c, int64_t few) { k.steps->score[few](q, c, rows, k.pitch(), keys); });
  for (int64_t c = 0; c < q.count; ++c) {
    if (job.data[4]) add_mask(job, q, c, first, keys);
    float* scores = q.scores + c * kKeys;
    std::fill(scores, scores + std::clamp<int64_t>(q.begin[c] - first, 0, keys), -kInfinity);
    std::fill(scores + std::clamp<int64_t>(q.limit[c] - first, 0, keys), scores + whole(keys), -kInfinity);
    weigh(q, c, keys);
  }
  rows = v.tile(first, keys);
  in_turns(q.count, [&](int64_t c, int64_t few) { v.steps->add_values[few](q, c, rows, v.pitch(), keys); });
}

// ---- units

Span seen(const AttentionJob& job, const Reach& reach, int64_t row) {
  const int64_t end = reach.causal ? std::min(reach.before + row + 1, reach.keys) : reach.keys;
  return {job.window ? std::max<int64_t>(0, end - job.window) : 0, end};
}

int64_t tiles_of(Span keys) { return (keys.end - keys.begin + kKeys - 1) / kKeys; }

// Into how many parts the keys of a head are cut: not a matter of threads, so that the bits do not depend on them.
int64_t parts_of(const AttentionJob& job, int64_t tiles) {
  const int64_t most = std::min(kMostParts, kUnits / std::max<int64_t>(job.loop.count(), 1));
  return std::clamp<int64_t>(tiles / kTiles, 1, std::max<int64_t>(most, 1));
}

// Of a part that is kept: for each query its largest score, the sum of its weights, and of its values.
int64_t part_floats(const AttentionJob& job) { return job.group * job.queries * (2 + whole(job.value_width)); }

void start(const AttentionJob& job, const Reach& reach, Queries& q, const char* from, const char* mask, float* room) {
  for (int64_t c = 0; c < q.count; ++c) {
    const int64_t head = c / job.queries, row = c % job.queries;
    const char* x = from + head * job.q_head + row * job.q_row;
    int64_t step = job.q_step;
    if (job.data[6]) {
      const int64_t turn = row * job.turn_row;
      x = reinterpret_cast<char*>(turned(room, x, step, job.width, at<float>(job.data[6], turn), at<float>(job.data[7], turn)));
      step = sizeof(float);
    }
    float* to = q.rows + c * q.width;
    for (int64_t e = 0; e < job.width; ++e) to[e] = *reinterpret_cast<const float*>(x + e * step) * job.scale;
    std::fill(to + job.width, to + q.width, 0.0f);
    q.mask[c] = mask + head * job.mask_head + row * job.mask_row;
    const Span keys = seen(job, reach, row);
    q.begin[c] = keys.begin;
    q.limit[c] = keys.end;
    q.top[c] = -kInfinity;
    q.weight[c] = 0;
  }
  std::fill(q.sum, q.sum + q.count * q.value_width, 0.0f);
}

void finish(const AttentionJob& job, const float* sum, float weight, int64_t c, char* y) {
  auto* to = reinterpret_cast<float*>(y + c / job.queries * job.y_head + c % job.queries * job.y_row);
  const float scale = inverse_weight(job, weight);
  for (int64_t e = 0; e < job.value_width; ++e) to[e] = sum[e] * scale;
}

// One head of keys, some of them. `part`: where the outcome goes instead of the result.
void run_unit(const AttentionJob& job, const Reach& reach, Span keys, const int64_t* offset, int64_t mask_offset, float* part) {
  Queries q;
  q.count = job.group * job.queries;
  q.width = whole(job.width);
  q.value_width = whole(job.value_width);
  const Steps* steps[] = {steps_of(job.stored, job.width, job.k_step), steps_of(job.stored, job.value_width, job.v_step)};
  const int64_t copies[] = {steps[0] ? 0 : kKeys * q.width, steps[1] ? 0 : kKeys * q.value_width};
  float* room = scratch(q.count * (q.width + kKeys + q.value_width) + copies[0] + copies[1] + 2 * job.width);
  if (!room) return job.fail(0, "there is no memory for its tiles.");
  q.rows = room;
  q.scores = q.rows + q.count * q.width;
  q.sum = q.scores + q.count * kKeys;
  float* copy = q.sum + q.count * q.value_width;
  const auto source = [&](int i, int64_t row, int64_t step, int64_t width, float* to) {
    const bool lies = steps[i] != nullptr;
    return Source{job, lies ? steps[i] : &kSteps<Singles>, at<char>(job.data[2 + i], offset[2 + i]), row, step, width, lies ? nullptr : to};
  };
  const Source k = source(0, job.k_row, job.k_step, job.width, copy);
  const Source v = source(1, job.v_row, job.v_step, job.value_width, copy + copies[0]);
  start(job, reach, q, at<char>(job.data[1], offset[1]), static_cast<const char*>(job.data[4]) + mask_offset,
        copy + copies[0] + copies[1]);
  for (int64_t first = keys.begin; first < keys.end; first += kKeys)
    attend(job, q, k, v, first, std::min(kKeys, keys.end - first));
  for (int64_t c = 0; c < q.count; ++c) {
    const float* sum = q.sum + c * q.value_width;
    if (!part) {
      finish(job, sum, q.weight[c], c, at<char>(job.data[0], offset[0]));
      continue;
    }
    float* to = part + c * (2 + q.value_width);
    to[0] = q.top[c];
    to[1] = q.weight[c];
    std::copy(sum, sum + q.value_width, to + 2);
  }
}

// The parts of one head as if they had been one; changes the first of them.
void join(const AttentionJob& job, float* all, int64_t parts, char* y) {
  const int64_t pitch = part_floats(job), width = whole(job.value_width);
  for (int64_t c = 0; c < job.group * job.queries; ++c, all += 2 + width) {
    float top = -kInfinity, weight = 0;
    for (int64_t p = 0; p < parts; ++p) top = std::max(top, all[p * pitch]);
    const float from = top == -kInfinity ? 0.0f : top;
    float* sum = all + 2;
    for (int64_t p = 0; p < parts; ++p) {
      const float* part = all + p * pitch;
      const float scale = exponential(Vector{} + (part[0] - from))[0];
      weight += part[1] * scale;
      for (int64_t e = 0; e < width; ++e) sum[e] = (p ? sum[e] : 0.0f) + part[2 + e] * scale;
    }
    finish(job, sum, weight, c, y);
  }
}

}  // namespace

int64_t attention_room(const AttentionJob& job) {
  if (job.group * job.queries > kFewQueries) return 0;
  const int64_t parts = parts_of(job, tiles_of({0, job.keys}));
  return parts > 1 ? job.loop.count() * parts * part_floats(job) : 0;
}

void few_queries(const AttentionJob& job, const Reach& reach, int ith, int nth) {
  const Span keys = {seen(job, reach, 0).begin, seen(job, reach, job.queries - 1).end};
  const int64_t tiles = tiles_of(keys), parts = parts_of(job, tiles), floats = part_floats(job);
  auto* kept = static_cast<float*>(job.data[8]);
  Loop loop = job.loop;
  loop.push(parts, 0);
  const int64_t work = (job.width + job.value_width) * (keys.end - keys.begin) / parts * job.group * job.queries;
  const bool last = each_unit(job, loop, work, ith, nth, [&](int64_t position, const int64_t* offset) {
    const Span part = share(tiles, static_cast<int>(position % parts), static_cast<int>(parts));
    const Span own = {keys.begin + part.begin * kKeys, std::min(keys.end, keys.begin + part.end * kKeys)};
    run_unit(job, reach, own, offset, mask_offset(job, position / parts), parts > 1 ? kept + position * floats : nullptr);
  });
  if (!last || parts == 1) return;
  Odometer head(job.loop, job.loop.rank, 0);
  for (int64_t i = 0; i < job.loop.count(); ++i, head.next())
    join(job, kept + i * parts * floats, parts, at<char>(job.data[0], head.offset[0]));
}

}  // namespace keepdim::ggml
