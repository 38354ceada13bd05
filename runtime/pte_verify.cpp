// The structure of ExecuTorch's program (its schema is program.fbs): every index, size, type and reference that its loader
// and its kernels use. A value has one type in every call, so that the types of all arguments can be checked here. Constants are never written: they are mapped read-only.
#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <unordered_map>

#include "flatbuffer.h"
#include "json.h"
#include "pte.h"

namespace keepdim {

namespace {

using flatbuffer::Buffer;
using flatbuffer::damaged;
using flatbuffer::Table;
using flatbuffer::Vector;

// Fields of the tables of program.fbs, in its order.
namespace program_fields { enum : unsigned { version, execution_plan, constant_buffer, backend_delegate_data, segments, constant_segment, mutable_data_segments, named_data }; }
namespace plan_fields { enum : unsigned { name, container_meta_type, values, inputs, outputs, chains, operators, delegates, buffer_sizes, buffer_device }; }
namespace tensor_fields { enum : unsigned { scalar_type, storage_offset, sizes, dim_order, requires_grad, data_buffer_idx, allocation_info, layout, shape_dynamism, extra_tensor_info }; }

enum class Tag : uint8_t { none, null, integer, boolean, number, tensor, string, int_list, number_list, bool_list, tensor_list, optional_list };
const char* const kTagNames[] = {"nothing", "None", "an integer", "a bool", "a float", "a tensor", "a string", "a list of integers",
                                 "a list of floats", "a list of bools", "a list of tensors", "a list of optional tensors"};

constexpr size_t kMaxRank = 16;        // ExecuTorch's
constexpr size_t kMaxOperatorName = 99;  // likewise
constexpr size_t kMaxMethodName = 255;
constexpr int64_t kMaxWindow = 1 << 22;   // elements
constexpr size_t kMaxSteps = size_t{1} << 27;  // of a check that grows with a product of counts: a tenth of a second
constexpr int64_t kNoWriter = -1, kManyWriters = -2;

// Bytes of an element by torch's number of a dtype; 0: ExecuTorch has no such tensors.
size_t element_bytes(int8_t dtype) {
  static constexpr uint8_t bytes[] = {1, 1, 2, 4, 8, 2, 4, 8, 4, 8, 16, 1, 0, 0, 0, 2};
  if (dtype >= 27 && dtype <= 29) return size_t{2} << (dtype - 27);  // uint16, uint32, uint64
  return dtype >= 0 && static_cast<size_t>(dtype) < std::size(bytes) ? bytes[dtype] : 0;
}
constexpr int8_t kBoolType = 11;
bool is_float_type(int8_t dtype) { return (dtype >= 5 && dtype <= 7) || dtype == 15; }

// One letter for each argument of a kernel (cmake/kernel_arguments.py), "?" before an optional one, "!" before one that
// is written. The results follow the arguments in a call.
struct KernelRow {
  const char* name;
  const char* arguments;
};
constexpr KernelRow kKernels[] = {
#include "kernel_arguments.inc"
};

// Kernels over sizes: the types of the operands, then that of the result. In "xx" both operands are integers or floats,
// and "=" is an integer if they all are, otherwise a float; "." is anything, and ":" the same as the operand before it.
constexpr KernelRow kScalarKernels[] = {
    {"aten::sym_numel", "ti"},
    {"aten::_local_scalar_dense", "te"},
    {"executorch_prim::add.Scalar", "xx="},
    {"executorch_prim::sub.Scalar", "xx="},
    {"executorch_prim::mul.Scalar", "xx="},
    {"executorch_prim::floordiv.Scalar", "xx="},
    {"executorch_prim::floordiv.int", "iii"},
    {"executorch_prim::mod.Scalar", "iii"},
    {"executorch_prim::mod.int", "iii"},
    {"executorch_prim::truediv.Scalar", "xxd"},
    {"executorch_prim::eq.Scalar", "xxb"},
    {"executorch_prim::ge.Scalar", "xxb"},
    {"executorch_prim::gt.Scalar", "xxb"},
    {"executorch_prim::le.Scalar", "xxb"},
    {"executorch_prim::lt.Scalar", "xxb"},
    {"executorch_prim::neg.Scalar", "x="},
    {"executorch_prim::ceil.Scalar", "di"},
    {"executorch_prim::round.Scalar", "di"},
    {"executorch_prim::trunc.Scalar", "di"},
    {"executorch_prim::sym_float.Scalar", "nd"},
    {"executorch_prim::sym_int.Scalar", "ni"},
    {"executorch_prim::sym_ite.Scalar", "b.::"},
    {"executorch_prim::sym_max.Scalar", "iii"},
    {"executorch_prim::sym_min.Scalar", "iii"},
    {"executorch_prim::sym_not.Scalar", "bb"},
};

const char* arguments_of(const std::string& kernel, bool* over_sizes) {
  static const auto* const all = [] {
    auto* map = new std::unordered_map<std::string, std::pair<const char*, bool>>;
    for (const KernelRow& row : kKernels) (*map)[row.name] = {row.arguments, false};
    for (const KernelRow& row : kScalarKernels) (*map)[row.name] = {row.arguments, true};
    return map;
  }();
  const auto it = all->find(kernel);
  if (it == all->end()) return nullptr;
  *over_sizes = it->second.second;
  return it->second.first;
}

bool is_number(Tag tag) { return tag == Tag::integer || tag == Tag::number; }

bool has_type(char letter, Tag tag) {
  switch (letter) {
    case 't': return tag == Tag::tensor;
    case 'i': return tag == Tag::integer;
    case 'd': return tag == Tag::number;
    case 'n': return is_number(tag) || tag == Tag::boolean;
    case 'x': return is_number(tag);
    case 'b': return tag == Tag::boolean;
    case 's': return tag == Tag::string;
    case 'I': return tag == Tag::int_list;
    case 'D': return tag == Tag::number_list;
    case 'B': return tag == Tag::bool_list;
    case 'L': return tag == Tag::tensor_list;
    case 'O': return tag == Tag::optional_list;
    case '.': return is_number(tag) || tag == Tag::boolean;
    default: return false;
  }
}

struct FileValue {
  Tag tag = Tag::none;
  int8_t dtype = 0;             // of a tensor
  size_t rank = 0;              // likewise
  bool memory = false;          // has its data when the method is loaded
  bool input = false;           // of the method
  bool own = false;             // an input: data are copied into memory that the file plans
  bool used = false;            // some instruction or list reads it as what it is by now
  uint64_t bytes = 0;           // at its largest size
  bool kept = false;            // nobody may write it: a constant, or what has the memory of another value
  int64_t number = 0;           // of an integer
  int64_t writer = kNoWriter;   // the instruction that writes it
  std::vector<int64_t> items;   // of a list: values; -1: none
};

struct Span {
  uint64_t offset, size;
};

std::string at(const char* what, size_t i) { return std::string(what) + " " + std::to_string(i); }

size_t checked_index(int64_t i, size_t count, const std::string& what) {
  if (i < 0 || static_cast<uint64_t>(i) >= count) {
    damaged(what + " is " + std::to_string(i) + ", and there are " + std::to_string(count));
  }
  return static_cast<size_t>(i);
}

class ProgramVerifier {
 public:
  ProgramVerifier(const ProgramLimits& limits, const void* file, ReadFile read) : limits_(limits), file_(file), read_(read) {}

