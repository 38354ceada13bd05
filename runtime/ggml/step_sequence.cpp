// The barrier of a plan's threads, and the loop that runs its steps.
#include "ggml/step_sequence.h"

#include <chrono>
#include <thread>

namespace keepdim::ggml {
namespace {

// A wait is normally below a microsecond. Longer ones mean that the other thread is not running, or that its work is long.
constexpr int kSpins = 2'000, kYields = 10'000;
constexpr auto kSleep = std::chrono::microseconds(50);

void relax_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

}  // namespace

void Barrier::wait(int threads) {
  const unsigned before = passed_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
    arrived_.store(0, std::memory_order_relaxed);
    passed_.store(before + 1, std::memory_order_release);
    return;
  }
  for (int tries = 0; passed_.load(std::memory_order_acquire) == before; ++tries) {
    if (tries < kSpins)
      relax_cpu();
    else if (tries < kSpins + kYields)
      std::this_thread::yield();
    else
      std::this_thread::sleep_for(kSleep);
  }
}

void NodeTimer::tick(const Node* node) {
  const int64_t now = trace.now();
  if (trace.nodes.empty() || trace.nodes.back().node != node) trace.nodes.push_back({node, last, now});
  trace.nodes.back().end = last = now;
}

void run_sequence(ggml_tensor*, int ith, int nth, void* userdata) {
  const auto& sequence = *static_cast<const StepSequence*>(userdata);
  NodeTimer* const timer = ith == 0 ? *sequence.timer : nullptr;
  for (size_t i = 0; i < sequence.count; ++i) {
    const Step& step = sequence.steps[i];
    if (nth > 1 && i > 0 && (step.shared || sequence.steps[i - 1].shared)) sequence.barrier->wait(nth);
    if (step.shared)
      step.kernel(nullptr, ith, nth, step.job);
    else if (ith == 0)
      step.kernel(nullptr, 0, 1, step.job);
    if (timer) timer->tick(step.node);
  }
}

}  // namespace keepdim::ggml
