// Reader for unverified FlatBuffers: every access is bounds-checked; nothing is copied.
#pragma once
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>

#include "core/error.h"

namespace keepdim::flatbuffer {

// Throws with the bare fact; the caller adds the file name.
[[noreturn]] inline void damaged(const std::string& fact) { fail(Code::invalid_program, fact); }

inline bool is_utf8(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const auto byte = [&](size_t k) { return i + k < text.size() ? static_cast<uint8_t>(text[i + k]) : uint8_t{0}; };
    const uint8_t first = byte(0);
    const size_t more = first < 0x80                    ? 0
                        : first >= 0xC2 && first < 0xE0 ? 1
                        : first >= 0xE0 && first < 0xF0 ? 2
                        : first >= 0xF0 && first < 0xF5 ? 3
                                                        : 4;
    if (more == 4) return false;
    for (size_t k = 1; k <= more; ++k) {
      if ((byte(k) & 0xC0) != 0x80) return false;
    }
    const bool overlong = (first == 0xE0 && byte(1) < 0xA0) || (first == 0xF0 && byte(1) < 0x90);
    if (overlong || (first == 0xED && byte(1) >= 0xA0) || (first == 0xF4 && byte(1) >= 0x90))
      return false;  // surrogates, or above U+10FFFF
    i += more + 1;
  }
  return true;
}

// The bytes, and a budget of elements to visit. In a valid buffer each element takes at least one byte and is visited once; the
// budget stops small files whose lists share elements from expanding exponentially.
class Buffer {
 public:
  explicit Buffer(std::string_view bytes) : bytes_(bytes), left_(4 * bytes.size()) {}

  template <typename T>
  T read(size_t at) const {
    if (at > bytes_.size() || sizeof(T) > bytes_.size() - at) damaged("a field reaches beyond its end");
    T value;
    std::memcpy(&value, bytes_.data() + at, sizeof(T));
    return value;
  }
  const char* span(size_t at, size_t count) const {
    if (at > bytes_.size() || count > bytes_.size() - at) damaged("a list reaches beyond its end");
    return bytes_.data() + at;
  }
  void visit(size_t count) {
    if (count > left_) damaged("it lists more than it can hold");
    left_ -= count;
  }

 private:
  std::string_view bytes_;
  size_t left_;
};

class Table;

// A vector of scalars, or of offsets to tables and strings.
template <typename T>
class Vector {
 public:
  Vector(Buffer& buffer, size_t at) : buffer_(&buffer), size_(buffer.read<uint32_t>(at)), first_(at + sizeof(uint32_t)) {
    buffer.span(first_, size_ * sizeof(T));
    buffer.visit(size_);
  }
  size_t size() const { return size_; }
  T operator[](size_t i) const { return buffer_->read<T>(first_ + i * sizeof(T)); }
  size_t target(size_t i) const {  // position that an offset element refers to
    const size_t at = first_ + i * sizeof(T);
    return at + buffer_->read<uint32_t>(at);
  }
  const char* data() const { return buffer_->span(first_, size_ * sizeof(T)); }
  size_t end() const { return first_ + size_ * sizeof(T); }  // position of its end in the buffer

 private:
  Buffer* buffer_;
  size_t size_, first_;
};

class Table {
 public:
  Table(Buffer& buffer, size_t at) : buffer_(&buffer), at_(at) {
    buffer.visit(1);
    const int64_t vtable = static_cast<int64_t>(at) - buffer.read<int32_t>(at);
    if (vtable < 0) damaged("a table has no layout");
    vtable_ = static_cast<size_t>(vtable);
    fields_ = buffer.read<uint16_t>(vtable_);
    if (fields_ % 2 != 0) damaged("a table has half a field");
  }
  static Table root(Buffer& buffer) { return Table(buffer, buffer.read<uint32_t>(0)); }

  template <typename T>
  T scalar(unsigned field, T missing = 0) const {
    const size_t at = position(field);
    return at ? buffer_->read<T>(at) : missing;
  }
  std::optional<Table> table(unsigned field) const {
    const size_t at = position(field);
    if (!at) return std::nullopt;
    return Table(*buffer_, at + buffer_->read<uint32_t>(at));
  }
  template <typename T>
  std::optional<Vector<T>> vector(unsigned field) const {
    const size_t at = position(field);
    if (!at) return std::nullopt;
    return Vector<T>(*buffer_, at + buffer_->read<uint32_t>(at));
  }
  // Null-terminated without embedded nulls: ExecuTorch uses it as a C string.
  std::optional<std::string_view> string(unsigned field) const {
    const auto text = vector<char>(field);
    if (!text) return std::nullopt;
    const std::string_view view(text->data(), text->size());
    if (buffer_->read<char>(text->end()) != 0 || view.find('\0') != view.npos) damaged("a string is not terminated");
    if (!is_utf8(view)) damaged("a string is not UTF-8");
    return view;
  }
  Table element(const Vector<uint32_t>& list, size_t i) const { return Table(*buffer_, list.target(i)); }

 private:
  // Position of a field; 0 if absent.
  size_t position(unsigned field) const {
    const size_t slot = 4 + 2 * size_t{field};
    if (slot + 2 > fields_) return 0;
    const size_t offset = buffer_->read<uint16_t>(vtable_ + slot);
    return offset ? at_ + offset : 0;
  }

  Buffer* buffer_;
  size_t at_, vtable_, fields_;
};

}  // namespace keepdim::flatbuffer
