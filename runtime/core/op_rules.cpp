#include "core/op_rules.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string_view>
#include <unordered_map>

namespace keepdim {
namespace {

// ---- rules

using Attrs = std::initializer_list<AttrRule>;
constexpr AttrRule kDim{"dim", AttrKind::size, true};
constexpr Attrs kOther = {{"other", AttrKind::number, false, true}};
constexpr Attrs kDimOnly = {kDim};
constexpr Attrs kDims = {{"dims", AttrKind::sizes, true}};
constexpr Attrs kApproximate = {{"approximate", AttrKind::text, false}};
constexpr Attrs kBounds = {{"min", AttrKind::number, false, true}, {"max", AttrKind::number, false, true}};
constexpr Attrs kSlope = {{"negative_slope", AttrKind::number, true}};
constexpr Attrs kAlpha = {{"alpha", AttrKind::number, true}};
constexpr Attrs kSoftplus = {{"beta", AttrKind::number, true}, {"threshold", AttrKind::number, true}};
constexpr Attrs kSlice = {kDim, {"start", AttrKind::size, true}, {"step", AttrKind::size, true}};
constexpr Attrs kSelect = {kDim, {"index", AttrKind::size, true}};
constexpr Attrs kDiagonal = {{"offset", AttrKind::size, true}, {"dims", AttrKind::sizes, true}};
constexpr Attrs kUnfold = {kDim, {"step", AttrKind::size, true}};
constexpr Attrs kStrided = {{"strides", AttrKind::sizes, true}, {"offset", AttrKind::size, true}};
constexpr Attrs kTriangle = {{"diagonal", AttrKind::size, true}};
constexpr Attrs kArange = {{"start", AttrKind::number, true, true}, {"step", AttrKind::number, true}};
constexpr Attrs kValue = {{"value", AttrKind::number, true, true}};
constexpr Attrs kNorm = {{"eps", AttrKind::number, true}, {"axes", AttrKind::size, true}};
constexpr Attrs kVar = {{"dims", AttrKind::sizes, true}, {"correction", AttrKind::number, true}};
constexpr Attrs kSort = {kDim, {"descending", AttrKind::flag, false}};
constexpr Attrs kReduce = {kDim, {"reduce", AttrKind::text, true}};
constexpr Attrs kLinear = {{"activation", AttrKind::text, false}, {"precision", AttrKind::text, false}};
constexpr Attrs kReverse = {{"reverse", AttrKind::flag, false}};
constexpr Attrs kCached = {{"scale", AttrKind::number, true}, {"window", AttrKind::size, false}};
constexpr Attrs kAttention = {
    {"scale", AttrKind::number, false}, {"causal", AttrKind::flag, false}, {"safe", AttrKind::flag, false}};
constexpr Attrs kConv = {{"stride", AttrKind::sizes, true},    {"padding", AttrKind::sizes, true},
                         {"dilation", AttrKind::sizes, true},  {"groups", AttrKind::size, true},
                         {"transposed", AttrKind::flag, true}, {"activation", AttrKind::text, false}};
constexpr Attrs kMaxPool = {{"kernel", AttrKind::sizes, true},
                            {"stride", AttrKind::sizes, true},
                            {"padding", AttrKind::sizes, true},
                            {"dilation", AttrKind::sizes, true}};
constexpr Attrs kAvgPool = {{"kernel", AttrKind::sizes, true},
                            {"stride", AttrKind::sizes, true},
                            {"padding", AttrKind::sizes, true},
                            {"count_include_pad", AttrKind::flag, true},
                            {"divisor", AttrKind::size, false}};
constexpr Attrs kPad = {{"mode", AttrKind::text, true}, {"before", AttrKind::sizes, true}, {"value", AttrKind::number, true}};
constexpr Attrs kNearest = {{"exact", AttrKind::flag, true},
                            {"scale_0", AttrKind::real, false},
                            {"scale_1", AttrKind::real, false},
                            {"scale_2", AttrKind::real, false}};
constexpr Attrs kResample = {{"mode", AttrKind::text, true},
                             {"align_corners", AttrKind::flag, true},
                             {"scale_0", AttrKind::real, false},
                             {"scale_1", AttrKind::real, false},
                             {"scale_2", AttrKind::real, false}};
constexpr Attrs kGroupNorm = {{"eps", AttrKind::number, true}, {"groups", AttrKind::size, true}};
constexpr Attrs kBatchNorm = {{"eps", AttrKind::number, true}};
constexpr Attrs kAxes = {{"axes", AttrKind::size, true}};
constexpr Attrs kGrid = {
    {"mode", AttrKind::text, true}, {"padding_mode", AttrKind::text, true}, {"align_corners", AttrKind::flag, true}};
constexpr Attrs kFold = {{"kernel", AttrKind::sizes, true},
                         {"stride", AttrKind::sizes, true},
                         {"padding", AttrKind::sizes, true},
                         {"dilation", AttrKind::sizes, true}};
constexpr Attrs kDistance = {{"p", AttrKind::number, true}};
constexpr Attrs kBag = {
    {"mode", AttrKind::text, true}, {"include_last_offset", AttrKind::flag, true}, {"padding_idx", AttrKind::size, false}};

constexpr TypeMask kReal = kF32 | bit(DType::f64);
constexpr TypeMask kStates = kFloat32Or16 | bit(DType::q8_0);

constexpr OpRule unary(TypeMask types, Attrs attrs = {}, bool widen = false) { return {1, 1, 0, "T>T", types, attrs, widen}; }
constexpr OpRule binary(TypeMask types) { return {1, 2, 0, "TT>T", types, kOther}; }
constexpr OpRule comparison(TypeMask types) { return {1, 2, 0, "TT>b", types, kOther}; }
constexpr OpRule source(TypeMask types, Attrs attrs) { return {0, 0, 0, ">T", types, attrs}; }

struct Op {
  const char* name;
  OpRule rule;
};
constexpr Op kOps[] = {
    // elementwise
    {"neg", unary(kAll)},
    {"abs", unary(kAll)},
    {"sign", unary(kAll)},
    {"relu", unary(kAll)},
    {"reciprocal", unary(kFloats)},
    {"ceil", unary(kFloats)},
    {"floor", unary(kFloats)},
    {"round", unary(kFloats)},
    {"trunc", unary(kFloats)},
    {"sqrt", unary(kFloats)},
    {"rsqrt", unary(kFloats)},
    {"exp", unary(kFloats)},
    {"exp2", unary(kFloats)},
    {"expm1", unary(kFloats)},
    {"log", unary(kFloats)},
    {"log1p", unary(kFloats)},
    {"log2", unary(kFloats)},
    {"log10", unary(kFloats)},
    {"sin", unary(kFloats)},
    {"cos", unary(kFloats)},
    {"tan", unary(kFloats)},
    {"asin", unary(kFloats)},
    {"acos", unary(kFloats)},
    {"atan", unary(kFloats)},
    {"sinh", unary(kFloats)},
    {"cosh", unary(kFloats)},
    {"asinh", unary(kFloats)},
    {"acosh", unary(kFloats)},
    {"atanh", unary(kFloats)},
    {"tanh", unary(kFloats)},
    {"erf", unary(kFloats)},
    {"erfc", unary(kFloats)},
    {"sigmoid", unary(kFloats)},
    {"silu", unary(kFloats)},
    {"hardsigmoid", unary(kFloats)},
    {"hardswish", unary(kFloats)},
    {"gelu", unary(kFloats, kApproximate)},
    {"leaky_relu", unary(kFloats, kSlope)},
    {"elu", unary(kFloats, kAlpha)},
    {"softplus", unary(kFloats, kSoftplus)},
    {"clamp", unary(kAll, kBounds)},
    {"add", binary(kAll)},
    {"sub", binary(kAll)},
    {"mul", binary(kAll)},
    {"div", binary(kFloats)},
    {"div_floor", binary(kAll)},
    {"div_trunc", binary(kAll)},
    {"fmod", binary(kAll)},
    {"remainder", binary(kAll)},
    {"pow", binary(kAll)},
    {"atan2", binary(kFloats)},
    {"maximum", binary(kAll)},
    {"minimum", binary(kAll)},
    // Not for 16-bit floats: the fused op rounds once where silu and mul round twice, so the result would differ.
    {"swiglu", {2, 2, 0, "TT>T", kReal, {}}},
    {"bitwise_and", binary(kIntegers)},
    {"bitwise_or", binary(kIntegers)},
    {"bitwise_xor", binary(kIntegers)},
    {"bitwise_left_shift", binary(kIntegers)},
    {"bitwise_right_shift", binary(kIntegers)},
    {"eq", comparison(kAll)},
    {"ne", comparison(kAll)},
    {"lt", comparison(kAll)},
    {"le", comparison(kAll)},
    {"gt", comparison(kAll)},
    {"ge", comparison(kAll)},
    {"where", {3, 3, 0, "bTT>T", kAll, {}}},
    // shape ops, copies, fills
    {"cast", {1, 1, 0, "*>*", kAll, {}}},
    {"reshape", unary(kAll)},
    {"permute", unary(kAll, kDims)},
    {"expand", unary(kAll)},
    {"slice", unary(kAll, kSlice)},
    {"slice_scatter", {2, 2, 0, "TT>T", kAll, kSlice}},
    {"select", unary(kAll, kSelect)},
    {"diagonal", unary(kAll, kDiagonal)},
    {"unfold", unary(kAll, kUnfold)},
    {"as_strided", unary(kAll, kStrided)},
    {"flip", unary(kAll, kDims)},
    {"tril", unary(kAll, kTriangle)},
    {"triu", unary(kAll, kTriangle)},
    {"cat", {1, -1, 0, "T>T", kAll, kDimOnly}},
    {"arange", source(kAll, kArange)},
    {"full", source(kAll, kValue)},
    // reductions and row-wise ops
    {"sum", unary(kAll, kDims, true)},
    {"mean", unary(kFloats, kDims, true)},
    {"prod", unary(kAll, kDims, true)},
    {"amax", unary(kAll, kDims, true)},
    {"amin", unary(kAll, kDims, true)},
    {"any", unary(bit(DType::boolean), kDims)},
    {"all", unary(bit(DType::boolean), kDims)},
    {"var", unary(kFloats, kVar, true)},
    {"argmax", {1, 1, 0, "T>l", kAll, kDims, true}},
    {"argmin", {1, 1, 0, "T>l", kAll, kDims, true}},
    {"softmax", unary(kFloats, kDimOnly, true)},
    {"log_softmax", unary(kFloats, kDimOnly, true)},
    {"cumsum", unary(kAll, kDimOnly, true)},
    {"cumprod", unary(kAll, kDimOnly, true)},
    {"layer_norm", {1, 3, 6, "TTT>T", kFloats, kNorm, true}},
    {"rms_norm", {1, 2, 2, "TT>T", kFloats, kNorm, true}},
    {"argsort", {1, 1, 0, "T>l", kAll, kSort, true}},
    // gather and scatter
    {"embedding", {2, 2, 0, "wi>T", kAll, {}}},
    {"flatnonzero", {1, 1, 0, "b>l", bit(DType::boolean), {}}},
    {"index_select", {2, 2, 0, "Ti>T", kAll, kDimOnly}},
    {"index", {2, -1, 0, "Ti>T", kAll, kDims}},
    {"gather", {2, 2, 0, "Ti>T", kAll, kDimOnly}},
    {"index_put", {3, -1, 0, "TTi>T", kAll, kDims}},
    {"index_add", {3, -1, 0, "TTi>T", kAll, kDims, true}},
    {"scatter", {3, 3, 0, "TiT>T", kAll, kDimOnly}},
    {"scatter_reduce", {3, 3, 0, "TiT>T", kAll, kReduce, true}},
    {"rope", {3, 3, 0, "TTT>T", kReal, {}}},
    // matrix products, attention, recurrent layers
    {"matmul", {2, 2, 0, "TT>T", kNumbers, {}}},
    {"linear", {2, 4, 12, "TwTl>T", kNumbers, kLinear}},
    {"lstm_scan", {5, 5, 4, "TTTTT>T", kFloat32Or16, kReverse, true}},
    {"gru_scan", {4, 4, 4, "TTTT>T", kFloat32Or16, kReverse, true}},
    {"rnn_tanh_scan", {4, 4, 4, "TTTT>T", kFloat32Or16, kReverse, true}},
    {"rnn_relu_scan", {4, 4, 4, "TTTT>T", kFloat32Or16, kReverse, true}},
    {"cached_attention", {6, 8, 0, "TTTlSST>T", kF32, kCached}},
    {"sdpa", {3, 5, 24, "TTTml>T", kFloat32Or16, kAttention, true}},
    // images
    {"conv", {2, 4, 12, "TTTT>T", kNumbers, kConv, true}},
    {"max_pool", unary(kNumbers, kMaxPool, true)},
    {"max_pool_index", {1, 1, 0, "T>l", kNumbers, kMaxPool, true}},
    {"avg_pool", unary(kFloats, kAvgPool, true)},
    {"adaptive_max_pool", unary(kNumbers, kAxes, true)},
    {"adaptive_max_pool_index", {1, 1, 0, "T>l", kNumbers, kAxes, true}},
    {"adaptive_avg_pool", unary(kFloats, kAxes, true)},
    {"pad", unary(kAll, kPad)},
    {"nearest", unary(kAll, kNearest)},
    {"resample", unary(kFloat32Or16, kResample, true)},
    {"group_norm", {1, 3, 6, "TTT>T", kFloats, kGroupNorm, true}},
    {"batch_norm", {5, 5, 6, "TTTTT>T", kFloats, kBatchNorm, true}},
    // grid_sample, fold, distances, embedding_bag
    {"grid_sample", {2, 2, 0, "TT>T", kFloats, kGrid, true}},
    {"fold", unary(kFloats, kFold, true)},
    {"cdist", {2, 2, 0, "TT>T", kReal, kDistance}},
    {"pdist", unary(kReal, kDistance)},
    {"embedding_bag", {3, 4, 8, "TiiT>T", kFloats, kBag}},
};

// ---- checks

bool is_quantised_or_16bit(DType dtype) { return is_quantised(dtype) || dtype == DType::f16 || dtype == DType::bf16; }

struct Check {
  const Program& program;
  const Node& node;
  const OpRule& rule;

