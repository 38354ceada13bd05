#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <thread>

#include "programs.h"
#include "test.h"

using namespace keepdim;
using nlohmann::json;

namespace {

struct FakePlan final : Plan {
  explicit FakePlan(size_t n) : n(n) {}
  size_t bytes() const override { return n; }
  size_t n;
};

// Builds plans of 100 bytes; running copies the first input to the first output.
class FakeEngine final : public Engine {
 public:
  explicit FakeEngine(const Program& program) : program_(program) {}
  std::unique_ptr<Plan> build(const int64_t*, size_t limit) override {
    if (limit < 1000) fail(Code::out_of_memory, "[build] fake: 1000 bytes needed.");
    return std::make_unique<FakePlan>(100);
  }
  void run(Plan&, const Call& call) override {
    size_t count = 1;
    for (DimId id : program_.contract.outputs[0].dims) count *= static_cast<size_t>(call.sizes[id]);
    std::memcpy(call.outputs[0], call.inputs[0], count * 4);
  }
  size_t arena_bytes() const override { return 7; }

 private:
  const Program& program_;
};

const EngineInfo kFake = {"fake",
                          "KeepdimFake",
                          [](const Program&) {},
                          [](const Program& program, const Weights& weights, const Release&) -> std::unique_ptr<Engine> {
                            weights("sha-w");
                            return std::make_unique<FakeEngine>(program);
                          },
                          [] { return std::vector<std::string>{"linear"}; },
                          [] { return std::map<std::string, int64_t>{}; },
                          [](const std::map<std::string, int64_t>&) {}};

alignas(64) float weight[64 + 1];
Bytes get_weight(const std::string&) { return {weight, 256}; }

std::vector<float> run(Delegate& delegate, int64_t s, int64_t p, const std::vector<float>& x) {
  const int64_t x_sizes[] = {1, s, 8}, mask_sizes[] = {2 * s};
  const std::vector<int64_t> mask(2 * s);
  Argument args[] = {{DType::f32, 3, x_sizes, x.data()}, Argument{DType::integer}, {DType::i64, 1, mask_sizes, mask.data()}};
  args[1].value = p;
  HeapOutputs outputs(delegate.program().contract);
  delegate.run(args, 3, outputs);
  CHECK_EQUAL(outputs.integers[1], p + s);
  std::vector<float> y(outputs.data[0].size() / 4);
  std::memcpy(y.data(), outputs.data[0].data(), outputs.data[0].size());
  return y;
}

}  // namespace

TEST(cache_evicts_least_recently_used) {
  PlanCache cache;
  for (int64_t i = 0; i < 3; ++i) CHECK_EQUAL(cache.insert({i, 0}, std::make_unique<FakePlan>(100), 300), size_t{0});
  CHECK(cache.find({0, 0}));
  CHECK_EQUAL(cache.insert({3, 0}, std::make_unique<FakePlan>(100), 300), size_t{1});
  CHECK(!cache.find({1, 0}));
  CHECK(cache.find({0, 0}) && cache.find({2, 0}) && cache.find({3, 0}));
  CHECK(!cache.find({0, 1}) && !cache.find({0}) && !cache.find({}));
  CHECK_EQUAL(cache.bytes(), size_t{300});
  CHECK_EQUAL(cache.insert({4, 0}, std::make_unique<FakePlan>(1000), 300), size_t{3});  // kept although it exceeds the limit
  CHECK_EQUAL(cache.size(), size_t{1});
  CHECK(cache.find({4, 0}));
  cache.clear();
  CHECK_EQUAL(cache.bytes() + cache.size(), size_t{0});
}

TEST(states_are_found_by_key) {
  States states;
  auto* first = static_cast<char*>(const_cast<void*>(states.find("keys", 1000).data));
  CHECK_EQUAL(reinterpret_cast<uintptr_t>(first) % 64, uintptr_t{0});
  CHECK(std::all_of(first, first + 1000, [](char c) { return c == 0; }));
  std::memset(first, 1, 1000);
  const auto* other = static_cast<const char*>(states.find("values", 7).data);
  CHECK(other + 7 <= first || other >= first + 1000);
  CHECK_EQUAL(static_cast<int>(other[6]), 0);
  CHECK(states.find("keys", 1000).data == first);
  CHECK(states.find("keys", 1000).engine_data == states.find("keys", 1000).engine_data);
  CHECK(states.find("keys", 1000).engine_data != states.find("values", 7).engine_data);
  CHECK_EQUAL(static_cast<int>(first[999]), 1);
  CHECK_EQUAL(states.bytes(), size_t{1007});
  CHECK_FAILS(states.find("keys", 999),
              "[load] state 'keys': 999 bytes expected, another delegate of the file has 1000. Lower the model again.");
  CHECK_FAILS(states.find("huge", SIZE_MAX / 2),
              "[load] state 'huge': " + std::to_string(SIZE_MAX / 2) +
                  " bytes could not be allocated. Free memory, or lower with a smaller state.");
  CHECK_EQUAL(states.bytes(), size_t{1007});
  CHECK(states.find("empty", 0).data != nullptr);
  States separate;
  CHECK(separate.find("keys", 1000).data != first);
  CHECK_EQUAL(separate.bytes(), size_t{1000});
}