  WrittenInputs run() {
    const uint64_t size = read_header();
    const std::string bytes = read_(file_, 0, size);
    Buffer buffer(bytes);
    if (bytes.compare(4, 4, "ET12") != 0) damaged("it is not a program of ExecuTorch 1");
    const Table program = Table::root(buffer);
    read_segments(program);
    const auto plans = program.vector<uint32_t>(program_fields::execution_plan);
    if (!plans || plans->size() == 0) damaged("it has no methods");
    std::set<std::string_view> names;
    WrittenInputs out;
    for (size_t i = 0; i < plans->size(); ++i) {
      const Table plan = program.element(*plans, i);
      const auto name = plan.string(plan_fields::name);
      if (!name || name->empty() || name->size() > kMaxMethodName || !names.insert(*name).second) damaged(at("method", i) + " has no name of its own");
      method_ = "method '" + std::string(*name) + "' ";
      read_plan(plan);
      if (!written_.empty()) out.emplace(*name, std::move(written_));
    }
    return out;
  }

 private:
  // ---- the file

  uint64_t read_header() {
    if (limits_.file_bytes < 64) damaged("it is shorter than a program");
    const std::string head = read_(file_, 0, 64);
    const Buffer buffer(head);
    if (head.compare(8, 4, "eh00") != 0) return limits_.file_bytes;  // no header: all of it is the program
    if (buffer.read<uint32_t>(12) < 24) damaged("its header is too short");
    const uint64_t program = buffer.read<uint64_t>(16);
    base_ = buffer.read<uint64_t>(24);
    if (program < 64 || program > limits_.file_bytes || base_ > limits_.file_bytes) damaged("its header points beyond its end");
    return program;
  }

  void read_segments(const Table& program) {
    if (const auto list = program.vector<uint32_t>(program_fields::segments)) {
      for (size_t i = 0; i < list->size(); ++i) {
        const Table segment = program.element(*list, i);
        const uint64_t offset = segment.scalar<uint64_t>(0), size = segment.scalar<uint64_t>(1);
        if (offset > limits_.file_bytes - base_ || size > limits_.file_bytes - base_ - offset) damaged(at("segment", i) + " reaches beyond its end");
        segments_.push_back({base_ + offset, size});
      }
    }
    if (const auto old = program.vector<uint32_t>(program_fields::constant_buffer); old && old->size() > 0) {
      damaged("it keeps constants as ExecuTorch did before version 0.7");
    }
    if (const auto constants = program.table(program_fields::constant_segment)) constants_ = read_offsets(*constants, "constants");
    if (const auto list = program.vector<uint32_t>(program_fields::mutable_data_segments)) {
      for (size_t i = 0; i < list->size(); ++i) mutable_.push_back(read_offsets(program.element(*list, i), "initial values"));
    }
    if (const auto list = program.vector<uint32_t>(program_fields::named_data)) {
      std::set<std::string_view> keys;
      for (size_t i = 0; i < list->size(); ++i) {
        const Table named = program.element(*list, i);
        const auto key = named.string(0);
        if (!key || !keys.insert(*key).second) damaged(at("weight", i) + " has no key of its own");
        checked_index(named.scalar<uint32_t>(1), segments_.size(), "the segment of weight '" + std::string(*key) + "'");
      }
    }
    if (const auto list = program.vector<uint32_t>(program_fields::backend_delegate_data)) {
      for (size_t i = 0; i < list->size(); ++i) {
        const auto data = program.element(*list, i).vector<char>(0);
        if (!data) damaged(at("delegate data", i) + " is missing");
        inline_data_.emplace_back(data->data(), data->size());
      }
    }
  }

