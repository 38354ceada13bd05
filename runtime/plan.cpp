#include "plan.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>

#include "rules.h"

namespace keepdim {

namespace {

constexpr int64_t kDefaultPlanLimit = int64_t{64} << 20;

// ---- process-wide tables; made at first use, so that static registration order makes no difference

struct Registry {
  TableLock lock;
  std::deque<EngineInfo> engines;  // a deque: references stay valid
  std::vector<void (*)(const EngineInfo&)> hooks;
};

Registry& registry() {
  static Registry* const r = new Registry;  // never destroyed: delegates may outlive static destruction
  return *r;
}

struct Live {
  TableLock lock;
  std::map<uint64_t, Counters> delegates;  // of every living one, as they were after its last call
  uint64_t next = 1;
};

Live& live() {
  static Live* const l = new Live;
  return *l;
}

struct Settings {
  TableLock lock;
  Options options{0, 0, kDefaultPlanLimit};
};

Settings& settings() {
  static Settings* const s = new Settings;
  return *s;
}

std::string text_of_bytes(size_t bytes) {
  static const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double value = static_cast<double>(bytes);
  int unit = 0;
  while (value >= 1024 && unit < 6) value /= 1024, ++unit;
  char text[32];
  std::snprintf(text, sizeof(text), unit ? "%.1f %s" : "%.0f %s", value, units[unit]);
  return text;
}

std::string shape_text(const Program& program, const Value& value) {
  std::string out = "[";
  for (size_t d = 0; d < value.dims.size(); ++d) out += (d > 0 ? ", " : "") + program.contract.text(value.dims[d]);
  return out + "]";
}

// A weight's element count times its dtype's bytes; verify has bounded it.
size_t weight_size(const Program& program, const Value& value) {
  size_t bytes = dtype_bytes(value.dtype);
  for (DimId id : value.dims) bytes *= static_cast<size_t>(program.contract.dims.node(id).value);
  return bytes / dtype_block(value.dtype);
}

}  // namespace

Options options() {
  Settings& s = settings();
  const std::lock_guard<TableLock> guard(s.lock);
  return s.options;
}

size_t memory_limit() {
  const int64_t limit = options().memory_limit;
  if (limit > 0) return static_cast<size_t>(limit);
  const long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGE_SIZE);
  if (pages <= 0 || page <= 0) return SIZE_MAX;
  return static_cast<size_t>(pages) / 4 * 3 * static_cast<size_t>(page);
}

void set_options(const Options& options) {
  if (options.threads < 0 || options.memory_limit < 0 || options.plan_limit < 0) {
    fail(Code::invalid_argument, "[options] threads, memory_limit, plan_limit: a value is negative.");
  }
  Settings& s = settings();
  const std::lock_guard<TableLock> guard(s.lock);
  s.options = options;
}

void register_engine(const EngineInfo& info) {
  Registry& r = registry();
  std::vector<void (*)(const EngineInfo&)> hooks;
  const EngineInfo* kept = nullptr;
  {
    const std::lock_guard<TableLock> guard(r.lock);
    for (const EngineInfo& e : r.engines) {
      if (std::string_view(e.name) == info.name) {
        fail(Code::internal, std::string("[load] engine '") + info.name + "': it is registered already.");
      }
    }
    r.engines.push_back(info);
    kept = &r.engines.back();
    hooks = r.hooks;
  }
  for (auto* hook : hooks) hook(*kept);
}

void on_engine(void (*hook)(const EngineInfo& info)) {
  Registry& r = registry();
  std::vector<const EngineInfo*> known;
  {
    const std::lock_guard<TableLock> guard(r.lock);
    r.hooks.push_back(hook);
    for (const EngineInfo& e : r.engines) known.push_back(&e);
  }
  for (const EngineInfo* e : known) hook(*e);
}

