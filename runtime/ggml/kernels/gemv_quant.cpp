// The table of weight formats (16-bit floats and ggml's blocks), and their conversion from and to f32. Matrix product of few rows
// with such a weight, read in place: dot products over the weight's blocks, with quantised activations. Larger m goes through
// panels (gemm.cpp, gemm_int16_vnni.cpp, gemm_int8.cpp). Also embedding lookup from such weights.
#include <array>

#include "core/quant.h"
#include "ggml/kernels/gather_scatter.h"
#include "ggml/kernels/gemm_microkernel.h"
#include "ggml/simd/dot_kquant.h"
#include "ggml/simd/dot_quant.h"
#include "ggml/simd/quant_blocks.h"

namespace keepdim::ggml {
namespace {

constexpr int64_t kColumns = 16;  // rows of the weight per work item

// ---- weight formats

void read_f16(const void* x, float* y, int64_t n) { ggml_cpu_fp16_to_fp32(static_cast<const ggml_fp16_t*>(x), y, n); }
void read_bf16(const void* x, float* y, int64_t n) { ggml_cpu_bf16_to_fp32(static_cast<const ggml_bf16_t*>(x), y, n); }

void write_f16(const float* x, void* y, int64_t n) { ggml_cpu_fp32_to_fp16(x, static_cast<ggml_fp16_t*>(y), n); }
void write_bf16(const float* x, void* y, int64_t n) { ggml_cpu_fp32_to_bf16(x, static_cast<ggml_bf16_t*>(y), n); }

// Bitwise equal to `quantise`.
template <ggml_type type>
void write_blocks(const float* x, void* y, int64_t n) {
  static const ggml_from_float_t write = ggml_get_type_traits(type)->from_float_ref;
  write(x, y, n);
}

template <ggml_type type>
void read_blocks(const void* x, float* y, int64_t n) {
  static const ggml_to_float_t read = ggml_get_type_traits(type)->to_float;
  read(x, y, n);
}

template <ggml_type type, class Block, int64_t size = kBlock32>
void read_quants(const void* x, float* y, int64_t n) {
#ifdef __AVX2__
  const auto* block = static_cast<const Block*>(x);
  for (const float* end = y + n; y < end; y += size) dequantise_block(*block++, y);
#else
  read_blocks<type>(x, y, n);
#endif
}

struct FormatRow {
  DType dtype;
  ggml_type type;
  void (*to_float)(const void* x, float* y, int64_t n);
  void (*from_float)(const float* x, void* y, int64_t n) = nullptr;  // of the formats that a state may have
};
constexpr FormatRow kFormats[] = {
    {DType::f16, GGML_TYPE_F16, read_f16, write_f16},
    {DType::bf16, GGML_TYPE_BF16, read_bf16, write_bf16},
    {DType::q8_0, GGML_TYPE_Q8_0, read_quants<GGML_TYPE_Q8_0, BlockQ8>, write_blocks<GGML_TYPE_Q8_0>},
    {DType::q4_0, GGML_TYPE_Q4_0, read_quants<GGML_TYPE_Q4_0, BlockQ4>},
    {DType::q4_1, GGML_TYPE_Q4_1, read_quants<GGML_TYPE_Q4_1, BlockQ4m>},
    {DType::q5_0, GGML_TYPE_Q5_0, read_quants<GGML_TYPE_Q5_0, BlockQ5>},
    {DType::q5_1, GGML_TYPE_Q5_1, read_quants<GGML_TYPE_Q5_1, BlockQ5m>},
    {DType::q4_k, GGML_TYPE_Q4_K, read_blocks<GGML_TYPE_Q4_K>},
    {DType::q5_k, GGML_TYPE_Q5_K, read_blocks<GGML_TYPE_Q5_K>},
    {DType::q6_k, GGML_TYPE_Q6_K, read_quants<GGML_TYPE_Q6_K, BlockQ6k, 256>},
    {DType::iq4_nl, GGML_TYPE_IQ4_NL, read_quants<GGML_TYPE_IQ4_NL, BlockIq4nl>},
    {DType::iq4_xs, GGML_TYPE_IQ4_XS, read_quants<GGML_TYPE_IQ4_XS, BlockIq4xs, 256>},
};

ggml_type type_of(DType dtype) {
  for (const FormatRow& row : kFormats)
    if (row.dtype == dtype) return row.type;
  return GGML_TYPE_COUNT;
}

// ---- gemv

float dot(const float* x, const float* y, int64_t n) {
  Vector sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * kVector <= n; i += 4 * kVector)
    for (int v = 0; v < 4; ++v) sums[v] += load(x + i + v * kVector) * load(y + i + v * kVector);
  const Vector all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  float total = 0;
  for (int l = 0; l < kVector; ++l) total += all[l];
  for (; i < n; ++i) total += x[i] * y[i];
  return total;
}

// y [m, columns] = x [m, k] times `columns` rows of the weight [n, k]. One object per thread.
class ColumnDots {
 public:
  explicit ColumnDots(const MatmulJob& job) : job_(job) {}