  struct Offsets {
    Span segment{0, 0};
    std::vector<uint64_t> offsets;
  };

  Offsets read_offsets(const Table& table, const std::string& what) {
    Offsets out;
    const auto list = table.vector<uint64_t>(1);
    for (size_t i = 0; list && i < list->size(); ++i) out.offsets.push_back((*list)[i]);
    if (out.offsets.size() > 1 || (!out.offsets.empty() && !segments_.empty())) out.segment = segments_[checked_index(table.scalar<uint32_t>(0), segments_.size(), "the segment of " + what)];
    return out;
  }

  // That a tensor's bytes lie inside its segment, aligned for its elements.
  void check_stored(const Offsets& all, uint32_t i, uint64_t bytes, size_t width, const std::string& subject) {
    const uint64_t offset = all.offsets[checked_index(i, all.offsets.size(), "the data of " + subject)];
    if (offset > all.segment.size || bytes > all.segment.size - offset) damaged("the data of " + subject + " reach beyond their segment");
    if ((all.segment.offset + offset) % width != 0) damaged("the data of " + subject + " are not aligned");
  }

  // ---- a method

  void read_plan(const Table& plan) {
    written_.clear();
    values_.clear();
    operators_.clear();
    calls_.clear();
    read_buffers(plan);
    const auto values = plan.vector<uint32_t>(plan_fields::values);
    if (!values) damaged(method_ + "has no values");
    values_.resize(values->size());
    for (size_t i = 0; i < values->size(); ++i) read_value(plan.element(*values, i), i);
    for (const FileValue& v : values_) {  // which may point at later values
      for (int64_t item : v.items) {
        if (v.tag != Tag::int_list) break;
        FileValue& listed = values_[static_cast<size_t>(item)];
        if (listed.tag != Tag::integer) damaged(method_ + "lists a value that is not an integer");
        listed.used = true;
      }
    }
    const auto inputs = read_indices(plan.vector<int32_t>(plan_fields::inputs), "input");
    const auto outputs = read_indices(plan.vector<int32_t>(plan_fields::outputs), "output");
    for (size_t i : inputs) {
      FileValue& v = values_[i];
      if (v.tag >= Tag::int_list) damaged(method_ + "takes " + kTagNames[static_cast<size_t>(v.tag)]);
      if (v.tag == Tag::tensor && v.kept) damaged(method_ + "takes a constant as an input");
      if (v.writer != kNoWriter) damaged(method_ + "takes a value as two inputs");
      v.input = true;
      v.own = v.memory;
      v.memory = true;
      v.writer = kManyWriters;
    }
    if (const auto list = plan.vector<uint32_t>(plan_fields::operators)) {
      for (size_t i = 0; i < list->size(); ++i) read_operator(plan.element(*list, i));
    }
    read_delegates(plan);
    const auto chains = plan.vector<uint32_t>(plan_fields::chains);
    if (!chains || chains->size() == 0) damaged(method_ + "has no instructions");
    for (size_t i = 0; i < chains->size(); ++i) read_chain(plan.element(*chains, i));
    check_written(inputs);
    check_memory(outputs);
  }

  void read_buffers(const Table& plan) {
    planned_.clear();
    uint64_t all = 0;
    const auto sizes = plan.vector<int64_t>(plan_fields::buffer_sizes);
    for (size_t i = 1; sizes && i < sizes->size(); ++i) {  // the first is not used
      const int64_t size = (*sizes)[i];
      if (size < 0) damaged(method_ + "plans a negative number of bytes");
      all += std::min<uint64_t>(static_cast<uint64_t>(size), limits_.planned_bytes);
      if (static_cast<uint64_t>(size) > limits_.planned_bytes || all > limits_.planned_bytes) {
        fail(Code::out_of_memory, "[load] " + method_.substr(0, method_.size() - 1) + ": plans more than " + std::to_string(limits_.planned_bytes) +
                                      " bytes, the memory limit. Lower with smaller upper bounds, or raise memory_limit.");
      }
      planned_.push_back(static_cast<uint64_t>(size));
    }
    if (const auto devices = plan.vector<uint32_t>(plan_fields::buffer_device)) {
      for (size_t i = 0; i < devices->size(); ++i) {
        if (plan.element(*devices, i).scalar<int8_t>(1) != 0) damaged(method_ + "plans memory that is not the CPU's");
      }
    }
  }

