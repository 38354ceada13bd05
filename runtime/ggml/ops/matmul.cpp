// Matrix product ops: linear, matmul, attention, recurrent layers, cdist and pdist.
#include <algorithm>
#include <cmath>
#include <utility>

#include "ggml/kernels/attention.h"
#include "ggml/kernels/distance.h"
#include "ggml/kernels/gemm.h"
#include "ggml/kernels/recurrent.h"
#include "ggml/ops/ops.h"
#include "ggml/thresholds.h"

namespace keepdim::ggml {
namespace {

Tensor zeros(Build& b) { return b.fill(b.out(), {}, {}); }

// x with the batch dims of `out`; broadcast dims have stride 0.
Tensor expand_batch(const Tensor& x, const Tensor& out) {
  Tensor y = x;
  y.rank = out.rank;
  for (int d = 0; d < out.rank; ++d) {
    const int x_dim = d - (out.rank - x.rank);
    const bool matrix = d >= out.rank - 2;
    y.dims[d] = matrix ? x.dims[x_dim] : out.dims[d];
    y.strides[d] = matrix ? x.strides[x_dim] : broadcast_stride(x, out.rank, d);
  }
  return y;
}

Tensor transposed(Tensor x) {
  std::swap(x.dims[x.rank - 1], x.dims[x.rank - 2]);
  std::swap(x.strides[x.rank - 1], x.strides[x.rank - 2]);
  return x;
}

// Result and operands of a matrix product, in the compute dtype.
struct GemmOperands {
  Tensor out, x, bias, rows;      // bias and rows are optional: without a buffer if missing
  const float* packed = nullptr;  // packed weight, if any
  ElementwiseFn activation = nullptr;
};

// out [.., m, n] = x [.., m, k] @ y [.., k, n] + bias [n], with equal batch dims and any strides.
Tensor gemm(Build& b, const GemmOperands& p, const Tensor& y) {
  Tensor out = p.out;
  b.allocate(out);
  const int last = out.rank - 1;
  auto* job = b.make<MatmulJob>();
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
  const Tensor none;
  b.step(matmul_kernel(out.dtype), job, out, {&p.x, p.packed ? &none : &y, &p.bias, &p.rows}, cost);
  return out;
}

// Whether ggml_mul_mat is faster (measured): few rows, so that the cost is reading w, and a layout of w that ggml supports. Its
// tiles need k divisible by the vector size and n by 4; otherwise it computes single dot products.
bool prefers_ggml(const Tensor& w, int64_t rows) {
  const int64_t k = w.dims[w.rank - 1], n = w.dims[w.rank - 2], width = w.width();
  const bool readable = k > 0 && (k == 1 || w.strides[w.rank - 1] == width) && (n == 1 || w.strides[w.rank - 2] >= width);
  return w.dtype == DType::f32 && readable && rows < ggml_rows(k % 16 == 0 && n % 4 == 0);
}

Tensor activate(Build& b, ElementwiseFn fn, const Tensor& x) { return fn ? b.map(fn, x.dtype, x.dtype, x, {&x}, {}, 10) : x; }

// x [.., k] times one f32 weight w [n, k].
Tensor linear_f32(Build& b, GemmOperands p, const Tensor& w) {
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
  // For other dtypes the activation is a separate step.
  const ElementwiseFn after = out.dtype == DType::f32 ? nullptr : std::exchange(p.activation, nullptr);
  Tensor result = out;
  result.buffer = gemm(b, p, transposed(w)).buffer;
  return activate(b, after, result);
}

// Result in the compute dtype, activation and packed weight of the node.
GemmOperands gemm_operands(Build& b) {
  GemmOperands p;
  p.out = b.out();
  p.out.dtype = compute_type(p.out.dtype);
  p.out.pack();
  p.packed = b.packed();
  if (const Attr* name = b.attr("activation")) {
    p.activation = activation_fn(std::get<std::string>(*name), p.out.dtype);
    if (!p.activation) b.refuse("activation '" + std::get<std::string>(*name) + "' is not supported.");
  }
  return p;
}

// Up to this many rows every thread quantises all of them, which costs less than a step of its own.
constexpr int64_t kRowsPerThread = 4;

// x [.., k] times a 16-bit or quantised weight w [n, k], read in place.
Tensor linear_quantised(Build& b, GemmOperands p, const Tensor& w) {
  const Tensor x = b.contiguous(p.x), bias = b.contiguous(p.bias);
  Tensor out = p.out;
  b.allocate(out);
  auto* job = b.make<MatmulJob>();
  job->n = w.dims[0];
  job->k = w.dims[1];
  job->m = out.count() / job->n;
  job->a_step = x.width();
  job->a_row = job->k * job->a_step;
  job->b_column = w.strides[0];
  job->format = weight_format(w.dtype);
  job->type = w.dtype;
  job->activation = p.activation;
  job->loop.push(1, 0);
  const double cost = static_cast<double>(out.count()) * static_cast<double>(job->k);
  const Tensor none;
  const bool use_gemv = job->m <= few_rows(w.dtype) && job->k > 0;
  const Kernel int8 = job->k > 0 && !use_gemv ? gemm_int8_kernel(w.dtype) : nullptr;
  if (int8) {
    Tensor workspace;
    if (job->m > kRowsPerThread) {
      workspace.dtype = DType::u8;
      workspace.rank = 1;
      workspace.dims[0] = quantised_rows_bytes(job->m, job->k);
      workspace.pack();
      b.allocate(workspace);
      auto* quantise = b.make<MatmulJob>();
      quantise->m = job->m;
      quantise->k = job->k;
      b.step(quantise_rows_kernel(), quantise, workspace, {&x, &none, &none, &p.rows}, 4.0 * static_cast<double>(x.count()));
    }
    b.step(int8, job, out, {&x, &w, &bias, &p.rows, &workspace}, cost);
    return out;
  }
  const Kernel int16 = job->k > 0 ? gemm_int16_kernel(w.dtype) : nullptr, gemm = int16 ? int16 : matmul_kernel(DType::f32);
  b.step(use_gemv ? gemv_kernel() : gemm, job, out, {&x, &w, &bias, &p.rows}, cost);
  return out;
}

// x [.., k] times a constant weight [n, k] of 16-bit floats, packed. `out` has the dtype of the program, p.out f32.
Tensor linear_float16(Build& b, const GemmOperands& p, const Tensor& x, const Tensor& w) {
  Tensor out = b.out();
  const bool rounds = w.dtype == DType::bf16 && b.attr("precision");  // the rows to bf16
  const Tensor given = rounds ? b.cast(x, DType::bf16) : x;
  const bool bf16_rows = w.dtype == DType::bf16 && given.dtype == DType::bf16 && multiplies_bf16_rows();
  const Tensor rows = b.contiguous(bf16_rows ? given : b.cast(given, DType::f32)), bias = b.contiguous(p.bias);
  b.allocate(out);
  auto* job = b.make<MatmulJob>();
  job->n = w.dims[0];
  job->k = w.dims[1];
  job->m = out.count() / job->n;
  job->a_step = rows.width();
  job->a_row = job->k * job->a_step;
  job->packed = p.packed;
  job->type = w.dtype;
  job->result = out.dtype;
  job->activation = p.activation;
  job->loop.push(1, 0);
  const double cost = static_cast<double>(out.count()) * static_cast<double>(job->k);
  const Tensor none;
  b.step(gemm_float16_kernel(), job, out, {&rows, &none, &bias, &p.rows}, cost);
  return out;
}

void check_precision(Build& b) {
  if (b.attr("precision")) b.choice("precision", {"bf16"});
}

Tensor linear(Build& b) {
  check_precision(b);
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
    b.refuse(dims_text(b.in(3)) + " does not list the rows of " + dims_text(x) + ".");
  GemmOperands p = gemm_operands(b);
  if (b.has(2)) p.bias = b.cast(b.in(2), p.out.dtype);
  if (b.has(3)) p.rows = b.contiguous(b.in(3));
  if (p.packed && weight_format(w.dtype)) return linear_float16(b, p, x, w);
  p.x = b.cast(x, p.out.dtype);
  if (weight_format(w.dtype) && (is_quantised(w.dtype) || w.strides[1] == w.width()))
    return b.cast(linear_quantised(b, p, w), out.dtype);
  return b.cast(linear_f32(b, p, p.packed ? w : b.cast(w, p.out.dtype)), out.dtype);
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
  GemmOperands p = gemm_operands(b);
  p.x = expand_batch(b.cast(b.in(0), p.out.dtype), out);
  const Tensor y = expand_batch(p.packed ? b.in(1) : b.cast(b.in(1), p.out.dtype), out);
  Tensor w = transposed(y);  // [..., n, k]
  const int64_t m = out.dims[out.rank - 2];
  Loop batch;
  for (int d = 0; d + 2 < out.rank; ++d) batch.push(out.dims[d], p.out.strides[d], p.x.strides[d], w.strides[d]);
  batch.merge();
  const bool shared_weight = std::all_of(batch.strides[2], batch.strides[2] + batch.rank, [](int64_t s) { return s == 0; });
  Tensor result;
  if (p.packed || (shared_weight && p.x.contiguous())) {  // one weight for the whole batch
    std::copy(w.dims + w.rank - 2, w.dims + w.rank, w.dims);
    std::copy(w.strides + w.rank - 2, w.strides + w.rank, w.strides);
    w.rank = 2;
    result = linear_f32(b, p, w);
  } else if (p.x.contiguous() && prefers_ggml(w, m) && batch.rank <= 2) {  // ggml supports two batch dims
    result = b.mul_mat(p.out, w, p.x, m, batch);
  } else {
    result = gemm(b, p, y);
  }
  return b.cast(result, out.dtype);
}

// ---- attention

void check_attention(Build& b, const Tensor& scores) {
  const Tensor &q = b.in(0), &k = b.in(1), &v = b.in(2), &out = b.out();
  const int rank = out.rank;
  const std::string all = dims_text(q) + ", " + dims_text(k) + " and " + dims_text(v);
  const auto fits_at = [&](const Tensor& x, int from_end) {  // batch dim, or number of KV heads
    const int x_dim = x.rank - from_end;
    const int64_t size = x_dim >= 0 ? x.dims[x_dim] : 1, wanted = out.dims[rank - from_end];
    return size == 1 || size == wanted || (&x != &q && from_end == 3 && size > 0 && wanted % size == 0);
  };
  bool valid = rank >= 2 && q.rank >= 2 && k.rank >= 2 && v.rank >= 2 && q.rank <= rank && k.rank <= rank && v.rank <= rank;
  valid = valid && k.dims[k.rank - 1] == q.dims[q.rank - 1] && k.dims[k.rank - 2] == v.dims[v.rank - 2] &&
          out.dims[rank - 2] == q.dims[q.rank - 2] && out.dims[rank - 1] == v.dims[v.rank - 1];
  for (int d = 3; valid && d <= rank; ++d) valid = fits_at(q, d) && fits_at(k, d) && fits_at(v, d);
  valid = valid && (k.rank >= 3 ? k.dims[k.rank - 3] : 1) == (v.rank >= 3 ? v.dims[v.rank - 3] : 1);
  if (!valid) b.refuse(all + " do not fit " + dims_text(out) + ".");
  if (b.has(3) && !broadcastable(b.in(3), scores))
    b.refuse("mask " + dims_text(b.in(3)) + " does not broadcast to " + dims_text(scores) + ".");
}

// Creates the job with strides and loop, and allocates `out`.
AttentionJob* attention_job(Build& b, Tensor& out, const Tensor& q, const Tensor& k, const Tensor& v) {
  const int rank = out.rank, head = rank - 3;
  if (head >= 0) {  // stored as [.., queries, heads, width], the layout that the next op reads
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
    job->loop.push(out.dims[d], out.strides[d], q.strides[d], broadcast_stride(k, out.rank, d), broadcast_stride(v, out.rank, d));
  if (head >= 0) {
    job->q_head = q.strides[head], job->y_head = out.strides[head];
    job->loop.push(heads, job->group * job->y_head, job->group * job->q_head, broadcast_stride(k, out.rank, head),
                   broadcast_stride(v, out.rank, head));
  }
  return job;
}

// Operands of an AttentionJob; nullptr if missing.
struct AttentionOperands {
  const Tensor *q, *k, *v, *mask = nullptr, *position = nullptr, *cos = nullptr, *sin = nullptr, *rows = nullptr;
};

void add_attention_step(Build& b, AttentionJob* job, const Tensor& out, const AttentionOperands& ins) {
  Tensor workspace;
  workspace.rank = 1;
  workspace.dims[0] = attention_scratch(*job);
  workspace.pack();
  b.allocate(workspace);
  const double cost = static_cast<double>(out.count() / job->value_width) * static_cast<double>(job->keys) *
                      static_cast<double>(job->width + job->value_width);
  const Tensor none;
  const auto or_none = [&](const Tensor* x) { return x ? x : &none; };
  b.step(attention_kernel(), job, out,
         {ins.q, ins.k, ins.v, or_none(ins.mask), or_none(ins.position), or_none(ins.cos), or_none(ins.sin), &workspace,
          or_none(ins.rows)},
         cost);
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
    job->mask_row = broadcast_stride(mask, scores.rank, rank - 2);
    job->mask_step = broadcast_stride(mask, scores.rank, rank - 1);
    for (int d = 0; d <= head; ++d) job->mask_batch[d] = broadcast_stride(mask, scores.rank, d);
    if (head >= 0) job->mask_head = job->mask_batch[head], job->mask_batch[head] *= job->group;
  }
  Tensor rows;
  if (b.has(4)) {
    rows = b.contiguous(b.in(4));
    if (head < 0 || rows.rank != 1 || rows.count() * out.dims[head] * out.dims[rank - 1] != out.count())
      b.refuse(dims_text(rows) + " does not list the queries of " + dims_text(out) + ".");
  }
  add_attention_step(b, job, out, {&q, &k, &v, &mask, nullptr, nullptr, nullptr, &rows});
  return out;
}

// RoPE cos or sin table, contiguous [.., new, width].
Tensor rope_table(Build& b, size_t operand, const Tensor& q) {
  const Tensor& x = b.in(operand);
  const int rank = x.rank;
  bool fits = rank >= 2 && rank <= 4 && x.dims[rank - 1] == q.dims[3] && x.dims[rank - 2] == q.dims[2] && q.dims[3] % 2 == 0;
  for (int d = 0; d < rank - 2; ++d) fits = fits && x.dims[d] == 1;
  if (!fits) b.refuse("cosines or sines " + dims_text(x) + " do not fit queries " + dims_text(q) + ".");
  return b.contiguous(x);
}

// Operands of cached_attention.
struct CachedAttentionOperands {
  const Tensor &q, &position;          // [batch, heads, new, width]; scalar
  const Tensor *added[2], *caches[2];  // keys and values: [batch, kv_heads, new, width]; [batch, kv_heads, n_kv, width]

