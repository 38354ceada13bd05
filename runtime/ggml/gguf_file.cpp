// Validates counts, offsets and types of a GGUF file before anything else reads it; models/gguf.py reads its fields.
#include "ggml/gguf_file.h"

#include <fcntl.h>
#include <ggml.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <unordered_set>
#include <vector>

namespace keepdim {

namespace {

constexpr uint64_t kMaxName = 1 << 16;  // bytes of a key or a tensor name
constexpr uint32_t kMaxAlignment = 1 << 20;
constexpr uint64_t kMaxFields = 1 << 14,
                   kMaxListElements = 1 << 21;  // the largest tokenizers have 1.3 million tokens, scores and merges in total
enum class Kind : uint32_t { u8, i8, u16, i16, u32, i32, f32, boolean, string, array, u64, i64, f64 };

// Bytes of a scalar; 0 for strings, arrays and unknown kinds.
uint64_t number_bytes(uint32_t kind) {
  static constexpr uint8_t bytes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
  return kind < std::size(bytes) ? bytes[kind] : 0;
}

class GgufReader {
 public:
  explicit GgufReader(const std::string& path) : path_(path), chunk_(size_t{1} << 16) {
    if (path.find('\0') != std::string::npos) refuse("its name holds a zero byte.");
    file_ = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    struct stat info{};
    if (file_ < 0 || fstat(file_, &info) != 0) refuse(std::string("cannot be opened (") + std::strerror(errno) + ").");
    if (!S_ISREG(info.st_mode)) {
      close(file_);
      refuse("is not a regular file.");
    }
    size_ = static_cast<uint64_t>(info.st_size);
  }
  ~GgufReader() { close(file_); }
  GgufReader(const GgufReader&) = delete;

  [[noreturn]] void refuse(const std::string& fact) const { fail(Code::invalid_argument, "[load] " + path_ + ": " + fact); }
  uint64_t offset() const { return offset_; }
  uint64_t left() const { return size_ - offset_; }

  // Checks that `count` items of at least `bytes` each fit in the rest of the file.
  void check_left(uint64_t count, uint64_t bytes, const char* what) const {
    if (bytes > 0 && count > left() / bytes)
      refuse("says that it has " + std::to_string(count) + " " + what +
             ", and ends before them. It is truncated or damaged: download it again.");
  }
  template <typename T>
  T read(const char* what) {
    check_left(1, sizeof(T), what);
    T value;
    copy(&value, sizeof(T));
    return value;
  }
  void skip(uint64_t bytes) { offset_ += bytes; }
  std::string name(const char* what) {
    const auto length = read<uint64_t>(what);
    if (length == 0 || length > kMaxName)
      refuse(std::string(what) + " has " + std::to_string(length) + " bytes. It is damaged: download it again.");
    check_left(length, 1, what);
    std::string out(length, '\0');
    copy(out.data(), length);
    return out;
  }

 private:
  void copy(void* to, uint64_t bytes) {
    auto* out = static_cast<char*>(to);
    while (bytes > 0) {
      if (offset_ < chunk_begin_ || offset_ >= chunk_begin_ + chunk_size_) fill();
      const uint64_t part = std::min(bytes, chunk_begin_ + chunk_size_ - offset_);
      std::memcpy(out, chunk_.data() + (offset_ - chunk_begin_), part);
      offset_ += part, out += part, bytes -= part;
    }
  }
  void fill() {
    ssize_t got;
    do got = pread(file_, chunk_.data(), chunk_.size(), static_cast<off_t>(offset_));
    while (got < 0 && errno == EINTR);
    if (got < 0) refuse(std::string("cannot be read (") + std::strerror(errno) + ").");
    if (got == 0) refuse("became shorter while it was read. Wait until it is written.");
    chunk_begin_ = offset_;
    chunk_size_ = static_cast<uint64_t>(got);
  }

