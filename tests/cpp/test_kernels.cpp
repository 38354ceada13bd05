// Programs of one op at fixed sizes: kernels with odd sizes, extreme attributes, out-of-range indices and several threads.
// Sanitizer builds check memory accesses; results must not depend on the number of threads.
#include <cstring>
#include <map>
#include <sstream>

#include "programs.h"
#include "test.h"

using namespace keepdim;
using nlohmann::json;

namespace {

struct Shape {
  std::string dtype;
  std::vector<int64_t> sizes;
  bool weight;

  explicit Shape(const std::string& text) : weight(text[0] == '!') {  // "f32 2 8", "!f32 8 8" for a weight
    std::istringstream stream(text.substr(weight ? 1 : 0));
    stream >> dtype;
    for (int64_t n = 0; stream >> n;) sizes.push_back(n);
  }
};

// Table of constant dims of a program.
struct Dims {
  json table = json::array();

  size_t row(int64_t n) {
    const json dim = {"const", n};
    for (size_t i = 0; i < table.size(); ++i)
      if (table[i] == dim) return i;
    table.push_back(dim);
    return table.size() - 1;
  }
  json rows(const std::vector<int64_t>& list) {
    json out = json::array();
    for (int64_t n : list) out.push_back(row(n));
    return out;
  }
  json attr(const json& value) {  // integers become indices into the table
    if (value.is_number_integer()) return row(value.get<int64_t>());
    if (!value.is_array()) return value;
    json out = json::array();
    for (const json& n : value) out.push_back(row(n.get<int64_t>()));
    return out;
  }
};

// A loaded program of one op, with data for its operands.
class Op {
 public:
  Op(const std::string& op, const std::vector<std::string>& operands, const json& attrs, const std::string& result) {
    Dims dims;
    json inputs = json::array(), values = json::array(), ins = json::array(), kept = json::object();
    size_t input_count = 0;
    for (const std::string& text : operands) input_count += !Shape(text).weight;
    for (const std::string& text : operands) {
      const Shape shape(text);
      const std::string name = "a" + std::to_string(ins.size());
      json spec = {{"name", name}, {"dtype", shape.dtype}, {"dims", dims.rows(shape.sizes)}};
      ins.push_back(shape.weight ? input_count + values.size() : inputs.size());
      if (shape.weight) spec["kind"] = "const", spec["key"] = name;
      (shape.weight ? values : inputs).push_back(spec);
    }
    const Shape shape(result);
    json out = {{"name", "y"}, {"dtype", shape.dtype}, {"dims", dims.rows(shape.sizes)}};
    for (const auto& [name, value] : attrs.items()) kept[name] = dims.attr(value);
    json temp = out;
    temp["kind"] = "temp";
    values.push_back(temp);
    const size_t id = inputs.size() + values.size() - 1;
    const json program = {{"version", 1},
                          {"contract",
                           {{"dims", dims.table},
                            {"symbols", json::array()},
                            {"inputs", inputs},
                            {"constraints", json::array()},
                            {"outputs", {out}}}},
                          {"values", values},
                          {"nodes", {{{"op", op}, {"ins", ins}, {"outs", {id}}, {"attrs", kept}}}},
                          {"results", {id}}};
    const Program parsed = Program::parse(program.dump());
    for (const Value& v : parsed.values) {
      if (v.kind == Value::Kind::temp) continue;
      std::vector<int64_t> sizes;
      for (DimId dim : v.dims) sizes.push_back(parsed.contract.dims.node(dim).value);
      std::vector<char>& data = v.kind == Value::Kind::input ? inputs_.emplace_back() : weights_[v.key];
      size_t count = 1;
      for (int64_t n : sizes) count *= static_cast<size_t>(n);
      data.resize(count * dtype_bytes(v.dtype));
      for (size_t i = 0; i < count; ++i) set(data, v.dtype, i, static_cast<int64_t>(i * 7919 % 13 % 5));
      if (v.kind == Value::Kind::input) sizes_.push_back(sizes), dtypes_.push_back(v.dtype);
    }
    delegate_ = std::make_unique<Delegate>(find_engine("ggml"), program.dump(), [&](const std::string& key) {
      return Bytes{weights_.at(key).data(), weights_.at(key).size()};
    });
  }