  std::vector<size_t> read_indices(const std::optional<Vector<int32_t>>& list, const std::string& what) {
    std::vector<size_t> out;
    for (size_t i = 0; list && i < list->size(); ++i) out.push_back(value_index((*list)[i], what));
    return out;
  }

  size_t value_index(int64_t i, const std::string& what) { return checked_index(i, values_.size(), method_ + what); }

  void read_value(const Table& table, size_t i) {
    FileValue& v = values_[i];
    const uint8_t tag = table.scalar<uint8_t>(0);
    if (tag == 0 || tag > static_cast<uint8_t>(Tag::optional_list)) damaged(method_ + at("value", i) + " has no type");
    v.tag = static_cast<Tag>(tag);
    const auto body = table.table(1);
    if (v.tag == Tag::null) return;
    if (!body) damaged(method_ + at("value", i) + " is missing");
    switch (v.tag) {
      case Tag::integer: v.number = body->scalar<int64_t>(0); return;
      case Tag::boolean: if (body->scalar<uint8_t>(0) > 1) damaged(method_ + at("value", i) + " is neither true nor false"); return;
      case Tag::number: body->scalar<double>(0); return;
      case Tag::string: if (!body->string(0)) damaged(method_ + at("string", i) + " is missing"); return;
      case Tag::tensor: return read_tensor(*body, i);
      case Tag::int_list: return read_items<int64_t>(*body, i, values_.size());
      case Tag::tensor_list: case Tag::optional_list: return read_items<int32_t>(*body, i, i);  // ExecuTorch reads them at once
      case Tag::number_list: if (!body->vector<double>(0)) damaged(method_ + at("list", i) + " is missing"); return;
      case Tag::bool_list: {
        const auto items = body->vector<uint8_t>(0);
        if (!items) damaged(method_ + at("list", i) + " is missing");
        for (size_t k = 0; k < items->size(); ++k) {
          if ((*items)[k] > 1) damaged(method_ + at("list", i) + " holds what is neither true nor false");
        }
        return;
      }
      default: return;
    }
  }

  // A list of values, of the first `known`.
  template <typename T>
  void read_items(const Table& body, size_t i, size_t known) {
    FileValue& v = values_[i];
    const auto items = body.vector<T>(0);
    if (!items) damaged(method_ + at("list", i) + " is missing");
    for (size_t k = 0; k < items->size(); ++k) {
      const int64_t item = (*items)[k];
      if (v.tag == Tag::optional_list && item == -1) {
        v.items.push_back(-1);
        continue;
      }
      const size_t at_item = checked_index(item, known, method_ + at("list", i) + ": its element");
      if (v.tag != Tag::int_list && values_[at_item].tag != Tag::tensor) damaged(method_ + at("list", i) + " holds what is not a tensor");
      v.items.push_back(item);
    }
  }

  void read_tensor(const Table& t, size_t i) {
    FileValue& v = values_[i];
    const std::string subject = method_ + at("tensor", i);
    v.dtype = t.scalar<int8_t>(tensor_fields::scalar_type);
    const size_t width = element_bytes(v.dtype);
    if (width == 0) damaged(subject + " has the dtype " + std::to_string(v.dtype) + ", which is not known");
    if (t.scalar<int32_t>(tensor_fields::storage_offset) != 0) damaged(subject + " begins inside its data");
    if (const int8_t dynamism = t.scalar<int8_t>(tensor_fields::shape_dynamism); dynamism < 0 || dynamism > 1) damaged(subject + " has sizes without a bound");
    const auto sizes = t.vector<int32_t>(tensor_fields::sizes);
    const auto order = t.vector<uint8_t>(tensor_fields::dim_order);
    if (!sizes || !order || sizes->size() > kMaxRank || order->size() != sizes->size()) damaged(subject + " has no sizes, or too many");
    v.rank = sizes->size();
    std::array<bool, kMaxRank> seen{};
    uint64_t bytes = width;
    bool overflow = false, empty = false;
    for (size_t d = 0; d < v.rank; ++d) {
      const int32_t size = (*sizes)[d];
      if (size < 0) damaged(subject + " has a negative size");
      empty = empty || size == 0;
      overflow = __builtin_mul_overflow(bytes, static_cast<uint64_t>(std::max(size, 1)), &bytes) || bytes > INT64_MAX || overflow;
      const uint8_t dim = (*order)[d];
      if (dim >= v.rank || seen[dim]) damaged(subject + " has no order of its dims");
      seen[dim] = true;
    }
    if (overflow) damaged(subject + " has more elements than memory has addresses");
    if (empty) bytes = 0;
    if (const auto extra = t.table(tensor_fields::extra_tensor_info)) {
      if (extra->scalar<int8_t>(2) != 0) damaged(subject + " has its data in another file");
      if (extra->scalar<int8_t>(3) != 0) damaged(subject + " is not the CPU's");
    }
    const uint32_t data = t.scalar<uint32_t>(tensor_fields::data_buffer_idx);
    const auto planned = t.table(tensor_fields::allocation_info);
    if (planned) {
      const uint64_t offset = planned->scalar<uint32_t>(1) | static_cast<uint64_t>(planned->scalar<uint32_t>(2)) << 32;
      const size_t memory = checked_index(static_cast<int64_t>(planned->scalar<uint32_t>(0)) - 1, planned_.size(), subject + ": its memory");
      if (offset > planned_[memory] || bytes > planned_[memory] - offset) damaged(subject + " reaches beyond its memory");
      if (offset % width != 0) damaged(subject + " is not aligned");
      if (data > 0) {
        if (mutable_.empty()) damaged(subject + " has no initial values");
        check_stored(mutable_[0], data, bytes, 1, subject);
      }
    } else if (data > 0) {
      check_stored(constants_, data, bytes, width, subject);
      v.kept = true;
    }
    v.memory = planned || data > 0;
    v.bytes = bytes;
  }

