// Matrix product ops: linear, matmul, attention, recurrent layers, rope, cdist and pdist.
#include <algorithm>
#include <cmath>

#include "mlx/op.h"

namespace keepdim::mlx {
namespace {

Array matmul(Op& op) {
  const Array &x = op.in(0), &y = op.in(1);
  if (x.ndim() < 2 || y.ndim() < 2 || x.shape(-1) != y.shape(-2))
    op.refuse(dims_text(x.shape()) + " and " + dims_text(y.shape()) + " do not fit.");
  if (x.shape(-1) == 0) return mx::zeros(op.shape(), op.dtype());
  return general_matmul(x, y);
}

Array linear(Op& op) {
  const Array& x = op.in(0);
  const QuantisedWeight* packed = op.packed(1);
  const int inner = packed ? packed->scales.shape(1) * kGroup : op.in(1).ndim() == 2 ? op.in(1).shape(1) : -1;
  if (x.ndim() < 1 || inner != x.shape(-1)) op.refuse("its weight does not fit input " + dims_text(x.shape()) + ".");
  Array y = inner == 0 ? mx::zeros(op.shape(), op.dtype())
            : packed   ? mx::quantized_matmul(x, packed->quants, packed->scales, packed->biases, true, kGroup, packed->bits)
                       : [&] {
                         const Array w = mx::transpose(mx::astype(op.in(1), x.dtype()));
                         const Array rows = x.ndim() == 1 ? mx::reshape(x, {1, x.shape(0)}) : x;
                         return mx::reshape(general_matmul(rows, w), op.shape());
                       }();
  if (op.has(2)) y = mx::add(y, op.in(2));
  return op.attr("activation") ? activate(y, op.text("activation")) : y;
}

// ---- attention

double attention_scale(Op& op, int width) { return op.attr("scale") ? op.number("scale") : 1 / std::sqrt(std::max(width, 1)); }

// Repeats KV heads to the number of query heads.
Array repeat_heads(const Array& x, const Array& q) {
  if (x.ndim() < 3 || q.ndim() < 3 || x.shape(-3) == 1 || q.shape(-3) == 1 || x.shape(-3) == q.shape(-3)) return x;
  return mx::repeat(x, q.shape(-3) / x.shape(-3), -3);
}

Array attention(Op& op) {
  const Array& q = op.in(0);
  const bool causal = op.flag("causal"), safe = !op.attr("safe") || op.flag("safe");
  for (size_t i = 1; i < 3; ++i) {
    const Array& x = op.in(i);
    if (x.ndim() < 2 || q.ndim() < 2 ||
        (x.ndim() > 2 && q.ndim() > 2 && (x.shape(-3) == 0 || (q.shape(-3) > 1 && q.shape(-3) % x.shape(-3)))))
      op.refuse(dims_text(x.shape()) + " does not fit " + dims_text(q.shape()) + ".");
  }
  const auto scale = static_cast<float>(attention_scale(op, q.shape(-1)));
  const int keys = op.in(1).shape(-2);
  if (keys == 0) return mx::zeros(op.shape(), op.dtype());
  if (q.ndim() == 4 && op.in(1).ndim() == 4 && op.in(2).ndim() == 4 && op.in(1).shape(0) == q.shape(0) &&
      op.in(2).shape(0) == q.shape(0) && q.shape(1) >= op.in(1).shape(1) && !op.has(3) && safe &&
      (!causal || q.shape(2) == keys) && q.shape(3) > 0)
    return mx::fast::scaled_dot_product_attention(q, op.in(1), op.in(2), scale, causal ? "causal" : "");
  const Array k = repeat_heads(op.in(1), q), v = repeat_heads(op.in(2), q), minus_inf = number(-HUGE_VAL, q.dtype());
  Array scores = mx::multiply(mx::matmul(q, mx::swapaxes(k, -1, -2)), number(scale, q.dtype()));
  if (causal) scores = mx::where(mx::tri(q.shape(-2), keys, 0, mx::bool_), scores, minus_inf);
  if (op.has(3)) {
    const Array& mask = op.in(3);
    if (mask.dtype() == mx::bool_)
      scores = mx::where(mask, scores, safe ? mx::add(scores, minus_inf) : minus_inf);
    else
      scores = mx::add(scores, mask);
  }
  Array p = mx::softmax(scores, Axes{-1}, true);
  if (safe) p = mx::where(mx::all(mx::equal(scores, minus_inf), Axes{-1}, true), number(0, p.dtype()), p);
  return mx::matmul(p, v);
}

// ---- attention with a KV cache

// q8_0: int8 values with a scale per 32 elements.
struct QuantisedBlocks {
  Array quants, scales;
};
QuantisedBlocks quantise_q8_0(const Array& x) {
  mx::Shape grouped = x.shape();
  grouped.back() /= kGroup;
  mx::Shape scales = grouped;
  grouped.push_back(kGroup);
  const Array g = mx::reshape(x, grouped);
  const Array d = mx::divide(mx::max(mx::abs(g), Axes{-1}, true), number(127, x.dtype()));
  const Array zero = mx::equal(d, number(0, x.dtype()));
  const Array inverse = mx::where(zero, number(0, x.dtype()), mx::divide(number(1, x.dtype()), d));
  const Array scaled = mx::multiply(g, inverse);
  const Array rounded = mx::floor(mx::add(mx::abs(scaled), number(0.5, x.dtype())));  // ties away from zero
  const Array q = mx::where(mx::less(scaled, number(0, x.dtype())), mx::negative(rounded), rounded);
  return {mx::reshape(mx::astype(q, mx::int8), x.shape()), mx::reshape(mx::astype(d, mx::float16), scales)};
}
Array dequantise_q8_0(const Array& quants, const Array& scales) {
  mx::Shape grouped = scales.shape();
  grouped.push_back(kGroup);
  const Array q = mx::astype(mx::reshape(quants, grouped), mx::float32);
  return mx::reshape(mx::multiply(q, mx::expand_dims(mx::astype(scales, mx::float32), -1)), quants.shape());
}

Array cache_rows(const Array& x, int from, int to) { return slice_axis(x, 2, from, to); }
// In place: the new array holds the only reference to the old one, so MLX reuses its buffer.
void store(Array& cache, const Array& added, int at) {
  mx::Shape start(cache.ndim(), 0), stop = cache.shape();
  start[2] = at;
  stop[2] = at + added.shape(2);
  cache = mx::slice_update(cache, mx::astype(added, cache.dtype()), start, stop);
}
void store(State& state, const Array& added, int at) {
  if (!state.scales) return store(state.data, added, at);
  const QuantisedBlocks b = quantise_q8_0(added);
  store(state.data, b.quants, at);
  store(*state.scales, b.scales, at);
}
Array load(const State& state, int from, int to) {
  if (!state.scales) return mx::astype(cache_rows(state.data, from, to), mx::float32);
  return dequantise_q8_0(cache_rows(state.data, from, to), cache_rows(*state.scales, from, to));
}

Array apply_rope(Op& op, const Array& x) {
  if (!op.has(6)) return x;
  const Array &cos = op.in(6), &sin = op.in(7);
  return mx::add(mx::multiply(x, cos), mx::multiply(rotate_half(x), sin));
}

// Appends new keys and values to their caches, then causal attention over the filled rows. The position is read here (a
// synchronous evaluation); it is an input or computed from one.
Array cached_attention(Op& op) {
  State *keys = op.state(4), *values = op.state(5);
  if (!keys || !values) op.refuse("its caches are not states.");
  const Array &q = op.in(0), &k = op.in(1), &v = op.in(2);
  if (op.in(3).size() != 1) op.refuse("its position is not one number but " + dims_text(op.in(3).shape()) + ".");
  if (op.has(6) != op.has(7)) op.refuse("takes both cosines and sines, or neither.");
  const mx::Shape &cache = keys->data.shape(), &other = values->data.shape();
  bool valid = q.ndim() == 4 && k.ndim() == 4 && v.ndim() == 4 && cache.size() == 4 && other.size() == 4 && cache[1] > 0;
  valid = valid && q.shape(1) % cache[1] == 0 && k.shape(2) == q.shape(2) && k.shape(3) == q.shape(3) && cache[2] == other[2];
  valid = valid && k.shape() == mx::Shape{cache[0], cache[1], k.shape(2), cache[3]} &&
          v.shape() == mx::Shape{other[0], other[1], k.shape(2), other[3]};
  if (!valid)
    op.refuse(dims_text(q.shape()) + ", " + dims_text(k.shape()) + " and " + dims_text(v.shape()) + " do not fit caches " +
              dims_text(cache) + " and " + dims_text(other) + ".");
  const int count = q.shape(2), limit = cache[2];
  if (count > limit) op.refuse(std::to_string(count) + " new rows do not fit a cache of " + std::to_string(limit) + ".");
  const int64_t before = mx::reshape(op.in(3), {}).item<int64_t>();
  if (before < 0 || before > limit - count)
    op.fail_run(std::to_string(count) + " new rows at position " + std::to_string(before) + " do not fit a cache of " +
                std::to_string(limit) + ".");
  const int at = static_cast<int>(before), end = at + count;
  store(*keys, apply_rope(op, k), at);
  store(*values, v, at);
  const int64_t window = op.attr("window") ? op.size("window") : 0;
  if (window < 0) op.refuse("its window " + std::to_string(window) + " is negative.");
  // Keys outside of every query's window are not read.
  const int from = window ? static_cast<int>(std::max<int64_t>(0, at + 1 - window)) : 0;
  const Array cached_k = load(*keys, from, end), cached_v = load(*values, from, end);
  const auto scale = static_cast<float>(op.number("scale"));
  const Array rope_q = apply_rope(op, q);
  if (!window || end <= window || count == 1)
    return mx::fast::scaled_dot_product_attention(rope_q, cached_k, cached_v, scale, count == 1 ? "" : "causal");
  const Array query = mx::reshape(mx::arange(at, end, 1), {count, 1}),
              key = mx::reshape(mx::arange(from, end, 1), {1, end - from});
  const Array in_window = mx::greater(key, mx::subtract(query, integer(window, mx::int32)));
  return mx::fast::scaled_dot_product_attention(rope_q, cached_k, cached_v, scale, "",
                                                mx::logical_and(mx::less_equal(key, query), in_window));
}

// ---- recurrent layers

enum class Cell { lstm, gru, rnn_tanh, rnn_relu };

// One step: from the gates of the input and of the state to the new state (and cell for LSTM).
template <Cell cell>
void cell_step(const Array& x, const Array& h, Array& state, Array& cell_state) {
  const Array gates = mx::add(x, h);
  if constexpr (cell == Cell::lstm) {
    const Array i = mx::sigmoid(equal_part(gates, -1, 0, 4)), f = mx::sigmoid(equal_part(gates, -1, 1, 4)),
                g = mx::tanh(equal_part(gates, -1, 2, 4)), o = mx::sigmoid(equal_part(gates, -1, 3, 4));
    cell_state = mx::add(mx::multiply(f, cell_state), mx::multiply(i, g));
    state = mx::multiply(o, mx::tanh(cell_state));
  } else if constexpr (cell == Cell::gru) {
    const Array r = mx::sigmoid(equal_part(gates, -1, 0, 3)), z = mx::sigmoid(equal_part(gates, -1, 1, 3));
    const Array n = mx::tanh(mx::add(equal_part(x, -1, 2, 3), mx::multiply(r, equal_part(h, -1, 2, 3))));
    state = mx::add(mx::multiply(mx::subtract(number(1, z.dtype()), z), n), mx::multiply(z, state));
  } else if constexpr (cell == Cell::rnn_tanh) {
    state = mx::tanh(gates);
  } else {
    state = activate(gates, "relu");
  }
}

// Input gates [t, b, gates * n], weight [gates * n, n], bias [gates * n], initial state and cell [b, n] → states [t, b, n];
// for LSTM [2, t, b, n]: states, then cells.
template <Cell cell>
Array recurrent(Op& op) {
  const Array &x = op.in(0), w = mx::transpose(op.in(1));
  Array state = op.in(3), cell_state = cell == Cell::lstm ? op.in(4) : state;
  const int steps = x.ndim() == 3 ? x.shape(0) : 0;
  if (x.ndim() != 3 || w.ndim() != 2 || w.shape(1) != x.shape(2) || state.ndim() != 2 || w.shape(0) != state.shape(1) ||
      steps == 0)
    op.refuse("input " + dims_text(x.shape()) + " and weight " + dims_text(op.in(1).shape()) + " do not fit " +
              dims_text(op.shape()) + ".");
  std::vector<Array> states(static_cast<size_t>(steps), state), cells = states;
  for (int i = 0; i < steps; ++i) {
    const int t = op.flag("reverse") ? steps - 1 - i : i;
    const Array x_t = mx::squeeze(mx::slice(x, {t, 0, 0}, {t + 1, x.shape(1), x.shape(2)}), 0);
    Array h = mx::matmul(state, w);
    if (op.has(2)) h = mx::add(h, op.in(2));
    cell_step<cell>(x_t, h, state, cell_state);
    states[t] = state;
    cells[t] = cell_state;
  }
  const Array all = mx::stack(states, 0);
  return cell == Cell::lstm ? mx::stack({all, mx::stack(cells, 0)}, 0) : all;
}

Array rope(Op& op) {
  const Array& x = op.in(0);
  if (x.ndim() < 1 || x.shape(-1) % 2) op.refuse("the last dim of " + dims_text(x.shape()) + " is not even.");
  return mx::add(mx::multiply(x, op.in(1)), mx::multiply(rotate_half(x), op.in(2)));
}

// ---- distances

// p-norm along the last dim.
Array norm(Op& op, const Array& difference) {
  const double p = op.number("p");
  if (!(p >= 0)) op.refuse("p = " + std::to_string(p) + " is negative.");
  const Array x = mx::abs(difference);
  const Axes last{-1};
  if (x.shape(-1) == 0) return mx::sum(x, last);
  if (p == 0) return mx::sum(mx::astype(mx::not_equal(x, scalar_like(x, 0)), x.dtype()), last);
  if (p == 1) return mx::sum(x, last);
  if (p == 2) return mx::sqrt(mx::sum(mx::square(x), last));
  if (std::isinf(p)) return mx::max(x, last);
  return mx::power(mx::sum(mx::power(x, scalar_like(x, p)), last), scalar_like(x, 1 / p));
}

Array cdist(Op& op) {
  const Array &x = op.in(0), &y = op.in(1);
  if (x.ndim() < 2 || y.ndim() < 2 || x.shape(-1) != y.shape(-1))
    op.refuse(dims_text(op.shape()) + " are not the distances of " + dims_text(x.shape()) + " and " + dims_text(y.shape()) + ".");
  const int rows = x.shape(-2);
  const int64_t each = count_of(op.shape()) / std::max(rows, 1) * x.shape(-1);
  return concatenate_chunks(rows, each, -2, [&](int from, int to) {
    return norm(op, mx::subtract(mx::expand_dims(slice_axis(x, -2, from, to), -2), mx::expand_dims(y, -3)));
  });
}

Array pdist(Op& op) {
  const Array& x = op.in(0);
  if (x.ndim() != 2) op.refuse(dims_text(x.shape()) + " is not a list of points.");
  std::vector<int64_t> from, to;
  for (int64_t i = 0; i < x.shape(0); ++i)
    for (int64_t j = i + 1; j < x.shape(0); ++j) from.push_back(i), to.push_back(j);
  const auto count = static_cast<int>(from.size());
  const Array first = host_array(from, {count}), second = host_array(to, {count});
  return concatenate_chunks(count, x.shape(1), 0, [&](int begin, int end) {
    return norm(
        op, mx::subtract(mx::take(x, slice_axis(first, 0, begin, end), 0), mx::take(x, slice_axis(second, 0, begin, end), 0)));
  });
}

constexpr bool widen = true;
constexpr OpBuilder kOps[] = {
    {"matmul", matmul, widen},
    {"linear", linear, widen},
    {"lstm_scan", recurrent<Cell::lstm>},
    {"gru_scan", recurrent<Cell::gru>},
    {"rnn_tanh_scan", recurrent<Cell::rnn_tanh>},
    {"rnn_relu_scan", recurrent<Cell::rnn_relu>},
    {"cached_attention", cached_attention},
    {"sdpa", attention},
    {"rope", rope},
    {"cdist", cdist},
    {"pdist", pdist},
};

}  // namespace

// MLX has no integer matmul: multiplies and sums, in chunks of k.
Array general_matmul(const Array& x, const Array& y) {
  if (mx::issubdtype(x.dtype(), mx::floating)) return mx::matmul(x, y);
  const int k = x.shape(-1);
  int64_t results = int64_t{x.shape(-2)} * y.shape(-1);
  for (int d = 3; d <= std::max(rank_of(x), rank_of(y)); ++d)
    results *= std::max(d <= rank_of(x) ? x.shape(-d) : 1, d <= rank_of(y) ? y.shape(-d) : 1);
  std::optional<Array> sum;
  for (int from = 0, step = chunk_size(k, results); from < k; from += step) {
    const int to = std::min(from + step, k);
    const Array terms =
        mx::multiply(mx::expand_dims(slice_axis(x, -1, from, to), -1), mx::expand_dims(slice_axis(y, -2, from, to), -3));
    const Array more = mx::astype(mx::sum(terms, Axes{-2}), x.dtype());
    sum = sum ? mx::add(*sum, more) : more;
  }
  return *sum;
}

Array rotate_half(const Array& x) {
  return mx::concatenate({mx::negative(equal_part(x, -1, 1, 2)), equal_part(x, -1, 0, 2)}, -1);
}

OpTable matmul_ops() { return {kOps, std::size(kOps)}; }

}  // namespace keepdim::mlx
