// Matrix product with a K-quant, iq4_nl or iq4_xs weight in int8, for two rows and more. Activations are quantised to int8 with
// a scale per block of 32. Weights are unpacked to bytes, a panel of kNR columns and 256 rows of k at a time, in groups of four
// along k: the layout of the dot product instructions of AVX-512 VNNI and AVX2.
#include "ggml/kernels/gemm_microkernel.h"
#include "ggml/simd/dot_kquant.h"

namespace keepdim::ggml {

#ifdef KEEPDIM_INT8_GEMM
namespace {

constexpr int64_t kGroups = kSuperBlock / 4;    // groups of four weights along k
constexpr int64_t kBlockGroups = kBlock32 / 4;  // the same per block of activations
constexpr int64_t kBlocks = kSuperBlock / kBlock32;
constexpr int64_t kRowElements = 512 * 1024;  // elements of the rows that fit in the L2 cache as int8

using Words = VectorOf<uint32_t>;  // four bytes of kVector columns
using Int32s = VectorOf<int32_t>;
using Words4 = uint32_t __attribute__((vector_size(16), aligned(1), may_alias));
using Words8 = uint32_t __attribute__((vector_size(32), aligned(4), may_alias));

// ---- dot products of weights with int8 activations

// Sums of products per column. With VNNI weights are unsigned. AVX2 and AVX-512 without VNNI sum pairs of products in int16;
// kMaxGroups groups of unsigned `bits`-bit weights do not overflow. 8-bit weights are signed there, at least -127, and a single
// pair fits: sums are int32.
template <int bits>
struct GroupDot {
#ifdef KEEPDIM_VNNI
  static constexpr int64_t kMaxGroups = kBlockGroups;
  using Sum = Int32s;
  static Sum add(Sum sum, Words w, Words x) {
    return reinterpret_cast<Sum>(
        _mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sum), reinterpret_cast<__m512i>(w), reinterpret_cast<__m512i>(x)));
  }
  static Int32s total(Sum sum) { return sum; }
#else
  static constexpr int64_t kFit = INT16_MAX / (2 * 127 * ((1 << bits) - 1)), kMaxGroups = kFit >= 8 ? 8 : kFit >= 4 ? 4 : 2;
  using Sum = VectorOf<int16_t>;
  static Sum add(Sum sum, Words w, Words x) {
#ifdef __AVX512BW__
    sum += reinterpret_cast<Sum>(_mm512_maddubs_epi16(reinterpret_cast<__m512i>(w), reinterpret_cast<__m512i>(x)));
#else
    sum += reinterpret_cast<Sum>(_mm256_maddubs_epi16(reinterpret_cast<__m256i>(w), reinterpret_cast<__m256i>(x)));
#endif
    asm("" : "+v"(sum));  // or gcc sums in another order, which takes more registers than there are
    return sum;
  }
  static Int32s total(Sum sum) {
#ifdef __AVX512BW__
    return reinterpret_cast<Int32s>(_mm512_madd_epi16(reinterpret_cast<__m512i>(sum), _mm512_set1_epi16(1)));
#else
    return reinterpret_cast<Int32s>(_mm256_madd_epi16(reinterpret_cast<__m256i>(sum), _mm256_set1_epi16(1)));
#endif
  }
#endif
};

#ifndef KEEPDIM_VNNI
template <>
struct GroupDot<8> {
  static constexpr int64_t kMaxGroups = kBlockGroups;
  using Sum = Int32s;
  static Sum add(Sum sum, Words w, Words x) {
#ifdef __AVX512BW__
    const auto signed_w = reinterpret_cast<__m512i>(w), bytes = reinterpret_cast<__m512i>(x);
    const __m512i signed_x = _mm512_mask_sub_epi8(bytes, _mm512_movepi8_mask(signed_w), _mm512_setzero_si512(), bytes);
    const __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(signed_w), signed_x);
    sum += reinterpret_cast<Sum>(_mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
#else
    const auto signed_w = reinterpret_cast<__m256i>(w), bytes = reinterpret_cast<__m256i>(x);
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(signed_w), _mm256_sign_epi8(bytes, signed_w));
    sum += reinterpret_cast<Sum>(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
    asm("" : "+v"(sum));
    return sum;
  }
  static Int32s total(Sum sum) { return sum; }
};
#endif