  void read_operator(const Table& op) {
    const auto name = op.string(0), overload = op.string(1);
    if (!name || name->empty()) damaged(method_ + "names no kernel");
    std::string full(*name);
    if (overload && !overload->empty()) full += "." + std::string(*overload);
    if (full.size() > kMaxOperatorName) damaged(method_ + "names a kernel that is too long");
    operators_.push_back(std::move(full));
  }

  // Inputs of a delegate, and which of its outputs are integers; of other backends nothing is known.
  struct DelegateShape {
    bool ours = false;
    size_t inputs = 0;
    std::vector<bool> integers;
  };

  void read_delegates(const Table& plan) {
    delegates_.clear();
    const auto list = plan.vector<uint32_t>(plan_fields::delegates);
    if (!list) damaged(method_ + "has no list of delegates");
    for (size_t i = 0; i < list->size(); ++i) {
      const Table delegate = plan.element(*list, i);
      const std::string subject = method_ + at("delegate", i);
      const auto id = delegate.string(0);
      const auto processed = delegate.table(1);
      if (!id || id->empty() || !processed) damaged(subject + " has no backend or no data");
      const int8_t location = processed->scalar<int8_t>(0);
      const uint32_t index = processed->scalar<uint32_t>(1);
      if (location < 0 || location > 1) damaged(subject + " has its data nowhere");
      checked_index(index, location == 0 ? inline_data_.size() : segments_.size(), subject + ": its data");
      if (const auto specs = delegate.vector<uint32_t>(2)) {
        for (size_t k = 0; k < specs->size(); ++k) {
          const Table spec = delegate.element(*specs, k);
          if (!spec.string(0) || !spec.vector<uint8_t>(1)) damaged(subject + " has a compile spec without a key or a value");
        }
      }
      DelegateShape shape;
      shape.ours = id->rfind("Keepdim", 0) == 0;
      if (shape.ours) {
        if (location == 0) read_shape(inline_data_[index], shape);
        else read_shape(read_(file_, segments_[index].offset, segments_[index].size), shape);
      }
      delegates_.push_back(std::move(shape));
    }
  }

  static void read_shape(std::string_view json, DelegateShape& out) {
    constexpr JsonReader in{"verify"};
    const Json program = in.parse(json, "program");
    const Json& contract = in.field(program, "contract", "program");
    out.inputs = in.list(contract, "inputs", "contract").size();
    for (const Json& output : in.list(contract, "outputs", "contract")) out.integers.push_back(in.string(output, "dtype", "output") == "int");
  }

  // ---- instructions

  // What one instruction does with values: those it reads, those it writes, and where it may go on.
  struct Call {
    std::string kernel;
    std::vector<size_t> args;          // of a kernel
    std::vector<size_t> reads, writes;  // tensors that need memory; what is written among them
    std::vector<std::pair<size_t, size_t>> shares;  // (from, to): `to` has the memory of `from` from here on
    size_t jump = 0;                   // where to, if the value `condition` is false
    size_t condition = SIZE_MAX;
  };

  void read_chain(const Table& chain) {
    const auto list = chain.vector<uint32_t>(2);
    if (!list) damaged(method_ + "has a chain without instructions");
    const size_t first = calls_.size();
    for (size_t i = 0; i < list->size(); ++i) {
      at_ = static_cast<int64_t>(calls_.size());
      const Table instruction = chain.element(*list, i);
      const auto args = instruction.table(1);
      if (!args) damaged(method_ + at("instruction", i) + " is missing");
      Call call;
      switch (instruction.scalar<uint8_t>(0)) {
        case 1: read_kernel(*args, call); break;
        case 2: read_delegate_call(*args, call); break;
        case 3: read_move(*args, call); break;
        case 4: read_jump(*args, call, first, list->size()); break;
        default: damaged(method_ + at("instruction", i) + " is of a kind that keepdim does not write");
      }
      calls_.push_back(std::move(call));
    }
    for (size_t i = first; i < calls_.size(); ++i) {
      if (calls_[i].condition != SIZE_MAX && calls_[i].jump <= i) check_loop(i, first);
    }
  }

