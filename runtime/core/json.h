// Reader for untrusted JSON: limits on length and depth, and an error message for every missing or mistyped field.
#pragma once
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "core/error.h"

namespace keepdim {

using Json = nlohmann::json;
constexpr size_t kMaxJsonBytes = size_t{64} << 20;
constexpr int kMaxJsonDepth = 1000;  // as Python's reader; recursive structures have their own limits

struct JsonReader {
  const char* stage;

  [[noreturn]] void refuse(const std::string& subject, const std::string& fact) const {
    fail(Code::invalid_program, "[" + std::string(stage) + "] " + subject + ": " + fact);
  }
  [[noreturn]] void wrong_type(const std::string& subject, const char* name, const char* expected, const Json& got) const {
    refuse(subject, std::string("'") + name + "' is not " + expected + " (" + got.type_name() + ").");
  }

  // Checks length and depth before parsing.
  Json parse(std::string_view text, const std::string& subject) const {
    if (text.size() > kMaxJsonBytes) refuse(subject, "its JSON is longer than " + std::to_string(kMaxJsonBytes) + " bytes.");
    bool quoted = false;
    int depth = 0;
    for (size_t i = 0; i < text.size(); ++i) {
      const char c = text[i];
      if (c == '"') quoted = !quoted;
      if (c == '\\' && quoted) ++i;
      if (!quoted && (c == '[' || c == '{') && ++depth > kMaxJsonDepth) {
        refuse(subject, "its JSON is nested deeper than " + std::to_string(kMaxJsonDepth) + ".");
      }
      if (!quoted && (c == ']' || c == '}')) --depth;
    }
    try {
      return Json::parse(text.begin(), text.end());
    } catch (const Json::parse_error& e) {
      refuse(subject, "not well-formed JSON (at byte " + std::to_string(e.byte) + ").");
    } catch (const Json::exception&) {  // a number out of range
      refuse(subject, "not well-formed JSON.");
    }
  }

  const Json& field(const Json& object, const char* name, const std::string& subject) const {
    if (!object.is_object()) refuse(subject, std::string("expected an object, got ") + object.type_name() + ".");
    const auto it = object.find(name);
    if (it == object.end()) refuse(subject, std::string("the field '") + name + "' is missing.");
    return *it;
  }
  const Json& list(const Json& object, const char* name, const std::string& subject) const {
    const Json& j = field(object, name, subject);
    if (!j.is_array()) wrong_type(subject, name, "a list", j);
    return j;
  }
  const std::string& string(const Json& object, const char* name, const std::string& subject) const {
    const Json& j = field(object, name, subject);
    if (!j.is_string()) wrong_type(subject, name, "a string", j);
    return j.get_ref<const std::string&>();
  }
  int64_t as_integer(const Json& j, const char* name, const std::string& subject) const {
    if (!j.is_number_integer()) wrong_type(subject, name, "an integer", j);
    if (j.is_number_unsigned() && j.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX)) {
      refuse(subject, std::string("'") + name + "' overflows int64.");
    }
    return j.get<int64_t>();
  }
  int64_t integer(const Json& object, const char* name, const std::string& subject) const {
    return as_integer(field(object, name, subject), name, subject);
  }
  uint64_t natural(const Json& object, const char* name, const std::string& subject) const {
    const int64_t value = integer(object, name, subject);
    if (value < 0) refuse(subject, std::string("'") + name + "' is negative.");
    return static_cast<uint64_t>(value);
  }
  // An index into a table of `count` elements.
  uint32_t index(const Json& j, const char* name, size_t count, const std::string& subject) const {
    const int64_t v = as_integer(j, name, subject);
    if (v < 0 || static_cast<uint64_t>(v) >= count) {
      refuse(subject,
             std::string("'") + name + "' " + std::to_string(v) + " does not exist; there are " + std::to_string(count) + ".");
    }
    return static_cast<uint32_t>(v);
  }
  template <typename T>
  T choice(const std::string& word, std::initializer_list<const char*> words, const char* what,
           const std::string& subject) const {
    size_t i = 0;
    for (const char* w : words) {
      if (word == w) return static_cast<T>(i);
      ++i;
    }
    refuse(subject, std::string(what) + " '" + word + "' is not known.");
  }
};

}  // namespace keepdim