  [[noreturn]] void refuse(const std::string& fact) const {
    const std::string name = node.outs.empty() ? "" : " '" + program.values[node.outs[0]].name + "'";
    fail(Code::invalid_program, "[load] " + node.op + name + ": " + fact);
  }

  void arity() const {
    const auto count = static_cast<int>(node.ins.size());
    if (count < rule.min_ins || (rule.max_ins >= 0 && count > rule.max_ins))
      refuse("takes " + std::to_string(rule.min_ins) + (rule.max_ins == rule.min_ins ? "" : " or more") + " operands, got " +
             std::to_string(count) + ".");
    if (node.outs.size() != 1) refuse("has one result, got " + std::to_string(node.outs.size()) + ".");
    if (!node.regions.empty()) refuse("takes no regions.");
    for (int i = 0; i < count; ++i)
      if (node.ins[i] == kNone && !(i < 8 && rule.optional >> i & 1)) refuse("operand " + std::to_string(i) + " is missing.");
  }

  DType tensor(int32_t id) const {
    const Value& value = program.values[id];
    if (dtype_bytes(value.dtype) == 0) refuse("'" + value.name + "' is not a tensor.");
    if (value.dims.size() > kMaxRank) refuse("'" + value.name + "' has more than " + std::to_string(kMaxRank) + " dims.");
    return value.dtype;
  }