  void wrote(size_t value) {
    int64_t& writer = values_[value].writer;
    writer = writer == kNoWriter ? at_ : kManyWriters;
  }

  void read_all(size_t value, Call& call) {
    values_[value].used = true;
    if (values_[value].tag == Tag::tensor) call.reads.push_back(value);
    if (values_[value].tag == Tag::int_list) return;
    for (int64_t item : values_[value].items) {
      if (item >= 0) call.reads.push_back(static_cast<size_t>(item));
    }
  }

  void write_all(size_t value, Call& call) {
    read_all(value, call);
    if (values_[value].tag == Tag::tensor) call.writes.push_back(value);
    for (int64_t item : values_[value].items) call.writes.push_back(static_cast<size_t>(item));
  }

  void read_kernel(const Table& table, Call& call) {
    call.kernel = operators_[checked_index(table.scalar<int32_t>(0), operators_.size(), method_ + "kernel")];
    if (!table.vector<int32_t>(1)) damaged(method_ + "calls " + call.kernel + " without arguments");
    call.args = read_indices(table.vector<int32_t>(1), "argument of " + call.kernel);
    bool over_sizes = false;
    const char* letters = arguments_of(call.kernel, &over_sizes);
    if (call.kernel == "aten::sym_size.int") return check_size_of(call);
    if (call.kernel == "executorch_prim::et_view.default") return check_view(call);
    if (call.kernel == "executorch_prim::et_copy_index.tensor") return check_types(call, "!tti", false);
    if (over_sizes) return check_scalars(call, letters);
    if (call.kernel.find("_pool") != std::string::npos) check_window(call);
    if (letters) return check_types(call, letters, true);
    for (size_t arg : call.args) read_all(arg, call);  // a kernel that the app brought: it checks its own arguments
  }

  [[noreturn]] void wrong_arguments(const Call& call) { damaged(method_ + "calls " + call.kernel + " with other arguments than it takes"); }

  void check_size_of(Call& call) {
    const auto& a = call.args;
    if (a.size() != 3 || values_[a[0]].tag != Tag::tensor || values_[a[1]].tag != Tag::integer || values_[a[2]].tag != Tag::integer) wrong_arguments(call);
    fixed_.push_back(a[1]);
    values_[a[1]].used = true;
    if (values_[a[1]].number < 0 || static_cast<uint64_t>(values_[a[1]].number) >= values_[a[0]].rank) wrong_arguments(call);
    wrote(a[2]);
  }

  void check_view(Call& call) {
    const auto& a = call.args;
    if (a.size() != 3 || values_[a[0]].tag != Tag::tensor || values_[a[1]].tag != Tag::int_list || values_[a[2]].tag != Tag::tensor) wrong_arguments(call);
    if (values_[a[2]].kept || values_[a[0]].dtype != values_[a[2]].dtype) wrong_arguments(call);
    share(a[0], a[2], call);
  }

  void check_scalars(Call& call, std::string_view letters) {
    const auto& a = call.args;
    if (a.size() != letters.size()) wrong_arguments(call);
    bool floats = false;
    for (size_t i = 0; i + 1 < a.size(); ++i) {
      const Tag tag = values_[a[i]].tag;
      if (letters[i] == ':' ? tag != values_[a[i - 1]].tag : !has_type(letters[i], tag)) wrong_arguments(call);
      floats = floats || tag == Tag::number;
      read_all(a[i], call);
    }
    Tag made = Tag::integer;
    switch (letters.back()) {
      case '=': made = floats ? Tag::number : Tag::integer; break;
      case ':': made = values_[a[a.size() - 2]].tag; break;
      case 'e': made = element_tag(values_[a[0]].dtype); break;
      case 'b': made = Tag::boolean; break;
      case 'd': made = Tag::number; break;
    }
    FileValue& result = values_[a.back()];
    // ExecuTorch writes the bool of a comparison of sizes into what the file calls an integer: it is a bool from here on.
    if (result.tag == Tag::integer && result.writer == kNoWriter && !result.used) result.tag = made;
    if (result.tag != made) wrong_arguments(call);
    wrote(a.back());
  }

  static Tag element_tag(int8_t dtype) {
    return dtype == kBoolType ? Tag::boolean : is_float_type(dtype) ? Tag::number : Tag::integer;
  }

  // A window of pooling is walked whole for every element of the result, however little of it is inside the input.
  void check_window(const Call& call) {
    if (call.args.size() < 2 || values_[call.args[1]].tag != Tag::int_list) return;  // a backward pass has it elsewhere
    int64_t area = 1;
    for (int64_t item : values_[call.args[1]].items) {
      const int64_t size = values_[static_cast<size_t>(item)].number;
      if (size < 0 || size > kMaxWindow || (area *= size) > kMaxWindow) damaged(method_ + "calls " + call.kernel + " with a window that is too large");
    }
  }