  void set_index(size_t input, size_t at, int64_t value) { set(inputs_[input], dtypes_[input], at, value); }

  std::vector<char> run() {
    std::vector<Argument> args;
    for (size_t i = 0; i < inputs_.size(); ++i)
      args.push_back({dtypes_[i], sizes_[i].size(), sizes_[i].data(), inputs_[i].data()});
    HeapOutputs outputs(delegate_->program().contract);
    delegate_->run(args.data(), args.size(), outputs);
    return outputs.data[0];
  }

 private:
  static void set(std::vector<char>& data, DType dtype, size_t at, int64_t value) {
    const size_t width = dtype_bytes(dtype);
    const float real = static_cast<float>(value);
    const double wide = static_cast<double>(value);
    const void* from = dtype == DType::f32   ? static_cast<const void*>(&real)
                       : dtype == DType::f64 ? &wide
                                             : static_cast<const void*>(&value);
    std::memcpy(data.data() + at * width, from, width);
  }

  std::map<std::string, std::vector<char>> weights_;
  std::vector<std::vector<char>> inputs_;
  std::vector<std::vector<int64_t>> sizes_;
  std::vector<DType> dtypes_;
  std::unique_ptr<Delegate> delegate_;
};

struct RestoreOptions {  // restores the options
  const Options before = options();
  ~RestoreOptions() { set_options(before); }
};

}  // namespace

TEST(index_out_of_range_fails_the_call) {
  struct Indexed {
    const char* op;
    std::vector<std::string> operands;  // "I": placeholder for the index dtype
    size_t index;
    json attrs;
    const char* result;
    int64_t limit;
    bool wrap;
  };
  const std::vector<Indexed> all = {
      {"embedding", {"f32 5 3", "I 4"}, 1, json::object(), "f32 4 3", 5, false},
      {"index_select", {"f32 5 3", "I 4"}, 1, {{"dim", 1}}, "f32 5 4", 3, false},
      {"gather", {"f32 5 3", "I 4 3"}, 1, {{"dim", 0}}, "f32 4 3", 5, false},
      {"gather", {"i8 5 3", "I 5 2"}, 1, {{"dim", 1}}, "i8 5 2", 3, false},
      {"index", {"f32 5 3", "I 4"}, 1, {{"dims", {0}}}, "f32 4 3", 5, true},
      {"index", {"f32 5 3", "I 4 1", "I 2"}, 1, {{"dims", {0, 1}}}, "f32 4 2", 5, true},
      {"index_put", {"f32 5 3", "f32 1", "I 4"}, 2, {{"dims", {0}}}, "f32 5 3", 5, true},
      {"index_put", {"i64 5 3", "i64 4", "I 4", "I 1"}, 2, {{"dims", {0, 1}}}, "i64 5 3", 5, true},
      {"index_add", {"f32 5 3", "f32 4 1", "I 4"}, 2, {{"dims", {0}}}, "f32 5 3", 5, true},
      {"scatter", {"f32 5 3", "I 4 3", "f32 4 3"}, 1, {{"dim", 0}}, "f32 5 3", 5, false},
      {"scatter_reduce", {"f32 5 3", "I 5 2", "f32 5 2"}, 1, {{"dim", 1}, {"reduce", "sum"}}, "f32 5 3", 3, false},
      {"embedding_bag", {"f32 5 67", "I 4", "i64 1"}, 1, {{"mode", "max"}, {"include_last_offset", false}}, "f32 1 67", 5, false},
      {"embedding_bag", {"f16 5 3", "I 4", "i64 1"}, 1, {{"mode", "mean"}, {"include_last_offset", false}}, "f16 1 3", 5, false},
      {"embedding", {"f32 0 3", "I 4"}, 1, json::object(), "f32 4 3", 0, false},
      {"scatter", {"f32 0 3", "I 4 3", "f32 4 3"}, 1, {{"dim", 0}}, "f32 0 3", 0, false},
  };
  for (const Indexed& row : all)
    for (const bool wide : {false, true}) {
      std::vector<std::string> operands = row.operands;
      for (std::string& text : operands)
        if (text[0] == 'I') text.replace(0, 1, wide ? "i64" : "i32");
      Op op(row.op, operands, row.attrs, row.result);
      for (size_t input = row.index; input < operands.size(); ++input) {
        const Shape shape(operands[input]);
        size_t count = 1;
        for (int64_t n : shape.sizes) count *= static_cast<size_t>(n);
        if (shape.dtype[0] == 'i')
          for (size_t i = 0; i < count; ++i) op.set_index(input, i, static_cast<int64_t>(i % 2));
      }
      const std::vector<char> good = row.limit ? op.run() : std::vector<char>();
      std::vector<int64_t> bad = {row.limit, -row.limit - 1, INT32_MAX, INT32_MIN};
      if (!row.wrap) bad.push_back(-1);
      if (wide) bad.insert(bad.end(), {INT64_C(1) << 62, INT64_C(1) << 32, INT64_MAX, INT64_MIN});
      for (const int64_t value : bad) {
        op.set_index(row.index, 0, value);
        const std::string sentence = failure([&] { op.run(); });
        CHECK(sentence.find("index " + std::to_string(value) + " is ") != std::string::npos);
        op.set_index(row.index, 0, 0);
        if (row.limit) CHECK(op.run() == good);
      }
    }
}

