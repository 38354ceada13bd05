// Parses and verifies Contract and Program from JSON.
#include "core/program.h"

#include <limits>
#include <unordered_set>

#include "core/json.h"

namespace keepdim {

namespace {

// Letters, digits and _, not starting with a digit; non-ASCII bytes count as letters.
bool is_identifier(const std::string& name) {
  const auto letter = [](unsigned char c) { return c == '_' || c >= 0x80 || (c | 32) - unsigned{'a'} < 26u; };
  const auto digit = [](unsigned char c) { return c >= '0' && c <= '9'; };
  if (name.empty() || !letter(name[0])) return false;
  for (unsigned char c : name) {
    if (!letter(c) && !digit(c)) return false;
  }
  return true;
}

constexpr int kMaxRegionDepth = 32;                  // regions are read recursively
constexpr size_t kMaxRank = 64, kMaxOperands = 256;  // of a tensor; of a dim; as in keepdim/shapes/contract.py

struct DTypeInfo {
  const char* name;
  size_t bytes;
  size_t block = 1;
};
constexpr DTypeInfo kDTypes[] = {
    {"f32", 4},         {"f16", 2},         {"bf16", 2},        {"f64", 8},          {"i8", 1},        {"u8", 1},
    {"i16", 2},         {"i32", 4},         {"i64", 8},         {"bool", 1},         {"int", 0},       {"python", 0},
    {"q8_0", 34, 32},   {"q4_0", 18, 32},   {"q4_1", 20, 32},   {"q5_0", 22, 32},    {"q5_1", 24, 32}, {"q4_k", 144, 256},
    {"q5_k", 176, 256}, {"q6_k", 210, 256}, {"iq4_nl", 18, 32}, {"iq4_xs", 136, 256}};
static_assert(std::size(kDTypes) == kDTypeCount);

std::string quote(const std::string& text) { return "'" + text + "'"; }

constexpr JsonReader in{"verify"};

void check_version(const Json& j) {
  const int64_t version = in.integer(j, "version", "program");
  if (version > kFormatVersion) {
    in.refuse("program", "format version " + std::to_string(version) + " is newer than this build reads (" +
                             std::to_string(kFormatVersion) + "). Upgrade keepdim.");
  }
  if (version < kFormatVersion) in.refuse("program", "format version " + std::to_string(version) + " does not exist.");
}

DType read_dtype(const Json& j, const std::string& subject) {
  const std::string& name = in.string(j, "dtype", subject);
  DType dtype;
  if (!find_dtype(name, &dtype)) in.refuse(subject, "dtype " + quote(name) + " is not known.");
  return dtype;
}

class ContractReader : private JsonReader {
 public:
  ContractReader(Contract& contract, bool is_method) : JsonReader(in), c_(contract), is_method_(is_method) {}

  void read(const Json& j) {
    static const Json none = Json::array();
    const Json& symbols = list(j, "symbols", "contract");
    const Json& data = j.contains("data") ? list(j, "data", "contract") : none;
    const Json& ensures = j.contains("ensures") ? list(j, "ensures", "contract") : none;
    if (!is_method_ && !(data.empty() && ensures.empty()))
      refuse("contract", "only a method's contract may have sizes that its outputs determine.");
    std::vector<Bounds> ranges;
    for (const Json& symbol : symbols) ranges.push_back(read_symbol(symbol));
    c_.input_symbols = c_.symbols.size();
    for (const Json& symbol : data) ranges.push_back(read_symbol(symbol));
    for (const Json& dim : list(j, "dims", "contract")) read_dim(dim, ranges);
    read_specs(list(j, "inputs", "contract"), "input", c_.inputs);
    for (size_t i = 0; i < c_.input_symbols; ++i) read_source(symbols[i], i, "input", c_.inputs);
    read_constraints(list(j, "constraints", "contract"), c_.constraints);
    for (const Spec& spec : c_.inputs) check_known_before_run(spec.dims, "input " + quote(spec.name));
    for (const Constraint& c : c_.constraints) check_known_before_run({c.lhs, c.rhs}, "constraint " + c_.text(c.lhs));
    read_specs(list(j, "outputs", "contract"), "output", c_.outputs);
    for (size_t i = c_.input_symbols; i < c_.symbols.size(); ++i)
      read_source(data[i - c_.input_symbols], i, "output", c_.outputs);
    read_constraints(ensures, c_.ensures);
  }