  // The dtype of T: that of the result, or of the first operand of type T.
  DType common_dtype() const {
    if (rule.type_of_result() != 'T')
      for (size_t i = 0; i < node.ins.size(); ++i)
        if (node.ins[i] != kNone && rule.type_of(i) == 'T') return tensor(node.ins[i]);
    return tensor(node.outs[0]);
  }

  void dtype(char letter, int32_t id, const std::string& subject) const {
    const DType actual = tensor(id), expected_type = common_dtype();
    const auto require = [&](bool valid, const std::string& expected) {
      if (!valid) refuse(subject + " is " + dtype_name(actual) + ", expected " + expected + ".");
    };
    if (letter == 'w' && is_quantised_or_16bit(actual) && bit(expected_type) & kFloat32Or16) return;
    switch (letter) {
      case 'b': return require(actual == DType::boolean, "bool");
      case 'i': return require(actual == DType::i64 || actual == DType::i32, "i64 or i32");
      case 'l': return require(actual == DType::i64, "i64");
      case 'S': return require(kStates & bit(actual), "f32, f16, bf16 or q8_0");
      case 'm':
        return require(actual == expected_type || actual == DType::boolean, std::string(dtype_name(expected_type)) + " or bool");
      case 'w':
      case 'T': require(actual == expected_type, dtype_name(expected_type)); [[fallthrough]];
      default:
        if (!(rule.allowed & bit(actual))) refuse(std::string("does not support ") + dtype_name(actual) + ".");
    }
  }