namespace {

const EngineInfo* registered(std::string_view name) {
  Registry& r = registry();
  const std::lock_guard<TableLock> guard(r.lock);
  for (const EngineInfo& e : r.engines)
    if (name == e.name) return &e;
  return nullptr;
}

// Loading its library registers an engine.
void load_library(const std::string& name) {
  static Lock* const lock = new Lock("engine");
  const std::lock_guard<Lock> guard(*lock);
  if (registered(name)) return;
  Dl_info here;
  if (!dladdr(reinterpret_cast<void*>(&load_library), &here) || !here.dli_fname) return;
  const std::string folder = std::string(here.dli_fname), path = folder.substr(0, folder.find_last_of('/') + 1) + "libkeepdim_" + name + ".so";
  if (access(path.c_str(), F_OK) != 0) {
    fail(Code::not_supported, "[load] engine '" + name + "': keepdim was built without it. Install its package and build keepdim beside it: make " + name + ".");
  }
  if (!dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) {
    fail(Code::not_supported, "[load] engine '" + name + "': its library cannot be loaded (" + dlerror() +
                                  "). Install the extra: pip install 'keepdim[" + name + "]'.");
  }
}

}  // namespace

const EngineInfo& find_engine(std::string_view name) {
  if (const EngineInfo* found = registered(name)) return *found;
  for (const EngineName& beside : kBeside)
    if (name == beside.name) load_library(beside.name);
  if (const EngineInfo* found = registered(name)) return *found;
  std::string names;
  for (const std::string& known : engine_names()) names += (names.empty() ? "" : ", ") + known;
  fail(Code::not_supported, "[load] engine '" + std::string(name) + "': there is none of that name (known: " +
                                (names.empty() ? "none" : names) + ").");
}

void over_limit(const char* engine, const Contract& contract, const int64_t* sizes, size_t bytes, size_t limit) {
  std::string where;
  for (size_t i = 0; i < contract.symbols.size(); ++i)
    for (DimId id = 0; id < contract.dims.size(); ++id)
      if (const DimNode& dim = contract.dims.node(id); dim.op == DimOp::symbol && dim.value == static_cast<int64_t>(i)) {
        where += (where.empty() ? " at " : ", ") + contract.symbols[i].name + " = " + std::to_string(sizes[id]);
        break;
      }
  const std::string amount = bytes == SIZE_MAX ? "more bytes than 64 bits count" : text_of_bytes(bytes);
  fail(Code::out_of_memory, std::string("[plan] ") + engine + ": needs " + amount + where + ", over the limit of " + text_of_bytes(limit) +
                                ". Call it with smaller sizes or raise the memory_limit option.");
}

std::vector<std::string> engine_names() {
  Registry& r = registry();
  const std::lock_guard<TableLock> guard(r.lock);
  std::vector<std::string> names;
  for (const EngineInfo& e : r.engines) names.push_back(e.name);
  return names;
}

// ---- PlanCache

size_t PlanCache::Hash::operator()(const Key& key) const {
  uint64_t h = 0x9e3779b97f4a7c15u ^ key.size();
  for (int64_t v : key) {
    h ^= static_cast<uint64_t>(v) + 0x9e3779b97f4a7c15u + (h << 6) + (h >> 2);
    h *= 0xff51afd7ed558ccdu;
  }
  return static_cast<size_t>(h ^ (h >> 32));
}

Plan* PlanCache::find(const Key& key) {
  const auto it = index_.find(key);
  if (it == index_.end()) return nullptr;
  plans_.splice(plans_.begin(), plans_, it->second);
  return plans_.front().plan.get();
}

size_t PlanCache::insert(const Key& key, std::unique_ptr<Plan> plan, size_t limit) {
  const size_t bytes = plan->bytes();
  plans_.push_front({key, std::move(plan), bytes});
  index_[key] = plans_.begin();
  bytes_ += bytes;
  size_t evicted = 0;
  for (; bytes_ > limit && plans_.size() > 1; ++evicted) {
    bytes_ -= plans_.back().bytes;
    index_.erase(plans_.back().key);
    plans_.pop_back();
  }
  return evicted;
}

void PlanCache::clear() {
  index_.clear();
  plans_.clear();
  bytes_ = 0;
}

// ---- States