  // Dims of a spec or value. Checks that sizes are not negative and that the size in bytes does not overflow.
  std::vector<DimId> read_dims(const Json& j, DType dtype, const std::string& subject) {
    std::vector<DimId> dims;
    const Json& ids = list(j, "dims", subject);
    if (ids.size() > kMaxRank)
      refuse(subject, "has " + std::to_string(ids.size()) + " dims, more than " + std::to_string(kMaxRank) + ".");
    for (const Json& id : ids) dims.push_back(index(id, "dims", c_.dims.size(), subject));
    if (dtype == DType::integer && dims.size() != 1) {
      refuse(subject, "dtype int takes exactly 1 dim, has " + std::to_string(dims.size()) + ".");
    }
    if (dtype == DType::python && !dims.empty()) refuse(subject, "dtype python takes no dims.");
    if (dtype == DType::integer || dtype == DType::python) return dims;
    int64_t bytes = static_cast<int64_t>(dtype_bytes(dtype));
    bool finite = true, overflow = false, empty = false;
    for (size_t d = 0; d < dims.size(); ++d) {
      const Bounds& b = c_.dims.bounds(dims[d]);
      if (!b.lo || *b.lo < 0) refuse(subject + " dim " + std::to_string(d), c_.text(dims[d]) + " can be negative.");
      if (!b.hi) {
        finite = false;
      } else {
        empty = empty || *b.hi == 0;
        overflow = __builtin_mul_overflow(bytes, *b.hi, &bytes) || overflow;
      }
    }
    if (finite && overflow && !empty) refuse(subject, "its size in bytes at the upper bounds overflows int64.");
    return dims;
  }

 private:
  Bounds read_symbol(const Json& j) {
    const std::string subject = "symbol " + std::to_string(c_.symbols.size());
    Symbol symbol;
    symbol.name = string(j, "name", subject);
    if (!is_identifier(symbol.name)) refuse(subject, "the name " + quote(symbol.name) + " is not an identifier.");
    if (!symbol_names_.insert(symbol.name).second) refuse(subject, "the name " + quote(symbol.name) + " is used twice.");
    const Json &lo = field(j, "lo", subject), &hi = field(j, "hi", subject);
    if (!lo.is_null()) symbol.range.lo = as_integer(lo, "lo", subject);
    if (!hi.is_null()) symbol.range.hi = as_integer(hi, "hi", subject);
    if (symbol.range.lo && symbol.range.hi && *symbol.range.lo > *symbol.range.hi) {
      refuse("symbol " + quote(symbol.name),
             "the range " + std::to_string(*symbol.range.lo) + ".." + std::to_string(*symbol.range.hi) + " is empty.");
    }
    c_.symbols.push_back(symbol);
    return symbol.range;
  }

  void read_dim(const Json& j, const std::vector<Bounds>& ranges) {
    const size_t id = c_.dims.size();
    const std::string subject = "dim " + std::to_string(id);
    if (!j.is_array() || j.size() != 2 || !j[0].is_string()) refuse(subject, "expected [op, operand].");
    const auto op = choice<DimOp>(j[0].get_ref<const std::string&>(),
                                  {"const", "sym", "add", "mul", "floordiv", "mod", "max", "min"}, "op", subject);
    if (op == DimOp::constant || op == DimOp::symbol) {
      c_.dims.push(op, as_integer(j[1], "operand", subject), {}, ranges);
      return;
    }
    if (!j[1].is_array()) wrong_type(subject, "operands", "a list", j[1]);
    if (j[1].size() > kMaxOperands)
      refuse(subject, "has " + std::to_string(j[1].size()) + " operands, more than " + std::to_string(kMaxOperands) + ".");
    std::vector<DimId> args;
    for (const Json& arg : j[1]) {
      const int64_t v = as_integer(arg, "operand", subject);
      if (v < 0 || static_cast<size_t>(v) >= id) refuse(subject, "operand " + std::to_string(v) + " does not come before it.");
      args.push_back(static_cast<DimId>(v));
    }
    c_.dims.push(op, 0, args, ranges);
  }

