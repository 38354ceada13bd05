// The C++ API: loads and calls a file, as keepdim/module.py and keepdim/artifact/signature.py do in Python.
#include <executorch/extension/tensor/tensor_ptr.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <mutex>

#include "artifact/sha256.h"
#include "core/json.h"
#include "executorch/guarded.h"
#include "executorch/method.h"
#include "executorch/types.h"
#include "keepdim/keepdim.h"

namespace keepdim {

namespace {

using executorch::extension::TensorPtr;

constexpr const char* kContractMethod = "keepdim_contract";
constexpr JsonReader in{"load"};

// How an input is passed to ExecuTorch: as is, as the size of an empty tensor (value - offset), or as a one-element tensor.
// ExecuTorch specialises plain integers, so dynamic integers are passed as tensors.
struct Transport {
  enum class Kind : uint8_t { plain, size, item } kind = Kind::plain;
  int64_t offset = 0;
};

struct Signature {
  std::vector<Transport> transports;  // one per contract input
  std::vector<Json> constants;        // likewise: required value of an input of dtype python
  std::vector<size_t> mutated;        // inputs that the method mutates; their new values precede its outputs
  MappedWeights mapped;               // external weights; `path` is the file name only
  uint64_t mapped_bytes = 0;
  std::string mapped_sha256;
};

Signature read_signature(const Json& j, const Contract& contract) {
  const std::string subject = "signature";
  Signature s;
  const size_t count = contract.inputs.size();
  for (const Json& t : in.list(j, "transports", subject)) {
    if (!t.is_array() || t.size() != 2 || !t[0].is_string()) in.refuse(subject, "'transports' is malformed.");
    s.transports.push_back(
        {in.choice<Transport::Kind>(t[0].get_ref<const std::string&>(), {"", "size", "item"}, "transport", subject),
         in.as_integer(t[1], "transports", subject)});
  }
  for (const Json& c : in.list(j, "constants", subject)) s.constants.push_back(c);
  if (s.transports.size() != count || s.constants.size() != count)
    in.refuse(subject, "it does not describe the " + std::to_string(count) + " inputs of the contract.");
  if (j.contains("mutated")) {
    for (const Json& i : in.list(j, "mutated", subject)) {
      s.mutated.push_back(in.index(i, "mutated", count, subject));
      const DType dtype = contract.inputs[s.mutated.back()].dtype;
      const bool twice = std::count(s.mutated.begin(), s.mutated.end(), s.mutated.back()) > 1;
      if (twice || dtype == DType::integer || dtype == DType::python)
        in.refuse(subject, "'mutated' names an input twice, or one that is not a tensor.");
    }
  }
  if (!j.contains("mapped") || j["mapped"].is_null()) return s;
  const Json& mapped = j["mapped"];
  s.mapped.path = in.string(mapped, "name", subject);
  if (s.mapped.path.empty() || s.mapped.path == "." || s.mapped.path == ".." ||
      s.mapped.path.find_first_of(std::string("/\0", 2)) != std::string::npos) {
    in.refuse(subject, "the name of its file of weights is not a plain file name.");
  }
  s.mapped_bytes = in.natural(mapped, "size", subject);
  s.mapped_sha256 = in.string(mapped, "sha256", subject);
  const Json& spans = in.field(mapped, "spans", subject);
  if (!spans.is_object()) in.wrong_type(subject, "spans", "an object", spans);
  for (const auto& [key, span] : spans.items()) {
    if (!span.is_array() || span.size() != 2) in.refuse(subject, "'spans' is malformed.");
    s.mapped.spans[key] = {in.as_integer(span[0], "spans", subject), in.as_integer(span[1], "spans", subject)};
  }
  return s;
}

// Result of a method that returns a string.
class TextResult final : public ResultSink {
 public:
  void* tensor(DType, const int64_t*, size_t) override { wrong(); }
  void integer(int64_t) override { wrong(); }
  void number(double) override { wrong(); }
  void boolean(bool) override { wrong(); }
  void text(const std::string& value) override { value_ = value; }
  void none() override { wrong(); }
  std::string value_;

