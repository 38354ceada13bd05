#include "programs.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <random>
#include <sstream>

using namespace keepdim;
using nlohmann::json;

namespace {

constexpr size_t kMaxBytes = size_t{16} << 20;  // per weight, input or output; larger ones count as refused

using Random = std::mt19937_64;

struct Report {
  int programs = 0, loaded = 0, ran = 0, refused = 0, wrong = 0;
};

[[noreturn]] void too_large() { fail(Code::out_of_memory, "[test] program: too large for this test."); }

size_t bytes_of(const Contract& contract, DType dtype, const std::vector<DimId>& dims, const std::vector<int64_t>& values) {
  size_t bytes = dtype_bytes(dtype);
  for (DimId id : dims) {
    if (values[id] < 0 || __builtin_mul_overflow(bytes, static_cast<size_t>(values[id]), &bytes)) too_large();
  }
  if (bytes > kMaxBytes) too_large();
  (void)contract;
  return bytes / dtype_block(dtype);
}

void fill(std::vector<char>& data, DType dtype, Random& random) {
  const size_t width = dtype_bytes(dtype);
  for (size_t i = 0; i + width <= data.size(); i += width) {
    const int64_t int_value = random() % 50 == 0 ? static_cast<int64_t>(random()) : static_cast<int64_t>(random() % 4);
    const float real = static_cast<float>(random() % 2001) / 1000 - 1;
    const double wide = real;
    if (dtype == DType::f32)
      std::memcpy(&data[i], &real, width);
    else if (dtype == DType::f64)
      std::memcpy(&data[i], &wide, width);
    else if (dtype == DType::boolean)
      data[i] = static_cast<char>(int_value & 1);
    else
      std::memcpy(&data[i], &int_value, width);
  }
}

// Symbols near the lower end of their ranges; valid unless a constraint is violated.
std::vector<int64_t> pick_symbols(const Contract& contract, int64_t step) {
  std::vector<int64_t> out;
  for (const Symbol& symbol : contract.symbols) {
    int64_t v = symbol.range.lo ? *symbol.range.lo : std::min<int64_t>(0, symbol.range.hi.value_or(0));
    if (__builtin_add_overflow(v, step, &v)) v = INT64_MAX;
    out.push_back(symbol.range.hi ? std::min(v, *symbol.range.hi) : v);
  }
  return out;
}

void run_once(Delegate& delegate, int64_t step, Random& random) {
  const Contract& contract = delegate.program().contract;
  const std::vector<int64_t> symbols = pick_symbols(contract, step);
  std::vector<int64_t> values(contract.dims.size());
  contract.dims.eval(symbols.data(), values.data());
  const size_t count = contract.inputs.size();
  std::vector<Argument> args(count, Argument{DType::integer});
  std::vector<std::vector<int64_t>> sizes(count);
  std::vector<std::vector<char>> data(count);
  for (size_t i = 0; i < count; ++i) {
    const Spec& spec = contract.inputs[i];
    if (spec.dtype == DType::integer) {
      args[i].value = values[spec.dims[0]];
      continue;
    }
    for (DimId id : spec.dims) sizes[i].push_back(values[id]);
    data[i].resize(bytes_of(contract, spec.dtype, spec.dims, values));
    fill(data[i], spec.dtype, random);
    args[i] = {spec.dtype, sizes[i].size(), sizes[i].data(), data[i].data()};
  }
  for (size_t i = 0; i < contract.symbols.size(); ++i) {  // elements that symbols are bound from
    const Source& s = contract.symbols[i].source;
    if (s.kind != Source::Kind::item) continue;
    const size_t width = dtype_bytes(contract.inputs[s.input].dtype);
    const int64_t item = static_cast<int64_t>(static_cast<__int128>(values[s.mul]) * symbols[i] + values[s.add]);
    if ((s.index + size_t{1}) * width <= data[s.input].size()) std::memcpy(&data[s.input][s.index * width], &item, width);
  }
  HeapOutputs outputs(contract);
  delegate.run(args.data(), count, outputs);
}

void run_program(const std::string& text, Random& random, Report& report) {
  ++report.programs;
  std::map<std::string, std::vector<char>> weights;
  std::unique_ptr<Delegate> delegate;
  try {
    const Program program = Program::parse(text);
    const std::vector<int64_t> symbols = pick_symbols(program.contract, 0);
    std::vector<int64_t> values(program.contract.dims.size());
    program.contract.dims.eval(symbols.data(), values.data());
    for (const Value& v : program.values) {
      if (v.kind == Value::Kind::temp || v.kind == Value::Kind::input) continue;
      weights[v.key].resize(bytes_of(program.contract, v.dtype, v.dims, values));
    }
    delegate = std::make_unique<Delegate>(
        find_engine("ggml"), text, [&](const std::string& key) { return Bytes{weights.at(key).data(), weights.at(key).size()}; });
    ++report.loaded;
  } catch (const Error&) {
    return;
  }
  for (int64_t step : {0, 1, 7, 16, 0}) {
    try {
      run_once(*delegate, step, random);
      ++report.ran;
    } catch (const Error& e) {
      ++report.refused;
      if (e.code == Code::internal) {
        ++report.wrong;
        std::cerr << e.what() << std::endl;
      }
    }
  }
}

int print(const Report& r) {
  std::cout << r.programs << " programs: " << r.loaded << " loaded, " << r.programs - r.loaded << " refused; calls: " << r.ran
            << " ran, " << r.refused << " refused, " << r.wrong << " of them as internal errors" << std::endl;
  return r.wrong ? 1 : 0;
}

// One random mutation anywhere in the tree: another value, or a removed or duplicated element.
void mutate(json& root, Random& random) {
  json* at = &root;
  while (at->is_structured() && !at->empty() && (at == &root || random() % 20 != 0)) {
    auto it = at->begin();
    std::advance(it, random() % at->size());
    at = &*it;
  }
  static const int64_t numbers[] = {-1, 0, 1, 2, 3, 5, 8, 63, 1 << 20, INT64_C(1) << 40, INT64_MAX, INT64_MIN};
  static const char* const words[] = {"f32", "i64", "bf16", "bool",  "int",  "temp",    "const",  "state", "add",  "mul", "mod",
                                      "max", "sum", "cat",  "slice", "cast", "softmax", "arange", "x",     "item", "nan"};
  if (at->is_array() && !at->empty() && random() % 2) {
    const size_t i = random() % at->size();
    if (random() % 2)
      at->erase(i);
    else
      at->push_back(json((*at)[i]));
  } else if (at->is_object() && !at->empty() && random() % 2) {
    at->erase(std::next(at->begin(), static_cast<long>(random() % at->size())));
  } else if (at->is_number() && random() % 3) {
    *at = static_cast<int64_t>(random() % 14);
  } else if (at->is_string() && random() % 3) {
    *at = words[random() % std::size(words)];
  } else {
    switch (random() % 4) {
      case 0: *at = numbers[random() % std::size(numbers)]; break;
      case 1: *at = words[random() % std::size(words)]; break;
      case 2: *at = 0.5; break;
      default: *at = nullptr;
    }
  }
}

}  // namespace

