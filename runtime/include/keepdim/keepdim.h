// keepdim for C++ programs: loads a .pte after verifying it, and checks every call against its contract.
//
//   #include <keepdim/keepdim.h>
//   auto model = keepdim::load("model.pte");
//   if (!model.ok()) { puts(keepdim::last_error().c_str()); return 1; }
//   auto results = (*model)->forward({input});
//
// Nothing here throws. Failures return an ExecuTorch error; the message is in ExecuTorch's log and in `last_error`.
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

// Verifies that the file is unchanged and safe to load: its checksum, then every index, size and type in it. Weights are read
// only if `weights` is set, to verify their checksums as well.
KEEPDIM_API executorch::runtime::Error check_file(const std::string& path, bool weights = false) noexcept;

struct LoadOptions {
  bool verify_weights = false;  // also verify the checksums of the weights (reads all of them)
  std::string weights;          // path of the external weight file (mapped GGUF), if it is not next to the .pte
};

// Results of a call: tensors, integers, floats, bools and none. Owns the memory of its tensors.
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

// A loaded method. Thread-safe; concurrent calls are serialised.
class KEEPDIM_API Module {
 public:
  ~Module();
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;

  // Runs the method. Inputs are in the order of the contract: CPU tensors, integers for integer inputs, and for constants of the
  // contract that constant or none.
  executorch::runtime::Result<Results> forward(const std::vector<executorch::runtime::EValue>& inputs) noexcept;

  const std::vector<std::string>& inputs() const;  // names, in order
  const std::string& contract() const;             // JSON, as returned by the file's method `keepdim_contract`

 private:
  struct Loaded;
  friend executorch::runtime::Result<std::unique_ptr<Module>> load(const std::string&, const LoadOptions&) noexcept;
  explicit Module(std::unique_ptr<Loaded> loaded);
  std::unique_ptr<Loaded> loaded_;
};

// Verifies the file as `check_file` does, then loads it.
KEEPDIM_API executorch::runtime::Result<std::unique_ptr<Module>> load(const std::string& path,
                                                                      const LoadOptions& options = {}) noexcept;

// Message of the last failure on this thread.
KEEPDIM_API const std::string& last_error() noexcept;

}  // namespace keepdim
