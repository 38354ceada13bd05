#include "core/options.h"

#include <unistd.h>

#include <cstdio>
#include <string>

#include "core/lock.h"

namespace keepdim {

namespace {

constexpr int64_t kDefaultPlanLimit = int64_t{64} << 20;

struct Settings {
  TableLock lock;
  Options options{0, 0, kDefaultPlanLimit};
};

Settings& settings() {  // created on first use, independent of static initialisation order
  static Settings* const s = new Settings;
  return *s;
}

std::string format_bytes(size_t bytes) {
  static const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double value = static_cast<double>(bytes);
  int unit = 0;
  while (value >= 1024 && unit < 6) value /= 1024, ++unit;
  char text[32];
  std::snprintf(text, sizeof(text), unit ? "%.1f %s" : "%.0f %s", value, units[unit]);
  return text;
}

}  // namespace

Options options() {
  Settings& s = settings();
  const std::lock_guard<TableLock> guard(s.lock);
  return s.options;
}

size_t memory_limit() {
  const int64_t limit = options().memory_limit;
  if (limit > 0) return static_cast<size_t>(limit);
  const long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGE_SIZE);
  if (pages <= 0 || page <= 0) return SIZE_MAX;
  return static_cast<size_t>(pages) / 4 * 3 * static_cast<size_t>(page);
}

void set_options(const Options& options) {
  if (options.threads < 0 || options.memory_limit < 0 || options.plan_limit < 0) {
    fail(Code::invalid_argument,
         "[options] threads, memory_limit, plan_limit: a value is negative. Give counts and bytes of 0 or more.");
  }
  Settings& s = settings();
  const std::lock_guard<TableLock> guard(s.lock);
  s.options = options;
}

void over_limit(const char* engine, const Contract& contract, const int64_t* sizes, size_t bytes, size_t limit) {
  std::string where;
  for (size_t i = 0; i < contract.symbols.size(); ++i)
    for (DimId id = 0; id < contract.dims.size(); ++id)
      if (const DimNode& dim = contract.dims.node(id); dim.op == DimOp::symbol && dim.value == static_cast<int64_t>(i)) {
        where += (where.empty() ? " at " : ", ") + contract.symbols[i].name + " = " + std::to_string(sizes[id]);
        break;
      }
  const std::string amount = bytes == SIZE_MAX ? "more bytes than 64 bits count" : format_bytes(bytes);
  fail(Code::out_of_memory, std::string("[plan] ") + engine + ": needs " + amount + where + ", over the limit of " +
                                format_bytes(limit) + ". Call it with smaller sizes or raise the memory_limit option.");
}

}  // namespace keepdim