 private:
  [[noreturn]] static void wrong() { in.refuse("contract", "it is not a string."); }
};

std::string read_text(const std::shared_ptr<const PteFile>& file, const char* method) {
  TextResult text;
  Method(file, method).run(nullptr, 0, text);
  return std::move(text.value_);
}

// Results that own their memory.
class OwnedResults final : public ResultSink {
 public:
  void* tensor(DType dtype, const int64_t* sizes, size_t rank) override {
    std::vector<SizesType> shape(sizes, sizes + rank);
    size_t bytes = dtype_bytes(dtype);
    for (size_t d = 0; d < rank; ++d) bytes *= static_cast<size_t>(sizes[d]);
    tensors_.push_back(
        executorch::extension::make_tensor_ptr(std::move(shape), std::vector<uint8_t>(bytes), {}, {}, to_scalar_type(dtype)));
    values.emplace_back(*tensors_.back());
    return tensors_.back()->mutable_data_ptr();
  }
  void integer(int64_t value) override { values.emplace_back(value); }
  void number(double value) override { values.emplace_back(value); }
  void boolean(bool value) override { values.emplace_back(value); }
  void text(const std::string&) override { values.emplace_back(); }
  void none() override { values.emplace_back(); }
  std::vector<et::EValue> values;

 private:
  std::vector<TensorPtr> tensors_;
};

// Checks that the external weight file is the one that the model was lowered with.
void check_weights(const std::string& path, const Signature& s, bool verify) {
  struct stat info{};
  if (stat(path.c_str(), &info) != 0 || !S_ISREG(info.st_mode)) {
    fail(Code::invalid_argument,
         "[load] " + path + ": the file of weights does not exist. Put it next to the .pte, or give its path in LoadOptions.");
  }
  if (static_cast<uint64_t>(info.st_size) != s.mapped_bytes || (verify && file_sha256(path) != s.mapped_sha256)) {
    fail(Code::invalid_argument,
         "[load] " + path +
             ": is not the file of weights that the model was lowered from. Give that file, or lower the model again.");
  }
}

// Storage for the sizes and data of one input during a call.
struct InputStorage {
  std::vector<int64_t> sizes;
  std::vector<char> copy;  // contiguous copy, if needed
};

}  // namespace

struct Module::Loaded {
  std::shared_ptr<const PteFile> file;
  std::string json;
  Contract contract;
  Signature signature;
  std::vector<std::string> names;
  std::unique_ptr<Method> method;

