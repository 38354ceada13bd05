#include "core/dims.h"

#include <algorithm>
#include <climits>

namespace keepdim {

namespace {

using Wide = __int128;
constexpr Wide kMax = INT64_MAX, kMin = INT64_MIN;

bool fits(Wide x) { return x >= kMin && x <= kMax; }

bool narrow(Wide x, int64_t* out) {
  if (!fits(x)) return false;
  *out = static_cast<int64_t>(x);
  return true;
}

Wide floordiv(Wide a, Wide b) {
  const Wide q = a / b;
  return (a % b != 0 && (a < 0) != (b < 0)) ? q - 1 : q;
}

Wide mod(Wide a, Wide b) { return a - floordiv(a, b) * b; }

// Endpoint of an interval; `infinite` is -1, 0 or 1.
struct Endpoint {
  int infinite = 0;
  Wide value = 0;
};

bool less(const Endpoint& a, const Endpoint& b) {
  if (a.infinite != b.infinite) return a.infinite < b.infinite;
  return a.infinite == 0 && a.value < b.value;
}

struct Interval {
  Endpoint lo{-1, 0}, hi{1, 0};
};

Interval from_bounds(const Bounds& b) {
  Interval r;
  if (b.lo) r.lo = {0, *b.lo};
  if (b.hi) r.hi = {0, *b.hi};
  return r;
}

int sign(const Endpoint& e) { return e.infinite ? e.infinite : (e.value > 0) - (e.value < 0); }

Endpoint multiply(const Endpoint& a, const Endpoint& b) {
  const int s = sign(a) * sign(b);
  if (s == 0) return {0, 0};  // including 0 * inf: the factor is exactly 0
  if (a.infinite || b.infinite) return {s, 0};
  return {0, a.value * b.value};
}

// a // b, as a limit for infinite endpoints.
Endpoint divide(const Endpoint& a, const Endpoint& b) {
  if (b.infinite) return {0, sign(a) != 0 && sign(a) != b.infinite ? -1 : 0};
  if (a.infinite) return {a.infinite * sign(b), 0};
  return {0, floordiv(a.value, b.value)};
}

Interval interval_from_endpoints(const Interval& a, const Interval& b, Endpoint (*f)(const Endpoint&, const Endpoint&)) {
  const Endpoint all[] = {f(a.lo, b.lo), f(a.lo, b.hi), f(a.hi, b.lo), f(a.hi, b.hi)};
  return {*std::min_element(all, all + 4, less), *std::max_element(all, all + 4, less)};
}

Interval add_intervals(const Interval& a, const Interval& b) {
  Interval r;
  if (!a.lo.infinite && !b.lo.infinite) r.lo = {0, a.lo.value + b.lo.value};
  if (!a.hi.infinite && !b.hi.infinite) r.hi = {0, a.hi.value + b.hi.value};
  return r;
}

// The result has the sign of the divisor and a smaller magnitude.
Interval mod_intervals(const Interval& a, const Interval& b) {
  Interval r{{0, 0}, {0, 0}};
  if (sign(b.lo) > 0) {
    if (sign(a.lo) >= 0 && less(a.hi, b.lo)) return a;
    r.hi = b.hi.infinite ? b.hi : Endpoint{0, b.hi.value - 1};
  } else {
    r.lo = b.lo.infinite ? b.lo : Endpoint{0, b.lo.value + 1};
  }
  return r;
}

Interval combine(DimOp op, const Interval& a, const Interval& b) {
  switch (op) {
    case DimOp::add: return add_intervals(a, b);
    case DimOp::mul: return interval_from_endpoints(a, b, multiply);
    case DimOp::floordiv: return interval_from_endpoints(a, b, divide);
    case DimOp::mod: return mod_intervals(a, b);
    case DimOp::max: return {std::max(a.lo, b.lo, less), std::max(a.hi, b.hi, less)};
    case DimOp::min: return {std::min(a.lo, b.lo, less), std::min(a.hi, b.hi, less)};
    default: return a;
  }
}

[[noreturn]] void refuse(size_t id, const std::string& fact) {
  fail(Code::invalid_program, "[verify] dim " + std::to_string(id) + ": " + fact);
}

bool contains_zero(const Bounds& b) { return (!b.lo || *b.lo <= 0) && (!b.hi || *b.hi >= 0); }

}  // namespace

void DimTable::push(DimOp op, int64_t value, const std::vector<DimId>& args, const std::vector<Bounds>& symbols) {
  const size_t id = size();
  if (id >= UINT32_MAX || args_.size() + args.size() >= UINT32_MAX) refuse(id, "the table is too long.");
  Bounds bounds;
  int last = -1;
  if (op == DimOp::constant) {
    bounds = {value, value};
  } else if (op == DimOp::symbol) {
    if (value < 0 || static_cast<size_t>(value) >= symbols.size()) {
      refuse(id, "symbol " + std::to_string(value) + " does not exist; there are " + std::to_string(symbols.size()) + ".");
    }
    bounds = symbols[value];
    last = static_cast<int>(value);
  } else {
    const bool is_division = op == DimOp::floordiv || op == DimOp::mod;
    if (is_division ? args.size() != 2 : args.size() < 2) {
      refuse(id, std::string(is_division ? "expected 2 operands, got " : "expected at least 2 operands, got ") +
                     std::to_string(args.size()) + ".");
    }
    for (DimId arg : args) {
      if (arg >= id) refuse(id, "operand " + std::to_string(arg) + " does not come before it.");
      last = std::max(last, last_symbol_[arg]);
    }
    if (is_division && contains_zero(bounds_[args[1]]))
      refuse(id, "the divisor (dim " + std::to_string(args[1]) + ") can be zero.");
    Interval all = from_bounds(bounds_[args[0]]);
    for (size_t i = 1; i < args.size(); ++i) {
      all = combine(op, all, from_bounds(bounds_[args[i]]));
      if (!fits(all.lo.value) || !fits(all.hi.value)) refuse(id, "its bounds overflow int64.");
    }
    if (!all.lo.infinite) bounds.lo = static_cast<int64_t>(all.lo.value);
    if (!all.hi.infinite) bounds.hi = static_cast<int64_t>(all.hi.value);
  }
  nodes_.push_back({op, value, static_cast<uint32_t>(args_.size()), static_cast<uint32_t>(args.size())});
  args_.insert(args_.end(), args.begin(), args.end());
  bounds_.push_back(bounds);
  last_symbol_.push_back(last);
}

bool DimTable::apply(DimId id, const int64_t* symbols, int64_t* values) const {
  const DimNode& n = nodes_[id];
  const DimId* a = args_.data() + n.first;
  int64_t& out = values[id];
  switch (n.op) {
    case DimOp::constant: out = n.value; return true;
    case DimOp::symbol: out = symbols[n.value]; return true;
    case DimOp::add:
    case DimOp::mul:  // left to right with overflow checks, as in Python
      out = values[a[0]];
      for (uint32_t i = 1; i < n.count; ++i) {
        if (n.op == DimOp::add ? __builtin_add_overflow(out, values[a[i]], &out)
                               : __builtin_mul_overflow(out, values[a[i]], &out)) {
          return false;
        }
      }
      return true;
    case DimOp::floordiv: return values[a[1]] != 0 && narrow(floordiv(values[a[0]], values[a[1]]), &out);
    case DimOp::mod: return values[a[1]] != 0 && narrow(mod(values[a[0]], values[a[1]]), &out);
    case DimOp::max:
    case DimOp::min:
      out = values[a[0]];
      for (uint32_t i = 1; i < n.count; ++i) {
        out = n.op == DimOp::max ? std::max(out, values[a[i]]) : std::min(out, values[a[i]]);
      }
      return true;
  }
  return false;
}

std::optional<DimId> DimTable::try_eval(const int64_t* symbols, size_t known, int64_t* out) const {
  for (size_t id = 0; id < nodes_.size(); ++id) {
    if (last_symbol_[id] < static_cast<int>(known) && !apply(static_cast<DimId>(id), symbols, out)) return static_cast<DimId>(id);
  }
  return std::nullopt;
}

void DimTable::eval(const int64_t* symbols, int64_t* out) const {
  if (const auto id = try_eval(symbols, INT_MAX, out)) {
    fail(Code::invalid_argument, "[bind] dim " + std::to_string(*id) + ": its value does not fit int64.");
  }
}

int64_t DimTable::eval_one(DimId id, const int64_t* symbols) const {
  const DimNode& n = nodes_[id];
  if (n.op == DimOp::constant) return n.value;
  if (n.op == DimOp::symbol) return symbols[n.value];
  // Only the dependencies of the dim: others may need unknown symbols.
  std::vector<char> needed(id + 1, 0);
  std::vector<int64_t> values(id + 1, 0);
  needed[id] = 1;
  for (size_t i = id + 1; i-- > 0;) {
    if (!needed[i]) continue;
    for (uint32_t k = 0; k < nodes_[i].count; ++k) needed[args_[nodes_[i].first + k]] = 1;
  }
  for (size_t i = 0; i <= id; ++i) {
    if (needed[i] && !apply(static_cast<DimId>(i), symbols, values.data())) {
      fail(Code::invalid_argument, "[bind] dim " + std::to_string(i) + ": its value does not fit int64.");
    }
  }
  return values[id];
}

namespace {

// Prints a dim. Shared operands are printed at each use, so length and depth are limited.
class Writer {
 public:
  Writer(const DimTable& dims, const std::vector<std::string>& names) : dims_(dims), names_(names) {}