  void read_specs(const Json& all, const char* what, std::vector<Spec>& out) {
    for (const Json& j : all) {
      std::string subject = std::string(what) + " " + std::to_string(out.size());
      Spec spec;
      spec.name = string(j, "name", subject);
      subject += " " + quote(spec.name);
      spec.dtype = read_dtype(j, subject);
      if (spec.dtype == DType::python && !is_method_) refuse(subject, "dtype python is only for a method's contract.");
      if (is_quantised(spec.dtype))
        refuse(subject, std::string("dtype ") + dtype_name(spec.dtype) + " is only for a const or state.");
      spec.dims = read_dims(j, spec.dtype, subject);
      out.push_back(std::move(spec));
    }
  }

  // Checks made before a run must not depend on data-dependent symbols.
  void check_known_before_run(const std::vector<DimId>& ids, const std::string& subject) {
    for (DimId id : ids) {
      if (c_.dims.last_symbol(id) >= static_cast<int>(c_.input_symbols))
        refuse(subject, c_.text(id) + " is known only after a run.");
    }
  }

  void read_source(const Json& symbol_json, size_t i, const char* what, const std::vector<Spec>& specs) {
    Symbol& symbol = c_.symbols[i];
    const std::string subject = "symbol " + quote(symbol.name);
    const Json& j = field(symbol_json, "source", subject);
    Source& source = symbol.source;
    source.kind = choice<Source::Kind>(string(j, "kind", subject), {"size", "int", "item"}, "source kind", subject);
    source.input = index(field(j, "input", subject), what, specs.size(), subject);
    const int64_t at = integer(j, "index", subject);
    if (at < 0 || at > static_cast<int64_t>(UINT32_MAX)) refuse(subject, "index " + std::to_string(at) + " is out of range.");
    source.index = static_cast<uint32_t>(at);
    check_source(source, subject, what, specs[source.input]);
    source.mul = index(field(j, "mul", subject), "mul", c_.dims.size(), subject);
    source.add = index(field(j, "add", subject), "add", c_.dims.size(), subject);
    const int known = static_cast<int>(i);
    if (c_.dims.last_symbol(source.mul) >= known || c_.dims.last_symbol(source.add) >= known) {
      refuse(subject, "its source needs a symbol that is not bound before it.");
    }
    const Bounds& mul = c_.dims.bounds(source.mul);
    if ((!mul.lo || *mul.lo <= 0) && (!mul.hi || *mul.hi >= 0)) refuse(subject, "the factor of its source can be zero.");
  }

  void check_source(const Source& source, const std::string& subject, const std::string& what, const Spec& spec) {
    const DType t = spec.dtype;
    const std::string input = what + " " + std::to_string(source.input) + " " + quote(spec.name);
    const bool tensor = t != DType::integer && t != DType::python;
    if (source.kind == Source::Kind::integer && t != DType::integer)
      refuse(subject, "its source " + input + " is not an integer.");
    if (source.kind == Source::Kind::size && (!tensor || source.index >= spec.dims.size())) {
      refuse(subject, "its source " + input + " has no dim " + std::to_string(source.index) + ".");
    }
    if (source.kind != Source::Kind::item) return;
    if (what != "input") refuse(subject, "its source " + input + " is not read for its elements.");
    if (t != DType::i8 && t != DType::u8 && t != DType::i16 && t != DType::i32 && t != DType::i64) {
      refuse(subject, "its source " + input + " is not an integer tensor.");
    }
    int64_t least = 1;
    bool empty = false, large = false;
    for (DimId id : spec.dims) {
      empty = empty || *c_.dims.bounds(id).lo == 0;
      large = __builtin_mul_overflow(least, *c_.dims.bounds(id).lo, &least) || large;
    }
    if (empty || (!large && static_cast<int64_t>(source.index) >= least)) {
      refuse(subject, "its source " + input + " may have no element " + std::to_string(source.index) + ".");
    }
  }