TEST(states_from_many_threads) {
  States states;
  std::vector<const void*> found(8);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < found.size(); ++i) threads.emplace_back([&, i] { found[i] = states.find("keys", 64).data; });
  for (std::thread& t : threads) t.join();
  for (const void* data : found) CHECK(data == found[0]);
  CHECK_EQUAL(states.bytes(), size_t{64});
}

// KV cache [1, 1, 4, 2], written at position p; the query attends to rows 0..p.
json cached_program() {
  const auto value = [](const char* name, const char* dtype, std::vector<int> dims, const char* kind, const char* key) {
    return json{{"name", name}, {"dtype", dtype}, {"dims", dims}, {"kind", kind}, {"key", key}};
  };
  const json dims = json::array({{"const", 1}, {"const", 2}, {"const", 4}});
  json inputs = json::array();
  for (const char* name : {"q", "k", "v"}) inputs.push_back({{"name", name}, {"dtype", "f32"}, {"dims", {0, 0, 0, 1}}});
  inputs.push_back({{"name", "p"}, {"dtype", "i64"}, {"dims", {0}}});
  const json output = {{"name", "y"}, {"dtype", "f32"}, {"dims", {0, 0, 0, 1}}};
  return {
      {"version", 1},
      {"contract",
       {{"dims", dims}, {"symbols", json::array()}, {"inputs", inputs}, {"constraints", json::array()}, {"outputs", {output}}}},
      {"values",
       {value("kc", "f32", {0, 0, 2, 1}, "state", "kc"), value("vc", "f32", {0, 0, 2, 1}, "state", "vc"),
        value("y", "f32", {0, 0, 0, 1}, "temp", "")}},
      {"nodes",
       {{{"op", "cached_attention"},
         {"ins", {0, 1, 2, 3, 4, 5}},
         {"outs", {6}},
         {"attrs", {{"scale", 1.0}}},
         {"regions", json::array()}}}},
      {"results", {6}}};
}

// Result of a zero query: the mean of the values up to position p.
float mean_at(Delegate& d, int64_t p, float value) {
  const int64_t sizes[] = {1, 1, 1, 2}, one[] = {1};
  const float zeros[2] = {}, v[] = {value, -value};
  const Argument args[] = {
      {DType::f32, 4, sizes, zeros}, {DType::f32, 4, sizes, zeros}, {DType::f32, 4, sizes, v}, {DType::i64, 1, one, &p}};
  HeapOutputs outputs(d.program().contract);
  d.run(args, 4, outputs);
  float y[2];
  std::memcpy(y, outputs.data[0].data(), sizeof(y));
  CHECK_EQUAL(y[1], -y[0]);
  return y[0];
}

TEST(delegates_share_states) {
  const std::string text = cached_program().dump();
  const Weights none = [](const std::string& key) -> Bytes { fail(Code::internal, "[test] weight '" + key + "'."); };
  const auto states = std::make_shared<States>();
  auto one = std::make_unique<Delegate>(find_engine("ggml"), text, none, states);
  Delegate two(find_engine("ggml"), text, none, states), separate(find_engine("ggml"), text, none);
  CHECK_EQUAL(mean_at(*one, 0, 4), 4.0f);
  CHECK_EQUAL(mean_at(two, 1, 8), 6.0f);       // includes what the other delegate has written
  CHECK_EQUAL(mean_at(separate, 1, 8), 4.0f);  // separate cache, initially zero
  one.reset();
  CHECK_EQUAL(mean_at(two, 2, 0), 4.0f);
  CHECK_EQUAL(mean_at(two, 1, 0), 2.0f);  // overwritten
  CHECK_FAILS(mean_at(two, 4, 1), "[run] cached_attention 'y': 1 new rows at position 4 do not fit a cache of 4.");
  CHECK_EQUAL(mean_at(two, 1, 0), 2.0f);
  CHECK_EQUAL(states->bytes(), size_t{64});
  CHECK_EQUAL(two.counters().state_bytes, uint64_t{64});
}