// Attribute values that no exporter writes: rejected or computed, without out-of-bounds reads, integer overflow or large
// allocations.
TEST(extreme_attributes_are_rejected_or_computed) {
  const RestoreOptions restore;
  set_options({1, int64_t{64} << 20, int64_t{16} << 20});
  constexpr int64_t huge = INT64_C(1) << 62, top = INT32_MAX;
  const auto conv = [](json stride, json padding, json dilation, int64_t groups, bool transposed) {
    return json{{"stride", stride}, {"padding", padding}, {"dilation", dilation}, {"groups", groups}, {"transposed", transposed}};
  };
  const auto refused = [](const std::string& op, const std::vector<std::string>& operands, const json& attrs,
                          const std::string& result) {
    const std::string sentence = failure([&] { Op(op, operands, attrs, result).run(); });
    if (sentence.empty() || sentence.find("[run]") == 0) std::cerr << op << " " << result << ": " << sentence << std::endl;
    CHECK(!sentence.empty() && sentence.find("[run]") != 0);
  };
  const auto runs = [](const std::string& op, const std::vector<std::string>& operands, const json& attrs,
                       const std::string& result) {
    CHECK_EQUAL(failure([&] { Op(op, operands, attrs, result).run(); }), std::string());
  };
  refused("conv", {"f32 1 4 8", "f32 4 4 3"}, conv({1}, {1}, {1}, huge, false), "f32 1 4 8");
  refused("conv", {"f32 1 4 8", "f32 4 4 3"}, conv({1}, {1}, {1}, -1, true), "f32 1 4 8");
  refused("conv", {"f32 1 4 8", "f32 4 4 3"}, conv({top}, {0}, {1}, 1, true), "f32 1 4 34359738368");
  refused("conv", {"f32 1 4 8", "f32 4 4 3"}, conv({1}, {-1}, {1}, 1, false), "f32 1 4 4");
  runs("conv", {"f32 1 2 8 8", "f32 2 1 3 3"}, conv({top, top}, {top, top}, {top, top}, 2, false), "f32 1 2 1 1");
  runs("conv", {"f32 1 2 0 5", "f32 2 1 3 3"}, conv({1, 1}, {2, 1}, {1, 1}, 2, false), "f32 1 2 2 5");
  runs("conv", {"f32 1 2 0 5", "f32 3 2 3 3"}, conv({1, 1}, {2, 1}, {1, 1}, 1, false), "f32 1 3 2 5");
  runs("conv", {"f32 1 0 4", "f32 3 0 2"}, conv({1}, {0}, {1}, 1, false), "f32 1 3 3");
  runs("conv", {"f32 1 0 4", "f32 0 3 2"}, conv({1}, {0}, {1}, 1, true), "f32 1 3 5");
  const json pool = {{"kernel", {top, top, top}}, {"stride", {1, 1, 1}}, {"padding", {top - 1, top - 1, top - 1}}};
  json wide = pool;
  wide["count_include_pad"] = true;
  runs("avg_pool", {"f32 1 1 1 1"}, wide, "f32 1 1 1 1");
  wide = pool;
  wide["dilation"] = {top, top, top};
  runs("max_pool", {"f32 1 2 2 3"}, wide, "f32 1 1 1 1");
  refused("max_pool", {"f32 1 0 1 1"}, wide, "f32 1 1 1 1");
  refused("adaptive_avg_pool", {"f32 1 3"}, {{"axes", 1}}, "f32 1 4611686018427387");
  for (const int64_t before : {INT64_MIN, -huge, huge, INT64_MAX})
    for (const char* mode : {"constant", "reflect", "replicate", "circular"})
      refused("pad", {"f32 2 3"}, {{"mode", mode}, {"before", {before}}, {"value", 0.5}}, "f32 2 5");
  refused("pad", {"f32 2 3"}, {{"mode", "constant"}, {"before", {0}}, {"value", 0.5}}, "f32 2 4611686018427387");
  refused("nearest", {"f32 1 1 3"}, {{"exact", false}}, "f32 1 1 4611686018427387");
  refused("nearest", {"f32 1 1 0"}, {{"exact", false}}, "f32 1 1 4");
  refused("resample", {"f32 1 1 3"}, {{"mode", "linear"}, {"align_corners", false}}, "f32 1 1 4611686018427387");
  for (const double scale : {1e-300, 1e-30, 1e-9, 1e300}) {
    for (const bool exact : {false, true}) runs("nearest", {"f32 1 1 3"}, {{"exact", exact}, {"scale_0", scale}}, "f32 1 1 7");
    for (const char* mode : {"linear", "cubic"})
      runs("resample", {"f32 1 1 3"}, {{"mode", mode}, {"align_corners", false}, {"scale_0", scale}}, "f32 1 1 7");
  }
  for (const int64_t n : {INT64_MIN, -huge, huge, INT64_MAX}) {
    runs("tril", {"f32 3 4"}, {{"diagonal", n}}, "f32 3 4");
    runs("triu", {"f32 3 4"}, {{"diagonal", n}}, "f32 3 4");
    refused("diagonal", {"f32 3 4"}, {{"offset", n}, {"dims", {0, 1}}}, "f32 3");
    refused("slice", {"f32 3 4"}, {{"dim", 0}, {"start", n}, {"step", n}}, "f32 1 4");
    refused("as_strided", {"f32 12"}, {{"strides", {n, n}}, {"offset", n}}, "f32 1 1");
    refused("unfold", {"f32 12"}, {{"dim", n}, {"step", n}}, "f32 1 2");
    refused("argsort", {"f32 3 4"}, {{"dim", n}}, "i64 3 4");
    refused("sum", {"f32 3 4"}, {{"dims", {n}}}, "f32 3");
    refused("group_norm", {"f32 3 4"}, {{"eps", 1e-5}, {"groups", n}}, "f32 3 4");
  }
  runs("unfold", {"f32 12"}, {{"dim", 0}, {"step", INT64_MAX}}, "f32 1 2");
  runs("as_strided", {"f32 12"}, {{"strides", {huge, 1}}, {"offset", 3}}, "f32 1 4");
  runs("linear", {"f32 3 0", "f32 1 0", "f32 1"}, json::object(), "f32 3 1");
  runs("linear", {"f32 3 0", "!f32 4 0"}, json::object(), "f32 3 4");
  runs("sdpa", {"f32 2 3 0", "f32 2 5 0", "f32 2 5 4"}, {{"scale", 1.0}}, "f32 2 3 4");
  runs("sdpa", {"f32 2 3 4", "f32 2 0 4", "f32 2 0 4"}, {{"scale", 1.0}}, "f32 2 3 4");
  refused("sum", {"f32 1099511627776 1099511627776 0"}, {{"dims", {0}}}, "f32 1099511627776 0");
  refused("cat", {"bool 4611686018427387904 0", "bool 4611686018427387904 0"}, {{"dim", 0}}, "bool 0 0");
  refused("expand", {"f32 1 8"}, json::object(), "f32 1073741824 8");
}