  void read_constraints(const Json& all, std::vector<Constraint>& out) {
    for (const Json& j : all) {
      const std::string subject = "constraint " + std::to_string(out.size());
      Constraint constraint;
      constraint.lhs = index(field(j, "lhs", subject), "lhs", c_.dims.size(), subject);
      constraint.cmp = choice<Cmp>(string(j, "cmp", subject), {"eq", "ne", "lt", "le", "gt", "ge"}, "cmp", subject);
      constraint.rhs = index(field(j, "rhs", subject), "rhs", c_.dims.size(), subject);
      if (j.contains("sentence")) constraint.sentence = string(j, "sentence", subject);
      out.push_back(std::move(constraint));
    }
  }

  Contract& c_;
  const bool is_method_;
  std::unordered_set<std::string> symbol_names_;
};

class ProgramReader : private JsonReader {
 public:
  explicit ProgramReader(Program& program) : JsonReader(in), p_(program), contract_(program.contract, false) {}

  void read(const Json& j) {
    contract_.read(field(j, "contract", "program"));
    for (const Spec& spec : p_.contract.inputs) add_value({Value::Kind::input, spec.name, spec.dtype, spec.dims, ""}, "input");
    for (const Json& value : list(j, "values", "program")) read_value(value);
    defined_.resize(p_.values.size());
    produced_.resize(p_.values.size());
    for (size_t i = 0; i < p_.values.size(); ++i) defined_[i] = p_.values[i].kind != Value::Kind::temp;
    read_nodes(list(j, "nodes", "program"), p_.nodes, "node ", 0);
    for (size_t i = 0; i < p_.values.size(); ++i) {
      if (p_.values[i].kind == Value::Kind::temp && !produced_[i]) {
        refuse("value " + quote(p_.values[i].name), "no node produces it.");
      }
    }
    read_results(list(j, "results", "program"));
    if (j.contains("passes")) check_passes(list(j, "passes", "program"));
    if (j.contains("modules")) check_modules(list(j, "modules", "program"));
  }

 private:
  void add_value(Value value, const char* what) {
    const std::string subject = what + (" " + std::to_string(p_.values.size()));
    if (value.name.empty()) refuse(subject, "the name is empty.");
    if (!names_.insert(value.name).second) refuse(subject, "the name " + quote(value.name) + " is used twice.");
    if (p_.values.size() >= static_cast<size_t>(INT32_MAX)) refuse(subject, "there are too many values.");
    p_.values.push_back(std::move(value));
  }

  void read_value(const Json& j) {
    std::string subject = "value " + std::to_string(p_.values.size());
    Value value;
    value.name = string(j, "name", subject);
    subject += " " + quote(value.name);
    value.dtype = read_dtype(j, subject);
    if (value.dtype == DType::integer || value.dtype == DType::python) {
      refuse(subject, std::string("dtype ") + dtype_name(value.dtype) + " is only for inputs and outputs.");
    }
    value.dims = contract_.read_dims(j, value.dtype, subject);
    const std::string& kind = string(j, "kind", subject);
    value.kind = static_cast<Value::Kind>(1 + choice<int>(kind, {"const", "state", "temp"}, "kind", subject));
    if (j.contains("key")) value.key = string(j, "key", subject);
    const bool temp = value.kind == Value::Kind::temp;
    if (temp && !value.key.empty()) refuse(subject, "a temp has no key.");
    if (!temp && value.key.empty()) refuse(subject, "a " + kind + " needs a key.");
    for (DimId id : value.dims) {
      if (!temp && !p_.contract.dims.is_constant(id)) refuse(subject, "the dims of a " + kind + " have to be constant.");
    }
    if (is_quantised(value.dtype)) check_blocks(value, subject);
    add_value(std::move(value), "value");
  }

