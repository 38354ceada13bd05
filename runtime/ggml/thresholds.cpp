#include "ggml/thresholds.h"

#include <atomic>
#include <utility>

#include "ggml/simd/quant_blocks.h"

namespace keepdim::ggml {
namespace {

struct Thresholds {
  std::atomic<int64_t> few_rows[kDTypeCount], ggml_rows[2], work_per_thread{150'000};
  std::map<std::string, std::atomic<int64_t>*> names;

  Thresholds() {
    ggml_rows[0] = 10, ggml_rows[1] = 48;
    names = {{"ggml_rows.rest", &ggml_rows[0]}, {"ggml_rows.whole", &ggml_rows[1]}, {"work_per_thread", &work_per_thread}};
    constexpr std::pair<DType, int64_t> rows[] = {{DType::f16, 9},
                                                  {DType::bf16, 6},
                                                  {DType::q8_0, kInt16Gemm ? 5 : 16},
                                                  {DType::q4_0, kInt16Gemm ? 14 : 24},
                                                  {DType::q4_1, kInt16Gemm ? 9 : 20},
                                                  {DType::q5_0, kInt16Gemm ? 1 : 4},
                                                  {DType::q5_1, kInt16Gemm ? 1 : 4},
                                                  {DType::q4_k, kInt8Gemm ? 1 : 11},
                                                  {DType::q5_k, kInt8Gemm ? 1 : 8},
                                                  {DType::q6_k, kInt8Gemm ? 1 : 9},
                                                  {DType::iq4_nl, kInt16Gemm ? 2 : 1},
                                                  {DType::iq4_xs, kInt8Gemm ? 1 : 9}};
    for (const auto& [type, max_rows] : rows) {
      few_rows[static_cast<size_t>(type)] = max_rows;
      names[std::string("few_rows.") + dtype_name(type)] = &few_rows[static_cast<size_t>(type)];
    }
  }
};

Thresholds& current() {
  static Thresholds* const t = new Thresholds;  // never destroyed: a plan may be built during static destruction
  return *t;
}

}  // namespace

int64_t few_rows(DType weight) { return current().few_rows[static_cast<size_t>(weight)]; }
int64_t ggml_rows(bool aligned) { return current().ggml_rows[aligned ? 1 : 0]; }
int64_t work_per_thread() { return current().work_per_thread; }

std::map<std::string, int64_t> thresholds() {
  std::map<std::string, int64_t> out;
  for (const auto& [name, value] : current().names) out[name] = *value;
  return out;
}

void set_thresholds(const std::map<std::string, int64_t>& changed) {
  const auto& names = current().names;
  for (const auto& [name, value] : changed) {
    if (!names.count(name)) {
      std::string known;
      for (const auto& entry : names) known += (known.empty() ? "" : ", ") + entry.first;
      fail(Code::invalid_argument, "[options] threshold '" + name + "': unknown on ggml (known: " + known + ").");
    }
    if (value < 0)
      fail(Code::invalid_argument,
           "[options] threshold '" + name + "': " + std::to_string(value) + " is negative. Give a count of 0 or more.");
  }
  for (const auto& [name, value] : changed) *names.at(name) = value;
}

}  // namespace keepdim::ggml
