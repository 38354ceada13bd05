// ExecuTorch backend adapter: EValues in, EValues out; no exception leaves this file.
// One backend class for all engines; each registered engine becomes an ExecuTorch backend.
#include "executorch/backend.h"

#include <executorch/runtime/backend/interface.h>
#include <executorch/runtime/core/event_tracer_hooks_delegate.h>
#include <executorch/runtime/core/exec_aten/util/tensor_util.h>
#include <executorch/runtime/platform/platform.h>

#include <map>
#include <memory>

#include "core/cpu.h"
#include "core/delegate.h"
#include "core/lock.h"
#include "core/registry.h"
#include "executorch/guarded.h"
#include "executorch/types.h"
#include "ggml/engine.h"

namespace keepdim {

namespace {

// States shared by the delegates of one loaded file. A file is identified by its named data map, which outlives its handles.
std::shared_ptr<States> shared_states(const et::NamedDataMap* file) {
  if (!file) return std::make_shared<States>();
  static auto* const lock = new TableLock;
  static auto* const files = new std::map<const et::NamedDataMap*, std::weak_ptr<States>>;
  const std::lock_guard<TableLock> guard(*lock);
  for (auto it = files->begin(); it != files->end();) it = it->second.expired() ? files->erase(it) : std::next(it);
  std::shared_ptr<States> states = (*files)[file].lock();
  if (!states) (*files)[file] = states = std::make_shared<States>();
  return states;
}

struct Handle {
  std::map<std::string, et::FreeableBuffer> weights;  // declared first: the delegate points into them
  std::unique_ptr<Delegate> delegate;
  Lock lock{"delegate"};  // protects the members below
  std::vector<Argument> args;
  std::vector<std::vector<int64_t>> sizes;
  std::vector<std::vector<char>> scratch;  // contiguous copies of inputs with another dim order
};

std::string name_of(const char* what, size_t i, const Spec& spec) {
  return std::string(what) + " " + std::to_string(i) + " '" + spec.name + "'";
}

void read_input(Handle& h, size_t i, const et::EValue& value) {
  const Spec& spec = h.delegate->program().contract.inputs[i];
  const auto refuse = [&](const std::string& got) {
    fail(Code::invalid_argument,
         "[bind] " + name_of("input", i, spec) + ": expected dtype " + dtype_name(spec.dtype) + ", got " + got + ".");
  };
  Argument& arg = h.args[i];
  arg = Argument{DType::integer};
  if (value.isInt()) {
    arg.value = value.toInt();
    return;
  }
  if (!value.isTensor()) refuse(kind_name(value));
  const Tensor& t = value.toTensor();
  if (!to_dtype(t.scalar_type(), &arg.dtype)) refuse(et::toString(t.scalar_type()));
  std::vector<int64_t>& sizes = h.sizes[i];
  sizes.assign(t.sizes().begin(), t.sizes().end());
  arg.rank = sizes.size();
  arg.sizes = sizes.data();
  arg.data = t.const_data_ptr();
  if (!is_contiguous(t)) {
    copy_contiguous(t, h.scratch[i]);
    arg.data = h.scratch[i].data();
  }
}

class EValueOutputs final : public Outputs {
 public:
  EValueOutputs(const Contract& contract, et::Span<et::EValue*> args) : contract_(contract), args_(args) {}

  void* resize(size_t i, const int64_t* sizes, size_t rank) override {
    const Spec& spec = contract_.outputs[i];
    et::EValue& value = *args_[contract_.inputs.size() + i];
    if (!value.isTensor()) refuse(i, "ExecuTorch has no tensor for it.");
    Tensor& t = value.toTensor();
    DType dtype;
    if (!to_dtype(t.scalar_type(), &dtype) || dtype != spec.dtype) {
      refuse(i,
             std::string("expected dtype ") + dtype_name(spec.dtype) + ", ExecuTorch has " + et::toString(t.scalar_type()) + ".");
    }
    std::vector<SizesType> sizes32;
    std::string text;
    for (size_t d = 0; d < rank; ++d) {
      if (sizes[d] > INT32_MAX)
        refuse(i, "its dim " + std::to_string(d) + " = " + std::to_string(sizes[d]) + " does not fit int32.");
      sizes32.push_back(static_cast<SizesType>(sizes[d]));
      text += (d > 0 ? ", " : "") + std::to_string(sizes[d]);
    }
    const et::Error status = et::resize_tensor(t, {sizes32.data(), sizes32.size()});
    if (status != et::Error::Ok) {
      refuse(i, "ExecuTorch cannot resize it to [" + text + "] (" + et::to_string(status) + "). Lower with larger upper bounds.");
    }
    if (!is_contiguous(t)) refuse(i, "only the default dim order is supported.");
    if (t.nbytes() > 0 && !t.mutable_data_ptr()) refuse(i, "ExecuTorch gave it no memory.");
    return t.mutable_data_ptr();
  }

  void set_integer(size_t i, int64_t value) override {
    et::EValue& to = *args_[contract_.inputs.size() + i];
    if (!to.isInt()) refuse(i, "ExecuTorch has no integer for it.");
    to = et::EValue(value);
  }

 private:
  [[noreturn]] void refuse(size_t i, const std::string& fact) {
    fail(Code::invalid_argument, "[run] " + name_of("output", i, contract_.outputs[i]) + ": " + fact);
  }

