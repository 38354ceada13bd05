#include "executorch/method.h"

#include <executorch/extension/data_loader/mmap_data_loader.h>
#include <executorch/extension/memory_allocator/malloc_memory_allocator.h>
#include <executorch/runtime/core/event_tracer.h>
#include <executorch/runtime/core/named_data_map.h>
#include <executorch/runtime/executor/method.h>
#include <executorch/runtime/executor/program.h>
#include <executorch/runtime/platform/platform.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <vector>

#include "executorch/kernels.h"
#include "executorch/platform.h"
#include "executorch/types.h"

namespace keepdim {

namespace {

using executorch::aten::DimOrderType;
using executorch::aten::StridesType;
using executorch::aten::TensorImpl;
using executorch::extension::MallocMemoryAllocator;
using executorch::extension::MmapDataLoader;

// Throws the delegate's message if there is one, else ExecuTorch's error.
[[noreturn]] void refuse(const char* stage, const std::string& subject, const std::string& what, et::Error error) {
  if (!last_error().empty()) fail(Code::invalid_argument, last_error());
  fail(Code::invalid_argument, "[" + std::string(stage) + "] " + subject + ": " + what + " (" + et::to_string(error) + ").");
}

// Describes which kernel failed, where and why, as far as it was logged.
std::string describe_failure(const PteFile& file, const std::string& method) {
  const LoggedError& logged = ExecutorchScope::logged_error();
  const std::string kernel = file.kernel(method, logged.chain, logged.instruction);
  if (kernel.empty()) return "an ExecuTorch kernel refused the input" + (logged.check.empty() ? "" : ": " + logged.check);
  const std::string out = "ExecuTorch's kernel " + kernel + " refused its operands at instruction " +
                          std::to_string(logged.chain) + ":" + std::to_string(logged.instruction);
  return logged.check.empty() || logged.from_executor ? out : out + ": " + logged.check;
}

// Anonymous memory: untouched pages are not committed, so that an upper bound costs only address space.
class Pages {
 public:
  explicit Pages(size_t bytes) : bytes_(bytes) {
    if (bytes == 0) return;
    data_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data_ == MAP_FAILED) {
      fail(Code::out_of_memory,
           "[load] method: " + std::to_string(bytes) + " planned bytes could not be allocated. Lower with smaller upper bounds.");
    }
  }
  ~Pages() {
    if (data_) munmap(data_, bytes_);
  }
  Pages(Pages&& other) noexcept : data_(other.data_), bytes_(other.bytes_) { other.data_ = nullptr; }
  Pages(const Pages&) = delete;
  et::Span<uint8_t> span() const { return {static_cast<uint8_t*>(data_), bytes_}; }

 private:
  void* data_ = nullptr;
  size_t bytes_;
};

// External weight file, mapped for the lifetime of the method. All spans are checked against the file size.
class MappedFile final : public et::NamedDataMap {
 public:
  explicit MappedFile(const MappedWeights& weights) : spans_(weights.spans) {
    const int file = open(weights.path.c_str(), O_RDONLY | O_CLOEXEC);
    struct stat info{};
    if (file < 0 || fstat(file, &info) != 0) refuse_file(weights.path, file);
    bytes_ = static_cast<size_t>(info.st_size);
    if (bytes_ > 0) {
      data_ = mmap(nullptr, bytes_, PROT_READ, MAP_PRIVATE, file, 0);
      if (data_ == MAP_FAILED) refuse_file(weights.path, file);
    }
    close(file);
    for (const auto& [key, span] : spans_) {
      const auto [offset, size] = span;
      if (offset < 0 || size < 0 || offset > info.st_size || size > info.st_size - offset) {
        unmap();
        fail(Code::invalid_program, "[load] weight '" + key + "': it is recorded at offset " + std::to_string(offset) + " with " +
                                        std::to_string(size) + " bytes, outside " + weights.path + ". Lower the model again.");
      }
      keys_.push_back(key.c_str());
    }
  }
  ~MappedFile() override { unmap(); }
  MappedFile(const MappedFile&) = delete;

  et::Result<const et::TensorLayout> get_tensor_layout(std::string_view) const override { return et::Error::NotFound; }
  et::Result<et::FreeableBuffer> get_data(std::string_view key) const override {
    const auto it = spans_.find(std::string(key));
    if (it == spans_.end()) return et::Error::NotFound;
    return et::FreeableBuffer(static_cast<const char*>(data_) + it->second.first, static_cast<size_t>(it->second.second),
                              release_pages);
  }
  et::Error load_data_into(std::string_view key, void* buffer, size_t size) const override {
    const auto it = spans_.find(std::string(key));
    if (it == spans_.end()) return et::Error::NotFound;
    if (size > static_cast<size_t>(it->second.second)) return et::Error::InvalidArgument;
    std::memcpy(buffer, static_cast<const char*>(data_) + it->second.first, size);
    return et::Error::Ok;
  }
  et::Result<uint32_t> get_num_keys() const override { return static_cast<uint32_t>(keys_.size()); }
  et::Result<const char*> get_key(uint32_t i) const override {
    if (i >= keys_.size()) return et::Error::InvalidArgument;
    return keys_[i];
  }