  // Quantises the activations and selects the code path. Returns false if the allocation failed.
  bool prepare() {
#ifdef __AVX2__
    switch (job_.type) {
      case DType::q8_0: return prepare_dots<Dot8Bit, BlockQ8>();
      case DType::q4_0: return prepare_dots<Dot4Bit<BlockQ4>, BlockQ4>();
      case DType::q4_1: return prepare_dots<Dot4Bit<BlockQ4m>, BlockQ4m>();
      case DType::q4_k: return prepare_kquant<KDot45<false>>();
      case DType::q5_k: return prepare_kquant<KDot45<true>>();
      case DType::q6_k: return prepare_kquant<KDot6>();
      case DType::iq4_nl: return prepare_dots<Dot4Bit<BlockIq4nl>, BlockIq4nl>();
      case DType::iq4_xs: return prepare_kquant<KDotIq4>();
      case DType::f16: run_ = &ColumnDots::run_float16<false>; return true;
      case DType::bf16: run_ = &ColumnDots::run_float16<true>; return true;
      default: break;
    }
#endif
    return is_quantised(job_.type) ? prepare_blocks() : prepare_widened();
  }

  void run(const char* weight, float* y, int64_t columns) const { (this->*run_)(weight, y, columns); }

 private:
  const float* x() const { return static_cast<const float*>(job_.data[1]); }
  char* workspace(int64_t bytes) {
    return workspace_ = reinterpret_cast<char*>(scratch(bytes / static_cast<int64_t>(sizeof(float))));
  }

#ifdef __AVX2__
  template <class Dot, class Block>
  bool prepare_dots() {
    const int64_t blocks = job_.k / kBlock32;
    const ActivationLayout layout(blocks, Dot::kBytes);
    if (!workspace(job_.m * layout.pitch)) return false;
    for (int64_t r = 0; r < job_.m; ++r) Dot::prepare(x() + r * job_.k, blocks, workspace_ + r * layout.pitch, layout);
    run_ = &ColumnDots::run_dots<Dot, Block>;
    return true;
  }

  template <class Dot, class Block>
  void run_dots(const char* weight, float* y, int64_t columns) const {
    const int64_t blocks = job_.k / kBlock32;
    all_dots<Dot, Block>(weight, job_.b_column, columns, workspace_, ActivationLayout(blocks, Dot::kBytes), blocks, job_.m, y,
                         job_.n);
  }

  template <class Dot>
  bool prepare_kquant() {
    const int64_t blocks = job_.k / kSuperBlock;
    using Activations = typename Dot::Activations;
    if (!workspace(job_.m * blocks * static_cast<int64_t>(sizeof(Activations)))) return false;
    auto* to = reinterpret_cast<Activations*>(workspace_);
    for (int64_t i = 0; i < job_.m * blocks; ++i) to[i].quantise(x() + i * kSuperBlock);
    run_ = &ColumnDots::run_kquant<Dot>;
    return true;
  }

  template <class Dot>
  void run_kquant(const char* weight, float* y, int64_t columns) const {
    const int64_t blocks = job_.k / kSuperBlock;
    const auto* rows = reinterpret_cast<const typename Dot::Activations*>(workspace_);
    for (int64_t c = 0; c < columns; ++c, weight += job_.b_column)
      for (int64_t r = 0; r < job_.m; ++r) y[r * job_.n + c] = kquant_dot<Dot>(weight, rows + r * blocks, blocks);
  }

  template <bool bfloat>
  void run_float16(const char* weight, float* y, int64_t columns) const {
    using Dot = DotFloat16<bfloat>;
    const int64_t blocks = job_.k / kBlock32, full = blocks * kBlock32, rest = job_.k - full;
    ActivationLayout layout(0, 0);
    layout.pitch = job_.a_row;
    all_dots<Dot, typename Dot::Block>(weight, job_.b_column, columns, static_cast<const char*>(job_.data[1]), layout, blocks,
                                       job_.m, y, job_.n);
    float tail[kBlock32];
    for (int64_t c = 0; rest && c < columns; ++c) {
      job_.format->to_float(weight + c * job_.b_column + job_.format->bytes_of(full), tail, rest);
      for (int64_t r = 0; r < job_.m; ++r) y[r * job_.n + c] += dot(x() + r * job_.k + full, tail, rest);
    }
  }
#endif

  // Formats without a dot product here: ggml's vec_dot.
  bool prepare_blocks() {
    const ggml_type_traits_cpu* traits = ggml_get_type_traits_cpu(type_of(job_.type));
    const ggml_from_float_t from_float = ggml_get_type_traits_cpu(traits->vec_dot_type)->from_float;
    dot_ = traits->vec_dot;
    pitch_ = (static_cast<int64_t>(ggml_row_size(traits->vec_dot_type, job_.k)) + 63) / 64 * 64;
    if (!workspace(job_.m * pitch_)) return false;
    for (int64_t r = 0; r < job_.m; ++r) from_float(x() + r * job_.k, workspace_ + r * pitch_, job_.k);
    run_ = &ColumnDots::run_blocks;
    return true;
  }

