#include "core/delegate.h"

#include <algorithm>
#include <cstring>
#include <map>

#include "core/op_rules.h"

namespace keepdim {

namespace {

struct LiveDelegates {
  TableLock lock;
  std::map<uint64_t, Counters> delegates;  // counters of live delegates, as of their last call
  uint64_t next = 1;
};

LiveDelegates& live() {
  static LiveDelegates* const l = new LiveDelegates;
  return *l;
}

std::string shape_text(const Program& program, const Value& value) {
  std::string out = "[";
  for (size_t d = 0; d < value.dims.size(); ++d) out += (d > 0 ? ", " : "") + program.contract.text(value.dims[d]);
  return out + "]";
}

// Size of a weight in bytes; cannot overflow (verified at load).
size_t weight_size(const Program& program, const Value& value) {
  size_t bytes = dtype_bytes(value.dtype);
  for (DimId id : value.dims) bytes *= static_cast<size_t>(program.contract.dims.node(id).value);
  return bytes / dtype_block(value.dtype);
}

}  // namespace

Delegate::Delegate(const EngineInfo& engine, std::string_view json, const Weights& weights, std::shared_ptr<States> states,
                   const Release& release)
    : info_(engine), program_(Program::parse(json)), states_(std::move(states)) {
  info_.check(program_);
  counters_.engine = info_.name;
  collect_key_dims(program_.nodes);
  for (int32_t id : program_.results) add_key_dims(id);
  std::sort(key_dims_.begin(), key_dims_.end());
  key_dims_.erase(std::unique(key_dims_.begin(), key_dims_.end()), key_dims_.end());
  const DimTable& dims = program_.contract.dims;
  const auto constant = [&](DimId id) { return dims.is_constant(id); };
  key_dims_.erase(std::remove_if(key_dims_.begin(), key_dims_.end(), constant), key_dims_.end());
  engine_ = info_.create(program_, load_weights(weights, release), [&](const std::string& key) {
    if (copies_.erase(key) == 0) release(key);  // copied weights have already been released
  });

  LiveDelegates& l = live();
  {
    const std::lock_guard<TableLock> guard(l.lock);
    counters_.id = l.next++;
  }
  publish();
}

Delegate::~Delegate() {
  LiveDelegates& l = live();
  const std::lock_guard<TableLock> guard(l.lock);
  l.delegates.erase(counters_.id);
}

void Delegate::add_key_dims(int32_t id) {
  if (id == kNone) return;
  const Value& value = program_.values[static_cast<size_t>(id)];
  key_dims_.insert(key_dims_.end(), value.dims.begin(), value.dims.end());
}

// Collects the dims of values and attributes that the engine reads during a build. Unused inputs are not included: they may
// exist only for their size.
void Delegate::collect_key_dims(const std::vector<Node>& nodes) {
  for (const Node& node : nodes) {
    for (int32_t id : node.ins) add_key_dims(id);
    for (int32_t id : node.outs) add_key_dims(id);
    for (const auto& [name, attr] : node.attrs) {
      const auto* one = std::get_if<DimId>(&attr);
      const auto* many = std::get_if<std::vector<DimId>>(&attr);
      if ((!one && !many) || is_data(node.op, name)) continue;
      if (one) key_dims_.push_back(*one);
      if (many) key_dims_.insert(key_dims_.end(), many->begin(), many->end());
    }
    for (const Region& region : node.regions) collect_key_dims(region.nodes);
  }
}

// Requests each weight from the host once, checks its size, and copies it if it is not aligned for its dtype.
Weights Delegate::load_weights(const Weights& weights, const Release& release) {
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
  struct Publish {  // also if the call fails
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
  LiveDelegates& l = live();
  const std::lock_guard<TableLock> guard(l.lock);
  l.delegates[counters_.id] = counters_;
}

Counters Delegate::counters() const {
  LiveDelegates& l = live();
  const std::lock_guard<TableLock> guard(l.lock);
  return l.delegates.at(counters_.id);
}

void Delegate::clear_plans() {
  const std::lock_guard<Lock> guard(lock_);
  cache_.clear();
  publish();
}

std::vector<Counters> live_counters() {
  LiveDelegates& l = live();
  const std::lock_guard<TableLock> guard(l.lock);
  std::vector<Counters> out;
  for (const auto& [id, counters] : l.delegates) out.push_back(counters);
  return out;
}

}  // namespace keepdim
