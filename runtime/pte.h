// A .pte as bytes: its trailer with the checksums, and the structure of ExecuTorch's program. Everything that ExecuTorch
// would use without a check of its own is checked here, before it sees the file. Needs none of ExecuTorch's headers.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "error.h"

namespace keepdim {

// One weight's bytes in the file.
struct WeightSpan {
  std::string key;
  uint64_t offset, size;
  std::string sha256;
};

// A file that is open and was checked: its trailer, its checksum and its structure. It stays the same file whatever
// happens to its path.
class KEEPDIM_API PteFile {
 public:
  // `weights`: their checksums too. Throws the first thing that is wrong.
  explicit PteFile(const std::string& path, bool weights = false);
  ~PteFile();
  PteFile(const PteFile&) = delete;
  PteFile& operator=(const PteFile&) = delete;

  const std::string& path() const { return path_; }
  int descriptor() const { return file_; }
  std::string open_path() const;  // a path to this very file, also when `path` names another one by now
  const std::string& sha256() const { return sha256_; }  // of everything but the weights
  const std::vector<WeightSpan>& weights() const { return weights_; }
  uint64_t program_bytes() const { return size_; }  // of the .pte before the trailer
  const std::map<size_t, uint64_t>& written_inputs(const std::string& method) const;

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
  std::map<std::string, std::map<size_t, uint64_t>> written_;
};

// How large the parts of a program may be.
struct ProgramLimits {
  uint64_t file_bytes;     // of the program and its segments
  uint64_t planned_bytes;  // that a method may plan
};

// Reads bytes of the file by offset and size.
using ReadFile = std::string (*)(const void* file, uint64_t offset, uint64_t size);

// By method: inputs that it writes, and the bytes that each may take. A kernel gives such an input the size of what it
// writes, so its memory has to have room for the largest.
using WrittenInputs = std::map<std::string, std::map<size_t, uint64_t>>;

// Checks ExecuTorch's program: every index, size, type and reference. Throws an Error whose text is the fact alone.
KEEPDIM_API WrittenInputs verify_program(const ProgramLimits& limits, const void* file, ReadFile read);

}  // namespace keepdim
