// Attention of many queries, over tiles of keys with the softmax carried along: the scores are never there as a whole.
// All tiles are transposed, so that a lane is a query: the largest score and the sum need no step across lanes, and keys
// and values are read by single elements, as they lie.
#include "attention.h"

namespace keepdim::ggml {
namespace {

constexpr int64_t kPanels = 16;  // of kWidth queries, which share one tile of keys and values

// Queries that are computed side by side, one a column. The heads that share keys stand behind each other.
struct Panel {
  int columns;
  float* queries;  // [width, kWidth], scaled
  float* sum;      // [value_width, kWidth]: of values by their weight
  float top[kWidth], weight[kWidth];  // the largest score so far, the sum of the weights
  int64_t head[kWidth], row[kWidth];  // which query of which head
  int64_t limit[kWidth], last;        // keys that a query may see end here, and the largest of them
  int64_t begin[kWidth];              // and begin here
  int64_t first, widest;              // of the first tile of keys; the largest begin
  int64_t end;                        // of the keys in its last tile
  const char* mask[kWidth];
};

struct Unit {  // one head of keys and values, some panels of queries
  const AttentionJob& job;
  const char *k, *v;
  int64_t k_row, k_step, v_row, v_step;  // in bytes
  float* scores;                         // [kKeys, kWidth]
};

template <int vectors>
void rows_product(Tile tile, int64_t rows, int64_t a_row) {
  tile.a_row = a_row;
  const int64_t tiles = (rows + kHeight - 1) / kHeight;
  const char* a = tile.a;
  float* y = tile.y;
  const float* start = tile.start;
  for (int64_t i = 0; i < tiles; ++i) {
    const Span span = share(rows, static_cast<int>(i), static_cast<int>(tiles));
    tile.a = a + span.begin * a_row;
    tile.y = y + span.begin * tile.y_pitch;
    tile.start = start + span.begin * tile.start_pitch;
    multiply_rows<vectors, true>(tile, span.end - span.begin);
  }
}

void add_mask(const Unit& u, const Panel& p, int64_t first, int64_t keys) {
  const AttentionJob& job = u.job;
  const int64_t step = job.mask_step, offset = first * step;
  // Most masks say the same to all queries of a panel, whether they are expanded or written out.
  const int64_t width = job.bool_mask ? 1 : sizeof(float);
  bool same = true;
  for (int c = 1; c < p.columns && same; ++c)
    same = p.mask[c] == p.mask[0] ||
           (step == width && std::memcmp(p.mask[c] + offset, p.mask[0] + offset, keys * width) == 0);
  if (same) {
    if (job.bool_mask && step == 1 && !std::memchr(p.mask[0] + offset, 0, keys)) return;
    for (int64_t j = 0; j < keys; ++j) {
      const float value = mask_value(job, p.mask[0] + offset + j * step);
      float* row = u.scores + j * kWidth;
      if (value == 0) continue;
      if (replaces(job)) std::fill(row, row + kWidth, value);
      else for (int c = 0; c < kWidth; ++c) row[c] += value;
    }
    return;
  }
  for (int c = 0; c < p.columns; ++c)
    for (int64_t j = 0; j < keys; ++j) {
      float& score = u.scores[j * kWidth + c];
      score = masked(job, score, mask_value(job, p.mask[c] + offset + j * step));
    }
}

// Scores become weights; the sums so far are scaled to the new largest score.
template <int vectors>
void weigh(const Unit& u, Panel& p, int64_t keys, bool started) {
  Vector top[vectors], total[vectors], scale[vectors];
  for (int v = 0; v < vectors; ++v) top[v] = load(p.top + v * kVector);
  for (int64_t j = 0; j < keys; ++j)
    for (int v = 0; v < vectors; ++v) {
      const Vector score = load(u.scores + j * kWidth + v * kVector);
      top[v] = score > top[v] ? score : top[v];
    }
  for (int v = 0; v < vectors; ++v) {
    const Vector before = load(p.top + v * kVector);
    store(p.top + v * kVector, top[v]);
    top[v] = top[v] == -kInfinity ? Vector{} : top[v];  // nothing to see yet: all weights are 0
    scale[v] = exponential(before - top[v]);
    total[v] = Vector{};
  }
  for (int64_t j = 0; j < keys; ++j)
    for (int v = 0; v < vectors; ++v) {
      float* at = u.scores + j * kWidth + v * kVector;
      const Vector weight = exponential(load(at) - top[v]);
      store(at, weight);
      total[v] += weight;
    }
  for (int v = 0; v < vectors; ++v)
    store(p.weight + v * kVector, load(p.weight + v * kVector) * scale[v] + total[v]);
  if (!started) return;
  for (int64_t e = 0; e < u.job.value_width; ++e)
    for (int v = 0; v < vectors; ++v) {
      float* at = p.sum + e * kWidth + v * kVector;
      store(at, load(at) * scale[v]);
    }
}

template <int vectors>
void attend(const Unit& u, Panel& p, int64_t first, int64_t keys) {
  static constexpr float zeros[kWidth] = {};
  const AttentionJob& job = u.job;
  rows_product<vectors>({u.scores, kWidth, zeros, 0, u.k, 0, u.k_step, p.queries, kWidth, job.width, kWidth}, keys,
                        u.k_row);
  if (job.data[4]) add_mask(u, p, first, keys);
  for (int c = 0; c < p.columns; ++c)
    for (int64_t j = std::max<int64_t>(0, p.limit[c] - first); j < keys; ++j) u.scores[j * kWidth + c] = -kInfinity;
  if (first < p.widest)
    for (int c = 0; c < p.columns; ++c)
      for (int64_t j = 0; j < std::min(keys, p.begin[c] - first); ++j) u.scores[j * kWidth + c] = -kInfinity;
  const bool started = first > p.first;
  weigh<vectors>(u, p, keys, started);
  rows_product<vectors>({p.sum, kWidth, started ? p.sum : zeros, started ? kWidth : 0, u.v, 0, u.v_row, u.scores,
                         kWidth, keys, kWidth},
                        job.value_width, u.v_step);
}

// The lanes of two vectors in turn, from one on.
template <int first>
struct InTurn {
  static constexpr int lane(int i) { return i / 2 + i % 2 * kVector + first; }
};

// Rows become columns and columns rows, in as many passes as the lanes have bits.
void transpose(Vector (&x)[kVector]) {
  Vector y[kVector];
#pragma GCC unroll 4
  for (int lanes = 1; lanes < kVector; lanes *= 2) {
#pragma GCC unroll 16
    for (int i = 0; i < kVector / 2; ++i) {
      y[2 * i] = shuffled<InTurn<0>>(x[i], x[i + kVector / 2]);
      y[2 * i + 1] = shuffled<InTurn<kVector / 2>>(x[i], x[i + kVector / 2]);
    }
    for (int i = 0; i < kVector; ++i) x[i] = y[i];
  }
}

// The queries of a panel as columns, scaled.
void pack_queries(const AttentionJob& job, Panel& p, const char* const* from, int64_t step) {
  int64_t done = 0;
  if (step == sizeof(float))
    for (; done + kVector <= job.width; done += kVector)
      for (int c = 0; c < kWidth; c += kVector) {
        Vector rows[kVector] = {};
        for (int i = 0; i < kVector && c + i < p.columns; ++i)
          rows[i] = load(reinterpret_cast<const float*>(from[c + i]) + done);
        transpose(rows);
        for (int i = 0; i < kVector; ++i) store(p.queries + (done + i) * kWidth + c, rows[i] * job.scale);
      }
  for (int64_t e = done; e < job.width; ++e)
    for (int c = 0; c < kWidth; ++c) {
      const bool used = c < p.columns;
      p.queries[e * kWidth + c] =
          used ? *reinterpret_cast<const float*>(from[c] + e * step) * job.scale : 0.0f;
    }
}

// Of `queries` of each head, those at `columns`.
void start_panel(const AttentionJob& job, Panel& p, const Rows& queries, Span columns, const char* q, const char* mask,
                 float* room) {
  p.columns = static_cast<int>(columns.end - columns.begin);
  const char* from[kWidth];
  int64_t head = columns.begin / queries.count, next = columns.begin % queries.count;
  for (int c = 0; c < kWidth; ++c) {
    p.top[c] = -kInfinity;
    p.weight[c] = 0;
    if (c >= p.columns) continue;
    const int64_t row = queries[next] % job.queries;
    from[c] = q + head * job.q_head + row * job.q_row;
    if (job.data[6]) {
      const int64_t turn = row * job.turn_row;
      from[c] = reinterpret_cast<char*>(turned(room + c * job.width, from[c], job.q_step, job.width,
                                               at<float>(job.data[6], turn), at<float>(job.data[7], turn)));
    }
    p.head[c] = head;
    p.row[c] = row;
    p.mask[c] = mask + head * job.mask_head + row * job.mask_row;
    if (++next == queries.count) next = 0, ++head;
  }
  pack_queries(job, p, from, job.data[6] ? sizeof(float) : job.q_step);
}

// Keys that a mask hides before the first and behind the last that a query sees, as it does with padding, weigh exactly 0
// and are left out. It hides them by -inf or by a number that is as far below all scores of plain numbers.
constexpr float kHidden = -1e30f, kSeen = -1e29f, kPlain = 1e20f;

Span without_hidden(const AttentionJob& job, const char* mask, Span keys) {
  const auto value = [&](int64_t key) { return mask_value(job, mask + key * job.mask_step); };
  Span seen = keys;
  while (seen.begin < seen.end && value(seen.end - 1) < kHidden) --seen.end;
  while (seen.begin < seen.end && value(seen.begin) < kHidden) ++seen.begin;
  // What is hidden weighs nothing beside a key that is seen. Where there is none, all are left in.
  return seen.begin < seen.end && value(seen.begin) > kSeen ? seen : keys;
}

// Which keys the queries of a panel may see. Returns those that all of them do.
Span limit_panel(const AttentionJob& job, const Reach& reach, bool leave_out, Panel& p) {
  Span before{0, 0}, seen{0, 0}, all{0, reach.keys};
  p.first = reach.keys;
  p.last = p.widest = 0;
  for (int c = 0; c < p.columns; ++c) {
    const int64_t limit = reach.causal ? std::min(reach.before + p.row[c] + 1, reach.keys) : reach.keys;
    const Span keys{job.window ? std::max<int64_t>(0, limit - job.window) : 0, limit};
    if (!leave_out) seen = keys;
    else if (c == 0 || p.mask[c] != p.mask[c - 1] || keys.begin != before.begin || keys.end != before.end)
      seen = without_hidden(job, p.mask[c], keys);
    before = keys;
    p.begin[c] = seen.begin;
    p.limit[c] = seen.end;
    p.first = std::min(p.first, seen.begin / kKeys * kKeys);
    p.last = std::max(p.last, seen.end);
    p.widest = std::max(p.widest, seen.begin);
    all = {std::max(all.begin, seen.begin), std::min(all.end, seen.end)};
  }
  p.end = leave_out ? p.last : reach.keys;
  return all;
}

// The largest magnitude. A NaN is larger than any.
float largest(const char* x, int64_t rows, int64_t row, int64_t n, int64_t step) {
  using Words = VectorOf<uint32_t>;
  Words tops = {};
  uint32_t top = 0;
  for (; rows > 0; --rows, x += row) {
    int64_t i = 0;
    if (step == sizeof(float))
      for (; i + kVector <= n; i += kVector) {
        const Words words = load_vector(reinterpret_cast<const uint32_t*>(x) + i) & INT32_MAX;
        tops = words > tops ? words : tops;
      }
    for (; i < n; ++i) top = std::max<uint32_t>(top, *reinterpret_cast<const uint32_t*>(x + i * step) & INT32_MAX);
  }
  for (int i = 0; i < kVector; ++i) top = std::max<uint32_t>(top, tops[i]);
  return bits<float>(top);
}

// Whether nothing changes for a panel when it leaves out the keys that not all of its queries see: no score of theirs can
// outweigh what hides it, and their values are 0 when they weigh 0.
bool plain(const AttentionJob& job, const Panel& p, Span seen, int64_t keys, const char* k, const char* v) {
  if (seen.begin == 0 && seen.end == keys) return true;
  const float of_queries = largest(reinterpret_cast<char*>(p.queries), 1, 0, job.width * kWidth, sizeof(float));
  const auto plain_keys = [&](int64_t begin, int64_t end) {
    const float of_keys = largest(k + begin * job.k_row, end - begin, job.k_row, job.width, job.k_step);
    return of_queries * of_keys * static_cast<float>(job.width) < kPlain &&
           largest(v + begin * job.v_row, end - begin, job.v_row, job.value_width, job.v_step) < kInfinity;
  };
  // What a number hides would outweigh a score of -inf, so the keys that are seen have to be plain too.
  return job.bool_mask ? plain_keys(0, seen.begin) && plain_keys(seen.end, keys) : plain_keys(0, keys);
}

void finish_panel(const AttentionJob& job, const Panel& p, char* y) {
  float* to[kWidth];
  alignas(64) float scale[kWidth] = {};
  for (int c = 0; c < p.columns; ++c) {
    to[c] = reinterpret_cast<float*>(y + p.head[c] * job.y_head + p.row[c] * job.y_row);
    scale[c] = inverse_weight(job, p.weight[c]);
  }
  int64_t done = 0;
  for (; done + kVector <= job.value_width; done += kVector)
    for (int c = 0; c < p.columns; c += kVector) {
      Vector rows[kVector];
      for (int i = 0; i < kVector; ++i) rows[i] = load(p.sum + (done + i) * kWidth + c) * load(scale + c);
      transpose(rows);
      for (int i = 0; i < kVector && c + i < p.columns; ++i) store(to[c + i] + done, rows[i]);
    }
  for (int64_t e = done; e < job.value_width; ++e)
    for (int c = 0; c < p.columns; ++c) to[c][e] = p.sum[e * kWidth + c] * scale[c];
}

void run_unit(const AttentionJob& job, const Reach& reach, const Rows& queries, Span panels, const int64_t* offset,
              int64_t mask) {
  const int64_t count = panels.end - panels.begin, columns = job.group * queries.count;
  const int64_t of_panel = (job.width + job.value_width) * kWidth;
  const int64_t turns = job.data[6] ? (kWidth + 1) * job.width : 0;
  float* room = scratch(count * of_panel + kKeys * (kWidth + job.width + job.value_width) + turns);
  if (!room) return job.fail(0, "there is no memory for its tiles.");
  float* k_copy = room + count * of_panel + kKeys * kWidth;
  Unit unit{job, nullptr, nullptr, job.k_row, job.k_step, job.v_row, job.v_step, room + count * of_panel};
  Panel all[kPanels];
  const char *k = at<char>(job.data[2], offset[2]), *v = at<char>(job.data[3], offset[3]);
  const bool leave_out = job.data[4] && !job.stored;
  int64_t begin = reach.keys, last = 0;
  for (int64_t i = 0; i < count; ++i) {
    Panel& p = all[i];
    p.queries = room + i * of_panel;
    p.sum = p.queries + job.width * kWidth;
    const int64_t first = (panels.begin + i) * kWidth;
    start_panel(job, p, queries, {first, std::min(first + kWidth, columns)}, at<char>(job.data[1], offset[1]),
                static_cast<const char*>(job.data[4]) + mask, k_copy + kKeys * (job.width + job.value_width));
    // Each decides for itself: which of them are in one unit depends on the threads.
    const Span seen = limit_panel(job, reach, leave_out, p);
    if (leave_out && !plain(job, p, seen, reach.keys, k, v)) limit_panel(job, reach, false, p);
    if (p.last == 0) std::fill(p.sum, p.sum + job.value_width * kWidth, 0.0f);
    begin = std::min(begin, p.first);
    last = std::max(last, p.last);
  }
  for (int64_t first = begin; first < last; first += kKeys) {
    const int64_t keys = std::min(kKeys, reach.keys - first);
    unit.k = k + first * job.k_row;
    unit.v = v + first * job.v_row;
    if (count > 1 || job.stored) {
      float* v_copy = k_copy + kKeys * job.width;
      gather_rows(k_copy, job.width, job.stored, unit.k, keys, job.width, job.k_row, job.k_step);
      gather_rows(v_copy, job.value_width, job.stored, unit.v, keys, job.value_width, job.v_row, job.v_step);
      unit.k = reinterpret_cast<char*>(k_copy);
      unit.v = reinterpret_cast<char*>(v_copy);
      unit.k_step = unit.v_step = sizeof(float);
      unit.k_row = job.width * unit.k_step;
      unit.v_row = job.value_width * unit.v_step;
    }
    for (int64_t i = 0; i < count; ++i) {
      if (first >= all[i].last || first < all[i].first) continue;
      const int64_t own = std::min(keys, all[i].end - first);
      if (all[i].columns > kVector) attend<2>(unit, all[i], first, own);
      else attend<1>(unit, all[i], first, own);
    }
  }
  for (int64_t i = 0; i < count; ++i)
    finish_panel(job, all[i], at<char>(job.data[0], offset[0]));
}

void attention(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const AttentionJob*>(userdata);
  Reach reach{job.keys, 0, job.causal};
  if (job.data[5]) {
    const int64_t before = *static_cast<const int64_t*>(job.data[5]);
    if (before < 0 || before > job.keys - job.queries) return;  // the store has failed
    reach = {before + job.queries, before, true};
  }
  if (job.group * job.queries <= kFewQueries) return few_queries(job, reach, ith, nth);
  const int64_t heads = job.loop.count(), batches = job.loop.rank ? heads / job.loop.dims[job.loop.rank - 1] : 1;
  const Rows rows = rows_of(job, job.data[9], batches * job.queries);
  const auto panels_of = [&](int64_t queries) { return (job.group * queries + kWidth - 1) / kWidth; };
  const int64_t panels = panels_of(job.queries);
  int64_t parts = (panels + kPanels - 1) / kPanels;
  if (nth > 1 && heads * parts < 4 * nth)  // too little to share out evenly
    parts = std::min(panels, std::max(parts, (4 * nth + heads - 1) / heads));
  Loop loop = job.loop;
  loop.push(parts, 0);
  const int64_t work = (job.width + job.value_width) * reach.keys * (job.group * job.queries / parts + 1);
  each_unit(job, loop, work, ith, nth, [&](int64_t position, const int64_t* offset) {
    const int64_t head = position / parts, part = position % parts, first = head * batches / heads * job.queries;
    const Span batch{first, first + job.queries};
    const Rows queries = rows.list ? rows.within(batch) : Rows{nullptr, job.queries};
    if (part == 0)
      for_others(rows, batch, [&](int64_t r) {
        for (int64_t h = 0; h < job.group; ++h)
          std::fill_n(at<float>(job.data[0], offset[0] + h * job.y_head + (r - first) * job.y_row), job.value_width, 0.0f);
      });
    const Span own = share(panels_of(queries.count), static_cast<int>(part), static_cast<int>(parts));
    if (own.begin < own.end) run_unit(job, reach, queries, own, offset, mask_offset(job, head));
  });
}

// A row of f32 as its cache keeps it.
void store_row(const Stored* stored, char* y, const char* x, int64_t step, int64_t n, float* room) {
  if (!stored) return gather_rows(reinterpret_cast<float*>(y), n, nullptr, x, 1, n, 0, step);
  if (step != sizeof(float)) {
    gather_rows(room, n, nullptr, x, 1, n, 0, step);
    x = reinterpret_cast<char*>(room);
  }
  stored->write(reinterpret_cast<const float*>(x), y, n);
}

void store(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const StoreJob*>(userdata);
  const int64_t before = *static_cast<const int64_t*>(job.data[2]);
  if (before < 0 || before > job.limit - job.rows) {
    if (ith == 0)
      job.fail(0, std::to_string(job.rows) + " new rows at position " + std::to_string(before) + " do not fit a cache of " +
                      std::to_string(job.limit) + ".");
    return;
  }
  float* room = scratch(2 * std::max(job.size[0], job.size[1]));
  if (!room) return job.fail(0, "there is no memory for a row.");
  Loop loop = job.loop;
  loop.push(job.rows, job.row[0], job.x_row[0], job.x_row[1], job.row[1]);
  each_row(loop, job.size[0] + job.size[1], ith, nth, [&](int64_t position, const int64_t* offset) {
    const char* key = at<char>(job.data[1], offset[1]);
    int64_t step = job.x_step[0];
    if (job.data[5]) {
      const int64_t turn = position % job.rows * job.turn_row;
      key = reinterpret_cast<char*>(
          turned(room, key, step, job.size[0], at<float>(job.data[5], turn), at<float>(job.data[6], turn)));
      step = sizeof(float);
    }
    store_row(job.stored, at<char>(job.data[0], offset[0] + before * job.row[0]), key, step, job.size[0], room);
    store_row(job.stored, at<char>(job.data[4], offset[3] + before * job.row[1]), at<char>(job.data[3], offset[2]),
              job.x_step[1], job.size[1], room);
  });
}

}  // namespace

Kernel store_kernel() { return store; }
Kernel attention_kernel() { return attention; }

}  // namespace keepdim::ggml
