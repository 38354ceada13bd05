#include "programs.h"
#include "test.h"

using namespace keepdim;
using nlohmann::json;

namespace {

struct Arguments {
  std::vector<std::vector<int64_t>> sizes;
  std::vector<Argument> all;

  Arguments& tensor(DType dtype, std::vector<int64_t> dims, const void* data = nullptr) {
    all.push_back({dtype, dims.size(), nullptr, data});
    sizes.push_back(std::move(dims));
    return *this;
  }
  Arguments& integer(int64_t value) {
    all.push_back(Argument{DType::integer});
    all.back().value = value;
    sizes.emplace_back();
    return *this;
  }
};

std::vector<int64_t> bound(const json& program, Arguments args) {
  for (size_t i = 0; i < args.all.size(); ++i) args.all[i].sizes = args.sizes[i].data();
  std::vector<int64_t> symbols, values;
  Contract::parse(program.dump()).bind(args.all.data(), args.all.size(), symbols, values);
  return symbols;
}

Arguments call(int64_t s, int64_t p, int64_t mask) {
  return Arguments().tensor(DType::f32, {1, s, 8}).integer(p).tensor(DType::i64, {mask});
}

}  // namespace

TEST(bind_gives_symbols) {
  CHECK(bound(good_program(), call(5, 3, 10)) == (std::vector<int64_t>{5, 3}));
  CHECK(bound(good_program(), call(1, 15, 2)) == (std::vector<int64_t>{1, 15}));
}

TEST(results_are_bound_after_the_run) {
  const json contract = json::parse(R"({"version": 1, "contract": {
    "symbols": [{"name": "s", "lo": 1, "hi": 16, "source": {"kind": "size", "input": 0, "index": 0, "mul": 1, "add": 2}}],
    "data": [{"name": "u", "lo": 0, "hi": 64, "source": {"kind": "size", "input": 0, "index": 0, "mul": 1, "add": 2}}],
    "dims": [["sym", 0], ["const", 1], ["const", 0], ["sym", 1], ["const", 4], ["mul", [4, 0]], ["mul", [1, 3]]],
    "inputs": [{"name": "x", "dtype": "f32", "dims": [0, 4]}], "constraints": [],
    "outputs": [{"name": "y", "dtype": "f32", "dims": [3]}, {"name": "n", "dtype": "int", "dims": [3]}],
    "ensures": [{"lhs": 3, "cmp": "le", "rhs": 5}]}})");
  const Contract c = Contract::parse(contract.dump());
  CHECK_EQUAL(c.input_symbols, 1u);
  std::vector<int64_t> symbols, values;
  const auto run = [&](int64_t rows, int64_t count, int64_t said) {
    const std::vector<int64_t> x{rows, 4}, y{count};
    const Argument in{DType::f32, 2, x.data()};
    c.bind(&in, 1, symbols, values);
    Argument out[] = {{DType::f32, 1, y.data()}, Argument{DType::integer}};
    out[1].value = said;
    c.bind_results(out, 2, symbols, values);
  };
  run(3, 12, 12);
  CHECK(symbols == (std::vector<int64_t>{3, 12}));
  run(1, 0, 0);
  CHECK_FAILS(run(16, 65, 65), "[check] output 0 'y' dim 0: u = 65 is out of range 0..64.");
  CHECK_FAILS(run(3, 5, 6), "[check] output 1 'n': expected u = 5 (u = 5 from output 0 'y' dim 0), got 6.");
  CHECK_FAILS(run(3, 13, 13),
              "[check] u <= 4*s: not true for u = 13, 4*s = 12 (u = 13 from output 0 'y' dim 0, s = 3 from input 0 'x' dim 0).");

  const auto changed = [&](const char* path, const json& value) {
    json j = contract;
    j[json::json_pointer(path)] = value;
    return Contract::parse(j.dump());
  };
  CHECK_FAILS(changed("/contract/inputs/0/dims/0", 3), "[verify] input 'x': u is known only after a run.");
  CHECK_FAILS(changed("/contract/constraints", contract["contract"]["ensures"]),
              "[verify] constraint u: u is known only after a run.");
  CHECK_FAILS(changed("/contract/data/0/source/kind", "item"),
              "[verify] symbol 'u': its source output 0 'y' is not read for its elements.");
  CHECK_FAILS(changed("/contract/data/0/source/input", 2), "[verify] symbol 'u': 'output' 2 does not exist; there are 2.");
  CHECK_FAILS(changed("/contract/data/0/name", "s"), "[verify] symbol 1: the name 's' is used twice.");
}

