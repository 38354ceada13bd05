// The loop over the steps of a plan, and the barrier between its threads. Consecutive steps run as one node of ggml's graph,
// after which ggml synchronises its threads; inside a sequence they wait only where a step may read what another thread wrote.
// Steps too small to share are computed by one thread, one after another without waiting.
#pragma once
#include <atomic>
#include <cstddef>

#include "core/engine.h"
#include "ggml/job.h"

namespace keepdim::ggml {

// A thread waits until all have arrived. It spins at first, then gives way to other processes: the thread that it waits for may
// need its CPU.
class Barrier {
 public:
  void wait(int threads);

 private:
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<unsigned> passed_{0};
};

// Records the time of each node. Steps of one node form one event.
struct NodeTimer {
  Trace& trace;
  int64_t last = trace.now();

  void tick(const Node* node);
};

struct Step {
  Kernel kernel = nullptr;  // nullptr: a product by ggml, which is a node of the graph of its own
  Job* job = nullptr;
  const Node* node = nullptr;  // nullptr: a copy to an output
  bool shared = false;         // worth computing by several threads
};

struct StepSequence {
  const Step* steps;
  size_t count;
  Barrier* barrier;
  NodeTimer* const* timer;
};

// The function of a custom node of ggml whose userdata is a StepSequence.
void run_sequence(ggml_tensor*, int ith, int nth, void* userdata);

}  // namespace keepdim::ggml