 private:
  [[noreturn]] static void refuse_file(const std::string& path, int file) {
    const std::string why = std::strerror(errno);
    if (file >= 0) close(file);
    fail(Code::invalid_argument, "[load] " + path + ": cannot be mapped (" + why + ").");
  }
  // Drops the pages that contain only these bytes; they stay mapped and are read again on access.
  static void release_pages(void*, void* data, size_t bytes) {
    const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE)), at = reinterpret_cast<uintptr_t>(data);
    const uintptr_t first = (at + page - 1) / page * page, end = (at + bytes) / page * page;
    if (first < end) madvise(reinterpret_cast<void*>(first), end - first, MADV_DONTNEED);
  }
  void unmap() {
    if (data_) munmap(data_, bytes_);
  }

  const Spans spans_;
  std::vector<const char*> keys_;  // keys of `spans_`
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

// Event tracer that records events while enabled.
class EventRecorder final : public et::EventTracer {
 public:
  EventRecorder() { record(nullptr); }

  void record(std::vector<MethodEvent>* events) {
    events_ = events;
    using Level = et::EventTracerProfilingLevel;
    set_event_tracer_profiling_level(events ? Level::kProfileAllEvents : Level::kProfileMethodOnly);
  }

  void create_event_block(const char*) override {}
  et::EventTracerEntry start_profiling(const char* name, et::ChainID, et::DebugHandle) override { return begin(name, false); }
  et::EventTracerEntry start_profiling_delegate(const char* name, et::DelegateDebugIntId) override { return begin(name, true); }
  void end_profiling(et::EventTracerEntry entry) override { end(entry, nullptr, 0); }
  void end_profiling_delegate(et::EventTracerEntry entry, const void* metadata, size_t bytes) override {
    end(entry, metadata, bytes);
  }
  void log_profiling_delegate(const char* name, et::DelegateDebugIntId, et_timestamp_t start, et_timestamp_t stop,
                              const void* metadata, size_t bytes) override {
    if (events_) events_->push_back({name ? name : "", text(metadata, bytes), nanoseconds(start), nanoseconds(stop), true});
  }
  void track_allocation(et::AllocatorID, size_t) override {}
  et::AllocatorID track_allocator(const char*) override { return 0; }
  et::Result<bool> log_evalue(const et::EValue&, et::LoggedEValueType) override { return false; }
  using Id = et::DelegateDebugIntId;
  et::Result<bool> log_intermediate_output_delegate(const char*, Id, const Tensor&) override { return false; }
  et::Result<bool> log_intermediate_output_delegate(const char*, Id, const et::ArrayRef<Tensor>) override { return false; }
  et::Result<bool> log_intermediate_output_delegate(const char*, Id, const int&) override { return false; }
  et::Result<bool> log_intermediate_output_delegate(const char*, Id, const bool&) override { return false; }
  et::Result<bool> log_intermediate_output_delegate(const char*, Id, const double&) override { return false; }
  void set_delegation_intermediate_output_filter(et::EventTracerFilterBase*) override {}

 private:
  static int64_t nanoseconds(et_timestamp_t ticks) {
    const et_tick_ratio_t ratio = et::pal_ticks_to_ns_multiplier();
    return static_cast<int64_t>(ticks * ratio.numerator / ratio.denominator);
  }
  static std::string text(const void* metadata, size_t bytes) {
    return metadata ? std::string(static_cast<const char*>(metadata), bytes) : "";
  }

  et::EventTracerEntry begin(const char* name, bool delegated) {
    et::EventTracerEntry entry{};
    entry.event_id = -1;
    if (!events_) return entry;
    entry.event_id = static_cast<int64_t>(events_->size());
    events_->push_back({name ? name : "", "", nanoseconds(et::pal_current_ticks()), 0, delegated});
    return entry;
  }
  void end(const et::EventTracerEntry& entry, const void* metadata, size_t bytes) {
    if (!events_ || entry.event_id < 0 || entry.event_id >= static_cast<int64_t>(events_->size())) return;
    MethodEvent& event = (*events_)[static_cast<size_t>(entry.event_id)];
    event.end = nanoseconds(et::pal_current_ticks());
    event.metadata = text(metadata, bytes);
  }

  std::vector<MethodEvent>* events_ = nullptr;
};