  void dtypes() const {
    dtype(rule.type_of_result(), node.outs[0], "the result");
    for (size_t i = 0; i < node.ins.size(); ++i)
      if (node.ins[i] != kNone) dtype(rule.type_of(i), node.ins[i], "operand " + std::to_string(i));
  }

  // Integer dtypes take integral values only; operands that torch would promote have been cast before.
  void number(const AttrRule& attr, const Attr& value) const {
    const DType out = common_dtype();
    const bool real = bit(out) & kFloats;
    if (const auto* text = std::get_if<std::string>(&value)) {
      if (*text != "inf" && *text != "-inf" && *text != "nan") refuse(std::string(attr.name) + " is not a number.");
      if (!real && out != DType::boolean)
        refuse(std::string(attr.name) + " = " + *text + " is not a value of " + dtype_name(out) + ".");
    } else if (const auto* x = std::get_if<double>(&value)) {
      if (!real && out != DType::boolean && static_cast<double>(truncate(*x)) != *x)
        refuse(std::string(attr.name) + " = " + std::to_string(*x) + " is not a value of " + dtype_name(out) + ".");
    } else if (std::holds_alternative<std::vector<DimId>>(value)) {
      refuse(std::string(attr.name) + " is a list, expected a number.");
    }
  }

  void attrs() const {
    size_t found = 0;
    for (const AttrRule& attr : rule.attrs) {
      const auto it = node.attrs.find(attr.name);
      if (it == node.attrs.end()) {
        if (attr.required) refuse(std::string("attribute '") + attr.name + "' is missing.");
        continue;
      }
      ++found;
      const Attr& value = it->second;
      if (attr.kind == AttrKind::number)
        number(attr, value);
      else if ((attr.kind == AttrKind::size && !std::holds_alternative<DimId>(value)) ||
               (attr.kind == AttrKind::real && !std::holds_alternative<double>(value)) ||
               (attr.kind == AttrKind::flag && !std::holds_alternative<bool>(value)) ||
               (attr.kind == AttrKind::sizes && !std::holds_alternative<std::vector<DimId>>(value)) ||
               (attr.kind == AttrKind::text && !std::holds_alternative<std::string>(value)))
        refuse(std::string("attribute '") + attr.name + "' has the wrong type.");
    }
    if (found == node.attrs.size()) return;
    for (const auto& [name, value] : node.attrs) {
      bool known = false;
      for (const AttrRule& attr : rule.attrs) known |= name == attr.name;
      if (!known) refuse("attribute '" + name + "' is not known.");
    }
  }