  void sum(DimId id, int depth) {
    if (truncated(depth)) return;
    const DimNode& n = dims_.node(id);
    const bool is_sum = n.op == DimOp::add;
    for (uint32_t i = 0; i < (is_sum ? n.count : 1); ++i) term(is_sum ? dims_.args(id)[i] : id, i == 0, depth);
  }

  std::string out;

 private:
  bool truncated(int depth) {
    if (out.size() < 1000 && depth < 50) return false;
    if (out.size() < 1100) out += "…";
    return true;
  }

  // Sign, coefficient and factors.
  void term(DimId id, bool first, int depth) {
    if (truncated(depth)) return;
    const DimNode& n = dims_.node(id);
    const DimId* factors = &id;
    uint32_t count = 1;
    int64_t coefficient = 1;
    if (n.op == DimOp::constant) {
      coefficient = n.value;
      count = 0;
    } else if (n.op == DimOp::mul) {
      factors = dims_.args(id);
      count = n.count;
      if (dims_.is_constant(factors[0])) {
        coefficient = dims_.node(*factors++).value;
        --count;
      }
    }
    out += coefficient < 0 ? (first ? "-" : " - ") : (first ? "" : " + ");
    const uint64_t size = coefficient < 0 ? 0 - static_cast<uint64_t>(coefficient) : static_cast<uint64_t>(coefficient);
    bool needs_star = size != 1 || count == 0;
    if (needs_star) out += std::to_string(size);
    // A single quotient needs no parentheses unless negated: -(s//2) is not -s//2.
    const bool no_parentheses = count == 1 && !needs_star && (coefficient > 0 || !first);
    for (uint32_t i = 0; i < count; ++i, needs_star = true) {
      if (needs_star) out += "*";
      factor(factors[i], no_parentheses, depth + 1);
    }
  }