// Copies an input into our memory; throws if it does not fit.
const void* copy_into(et::Span<uint8_t> memory, const Argument& arg, size_t i) {
  size_t bytes = dtype_bytes(arg.dtype);
  for (size_t d = 0; d < arg.rank; ++d) bytes *= static_cast<size_t>(arg.sizes[d]);
  if (bytes > memory.size())
    fail(Code::invalid_argument, "[run] input " + std::to_string(i) + ": is larger than the method allows.");
  if (bytes > 0) std::memcpy(memory.data(), arg.data, bytes);
  return memory.data();
}

// Storage for the sizes and strides of an input tensor; lives as long as the method.
struct Input {
  std::vector<SizesType> sizes;
  std::vector<DimOrderType> order;
  std::vector<StridesType> strides;
};

}  // namespace

struct Method::Loaded {
  std::unique_ptr<MmapDataLoader> loader;
  std::unique_ptr<et::Program> program;
  std::unique_ptr<MappedFile> weights;
  std::vector<Pages> pages;
  std::vector<et::Span<uint8_t>> spans;
  std::unique_ptr<et::HierarchicalAllocator> planned;
  MallocMemoryAllocator method_memory, temp_memory;
  std::unique_ptr<et::MemoryManager> memory;
  EventRecorder recorder;
  const std::vector<et::Kernel> kernels = checked_kernels();
  std::unique_ptr<et::Method> method;  // last: destroyed first
  std::vector<Input> inputs;
  std::map<size_t, Pages> mutated_inputs;  // own memory for inputs that the method mutates: the caller's may be too small
  size_t planned_bytes = 0;

  Loaded(const PteFile& file, const std::string& name, const MappedWeights& mapped);
  TensorImpl tensor(size_t i, const Argument& arg);
  void set_input(size_t i, const MethodInput& input, const std::string& name);
  void write_output(size_t i, ResultSink& results);
};

Method::Loaded::Loaded(const PteFile& file, const std::string& name, const MappedWeights& mapped) {
  auto opened = MmapDataLoader::from(file.open_path().c_str(), MmapDataLoader::MlockConfig::NoMlock);
  if (!opened.ok()) refuse("load", file.path(), "cannot be mapped", opened.error());
  loader = std::make_unique<MmapDataLoader>(std::move(opened.get()));
  auto read = et::Program::load(loader.get(), et::Program::Verification::InternalConsistency);
  if (!read.ok()) refuse("load", file.path(), "is not a program that ExecuTorch reads", read.error());
  program = std::make_unique<et::Program>(std::move(read.get()));
  const auto meta = program->method_meta(name.c_str());
  if (!meta.ok()) refuse("load", file.path(), "has no method '" + name + "'", meta.error());
  for (size_t i = 0; i < meta->num_memory_planned_buffers(); ++i) {
    const auto bytes = meta->memory_planned_buffer_size(i);
    if (!bytes.ok() || bytes.get() < 0) refuse("load", file.path(), "has a memory plan of unknown size", bytes.error());
    planned_bytes += static_cast<size_t>(bytes.get());
    pages.emplace_back(static_cast<size_t>(bytes.get()));
    spans.push_back(pages.back().span());
  }
  planned = std::make_unique<et::HierarchicalAllocator>(et::Span<et::Span<uint8_t>>(spans.data(), spans.size()));
  memory = std::make_unique<et::MemoryManager>(&method_memory, planned.get(), &temp_memory);
  if (!mapped.path.empty()) weights = std::make_unique<MappedFile>(mapped);
  auto loaded =
      program->load_method(name.c_str(), memory.get(), &recorder, weights.get(), nullptr, {kernels.data(), kernels.size()});
  if (!loaded.ok()) refuse("load", file.path(), "its method '" + name + "' cannot be loaded", loaded.error());
  method = std::make_unique<et::Method>(std::move(loaded.get()));
  inputs.resize(method->inputs_size());
  for (const auto& [i, bytes] : file.written_inputs(name)) mutated_inputs.emplace(i, Pages(bytes));
}

Method::Method(std::shared_ptr<const PteFile> file, const std::string& name, const MappedWeights& weights)
    : file_(std::move(file)), name_(name), weights_(weights) {
  load();
}

Method::~Method() = default;

void Method::load() {
  const ExecutorchScope inside;
  try {
    loaded_ = std::make_unique<Loaded>(*file_, name_, weights_);
  } catch (const Aborted&) {
    fail(Code::invalid_program, "[load] " + file_->path() + ": ExecuTorch cannot load its method '" + name_ + "' (" +
                                    ExecutorchScope::logged_error().check + ").");
  }
  planned_bytes_ = loaded_->planned_bytes;
}

