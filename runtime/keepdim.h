// keepdim for C++ programs: a .pte that is checked before it is used, and called under its whole contract.
//
//   #include <keepdim/keepdim.h>
//   auto model = keepdim::load("model.pte");
//   if (!model.ok()) { puts(keepdim::last_error().c_str()); return 1; }
//   auto results = (*model)->forward({input});
//
// Nothing here throws. A refusal is one of ExecuTorch's errors, with a sentence in its log and in `last_error`.
#pragma once
#include <executorch/runtime/core/evalue.h>
#include <executorch/runtime/core/result.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#ifndef KEEPDIM_API
#define KEEPDIM_API __attribute__((visibility("default")))
#endif

namespace keepdim {

// Whether the file is what was saved and is safe to load: its checksum, then every index, size and type in it. The weights
// are not read, unless `weights` asks for their checksums too.
KEEPDIM_API executorch::runtime::Error check_file(const std::string& path, bool weights = false) noexcept;

struct LoadOptions {
  bool verify_weights = false;  // their checksums too: reads all of them
  std::string weights;          // the file that holds the weights, where it is not next to the .pte (weights mapped from a GGUF)
};

// What a call gave: tensors, integers, floats, bools and none. Owns the memory of its tensors.
class Results {
 public:
  Results(std::vector<executorch::runtime::EValue> values, std::shared_ptr<const void> memory)
      : values_(std::move(values)), memory_(std::move(memory)) {}
  size_t size() const { return values_.size(); }
  const executorch::runtime::EValue& operator[](size_t i) const { return values_[i]; }
  auto begin() const { return values_.begin(); }
  auto end() const { return values_.end(); }

 private:
  std::vector<executorch::runtime::EValue> values_;
  std::shared_ptr<const void> memory_;
};

// A loaded method. Any number of threads may call it; they wait for each other.
class KEEPDIM_API Module {
 public:
  ~Module();
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;

  // One call. Inputs are in the order of the contract, tensors on the CPU; an integer that the contract names is an integer,
  // a constant of the contract is that constant, or none.
  executorch::runtime::Result<Results> forward(const std::vector<executorch::runtime::EValue>& inputs) noexcept;

  const std::vector<std::string>& inputs() const;  // their names, in order
  const std::string& contract() const;             // as JSON, the result of the file's method `keepdim_contract`

 private:
  struct Loaded;
  friend executorch::runtime::Result<std::unique_ptr<Module>> load(const std::string&, const LoadOptions&) noexcept;
  explicit Module(std::unique_ptr<Loaded> loaded);
  std::unique_ptr<Loaded> loaded_;
};

// Checks the file as `check_file` does, then loads it.
KEEPDIM_API executorch::runtime::Result<std::unique_ptr<Module>> load(const std::string& path, const LoadOptions& options = {}) noexcept;

// The sentence of this thread's last refusal.
KEEPDIM_API const std::string& last_error() noexcept;

}  // namespace keepdim