Bytes States::find(const std::string& key, size_t bytes) {
  constexpr size_t align = 64;
  const std::lock_guard<Lock> guard(lock_);
  auto it = all_.find(key);
  if (it == all_.end()) {
    // calloc's pages are zeros that cost nothing until they are touched.
    char* data = static_cast<char*>(std::calloc(bytes + align, 1));
    if (!data) fail(Code::out_of_memory, "[load] state '" + key + "': " + std::to_string(bytes) + " bytes could not be allocated.");
    it = all_.emplace(key, Memory{{data, std::free}, bytes, nullptr}).first;
    bytes_ += bytes;
  }
  if (it->second.bytes != bytes) {
    fail(Code::invalid_program, "[load] state '" + key + "': " + std::to_string(bytes) + " bytes expected, another delegate of the file has " +
                                    std::to_string(it->second.bytes) + ". Lower the model again.");
  }
  const auto address = reinterpret_cast<uintptr_t>(it->second.data.get());
  return {reinterpret_cast<void*>((address + align - 1) / align * align), bytes, &it->second.own};
}

size_t States::bytes() const {
  const std::lock_guard<Lock> guard(lock_);
  return bytes_;
}

// ---- Delegate

Delegate::Delegate(const EngineInfo& engine, std::string_view json, const Weights& weights, std::shared_ptr<States> states,
                   const Release& release)
    : info_(engine), program_(Program::parse(json)), states_(std::move(states)) {
  info_.check(program_);
  counters_.engine = info_.name;
  collect_key(program_.nodes);
  for (int32_t id : program_.results) add_key(id);
  std::sort(key_dims_.begin(), key_dims_.end());
  key_dims_.erase(std::unique(key_dims_.begin(), key_dims_.end()), key_dims_.end());
  const DimTable& dims = program_.contract.dims;
  const auto constant = [&](DimId id) { return dims.is_constant(id); };
  key_dims_.erase(std::remove_if(key_dims_.begin(), key_dims_.end(), constant), key_dims_.end());
  engine_ = info_.create(program_, checked(weights, release), [&](const std::string& key) {
    if (copies_.erase(key) == 0) release(key);  // what was copied has been released before
  });

  Live& l = live();
  {
    const std::lock_guard<TableLock> guard(l.lock);
    counters_.id = l.next++;
  }
  publish();
}

Delegate::~Delegate() {
  Live& l = live();
  const std::lock_guard<TableLock> guard(l.lock);
  l.delegates.erase(counters_.id);
}

void Delegate::add_key(int32_t id) {
  if (id == kNone) return;
  const Value& value = program_.values[static_cast<size_t>(id)];
  key_dims_.insert(key_dims_.end(), value.dims.begin(), value.dims.end());
}

// Dims of values and attributes that the engine reads while it builds. An input that no node uses is not among them:
// it may be there for its size alone.
void Delegate::collect_key(const std::vector<Node>& nodes) {
  for (const Node& node : nodes) {
    for (int32_t id : node.ins) add_key(id);
    for (int32_t id : node.outs) add_key(id);
    for (const auto& [name, attr] : node.attrs) {
      const auto* one = std::get_if<DimId>(&attr);
      const auto* many = std::get_if<std::vector<DimId>>(&attr);
      if ((!one && !many) || is_data(node.op, name)) continue;
      if (one) key_dims_.push_back(*one);
      if (many) key_dims_.insert(key_dims_.end(), many->begin(), many->end());
    }
    for (const Region& region : node.regions) collect_key(region.nodes);
  }
}