TEST(extreme_sample_fold_distance_and_bag_attributes) {
  const RestoreOptions restore;
  set_options({1, int64_t{64} << 20, int64_t{16} << 20});
  constexpr int64_t huge = INT64_C(1) << 62, top = INT32_MAX;
  const auto outcome = [](const std::string& op, const std::vector<std::string>& operands, const json& attrs,
                          const std::string& result) { return failure([&] { Op(op, operands, attrs, result).run(); }); };
  for (const char* mode : {"nearest", "bilinear", "bicubic"})
    for (const char* padding : {"zeros", "border", "reflection"})
      for (const bool corners : {false, true})
        for (const char* type : {"f32", "f64"}) {
          const json how = {{"mode", mode}, {"padding_mode", padding}, {"align_corners", corners}};
          const std::string t = type;
          CHECK_EQUAL(outcome("grid_sample", {t + " 1 2 5 7", t + " 1 13 11 2"}, how, t + " 1 2 13 11"), std::string());
          CHECK_EQUAL(outcome("grid_sample", {t + " 1 65 1 1", t + " 1 1 1 2"}, how, t + " 1 65 1 1"), std::string());
          CHECK(!outcome("grid_sample", {t + " 1 2 0 7", t + " 1 13 11 2"}, how, t + " 1 2 13 11").empty());
        }
  const auto fold = [](json kernel, json stride, json padding, json dilation) {
    return json{{"kernel", kernel}, {"stride", stride}, {"padding", padding}, {"dilation", dilation}};
  };
  CHECK_EQUAL(outcome("fold", {"f32 1 6 5"}, fold({2, 3}, {top, top}, {top, 3}, {top, 2}), "f32 1 1 1 3"),
              std::string("[build] fold 'y': patches [1, 6, 5] do not fold to [1, 1, 1, 3]."));
  CHECK_EQUAL(outcome("fold", {"f32 1 6 9"}, fold({2, 3}, {2, 3}, {1, 2}, {1, 1}), "f32 1 1 4 5"), std::string());
  CHECK(!outcome("fold", {"f32 1 6 1"}, fold({2, 3}, {1, 1}, {top, top}, {top, top}),
                 "f32 1 0 4611686018427387904 4611686018427387904")
             .empty());
  for (const double p : {0.0, 0.3, 1.0, 2.0, 1e300})
    for (const char* type : {"f32", "f64"}) {
      const std::string t = type;
      CHECK_EQUAL(outcome("cdist", {t + " 2 53 300", t + " 1 35 300"}, {{"p", p}}, t + " 2 53 35"), std::string());
      CHECK_EQUAL(outcome("cdist", {t + " 3 0", t + " 4 0"}, {{"p", p}}, t + " 3 4"), std::string());
      CHECK_EQUAL(outcome("pdist", {t + " 101 3"}, {{"p", p}}, t + " 5050"), std::string());
    }
  CHECK(!outcome("cdist", {"f32 3 2", "f32 4 2"}, {{"p", -1.0}}, "f32 3 4").empty());
  CHECK(!outcome("pdist", {"f32 4611686018427387904 0"}, {{"p", 2.0}}, "f32 7").empty());
  const json bag = {{"mode", "sum"}, {"include_last_offset", true}, {"padding_idx", huge}};
  CHECK_EQUAL(outcome("embedding_bag", {"f32 5 131", "i64 9", "i32 1"}, bag, "f32 0 131"), std::string());
  CHECK(!outcome("embedding_bag", {"f32 5 131", "i64 9", "i32 0"}, bag, "f32 0 131").empty());
}

