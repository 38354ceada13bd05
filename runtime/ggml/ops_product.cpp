// Rows of products: linear layers, matrix products, attention, recurrent layers.
#include <algorithm>
#include <cmath>
#include <utility>

#include "ops.h"
#include "splits.h"

namespace keepdim::ggml {
namespace {

Tensor zeros(Build& b) { return b.fill(b.out(), {}, {}); }

// x with the batch dims of `out`; repeated dims have stride 0.
Tensor expand_batch(const Tensor& x, const Tensor& out) {
  Tensor y = x;
  y.rank = out.rank;
  for (int d = 0; d < out.rank; ++d) {
    const int own = d - (out.rank - x.rank);
    const bool matrix = d >= out.rank - 2;
    y.dims[d] = matrix ? x.dims[own] : out.dims[d];
    y.strides[d] = matrix || (own >= 0 && x.dims[own] != 1) ? x.strides[own] : 0;
  }
  return y;
}

Tensor transposed(Tensor x) {
  std::swap(x.dims[x.rank - 1], x.dims[x.rank - 2]);
  std::swap(x.strides[x.rank - 1], x.strides[x.rank - 2]);
  return x;
}

// A product with what belongs to it, in the dtype it is computed in.
struct Operands {
  Tensor out, x, bias, rows;      // no bias, all rows: no buffer
  const float* packed = nullptr;  // instead of a weight
  Block activation = nullptr;
};

// [..., m, k] @ [..., k, n] + [n] for operands of the same batch, as they lie.
Tensor product(Build& b, const Operands& p, const Tensor& y) {
  Tensor out = p.out;
  b.allocate(out);
  const int last = out.rank - 1;
  auto* job = b.make<ProductJob>();
  job->m = out.dims[last - 1];
  job->n = out.dims[last];
  job->k = p.x.dims[last];
  job->a_row = p.x.strides[last - 1];
  job->a_step = p.x.strides[last];
  job->b_step = y.strides[last - 1];
  job->b_column = y.strides[last];
  job->packed = p.packed;
  job->activation = p.activation;
  for (int d = 0; d < last - 1; ++d) job->loop.push(out.dims[d], out.strides[d], p.x.strides[d], y.strides[d]);
  job->loop.merge();
  const double cost = static_cast<double>(out.count()) * static_cast<double>(job->k);
  const Tensor nothing;
  b.step(product_kernel(out.dtype), job, out, {&p.x, p.packed ? &nothing : &y, &p.bias, &p.rows}, cost);
  return out;
}

// Whether ggml's product is the better one (measured): few rows, so that reading w is what it costs, and w lies
// as ggml reads it. Its tiles take whole vectors of k and fours of n; else it makes single dot products.
bool prefers_ggml(const Tensor& w, int64_t rows) {
  const int64_t k = w.dims[w.rank - 1], n = w.dims[w.rank - 2], width = w.width();
  const bool lies = k > 0 && (k == 1 || w.strides[w.rank - 1] == width) && (n == 1 || w.strides[w.rank - 2] >= width);
  return w.dtype == DType::f32 && lies && rows < ggml_rows(k % 16 == 0 && n % 4 == 0);
}

Tensor activate(Build& b, Block block, const Tensor& x) {
  return block ? b.map(block, x.dtype, x.dtype, x, {&x}, {}, 10) : x;
}

// All rows of x times one w [n, k].
Tensor rows_product(Build& b, Operands p, const Tensor& w) {
  const Tensor out = p.out;
  const int64_t n = w.dims[0], k = w.dims[1], m = out.count() / n;
  if (!p.packed && prefers_ggml(w, m)) {
    Tensor y = b.mul_mat(out, w, b.contiguous(p.x), m, Loop());
    if (p.bias.buffer >= 0) y = add_bias(b, y, p.bias);
    return activate(b, p.activation, y);
  }
  p.x = b.contiguous(p.x);
  p.bias = b.contiguous(p.bias);
  p.x.rank = p.out.rank = 2;
  p.x.dims[0] = p.out.dims[0] = m;
  p.x.dims[1] = k;
  p.out.dims[1] = n;
  p.x.pack();
  p.out.pack();
  // Functions of other dtypes stand alone.
  const Block after = out.dtype == DType::f32 ? nullptr : std::exchange(p.activation, nullptr);
  Tensor result = out;
  result.buffer = product(b, p, transposed(w)).buffer;
  return activate(b, after, result);
}

// The product's own form of the result, its activation and its packed weight.
Operands operands(Build& b) {
  Operands p;
  p.out = b.out();
  p.out.dtype = compute_type(p.out.dtype);
  p.out.pack();
  p.packed = b.packed();
  if (const Attr* name = b.attr("activation")) {
    p.activation = activation_block(std::get<std::string>(*name), p.out.dtype);
    if (!p.activation) b.refuse("activation '" + std::get<std::string>(*name) + "' is not known.");
  }
  return p;
}

// All rows of x times a weight [n, k] that is no f32, where it lies.
Tensor stored_product(Build& b, Operands p, const Tensor& w) {
  const Tensor x = b.contiguous(p.x), bias = b.contiguous(p.bias);
  Tensor out = p.out;
  b.allocate(out);
  auto* job = b.make<ProductJob>();
  job->n = w.dims[0];
  job->k = w.dims[1];
  job->m = out.count() / job->n;
  job->a_step = x.width();
  job->a_row = job->k * job->a_step;
  job->b_column = w.strides[0];
  job->stored = stored(w.dtype);
  job->type = w.dtype;
  job->activation = p.activation;
  job->loop.push(1, 0);
  const double cost = static_cast<double>(out.count()) * static_cast<double>(job->k);
  const bool few = job->m <= few_rows(w.dtype) && job->k > 0;
  const Kernel words = job->k > 0 ? words_kernel(w.dtype) : nullptr, many = words ? words : product_kernel(DType::f32);
  b.step(few ? few_rows_kernel() : many, job, out, {&x, &w, &bias, &p.rows}, cost);
  return out;
}

Tensor linear(Build& b) {
  const Tensor &x = b.in(0), &w = b.in(1), &out = b.out();
  if (x.rank < 1 || w.rank != 2 || w.dims[1] != x.dims[x.rank - 1])
    b.refuse("weight " + dims_text(w) + " does not fit input " + dims_text(x) + ".");
  Tensor expected = x;
  expected.dims[x.rank - 1] = w.dims[0];
  if (!same_dims(expected, out)) b.refuse("result " + dims_text(out) + " is not " + dims_text(expected) + ".");
  if (b.has(2) && (b.in(2).rank != 1 || b.in(2).dims[0] != w.dims[0]))
    b.refuse("bias " + dims_text(b.in(2)) + " does not fit weight " + dims_text(w) + ".");
  if (out.count() == 0) return out;
  if (b.has(3) && (b.in(3).rank != 1 || b.in(3).count() * w.dims[0] != out.count()))
    b.refuse(dims_text(b.in(3)) + " do not list the rows of " + dims_text(x) + ".");
  Operands p = operands(b);
  p.x = b.cast(x, p.out.dtype);
  if (b.has(2)) p.bias = b.cast(b.in(2), p.out.dtype);
  if (b.has(3)) p.rows = b.contiguous(b.in(3));
  if (stored(w.dtype) && (is_quantised(w.dtype) || w.strides[1] == w.width())) return b.cast(stored_product(b, p, w), out.dtype);
  return b.cast(rows_product(b, p, p.packed ? w : b.cast(w, p.out.dtype)), out.dtype);
}

void check_matmul(Build& b) {
  const Tensor &x = b.in(0), &y = b.in(1), &out = b.out();
  const std::string pair = dims_text(x) + " and " + dims_text(y);
  if (x.rank < 2 || y.rank < 2 || x.dims[x.rank - 1] != y.dims[y.rank - 2]) b.refuse(pair + " do not fit.");
  if (out.rank != std::max(x.rank, y.rank) || out.dims[out.rank - 2] != x.dims[x.rank - 2] ||
      out.dims[out.rank - 1] != y.dims[y.rank - 1])
    b.refuse("result " + dims_text(out) + " is not the product of " + pair + ".");
  for (int d = 0; d + 2 < out.rank; ++d) {
    const int dx = d - (out.rank - x.rank), dy = d - (out.rank - y.rank);
    const int64_t nx = dx >= 0 ? x.dims[dx] : 1, ny = dy >= 0 ? y.dims[dy] : 1, n = out.dims[d];
    if ((nx != n && nx != 1) || (ny != n && ny != 1) || (nx == 1 && ny == 1 && n != 1))
      b.refuse("the batches of " + pair + " do not broadcast to " + dims_text(out) + ".");
  }
}

Tensor matmul(Build& b) {
  check_matmul(b);
  const Tensor& out = b.out();
  if (out.count() == 0) return out;
  if (b.in(0).dims[b.in(0).rank - 1] == 0) return zeros(b);
  Operands p = operands(b);
  p.x = expand_batch(b.cast(b.in(0), p.out.dtype), out);
  const Tensor y = expand_batch(p.packed ? b.in(1) : b.cast(b.in(1), p.out.dtype), out);
  Tensor w = transposed(y);  // [..., n, k]
  const int64_t m = out.dims[out.rank - 2];
  Loop batch;
  for (int d = 0; d + 2 < out.rank; ++d) batch.push(out.dims[d], p.out.strides[d], p.x.strides[d], w.strides[d]);
  batch.merge();
  const bool shared = std::all_of(batch.strides[2], batch.strides[2] + batch.rank, [](int64_t s) { return s == 0; });
  Tensor result;
  if (p.packed || (shared && p.x.contiguous())) {  // one matrix for the whole batch
    std::copy(w.dims + w.rank - 2, w.dims + w.rank, w.dims);
    std::copy(w.strides + w.rank - 2, w.strides + w.rank, w.strides);
    w.rank = 2;
    result = rows_product(b, p, w);
  } else if (p.x.contiguous() && prefers_ggml(w, m) && batch.rank <= 2) {  // as many as ggml has
    result = b.mul_mat(p.out, w, p.x, m, batch);
  } else {
    result = product(b, p, y);
  }
  return b.cast(result, out.dtype);
}

// ---- attention

void check_attention(Build& b, const Tensor& scores) {
  const Tensor &q = b.in(0), &k = b.in(1), &v = b.in(2), &out = b.out();
  const int rank = out.rank;
  const std::string all = dims_text(q) + ", " + dims_text(k) + " and " + dims_text(v);
  const auto fits_at = [&](const Tensor& x, int from_end) {  // a size of the batch, or of the heads of keys
    const int own = x.rank - from_end;
    const int64_t size = own >= 0 ? x.dims[own] : 1, wanted = out.dims[rank - from_end];
    return size == 1 || size == wanted || (&x != &q && from_end == 3 && size > 0 && wanted % size == 0);
  };
  bool fine = rank >= 2 && q.rank >= 2 && k.rank >= 2 && v.rank >= 2 && q.rank <= rank && k.rank <= rank && v.rank <= rank;
  fine = fine && k.dims[k.rank - 1] == q.dims[q.rank - 1] && k.dims[k.rank - 2] == v.dims[v.rank - 2] &&
         out.dims[rank - 2] == q.dims[q.rank - 2] && out.dims[rank - 1] == v.dims[v.rank - 1];
  for (int d = 3; fine && d <= rank; ++d) fine = fits_at(q, d) && fits_at(k, d) && fits_at(v, d);
  fine = fine && (k.rank >= 3 ? k.dims[k.rank - 3] : 1) == (v.rank >= 3 ? v.dims[v.rank - 3] : 1);
  if (!fine) b.refuse(all + " do not fit " + dims_text(out) + ".");
  if (b.has(3) && !fits(b.in(3), scores))
    b.refuse("mask " + dims_text(b.in(3)) + " does not broadcast to " + dims_text(scores) + ".");
}

// The stride of x at a dim of `out`, right-aligned; 0 where it repeats.
int64_t stride_at(const Tensor& x, const Tensor& out, int d) {
  const int own = d - (out.rank - x.rank);
  return own >= 0 && x.dims[own] != 1 ? x.strides[own] : 0;
}

// The job of queries q over heads of keys and values, strides and loop; `out` gets its memory here.
AttentionJob* attention_job(Build& b, Tensor& out, const Tensor& q, const Tensor& k, const Tensor& v) {
  const int rank = out.rank, head = rank - 3;
  if (head >= 0) {  // as [.., queries, heads, width]: what follows reads it so
    out.strides[head] = out.dims[rank - 1] * out.width();
    out.strides[rank - 2] = out.strides[head] * out.dims[head];
  }
  b.allocate(out);
  auto* job = b.make<AttentionJob>();
  const int64_t heads = head >= 0 && k.rank >= 3 ? k.dims[k.rank - 3] : 1;
  job->group = head >= 0 ? out.dims[head] / heads : 1;
  job->queries = out.dims[rank - 2];
  job->keys = k.dims[k.rank - 2];
  job->width = q.dims[rank - 1];
  job->value_width = out.dims[rank - 1];
  job->q_row = q.strides[rank - 2], job->q_step = q.strides[rank - 1];
  job->k_row = k.strides[k.rank - 2], job->k_step = k.strides[k.rank - 1];
  job->v_row = v.strides[v.rank - 2], job->v_step = v.strides[v.rank - 1];
  job->y_row = out.strides[rank - 2];
  const double width = static_cast<double>(std::max<int64_t>(job->width, 1));
  job->scale = static_cast<float>(b.attr("scale") ? b.number("scale") : 1 / std::sqrt(width));
  for (int d = 0; d < head; ++d)
    job->loop.push(out.dims[d], out.strides[d], q.strides[d], stride_at(k, out, d), stride_at(v, out, d));
  if (head >= 0) {
    job->q_head = q.strides[head], job->y_head = out.strides[head];
    job->loop.push(heads, job->group * job->y_head, job->group * job->q_head, stride_at(k, out, head),
                   stride_at(v, out, head));
  }
  return job;
}

// The operands of an AttentionJob; what is not there is nullptr.
struct AttentionIns {
  const Tensor *q, *k, *v, *mask = nullptr, *position = nullptr, *cos = nullptr, *sin = nullptr, *rows = nullptr;
};

void attention_step(Build& b, AttentionJob* job, const Tensor& out, const AttentionIns& ins) {
  Tensor room;
  room.rank = 1;
  room.dims[0] = attention_room(*job);
  room.pack();
  b.allocate(room);
  const double cost = static_cast<double>(out.count() / job->value_width) * static_cast<double>(job->keys) *
                      static_cast<double>(job->width + job->value_width);
  const Tensor nothing;
  const auto given = [&](const Tensor* x) { return x ? x : &nothing; };
  b.step(attention_kernel(), job, out,
         {ins.q, ins.k, ins.v, given(ins.mask), given(ins.position), given(ins.cos), given(ins.sin), &room,
          given(ins.rows)}, cost);
}

Tensor attention(Build& b) {
  const Tensor &k = b.in(1), &v = b.in(2);
  Tensor out = b.out(), scores = out;
  const int rank = out.rank, head = rank - 3;
  if (k.rank >= 2 && rank >= 2) scores.dims[rank - 1] = k.dims[k.rank - 2];
  check_attention(b, scores);
  if (out.count() == 0) return out;
  const Tensor q = expand_batch(b.in(0), out);
  AttentionJob* job = attention_job(b, out, q, k, v);
  job->causal = b.flag("causal");
  job->safe = !b.attr("safe") || b.flag("safe");
  Tensor mask;
  if (b.has(3)) {
    mask = b.in(3).dtype == DType::boolean ? b.in(3) : b.cast(b.in(3), DType::f32);
    job->bool_mask = mask.dtype == DType::boolean;
    job->mask_row = stride_at(mask, scores, rank - 2);
    job->mask_step = stride_at(mask, scores, rank - 1);
    for (int d = 0; d <= head; ++d) job->mask_batch[d] = stride_at(mask, scores, d);
    if (head >= 0) job->mask_head = job->mask_batch[head], job->mask_batch[head] *= job->group;
  }
  Tensor rows;
  if (b.has(4)) {
    rows = b.contiguous(b.in(4));
    if (head < 0 || rows.rank != 1 || rows.count() * out.dims[head] * out.dims[rank - 1] != out.count())
      b.refuse(dims_text(rows) + " do not list the queries of " + dims_text(out) + ".");
  }
  attention_step(b, job, out, {&q, &k, &v, &mask, nullptr, nullptr, nullptr, &rows});
  return out;
}

// What queries and keys are turned by: rows [.., new, width] without gaps.
Tensor turn(Build& b, size_t operand, const Tensor& q) {
  const Tensor& x = b.in(operand);
  const int rank = x.rank;
  bool fine = rank >= 2 && rank <= 4 && x.dims[rank - 1] == q.dims[3] && x.dims[rank - 2] == q.dims[2] && q.dims[3] % 2 == 0;
  for (int d = 0; d < rank - 2; ++d) fine = fine && x.dims[d] == 1;
  if (!fine) b.refuse(dims_text(x) + " does not turn " + dims_text(q) + ".");
  return b.contiguous(x);
}

// New keys and values into their caches, then attention over the filled rows, up to each query's own.
Tensor cached_attention(Build& b) {
  const Tensor &q = b.in(0), &position = b.in(3), &k = b.in(4), &v = b.in(5);
  const Tensor* fresh[] = {&b.in(1), &b.in(2)};
  const Tensor* caches[] = {&k, &v};
  Tensor out = b.out();
  bool fine = q.rank == 4;
  for (int i = 0; i < 2 && fine; ++i) {
    const Tensor &x = *fresh[i], &cache = *caches[i];
    fine = x.rank == 4 && cache.rank == 4 && x.dims[0] == cache.dims[0] && x.dims[0] == q.dims[0] &&
           x.dims[1] == cache.dims[1] && x.dims[2] == q.dims[2] && x.dims[3] == cache.dims[3];
  }
  fine = fine && k.dims[3] == q.dims[3] && k.dims[1] == v.dims[1] && k.dims[2] == v.dims[2] && k.dims[1] > 0 &&
         q.dims[1] % k.dims[1] == 0 && k.dtype == v.dtype;
  Tensor expected = q;
  expected.dims[3] = v.dims[3];
  if (!fine || !same_dims(expected, out))
    b.refuse(dims_text(q) + ", " + dims_text(*fresh[0]) + " and " + dims_text(*fresh[1]) + " do not fit caches " +
             dims_text(k) + " and " + dims_text(v) + ".");
  if (!b.is_state(4) || !b.is_state(5)) b.refuse("its caches are no state.");
  if (position.count() != 1) b.refuse("its position is not one number but " + dims_text(position) + ".");
  if (q.dims[2] > k.dims[2])
    b.refuse(std::to_string(q.dims[2]) + " new rows do not fit a cache of " + std::to_string(k.dims[2]) + ".");
  if (b.has(6) != b.has(7)) b.refuse("takes cosines and sines, or neither.");
  if (out.count() == 0 || k.dims[3] == 0) return out.count() == 0 ? out : zeros(b);
  Tensor cos, sin;
  if (b.has(6)) cos = turn(b, 6, q), sin = turn(b, 7, q);
  const int64_t turn_row = q.dims[3] * static_cast<int64_t>(sizeof(float));

  auto* store = b.make<StoreJob>();
  store->rows = q.dims[2];
  store->limit = k.dims[2];
  store->stored = stored(k.dtype);
  store->turn_row = turn_row;
  for (int i = 0; i < 2; ++i) {
    store->size[i] = fresh[i]->dims[3];
    store->row[i] = caches[i]->strides[2];
    store->x_row[i] = fresh[i]->strides[2];
    store->x_step[i] = fresh[i]->strides[3];
  }
  for (int d = 0; d < 2; ++d)
    store->loop.push(k.dims[d], k.strides[d], fresh[0]->strides[d], fresh[1]->strides[d], v.strides[d]);
  b.step(store_kernel(), store, k, {fresh[0], &position, fresh[1], &v, &cos, &sin},
         2.0 * static_cast<double>(fresh[0]->count()));

  AttentionJob* job = attention_job(b, out, q, k, v);
  if (b.attr("window")) job->window = b.size("window");
  if (job->window < 0) b.refuse("its window is " + std::to_string(job->window) + ".");
  job->stored = stored(k.dtype);
  job->turn_row = turn_row;
  attention_step(b, job, out, {&q, &k, &v, nullptr, &position, &cos, &sin});
  return out;
}

// ---- recurrent layers

constexpr int64_t gates_of(Cell cell) { return cell == Cell::lstm ? 4 : cell == Cell::gru ? 3 : 1; }

// Gates of the input [t, b, gates * n], weight [gates * n, n], bias, first state [b, n] and cell → states [t, b, n], for
// an LSTM with the cells behind them [2, t, b, n].
template <Cell cell>
Tensor recurrent(Build& b) {
  constexpr bool cells = cell == Cell::lstm;
  const Tensor &x = b.in(0), &w = b.in(1), &out = b.out();
  const int own = cells ? 1 : 0;
  if (out.rank != 3 + own || x.rank != 3) b.refuse(dims_text(x) + " does not fit " + dims_text(out) + ".");
  const int64_t t = out.dims[own], batch = out.dims[own + 1], n = out.dims[own + 2], gates = gates_of(cell) * n;
  const auto is = [&](size_t i, std::initializer_list<int64_t> dims) {
    const Tensor& has = b.in(i);
    return has.rank == static_cast<int>(dims.size()) && std::equal(dims.begin(), dims.end(), has.dims);
  };
  if ((cells && out.dims[0] != 2) || !is(0, {t, batch, gates}) || !is(1, {gates, n}) || (b.has(2) && !is(2, {gates})) ||
      !is(3, {batch, n}) || (cells && !is(4, {batch, n})))
    b.refuse("input " + dims_text(x) + " and weight " + dims_text(w) + " do not fit " + dims_text(out) + ".");
  if (out.count() == 0) return out;
  Tensor panels, bias, cell0;
  if (!b.packed()) {
    const Tensor weight = b.contiguous(w);
    panels.rank = 1;
    panels.dims[0] = packed_floats(n, gates);
    panels.pack();
    b.allocate(panels);
    auto* job = b.make<ScanJob>();
    job->batch = gates;
    job->size = n;
    b.step(pack_kernel(), job, panels, {&weight}, static_cast<double>(gates * n));
  }
  const Tensor rows = b.contiguous(x), state = b.contiguous(b.in(3));
  if (b.has(2)) bias = b.contiguous(b.in(2));
  if (cells) cell0 = b.contiguous(b.in(4));
  Tensor result = out;
  b.allocate(result);
  auto* job = b.make<ScanJob>();
  job->steps = t;
  job->batch = batch;
  job->size = n;
  job->packed = b.packed();
  job->reverse = b.flag("reverse");
  b.step(recurrent_kernel(cell), job, result, {&rows, &panels, &bias, &state, &cell0},
         static_cast<double>(t * batch) * static_cast<double>(gates * n));
  return result;
}

constexpr Row kRows[] = {
    {"matmul", matmul},
    {"linear", linear},
    {"lstm_scan", recurrent<Cell::lstm>},
    {"gru_scan", recurrent<Cell::gru>},
    {"rnn_tanh_scan", recurrent<Cell::rnn_tanh>},
    {"rnn_relu_scan", recurrent<Cell::rnn_relu>},
    {"cached_attention", cached_attention},
    {"sdpa", attention},
};

}  // namespace

Weight weight_of(const Program& program, const Node& node) {
  Weight w;
  const bool scan = node.op.size() > 5 && node.op.compare(node.op.size() - 5, 5, "_scan") == 0;
  const bool linear = node.op == "linear" || scan;  // [n, k], not [k, n]
  if (!linear && node.op != "matmul") return w;
  const Value& value = program.values[node.ins[1]];
  if (value.kind != Value::Kind::constant || value.dims.size() != 2 || compute_type(value.dtype) != DType::f32) return w;
  if (node.op == "linear" && stored(value.dtype)) return w;
  const DimTable& dims = program.contract.dims;
  const int64_t rows = dims.node(value.dims[0]).value, columns = dims.node(value.dims[1]).value;
  if (!dims.is_constant(value.dims[0]) || !dims.is_constant(value.dims[1]) || rows == 0 || columns == 0) return w;
  return linear ? Weight{node.ins[1], columns, rows, 1, columns} : Weight{node.ins[1], rows, columns, columns, 1};
}

Table product_rows() { return {kRows, std::size(kRows)}; }

}  // namespace keepdim::ggml
