// The f32 matrix product: of all linear layers with a constant weight, whose panels are packed once at load time, and of any
// other operands, whose panels are packed on the fly (or by ggml_mul_mat where that is faster: ops/matmul.cpp).
#include "ggml/kernels/gemm.h"

#include <tuple>

#include "ggml/kernels/gemm_microkernel.h"

namespace keepdim::ggml {
namespace {

constexpr int64_t kDepth = 256;  // k per panel slice, which fits in the L1 cache
// The same for panels packed at load time: with a tall microkernel, reading the panel from L2 costs less than more passes over
// the results.
constexpr int64_t kPackedDepth = kMR > 8 ? 384 : kDepth;

// panel [depth, kNR] = b [depth, columns], padded with zeros.
void pack(float* panel, const char* b, int64_t step, int64_t column, int64_t depth, int64_t columns) {
  if (columns < kNR) std::fill(panel, panel + depth * kNR, 0.0f);
  if (column == sizeof(float)) {
    for (int64_t k = 0; k < depth; ++k) std::memcpy(panel + k * kNR, b + k * step, columns * sizeof(float));
    return;
  }
  for (int64_t c = 0; c < columns; ++c) {
    const char* from = b + c * column;
    float* to = panel + c;
    for (int64_t k = 0; k < depth; ++k) to[k * kNR] = *reinterpret_cast<const float*>(from + k * step);
  }
}

// The same for a 16-bit or quantised weight stored as [n, k]: dequantises 8 rows at a time and transposes them.
void pack_dequantised(float* panel, const MatmulJob& job, const char* b, int64_t depth, int64_t columns) {
  alignas(64) float rows[8][kDepth + kVector];  // padded, so that the rows map to different cache sets
  for (int64_t first = 0; first < kNR; first += 8) {
    for (int64_t c = 0; c < 8; ++c) {
      if (first + c < columns)
        job.format->to_float(b + (first + c) * job.b_column, rows[c], depth);
      else
        std::fill(rows[c], rows[c] + depth, 0.0f);
    }
    int64_t k = 0;
    for (; k + 8 <= depth; k += 8) transpose(rows[0] + k, kDepth + kVector, panel + k * kNR + first, kNR);
    for (; k < depth; ++k)
      for (int64_t c = 0; c < 8; ++c) panel[k * kNR + first + c] = rows[c][k];
  }
}

// One panel of the result. `y`, `b`, `packed` and `bias` point at its first column.
struct PanelArgs {
  float* y;
  const char* b;
  const float *packed, *bias;
  const Rows& rows;
  const GatheredRows& a;
  Span span;  // range of `rows`
  int64_t columns;
};

void copy_columns(float* y, const float* x, int64_t columns) {
  if (columns < kNR) {
    std::memcpy(y, x, columns * sizeof(float));
    return;
  }
  for (int c = 0; c < kNR; c += kVector) store(y + c, load(x + c));
}

// Sets args.b to rows [k, k + depth) of b: packed at load time, dequantised or packed into `panel` here, or in place if there
// are too few rows of a to pay for packing.
void load_panel(const MatmulJob& job, const PanelArgs& p, int64_t k, float* panel, MicrokernelArgs& args) {
  const bool in_place = p.columns == kNR && job.b_column == sizeof(float) && p.span.end - p.span.begin <= 2 * kMR;
  args.b = panel;
  args.b_step = kNR;
  if (p.packed) {
    args.b = p.packed + k * kNR;
  } else if (job.format) {
    pack_dequantised(panel, job, p.b + job.format->bytes_of(k), args.depth, p.columns);
  } else if (in_place) {
    args.b = reinterpret_cast<const float*>(p.b + k * job.b_step);
    args.b_step = job.b_step / static_cast<int64_t>(sizeof(float));
  } else {
    pack(panel, p.b + k * job.b_step, job.b_step, job.b_column, args.depth, p.columns);
  }
}

// Up to kMR rows of one panel over one slice of k. If the rows are not adjacent or an activation follows, the result is
// computed in out_tile [kMR, kNR] and copied to y.
void multiply_rows(const MatmulJob& job, const PanelArgs& p, Span span, int64_t k, bool activated, float* out_tile,
                   MicrokernelArgs& args) {
  static constexpr float zeros[kNR] = {};
  const int64_t height = span.end - span.begin;
  const auto row = [&](int64_t i) { return p.y + p.rows[span.begin + i] * job.n; };
  const bool adjacent = p.rows.adjacent(span), use_out_tile = activated || !adjacent;
  args.y = use_out_tile ? out_tile : row(0);
  args.y_pitch = use_out_tile ? kNR : job.n;
  args.init = k ? row(0) : p.bias ? p.bias : zeros;
  args.init_pitch = k ? job.n : 0;
  for (int64_t i = 0; i < height; ++i) {  // y is not in the cache yet
    __builtin_prefetch(row(i), 1);
    __builtin_prefetch(row(i) + kVector, 1);
  }
  if (k && !adjacent) {
    for (int64_t i = 0; i < height; ++i) copy_columns(out_tile + i * kNR, row(i), p.columns);
    args.init = out_tile;
    args.init_pitch = kNR;
  }
  std::tie(args.a, args.a_row) = p.a.tile_rows(span);
  args.a += k * job.a_step;
  if (p.columns == kNR)
    run_microkernel<2, true>(args, height);
  else
    run_microkernel<2, false>(args, height);
  if (!use_out_tile) return;
  if (activated) activate(job, out_tile, kNR, height, kNR);
  for (int64_t i = 0; i < height; ++i) copy_columns(row(i), out_tile + i * kNR, p.columns);
}

void multiply_panel(const MatmulJob& job, const PanelArgs& p) {
  alignas(64) float panel[kDepth * kNR], out_tile[kMR * kNR] = {};
  const int64_t max_depth = p.packed ? kPackedDepth : kDepth, slices = std::max<int64_t>(1, (job.k + max_depth - 1) / max_depth);
  for (int64_t s = 0; s < slices; ++s) {
    const Span k = job.format ? Span{s * max_depth, std::min(job.k, (s + 1) * max_depth)}  // at block boundaries
                              : split_range(job.k, static_cast<int>(s), static_cast<int>(slices));
    MicrokernelArgs args;
    args.depth = k.end - k.begin;
    args.columns = p.columns;
    args.a_step = job.a_step;
    load_panel(job, p, k.begin, panel, args);
    const bool activated = job.activation && s + 1 == slices;
    for (int64_t r = p.span.begin; r < p.span.end; r += kMR)
      multiply_rows(job, p, {r, std::min<int64_t>(r + kMR, p.span.end)}, k.begin, activated, out_tile, args);
  }
}

void gemm_f32(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const MatmulJob*>(userdata);
  const Rows rows = parse_row_list(job, job.data[4], job.m);
  auto* y = static_cast<float*>(job.data[0]);
  for_each_unlisted(rows, split_range(job.m, ith, nth), [&](int64_t r) { std::fill_n(y + r * job.n, job.n, 0.0f); });
  if (rows.count == 0) return;
  GatheredRows a(job, rows);
  // Dequantising a panel is expensive: use it for more rows at a time.
  const int64_t block = job.format ? 4 * kBlock : kBlock;
  for_each_panel(job, rows.count, block, kMR, ith, nth, [&](const PanelSpan& p, const int64_t* offset) {
    if (!a.gather(at<char>(job.data[1], offset[1]), p.rows))
      return job.fail(0, "out of memory for its rows. Free memory, or call with smaller sizes.");
    multiply_panel(job, {at<float>(job.data[0], offset[0]), job.packed ? nullptr : at<char>(job.data[2], offset[2]),
                         job.packed ? job.packed + p.first * job.k : nullptr,
                         job.data[3] ? static_cast<const float*>(job.data[3]) + p.first : nullptr, rows, a, p.rows, p.columns});
  });
}

// Other dtypes: a simple loop, since no known model spends time in them.
template <class T>
void gemm_naive(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const MatmulJob*>(userdata);
  Loop loop = job.loop;
  loop.push(job.m, job.n * static_cast<int64_t>(sizeof(T)), job.a_row, 0);
  for_each_row(loop, job.n * job.k, ith, nth, [&](int64_t, const int64_t* offset) {
    T* y = at<T>(job.data[0], offset[0]);
    const char* a = at<char>(job.data[1], offset[1]);
    const char* b = at<char>(job.data[2], offset[2]);
    if (job.data[3])
      std::memcpy(y, job.data[3], job.n * sizeof(T));
    else
      std::fill(y, y + job.n, T(0));
    for (int64_t k = 0; k < job.k; ++k) {
      const T value = *reinterpret_cast<const T*>(a + k * job.a_step);
      const char* row = b + k * job.b_step;
      for (int64_t c = 0; c < job.n; ++c) y[c] = Add::f(y[c], Mul::f(value, *reinterpret_cast<const T*>(row + c * job.b_column)));
    }
  });
}

}  // namespace

void read_packed(const float* packed, int64_t k, int64_t column, float* y) {
  const float* from = packed + column / kNR * kNR * k + column % kNR;
  for (int64_t i = 0; i < k; ++i) y[i] = from[i * kNR];
}

int64_t packed_floats(int64_t k, int64_t n) { return (n + kNR - 1) / kNR * kNR * k; }

void pack_weight(float* packed, const void* weight, int64_t k, int64_t n, int64_t step, int64_t column) {
  for (int64_t c = 0; c < n; c += kNR)
    pack(packed + c * k, static_cast<const char*>(weight) + c * column, step, column, k, std::min<int64_t>(kNR, n - c));
}

Kernel matmul_kernel(DType dtype) {
  switch (dtype) {
    case DType::f32: return gemm_f32;
    case DType::f64: return gemm_naive<double>;
    case DType::i64: return gemm_naive<int64_t>;
    case DType::i32: return gemm_naive<int32_t>;
    default: return nullptr;
  }
}

}  // namespace keepdim::ggml
