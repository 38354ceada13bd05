// The table of all rows.
#include "ops.h"

#include <unordered_map>

namespace keepdim::ggml {
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
      const Rule* rule = find_rule(row.name);
      if (!rule || rule->attrs.size() > std::size(Resolved{}.attrs))
        fail(Code::internal, std::string("[load] ggml: the row of ") + row.name + " has no rule, or too many attributes.");
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

void check(const Program& program) {
  check_program(program, "ggml", [](const std::string& op) { return find_row(op) != nullptr; });
}

std::vector<Resolved> resolve(const std::vector<Node>& nodes) {
  std::vector<Resolved> out;
  out.reserve(nodes.size());
  for (const Node& node : nodes) {
    Resolved resolved{find_row(node.op), find_rule(node.op), &node, {}, nullptr, {}};
    size_t i = 0;
    if (resolved.row) {
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