  void all() const {
    arity();
    dtypes();
    attrs();
    // A binary op takes its second operand either as a tensor or as a scalar.
    const bool binary = rule.attrs.size() && std::string_view(rule.attrs.begin()->name) == "other";
    if (binary && (node.ins.size() == 2) == (node.attrs.count("other") == 1))
      refuse("takes either two operands or one and 'other'.");
    if (node.op == "clamp" && node.attrs.empty()) refuse("takes min, max or both.");
  }
};

struct EngineOps {
  const char* engine;
  bool (*has)(const std::string& op);
};
void check_nodes(const Program& program, const std::vector<Node>& nodes, const EngineOps& ops);

// cond on a size: takes the first region if `when` >= 0, else the second.
void check_cond(const Program& program, const Node& node, const EngineOps& ops) {
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
      refuse("a region has " + std::to_string(region.results.size()) + " results, expected " + std::to_string(node.outs.size()) +
             ".");
    for (size_t i = 0; i < node.outs.size(); ++i) {
      const Value &result = program.values[region.results[i]], &out = program.values[node.outs[i]];
      if (result.dtype != out.dtype || result.dims != out.dims || result.dims.size() > kMaxRank)
        refuse("a region's '" + result.name + "' does not fit the result '" + out.name + "'.");
    }
    check_nodes(program, region.nodes, ops);
  }
}

void check_nodes(const Program& program, const std::vector<Node>& nodes, const EngineOps& ops) {
  for (const Node& node : nodes) {
    if (is_cond(node)) {
      check_cond(program, node, ops);
      continue;
    }
    const OpRule* rule = find_rule(node.op);
    if (!rule || !ops.has(node.op))
      fail(Code::not_supported, "[load] " + program.describe(node) + ": " + ops.engine + " does not support this op.");
    Check{program, node, *rule}.all();
  }
}

}  // namespace