// Asks the host once for each key, checks the byte counts, and copies what is not aligned for its dtype.
Weights Delegate::checked(const Weights& weights, const Release& release) {
  auto all = std::make_shared<std::map<std::string, Bytes>>();
  for (const Value& value : program_.values) {
    if (value.kind != Value::Kind::constant && value.kind != Value::Kind::state) continue;
    const size_t expected = weight_size(program_, value);
    if (value.kind == Value::Kind::state) {
      (*all)[value.key] = states_->find(value.key, expected);
      counters_.state_bytes += expected;
      continue;
    }
    const auto [it, added] = all->try_emplace(value.key);
    Bytes& bytes = it->second;
    if (added) {
      bytes = weights(value.key);
      counters_.weight_bytes += bytes.size;
    }
    if (bytes.size != expected) {
      fail(Code::invalid_program, "[load] weight '" + value.key + "': " + std::to_string(expected) + " bytes expected for " +
                                      dtype_name(value.dtype) + " " + shape_text(program_, value) + ", found " +
                                      std::to_string(bytes.size) + ". Lower the model again.");
    }
    if (reinterpret_cast<uintptr_t>(bytes.data) % dtype_align(value.dtype) != 0) {
      std::unique_ptr<char[]>& copy = copies_[value.key];
      copy.reset(new char[bytes.size]);
      std::memcpy(copy.get(), bytes.data, bytes.size);
      bytes.data = copy.get();
      release(value.key);
    }
  }
  return [all](const std::string& key) {
    const auto it = all->find(key);
    if (it == all->end()) fail(Code::internal, "[load] weight '" + key + "': the program does not name it.");
    return it->second;
  };
}

Plan& Delegate::plan(Trace* trace) {
  key_.resize(key_dims_.size());
  for (size_t i = 0; i < key_dims_.size(); ++i) key_[i] = sizes_[key_dims_[i]];
  if (Plan* found = cache_.find(key_)) {
    ++counters_.reused;
    return *found;
  }
  if (trace) trace->build.start = trace->now();
  std::unique_ptr<Plan> built = engine_->build(sizes_.data(), memory_limit());
  if (trace) trace->build.end = trace->now();
  if (!built) fail(Code::internal, std::string("[build] engine '") + info_.name + "': it built no plan.");
  ++counters_.built;
  Plan& kept = *built;
  counters_.evicted += cache_.insert(key_, std::move(built), static_cast<size_t>(options().plan_limit));
  return kept;
}

void Delegate::run(const Argument* args, size_t count, Outputs& outputs, Trace* trace) {
  const std::lock_guard<Lock> guard(lock_);
  struct Publish {  // also of a call that fails
    Delegate& delegate;
    ~Publish() { delegate.publish(); }
  } const publish{*this};
  const Contract& contract = program_.contract;
  ++counters_.calls;
  contract.bind(args, count, bound_, sizes_);
  Plan& plan = this->plan(trace);
  inputs_.resize(count);
  for (size_t i = 0; i < count; ++i) inputs_[i] = contract.inputs[i].dtype == DType::integer ? nullptr : args[i].data;
  outputs_.assign(contract.outputs.size(), nullptr);
  for (size_t i = 0; i < contract.outputs.size(); ++i) {
    const Spec& spec = contract.outputs[i];
    if (spec.dtype == DType::integer) {
      outputs.set_integer(i, sizes_[spec.dims[0]]);
      continue;
    }
    shape_.clear();
    for (DimId id : spec.dims) shape_.push_back(sizes_[id]);
    outputs_[i] = outputs.resize(i, shape_.data(), shape_.size());
  }
  engine_->run(plan, {sizes_.data(), inputs_.data(), outputs_.data(), trace});
}

void Delegate::publish() {
  counters_.plans = cache_.size();
  counters_.plan_bytes = cache_.bytes();
  counters_.arena_bytes = engine_->arena_bytes();
  counters_.packed_bytes = engine_->packed_bytes();
  Live& l = live();
  const std::lock_guard<TableLock> guard(l.lock);
  l.delegates[counters_.id] = counters_;
}

Counters Delegate::counters() const {
  Live& l = live();
  const std::lock_guard<TableLock> guard(l.lock);
  return l.delegates.at(counters_.id);
}

void Delegate::clear_plans() {
  const std::lock_guard<Lock> guard(lock_);
  cache_.clear();
  publish();
}

std::vector<Counters> live_counters() {
  Live& l = live();
  const std::lock_guard<TableLock> guard(l.lock);
  std::vector<Counters> out;
  for (const auto& [id, counters] : l.delegates) out.push_back(counters);
  return out;
}

}  // namespace keepdim
