// One invalid example per rule: a modification of the good program, and the expected error message.
#include "programs.h"
#include "test.h"

using namespace keepdim;
using nlohmann::json;

namespace {

struct Row {
  const char* path;   // JSON pointer; a trailing "-" appends
  const char* value;  // JSON; empty removes the field
  const char* sentence;
};

const Row kRows[] = {
    {"/version", "2", "[verify] program: format version 2 is newer than this build reads (1). Upgrade keepdim."},
    {"/version", "0", "[verify] program: format version 0 does not exist."},
    {"/version", "\"1\"", "[verify] program: 'version' is not an integer (string)."},
    {"/contract", "", "[verify] program: the field 'contract' is missing."},
    {"/contract", "[]", "[verify] contract: expected an object, got array."},
    {"/contract/inputs/0", "3", "[verify] input 0: expected an object, got number."},
    // dims
    {"/contract/dims/4", "[\"xor\", [3, 1]]", "[verify] dim 4: op 'xor' is not known."},
    {"/contract/dims/4", "[\"add\"]", "[verify] dim 4: expected [op, operand]."},
    {"/contract/dims/4", "[\"add\", 3]", "[verify] dim 4: 'operands' is not a list (number)."},
    {"/contract/dims/4", "[\"add\", [3]]", "[verify] dim 4: expected at least 2 operands, got 1."},
    {"/contract/dims/9", "[\"floordiv\", [1, 2, 2]]", "[verify] dim 9: expected 2 operands, got 3."},
    {"/contract/dims/4", "[\"add\", [3, 4]]", "[verify] dim 4: operand 4 does not come before it."},
    {"/contract/dims/4", "[\"add\", [3, -1]]", "[verify] dim 4: operand -1 does not come before it."},
    {"/contract/dims/1", "[\"sym\", 2]", "[verify] dim 1: symbol 2 does not exist; there are 2."},
    {"/contract/dims/10", "[\"mod\", [1, 3]]", "[verify] dim 10: the divisor (dim 3) can be zero."},
    {"/contract/dims/0", "[\"const\", 9223372036854775808]", "[verify] dim 0: 'operand' overflows int64."},
    {"/contract/dims/2", "[\"const\", 9223372036854775807]", "[verify] dim 8: its bounds overflow int64."},
    // symbols
    {"/contract/symbols/0/name", "\"\"", "[verify] symbol 0: the name '' is not an identifier."},
    {"/contract/symbols/1/name", "\"s\"", "[verify] symbol 1: the name 's' is used twice."},
    {"/contract/symbols/0/lo", "300", "[verify] symbol 's': the range 300..256 is empty."},
    {"/contract/symbols/0/source/kind", "\"here\"", "[verify] symbol 's': source kind 'here' is not known."},
    {"/contract/symbols/0/source/input", "3", "[verify] symbol 's': 'input' 3 does not exist; there are 3."},
    {"/contract/symbols/0/source/index", "3", "[verify] symbol 's': its source input 0 'x' has no dim 3."},
    {"/contract/symbols/0/source/index", "-1", "[verify] symbol 's': index -1 is out of range."},
    {"/contract/symbols/0/source/input", "1", "[verify] symbol 's': its source input 1 'p' has no dim 1."},
    {"/contract/symbols/1/source/input", "0", "[verify] symbol 'p': its source input 0 'x' is not an integer."},
    {"/contract/symbols/1/source", R"({"kind": "item", "input": 0, "index": 0, "mul": 6, "add": 7})",
     "[verify] symbol 'p': its source input 0 'x' is not an integer tensor."},
    {"/contract/symbols/1/source", R"({"kind": "item", "input": 2, "index": 2, "mul": 6, "add": 7})",
     "[verify] symbol 'p': its source input 2 'mask' may have no element 2."},
    {"/contract/symbols/0/source/mul", "13", "[verify] symbol 's': 'mul' 13 does not exist; there are 13."},
    {"/contract/symbols/0/source/add", "-1", "[verify] symbol 's': 'add' -1 does not exist; there are 13."},
    {"/contract/symbols/0/source/add", "1", "[verify] symbol 's': its source needs a symbol that is not bound before it."},
    {"/contract/symbols/0/source/mul", "7", "[verify] symbol 's': the factor of its source can be zero."},
    // specs
    {"/contract/inputs/0/dims/0", "13", "[verify] input 0 'x': 'dims' 13 does not exist; there are 13."},
    {"/contract/inputs/0/dtype", "\"f8\"", "[verify] input 0 'x': dtype 'f8' is not known."},
    {"/contract/inputs/0/dtype", "\"python\"", "[verify] input 0 'x': dtype python is only for a method's contract."},
    {"/contract/inputs/1/dims", "[3, 3]", "[verify] input 1 'p': dtype int takes exactly 1 dim, has 2."},
    {"/contract/symbols/0/lo", "-1", "[verify] input 0 'x' dim 1: s can be negative."},
    {"/contract/dims/0", "[\"const\", 9007199254740992]",
     "[verify] input 0 'x': its size in bytes at the upper bounds overflows int64."},
    {"/contract/constraints/0/cmp", "\"<=\"", "[verify] constraint 0: cmp '<=' is not known."},
    {"/contract/constraints/0/lhs", "99", "[verify] constraint 0: 'lhs' 99 does not exist; there are 13."},
    {"/contract/constraints/0/sentence", "1", "[verify] constraint 0: 'sentence' is not a string (number)."},
    // values
    {"/values/0/name", "\"\"", "[verify] value 3: the name is empty."},
    {"/values/0/name", "\"x\"", "[verify] value 3: the name 'x' is used twice."},
    {"/values/0/dtype", "\"int\"", "[verify] value 3 'w': dtype int is only for inputs and outputs."},
    {"/values/0/dtype", "\"q8_0\"", "[verify] value 3 'w': its rows are not a multiple of 32 elements, as q8_0 needs."},
    {"/values/1/dtype", "\"q8_0\"", "[verify] value 4 't': dtype q8_0 is only for a const or state."},
    {"/contract/inputs/0/dtype", "\"q8_0\"", "[verify] input 0 'x': dtype q8_0 is only for a const or state."},
    {"/values/0/kind", "\"input\"", "[verify] value 3 'w': kind 'input' is not known."},
    {"/values/0/key", "\"\"", "[verify] value 3 'w': a const needs a key."},
    {"/values/1/key", "\"k\"", "[verify] value 4 't': a temp has no key."},
    {"/values/0/dims/0", "1", "[verify] value 3 'w': the dims of a const have to be constant."},
    {"/values/-", R"({"name": "z", "dtype": "f32", "dims": [], "kind": "temp", "key": ""})",
     "[verify] value 'z': no node produces it."},
    // nodes
    {"/nodes/0/op", "\"\"", "[verify] node 0: the op is empty."},
    {"/nodes/0/ins/0", "6", "[verify] node 0 'linear': 'ins' 6 does not exist; there are 6."},
    {"/nodes/0/ins/0", "-2", "[verify] node 0 'linear': 'ins' -2 does not exist; there are 6."},
    {"/nodes/0/ins/0", "5", "[verify] node 0 'linear': 'u' is used before it is produced."},
    {"/nodes/0/ins/0", "4", "[verify] node 0 'linear': 't' is used before it is produced."},
    {"/nodes/0/outs/0", "3", "[verify] node 0 'linear': its out 'w' is not a temp."},
    {"/nodes/1/outs/0", "4", "[verify] node 1 'mul': its out 't' is produced twice."},
    {"/nodes/1/attrs/other", "13", "[verify] node 1 'mul': 'other' 13 does not exist; there are 13."},
    {"/nodes/1/attrs/other", "[1, 13]", "[verify] node 1 'mul': 'other' 13 does not exist; there are 13."},
    {"/nodes/1/attrs/other", "null", "[verify] node 1 'mul': 'other' is not an attribute (null)."},
    {"/nodes/1/regions", R"([{"nodes": [], "results": [5]}])",
     "[verify] node 1 'mul' region 0: 'u' is used before it is produced."},
    {"/nodes/0/regions", R"([{"nodes": [{"op": "neg", "ins": [0], "outs": [5]}], "results": [5]}])",
     "[verify] node 1 'mul': its out 'u' is produced twice."},
    // results
    {"/results", "[5]", "[verify] program: 1 results for 2 outputs."},
    {"/results/0", "-1", "[verify] result 0: there is no value for output 'y'."},
    {"/results/1", "5", "[verify] result 1: an int output takes no value."},
    {"/results/0", "3", "[verify] result 0: 'w' differs in dtype or dims from output 'y'."},
    {"/results/0", "true", "[verify] result 0: 'results' is not an integer (boolean)."},
};

std::string changed(const Row& row) {
  json program = good_program();
  const json::json_pointer path(row.path);
  if (*row.value) {
    program = program.patch(
        json::array({{{"op", path.back() == "-" ? "add" : "replace"}, {"path", row.path}, {"value", json::parse(row.value)}}}));
  } else {
    program = program.patch(json::array({{{"op", "remove"}, {"path", row.path}}}));
  }
  return program.dump();
}

}  // namespace

