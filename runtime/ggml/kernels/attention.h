// Jobs of the attention kernels and of the KV cache store.
#pragma once
#include "ggml/kernels/gemm.h"

namespace keepdim::ggml {

// Scaled dot-product attention with grouped query heads. `loop` runs over batch and KV heads. `position` (i64 scalar) is the
// number of keys before the first query; attention is then causal. `cos` and `sin` apply RoPE to the queries, `scratch`
// holds partial results (decode), and `rows` lists the queries whose results are used, as in MatmulJob.
struct AttentionJob : Job {
  enum Operand { out, q, k, v, mask, position, cos, sin, scratch, rows };  // index into `data`
  int64_t group = 1;                                                       // query heads per KV head
  int64_t queries = 0, keys = 0, width = 0, value_width = 0;
  int64_t window = 0;                         // sliding window: keys that a query attends to, up to its position; 0: all
  int64_t q_head = 0, q_row = 0, q_step = 0;  // strides in bytes
  int64_t k_row = 0, k_step = 0, v_row = 0, v_step = 0, y_head = 0, y_row = 0;
  int64_t mask_batch[kMaxRank] = {}, mask_head = 0, mask_row = 0, mask_step = 0;
  const WeightFormat* format = nullptr;  // of keys and values if they are not f32
  int64_t rope_pitch = 0;                // row stride of cos and sin in bytes
  float scale = 1;
  bool causal = false, bool_mask = false;
  bool safe = true;  // a fully masked row gives 0, as torch's sdpa; false: NaN, as a plain softmax
};

// Appends new keys and values to their caches. `position` (i64 scalar) is the number of filled rows; `cos` and `sin` apply
// RoPE to the keys. Operands of `loop`: key cache, keys, values, value cache. Arrays of two: keys, values.
struct CacheStoreJob : Job {
  enum Operand { key_cache, keys, position, values, value_cache, cos, sin };  // index into `data`
  int64_t rows = 0, limit = 0;                                                // new rows; capacity of the caches
  int64_t size[2] = {};                                                       // elements per row
  int64_t row[2] = {}, x_row[2] = {}, x_step[2] = {};  // byte strides: cache rows; rows and elements of the new values
  const WeightFormat* format = nullptr;                // of the caches if they are not f32
  int64_t rope_pitch = 0;                              // row stride of cos and sin in bytes
};

Kernel attention_kernel();                           // AttentionJob, f32
int64_t attention_scratch(const AttentionJob& job);  // size of the scratch operand in floats
Kernel cache_store_kernel();                         // CacheStoreJob

}  // namespace keepdim::ggml
