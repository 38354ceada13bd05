// Verification of .pte files: the trailer with checksums, and the structure of the ExecuTorch program. Everything that ExecuTorch
// uses unchecked is checked here first. Does not need ExecuTorch's headers.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"

namespace keepdim {

// Location of a weight in the file.
struct WeightSpan {
  std::string key;
  uint64_t offset, size;
  std::string sha256;
};

// Facts about a method that are needed to run it.
struct MethodFacts {
  // Inputs that the method writes, with their maximum size in bytes: a kernel resizes such an input to what it writes, so its
  // memory must fit the upper bound.
  std::map<size_t, uint64_t> written;
  std::vector<std::vector<std::string>> kernels;  // by chain and instruction; empty if not a kernel call
};

// An open, verified file (trailer, checksum, structure). Refers to the same file even if its path is replaced.
class KEEPDIM_API PteFile {
 public:
  // `weights`: also verify the checksums of weights. Throws on the first error.
  explicit PteFile(const std::string& path, bool weights = false);
  ~PteFile();
  PteFile(const PteFile&) = delete;
  PteFile& operator=(const PteFile&) = delete;

  const std::string& path() const { return path_; }
  int descriptor() const { return file_; }
  std::string open_path() const;                         // a path to the open file, even if `path` has been replaced
  const std::string& sha256() const { return sha256_; }  // of everything except the weights
  const std::vector<WeightSpan>& weights() const { return weights_; }
  uint64_t program_bytes() const { return size_; }  // size of the .pte without the trailer
  const std::map<size_t, uint64_t>& written_inputs(const std::string& method) const;
  std::string kernel(const std::string& method, int64_t chain,
                     int64_t instruction) const;  // "aten::add.out"; empty if not a kernel call

 private:
  void read_trailer();
  std::string read(uint64_t offset, uint64_t size) const;
  std::string hash(const std::vector<std::pair<uint64_t, uint64_t>>& spans) const;
  [[noreturn]] void refuse(const std::string& fact) const;

  const std::string path_;
  int file_ = -1;
  uint64_t bytes_ = 0, size_ = 0;
  std::string sha256_;
  std::vector<WeightSpan> weights_;
  std::map<std::string, MethodFacts> methods_;
};

// Size limits of a program.
struct ProgramLimits {
  uint64_t file_bytes;     // program and segments
  uint64_t planned_bytes;  // planned memory per method
};

// Reads bytes of the file.
using ReadFile = std::string (*)(const void* file, uint64_t offset, uint64_t size);

// Verifies an ExecuTorch program: every index, size, type and reference. Returns the facts of each method. Throws an Error
// whose message is the bare fact, without stage and subject.
KEEPDIM_API std::map<std::string, MethodFacts> verify_program(const ProgramLimits& limits, const void* file, ReadFile read);

}  // namespace keepdim