  // The arguments, then the results: what was written once more, as it is or in one list.
  void check_types(Call& call, std::string_view letters, bool results) {
    size_t i = 0;
    std::vector<size_t> written;
    for (size_t k = 0; k < letters.size(); ++k, ++i) {
      if (i >= call.args.size()) wrong_arguments(call);
      bool optional = false, out = false;
      for (; letters[k] == '?' || letters[k] == '!'; ++k) (letters[k] == '?' ? optional : out) = true;
      const FileValue& v = values_[call.args[i]];
      if (!has_type(letters[k], v.tag) && !(optional && v.tag == Tag::null) && !(letters[k] == '-' && v.tag == Tag::null)) wrong_arguments(call);
      if (out) {
        write_all(call.args[i], call);
        written.push_back(call.args[i]);
      } else {
        read_all(call.args[i], call);
      }
    }
    if (!results) {
      if (i != call.args.size()) wrong_arguments(call);
      return;
    }
    if (i + 1 != call.args.size()) wrong_arguments(call);
    const size_t result = call.args[i];
    if (written.size() == 1 && result == written[0]) return;
    const FileValue& list = values_[result];
    if (list.tag != Tag::tensor_list) wrong_arguments(call);
    std::vector<int64_t> expected(written.begin(), written.end());
    if (written.size() == 1) expected = values_[written[0]].items;
    if (list.items != expected) wrong_arguments(call);
  }

  void read_delegate_call(const Table& table, Call& call) {
    const size_t i = checked_index(table.scalar<int32_t>(0), delegates_.size(), method_ + "delegate");
    if (!table.vector<int32_t>(1)) damaged(method_ + "calls a delegate without arguments");
    call.args = read_indices(table.vector<int32_t>(1), "argument of a delegate");
    const DelegateShape& shape = delegates_[i];
    if (!shape.ours) {
      for (size_t arg : call.args) read_all(arg, call);
      return;
    }
    if (call.args.size() != shape.inputs + shape.integers.size()) damaged(method_ + at("delegate", i) + " is called with other arguments than it takes");
    for (size_t k = 0; k < call.args.size(); ++k) {
      const size_t arg = call.args[k];
      if (k < shape.inputs) {
        read_all(arg, call);
      } else if (values_[arg].tag != (shape.integers[k - shape.inputs] ? Tag::integer : Tag::tensor)) {
        damaged(method_ + at("delegate", i) + " returns what is of another type");
      } else if (values_[arg].tag == Tag::integer) {
        wrote(arg);
      } else {
        write_all(arg, call);
      }
    }
  }

  void read_move(const Table& table, Call& call) {
    const size_t from = value_index(table.scalar<int32_t>(0), "value to move"), to = value_index(table.scalar<int32_t>(1), "place to move to");
    if (values_[from].tag != values_[to].tag || values_[from].tag >= Tag::string) {
      if (values_[from].tag != Tag::tensor || values_[to].tag != Tag::tensor) damaged(method_ + "moves a value to one of another type");
    }
    if (values_[from].tag == Tag::tensor) {
      if (values_[from].dtype != values_[to].dtype || values_[from].rank != values_[to].rank) damaged(method_ + "moves a tensor to one of another kind");
      share(from, to, call);
    } else {
      values_[from].used = true;
      wrote(to);
    }
  }

  // A tensor gets the memory of another. An input has the caller's, or its own: the next call would write the other's.
  void share(size_t from, size_t to, Call& call) {
    if (values_[to].input) damaged(method_ + at("value", to) + " is an input, and would get the memory of another value");
    call.reads.push_back(from);
    call.shares.emplace_back(from, to);
  }

  void read_jump(const Table& table, Call& call, size_t first, size_t count) {
    const size_t condition = value_index(table.scalar<int32_t>(0), "condition");
    const FileValue& v = values_[condition];
    if (v.tag != Tag::boolean && (v.tag != Tag::tensor || v.dtype != kBoolType)) damaged(method_ + "branches on what is not a bool");
    const int32_t to = table.scalar<int32_t>(1);
    if (to < 0 || static_cast<size_t>(to) > count) damaged(method_ + "jumps to an instruction that does not exist");
    read_all(condition, call);
    call.condition = condition;
    call.jump = first + static_cast<size_t>(to);
  }