  Argument argument(size_t i, const et::EValue& value, InputStorage& in) const;
  Argument result(size_t i, const et::EValue& value, InputStorage& in) const;
  MethodInput method_input(size_t i, const et::EValue& value, const Argument& argument, InputStorage& in) const;
  void check_constant(size_t i, const et::EValue& value) const;
  std::shared_ptr<OwnedResults> run(const std::vector<et::EValue>& inputs);
  [[noreturn]] void refuse(size_t i, const std::string& fact) const {
    fail(Code::invalid_argument, "[bind] input " + std::to_string(i) + " '" + contract.inputs[i].name + "': " + fact);
  }
};

Argument Module::Loaded::argument(size_t i, const et::EValue& value, InputStorage& in) const {
  const Spec& spec = contract.inputs[i];
  Argument arg{DType::python};
  if (spec.dtype == DType::python) return arg;
  if (value.isInt()) {
    arg.dtype = DType::integer;
    arg.value = value.toInt();
    return arg;
  }
  if (!value.isTensor()) refuse(i, std::string("expected dtype ") + dtype_name(spec.dtype) + ", got " + kind_name(value) + ".");
  const Tensor& t = value.toTensor();
  if (!to_dtype(t.scalar_type(), &arg.dtype))
    refuse(i, std::string("expected dtype ") + dtype_name(spec.dtype) + ", got " + et::toString(t.scalar_type()) + ".");
  in.sizes.assign(t.sizes().begin(), t.sizes().end());
  arg.rank = in.sizes.size();
  arg.sizes = in.sizes.data();
  arg.data = t.const_data_ptr();
  if (t.nbytes() > 0 && !arg.data) refuse(i, "the tensor has no data.");
  if (!is_contiguous(t)) {
    copy_contiguous(t, in.copy);
    arg.data = in.copy.data();
  }
  return arg;
}

// Results are contiguous (allocated by OwnedResults).
Argument Module::Loaded::result(size_t i, const et::EValue& value, InputStorage& in) const {
  Argument arg{DType::python};
  if (value.isInt()) {
    arg.dtype = DType::integer;
    arg.value = value.toInt();
  } else if (value.isTensor()) {
    const Tensor& t = value.toTensor();
    to_dtype(t.scalar_type(), &arg.dtype);
    in.sizes.assign(t.sizes().begin(), t.sizes().end());
    arg.rank = in.sizes.size();
    arg.sizes = in.sizes.data();
    arg.data = t.const_data_ptr();
  } else {
    fail(Code::internal, "[run] output " + std::to_string(i) + ": is " + kind_name(value) + ".");
  }
  return arg;
}

// An input of dtype python must be the contract's constant, or none.
void Module::Loaded::check_constant(size_t i, const et::EValue& value) const {
  const Json& known = signature.constants[i];
  const bool same = value.isNone() || (value.isBool() && known == value.toBool()) ||
                    (value.isInt() && known.is_number_integer() && known == value.toInt()) ||
                    (value.isDouble() && known.is_number_float() && known == value.toDouble());
  if (!same) refuse(i, "is the constant " + known.dump() + " of the contract, got another.");
}

MethodInput Module::Loaded::method_input(size_t i, const et::EValue& value, const Argument& argument, InputStorage& in) const {
  MethodInput out;
  out.argument = argument;
  const Transport& transport = signature.transports[i];
  if (contract.inputs[i].dtype == DType::python) {
    check_constant(i, value);
    const Json& known = signature.constants[i];
    out.kind = MethodInput::Kind::none;
    if (known.is_boolean()) {
      out.kind = MethodInput::Kind::boolean;
      out.boolean = known.get<bool>();
    } else if (known.is_number_float()) {
      out.kind = MethodInput::Kind::number;
      out.number = known.get<double>();
    } else if (known.is_number_integer()) {
      out.kind = MethodInput::Kind::argument;
      out.argument = Argument{DType::integer};
      out.argument.value = known.get<int64_t>();
    }
  } else if (transport.kind == Transport::Kind::size) {
    int64_t size = 0;
    if (__builtin_sub_overflow(argument.value, transport.offset, &size) || size < 0)
      refuse(i, "the integer is outside of the range that the method takes.");
    in.sizes = {size, 0};
    out.argument = Argument{DType::f32, 2, in.sizes.data()};
  } else if (transport.kind == Transport::Kind::item) {
    in.copy.resize(sizeof(int64_t));
    std::memcpy(in.copy.data(), &argument.value, sizeof(int64_t));
    out.argument = Argument{DType::i64, 0, nullptr, in.copy.data()};
  }
  return out;
}

std::shared_ptr<OwnedResults> Module::Loaded::run(const std::vector<et::EValue>& given) {
  const size_t count = contract.inputs.size();
  if (given.size() != count) {
    fail(Code::invalid_argument,
         "[bind] call: expected " + std::to_string(count) + " inputs, got " + std::to_string(given.size()) + ".");
  }
  std::vector<InputStorage> memory(count);
  std::vector<Argument> arguments(count, Argument{DType::python});
  for (size_t i = 0; i < count; ++i) arguments[i] = argument(i, given[i], memory[i]);
  std::vector<int64_t> bound, values;
  contract.bind(arguments.data(), count, bound, values);
  for (size_t i : signature.mutated) {
    if (!given[i].isTensor() || !is_contiguous(given[i].toTensor()))
      refuse(i, "is changed by the call, and has to be a contiguous tensor.");
  }
  std::vector<MethodInput> inputs;
  for (size_t i = 0; i < count; ++i) inputs.push_back(method_input(i, given[i], arguments[i], memory[i]));
  auto owned = std::make_shared<OwnedResults>();
  method->run(inputs.data(), count, *owned);
  const size_t changed = signature.mutated.size();
  if (owned->values.size() != changed + contract.outputs.size())
    fail(Code::internal, "[run] call: the method's results are not those of its contract.");
  std::vector<et::EValue> outputs(owned->values.begin() + static_cast<ptrdiff_t>(changed), owned->values.end());
  if (contract.symbols.size() > contract.input_symbols || !contract.ensures.empty()) {
    std::vector<InputStorage> storage(outputs.size());
    std::vector<Argument> results;
    for (size_t i = 0; i < outputs.size(); ++i) results.push_back(result(i, outputs[i], storage[i]));
    contract.bind_results(results.data(), results.size(), bound, values);
  }
  for (size_t k = 0; k < changed; ++k) {
    if (!owned->values[k].isTensor()) refuse(signature.mutated[k], "got a new value that is not a tensor.");
    const Tensor &to = given[signature.mutated[k]].toTensor(), &from = owned->values[k].toTensor();
    if (to.nbytes() != from.nbytes() || to.scalar_type() != from.scalar_type())
      refuse(signature.mutated[k], "got a new value of another size.");
    if (from.nbytes() > 0) std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), from.nbytes());
  }
  owned->values = std::move(outputs);
  return owned;
}