// ExecuTorch's sizes and strides are int32.
TensorImpl Method::Loaded::tensor(size_t i, const Argument& arg) {
  Input& in = inputs[i];
  in.sizes.resize(arg.rank);
  in.order.resize(arg.rank);
  in.strides.resize(arg.rank);
  int64_t stride = 1;
  for (size_t d = arg.rank; d-- > 0;) {
    if (arg.sizes[d] > INT32_MAX || stride > INT32_MAX) {
      fail(Code::invalid_argument, "[run] input " + std::to_string(i) + ": its sizes do not fit ExecuTorch's int32.");
    }
    in.sizes[d] = static_cast<SizesType>(arg.sizes[d]);
    in.order[d] = static_cast<DimOrderType>(d);
    in.strides[d] = static_cast<StridesType>(stride);
    stride *= arg.sizes[d] > 0 ? arg.sizes[d] : 1;
  }
  return TensorImpl(to_scalar_type(arg.dtype), static_cast<ssize_t>(arg.rank), in.sizes.data(), const_cast<void*>(arg.data),
                    in.order.data(), in.strides.data());
}

void Method::Loaded::set_input(size_t i, const MethodInput& input, const std::string& name) {
  et::Error status = et::Error::Ok;
  switch (input.kind) {
    case MethodInput::Kind::number: status = method->set_input(et::EValue(input.number), i); break;
    case MethodInput::Kind::boolean: status = method->set_input(et::EValue(input.boolean), i); break;
    case MethodInput::Kind::none: status = method->set_input(et::EValue(), i); break;
    case MethodInput::Kind::argument:
      if (input.argument.dtype == DType::integer) {
        status = method->set_input(et::EValue(input.argument.value), i);
      } else {
        Argument argument = input.argument;
        if (const auto it = mutated_inputs.find(i); it != mutated_inputs.end())
          argument.data = copy_into(it->second.span(), argument, i);
        TensorImpl impl = tensor(i, argument);  // temporary: set_input keeps only the data pointer
        status = method->set_input(et::EValue(Tensor(&impl)), i);
      }
  }
  if (status != et::Error::Ok) refuse("run", "method '" + name + "'", "ExecuTorch refused input " + std::to_string(i), status);
}

void Method::Loaded::write_output(size_t i, ResultSink& results) {
  const et::EValue& value = method->get_output(i);
  if (value.isTensor()) {
    const Tensor& t = value.toTensor();
    DType dtype;
    if (!to_dtype(t.scalar_type(), &dtype)) {
      fail(Code::not_supported,
           "[run] output " + std::to_string(i) + ": keepdim does not carry dtype " + et::toString(t.scalar_type()) + ".");
    }
    if (!is_contiguous(t))
      fail(Code::not_supported, "[run] output " + std::to_string(i) + ": only the default dim order is supported.");
    const std::vector<int64_t> sizes(t.sizes().begin(), t.sizes().end());
    if (t.nbytes() > 0 && !t.const_data_ptr()) fail(Code::internal, "[run] output " + std::to_string(i) + ": it has no memory.");
    void* to = results.tensor(dtype, sizes.data(), sizes.size());
    if (t.nbytes() > 0) std::memcpy(to, t.const_data_ptr(), t.nbytes());
  } else if (value.isInt()) {
    results.integer(value.toInt());
  } else if (value.isDouble()) {
    results.number(value.toDouble());
  } else if (value.isBool()) {
    results.boolean(value.toBool());
  } else if (value.isString()) {
    results.text(std::string(value.toString()));
  } else {
    results.none();
  }
}

void Method::run(const MethodInput* inputs, size_t count, ResultSink& results, std::vector<MethodEvent>* events) {
  const std::lock_guard<Lock> guard(lock_);
  if (!loaded_) load();
  Loaded& l = *loaded_;
  const ExecutorchScope inside(&l.recorder);
  if (count != l.inputs.size()) {
    fail(Code::invalid_argument, "[run] method '" + name_ + "': expected " + std::to_string(l.inputs.size()) + " inputs, got " +
                                     std::to_string(count) + ".");
  }
  try {
    for (size_t i = 0; i < count; ++i) l.set_input(i, inputs[i], name_);
    l.recorder.record(events);
    const et::Error status = l.method->execute();
    l.recorder.record(nullptr);
    if (status != et::Error::Ok) refuse("run", "method '" + name_ + "'", describe_failure(*file_, name_), status);
  } catch (const Aborted&) {
    loaded_.reset();
    fail(Code::invalid_argument, "[run] method '" + name_ + "': " + describe_failure(*file_, name_) + ".");
  }
  for (size_t i = 0; i < l.method->outputs_size(); ++i) l.write_output(i, results);
}

}  // namespace keepdim