TEST(bind_sentences) {
  const json good = good_program();
  CHECK_FAILS(bound(good, Arguments().integer(1)), "[bind] call: expected 3 inputs, got 1.");
  CHECK_FAILS(bound(good, Arguments().tensor(DType::i64, {1, 2, 8}).integer(1).tensor(DType::i64, {4})),
              "[bind] input 0 'x': expected dtype f32, got i64.");
  CHECK_FAILS(bound(good, Arguments().tensor(DType::f32, {3, 8}).integer(1).tensor(DType::i64, {4})),
              "[bind] input 0 'x': expected 3 dims [1, s, 8], got 2 ([3, 8]).");
  CHECK_FAILS(bound(good, call(257, 0, 514)), "[bind] input 0 'x' dim 1: s = 257 is out of range 1..256.");
  CHECK_FAILS(bound(good, call(2, -3, 4)), "[bind] input 1 'p': p = -3 is out of range 0..15.");
  CHECK_FAILS(bound(good, call(17, 0, 32)),
              "[bind] input 2 'mask' dim 0: expected 2*s = 34 (s = 17 from input 0 'x' dim 1), got 32.");
  CHECK_FAILS(bound(good, Arguments().tensor(DType::f32, {1, 2, 4}).integer(1).tensor(DType::i64, {4})),
              "[bind] input 0 'x' dim 2: expected 8, got 4.");
  CHECK_FAILS(bound(good, call(4, 14, 8)),
              "[check] p + s <= 16: not true for p + s = 18 (p = 14 from input 1 'p', s = 4 from input 0 'x' dim 1). "
              "torch._check(p + s <= 16)");
}

TEST(bind_solves_derived_sizes) {
  json program = good_program();
  json& c = program["contract"];
  c["symbols"][0]["source"] = {{"kind", "size"}, {"input", 2}, {"index", 0}, {"mul", 2}, {"add", 7}};  // 2*s
  CHECK(bound(program, call(5, 3, 10)) == (std::vector<int64_t>{5, 3}));
  CHECK_FAILS(bound(program, call(5, 3, 7)), "[bind] input 2 'mask' dim 0: 2*s = 7 has no integer s.");
  CHECK_FAILS(bound(program, call(5, 3, 514)), "[bind] input 2 'mask' dim 0: s = 257 is out of range 1..256 (2*s = 514).");
  c["symbols"][0]["hi"] = nullptr;
  CHECK_FAILS(bound(program, call(5, 3, 0)), "[bind] input 2 'mask' dim 0: s = 0 is out of range 1.. (2*s = 0).");
  c["symbols"][0]["source"]["add"] = 6;  // 2*s + 1
  CHECK_FAILS(bound(program, call(5, 3, 10)), "[bind] input 2 'mask' dim 0: 2*s + 1 = 10 has no integer s.");
}

TEST(bind_reads_elements) {
  json program = good_program();
  json& c = program["contract"];
  c["symbols"][1]["source"] = {{"kind", "item"}, {"input", 2}, {"index", 1}, {"mul", 6}, {"add", 7}};
  const int64_t data[] = {100, 3, 7, 7};
  Arguments args = Arguments().tensor(DType::f32, {1, 2, 8}).integer(3).tensor(DType::i64, {4}, data);
  CHECK(bound(program, args) == (std::vector<int64_t>{2, 3}));
  args.all[1].value = 4;
  CHECK_FAILS(bound(program, args), "[bind] input 1 'p': expected p = 3 (p = 3 from input 2 'mask' element 1), got 4.");
  args.sizes[2] = {1};
  CHECK_FAILS(bound(program, args), "[bind] input 2 'mask' element 1: the tensor has fewer elements.");
  args.sizes[2] = {4};
  args.all[2].data = nullptr;
  CHECK_FAILS(bound(program, args), "[bind] input 2 'mask' element 1: the tensor has no data to read.");
}

TEST(bind_overflow) {
  json program = good_program();
  json& c = program["contract"];
  c["symbols"][0]["hi"] = nullptr;
  c["dims"].push_back({"mul", {1, 1}});
  CHECK_FAILS(bound(program, call(int64_t{1} << 32, 0, int64_t{1} << 33)),
              "[bind] call: s*s does not fit int64 (s = 4294967296 from input 0 'x' dim 1).");
}
