#include "splits.h"

#include <atomic>
#include <utility>

#include "quant.h"

namespace keepdim::ggml {
namespace {

constexpr size_t kTypes = static_cast<size_t>(DType::q6_k) + 1;

struct All {
  std::atomic<int64_t> few_rows[kTypes], ggml_rows[2], work_per_thread{150'000};
  std::map<std::string, std::atomic<int64_t>*> names;

  All() {
    ggml_rows[0] = 10, ggml_rows[1] = 48;
    names = {{"ggml_rows.rest", &ggml_rows[0]}, {"ggml_rows.whole", &ggml_rows[1]}, {"work_per_thread", &work_per_thread}};
    constexpr std::pair<DType, int64_t> rows[] = {
        {DType::f16, 9},
        {DType::bf16, 6},
        {DType::q8_0, kWords ? 5 : 16},
        {DType::q4_0, kWords ? 14 : 24},
        {DType::q4_1, kWords ? 9 : 20},
        {DType::q5_0, kWords ? 1 : 4},
        {DType::q5_1, kWords ? 1 : 4},
        {DType::q4_k, 11},
        {DType::q5_k, 8},
        {DType::q6_k, 9}};
    for (const auto& [type, most] : rows) {
      few_rows[static_cast<size_t>(type)] = most;
      names[std::string("few_rows.") + dtype_name(type)] = &few_rows[static_cast<size_t>(type)];
    }
  }
};

All& all() {
  static All* const a = new All;  // never destroyed: a plan may be built late
  return *a;
}

}  // namespace

int64_t few_rows(DType weight) { return all().few_rows[static_cast<size_t>(weight)]; }
int64_t ggml_rows(bool whole) { return all().ggml_rows[whole ? 1 : 0]; }
int64_t work_per_thread() { return all().work_per_thread; }

std::map<std::string, int64_t> splits() {
  std::map<std::string, int64_t> out;
  for (const auto& [name, value] : all().names) out[name] = *value;
  return out;
}

void set_splits(const std::map<std::string, int64_t>& changed) {
  const auto& names = all().names;
  for (const auto& [name, value] : changed) {
    if (!names.count(name)) fail(Code::invalid_argument, "[options] split '" + name + "': ggml has none of that name.");
    if (value < 0) fail(Code::invalid_argument, "[options] split '" + name + "': " + std::to_string(value) + " is negative.");
  }
  for (const auto& [name, value] : changed) *names.at(name) = value;
}

}  // namespace keepdim::ggml