  // A jump back ends a loop as ExecuTorch writes it for map and scan: it counts from 0 to the size of a tensor, of which
  // its first instruction takes one element after the other, and is refused beyond the last.
  void check_loop(size_t jump, size_t first) {
    const auto refuse = [&] { damaged(method_ + "has a loop that may not end"); };
    if ((steps_ += calls_.size()) > kMaxSteps) damaged(method_ + "has too many loops");
    if (jump < first + 2 || calls_[jump].jump < first || calls_[jump].jump + 2 >= jump) refuse();
    const Call &compare = calls_[jump - 1], &count = calls_[jump - 2], &take = calls_[calls_[jump].jump];
    if (compare.kernel != "executorch_prim::eq.Scalar" || count.kernel != "executorch_prim::add.Scalar" || take.kernel != "aten::select_copy.int_out") refuse();
    const size_t i = count.args[0], one = count.args[1], end = compare.args[1], done = compare.args[2];
    if (count.args[2] != i || compare.args[0] != i || done != calls_[jump].condition || take.args[2] != i) refuse();
    fixed_.push_back(one);
    if (values_[i].number != 0 || values_[one].number != 1 || values_[i].tag != Tag::integer || values_[one].tag != Tag::integer) refuse();
    const auto writes = [&](const Call& c, size_t value) {
      return c.condition == SIZE_MAX && !c.kernel.empty() && arguments_over_sizes(c) && c.args.back() == value;
    };
    for (size_t k = first; k < calls_.size(); ++k) {
      const Call& c = calls_[k];
      if (k == jump - 2 || !writes(c, i)) continue;
      const bool inside = k >= calls_[jump].jump && k < jump;
      const bool resets = c.kernel == "executorch_prim::sub.Scalar" && c.args[0] == i && (c.args[1] == i || (c.args[1] == end && k == jump + 1));
      if (inside || !resets) refuse();
    }
    if (values_[end].writer < 0 || calls_[static_cast<size_t>(values_[end].writer)].kernel != "aten::sym_size.int") refuse();
    if (static_cast<size_t>(values_[end].writer) >= calls_[jump].jump || values_[done].writer != static_cast<int64_t>(jump - 1)) refuse();
  }

  static bool arguments_over_sizes(const Call& c) {
    bool over_sizes = c.kernel == "aten::sym_size.int";
    if (!over_sizes) arguments_of(c.kernel, &over_sizes);
    return over_sizes;
  }

  // ---- the method as a whole

  // Nothing is written that is mapped read-only, or that has the memory of another value, which may be smaller.
  void check_written(const std::vector<size_t>& inputs) {
    for (const Call& call : calls_) {
      for (const auto& [from, to] : call.shares) values_[to].kept = true;
    }
    std::unordered_map<size_t, size_t> places;
    for (size_t i = 0; i < inputs.size(); ++i) places.emplace(inputs[i], i);
    for (const Call& call : calls_) {
      for (size_t value : call.writes) {
        if (values_[value].kept) damaged(method_ + at("value", value) + " is written, and is a constant or a view");
        if (const auto it = places.find(value); it != places.end() && !values_[value].own) written_[it->second] = values_[value].bytes;
      }
    }
    for (size_t value : fixed_) {
      if (values_[value].writer != kNoWriter) damaged(method_ + at("value", value) + " has to stay as it is, and is written");
    }
    fixed_.clear();
  }

  // Tensors without memory of their own, and those that get another's, have it before they are used, whichever branch was
  // taken: what an earlier call left there is gone.
  void check_memory(const std::vector<size_t>& outputs) {
    std::unordered_map<size_t, size_t> late;
    for (size_t i = 0; i < values_.size(); ++i) {
      if (values_[i].tag == Tag::tensor && !values_[i].memory) late.emplace(i, late.size());
    }
    size_t jumps = 0;
    for (const Call& call : calls_) {
      for (const auto& [from, to] : call.shares) late.emplace(to, late.size());
      jumps += call.condition != SIZE_MAX;
    }
    using Known = std::vector<bool>;
    if (!late.empty() && jumps > kMaxSteps / late.size()) damaged(method_ + "has too many tensors without memory");
    std::map<size_t, Known> joins;  // what is known at the target of a jump
    Known now(late.size(), false);
    bool reached = true;
    const auto join = [&](size_t target) {
      const auto [it, added] = joins.emplace(target, now);
      for (size_t k = 0; !added && k < now.size(); ++k) it->second[k] = it->second[k] && now[k];
    };
    const auto need = [&](size_t value) {
      if (const auto it = late.find(value); it != late.end() && !now[it->second]) damaged(method_ + at("tensor", value) + " is used before it has memory");
    };
    for (size_t i = 0; i <= calls_.size(); ++i) {
      if (const auto it = joins.find(i); it != joins.end()) {
        if (reached) join(i);
        now = it->second;
        reached = true;
      }
      if (i == calls_.size()) break;
      const Call& call = calls_[i];
      for (size_t value : call.reads) need(value);
      for (const auto& [from, to] : call.shares) {
        if (const auto it = late.find(to); it != late.end()) now[it->second] = true;
      }
      if (call.condition != SIZE_MAX && call.jump > i) join(call.jump);
    }
    for (size_t value : outputs) need(value);
  }

  const ProgramLimits limits_;
  const void* const file_;
  const ReadFile read_;
  uint64_t base_ = 0;
  std::vector<Span> segments_;
  Offsets constants_;
  std::vector<Offsets> mutable_;
  std::vector<std::string_view> inline_data_;

  std::string method_;  // "method 'forward' ", for sentences
  std::vector<uint64_t> planned_;
  std::vector<FileValue> values_;
  std::vector<std::string> operators_;
  std::vector<DelegateShape> delegates_;
  std::vector<Call> calls_;
  std::vector<size_t> fixed_;  // values that nothing may write
  int64_t at_ = 0;
  size_t steps_ = 0;
  std::map<size_t, uint64_t> written_;
};

}  // namespace

WrittenInputs verify_program(const ProgramLimits& limits, const void* file, ReadFile read) {
  return ProgramVerifier(limits, file, read).run();
}

}  // namespace keepdim
