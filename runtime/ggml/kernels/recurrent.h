// Job of the recurrent kernels.
#pragma once
#include "ggml/job.h"

namespace keepdim::ggml {

enum class Cell : uint8_t { lstm, gru, rnn_tanh, rnn_relu };

// Operands: input gates [steps, batch, gates * size], weight [gates * size, size], bias [gates * size], initial state and
// cell [batch, size].
struct RecurrentJob : Job {
  int64_t steps = 0, batch = 0, size = 0;
  const float* packed = nullptr;  // packed weight; nullptr: operand 2 is packed
  bool reverse = false;
};

Kernel recurrent_kernel(Cell cell);  // RecurrentJob, f32
Kernel pack_weight_kernel();         // RecurrentJob: packs a weight [batch, size] into panels

}  // namespace keepdim::ggml