void* HeapOutputs::resize(size_t output, const int64_t* sizes, size_t rank) {
  size_t bytes = dtype_bytes(contract_.outputs[output].dtype);
  for (size_t d = 0; d < rank; ++d) {
    if (__builtin_mul_overflow(bytes, static_cast<size_t>(sizes[d]), &bytes) || bytes > kMaxBytes * 16) too_large();
  }
  data.resize(std::max(data.size(), output + 1));
  data[output].assign(bytes, 0);
  return data[output].data();
}

json good_program() {
  return json::parse(R"json({"version": 1,
    "contract": {
      "dims": [["const", 8], ["sym", 0], ["const", 2], ["sym", 1], ["add", [3, 1]], ["const", 16], ["const", 1], ["const", 0],
               ["mul", [2, 1]], ["floordiv", [1, 2]], ["mod", [1, 2]], ["max", [1, 0]], ["min", [1, 0]]],
      "symbols": [{"name": "s", "lo": 1, "hi": 256, "source": {"kind": "size", "input": 0, "index": 1, "mul": 6, "add": 7}},
                  {"name": "p", "lo": 0, "hi": 15, "source": {"kind": "int", "input": 1, "index": 0, "mul": 6, "add": 7}}],
      "inputs": [{"name": "x", "dtype": "f32", "dims": [6, 1, 0]}, {"name": "p", "dtype": "int", "dims": [3]},
                 {"name": "mask", "dtype": "i64", "dims": [8]}],
      "constraints": [{"lhs": 4, "cmp": "le", "rhs": 5, "sentence": "torch._check(p + s <= 16)"}],
      "outputs": [{"name": "y", "dtype": "f32", "dims": [6, 1, 0]}, {"name": "n", "dtype": "int", "dims": [4]}]},
    "values": [{"name": "w", "dtype": "f32", "dims": [0, 0], "kind": "const", "key": "sha-w"},
               {"name": "t", "dtype": "f32", "dims": [6, 1, 0], "kind": "temp", "key": ""},
               {"name": "u", "dtype": "f32", "dims": [6, 1, 0], "kind": "temp", "key": ""}],
    "nodes": [{"op": "linear", "ins": [0, 3, -1], "outs": [4], "attrs": {}, "regions": []},
              {"op": "mul", "ins": [4], "outs": [5], "attrs": {"other": 3}, "regions": []}],
    "results": [5, -1]})json");
}

int run_folder(const std::string& folder) {
  set_options({1, int64_t{256} << 20, int64_t{16} << 20});
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() == ".json") files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  Random random(0);
  Report report;
  for (const auto& file : files) {
    std::ostringstream text;
    text << std::ifstream(file, std::ios::binary).rdbuf();
    run_program(text.str(), random, report);
  }
  return print(report);
}

int run_mutated(int count) {
  set_options({1, int64_t{256} << 20, int64_t{16} << 20});
  Random random(0);
  Report report;
  for (int i = 0; i < count; ++i) {
    json program = good_program();
    for (uint64_t n = 1 + random() % 3; n > 0; --n) mutate(program, random);
    std::string text = program.dump();
    if (i % 50 == 0) text.resize(random() % text.size());
    run_program(text, random, report);
  }
  return print(report);
}