  explicit CachedAttentionOperands(Build& b)
      : q(b.in(0)), position(b.in(3)), added{&b.in(1), &b.in(2)}, caches{&b.in(4), &b.in(5)} {}
};

void check_cached_attention(Build& b, const CachedAttentionOperands& ins) {
  const Tensor &q = ins.q, &k = *ins.caches[0], &v = *ins.caches[1];
  bool fits = q.rank == 4;
  for (int i = 0; i < 2 && fits; ++i) {
    const Tensor &x = *ins.added[i], &cache = *ins.caches[i];
    fits = x.rank == 4 && cache.rank == 4 && x.dims[0] == cache.dims[0] && x.dims[0] == q.dims[0] && x.dims[1] == cache.dims[1] &&
           x.dims[2] == q.dims[2] && x.dims[3] == cache.dims[3];
  }
  fits = fits && k.dims[3] == q.dims[3] && k.dims[1] == v.dims[1] && k.dims[2] == v.dims[2] && k.dims[1] > 0 &&
         q.dims[1] % k.dims[1] == 0 && k.dtype == v.dtype;
  Tensor expected = q;
  expected.dims[3] = v.dims[3];
  if (!fits || !same_dims(expected, b.out()))
    b.refuse(dims_text(q) + ", " + dims_text(*ins.added[0]) + " and " + dims_text(*ins.added[1]) + " do not fit caches " +
             dims_text(k) + " and " + dims_text(v) + ".");
  if (!b.is_state(4) || !b.is_state(5)) b.refuse("its caches are not states.");
  if (ins.position.count() != 1) b.refuse("its position is not one number but " + dims_text(ins.position) + ".");
  if (q.dims[2] > k.dims[2])
    b.refuse(std::to_string(q.dims[2]) + " new rows do not fit a cache of " + std::to_string(k.dims[2]) + ".");
  if (b.has(6) != b.has(7)) b.refuse("takes both cosines and sines, or neither.");
  if (b.attr("window") && b.size("window") < 0) b.refuse("its window " + std::to_string(b.size("window")) + " is negative.");
}

void store_in_caches(Build& b, const CachedAttentionOperands& ins, const Tensor& cos, const Tensor& sin) {
  const Tensor &k = *ins.caches[0], &v = *ins.caches[1];
  auto* store = b.make<CacheStoreJob>();
  store->rows = ins.q.dims[2];
  store->limit = k.dims[2];
  store->format = weight_format(k.dtype);
  store->rope_pitch = ins.q.dims[3] * static_cast<int64_t>(sizeof(float));
  for (int i = 0; i < 2; ++i) {
    store->size[i] = ins.added[i]->dims[3];
    store->row[i] = ins.caches[i]->strides[2];
    store->x_row[i] = ins.added[i]->strides[2];
    store->x_step[i] = ins.added[i]->strides[3];
  }
  for (int d = 0; d < 2; ++d)
    store->loop.push(k.dims[d], k.strides[d], ins.added[0]->strides[d], ins.added[1]->strides[d], v.strides[d]);
  b.step(cache_store_kernel(), store, k, {ins.added[0], &ins.position, ins.added[1], &v, &cos, &sin},
         2.0 * static_cast<double>(ins.added[0]->count()));
}

// Appends new keys and values to their caches, then causal attention over the filled rows.
Tensor cached_attention(Build& b) {
  const CachedAttentionOperands ins(b);
  check_cached_attention(b, ins);
  const Tensor &q = ins.q, &k = *ins.caches[0], &v = *ins.caches[1];
  Tensor out = b.out();
  if (out.count() == 0) return out;
  if (k.dims[3] == 0) return zeros(b);
  Tensor cos, sin;
  if (b.has(6)) cos = rope_table(b, 6, q), sin = rope_table(b, 7, q);
  store_in_caches(b, ins, cos, sin);
  AttentionJob* job = attention_job(b, out, q, k, v);
  if (b.attr("window")) job->window = b.size("window");
  job->format = weight_format(k.dtype);
  job->rope_pitch = q.dims[3] * static_cast<int64_t>(sizeof(float));
  add_attention_step(b, job, out, {&q, &k, &v, nullptr, &ins.position, &cos, &sin});
  return out;
}

// ---- recurrent layers

constexpr int64_t gate_count(Cell cell) { return cell == Cell::lstm ? 4 : cell == Cell::gru ? 3 : 1; }

// Input gates [t, b, gates * n], weight [gates * n, n], bias [gates * n], initial state and cell [b, n] → states [t, b, n];
// for LSTM [2, t, b, n]: states, then cells.
template <Cell cell>
Tensor recurrent(Build& b) {
  constexpr bool is_lstm = cell == Cell::lstm;
  const Tensor &x = b.in(0), &w = b.in(1), &out = b.out();
  const int first = is_lstm ? 1 : 0;  // LSTM: dim 0 of the result is states, cells
  if (out.rank != 3 + first || x.rank != 3) b.refuse(dims_text(x) + " does not fit " + dims_text(out) + ".");
  const int64_t t = out.dims[first], batch = out.dims[first + 1], n = out.dims[first + 2], gates = gate_count(cell) * n;
  const auto has_dims = [&](size_t i, std::initializer_list<int64_t> dims) {
    const Tensor& operand = b.in(i);
    return operand.rank == static_cast<int>(dims.size()) && std::equal(dims.begin(), dims.end(), operand.dims);
  };
  if ((is_lstm && out.dims[0] != 2) || !has_dims(0, {t, batch, gates}) || !has_dims(1, {gates, n}) ||
      (b.has(2) && !has_dims(2, {gates})) || !has_dims(3, {batch, n}) || (is_lstm && !has_dims(4, {batch, n})))
    b.refuse("input " + dims_text(x) + " and weight " + dims_text(w) + " do not fit " + dims_text(out) + ".");
  if (out.count() == 0) return out;
  Tensor panels, bias, cell0;
  if (!b.packed()) {
    const Tensor weight = b.contiguous(w);
    panels.rank = 1;
    panels.dims[0] = packed_floats(n, gates);
    panels.pack();
    b.allocate(panels);
    auto* job = b.make<RecurrentJob>();
    job->batch = gates;
    job->size = n;
    b.step(pack_weight_kernel(), job, panels, {&weight}, static_cast<double>(gates * n));
  }
  const Tensor rows = b.contiguous(x), state = b.contiguous(b.in(3));
  if (b.has(2)) bias = b.contiguous(b.in(2));
  if (is_lstm) cell0 = b.contiguous(b.in(4));
  Tensor result = out;
  b.allocate(result);
  auto* job = b.make<RecurrentJob>();
  job->steps = t;
  job->batch = batch;
  job->size = n;
  job->packed = b.packed();
  job->reverse = b.flag("reverse");
  b.step(recurrent_kernel(cell), job, result, {&rows, &panels, &bias, &state, &cell0},
         static_cast<double>(t * batch) * static_cast<double>(gates * n));
  return result;
}

// ---- distances

// Distances between the points of x and y, both [.., points, size]; the loop of the job runs over the batch.
Tensor add_distance_step(Build& b, DistanceJob* job, Tensor out, const Tensor& x, const Tensor& y, double results) {
  const double p = b.number("p");
  if (!(p >= 0)) b.refuse("p = " + std::to_string(p) + " is negative.");
  if (out.count() == 0) return out;
  job->rows = x.dims[x.rank - 2], job->columns = y.dims[y.rank - 2], job->size = x.dims[x.rank - 1];
  job->a_row = x.strides[x.rank - 2], job->a_step = x.strides[x.rank - 1];
  job->b_row = y.strides[y.rank - 2], job->b_step = y.strides[y.rank - 1];
  const bool power = p > 0 && p != 1 && p != 2 && !std::isinf(p);
  job->power = pow_fn(x.dtype);
  job->exponent.has_scalar[0] = job->root.has_scalar[0] = true;
  job->exponent.scalar[0].real = p;
  job->root.scalar[0].real = power ? 1 / p : 1;
  b.allocate(out);
  const double work = results * (static_cast<double>(job->size) + 1);
  b.step(distance_kernel(p, x.dtype), job, out, {&x, &y}, (power ? 30 : 2) * work);
  return out;
}

Tensor cdist(Build& b) {
  const Tensor &x = b.in(0), &y = b.in(1), &out = b.out();
  const int last = out.rank - 1;
  Tensor batch = out, from = x, to = y;
  bool fit = x.rank >= 2 && y.rank >= 2 && last >= 1 && x.dims[x.rank - 1] == y.dims[y.rank - 1] &&
             out.dims[last - 1] == x.dims[x.rank - 2] && out.dims[last] == y.dims[y.rank - 2];
  batch.rank -= 2, from.rank -= 2, to.rank -= 2;
  fit = fit && broadcastable(from, batch) && broadcastable(to, batch);
  if (!fit) b.refuse(dims_text(out) + " are not the distances of " + dims_text(x) + " and " + dims_text(y) + ".");
  auto* job = b.make<DistanceJob>();
  job->loop = broadcast(batch, {&from, &to});
  return add_distance_step(b, job, out, x, y, static_cast<double>(out.count()));
}

Tensor pdist(Build& b) {
  const Tensor &x = b.in(0), &out = b.out();
  const int64_t n = x.rank == 2 ? x.dims[0] : 0;
  if (x.rank != 2 || out.rank != 1 || out.dims[0] != static_cast<__int128>(n) * (n - 1) / 2)
    b.refuse(dims_text(out) + " are not the distances in " + dims_text(x) + ".");
  auto* job = b.make<DistanceJob>();
  job->condensed = true;
  job->loop.push(1, 0);
  return add_distance_step(b, job, out, x, x, static_cast<double>(out.count()));
}

constexpr OpBuilder kOps[] = {
    {"matmul", matmul},
    {"linear", linear},
    {"lstm_scan", recurrent<Cell::lstm>},
    {"gru_scan", recurrent<Cell::gru>},
    {"rnn_tanh_scan", recurrent<Cell::rnn_tanh>},
    {"rnn_relu_scan", recurrent<Cell::rnn_relu>},
    {"cached_attention", cached_attention},
    {"sdpa", attention},
    {"cdist", cdist},
    {"pdist", pdist},
};

}  // namespace

Weight weight_of(const Program& program, const Node& node) {
  if (node.op == "conv") return conv_weight_of(program, node);
  Weight w;
  const bool scan = node.op.size() > 5 && node.op.compare(node.op.size() - 5, 5, "_scan") == 0;
  const bool linear = node.op == "linear" || scan;  // [n, k], not [k, n]
  if (!linear && node.op != "matmul") return w;
  const Value& value = program.values[node.ins[1]];
  if (value.kind != Value::Kind::constant || value.dims.size() != 2 || compute_type(value.dtype) != DType::f32) return w;
  if (node.op == "linear" && is_quantised(value.dtype)) return w;
  const DimTable& dims = program.contract.dims;
  const int64_t rows = dims.node(value.dims[0]).value, columns = dims.node(value.dims[1]).value;
  if (!dims.is_constant(value.dims[0]) || !dims.is_constant(value.dims[1]) || rows == 0 || columns == 0) return w;
  w = linear ? Weight{node.ins[1], columns, rows, 1, columns} : Weight{node.ins[1], rows, columns, columns, 1};
  w.keeps_float16 = node.op == "linear" && weight_format(value.dtype);
  return w;
}

ActivationFormat activation_format(DType weight, int64_t rows) {
  if (rows <= few_rows(weight)) return gemv_activation_format(weight);
  return gemm_int8_kernel(weight)    ? ActivationFormat{8, 32}
         : gemm_int16_kernel(weight) ? ActivationFormat{16, 32}
                                     : ActivationFormat{32, 1};
}

OpTable matmul_ops() { return {kOps, std::size(kOps)}; }

}  // namespace keepdim::ggml