  void run_blocks(const char* weight, float* y, int64_t columns) const {
    for (int64_t c = 0; c < columns; ++c, weight += job_.b_column)
      for (int64_t r = 0; r < job_.m; ++r)
        dot_(static_cast<int>(job_.k), y + r * job_.n + c, 0, weight, 0, workspace_ + r * pitch_, 0, 1);
  }

  // Without AVX2: 16-bit floats are widened to f32, a row at a time.
  bool prepare_widened() {
    run_ = &ColumnDots::run_widened;
    return workspace(job_.k * static_cast<int64_t>(sizeof(float)));
  }

  void run_widened(const char* weight, float* y, int64_t columns) const {
    auto* row = reinterpret_cast<float*>(workspace_);
    for (int64_t c = 0; c < columns; ++c, weight += job_.b_column) {
      job_.format->to_float(weight, row, job_.k);
      for (int64_t r = 0; r < job_.m; ++r) y[r * job_.n + c] = dot(x() + r * job_.k, row, job_.k);
    }
  }

  const MatmulJob& job_;
  void (ColumnDots::*run_)(const char*, float*, int64_t) const = nullptr;
  ggml_vec_dot_t dot_ = nullptr;
  char* workspace_ = nullptr;
  int64_t pitch_ = 0;
};

void gemv(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const MatmulJob*>(userdata);
  ColumnDots columns(job);
  if (!columns.prepare()) return job.fail(0, "out of memory for its rows. Free memory, or call with smaller sizes.");
  const auto* bias = static_cast<const float*>(job.data[3]);
  Loop loop;
  loop.push((job.n + kColumns - 1) / kColumns, kColumns * sizeof(float), 0, kColumns * job.b_column);
  for_each_dynamic(job, loop, kColumns * job.k * job.m, ith, nth, [&](int64_t position, const int64_t* offset) {
    const int64_t first = position * kColumns, count = std::min(kColumns, job.n - first);
    float* y = at<float>(job.data[0], offset[0]);
    columns.run(at<char>(job.data[2], offset[2]), y, count);
    for (int64_t r = 0; bias && r < job.m; ++r)
      for (int64_t c = 0; c < count; ++c) y[r * job.n + c] += bias[first + c];
    activate(job, y, job.n, job.m, count);
  });
}

// ---- embedding lookup

void lookup(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const LookupJob*>(userdata);
  const int64_t pitch = job.packed ? 0 : job.format->bytes_of(job.size);
  Loop loop;
  loop.push(job.rows, 0);
  for_each_row(loop, job.size, ith, nth, [&](int64_t i, const int64_t*) {
    const int64_t index = job.wide ? static_cast<const int64_t*>(job.data[2])[i] : static_cast<const int32_t*>(job.data[2])[i];
    if (index < 0 || index >= job.limit)
      return job.fail(i, "index " + std::to_string(index) + " is " +
                             (job.limit ? "out of range 0.." + std::to_string(job.limit - 1) : "not in an empty dim") + ".");
    float* y = static_cast<float*>(job.data[0]) + i * job.size;
    if (job.packed && job.format)
      read_packed_float16(reinterpret_cast<const uint16_t*>(job.packed), job.type, job.size, index, y);
    else if (job.packed)
      read_packed(job.packed, job.size, index, y);
    else
      job.format->to_float(at<char>(job.data[1], index * pitch), y, job.size);
  });
}

}  // namespace

const WeightFormat* weight_format(DType dtype) {
  static const auto formats = [] {
    std::array<WeightFormat, kDTypeCount> table{};
    for (const FormatRow& row : kFormats) {
      const auto block = static_cast<int64_t>(dtype_block(row.dtype)), bytes = static_cast<int64_t>(dtype_bytes(row.dtype));
      table[static_cast<size_t>(row.dtype)] = {block, bytes, row.to_float, row.from_float};
    }
    return table;
  }();
  const WeightFormat& format = formats[static_cast<size_t>(dtype)];
  return format.to_float ? &format : nullptr;
}

Kernel gemv_kernel() { return gemv; }

ActivationFormat gemv_activation_format(DType weight) {
  if (!is_quantised(weight)) return {32, 1};
#ifdef __AVX2__
  return {weight == DType::q8_0 ? 16 : 8, kBlock32};
#endif
  return {8, ggml_blck_size(ggml_get_type_traits_cpu(type_of(weight))->vec_dot_type)};
}

Kernel lookup_kernel() { return lookup; }

}  // namespace keepdim::ggml

namespace keepdim {

void quantise(DType dtype, const float* x, int64_t rows, int64_t k, void* y) {
  if (rows > 0 && k > 0) ggml_quantize_chunk(ggml::type_of(dtype), x, y, 0, rows, k, nullptr);
}

void dequantise(DType dtype, const void* x, int64_t rows, int64_t k, float* y) {
  if (rows > 0 && k > 0) ggml_get_type_traits(ggml::type_of(dtype))->to_float(x, y, rows * k);
}

}  // namespace keepdim
