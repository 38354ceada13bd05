// Contract::bind and bind_results, and their error messages.
#include "core/contract.h"

#include <cstring>

namespace keepdim {

namespace {

[[noreturn]] void refuse(const std::string& sentence) { fail(Code::invalid_argument, sentence); }

std::string range_text(const Bounds& range) {
  return (range.lo ? std::to_string(*range.lo) : "") + ".." + (range.hi ? std::to_string(*range.hi) : "");
}

const char* cmp_text(Cmp cmp) {
  static const char* const texts[] = {"==", "!=", "<", "<=", ">", ">="};
  return texts[static_cast<size_t>(cmp)];
}

bool holds(int64_t a, Cmp cmp, int64_t b) {
  switch (cmp) {
    case Cmp::eq: return a == b;
    case Cmp::ne: return a != b;
    case Cmp::lt: return a < b;
    case Cmp::le: return a <= b;
    case Cmp::gt: return a > b;
    case Cmp::ge: return a >= b;
  }
  return false;
}

template <typename T>
int64_t read_element(const void* data, size_t index) {
  T value;
  std::memcpy(&value, static_cast<const char*>(data) + index * sizeof(T), sizeof(T));
  return static_cast<int64_t>(value);
}

int64_t read_item(const Argument& arg, size_t index) {
  if (arg.item) return arg.item(arg.data, index);
  switch (arg.dtype) {
    case DType::i8: return read_element<int8_t>(arg.data, index);
    case DType::u8: return read_element<uint8_t>(arg.data, index);
    case DType::i16: return read_element<int16_t>(arg.data, index);
    case DType::i32: return read_element<int32_t>(arg.data, index);
    default: return read_element<int64_t>(arg.data, index);
  }
}

// Whether flat element `index` exists.
bool has_element(const Argument& arg, size_t index) {
  uint64_t count = 1;
  for (size_t d = 0; d < arg.rank; ++d) {
    if (arg.sizes[d] <= 0) return false;
    if (__builtin_mul_overflow(count, static_cast<uint64_t>(arg.sizes[d]), &count)) count = UINT64_MAX;
  }
  return index < count;
}

std::string list_text(const std::vector<std::string>& parts) {
  std::string out = "[";
  for (size_t i = 0; i < parts.size(); ++i) out += (i > 0 ? ", " : "") + parts[i];
  return out + "]";
}

}  // namespace

std::vector<std::string> Contract::names() const {
  std::vector<std::string> out;
  for (const Symbol& symbol : symbols) out.push_back(symbol.name);
  return out;
}

std::string Contract::text(DimId id) const { return dims.text(id, names()); }

std::string Contract::name_text(const CallSide& side, size_t i) const {
  return side.what + (" " + std::to_string(i)) + " '" + side.specs[i].name + "'";
}

std::string Contract::where(const Symbol& symbol) const {
  const Source& source = symbol.source;
  const bool from_input = &symbol < symbols.data() + input_symbols;
  std::string out = name_text(from_input ? inputs_side() : outputs_side(), source.input);
  if (source.kind == Source::Kind::size) out += " dim " + std::to_string(source.index);
  if (source.kind == Source::Kind::item) out += " element " + std::to_string(source.index);
  return out;
}

std::string Contract::expression(const Symbol& symbol) const {
  const DimNode& mul = dims.node(symbol.source.mul);
  const DimNode& add = dims.node(symbol.source.add);
  std::string out = symbol.name;
  if (mul.op == DimOp::add || mul.op == DimOp::floordiv || mul.op == DimOp::mod) {
    out = "(" + text(symbol.source.mul) + ")*" + out;
  } else if (mul.op == DimOp::constant && mul.value == -1) {
    out = "-" + out;
  } else if (mul.op != DimOp::constant || mul.value != 1) {
    out = text(symbol.source.mul) + "*" + out;
  }
  const std::string rest = text(symbol.source.add);
  if (add.op == DimOp::constant && add.value == 0) return out;
  return out + (rest[0] == '-' ? " - " + rest.substr(1) : " + " + rest);
}

std::string Contract::origins(const std::vector<DimId>& ids, const std::vector<int64_t>& bound) const {
  std::vector<char> seen(dims.size(), 0);
  std::vector<DimId> stack(ids.rbegin(), ids.rend());
  std::string out;
  while (!stack.empty()) {  // in the order of the printed text
    const DimId id = stack.back();
    stack.pop_back();
    if (seen[id]) continue;
    seen[id] = 1;
    const DimNode& n = dims.node(id);
    for (uint32_t k = n.count; k-- > 0;) stack.push_back(dims.args(id)[k]);
    if (n.op != DimOp::symbol) continue;
    const Symbol& symbol = symbols[n.value];
    out += (out.empty() ? "" : ", ") + symbol.name + " = " + std::to_string(bound[n.value]) + " from " + where(symbol);
  }
  return out;
}

void Contract::check_spec(const CallSide& side, size_t i, const Argument& arg) const {
  const Spec& spec = side.specs[i];
  if (spec.dtype == DType::python) return;
  if (arg.dtype != spec.dtype) {
    refuse(side.stage + name_text(side, i) + ": expected dtype " + dtype_name(spec.dtype) + ", got " + dtype_name(arg.dtype) +
           ".");
  }
  if (spec.dtype == DType::integer || arg.rank == spec.dims.size()) return;
  std::vector<std::string> expected, got;
  for (DimId id : spec.dims) expected.push_back(text(id));
  for (size_t d = 0; d < arg.rank; ++d) got.push_back(std::to_string(arg.sizes[d]));
  refuse(side.stage + name_text(side, i) + ": expected " + std::to_string(expected.size()) + " dims " + list_text(expected) +
         ", got " + std::to_string(got.size()) + " (" + list_text(got) + ").");
}

// Solves value = mul * symbol + add for the symbol; checks divisibility and range.
int64_t Contract::solve(const CallSide& side, const Symbol& symbol, const Argument* args, const int64_t* bound) const {
  const Source& source = symbol.source;
  const Argument& arg = args[source.input];
  int64_t found = 0;
  switch (source.kind) {
    case Source::Kind::size: found = arg.sizes[source.index]; break;
    case Source::Kind::integer: found = arg.value; break;
    case Source::Kind::item:
      if (!has_element(arg, source.index)) refuse(side.stage + where(symbol) + ": the tensor has fewer elements.");
      if (!arg.data) refuse(side.stage + where(symbol) + ": the tensor has no data to read.");
      found = read_item(arg, source.index);
      break;
  }
  const int64_t mul = dims.eval_one(source.mul, bound), add = dims.eval_one(source.add, bound);
  const __int128 rest = static_cast<__int128>(found) - add;
  const __int128 value = mul == 0 ? 0 : rest / mul;
  if (mul == 0 || rest % mul != 0 || value < INT64_MIN || value > INT64_MAX) {
    refuse(side.stage + where(symbol) + ": " + expression(symbol) + " = " + std::to_string(found) + " has no integer " +
           symbol.name + ".");
  }
  const int64_t v = static_cast<int64_t>(value);
  const Bounds& range = symbol.range;
  if ((range.lo && v < *range.lo) || (range.hi && v > *range.hi)) {
    const bool plain = mul == 1 && add == 0;
    refuse(side.stage + where(symbol) + ": " + symbol.name + " = " + std::to_string(v) + " is out of range " + range_text(range) +
           (plain ? "" : " (" + expression(symbol) + " = " + std::to_string(found) + ")") + ".");
  }
  return v;
}

void Contract::check_sizes(const CallSide& side, const Argument* args, const std::vector<int64_t>& bound,
                           const std::vector<int64_t>& values) const {
  for (size_t i = 0; i < side.specs.size(); ++i) {
    const Spec& spec = side.specs[i];
    for (size_t d = 0; d < spec.dims.size(); ++d) {
      const DimId id = spec.dims[d];
      const int64_t got = spec.dtype == DType::integer ? args[i].value : args[i].sizes[d];
      if (got == values[id]) continue;
      std::string expected = std::to_string(values[id]);
      if (dims.last_symbol(id) >= 0) expected = text(id) + " = " + expected + " (" + origins({id}, bound) + ")";
      refuse(side.stage + name_text(side, i) + (spec.dtype == DType::integer ? "" : " dim " + std::to_string(d)) + ": expected " +
             expected + ", got " + std::to_string(got) + ".");
    }
  }
}

void Contract::bind_side(const CallSide& side, const Argument* args, size_t count, std::vector<int64_t>& bound,
                         std::vector<int64_t>& values) const {
  if (count != side.specs.size()) {
    refuse(std::string(side.stage) + "call: expected " + std::to_string(side.specs.size()) + " " + side.what + "s, got " +
           std::to_string(count) + ".");
  }
  for (size_t i = 0; i < count; ++i) check_spec(side, i, args[i]);
  bound.resize(symbols.size());
  for (size_t i = side.first; i < side.last; ++i) bound[i] = solve(side, symbols[i], args, bound.data());
  values.resize(dims.size());
  if (const auto id = dims.try_eval(bound.data(), side.last, values.data())) {
    refuse(std::string(side.stage) + "call: " + text(*id) + " does not fit int64 (" + origins({*id}, bound) + ").");
  }
  check_sizes(side, args, bound, values);
  for (const Constraint& c : side.constraints) {
    const int64_t a = values[c.lhs], b = values[c.rhs];
    if (holds(a, c.cmp, b)) continue;
    const std::string lhs = text(c.lhs), rhs = text(c.rhs);
    std::string facts;
    if (dims.last_symbol(c.lhs) >= 0) facts += lhs + " = " + std::to_string(a);
    if (dims.last_symbol(c.rhs) >= 0) facts += (facts.empty() ? "" : ", ") + rhs + " = " + std::to_string(b);
    if (!facts.empty()) facts = " for " + facts + " (" + origins({c.lhs, c.rhs}, bound) + ")";
    refuse("[check] " + lhs + " " + cmp_text(c.cmp) + " " + rhs + ": not true" + facts + "." +
           (c.sentence.empty() ? "" : " " + c.sentence));
  }
}

void Contract::bind(const Argument* args, size_t count, std::vector<int64_t>& bound, std::vector<int64_t>& values) const {
  bind_side(inputs_side(), args, count, bound, values);
}

void Contract::bind_results(const Argument* results, size_t count, std::vector<int64_t>& bound,
                            std::vector<int64_t>& values) const {
  bind_side(outputs_side(), results, count, bound, values);
}

}  // namespace keepdim