  const std::string path_;
  int file_ = -1;
  std::vector<char> chunk_;
  uint64_t size_ = 0, offset_ = 0, chunk_begin_ = 0, chunk_size_ = 0;
};

void skip_values(GgufReader& in, uint32_t kind, uint64_t count) {
  if (kind == static_cast<uint32_t>(Kind::string)) {
    in.check_left(count, sizeof(uint64_t), "texts");
    for (uint64_t i = 0; i < count; ++i) {
      const auto length = in.read<uint64_t>("bytes of a text");
      in.check_left(length, 1, "bytes of a text");
      in.skip(length);
    }
    return;
  }
  const uint64_t bytes = number_bytes(kind);
  if (bytes == 0)
    in.refuse("has a field of the kind " + std::to_string(kind) +
              ", which is not known there. It is damaged: download it again.");
  in.check_left(count, bytes, "numbers");
  in.skip(count * bytes);
}

// Checks the metadata fields. Returns the tensor alignment.
uint32_t check_fields(GgufReader& in, uint64_t count) {
  in.check_left(count, 8 + 1 + 4 + 1, "fields");
  if (count > kMaxFields)
    in.refuse("has " + std::to_string(count) + " fields, more than " + std::to_string(kMaxFields) +
              ". It is damaged: download it again.");
  uint64_t list_elements = 0;
  uint32_t alignment = 32;
  std::unordered_set<std::string> names;
  for (uint64_t i = 0; i < count; ++i) {
    const std::string name = in.name("name of a field");
    if (!names.insert(name).second) in.refuse("has the field '" + name + "' twice. It is damaged: download it again.");
    const auto kind = in.read<uint32_t>("kinds of fields");
    if (name == "general.alignment") {
      if (kind != static_cast<uint32_t>(Kind::u32))
        in.refuse("its field 'general.alignment' is not a uint32. It is damaged: download it again.");
      alignment = in.read<uint32_t>("numbers");
      if (alignment == 0 || alignment > kMaxAlignment || (alignment & (alignment - 1)) != 0) {
        in.refuse("its field 'general.alignment' is " + std::to_string(alignment) +
                  ", expected a power of two. It is damaged: download it again.");
      }
    } else if (kind == static_cast<uint32_t>(Kind::array)) {
      const auto of = in.read<uint32_t>("kinds of fields");
      const auto length = in.read<uint64_t>("lengths of lists");
      skip_values(in, of, length);
      if ((list_elements += length) > kMaxListElements)
        in.refuse("its lists have more than " + std::to_string(kMaxListElements) +
                  " elements. It is damaged: download it again.");
    } else {
      skip_values(in, kind, 1);
    }
  }
  return alignment;
}

struct TensorSpan {
  std::string name;
  uint64_t offset, bytes;
};

TensorSpan read_tensor(GgufReader& in) {
  TensorSpan out{in.name("name of a tensor"), 0, 0};
  const std::string subject = "its tensor '" + out.name + "' ";
  const auto rank = in.read<uint32_t>("ranks");
  if (rank > GGML_MAX_DIMS) in.refuse(subject + "has " + std::to_string(rank) + " dims. It is damaged: download it again.");
  uint64_t elements = 1, first = 1;
  bool overflow = false;
  for (uint32_t d = 0; d < rank; ++d) {
    const auto size = in.read<uint64_t>("sizes");
    if (size == 0) in.refuse(subject + "has no elements. It is damaged: download it again.");
    if (d == 0) first = size;
    overflow = __builtin_mul_overflow(elements, size, &elements) || elements > INT64_MAX || overflow;
  }
  const auto type = in.read<uint32_t>("types of tensors");
  out.offset = in.read<uint64_t>("offsets");
  if (type >= GGML_TYPE_COUNT || ggml_blck_size(static_cast<ggml_type>(type)) == 0) {
    in.refuse(subject + "has the type " + std::to_string(type) + ", which is not known.");
  }
  const auto block = static_cast<uint64_t>(ggml_blck_size(static_cast<ggml_type>(type)));
  if (overflow || __builtin_mul_overflow(elements / block, ggml_type_size(static_cast<ggml_type>(type)), &out.bytes)) {
    in.refuse(subject + "has more elements than memory has addresses. It is damaged: download it again.");
  }
  if (first % block != 0)
    in.refuse(subject + "has rows of " + std::to_string(first) + ", not in blocks of " + std::to_string(block) +
              ". It is damaged: download it again.");
  return out;
}

}  // namespace

void check_gguf(const std::string& path) {
  GgufReader in(path);
  if (in.left() < 24 || in.read<uint32_t>("bytes") != 0x46554747) in.refuse("is not a GGUF file.");
  const auto version = in.read<uint32_t>("bytes");
  if (version == 0x02000000 || version == 0x03000000) in.refuse("was written for processors of another byte order.");
  if (version != 2 && version != 3) in.refuse("is of GGUF's version " + std::to_string(version) + ", expected 2 or 3.");
  const auto tensors = in.read<uint64_t>("bytes"), fields = in.read<uint64_t>("bytes");
  const uint32_t alignment = check_fields(in, fields);
  in.check_left(tensors, 8 + 1 + 4 + 4 + 8, "tensors");
  std::vector<TensorSpan> all;
  std::unordered_set<std::string> names;
  for (uint64_t i = 0; i < tensors; ++i) {
    all.push_back(read_tensor(in));
    if (!names.insert(all.back().name).second)
      in.refuse("has the tensor '" + all.back().name + "' twice. It is damaged: download it again.");
  }
  const uint64_t padding = (alignment - in.offset() % alignment) % alignment;
  const uint64_t data = in.left() < padding ? 0 : in.left() - padding;
  for (const TensorSpan& t : all) {
    if (t.offset % alignment != 0 || t.offset > data || t.bytes > data - t.offset) {
      in.refuse("its tensor '" + t.name + "' has " + std::to_string(t.bytes) + " bytes at " + std::to_string(t.offset) +
                " of its " + std::to_string(data) + " bytes of data. It is truncated or damaged: download it again.");
    }
  }
}

}  // namespace keepdim