  void check_blocks(const Value& value, const std::string& subject) {
    const std::string name = dtype_name(value.dtype);
    if (value.kind == Value::Kind::temp) refuse(subject, "dtype " + name + " is only for a const or state.");
    const auto block = static_cast<int64_t>(dtype_block(value.dtype));
    if (value.dims.empty() || p_.contract.dims.node(value.dims.back()).value % block != 0) {
      refuse(subject, "its rows are not a multiple of " + std::to_string(block) + " elements, as " + name + " needs.");
    }
  }

  // Id of a value that is defined at this point.
  int32_t operand(const Json& j, const char* name, const std::string& subject) {
    const uint32_t id = index(j, name, p_.values.size(), subject);
    if (!defined_[id]) refuse(subject, quote(p_.values[id].name) + " is used before it is produced.");
    return static_cast<int32_t>(id);
  }

  void define(int32_t id) {
    defined_[id] = true;
    scope_.push_back(id);
  }

  void read_nodes(const Json& all, std::vector<Node>& out, const std::string& prefix, int depth) {
    for (const Json& j : all) {
      std::string subject = prefix + std::to_string(out.size());
      Node node;
      node.op = string(j, "op", subject);
      if (node.op.empty()) refuse(subject, "the op is empty.");
      subject += " " + quote(node.op);
      for (const Json& in : list(j, "ins", subject)) {
        const bool none = in.is_number_integer() && !in.is_number_unsigned() && in.get<int64_t>() == kNone;
        node.ins.push_back(none ? kNone : operand(in, "ins", subject));
      }
      if (j.contains("attrs")) read_attrs(j["attrs"], node, subject);
      if (j.contains("regions")) {
        for (const Json& region : list(j, "regions", subject)) read_region(region, node, subject, depth + 1);
      }
      for (const Json& id : list(j, "outs", subject)) read_out(id, node, subject);
      out.push_back(std::move(node));
    }
  }

  void read_out(const Json& j, Node& node, const std::string& subject) {
    const uint32_t id = index(j, "outs", p_.values.size(), subject);
    const Value& value = p_.values[id];
    if (value.kind != Value::Kind::temp) refuse(subject, "its out " + quote(value.name) + " is not a temp.");
    if (produced_[id]) refuse(subject, "its out " + quote(value.name) + " is produced twice.");
    produced_[id] = true;
    define(static_cast<int32_t>(id));
    node.outs.push_back(static_cast<int32_t>(id));
  }

  void read_attrs(const Json& all, Node& node, const std::string& subject) {
    if (!all.is_object()) wrong_type(subject, "attrs", "an object", all);
    const size_t dims = p_.contract.dims.size();
    for (const auto& [name, j] : all.items()) {
      Attr& attr = node.attrs[name];
      if (j.is_boolean()) {
        attr = j.get<bool>();
      } else if (j.is_number_integer()) {
        attr = static_cast<DimId>(index(j, name.c_str(), dims, subject));
      } else if (j.is_number_float()) {
        attr = j.get<double>();
      } else if (j.is_string()) {
        attr = j.get<std::string>();
      } else if (j.is_array()) {
        std::vector<DimId> ids;
        for (const Json& id : j) ids.push_back(index(id, name.c_str(), dims, subject));
        attr = std::move(ids);
      } else {
        wrong_type(subject, name.c_str(), "an attribute", j);
      }
    }
  }

  // A region can use values defined outside; its own values are local.
  void read_region(const Json& j, Node& node, const std::string& subject, int depth) {
    if (depth > kMaxRegionDepth) refuse(subject, "regions are nested deeper than " + std::to_string(kMaxRegionDepth) + ".");
    const std::string inner = subject + " region " + std::to_string(node.regions.size());
    const size_t mark = scope_.size();
    Region region;
    read_nodes(list(j, "nodes", inner), region.nodes, inner + " node ", depth);
    for (const Json& id : list(j, "results", inner)) region.results.push_back(operand(id, "results", inner));
    for (; scope_.size() > mark; scope_.pop_back()) defined_[scope_.back()] = false;
    node.regions.push_back(std::move(region));
  }

