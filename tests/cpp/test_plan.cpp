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

// Builds plans of 100 bytes and copies its first input to its first output.
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
                          [](const std::string& op, const std::string& attr) { return op == "mul" && attr == "other"; },
                          [](const Program& program, const Weights& weights, const Release&) -> std::unique_ptr<Engine> {
                            weights("sha-w");
                            return std::make_unique<FakeEngine>(program);
                          },
                          [] { return std::vector<std::string>{"linear"}; }};

alignas(64) float weight[64 + 1];
Bytes give_weight(const std::string&) { return {weight, 256}; }

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

TEST(cache_forgets_the_least_recently_used) {
  PlanCache cache;
  for (int64_t i = 0; i < 3; ++i) CHECK_EQUAL(cache.insert({i, 0}, std::make_unique<FakePlan>(100), 300), size_t{0});
  CHECK(cache.find({0, 0}));
  CHECK_EQUAL(cache.insert({3, 0}, std::make_unique<FakePlan>(100), 300), size_t{1});
  CHECK(!cache.find({1, 0}));
  CHECK(cache.find({0, 0}) && cache.find({2, 0}) && cache.find({3, 0}));
  CHECK(!cache.find({0, 1}) && !cache.find({0}) && !cache.find({}));
  CHECK_EQUAL(cache.bytes(), size_t{300});
  CHECK_EQUAL(cache.insert({4, 0}, std::make_unique<FakePlan>(1000), 300), size_t{3});  // alone over the limit: kept
  CHECK_EQUAL(cache.size(), size_t{1});
  CHECK(cache.find({4, 0}));
  cache.clear();
  CHECK_EQUAL(cache.bytes() + cache.size(), size_t{0});
}

TEST(delegate_reuses_plans) {
  const Options before = options();
  set_options({1, 0, 250});
  Delegate d(kFake, good_program().dump(), give_weight);
  for (int64_t s : {1, 2, 1, 2, 3, 2, 1}) {
    const std::vector<float> x(8 * s, static_cast<float>(s));
    CHECK(run(d, s, s % 2, x) == x);
  }
  run(d, 1, 9, std::vector<float>(8));  // p is data: the same plan
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
  load(reinterpret_cast<const char*>(weight) + 1, 256);  // not aligned: copied
  CHECK_EQUAL(live_counters().size(), size_t{0});
}

TEST(engines_are_found_by_name) {
  CHECK_EQUAL(std::string(find_engine("ggml").backend_id), "KeepdimGgml");
  CHECK_FAILS(register_engine(find_engine("ggml")), "[load] engine 'ggml': it is registered already.");
  CHECK_FAILS(find_engine("tpu"), "[load] engine 'tpu': there is none of that name (known: ggml).");
  CHECK_FAILS(set_options({-1, 0, 0}), "[options] threads, memory_limit, plan_limit: a value is negative.");
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
  Delegate shared(find_engine("ggml"), text, give_weight);
  const auto work = [&](unsigned seed) {
    Delegate own(find_engine("ggml"), text, give_weight);
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
