// Flash attention for many queries (prefill): tiles of keys with an online softmax, the score matrix is not materialised.
// Score tiles are transposed [keys, queries], one query per lane: the softmax needs no horizontal reductions, and keys and
// values are read in place.
#include "ggml/kernels/attention_tile.h"

namespace keepdim::ggml {
namespace {

constexpr int64_t kPanels = 16;  // panels of kNR queries that share one tile of keys and values

// kNR queries, one per column. The query heads of a KV head are concatenated.
struct QueryPanel {
  int columns;
  float* queries;                         // [width, kNR], scaled
  float* sum;                             // [value_width, kNR]: weighted sum of values
  float max_score[kNR], weight_sum[kNR];  // running maximum of scores and sum of softmax weights
  int64_t head[kNR], row[kNR];            // head and row of each column's query
  int64_t key_end[kNR], max_key_end;      // end of the keys that each query attends to, and its maximum
  int64_t key_begin[kNR];                 // begin of those keys
  int64_t tile_begin, max_key_begin;      // begin of the panel's first tile of keys; maximum of key_begin
  int64_t tile_end;                       // end of the keys in the panel's last tile
  const char* mask[kNR];
};

struct TileArgs {  // one tile of keys and values of one KV head
  const AttentionJob& job;
  const char *k, *v;
  int64_t k_row, k_step, v_row, v_step;  // in bytes
  float* scores;                         // [kKeys, kNR]
};

// y [rows, vectors * kVector] = init + a @ b, with rows split evenly into at most kMR per microkernel call.
template <int vectors>
void tile_product(MicrokernelArgs args, int64_t rows, int64_t a_row) {
  args.a_row = a_row;
  const int64_t tiles = (rows + kMR - 1) / kMR;
  const char* a = args.a;
  float* y = args.y;
  const float* start = args.init;
  for (int64_t i = 0; i < tiles; ++i) {
    const Span span = split_range(rows, static_cast<int>(i), static_cast<int>(tiles));
    args.a = a + span.begin * a_row;
    args.y = y + span.begin * args.y_pitch;
    args.init = start + span.begin * args.init_pitch;
    run_microkernel<vectors, true>(args, span.end - span.begin);
  }
}

void add_mask(const TileArgs& u, const QueryPanel& p, int64_t first, int64_t keys) {
  const AttentionJob& job = u.job;
  const int64_t step = job.mask_step, offset = first * step;
  // Most masks are equal for all queries of a panel (expanded or copied).
  const int64_t width = job.bool_mask ? 1 : sizeof(float);
  bool same = true;
  for (int c = 1; c < p.columns && same; ++c)
    same = p.mask[c] == p.mask[0] || (step == width && std::memcmp(p.mask[c] + offset, p.mask[0] + offset, keys * width) == 0);
  if (same) {
    if (job.bool_mask && step == 1 && !std::memchr(p.mask[0] + offset, 0, keys)) return;
    for (int64_t j = 0; j < keys; ++j) {
      const float value = mask_value(job, p.mask[0] + offset + j * step);
      float* row = u.scores + j * kNR;
      if (value == 0) continue;
      if (replaces_score(job))
        std::fill(row, row + kNR, value);
      else
        for (int c = 0; c < kNR; ++c) row[c] += value;
    }
    return;
  }
  for (int c = 0; c < p.columns; ++c)
    for (int64_t j = 0; j < keys; ++j) {
      float& score = u.scores[j * kNR + c];
      score = masked(job, score, mask_value(job, p.mask[c] + offset + j * step));
    }
}

// Online softmax: scores [keys, kNR] become weights; the running sums are rescaled to the new maximum.
template <int vectors>
void softmax_step(const TileArgs& u, QueryPanel& p, int64_t keys, bool started) {
  Vector max[vectors], total[vectors], scale[vectors];
  for (int v = 0; v < vectors; ++v) max[v] = load(p.max_score + v * kVector);
  for (int64_t j = 0; j < keys; ++j)
    for (int v = 0; v < vectors; ++v) {
      const Vector score = load(u.scores + j * kNR + v * kVector);
      max[v] = score > max[v] ? score : max[v];
    }
  for (int v = 0; v < vectors; ++v) {
    const Vector before = load(p.max_score + v * kVector);
    store(p.max_score + v * kVector, max[v]);
    max[v] = max[v] == -kInfinity ? Vector{} : max[v];  // no visible key yet: all weights are 0
    scale[v] = exponential(before - max[v]);
    total[v] = Vector{};
  }
  for (int64_t j = 0; j < keys; ++j)
    for (int v = 0; v < vectors; ++v) {
      float* at = u.scores + j * kNR + v * kVector;
      const Vector weight = exponential(load(at) - max[v]);
      store(at, weight);
      total[v] += weight;
    }
  for (int v = 0; v < vectors; ++v) store(p.weight_sum + v * kVector, load(p.weight_sum + v * kVector) * scale[v] + total[v]);
  if (!started) return;
  for (int64_t e = 0; e < u.job.value_width; ++e)
    for (int v = 0; v < vectors; ++v) {
      float* at = p.sum + e * kNR + v * kVector;
      store(at, load(at) * scale[v]);
    }
}

// One panel of queries with one tile of keys and values.
template <int vectors>
void attend(const TileArgs& u, QueryPanel& p, int64_t first, int64_t keys) {
  static constexpr float zeros[kNR] = {};
  const AttentionJob& job = u.job;
  tile_product<vectors>({u.scores, kNR, zeros, 0, u.k, 0, u.k_step, p.queries, kNR, job.width, kNR}, keys, u.k_row);
  if (job.data[AttentionJob::mask]) add_mask(u, p, first, keys);
  for (int c = 0; c < p.columns; ++c)
    for (int64_t j = std::max<int64_t>(0, p.key_end[c] - first); j < keys; ++j) u.scores[j * kNR + c] = -kInfinity;
  if (first < p.max_key_begin)
    for (int c = 0; c < p.columns; ++c)
      for (int64_t j = 0; j < std::min(keys, p.key_begin[c] - first); ++j) u.scores[j * kNR + c] = -kInfinity;
  const bool started = first > p.tile_begin;
  softmax_step<vectors>(u, p, keys, started);
  tile_product<vectors>({p.sum, kNR, started ? p.sum : zeros, started ? kNR : 0, u.v, 0, u.v_row, u.scores, kNR, keys, kNR},
                        job.value_width, u.v_step);
}

// Interleaves the lanes of two vectors, from lane `first` on.
template <int first>
struct Interleave {
  static constexpr int lane(int i) { return i / 2 + i % 2 * kVector + first; }
};

// Transposes a [kVector, kVector] matrix in log2(kVector) interleaving passes.
void transpose(Vector (&x)[kVector]) {
  Vector y[kVector];
#pragma GCC unroll 4
  for (int lanes = 1; lanes < kVector; lanes *= 2) {
#pragma GCC unroll 16
    for (int i = 0; i < kVector / 2; ++i) {
      y[2 * i] = shuffle_lanes<Interleave<0>>(x[i], x[i + kVector / 2]);
      y[2 * i + 1] = shuffle_lanes<Interleave<kVector / 2>>(x[i], x[i + kVector / 2]);
    }
    for (int i = 0; i < kVector; ++i) x[i] = y[i];
  }
}

// p.queries [width, kNR] = scaled queries, one per column, zero-padded.
void pack_queries(const AttentionJob& job, QueryPanel& p, const char* const* from, int64_t step) {
  int64_t done = 0;
  if (step == sizeof(float))
    for (; done + kVector <= job.width; done += kVector)
      for (int c = 0; c < kNR; c += kVector) {
        Vector rows[kVector] = {};
        for (int i = 0; i < kVector && c + i < p.columns; ++i) rows[i] = load(reinterpret_cast<const float*>(from[c + i]) + done);
        transpose(rows);
        for (int i = 0; i < kVector; ++i) store(p.queries + (done + i) * kNR + c, rows[i] * job.scale);
      }
  for (int64_t e = done; e < job.width; ++e)
    for (int c = 0; c < kNR; ++c) {
      const bool used = c < p.columns;
      p.queries[e * kNR + c] = used ? *reinterpret_cast<const float*>(from[c] + e * step) * job.scale : 0.0f;
    }
}

// Initialises a panel with queries `columns` of [group, queries].
void start_panel(const AttentionJob& job, QueryPanel& p, const Rows& queries, Span columns, const char* q, const char* mask,
                 float* workspace) {
  p.columns = static_cast<int>(columns.end - columns.begin);
  const char* from[kNR];
  int64_t head = columns.begin / queries.count, next = columns.begin % queries.count;
  for (int c = 0; c < kNR; ++c) {
    p.max_score[c] = -kInfinity;
    p.weight_sum[c] = 0;
    if (c >= p.columns) continue;
    const int64_t row = queries[next] % job.queries;
    from[c] = q + head * job.q_head + row * job.q_row;
    if (job.data[AttentionJob::cos]) {
      const int64_t rope = row * job.rope_pitch;
      from[c] = reinterpret_cast<char*>(apply_rope(workspace + c * job.width, from[c], job.q_step, job.width,
                                                   at<float>(job.data[AttentionJob::cos], rope),
                                                   at<float>(job.data[AttentionJob::sin], rope)));
    }
    p.head[c] = head;
    p.row[c] = row;
    p.mask[c] = mask + head * job.mask_head + row * job.mask_row;
    if (++next == queries.count) next = 0, ++head;
  }
  pack_queries(job, p, from, job.data[AttentionJob::cos] ? sizeof(float) : job.q_step);
}

// Masked keys before the first and after the last visible key (padding) have a weight of exactly 0 and are skipped. A key is
// masked by -inf or by a finite value far below every bounded score.
constexpr float kMasked = -1e30f, kVisible = -1e29f, kBoundedScore = 1e20f;

Span trim_masked(const AttentionJob& job, const char* mask, Span keys) {
  const auto value = [&](int64_t key) { return mask_value(job, mask + key * job.mask_step); };
  Span visible_span = keys;
  while (visible_span.begin < visible_span.end && value(visible_span.end - 1) < kMasked) --visible_span.end;
  while (visible_span.begin < visible_span.end && value(visible_span.begin) < kMasked) ++visible_span.begin;
  // The weight of a masked key is 0 only if some key is visible. Otherwise no key is skipped.
  return visible_span.begin < visible_span.end && value(visible_span.begin) > kVisible ? visible_span : keys;
}

// Sets the range of keys of each query of a panel. Returns the intersection of all ranges.
Span limit_keys(const AttentionJob& job, const KeyRange& range, bool trim_keys, QueryPanel& p) {
  Span before{0, 0}, visible_span{0, 0}, all{0, range.keys};
  p.tile_begin = range.keys;
  p.max_key_end = p.max_key_begin = 0;
  for (int c = 0; c < p.columns; ++c) {
    const int64_t limit = range.causal ? std::min(range.past + p.row[c] + 1, range.keys) : range.keys;
    const Span keys{job.window ? std::max<int64_t>(0, limit - job.window) : 0, limit};
    if (!trim_keys)
      visible_span = keys;
    else if (c == 0 || p.mask[c] != p.mask[c - 1] || keys.begin != before.begin || keys.end != before.end)
      visible_span = trim_masked(job, p.mask[c], keys);
    before = keys;
    p.key_begin[c] = visible_span.begin;
    p.key_end[c] = visible_span.end;
    p.tile_begin = std::min(p.tile_begin, visible_span.begin / kKeys * kKeys);
    p.max_key_end = std::max(p.max_key_end, visible_span.end);
    p.max_key_begin = std::max(p.max_key_begin, visible_span.begin);
    all = {std::max(all.begin, visible_span.begin), std::min(all.end, visible_span.end)};
  }
  p.tile_end = trim_keys ? p.max_key_end : range.keys;
  return all;
}

// Maximum of |x|, x [rows, n]; NaN compares as the largest.
float max_abs(const char* x, int64_t rows, int64_t row, int64_t n, int64_t step) {
  using Bits = VectorOf<uint32_t>;
  Bits lane_max = {};
  uint32_t max = 0;
  for (; rows > 0; --rows, x += row) {
    int64_t i = 0;
    if (step == sizeof(float))
      for (; i + kVector <= n; i += kVector) {
        const Bits magnitudes = load_vector(reinterpret_cast<const uint32_t*>(x) + i) & INT32_MAX;
        lane_max = magnitudes > lane_max ? magnitudes : lane_max;
      }
    for (; i < n; ++i) max = std::max<uint32_t>(max, *reinterpret_cast<const uint32_t*>(x + i * step) & INT32_MAX);
  }
  for (int i = 0; i < kVector; ++i) max = std::max<uint32_t>(max, lane_max[i]);
  return bit_cast<float>(max);
}

// Whether the keys outside of `visible_span` can be skipped without changing the result bitwise: their scores cannot exceed
// the mask, and their values are finite, so that a weight of 0 gives 0.
bool can_trim(const AttentionJob& job, const QueryPanel& p, Span visible_span, int64_t keys, const char* k, const char* v) {
  if (visible_span.begin == 0 && visible_span.end == keys) return true;
  const float max_query = max_abs(reinterpret_cast<char*>(p.queries), 1, 0, job.width * kNR, sizeof(float));
  const auto bounded_keys = [&](int64_t begin, int64_t end) {
    const float max_key = max_abs(k + begin * job.k_row, end - begin, job.k_row, job.width, job.k_step);
    return max_query * max_key * static_cast<float>(job.width) < kBoundedScore &&
           max_abs(v + begin * job.v_row, end - begin, job.v_row, job.value_width, job.v_step) < kInfinity;
  };
  // A finite mask value would be larger than a score of -inf, so the scores of visible keys must be bounded as well.
  return job.bool_mask ? bounded_keys(0, visible_span.begin) && bounded_keys(visible_span.end, keys) : bounded_keys(0, keys);
}

// Normalises the weighted sums and writes them to y, transposed back.
void finish_panel(const AttentionJob& job, const QueryPanel& p, char* y) {
  float* to[kNR];
  alignas(64) float scale[kNR] = {};
  for (int c = 0; c < p.columns; ++c) {
    to[c] = reinterpret_cast<float*>(y + p.head[c] * job.y_head + p.row[c] * job.y_row);
    scale[c] = inverse_weight(job, p.weight_sum[c]);
  }
  int64_t done = 0;
  for (; done + kVector <= job.value_width; done += kVector)
    for (int c = 0; c < p.columns; c += kVector) {
      Vector rows[kVector];
      for (int i = 0; i < kVector; ++i) rows[i] = load(p.sum + (done + i) * kNR + c) * load(scale + c);
      transpose(rows);
      for (int i = 0; i < kVector && c + i < p.columns; ++i) store(to[c + i] + done, rows[i]);
    }
  for (int64_t e = done; e < job.value_width; ++e)
    for (int c = 0; c < p.columns; ++c) to[c][e] = p.sum[e * kNR + c] * scale[c];
}

// Panels [panels.begin, panels.end) of one KV head over all its tiles.
void run_unit(const AttentionJob& job, const KeyRange& range, const Rows& queries, Span panels, const int64_t* offset,
              int64_t mask) {
  const int64_t count = panels.end - panels.begin, columns = job.group * queries.count;
  const int64_t panel_floats = (job.width + job.value_width) * kNR;
  const int64_t rope_floats = job.data[AttentionJob::cos] ? (kNR + 1) * job.width : 0;
  float* workspace = scratch(count * panel_floats + kKeys * (kNR + job.width + job.value_width) + rope_floats);
  if (!workspace) return job.fail(0, "out of memory for its tiles. Free memory, or call with smaller sizes.");
  float* k_copy = workspace + count * panel_floats + kKeys * kNR;
  TileArgs unit{job, nullptr, nullptr, job.k_row, job.k_step, job.v_row, job.v_step, workspace + count * panel_floats};
  QueryPanel all[kPanels];
  const char *k = at<char>(job.data[AttentionJob::k], offset[2]), *v = at<char>(job.data[AttentionJob::v], offset[3]);
  const bool trim_keys = job.data[AttentionJob::mask] && !job.format;
  int64_t begin = range.keys, last = 0;
  for (int64_t i = 0; i < count; ++i) {
    QueryPanel& p = all[i];
    p.queries = workspace + i * panel_floats;
    p.sum = p.queries + job.width * kNR;
    const int64_t first = (panels.begin + i) * kNR;
    start_panel(job, p, queries, {first, std::min(first + kNR, columns)}, at<char>(job.data[AttentionJob::q], offset[1]),
                static_cast<const char*>(job.data[AttentionJob::mask]) + mask, k_copy + kKeys * (job.width + job.value_width));
    // Decided per panel: which panels share a work item depends on the number of threads, and the result must not.
    const Span visible_span = limit_keys(job, range, trim_keys, p);
    if (trim_keys && !can_trim(job, p, visible_span, range.keys, k, v)) limit_keys(job, range, false, p);
    if (p.max_key_end == 0) std::fill(p.sum, p.sum + job.value_width * kNR, 0.0f);
    begin = std::min(begin, p.tile_begin);
    last = std::max(last, p.max_key_end);
  }
  for (int64_t first = begin; first < last; first += kKeys) {
    const int64_t keys = std::min(kKeys, range.keys - first);
    unit.k = k + first * job.k_row;
    unit.v = v + first * job.v_row;
    if (count > 1 || job.format) {
      float* v_copy = k_copy + kKeys * job.width;
      gather_rows(k_copy, job.width, job.format, unit.k, keys, job.width, job.k_row, job.k_step);
      gather_rows(v_copy, job.value_width, job.format, unit.v, keys, job.value_width, job.v_row, job.v_step);
      unit.k = reinterpret_cast<char*>(k_copy);
      unit.v = reinterpret_cast<char*>(v_copy);
      unit.k_step = unit.v_step = sizeof(float);
      unit.k_row = job.width * unit.k_step;
      unit.v_row = job.value_width * unit.v_step;
    }
    for (int64_t i = 0; i < count; ++i) {
      if (first >= all[i].max_key_end || first < all[i].tile_begin) continue;
      const int64_t visible = std::min(keys, all[i].tile_end - first);
      if (all[i].columns > kVector)
        attend<2>(unit, all[i], first, visible);
      else
        attend<1>(unit, all[i], first, visible);
    }
  }
  for (int64_t i = 0; i < count; ++i) finish_panel(job, all[i], at<char>(job.data[AttentionJob::out], offset[0]));
}

void attention(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const AttentionJob*>(userdata);
  KeyRange range{job.keys, 0, job.causal};
  if (job.data[AttentionJob::position]) {
    const int64_t before = *static_cast<const int64_t*>(job.data[AttentionJob::position]);
    if (before < 0 || before > job.keys - job.queries) return;  // reported by the cache store
    range = {before + job.queries, before, true};
  }
  if (job.group * job.queries <= kMaxDecodeQueries) return attend_decode(job, range, ith, nth);
  const int64_t heads = job.loop.count(), batches = job.loop.rank ? heads / job.loop.dims[job.loop.rank - 1] : 1;
  const Rows rows = parse_row_list(job, job.data[AttentionJob::rows], batches * job.queries);
  const auto panels_of = [&](int64_t queries) { return (job.group * queries + kNR - 1) / kNR; };
  const int64_t panels = panels_of(job.queries);
  int64_t parts = (panels + kPanels - 1) / kPanels;
  if (nth > 1 && heads * parts < 4 * nth)  // too few work items to balance
    parts = std::min(panels, std::max(parts, (4 * nth + heads - 1) / heads));
  Loop loop = job.loop;
  loop.push(parts, 0);
  const int64_t work = (job.width + job.value_width) * range.keys * (job.group * job.queries / parts + 1);
  for_each_dynamic(job, loop, work, ith, nth, [&](int64_t position, const int64_t* offset) {
    const int64_t head = position / parts, part = position % parts, first = head * batches / heads * job.queries;
    const Span batch{first, first + job.queries};
    const Rows queries = rows.list ? rows.within(batch) : Rows{nullptr, job.queries};
    if (part == 0)
      for_each_unlisted(rows, batch, [&](int64_t r) {
        for (int64_t h = 0; h < job.group; ++h)
          std::fill_n(at<float>(job.data[AttentionJob::out], offset[0] + h * job.y_head + (r - first) * job.y_row),
                      job.value_width, 0.0f);
      });
    const Span part_panels = split_range(panels_of(queries.count), static_cast<int>(part), static_cast<int>(parts));
    if (part_panels.begin < part_panels.end) run_unit(job, range, queries, part_panels, offset, mask_offset(job, head));
  });
}

// Stores a row of f32 in the format of the cache.
void store_row(const WeightFormat* format, char* y, const char* x, int64_t step, int64_t n, float* workspace) {
  if (!format) return gather_rows(reinterpret_cast<float*>(y), n, nullptr, x, 1, n, 0, step);
  if (step != sizeof(float)) {
    gather_rows(workspace, n, nullptr, x, 1, n, 0, step);
    x = reinterpret_cast<char*>(workspace);
  }
  format->from_float(reinterpret_cast<const float*>(x), y, n);
}

void store(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const CacheStoreJob*>(userdata);
  const int64_t before = *static_cast<const int64_t*>(job.data[CacheStoreJob::position]);
  if (before < 0 || before > job.limit - job.rows) {
    if (ith == 0)
      job.fail(0, std::to_string(job.rows) + " new rows at position " + std::to_string(before) + " do not fit a cache of " +
                      std::to_string(job.limit) + ".");
    return;
  }
  float* workspace = scratch(2 * std::max(job.size[0], job.size[1]));
  if (!workspace) return job.fail(0, "out of memory for a row. Free memory, or call with smaller sizes.");
  Loop loop = job.loop;
  loop.push(job.rows, job.row[0], job.x_row[0], job.x_row[1], job.row[1]);
  for_each_row(loop, job.size[0] + job.size[1], ith, nth, [&](int64_t position, const int64_t* offset) {
    const char* key = at<char>(job.data[CacheStoreJob::keys], offset[1]);
    int64_t step = job.x_step[0];
    if (job.data[CacheStoreJob::cos]) {
      const int64_t rope = position % job.rows * job.rope_pitch;
      key = reinterpret_cast<char*>(apply_rope(workspace, key, step, job.size[0], at<float>(job.data[CacheStoreJob::cos], rope),
                                               at<float>(job.data[CacheStoreJob::sin], rope)));
      step = sizeof(float);
    }
    store_row(job.format, at<char>(job.data[CacheStoreJob::key_cache], offset[0] + before * job.row[0]), key, step, job.size[0],
              workspace);
    store_row(job.format, at<char>(job.data[CacheStoreJob::value_cache], offset[3] + before * job.row[1]),
              at<char>(job.data[CacheStoreJob::values], offset[2]), job.x_step[1], job.size[1], workspace);
  });
}

}  // namespace

Kernel cache_store_kernel() { return store; }
Kernel attention_kernel() { return attention; }

}  // namespace keepdim::ggml