  void factor(DimId id, bool no_parentheses, int depth) {
    if (truncated(depth)) return;
    const DimNode& n = dims_.node(id);
    const DimId* a = dims_.args(id);
    if (n.op == DimOp::symbol) {
      out += static_cast<size_t>(n.value) < names_.size() ? names_[n.value] : "s" + std::to_string(n.value);
    } else if (n.op == DimOp::max || n.op == DimOp::min) {
      out += n.op == DimOp::max ? "max(" : "min(";
      for (uint32_t i = 0; i < n.count; ++i) {
        if (i > 0) out += ", ";
        sum(a[i], depth + 1);
      }
      out += ")";
    } else {
      const bool quotient = n.op == DimOp::floordiv || n.op == DimOp::mod;
      if (!(quotient && no_parentheses)) out += "(";
      if (quotient) {
        operand(a[0], depth + 1);
        out += n.op == DimOp::mod ? " % " : "//";
        operand(a[1], depth + 1);
      } else {
        sum(id, depth + 1);
      }
      if (!(quotient && no_parentheses)) out += ")";
    }
  }

  void operand(DimId id, int depth) {
    const DimNode& n = dims_.node(id);
    const bool plain =
        n.op == DimOp::symbol || n.op == DimOp::max || n.op == DimOp::min || (n.op == DimOp::constant && n.value >= 0);
    if (!plain) out += "(";
    sum(id, depth + 1);
    if (!plain) out += ")";
  }

  const DimTable& dims_;
  const std::vector<std::string>& names_;
};

}  // namespace

std::string DimTable::text(DimId id, const std::vector<std::string>& names) const {
  Writer writer(*this, names);
  writer.sum(id, 0);
  return writer.out;
}

}  // namespace keepdim
