// Programs for the tests, and running arbitrary programs with random weights and inputs.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/delegate.h"
#include "core/registry.h"

// linear(x) with every feature of the format: two symbols, an integer input, a derived size and a constraint.
nlohmann::json good_program();

class HeapOutputs final : public keepdim::Outputs {
 public:
  explicit HeapOutputs(const keepdim::Contract& contract) : contract_(contract) {}
  void* resize(size_t output, const int64_t* sizes, size_t rank) override;
  void set_integer(size_t output, int64_t value) override {
    integers.resize(output + 1);
    integers[output] = value;
  }

  std::vector<std::vector<char>> data;
  std::vector<int64_t> integers;

 private:
  const keepdim::Contract& contract_;
};

int run_folder(const std::string& folder);  // both return the exit code of the process
int run_mutated(int count);
