// All op builders by name.
#include "ggml/ops/ops.h"

#include <unordered_map>

namespace keepdim::ggml {
namespace {

const std::vector<OpBuilder>& all_builders() {
  static const std::vector<OpBuilder> builders = [] {
    std::vector<OpBuilder> all;
    for (const OpTable& table :
         {elementwise_ops(), matmul_ops(), reduce_ops(), shape_ops(), gather_scatter_ops(), conv_pool_ops(), rope_ops()})
      all.insert(all.end(), table.ops, table.ops + table.count);
    return all;
  }();
  return builders;
}

}  // namespace

const OpBuilder* find_builder(const std::string& op) {
  static const auto index = [] {
    std::unordered_map<std::string, const OpBuilder*> map;
    for (const OpBuilder& op : all_builders()) {
      const OpRule* rule = find_rule(op.name);
      if (!rule || rule->attrs.size() > std::size(ResolvedNode{}.attrs))
        fail(Code::internal, std::string("[load] ggml: the op ") + op.name + " has no rule, or too many attributes.");
      if (!map.emplace(op.name, &op).second)
        fail(Code::internal, std::string("[load] ggml: two builders for the op ") + op.name + ".");
    }
    return map;
  }();
  const auto it = index.find(op);
  return it == index.end() ? nullptr : it->second;
}

std::vector<std::string> op_names() {
  std::vector<std::string> names;
  for (const OpBuilder& op : all_builders()) names.emplace_back(op.name);
  return names;
}

void check(const Program& program) {
  check_program(program, "ggml", [](const std::string& op) { return find_builder(op) != nullptr; });
}

std::vector<ResolvedNode> resolve(const std::vector<Node>& nodes) {
  std::vector<ResolvedNode> out;
  out.reserve(nodes.size());
  for (const Node& node : nodes) {
    ResolvedNode resolved{find_builder(node.op), find_rule(node.op), &node, {}, nullptr, {}};
    size_t i = 0;
    if (resolved.builder) {
      for (const AttrRule& attr : resolved.rule->attrs) {
        const auto it = node.attrs.find(attr.name);
        resolved.attrs[i++] = it == node.attrs.end() ? nullptr : &it->second;
      }
    }
    for (const Region& region : node.regions) resolved.regions.push_back(resolve(region.nodes));
    out.push_back(std::move(resolved));
  }
  return out;
}

}  // namespace keepdim::ggml