Module::Module(std::unique_ptr<Loaded> loaded) : loaded_(std::move(loaded)) {}
Module::~Module() = default;
const std::vector<std::string>& Module::inputs() const { return loaded_->names; }
const std::string& Module::contract() const { return loaded_->json; }

et::Result<Results> Module::forward(const std::vector<et::EValue>& inputs) noexcept {
  std::shared_ptr<OwnedResults> owned;
  const et::Error status = guarded([&] { owned = loaded_->run(inputs); });
  if (status != et::Error::Ok) return status;
  return Results(std::move(owned->values), owned);
}

et::Error check_file(const std::string& path, bool weights) noexcept {
  return guarded([&] { PteFile(path, weights); });
}

et::Result<std::unique_ptr<Module>> load(const std::string& path, const LoadOptions& options) noexcept {
  std::unique_ptr<Module> out;
  const et::Error status = guarded([&] {
    auto l = std::make_unique<Module::Loaded>();
    l->file = std::make_shared<PteFile>(path, options.verify_weights);
    l->json = read_text(l->file, kContractMethod);
    l->contract = Contract::parse(l->json);
    l->signature = read_signature(in.field(in.parse(l->json, "contract"), "signature", "contract"), l->contract);
    for (const Spec& spec : l->contract.inputs) l->names.push_back(spec.name);
    MappedWeights weights = l->signature.mapped;
    if (!weights.path.empty()) {
      const size_t folder = path.rfind('/');
      const std::string default_path = folder == std::string::npos ? weights.path : path.substr(0, folder + 1) + weights.path;
      weights.path = options.weights.empty() ? default_path : options.weights;
      check_weights(weights.path, l->signature, options.verify_weights);
    } else if (!options.weights.empty()) {
      fail(Code::invalid_argument, "[load] " + path + ": holds all its weights itself. Leave LoadOptions::weights out.");
    }
    l->method = std::make_unique<Method>(l->file, "forward", weights);
    out.reset(new Module(std::move(l)));
  });
  if (status != et::Error::Ok) return status;
  return out;
}

}  // namespace keepdim