TEST(packed_weights_are_released) {
  std::vector<std::string> released;
  const Release record = [&](const std::string& key) { released.push_back(key); };
  const std::string text = good_program().dump();
  Delegate(find_engine("ggml"), text, get_weight, std::make_shared<States>(), record);
  CHECK(released == std::vector<std::string>{"sha-w"});
  const auto misaligned = [](const std::string&) { return Bytes{reinterpret_cast<const char*>(weight) + 1, 256}; };
  Delegate copied(find_engine("ggml"), text, misaligned, std::make_shared<States>(), record);  // released once, when copied
  CHECK_EQUAL(released.size(), size_t{2});
  released.clear();
  Delegate kept(kFake, text, get_weight, std::make_shared<States>(), record);
  CHECK(released.empty());
}

TEST(delegate_reuses_plans) {
  const Options before = options();
  set_options({1, 0, 250});
  Delegate d(kFake, good_program().dump(), get_weight);
  for (int64_t s : {1, 2, 1, 2, 3, 2, 1}) {
    const std::vector<float> x(8 * s, static_cast<float>(s));
    CHECK(run(d, s, s % 2, x) == x);
  }
  run(d, 1, 9, std::vector<float>(8));  // p is read at run time: the plan is reused
  Counters c = d.counters();
  CHECK_EQUAL(c.calls, uint64_t{8});
  CHECK_EQUAL(c.built, uint64_t{4});
  CHECK_EQUAL(c.reused, uint64_t{4});
  CHECK_EQUAL(c.evicted, uint64_t{2});
  CHECK_EQUAL(c.plans, uint64_t{2});
  CHECK_EQUAL(c.plan_bytes, uint64_t{200});
  CHECK_EQUAL(c.weight_bytes, uint64_t{256});
  CHECK_EQUAL(c.arena_bytes, uint64_t{7});
  CHECK_EQUAL(live_counters().back().id, c.id);
  d.clear_plans();
  CHECK_EQUAL(d.counters().plans, uint64_t{0});
  set_options({1, 999, 250});
  CHECK_FAILS(run(d, 1, 1, std::vector<float>(8)), "[build] fake: 1000 bytes needed.");
  set_options(before);
  run(d, 1, 1, std::vector<float>(8));
}

TEST(delegate_checks_weights) {
  const std::string text = good_program().dump();
  const auto load = [&](const void* data, size_t size) {
    Delegate(kFake, text, [&](const std::string&) { return Bytes{data, size}; });
  };
  CHECK_FAILS(load(weight, 128), "[load] weight 'sha-w': 256 bytes expected for f32 [8, 8], found 128. Lower the model again.");
  load(reinterpret_cast<const char*>(weight) + 1, 256);  // misaligned: copied
  CHECK_EQUAL(live_counters().size(), size_t{0});
}

TEST(engines_are_found_by_name) {
  CHECK_EQUAL(std::string(find_engine("ggml").backend_id), "KeepdimGgml");
  CHECK_FAILS(register_engine(find_engine("ggml")), "[load] engine 'ggml': it is registered already.");
  CHECK_FAILS(find_engine("tpu"), "[load] engine 'tpu': unknown engine (known: ggml).");
  CHECK_FAILS(set_options({-1, 0, 0}),
              "[options] threads, memory_limit, plan_limit: a value is negative. Give counts and bytes of 0 or more.");
}

TEST(last_error_is_per_thread) {
  set_last_error("one");
  std::thread([] { CHECK(last_error().empty()); }).join();
  CHECK_EQUAL(last_error(), "one");
  clear_last_error();
  CHECK(last_error().empty());
}

TEST(ggml_from_many_threads) {
  std::mt19937 random(1);
  std::uniform_real_distribution<float> uniform(-1, 1);
  for (float& w : weight) w = uniform(random);
  const std::string text = good_program().dump();
  Delegate shared(find_engine("ggml"), text, get_weight);
  const auto work = [&](unsigned seed) {
    Delegate own(find_engine("ggml"), text, get_weight);
    std::mt19937 r(seed);
    for (int i = 0; i < 40; ++i) {
      const int64_t s = 1 + r() % 7, p = r() % 9;
      std::vector<float> x(8 * s);
      for (float& v : x) v = static_cast<float>(r() % 1000) / 500 - 1;
      for (Delegate* d : {&shared, &own}) {
        const std::vector<float> y = run(*d, s, p, x);
        for (int64_t k = 0; k < 8 * s; ++k) {
          double expected = 0;
          for (int64_t j = 0; j < 8; ++j) expected += static_cast<double>(x[k / 8 * 8 + j]) * weight[k % 8 * 8 + j];
          if (std::abs(expected * p - y[k]) > 1e-5) fail(Code::internal, "[test] linear: wrong at " + std::to_string(k) + ".");
        }
      }
    }
  };
  std::vector<std::string> sentences(2);
  std::thread other([&] { sentences[1] = failure([&] { work(2); }); });
  sentences[0] = failure([&] { work(3); });
  other.join();
  CHECK_EQUAL(sentences[0] + sentences[1], "");
  CHECK_EQUAL(shared.counters().calls, uint64_t{80});
}
