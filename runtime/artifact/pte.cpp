// Reads the trailer of a .pte and its checksums; the structure is verified by verify_pte.cpp.
#include "artifact/pte.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "artifact/sha256.h"
#include "core/json.h"
#include "core/options.h"

namespace keepdim {

namespace {

constexpr std::string_view kMagic = "KEEPDIM1";
constexpr uint64_t kFooter = 32 + 8 + 8;  // sha256 of the trailer's JSON, its length, the magic
constexpr size_t kChunk = size_t{1} << 20;
constexpr const char* kAgain = " Copy it or lower the model again.";

std::string bytes_text(const std::array<uint8_t, 32>& digest) {
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

}  // namespace

PteFile::PteFile(const std::string& path, bool weights) : path_(path) {
  if (path.find('\0') != std::string::npos) refuse("its name holds a zero byte.");
  file_ = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // do not block on a pipe without a writer
  struct stat info{};
  if (file_ < 0 || fstat(file_, &info) != 0) refuse(std::string("cannot be opened (") + std::strerror(errno) + ").");
  try {
    if (S_ISDIR(info.st_mode)) refuse(std::string("cannot be opened (") + std::strerror(EISDIR) + ").");
    if (!S_ISREG(info.st_mode)) refuse("is not a regular file.");
    bytes_ = static_cast<uint64_t>(info.st_size);
    read_trailer();
    std::vector<std::pair<uint64_t, uint64_t>> rest;
    uint64_t at = 0;
    for (const WeightSpan& w : weights_) {
      rest.emplace_back(at, w.offset - at);
      at = w.offset + w.size;
    }
    rest.emplace_back(at, size_ - at);
    if (hash(rest) != sha256_) refuse(std::string("is corrupt: its bytes do not match its checksum.") + kAgain);
    for (const WeightSpan& w : weights_) {
      if (weights && hash({{w.offset, w.size}}) != w.sha256) {
        fail(Code::invalid_program,
             "[load] weight '" + w.key + "' of " + path_ + ": is corrupt: its bytes do not match its checksum." + kAgain);
      }
    }
    try {
      methods_ = verify_program({size_, memory_limit()}, this, [](const void* file, uint64_t offset, uint64_t size) {
        return static_cast<const PteFile*>(file)->read(offset, size);
      });
    } catch (const Error& e) {
      if (e.what()[0] == '[') throw;  // already a complete message
      fail(e.code, "[load] " + path_ + ": is damaged or forged: " + e.what() + "." + kAgain);
    }
  } catch (...) {
    close(file_);
    throw;
  }
}

PteFile::~PteFile() { close(file_); }

std::string PteFile::open_path() const { return "/proc/self/fd/" + std::to_string(file_); }

const std::map<size_t, uint64_t>& PteFile::written_inputs(const std::string& method) const {
  static const std::map<size_t, uint64_t> none;
  const auto it = methods_.find(method);
  return it == methods_.end() ? none : it->second.written;
}

std::string PteFile::kernel(const std::string& method, int64_t chain, int64_t instruction) const {
  const auto it = methods_.find(method);
  if (it == methods_.end() || chain < 0 || instruction < 0) return "";
  const auto& chains = it->second.kernels;
  const size_t c = static_cast<size_t>(chain), i = static_cast<size_t>(instruction);
  return c < chains.size() && i < chains[c].size() ? chains[c][i] : "";
}

void PteFile::refuse(const std::string& fact) const { fail(Code::invalid_program, "[load] " + path_ + ": " + fact); }

// pread instead of mmap: a file that shrinks in the meantime gives an error instead of SIGBUS.
std::string PteFile::read(uint64_t offset, uint64_t size) const {
  if (offset > bytes_ || size > bytes_ - offset) refuse("ends before its contents do. It is truncated: copy it again.");
  std::string out(size, '\0');
  for (uint64_t done = 0; done < size;) {
    const ssize_t got = pread(file_, out.data() + done, size - done, static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) refuse(std::string("cannot be read (") + std::strerror(errno) + ").");
    if (got == 0) refuse("became shorter while it was read. It is truncated: copy it again.");
    done += static_cast<uint64_t>(got);
  }
  return out;
}

std::string PteFile::hash(const std::vector<std::pair<uint64_t, uint64_t>>& spans) const {
  Sha256 sum;
  for (const auto& [offset, size] : spans) {
    for (uint64_t done = 0; done < size;) {
      const std::string part = read(offset + done, std::min<uint64_t>(kChunk, size - done));
      sum.update(part.data(), part.size());
      done += part.size();
    }
  }
  return sum.hex();
}

void PteFile::read_trailer() {
  const std::string footer = bytes_ < kFooter ? "" : read(bytes_ - kFooter, kFooter);
  if (footer.empty() || footer.compare(40, 8, kMagic) != 0) {
    refuse("has no keepdim trailer at its end (" + std::to_string(bytes_) + " bytes). It is truncated, or not saved by keepdim.");
  }
  uint64_t length = 0;
  for (size_t i = 8; i-- > 0;) length = length << 8 | static_cast<uint8_t>(footer[32 + i]);
  if (length > bytes_ - kFooter || length > kMaxJsonBytes) refuse(std::string("its trailer is corrupt.") + kAgain);
  const uint64_t start = bytes_ - kFooter - length;
  const std::string body = read(start, length);
  if (bytes_text(Sha256().update(body.data(), body.size()).digest()) != footer.substr(0, 32)) {
    refuse(std::string("its trailer is corrupt.") + kAgain);
  }
  const std::string subject = path_ + ": its trailer";
  const JsonReader in{"load"};
  const Json j = in.parse(body, subject);
  const int64_t version = in.integer(j, "version", subject);
  if (version != 1)
    refuse("trailer version " + std::to_string(version) + " is newer than this build reads (1). Upgrade keepdim.");
  size_ = in.natural(j, "size", subject);
  if (size_ != start) {
    refuse("holds " + std::to_string(start) + " bytes where its trailer says " + std::to_string(size_) +
           ". It is truncated: copy it again.");
  }
  sha256_ = in.string(j, "sha256", subject);
  uint64_t at = 0;
  for (const Json& w : in.list(j, "weights", subject)) {
    WeightSpan span{in.string(w, "key", subject), in.natural(w, "offset", subject), in.natural(w, "size", subject),
                    in.string(w, "sha256", subject)};
    if (span.offset < at || span.offset > size_ || span.size > size_ - span.offset) {
      refuse("its trailer places the weight '" + span.key + "' outside the file or twice." + kAgain);
    }
    at = span.offset + span.size;
    weights_.push_back(std::move(span));
  }
}

}  // namespace keepdim