// Rows of the microkernel: the accumulators fill the registers.
#ifdef __AVX512F__
constexpr int kRows = 7;
#else
constexpr int kRows = 4;
#endif

// ---- activations

// A block of 32 elements of up to kRows rows, in the order that the microkernel reads them.
struct ActivationBlock {
  int8_t q[kBlockGroups][kRows][4];
  float scale[kRows], sum[kRows];  // sum: of the elements, scale * q
  int32_t start[2][kRows];         // -32 times the sum of q, for each half
  int32_t iq4_start[kRows];        // -kIq4Offset times the sum of q
};

// Tile i of the rows: as equal in height as possible, at most kRows.
int64_t tile_count(int64_t rows) { return (rows + kRows - 1) / kRows; }
Span tile_rows(int64_t rows, int64_t tile) {
  return split_range(rows, static_cast<int>(tile), static_cast<int>(tile_count(rows)));
}

// Quantises one block of 32 elements of row r of a tile.
void quantise_block(const float* x, int r, ActivationBlock& to) {
  alignas(32) int8_t q[kBlock32];
  int32_t sums[2];
  to.scale[r] = quantise_int8(x, q, sums);
  for (int64_t g = 0; g < kBlockGroups; ++g) std::memcpy(to.q[g][r], q + 4 * g, 4);
  to.sum[r] = to.scale[r] * static_cast<float>(sums[0] + sums[1]);
  for (int half = 0; half < 2; ++half) to.start[half][r] = -32 * sums[half];
  to.iq4_start[r] = -kIq4Offset * (sums[0] + sums[1]);
}

// Quantises blocks `blocks` of all rows of a tile.
void quantise_tile(const MatmulJob& job, const Rows& rows, int64_t tile, Span blocks, ActivationBlock* to) {
  const Span span = tile_rows(rows.count, tile);
  for (int64_t i = span.begin; i < span.end; ++i) {
    const float* x = static_cast<const float*>(job.data[1]) + rows[i] * job.k;
    for (int64_t b = blocks.begin; b < blocks.end; ++b) quantise_block(x + b * kBlock32, static_cast<int>(i - span.begin), to[b]);
  }
}

// ---- weights

// kNR columns of 256 weights: w = scale * q + min, or scale * (q - Format::kOffset).
template <class Format>
struct alignas(64) WeightPanel {
  uint32_t q[kGroups][kNR];
  float scale[kGroups / Format::kScaleGroups][kNR], min[Format::kHasMin ? kBlocks : 1][kNR];
};

using Columns = const uint8_t* const (&)[8];  // blocks of eight columns

