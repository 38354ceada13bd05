// The table of all rows, and the static part of their rules: checked when a program is loaded. Shapes are checked by
// each row on the evaluated sizes, before anything is added to the graph.
#include "ops.h"

#include <algorithm>
#include <cstring>
#include <string_view>
#include <unordered_map>

namespace keepdim::ggml {
namespace {

struct Check {
  const Program& program;
  const Node& node;
  const Row& row;

  [[noreturn]] void refuse(const std::string& fact) const {
    const std::string name = node.outs.empty() ? "" : " '" + program.values[node.outs[0]].name + "'";
    fail(Code::invalid_program, "[load] " + node.op + name + ": " + fact);
  }

  void arity() const {
    const auto count = static_cast<int>(node.ins.size());
    const Rule& rule = row.rule;
    if (count < rule.min_ins || (rule.max_ins >= 0 && count > rule.max_ins))
      refuse("takes " + std::to_string(rule.min_ins) + (rule.max_ins == rule.min_ins ? "" : " or more") +
             " operands, got " + std::to_string(count) + ".");
    if (node.outs.size() != 1) refuse("has one result, got " + std::to_string(node.outs.size()) + ".");
    if (!node.regions.empty()) refuse("takes no regions.");
    for (int i = 0; i < count; ++i)
      if (node.ins[i] == kNone && !(i < 8 && rule.optional >> i & 1))
        refuse("operand " + std::to_string(i) + " is missing.");
  }

  DType tensor(int32_t id) const {
    const Value& value = program.values[id];
    if (dtype_bytes(value.dtype) == 0) refuse("'" + value.name + "' is no tensor.");
    if (value.dims.size() > kMaxRank)
      refuse("'" + value.name + "' has more than " + std::to_string(kMaxRank) + " dims.");
    return value.dtype;
  }

  // The dtype that T stands for: the result's, or the first operand's that has it.
  DType common() const {
    if (row.rule.type_of_result() != 'T')
      for (size_t i = 0; i < node.ins.size(); ++i)
        if (node.ins[i] != kNone && row.rule.type_of(i) == 'T') return tensor(node.ins[i]);
    return tensor(node.outs[0]);
  }

  void dtype(char letter, int32_t id, const std::string& subject) const {
    const DType has = tensor(id), same = common();
    const auto need = [&](bool fine, const std::string& expected) {
      if (!fine) refuse(subject + " is " + dtype_name(has) + ", expected " + expected + ".");
    };
    if (letter == 'w' && stored(has) && bit(same) & kHalfOrSingle) return;
    switch (letter) {
      case 'b': return need(has == DType::boolean, "bool");
      case 'i': return need(has == DType::i64 || has == DType::i32, "i64 or i32");
      case 'l': return need(has == DType::i64, "i64");
      case 'S': return need(has == DType::f32 || (stored(has) && stored(has)->write), "f32, f16, bf16 or q8_0");
      case 'm': return need(has == same || has == DType::boolean, std::string(dtype_name(same)) + " or bool");
      case 'w':
      case 'T': need(has == same, dtype_name(same)); [[fallthrough]];
      default:
        if (!(row.rule.allowed & bit(has))) refuse(std::string("has no form for ") + dtype_name(has) + ".");
    }
  }

  void dtypes() const {
    dtype(row.rule.type_of_result(), node.outs[0], "the result");
    for (size_t i = 0; i < node.ins.size(); ++i)
      if (node.ins[i] != kNone) dtype(row.rule.type_of(i), node.ins[i], "operand " + std::to_string(i));
  }

  // Integers take whole numbers only; what torch would promote has been cast before.
  void number(const AttrRule& rule, const Attr& value) const {
    const DType out = common();
    const bool real = bit(out) & kFloats;
    if (const auto* text = std::get_if<std::string>(&value)) {
      if (*text != "inf" && *text != "-inf" && *text != "nan") refuse(std::string(rule.name) + " is no number.");
      if (!real && out != DType::boolean)
        refuse(std::string(rule.name) + " = " + *text + " is no " + dtype_name(out) + ".");
    } else if (const auto* x = std::get_if<double>(&value)) {
      if (!real && out != DType::boolean && static_cast<double>(truncate(*x)) != *x)
        refuse(std::string(rule.name) + " = " + std::to_string(*x) + " is no " + dtype_name(out) + ".");
    } else if (std::holds_alternative<std::vector<DimId>>(value)) {
      refuse(std::string(rule.name) + " is a list, expected a number.");
    }
  }

  void attrs() const {
    size_t found = 0;
    for (const AttrRule& rule : row.rule.attrs) {
      const auto it = node.attrs.find(rule.name);
      if (it == node.attrs.end()) {
        if (rule.required) refuse(std::string("attribute '") + rule.name + "' is missing.");
        continue;
      }
      ++found;
      const Attr& value = it->second;
      if (rule.kind == AttrKind::number) number(rule, value);
      else if ((rule.kind == AttrKind::size && !std::holds_alternative<DimId>(value)) ||
               (rule.kind == AttrKind::real && !std::holds_alternative<double>(value)) ||
               (rule.kind == AttrKind::flag && !std::holds_alternative<bool>(value)) ||
               (rule.kind == AttrKind::sizes && !std::holds_alternative<std::vector<DimId>>(value)) ||
               (rule.kind == AttrKind::text && !std::holds_alternative<std::string>(value)))
        refuse(std::string("attribute '") + rule.name + "' has the wrong type.");
    }
    if (found == node.attrs.size()) return;
    for (const auto& [name, value] : node.attrs) {
      bool known = false;
      for (const AttrRule& rule : row.rule.attrs) known |= name == rule.name;
      if (!known) refuse("attribute '" + name + "' is not known.");
    }
  }

