// Recurrence of LSTM, GRU and RNN: one direction of one layer. The input projections of all steps are computed beforehand by
// a matrix product. Threads split the batch, since its sequences are independent.
#include "ggml/kernels/recurrent.h"

#include "ggml/kernels/gemm_microkernel.h"

namespace keepdim::ggml {
namespace {

float sigmoid(float x) { return fast_sigmoid(x); }

// Cells: from the gates of the input x and of the state g, both [gates, n], to the new state h [n] (and cell new_c [n]).
struct Lstm {
  static constexpr int gates = 4;
  static void f(int64_t n, const float* x, const float* g, const float*, float* h, const float* c, float* new_c) {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) {
      const float in = sigmoid(x[i] + g[i]), forget = sigmoid(x[n + i] + g[n + i]);
      const float cell = fast_tanh(x[2 * n + i] + g[2 * n + i]), out = sigmoid(x[3 * n + i] + g[3 * n + i]);
      new_c[i] = forget * c[i] + in * cell;
      h[i] = out * fast_tanh(new_c[i]);
    }
  }
};
struct Gru {
  static constexpr int gates = 3;
  static void f(int64_t n, const float* x, const float* g, const float* prev_h, float* h, const float*, float*) {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) {
      const float reset = sigmoid(x[i] + g[i]), update = sigmoid(x[n + i] + g[n + i]);
      const float candidate = fast_tanh(x[2 * n + i] + reset * g[2 * n + i]);
      h[i] = candidate + update * (prev_h[i] - candidate);
    }
  }
};
struct RnnTanh {
  static constexpr int gates = 1;
  static void f(int64_t n, const float* x, const float* g, const float*, float* h, const float*, float*) {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) h[i] = fast_tanh(x[i] + g[i]);
  }
};
struct RnnRelu {
  static constexpr int gates = 1;
  static void f(int64_t n, const float* x, const float* g, const float*, float* h, const float*, float*) {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) h[i] = x[i] + g[i] < 0 ? 0.0f : x[i] + g[i];
  }
};

// y [rows, columns] = bias + h [rows, size] @ packed [size, columns].
void compute_gates(float* y, const float* h, const float* packed, const float* bias, int64_t rows, int64_t size,
                   int64_t columns) {
  static constexpr float zeros[kNR] = {};
  constexpr int64_t w = sizeof(float);
  for (int64_t c = 0; c < columns; c += kNR) {
    MicrokernelArgs args{y + c,
                         columns,
                         bias ? bias + c : zeros,
                         0,
                         nullptr,
                         size * w,
                         w,
                         packed + c * size,
                         kNR,
                         size,
                         std::min<int64_t>(kNR, columns - c)};
    for (int64_t r = 0; r < rows; r += kMR) {
      const int64_t height = std::min<int64_t>(kMR, rows - r);
      args.y = y + r * columns + c;
      args.a = reinterpret_cast<const char*>(h + r * size);
      if (args.columns == kNR)
        run_microkernel<2, true>(args, height);
      else
        run_microkernel<2, false>(args, height);
    }
  }
}

template <class F>
void scan(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const RecurrentJob*>(userdata);
  const int64_t n = job.size, gates = F::gates * n, batch = job.batch, layer_size = job.steps * batch * n;
  const Span rows = split_range(batch, ith, nth);
  const int64_t count = rows.end - rows.begin;
  if (count == 0) return;
  float* g = scratch(count * gates);
  if (!g) return job.fail(0, "out of memory for its gates. Free memory, or call with smaller sizes.");
  auto* y = static_cast<float*>(job.data[0]);
  const auto* x = static_cast<const float*>(job.data[1]);
  const auto* packed = job.packed ? job.packed : static_cast<const float*>(job.data[2]);
  const auto* bias = static_cast<const float*>(job.data[3]);
  const auto* h = static_cast<const float*>(job.data[4]) + rows.begin * n;
  const auto* c = job.data[5] ? static_cast<const float*>(job.data[5]) + rows.begin * n : nullptr;
  for (int64_t i = 0; i < job.steps; ++i) {
    const int64_t row = (job.reverse ? job.steps - 1 - i : i) * batch + rows.begin;
    compute_gates(g, h, packed, bias, count, n, gates);
    float *new_h = y + row * n, *new_c = c ? new_h + layer_size : nullptr;
    for (int64_t r = 0; r < count; ++r)
      F::f(n, x + (row + r) * gates, g + r * gates, h + r * n, new_h + r * n, c + (c ? r * n : 0), new_c + (c ? r * n : 0));
    h = new_h;
    c = new_c;
  }
}

void pack_recurrent_weight(ggml_tensor*, int ith, int, void* userdata) {
  const auto& job = *static_cast<const RecurrentJob*>(userdata);
  constexpr int64_t w = sizeof(float);
  if (ith == 0) pack_weight(static_cast<float*>(job.data[0]), job.data[1], job.size, job.batch, w, job.size * w);
}

}  // namespace

Kernel recurrent_kernel(Cell cell) {
  switch (cell) {
    case Cell::lstm: return scan<Lstm>;
    case Cell::gru: return scan<Gru>;
    case Cell::rnn_tanh: return scan<RnnTanh>;
    default: return scan<RnnRelu>;
  }
}

Kernel pack_weight_kernel() { return pack_recurrent_weight; }

}  // namespace keepdim::ggml