TEST(unused_operand_may_have_any_rank) {
  json program = good_program();
  program["contract"]["inputs"].push_back({{"name", "z"}, {"dtype", "f32"}, {"dims", json::array()}});
  for (int d = 0; d < 40; ++d) program["contract"]["inputs"][3]["dims"].push_back(6);
  for (json& node : program["nodes"])
    for (const char* key : {"ins", "outs"})
      for (json& id : node[key])
        if (id.get<int>() >= 3) id = id.get<int>() + 1;
  program["results"][0] = 6;
  alignas(64) static const float weight[64] = {};
  Delegate delegate(find_engine("ggml"), program.dump(), [&](const std::string&) { return Bytes{weight, sizeof(weight)}; });
  const int64_t x_sizes[] = {1, 1, 8}, mask_sizes[] = {2};
  const std::vector<int64_t> ones(40, 1), mask(2);
  const std::vector<float> x(8), z(1);
  Argument args[] = {{DType::f32, 3, x_sizes, x.data()},
                     Argument{DType::integer},
                     {DType::i64, 1, mask_sizes, mask.data()},
                     {DType::f32, 40, ones.data(), z.data()}};
  args[1].value = 0;
  HeapOutputs outputs(delegate.program().contract);
  delegate.run(args, 4, outputs);
  CHECK_EQUAL(outputs.data[0].size(), size_t{32});
}

