// Minimal test framework: TEST(name) { CHECK(...); CHECK_FAILS(expression, "error message"); }
#pragma once
#include <iostream>
#include <string>
#include <vector>

#include "core/error.h"

struct Test {
  const char* name;
  void (*run)();
};
std::vector<Test>& tests();
extern int failures;

#define TEST(name)                                                           \
  static void name();                                                        \
  static const bool name##_added = (tests().push_back({#name, name}), true); \
  static void name()

#define CHECK(condition)                                                           \
  do {                                                                             \
    if (!(condition)) {                                                            \
      ++failures;                                                                  \
      std::cerr << __FILE__ << ":" << __LINE__ << ": " << #condition << std::endl; \
    }                                                                              \
  } while (false)

#define CHECK_EQUAL(a, b)                                                                              \
  do {                                                                                                 \
    const auto left = (a);                                                                             \
    const decltype(left) right = (b);                                                                  \
    if (!(left == right)) {                                                                            \
      ++failures;                                                                                      \
      std::cerr << __FILE__ << ":" << __LINE__ << ": " << left << "\n  is not " << right << std::endl; \
    }                                                                                                  \
  } while (false)

// Message of the Error that `body` throws; empty if it does not throw.
template <typename Body>
std::string failure(const Body& body) {
  try {
    body();
  } catch (const keepdim::Error& e) {
    return e.what();
  }
  return "";
}

#define CHECK_FAILS(expression, sentence) CHECK_EQUAL(failure([&] { (void)(expression); }), std::string(sentence))