  void all() const {
    arity();
    dtypes();
    attrs();
    // A binary op has its second operand as a tensor or as a number, and not both.
    const bool binary = row.rule.attrs.size() && std::string_view(row.rule.attrs.begin()->name) == "other";
    if (binary && (node.ins.size() == 2) == (node.attrs.count("other") == 1))
      refuse("takes either two operands or one and 'other'.");
    if (node.op == "clamp" && node.attrs.empty()) refuse("takes min, max or both.");
  }
};

}  // namespace

char Rule::type_of(size_t operand) const {
  const size_t count = std::strchr(types, '>') - types;
  return types[std::min(operand, count - 1)];
}

char Rule::type_of_result() const { return std::strchr(types, '>')[1]; }

namespace {

const std::vector<Row>& all_rows() {
  static const std::vector<Row> rows = [] {
    std::vector<Row> all;
    for (const Table& table : {map_rows(), product_rows(), reduce_rows(), shape_rows(), index_rows(), window_rows(),
                               rope_rows(), sample_rows()})
      all.insert(all.end(), table.rows, table.rows + table.count);
    return all;
  }();
  return rows;
}

}  // namespace

const Row* find_row(const std::string& op) {
  static const auto index = [] {
    std::unordered_map<std::string, const Row*> map;
    for (const Row& row : all_rows()) {
      if (row.rule.attrs.size() > std::size(Resolved{}.attrs))
        fail(Code::internal, std::string("[load] ggml: the row of ") + row.name + " has too many attributes.");
      if (!map.emplace(row.name, &row).second)
        fail(Code::internal, std::string("[load] ggml: two rows of the name ") + row.name + ".");
    }
    return map;
  }();
  const auto it = index.find(op);
  return it == index.end() ? nullptr : it->second;
}

std::vector<std::string> row_names() {
  std::vector<std::string> names;
  for (const Row& row : all_rows()) names.emplace_back(row.name);
  return names;
}

bool is_data(const std::string& op, const std::string& attr) {
  const Row* row = find_row(op);
  if (!row) return false;
  return std::any_of(row->rule.attrs.begin(), row->rule.attrs.end(),
                     [&](const AttrRule& rule) { return rule.data && attr == rule.name; });
}

namespace {

void check_nodes(const Program& program, const std::vector<Node>& nodes);

// A choice by a size: the first region where `when` is not negative, else the second.
void check_cond(const Program& program, const Node& node) {
  const auto refuse = [&](const std::string& fact) {
    fail(Code::invalid_program, "[load] " + program.describe(node) + ": " + fact);
  };
  const auto when = node.attrs.find("when");
  if (when == node.attrs.end() || node.attrs.size() != 1 || !std::holds_alternative<DimId>(when->second))
    refuse("has one attribute, the size 'when'.");
  if (!node.ins.empty()) refuse("takes no operands; its regions read what they need.");
  if (node.regions.size() != 2) refuse("has two regions, got " + std::to_string(node.regions.size()) + ".");
  for (const Region& region : node.regions) {
    if (region.results.size() != node.outs.size())
      refuse("a region gives " + std::to_string(region.results.size()) + " results for " + std::to_string(node.outs.size()) + ".");
    for (size_t i = 0; i < node.outs.size(); ++i) {
      const Value &made = program.values[region.results[i]], &out = program.values[node.outs[i]];
      if (made.dtype != out.dtype || made.dims != out.dims || made.dims.size() > kMaxRank)
        refuse("a region's '" + made.name + "' does not fit the result '" + out.name + "'.");
    }
    check_nodes(program, region.nodes);
  }
}

void check_nodes(const Program& program, const std::vector<Node>& nodes) {
  for (const Node& node : nodes) {
    if (is_cond(node)) {
      check_cond(program, node);
      continue;
    }
    const Row* row = find_row(node.op);
    if (!row) fail(Code::not_supported, "[load] " + program.describe(node) + ": ggml has no row for this op.");
    Check{program, node, *row}.all();
  }
}

}  // namespace

bool is_cond(const Node& node) { return node.op == "cond"; }

void check(const Program& program) {
  check_nodes(program, program.nodes);
  for (int32_t id : program.results)
    if (id != kNone && program.values[id].dims.size() > kMaxRank)
      fail(Code::not_supported, "[load] result '" + program.values[id].name + "': has more than " +
                                    std::to_string(kMaxRank) + " dims.");
}

std::vector<Resolved> resolve(const std::vector<Node>& nodes) {
  std::vector<Resolved> out;
  out.reserve(nodes.size());
  for (const Node& node : nodes) {
    Resolved resolved{find_row(node.op), &node, {}, nullptr, {}};
    size_t i = 0;
    if (resolved.row) {
      for (const AttrRule& rule : resolved.row->rule.attrs) {
        const auto it = node.attrs.find(rule.name);
        resolved.attrs[i++] = it == node.attrs.end() ? nullptr : &it->second;
      }
    }
    for (const Region& region : node.regions) resolved.regions.push_back(resolve(region.nodes));
    out.push_back(std::move(resolved));
  }
  return out;
}

}  // namespace keepdim::ggml