// Sizes large enough that every kernel uses several threads; also run under the thread sanitizer.
TEST(results_do_not_depend_on_threads) {
  const RestoreOptions restore;
  const json image = {{"stride", {1, 1}}, {"padding", {1, 1}}, {"dilation", {1, 1}}, {"groups", 1}, {"transposed", false}};
  json deep = image, back = image;
  deep["groups"] = 16;
  back["stride"] = {2, 2}, back["transposed"] = true;
  const json pool = {{"kernel", {3, 3}}, {"stride", {1, 1}}, {"padding", {1, 1}}, {"dilation", {1, 1}}};
  struct Row {
    const char* op;
    std::vector<std::string> operands;
    json attrs;
    const char* result;
  };
  const std::vector<Row> all = {
      {"conv", {"f32 2 16 33 35", "!f32 13 16 3 3", "!f32 13"}, image, "f32 2 13 33 35"},
      {"conv", {"f32 2 16 33 35", "!f32 16 1 3 3", "!f32 16"}, deep, "f32 2 16 33 35"},
      {"conv", {"f64 1 4 33 35", "f64 3 4 3 3", "f64 3"}, image, "f64 1 3 33 35"},
      {"conv", {"i64 1 4 33 35", "i64 3 4 3 3", "i64 3"}, image, "i64 1 3 33 35"},
      {"conv", {"f32 2 16 17 19", "!f32 16 13 3 3", "!f32 13"}, back, "f32 2 13 33 37"},
      {"max_pool", {"f32 16 65 67"}, pool, "f32 16 65 67"},
      {"max_pool_index", {"f32 16 65 67"}, pool, "i64 16 65 67"},
      {"adaptive_avg_pool", {"f32 16 65 67"}, {{"axes", 2}}, "f32 16 33 31"},
      {"pad", {"f32 64 65 67"}, {{"mode", "reflect"}, {"before", {3, 5}}, {"value", 0.0}}, "f32 64 71 77"},
      {"nearest", {"f32 1 16 65 67"}, {{"exact", false}}, "f32 1 16 99 131"},
      {"resample", {"f32 1 16 33 35"}, {{"mode", "cubic"}, {"align_corners", false}}, "f32 1 16 65 67"},
      {"group_norm", {"f32 16 32 65", "!f32 32", "!f32 32"}, {{"eps", 1e-5}, {"groups", 4}}, "f32 16 32 65"},
      {"batch_norm", {"f32 16 32 165", "!f32 32", "!f32 32", "!f32 32", "!f32 32"}, {{"eps", 1e-5}}, "f32 16 32 165"},
      {"layer_norm", {"f32 333 65", "!f32 65"}, {{"eps", 1e-5}, {"axes", 1}}, "f32 333 65"},
      {"lstm_scan", {"f32 9 7 132", "!f32 132 33", "!f32 132", "f32 7 33", "f32 7 33"}, json::object(), "f32 2 9 7 33"},
      {"gru_scan", {"f32 9 7 99", "f32 99 33", "!f32 99", "f32 7 33"}, {{"reverse", true}}, "f32 9 7 33"},
      {"sdpa", {"f32 2 4 65 17", "f32 2 2 77 17", "f32 2 2 77 19", "bool 65 77"}, {{"scale", 0.5}}, "f32 2 4 65 19"},
      {"linear", {"f32 65 67", "!f32 71 67", "!f32 71"}, {{"activation", "gelu"}}, "f32 65 71"},
      {"matmul", {"f32 3 65 67", "f32 3 67 71"}, json::object(), "f32 3 65 71"},
      {"matmul", {"f32 5 64", "f32 64 1024"}, json::object(), "f32 5 1024"},
      {"matmul", {"i64 65 67", "i64 67 71"}, json::object(), "i64 65 71"},
      {"gather", {"f32 65 1031", "i64 77 1031"}, {{"dim", 0}}, "f32 77 1031"},
      {"embedding", {"f32 65 131", "i64 1031"}, json::object(), "f32 1031 131"},
      {"index", {"f32 65 33 131", "i64 1031", "i64 1031"}, {{"dims", {0, 1}}}, "f32 1031 131"},
      {"index_put", {"f32 65 33 131", "f32 1031 1", "i64 1031", "i64 1031"}, {{"dims", {0, 1}}}, "f32 65 33 131"},
      {"index_add", {"f32 65", "f32 65537", "i64 65537"}, {{"dims", {0}}}, "f32 65"},
      {"scatter", {"f32 65 131", "i64 1031 131", "f32 1031 131"}, {{"dim", 0}}, "f32 65 131"},
      {"scatter_reduce", {"f32 65537", "i64 65537", "f32 65537"}, {{"dim", 0}, {"reduce", "sum"}}, "f32 65537"},
      {"grid_sample",
       {"f32 2 67 33 35", "f32 2 65 67 2"},
       {{"mode", "bicubic"}, {"padding_mode", "border"}, {"align_corners", true}},
       "f32 2 67 65 67"},
      {"fold",
       {"f32 2 72 1155"},
       {{"kernel", {3, 3}}, {"stride", {1, 1}}, {"padding", {1, 1}}, {"dilation", {1, 1}}},
       "f32 2 8 33 35"},
      {"cdist", {"f32 2 133 65", "f32 2 77 65"}, {{"p", 2.0}}, "f32 2 133 77"},
      {"pdist", {"f32 201 65"}, {{"p", 3.0}}, "f32 20100"},
      {"argsort", {"f32 9 1031"}, {{"dim", 1}}, "i64 9 1031"},
      {"argsort", {"i64 301 77"}, {{"dim", 0}, {"descending", true}}, "i64 5 77"},
      {"cumsum", {"f32 333 131"}, {{"dim", 0}}, "f32 333 131"},
      {"softmax", {"f32 33 35 131"}, {{"dim", 1}}, "f32 33 35 131"},
      {"sum", {"f32 65537 3"}, {{"dims", {0}}}, "f32 3"},
      {"var", {"f32 131 1031"}, {{"dims", {1}}, {"correction", 1.0}}, "f32 131"},
      {"argmax", {"f32 131071"}, {{"dims", {0}}}, "i64"},
      {"permute", {"f32 333 513"}, {{"dims", {1, 0}}}, "f32 513 333"},
      {"tril", {"f32 333 513"}, {{"diagonal", 1}}, "f32 333 513"},
      {"rope", {"f32 33 131 8", "f32 131 8", "f32 131 8"}, json::object(), "f32 33 131 8"},
      {"add", {"f32 333 513", "f32 513"}, json::object(), "f32 333 513"},
      {"cast", {"f32 333 513"}, json::object(), "bf16 333 513"},
  };
  for (const Row& row : all) {
    std::vector<char> results[2];
    for (const int threads : {1, 4}) {
      set_options({threads, int64_t{256} << 20, int64_t{16} << 20});
      const std::string sentence = failure([&] { results[threads > 1] = Op(row.op, row.operands, row.attrs, row.result).run(); });
      CHECK_EQUAL(row.op + (" " + sentence), row.op + std::string(" "));
    }
    CHECK_EQUAL(row.op + std::string(results[0] == results[1] ? "" : " differs"), std::string(row.op));
  }
}