char OpRule::type_of(size_t operand) const {
  const size_t count = std::strchr(types, '>') - types;
  return types[std::min(operand, count - 1)];
}

char OpRule::type_of_result() const { return std::strchr(types, '>')[1]; }

const OpRule* find_rule(const std::string& op) {
  static const auto index = [] {
    std::unordered_map<std::string, const OpRule*> map;
    for (const Op& each : kOps)
      if (!map.emplace(each.name, &each.rule).second)
        fail(Code::internal, std::string("[load] rules: two rules for the op ") + each.name + ".");
    return map;
  }();
  const auto it = index.find(op);
  return it == index.end() ? nullptr : it->second;
}

bool is_data(const std::string& op, const std::string& attr) {
  const OpRule* rule = find_rule(op);
  if (!rule) return false;
  return std::any_of(rule->attrs.begin(), rule->attrs.end(),
                     [&](const AttrRule& each) { return each.data && attr == each.name; });
}

const Region& taken_region(const Node& cond, const int64_t* sizes) {
  return cond.regions[sizes[std::get<DimId>(cond.attrs.at("when"))] >= 0 ? 0 : 1];
}

double number_of(const Attr& value, const int64_t* sizes) {
  if (const auto* id = std::get_if<DimId>(&value)) return static_cast<double>(sizes[*id]);
  if (const auto* flag = std::get_if<bool>(&value)) return *flag;
  if (const auto* real = std::get_if<double>(&value)) return *real;
  const std::string& text = std::get<std::string>(value);  // one of the strings that the rule allows
  return text == "inf" ? HUGE_VAL : text == "-inf" ? -HUGE_VAL : std::nan("");
}

void check_program(const Program& program, const char* engine, bool (*has)(const std::string& op)) {
  check_nodes(program, program.nodes, {engine, has});
  for (int32_t id : program.results)
    if (id != kNone && program.values[id].dims.size() > kMaxRank)
      fail(Code::not_supported,
           "[load] result '" + program.values[id].name + "': has more than " + std::to_string(kMaxRank) + " dims.");
}

}  // namespace keepdim