// t[i] = word i of the 16 bytes at `offset` of each column.
inline void transpose_words(Columns column, int64_t offset, Words8* t) {
  Words8 a[4], b[4];
  const auto word4 = [&](int c) { return *reinterpret_cast<const Words4*>(column[c] + offset); };
  for (int c = 0; c < 4; ++c) a[c] = __builtin_shufflevector(word4(c), word4(c + 4), 0, 1, 2, 3, 4, 5, 6, 7);
  for (int i = 0; i < 4; i += 2) {
    b[i] = __builtin_shufflevector(a[i], a[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    b[i + 1] = __builtin_shufflevector(a[i], a[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
  for (int i = 0; i < 2; ++i) {
    t[2 * i] = __builtin_shufflevector(b[i], b[i + 2], 0, 1, 8, 9, 4, 5, 12, 13);
    t[2 * i + 1] = __builtin_shufflevector(b[i], b[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
  }
}

using Int8 = int32_t __attribute__((vector_size(32)));
inline Float8 to_float(Words8 x) { return __builtin_convertvector(reinterpret_cast<Int8>(x), Float8); }
inline Float8 half_to_float(Words8 x) {  // the lower 16 bits of each word
  using Halves = uint16_t __attribute__((vector_size(16)));
  return _mm256_cvtph_ps(reinterpret_cast<__m128i>(__builtin_convertvector(x & 0xffff, Halves)));
}
inline void store8(void* to, Words8 x) { *static_cast<Words8*>(to) = x; }
inline void store8(void* to, Float8 x) { *static_cast<Float8*>(to) = x; }

constexpr uint32_t kEachByte = 0x01010101;

// q4_k and q5_k: d and dmin as f16, 6-bit scales and minima of 8 blocks of 32 in 12 bytes, [fifth bits], nibbles.
template <bool fifth_bits>
struct FormatQ45k {
  static constexpr int kBits = fifth_bits ? 5 : 4;
  static constexpr int64_t kBytes = fifth_bits ? 176 : 144, kScaleGroups = kBlockGroups;
  static constexpr int kOffset = 0;
  static constexpr bool kHasMin = true;

  static void unpack(WeightPanel<FormatQ45k>& to, Columns column, int64_t first, int64_t) {
    Words8 head[4], high[8];
    transpose_words(column, 0, head);
    const Float8 d = half_to_float(head[0]), min = -half_to_float(head[0] >> 16);
    constexpr uint32_t upper = 0x30 * kEachByte, lower = 0xf * kEachByte;  // bits of the last four scales
    const Words8 scales[2] = {head[1] & 0x3f * kEachByte, (head[3] & lower) | (head[1] >> 2 & upper)};
    const Words8 mins[2] = {head[2] & 0x3f * kEachByte, (head[3] >> 4 & lower) | (head[2] >> 2 & upper)};
    for (int64_t b = 0; b < kBlocks; ++b) {
      const int shift = static_cast<int>(b % 4 * 8);
      store8(to.scale[b] + first, d * to_float(scales[b / 4] >> shift & 0xff));
      store8(to.min[b] + first, min * to_float(mins[b / 4] >> shift & 0xff));
    }
    if constexpr (fifth_bits)
      for (int i = 0; i < 2; ++i) transpose_words(column, 16 + 16 * i, high + 4 * i);
    for (int64_t i = 0; i < kBlocks / 2; ++i)  // low nibbles: block 2 i, high nibbles: the next one
      for (int64_t part = 0; part < 2; ++part) {
        Words8 q[4];
        transpose_words(column, kBytes - 128 + 32 * i + 16 * part, q);
        for (int64_t g = 0; g < 4; ++g)
          for (int64_t half = 0; half < 2; ++half) {
            Words8 bits = q[g] >> static_cast<int>(4 * half) & lower;
            if constexpr (fifth_bits) bits |= (high[4 * part + g] >> static_cast<int>(2 * i + half) & kEachByte) << 4;
            store8(to.q[(2 * i + half) * kBlockGroups + 4 * part + g] + first, bits);
          }
      }
  }
};

// q6_k: see BlockQ6k.
struct FormatQ6k {
  static constexpr int kBits = 6;
  static constexpr int64_t kBytes = sizeof(BlockQ6k), kScaleGroups = 4;
  static constexpr int kOffset = 32;
  static constexpr bool kHasMin = false;

  static void unpack(WeightPanel<FormatQ6k>& to, Columns column, int64_t first, int64_t) {
    Words8 d, scales[4];
    for (int c = 0; c < 8; ++c) d[c] = reinterpret_cast<const BlockQ6k*>(column[c])->d;
    const Float8 factor = half_to_float(d);
    transpose_words(column, offsetof(BlockQ6k, scales), scales);
    for (int64_t i = 0; i < 16; ++i) {
      const Int8 scale = reinterpret_cast<Int8>(scales[i / 4] << static_cast<int>(24 - i % 4 * 8)) >> 24;
      store8(to.scale[i] + first, factor * __builtin_convertvector(scale, Float8));
    }
    for (int64_t half = 0; half < 2; ++half)  // 128 weights: four blocks
      for (int64_t part = 0; part < 2; ++part) {
        Words8 low[8], high[4];
        for (int64_t i = 0; i < 2; ++i) transpose_words(column, 64 * half + 32 * i + 16 * part, low + 4 * i);
        transpose_words(column, offsetof(BlockQ6k, high) + 32 * half + 16 * part, high);
        for (int64_t b = 0; b < 4; ++b)
          for (int64_t g = 0; g < 4; ++g) {
            const Words8 low4 = low[b % 2 * 4 + g] >> static_cast<int>(b / 2 * 4) & 0xf * kEachByte;
            const Words8 high2 = high[g] >> static_cast<int>(2 * b) & 3 * kEachByte;
            store8(to.q[(4 * half + b) * kBlockGroups + 4 * part + g] + first, low4 | high2 << 4);
          }
      }
  }
};

// iq4_nl: eight blocks at a time, fewer at the end of a row. iq4_xs: see BlockIq4xs.
template <class Block>
struct FormatIq4 {
  static constexpr bool kSuper = std::is_same_v<Block, BlockIq4xs>;
  static constexpr int kBits = 8, kOffset = kIq4Offset;
  static constexpr int64_t kBytes = kSuper ? sizeof(Block) : kBlocks * sizeof(Block), kScaleGroups = kBlockGroups;
  static constexpr bool kHasMin = false;

  static void unpack(WeightPanel<FormatIq4>& to, Columns column, int64_t first, int64_t blocks) {
    if constexpr (kSuper) {
      Words8 head[4];
      transpose_words(column, 0, head);
      const Float8 d = half_to_float(head[0]);
      for (int b = 0; b < kBlocks; ++b) {
        const Words8 scale = (head[1] >> (4 * b) & 0xf) | (head[0] >> (16 + 2 * b) & 3) << 4;
        store8(to.scale[b] + first, d * to_float(scale - 32));
      }
    }
    for (int64_t b = 0; b < blocks; ++b) {
      if constexpr (!kSuper) {
        Words8 d;
        for (int c = 0; c < 8; ++c) d[c] = reinterpret_cast<const Block*>(column[c])[b].d;
        store8(to.scale[b] + first, half_to_float(d));
      }
      Words8 q[4];
      transpose_words(column, kSuper ? offsetof(Block, q) + 16 * b : b * sizeof(Block) + offsetof(Block, q), q);
      for (int64_t g = 0; g < 4; ++g)
        for (int64_t half = 0; half < 2; ++half) {
          const Words8 indices = q[g] >> static_cast<int>(4 * half) & 0xf * kEachByte;
          const __m256i weights = iq4_weights(reinterpret_cast<__m256i>(indices));
          store8(to.q[b * kBlockGroups + 4 * half + g] + first, reinterpret_cast<Words8>(weights));
        }
    }
  }
};

// Unpacks `blocks` blocks of 32 of up to kNR columns at `w`; the last column is repeated. Prefetches the panel at `next` bytes
// further.
template <class Format>
void unpack_panel(WeightPanel<Format>& to, const char* w, int64_t pitch, int64_t columns, int64_t blocks, int64_t next) {
  for (int64_t first = 0; first < kNR; first += 8) {
    const uint8_t* column[8];
    for (int64_t c = 0; c < 8; ++c) {
      const char* from = w + std::min(first + c, columns - 1) * pitch;
      column[c] = reinterpret_cast<const uint8_t*>(from);
      for (int64_t line = 0; line < Format::kBytes; line += 64) _mm_prefetch(from + next + line, _MM_HINT_T0);
    }
    Format::unpack(to, column, first, blocks);
  }
}

// ---- microkernel

template <class Format>
struct Int8Microkernel {
  float* y;  // [height, kNR]
  const ActivationBlock* x;
  const WeightPanel<Format>* w;
  int64_t groups;    // of the panel
  bool add;          // to y
  const char* next;  // weights of the next panel: a part of them is prefetched in memory order
  int64_t lines;     // cache lines to prefetch per scale
};

template <class Format, int height>
void int8_microkernel(const Int8Microkernel<Format>& t) {
  using Dot = GroupDot<Format::kBits>;
  constexpr int64_t scale_groups = Format::kScaleGroups, run = std::min(Dot::kMaxGroups, scale_groups);
  constexpr bool start_in_sum = std::is_same_v<typename Dot::Sum, Int32s>;
  Vector sum[height][2] = {};
  if (t.add)
    for (int r = 0; r < height; ++r)
      for (int v = 0; v < 2; ++v) sum[r][v] = load(t.y + r * kNR + v * kVector);
  const char* next = t.next;
  for (int64_t group = 0; group < t.groups; group += scale_groups) {
    for (int64_t i = 0; i < t.lines; ++i, next += 64) _mm_prefetch(next, _MM_HINT_T1);
    const ActivationBlock& x = t.x[group / kBlockGroups];
    const int64_t part = group % kBlockGroups;
    const int32_t* start = scale_groups == kBlockGroups ? x.iq4_start : x.start[part / 4];
    Int32s total[height][2];
#pragma GCC unroll 4
    for (int64_t begin = 0; begin < scale_groups; begin += run) {
      typename Dot::Sum dots[height][2] = {};
      if constexpr (start_in_sum && Format::kOffset)
        for (int r = 0; r < height; ++r) dots[r][0] = dots[r][1] = Int32s{} + start[r];
#pragma GCC unroll 8
      for (int64_t g = begin; g < begin + run; ++g) {
        const uint32_t* from = t.w->q[group + g];
        const Words w[2] = {*reinterpret_cast<const Words*>(from), *reinterpret_cast<const Words*>(from + kVector)};
#pragma GCC unroll 8
        for (int r = 0; r < height; ++r) {
          uint32_t four;
          std::memcpy(&four, x.q[part + g][r], sizeof(four));
          const Words bytes = Words{} + four;
          for (int v = 0; v < 2; ++v) dots[r][v] = Dot::add(dots[r][v], w[v], bytes);
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < height; ++r)
        for (int v = 0; v < 2; ++v) total[r][v] = begin ? total[r][v] + Dot::total(dots[r][v]) : Dot::total(dots[r][v]);
    }
    const float* scales = t.w->scale[group / scale_groups];
    const Vector scale[2] = {load(scales), load(scales + kVector)};
#pragma GCC unroll 8
    for (int r = 0; r < height; ++r)
      for (int v = 0; v < 2; ++v) {
        if constexpr (!start_in_sum && Format::kOffset) total[r][v] += start[r];
        sum[r][v] += __builtin_convertvector(total[r][v], Vector) * (scale[v] * x.scale[r]);
      }
    if constexpr (Format::kHasMin) {
      const float* mins = t.w->min[group / scale_groups];
#pragma GCC unroll 8
      for (int r = 0; r < height; ++r)
        for (int v = 0; v < 2; ++v) sum[r][v] += load(mins + v * kVector) * x.sum[r];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < height; ++r)
    for (int v = 0; v < 2; ++v) store(t.y + r * kNR + v * kVector, sum[r][v]);
}

template <class Format, int... height>
void run_int8_microkernel(const Int8Microkernel<Format>& args, int64_t rows, std::integer_sequence<int, height...>) {
  static constexpr void (*kernels[])(const Int8Microkernel<Format>&) = {int8_microkernel<Format, height + 1>...};
  kernels[rows - 1](args);
}

// ---- jobs

int64_t tile_bytes(int64_t k) { return k / kBlock32 * static_cast<int64_t>(sizeof(ActivationBlock)); }

// Quantises the rows into the workspace of the product; the result is the workspace.
void quantise_rows(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const MatmulJob*>(userdata);
  const Rows rows = parse_row_list(job, job.data[4], job.m);
  const int64_t blocks = job.k / kBlock32, parts = (blocks + kBlocks - 1) / kBlocks;
  Loop loop;
  loop.push(tile_count(rows.count), tile_bytes(job.k));
  loop.push(parts, 0);
  for_each_row(loop, kRows * kSuperBlock, ith, nth, [&](int64_t position, const int64_t* offset) {
    const int64_t part = position % parts;
    quantise_tile(job, rows, position / parts, {part * kBlocks, std::min((part + 1) * kBlocks, blocks)},
                  at<ActivationBlock>(job.data[0], offset[0]));
  });
}

template <class Format>
void gemm_int8(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& job = *static_cast<const MatmulJob*>(userdata);
  const Rows rows = parse_row_list(job, job.data[4], job.m);
  auto* result = static_cast<float*>(job.data[0]);
  for_each_unlisted(rows, split_range(job.m, ith, nth), [&](int64_t r) { std::fill_n(result + r * job.n, job.n, 0.0f); });
  if (rows.count == 0) return;
  const int64_t tiles = tile_count(rows.count), panels = (job.k + kSuperBlock - 1) / kSuperBlock;  // the last may be shorter
  const int64_t row_floats = job.data[5] ? 0 : tiles * tile_bytes(job.k) / static_cast<int64_t>(sizeof(float));
  float* const workspace = scratch(row_floats + rows.count * kNR + 16);
  if (!workspace) return job.fail(0, "out of memory for its rows. Free memory, or call with smaller sizes.");
  float* const y = workspace;  // [rows, kNR]
  auto* x = static_cast<char*>(job.data[5]);
  if (!x) {
    x = reinterpret_cast<char*>(y + rows.count * kNR);
    for (int64_t t = 0; t < tiles; ++t)
      quantise_tile(job, rows, t, {0, job.k / kBlock32}, at<ActivationBlock>(x, t * tile_bytes(job.k)));
  }
  for_each_panel(job, tiles, kRowElements / kRows, 1, ith, nth, [&](const PanelSpan& p, const int64_t* offset) {
    WeightPanel<Format> panel;
    const char* const w = at<char>(job.data[2], offset[2]);
    const bool last_panel = p.first + kNR >= job.n;
    constexpr int64_t scales = kGroups / Format::kScaleGroups;
    const int64_t calls = panels * (p.rows.end - p.rows.begin), lines = last_panel ? 0 : kNR * job.b_column / 64 + 1;
    Int8Microkernel<Format> args{
        y, nullptr, &panel, kGroups, false, w + kNR * job.b_column, (lines + calls * scales - 1) / (calls * scales)};
    const char* const end_of_next = args.next + lines * 64;
    for (int64_t b = 0; b < panels; ++b) {
      const bool last = b + 1 == panels;
      const int64_t blocks = std::min(kBlocks, job.k / kBlock32 - b * kBlocks);
      const int64_t next = !last ? Format::kBytes : last_panel ? 0 : kNR * job.b_column - b * Format::kBytes;
      unpack_panel(panel, w + b * Format::kBytes, job.b_column, p.columns, blocks, next);
      args.groups = blocks * kBlockGroups;
      args.y = y;
      args.add = b > 0;
      for (int64_t t = p.rows.begin; t < p.rows.end; ++t) {
        const Span span = tile_rows(rows.count, t);
        args.x = at<ActivationBlock>(x, t * tile_bytes(job.k)) + b * kBlocks;
        run_int8_microkernel(args, span.end - span.begin, std::make_integer_sequence<int, kRows>());
        args.y += (span.end - span.begin) * kNR;
        args.next += args.lines * scales * 64;
        if (args.next >= end_of_next) args.lines = 0;
      }
    }
    const int64_t begin = tile_rows(rows.count, p.rows.begin).begin, end = tile_rows(rows.count, p.rows.end - 1).end;
    if (job.data[3]) {
      float bias[kNR] = {};
      std::memcpy(bias, static_cast<const float*>(job.data[3]) + p.first, p.columns * sizeof(float));
      for (int64_t r = 0; r < end - begin; ++r)
        for (int v = 0; v < kNR; v += kVector) store(y + r * kNR + v, load(y + r * kNR + v) + load(bias + v));
    }
    activate(job, y, kNR, end - begin, kNR);
    for (int64_t r = begin; r < end; ++r)
      std::memcpy(result + rows[r] * job.n + p.first, y + (r - begin) * kNR, p.columns * sizeof(float));
  });
}

}  // namespace

Kernel gemm_int8_kernel(DType dtype) {
  switch (dtype) {
    case DType::q4_k: return gemm_int8<FormatQ45k<false>>;
    case DType::q5_k: return gemm_int8<FormatQ45k<true>>;
    case DType::q6_k: return gemm_int8<FormatQ6k>;
    case DType::iq4_nl: return gemm_int8<FormatIq4<BlockIq4nl>>;
    case DType::iq4_xs: return gemm_int8<FormatIq4<BlockIq4xs>>;
    default: return nullptr;
  }
}

Kernel quantise_rows_kernel() { return quantise_rows; }
int64_t quantised_rows_bytes(int64_t m, int64_t k) { return tile_count(m) * tile_bytes(k); }

#else
Kernel gemm_int8_kernel(DType) { return nullptr; }
Kernel quantise_rows_kernel() { return nullptr; }
int64_t quantised_rows_bytes(int64_t, int64_t) { return 0; }
#endif

}  // namespace keepdim::ggml