  void read_results(const Json& all) {
    const std::vector<Spec>& outputs = p_.contract.outputs;
    if (all.size() != outputs.size()) {
      refuse("program", std::to_string(all.size()) + " results for " + std::to_string(outputs.size()) + " outputs.");
    }
    for (size_t i = 0; i < all.size(); ++i) {
      const Spec& spec = outputs[i];
      const std::string subject = "result " + std::to_string(i);
      const bool none = as_integer(all[i], "results", subject) == kNone;
      if (none != (spec.dtype == DType::integer)) {
        refuse(subject, none ? "there is no value for output " + quote(spec.name) + "." : "an int output takes no value.");
      }
      p_.results.push_back(none ? kNone : operand(all[i], "results", subject));
      if (none) continue;
      const Value& value = p_.values[p_.results.back()];
      if (value.dtype != spec.dtype || value.dims != spec.dims) {
        refuse(subject, quote(value.name) + " differs in dtype or dims from output " + quote(spec.name) + ".");
      }
    }
  }

  // Record of the passes that were applied: informational, verified but not stored.
  void check_passes(const Json& all) {
    for (const Json& j : all) {
      const std::string& name = string(j, "name", "pass");
      const std::string subject = "pass " + quote(name);
      if (!is_identifier(name) || integer(j, "before", subject) < 0 || integer(j, "after", subject) < 0)
        refuse(subject, "needs a name and two counts.");
    }
  }

  // Likewise: the model's modules that values come from.
  void check_modules(const Json& all) {
    for (const Json& j : all) {
      const std::string& path = string(j, "path", "module");
      const std::string subject = "module " + quote(path);
      bool known = !path.empty() && path.find_first_of(" \t\n\v\f\r") == std::string::npos;
      for (const Json& name : list(j, "values", subject))
        known = known && name.is_string() && names_.count(name.get<std::string>()) > 0;
      if (!known) refuse(subject, "needs a path, and names of values.");
    }
  }

  Program& p_;
  ContractReader contract_;
  std::unordered_set<std::string> names_;
  std::vector<char> defined_, produced_;
  std::vector<int32_t> scope_;  // defined values in order, undone at the end of a region
};

}  // namespace

const char* dtype_name(DType dtype) { return kDTypes[static_cast<size_t>(dtype)].name; }
size_t dtype_bytes(DType dtype) { return kDTypes[static_cast<size_t>(dtype)].bytes; }
size_t dtype_block(DType dtype) { return kDTypes[static_cast<size_t>(dtype)].block; }
size_t dtype_align(DType dtype) { return is_quantised(dtype) ? 4 : dtype_bytes(dtype); }

bool find_dtype(std::string_view name, DType* dtype) {
  for (size_t i = 0; i < std::size(kDTypes); ++i) {
    if (name != kDTypes[i].name) continue;
    *dtype = static_cast<DType>(i);
    return true;
  }
  return false;
}

Contract Contract::parse(std::string_view json) {
  const Json j = in.parse(json, "program");
  check_version(j);
  Contract contract;
  ContractReader(contract, true).read(in.field(j, "contract", "program"));
  return contract;
}

Program Program::parse(std::string_view json) {
  const Json j = in.parse(json, "program");
  check_version(j);
  Program program;
  ProgramReader(program).read(j);
  return program;
}

std::string Program::describe(const Node& node) const {
  std::string out = node.op;
  if (node.outs.empty()) return out;
  const Value& value = values[node.outs[0]];
  out += " " + quote(value.name) + " [";
  for (size_t d = 0; d < value.dims.size(); ++d) out += (d > 0 ? ", " : "") + contract.text(value.dims[d]);
  return out + "] " + dtype_name(value.dtype);
}

}  // namespace keepdim