  const Contract& contract_;
  et::Span<et::EValue*> args_;
};

// Logs one event per executed node, named after its op and output value. The metadata also contains the delegate id.
void log_trace(et::EventTracer* tracer, const Delegate& delegate, const Trace& trace) {
  const std::string id = std::to_string(delegate.id());
  const auto log = [&](const Trace::Event& event, const std::string& name) {
    const std::string metadata = id + " " + name;
    et::event_tracer_log_profiling_delegate(tracer, name.c_str(), et::kUnsetDelegateDebugIntId,
                                            static_cast<et_timestamp_t>(event.start), static_cast<et_timestamp_t>(event.end),
                                            metadata.data(), metadata.size());
  };
  if (trace.build.end > trace.build.start) log(trace.build, "keepdim build");
  const Program& program = delegate.program();
  for (const Trace::Event& event : trace.nodes)
    log(event, event.node ? event.node->op + " " + program.values[event.node->outs[0]].name : "keepdim result");
}

class EngineBackend final : public et::BackendInterface {
 public:
  explicit EngineBackend(std::string name) : name_(std::move(name)) {}

  bool is_available() const override {
    return guarded([&] { find_engine(name_); }) == et::Error::Ok;
  }

  et::Result<et::DelegateHandle*> init(et::BackendInitContext& context, et::FreeableBuffer* processed,
                                       et::ArrayRef<et::CompileSpec>) const override {
    std::unique_ptr<Handle> h;
    const et::Error status = guarded([&] {
      h = std::make_unique<Handle>();
      const et::NamedDataMap* data = context.get_named_data_map();
      const std::string_view json(static_cast<const char*>(processed->data()), processed->size());
      h->delegate = std::make_unique<Delegate>(
          find_engine(name_), json, [&](const std::string& key) { return weight(*h, data, key); }, shared_states(data),
          [&](const std::string& key) { h->weights.erase(key); });
      processed->Free();
      const Contract& contract = h->delegate->program().contract;
      h->args.resize(contract.inputs.size());
      h->sizes.resize(contract.inputs.size());
      h->scratch.resize(contract.inputs.size());
    });
    if (status != et::Error::Ok) return status;
    return static_cast<et::DelegateHandle*>(h.release());
  }

  et::Error execute(et::BackendExecutionContext& context, et::DelegateHandle* handle, et::Span<et::EValue*> args) const override {
    return guarded([&] {
      Handle& h = *static_cast<Handle*>(handle);
      const std::lock_guard<Lock> guard(h.lock);
      const Contract& contract = h.delegate->program().contract;
      const size_t expected = contract.inputs.size() + contract.outputs.size();
      if (args.size() != expected) {
        fail(Code::internal, "[run] call: expected " + std::to_string(expected) + " inputs and outputs, got " +
                                 std::to_string(args.size()) + ".");
      }
      for (size_t i = 0; i < contract.inputs.size(); ++i) read_input(h, i, *args[i]);
      EValueOutputs outputs(contract, args);
      et::EventTracer* tracer = context.event_tracer();
      const bool profile = tracer && tracer->event_tracer_profiling_level() == et::EventTracerProfilingLevel::kProfileAllEvents;
      Trace trace{[] { return static_cast<int64_t>(et::pal_current_ticks()); }};
      h.delegate->run(h.args.data(), h.args.size(), outputs, profile ? &trace : nullptr);
      if (profile) log_trace(tracer, *h.delegate, trace);
    });
  }

  void destroy(et::DelegateHandle* handle) const override { delete static_cast<Handle*>(handle); }

 private:
  // Bytes of a weight, mapped once and kept until released or until the handle is destroyed.
  static Bytes weight(Handle& h, const et::NamedDataMap* data, const std::string& key) {
    auto it = h.weights.find(key);
    if (it == h.weights.end()) {
      if (!data) fail(Code::invalid_program, "[load] weight '" + key + "': the file has no named data. Lower the model again.");
      et::Result<et::FreeableBuffer> found = data->get_data(key);
      if (!found.ok()) {
        fail(Code::invalid_program,
             "[load] weight '" + key + "': not found in the file (" + et::to_string(found.error()) + "). Lower the model again.");
      }
      it = h.weights.emplace(key, std::move(found.get())).first;
    }
    const et::Result<const void*> bytes = it->second.data_safe();
    if (!bytes.ok()) fail(Code::not_supported, "[load] weight '" + key + "': its memory is not CPU memory.");
    return {bytes.get(), it->second.size()};
  }

  const std::string name_;  // engine name; its library is loaded on first use
};

struct Status {
  TableLock lock;
  std::vector<std::pair<std::string, uint32_t>> backends;
};

Status& status() {
  static Status* const s = new Status;
  return *s;
}

void add_backend(const EngineName& engine) {
  Status& s = status();
  const std::lock_guard<TableLock> guard(s.lock);
  for (const auto& backend : s.backends)
    if (backend.first == engine.backend_id) return;
  // Never freed: ExecuTorch keeps the pointer for the lifetime of the process.
  const et::Error result = et::register_backend({engine.backend_id, new EngineBackend(engine.name)});
  s.backends.emplace_back(engine.backend_id, static_cast<uint32_t>(result));
}

// Runs at library load. On a CPU without the required features no engine is registered, to avoid illegal instructions.
const et::Error registered = guarded([] {
  if (cpu_error().empty()) register_ggml_engine();
  on_engine([](const EngineInfo& info) { add_backend({info.name, info.backend_id}); });
  for (const EngineName& external : kExternalEngines) add_backend(external);
});

}  // namespace

std::vector<std::pair<std::string, uint32_t>> backend_status() {
  Status& s = status();
  const std::lock_guard<TableLock> guard(s.lock);
  return s.backends;
}

}  // namespace keepdim
