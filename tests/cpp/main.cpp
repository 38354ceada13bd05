#include <cstring>

#include "ggml/engine.h"
#include "programs.h"
#include "test.h"

std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}
int failures = 0;

int main(int argc, char** argv) {
  keepdim::register_ggml_engine();
  if (argc == 3 && std::strcmp(argv[1], "--programs") == 0) return run_folder(argv[2]);
  if (argc == 3 && std::strcmp(argv[1], "--mutate") == 0) return run_mutated(std::stoi(argv[2]));
  if (argc != 1) {
    std::cerr << "usage: keepdim_test [--programs DIR | --mutate N]" << std::endl;
    return 2;
  }
  for (const Test& test : tests()) {
    const int before = failures;
    try {
      test.run();
    } catch (const std::exception& e) {
      ++failures;
      std::cerr << test.name << ": " << e.what() << std::endl;
    }
    if (failures != before) std::cerr << test.name << " failed" << std::endl;
  }
  std::cout << tests().size() << " tests, " << failures << " failures" << std::endl;
  return failures ? 1 : 0;
}