TEST(verify_good_program) {
  const Program p = Program::parse(good_program().dump());
  CHECK_EQUAL(p.values.size(), size_t{6});
  CHECK_EQUAL(p.describe(p.nodes[0]), "linear 't' [1, s, 8] f32");
  CHECK(p.results == (std::vector<int32_t>{5, kNone}));
}

TEST(verify_refuses) {
  for (const Row& row : kRows) {
    const std::string text = changed(row);
    CHECK_FAILS(Program::parse(text), row.sentence);
  }
}

TEST(verify_json) {
  CHECK_FAILS(Program::parse("{\"version\": 1,"), "[verify] program: not well-formed JSON (at byte 15).");
  CHECK_FAILS(Program::parse(""), "[verify] program: not well-formed JSON (at byte 1).");
  CHECK_FAILS(Program::parse("{\"version\": 1e999}"), "[verify] program: not well-formed JSON.");
  CHECK_FAILS(Program::parse("[]"), "[verify] program: expected an object, got array.");
  CHECK(!failure([] { Program::parse(std::string(1 << 20, '[')); }).empty());
}

TEST(verify_regions_have_scopes) {
  json program = good_program();
  const json inner = {{"nodes", json::array({{{"op", "neg"}, {"ins", {0}}, {"outs", {6}}}})}, {"results", {6}}};
  program["values"].push_back({{"name", "v"}, {"dtype", "f32"}, {"dims", {6, 1, 0}}, {"kind", "temp"}});
  program["nodes"][0]["regions"] = json::array({inner});
  Program::parse(program.dump());
  program["nodes"][1]["ins"] = {6};  // defined inside the region, not visible outside
  CHECK_FAILS(Program::parse(program.dump()), "[verify] node 1 'mul': 'v' is used before it is produced.");

  json deep = good_program();
  json* at = &deep["nodes"][0]["regions"];
  for (int i = 0; i < 100; ++i) {
    *at = json::array({{{"nodes", json::array({{{"op", "neg"}, {"ins", {0}}, {"outs", json::array()}}})}, {"results", {0}}}});
    at = &(*at)[0]["nodes"][0]["regions"];
  }
  *at = json::array();
  CHECK(failure([&] { Program::parse(deep.dump()); }).find("regions are nested deeper than 32.") != std::string::npos);
}

TEST(verify_bare_contract) {
  json bare = {{"version", 1}, {"contract", good_program()["contract"]}, {"more", "ignored"}};
  bare["contract"]["inputs"].push_back({{"name", "flag"}, {"dtype", "python"}, {"dims", json::array()}});
  CHECK_EQUAL(Contract::parse(bare.dump()).inputs.size(), size_t{4});
  bare["contract"]["inputs"][3]["dims"] = {0};
  CHECK_FAILS(Contract::parse(bare.dump()), "[verify] input 3 'flag': dtype python takes no dims.");
}
