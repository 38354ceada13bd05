// Verification of the instructions of a method: argument types (a value has the same type in every call), no writes to
// constants (mapped read-only), no use before allocation, and termination of loops.
#include <algorithm>
#include <unordered_map>

#include "artifact/kernel_signatures.h"
#include "artifact/verify_method.h"

namespace keepdim {

using flatbuffer::damaged;

namespace {

constexpr int64_t kMaxWindow = 1 << 22;             // elements
constexpr size_t kMaxCheckSteps = size_t{1} << 27;  // limit for superlinear checks: about 0.1 s

constexpr int8_t kBoolType = 11;
bool is_float_type(int8_t dtype) { return (dtype >= 5 && dtype <= 7) || dtype == 15; }

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

Tag element_tag(int8_t dtype) { return dtype == kBoolType ? Tag::boolean : is_float_type(dtype) ? Tag::number : Tag::integer; }

bool arguments_over_sizes(const InstructionEffect& c) {
  bool over_sizes = c.kernel == "aten::sym_size.int";
  if (!over_sizes) kernel_signature(c.kernel, &over_sizes);
  return over_sizes;
}

}  // namespace

void MethodVerifier::read_chain(const Table& chain) {
  const auto list = chain.vector<uint32_t>(2);
  if (!list) damaged(method_ + "has a chain without instructions");
  const size_t first = calls_.size();
  facts_.kernels.emplace_back();
  for (size_t i = 0; i < list->size(); ++i) {
    instruction_ = static_cast<int64_t>(calls_.size());
    const Table instruction = chain.element(*list, i);
    const auto args = instruction.table(1);
    if (!args) damaged(method_ + label("instruction", i) + " is missing");
    InstructionEffect call;
    switch (instruction.scalar<uint8_t>(0)) {
      case 1: read_kernel(*args, call); break;
      case 2: read_delegate_call(*args, call); break;
      case 3: read_move(*args, call); break;
      case 4: read_jump(*args, call, first, list->size()); break;
      default: damaged(method_ + label("instruction", i) + " is of a kind that keepdim does not write");
    }
    facts_.kernels.back().push_back(call.kernel);
    calls_.push_back(std::move(call));
  }
  for (size_t i = first; i < calls_.size(); ++i) {
    if (calls_[i].condition != SIZE_MAX && calls_[i].jump <= i) check_loop(i, first);
  }
}

void MethodVerifier::add_writer(size_t value) {
  int64_t& writer = values_[value].writer;
  writer = writer == kNoWriter ? instruction_ : kManyWriters;
}

void MethodVerifier::add_reads(size_t value, InstructionEffect& call) {
  values_[value].used = true;
  if (values_[value].tag == Tag::tensor) call.reads.push_back(value);
  if (values_[value].tag == Tag::int_list) return;
  for (int64_t item : values_[value].items) {
    if (item >= 0) call.reads.push_back(static_cast<size_t>(item));
  }
}

void MethodVerifier::add_writes(size_t value, InstructionEffect& call) {
  add_reads(value, call);
  if (values_[value].tag == Tag::tensor) call.writes.push_back(value);
  for (int64_t item : values_[value].items) call.writes.push_back(static_cast<size_t>(item));
}

void MethodVerifier::read_kernel(const Table& table, InstructionEffect& call) {
  call.kernel = operators_[checked_index(table.scalar<int32_t>(0), operators_.size(), method_ + "kernel")];
  if (!table.vector<int32_t>(1)) damaged(method_ + "calls " + call.kernel + " without arguments");
  call.args = read_indices(table.vector<int32_t>(1), "argument of " + call.kernel);
  bool over_sizes = false;
  const char* letters = kernel_signature(call.kernel, &over_sizes);
  if (call.kernel == "aten::sym_size.int") return check_size_of(call);
  if (call.kernel == "executorch_prim::et_view.default") return check_view(call);
  if (call.kernel == "executorch_prim::et_copy_index.tensor") return check_types(call, "!tti", false);
  if (over_sizes) return check_scalars(call, letters);
  if (call.kernel.find("_pool") != std::string::npos) check_window(call);
  if (letters) return check_types(call, letters, true);
  for (size_t arg : call.args) add_reads(arg, call);  // custom kernel: it checks its own arguments
}

void MethodVerifier::wrong_arguments(const InstructionEffect& call) {
  damaged(method_ + "calls " + call.kernel + " with other arguments than it takes");
}

void MethodVerifier::check_size_of(InstructionEffect& call) {
  const auto& a = call.args;
  if (a.size() != 3 || values_[a[0]].tag != Tag::tensor || values_[a[1]].tag != Tag::integer || values_[a[2]].tag != Tag::integer)
    wrong_arguments(call);
  must_not_change_.push_back(a[1]);
  values_[a[1]].used = true;
  if (values_[a[1]].number < 0 || static_cast<uint64_t>(values_[a[1]].number) >= values_[a[0]].rank) wrong_arguments(call);
  add_writer(a[2]);
}

void MethodVerifier::check_view(InstructionEffect& call) {
  const auto& a = call.args;
  if (a.size() != 3 || values_[a[0]].tag != Tag::tensor || values_[a[1]].tag != Tag::int_list || values_[a[2]].tag != Tag::tensor)
    wrong_arguments(call);
  if (values_[a[2]].read_only || values_[a[0]].dtype != values_[a[2]].dtype) wrong_arguments(call);
  alias_memory(a[0], a[2], call);
}

void MethodVerifier::check_scalars(InstructionEffect& call, std::string_view letters) {
  const auto& a = call.args;
  if (a.size() != letters.size()) wrong_arguments(call);
  bool floats = false;
  for (size_t i = 0; i + 1 < a.size(); ++i) {
    const Tag tag = values_[a[i]].tag;
    if (letters[i] == ':' ? tag != values_[a[i - 1]].tag : !has_type(letters[i], tag)) wrong_arguments(call);
    floats = floats || tag == Tag::number;
    add_reads(a[i], call);
  }
  Tag result_tag = Tag::integer;
  switch (letters.back()) {
    case '=': result_tag = floats ? Tag::number : Tag::integer; break;
    case ':': result_tag = values_[a[a.size() - 2]].tag; break;
    case 'e': result_tag = element_tag(values_[a[0]].dtype); break;
    case 'b': result_tag = Tag::boolean; break;
    case 'd': result_tag = Tag::number; break;
  }
  FileValue& result = values_[a.back()];
  // ExecuTorch stores the bool result of a size comparison in a value declared as an integer; treat it as bool from here on.
  if (result.tag == Tag::integer && result.writer == kNoWriter && !result.used) result.tag = result_tag;
  if (result.tag != result_tag) wrong_arguments(call);
  add_writer(a.back());
}

// ExecuTorch's pooling kernels loop over the whole window for every output, even outside of the input: bound its size.
void MethodVerifier::check_window(const InstructionEffect& call) {
  if (call.args.size() < 2 || values_[call.args[1]].tag != Tag::int_list) return;  // backward kernels have it at another position
  int64_t area = 1;
  for (int64_t item : values_[call.args[1]].items) {
    const int64_t size = values_[static_cast<size_t>(item)].number;
    if (size < 0 || size > kMaxWindow || (area *= size) > kMaxWindow)
      damaged(method_ + "calls " + call.kernel + " with a window that is too large");
  }
}

// Checks arguments and results. A call repeats its out arguments as results, directly or in one list.
void MethodVerifier::check_types(InstructionEffect& call, std::string_view letters, bool results) {
  size_t i = 0;
  std::vector<size_t> written;
  for (size_t k = 0; k < letters.size(); ++k, ++i) {
    if (i >= call.args.size()) wrong_arguments(call);
    bool optional = false, out = false;
    for (; letters[k] == '?' || letters[k] == '!'; ++k) (letters[k] == '?' ? optional : out) = true;
    const FileValue& v = values_[call.args[i]];
    if (!has_type(letters[k], v.tag) && !(optional && v.tag == Tag::null) && !(letters[k] == '-' && v.tag == Tag::null))
      wrong_arguments(call);
    if (out) {
      add_writes(call.args[i], call);
      written.push_back(call.args[i]);
    } else {
      add_reads(call.args[i], call);
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

void MethodVerifier::read_delegate_call(const Table& table, InstructionEffect& call) {
  const size_t i = checked_index(table.scalar<int32_t>(0), delegates_.size(), method_ + "delegate");
  if (!table.vector<int32_t>(1)) damaged(method_ + "calls a delegate without arguments");
  call.args = read_indices(table.vector<int32_t>(1), "argument of a delegate");
  const DelegateShape& shape = delegates_[i];
  if (!shape.is_keepdim) {
    for (size_t arg : call.args) add_reads(arg, call);
    return;
  }
  if (call.args.size() != shape.inputs + shape.integers.size())
    damaged(method_ + label("delegate", i) + " is called with other arguments than it takes");
  for (size_t k = 0; k < call.args.size(); ++k) {
    const size_t arg = call.args[k];
    if (k < shape.inputs) {
      add_reads(arg, call);
    } else if (values_[arg].tag != (shape.integers[k - shape.inputs] ? Tag::integer : Tag::tensor)) {
      damaged(method_ + label("delegate", i) + " returns what is of another type");
    } else if (values_[arg].tag == Tag::integer) {
      add_writer(arg);
    } else {
      add_writes(arg, call);
    }
  }
}

void MethodVerifier::read_move(const Table& table, InstructionEffect& call) {
  const size_t from = value_index(table.scalar<int32_t>(0), "value to move"),
               to = value_index(table.scalar<int32_t>(1), "place to move to");
  if (values_[from].tag != values_[to].tag || values_[from].tag >= Tag::string) {
    if (values_[from].tag != Tag::tensor || values_[to].tag != Tag::tensor)
      damaged(method_ + "moves a value to one of another type");
  }
  if (values_[from].tag == Tag::tensor) {
    if (values_[from].dtype != values_[to].dtype || values_[from].rank != values_[to].rank)
      damaged(method_ + "moves a tensor to one of another kind");
    alias_memory(from, to, call);
  } else {
    values_[from].used = true;
    add_writer(to);
  }
}

// `to` gets the memory of `from`. Not allowed for inputs: the next call would write its input into the memory of `from`.
void MethodVerifier::alias_memory(size_t from, size_t to, InstructionEffect& call) {
  if (values_[to].input) damaged(method_ + label("value", to) + " is an input, and would get the memory of another value");
  call.reads.push_back(from);
  call.aliases.emplace_back(from, to);
}

void MethodVerifier::read_jump(const Table& table, InstructionEffect& call, size_t first, size_t count) {
  const size_t condition = value_index(table.scalar<int32_t>(0), "condition");
  const FileValue& v = values_[condition];
  if (v.tag != Tag::boolean && (v.tag != Tag::tensor || v.dtype != kBoolType))
    damaged(method_ + "branches on what is not a bool");
  const int32_t to = table.scalar<int32_t>(1);
  if (to < 0 || static_cast<size_t>(to) > count) damaged(method_ + "jumps to an instruction that does not exist");
  add_reads(condition, call);
  call.condition = condition;
  call.jump = first + static_cast<size_t>(to);
}

// A backward jump must end a loop in the form that ExecuTorch emits for map and scan: a counter from 0 to the size of a tensor;
// the first instruction selects element i and fails beyond the last.
void MethodVerifier::check_loop(size_t jump, size_t first) {
  const auto refuse = [&] { damaged(method_ + "has a loop that may not end"); };
  if ((check_steps_ += calls_.size()) > kMaxCheckSteps) damaged(method_ + "has too many loops");
  if (jump < first + 2 || calls_[jump].jump < first || calls_[jump].jump + 2 >= jump) refuse();
  const InstructionEffect &compare = calls_[jump - 1], &count = calls_[jump - 2], &take = calls_[calls_[jump].jump];
  if (compare.kernel != "executorch_prim::eq.Scalar" || count.kernel != "executorch_prim::add.Scalar" ||
      take.kernel != "aten::select_copy.int_out")
    refuse();
  const size_t i = count.args[0], one = count.args[1], end = compare.args[1], done = compare.args[2];
  if (count.args[2] != i || compare.args[0] != i || done != calls_[jump].condition || take.args[2] != i) refuse();
  must_not_change_.push_back(one);
  if (values_[i].number != 0 || values_[one].number != 1 || values_[i].tag != Tag::integer || values_[one].tag != Tag::integer)
    refuse();
  const auto writes = [&](const InstructionEffect& c, size_t value) {
    return c.condition == SIZE_MAX && !c.kernel.empty() && arguments_over_sizes(c) && c.args.back() == value;
  };
  for (size_t k = first; k < calls_.size(); ++k) {
    const InstructionEffect& c = calls_[k];
    if (k == jump - 2 || !writes(c, i)) continue;
    const bool inside = k >= calls_[jump].jump && k < jump;
    const bool resets =
        c.kernel == "executorch_prim::sub.Scalar" && c.args[0] == i && (c.args[1] == i || (c.args[1] == end && k == jump + 1));
    if (inside || !resets) refuse();
  }
  if (values_[end].writer < 0 || calls_[static_cast<size_t>(values_[end].writer)].kernel != "aten::sym_size.int") refuse();
  if (static_cast<size_t>(values_[end].writer) >= calls_[jump].jump || values_[done].writer != static_cast<int64_t>(jump - 1))
    refuse();
}

// No writes to constants (mapped read-only) or to aliases, whose memory may be smaller.
void MethodVerifier::check_writes(const std::vector<size_t>& inputs) {
  for (const InstructionEffect& call : calls_) {
    for (const auto& [from, to] : call.aliases) values_[to].read_only = true;
  }
  std::unordered_map<size_t, size_t> positions;
  for (size_t i = 0; i < inputs.size(); ++i) positions.emplace(inputs[i], i);
  for (const InstructionEffect& call : calls_) {
    for (size_t value : call.writes) {
      if (values_[value].read_only) damaged(method_ + label("value", value) + " is written, and is a constant or a view");
      if (const auto it = positions.find(value); it != positions.end() && !values_[value].planned_input)
        facts_.written[it->second] = values_[value].bytes;
    }
  }
  for (size_t value : must_not_change_) {
    if (values_[value].writer != kNoWriter) damaged(method_ + label("value", value) + " has to stay as it is, and is written");
  }
  must_not_change_.clear();
}

// Tensors without planned memory, and aliases, must be allocated before use on every control flow path; memory from an earlier
// call does not count.
void MethodVerifier::check_memory(const std::vector<size_t>& outputs) {
  std::unordered_map<size_t, size_t> unallocated;
  for (size_t i = 0; i < values_.size(); ++i) {
    if (values_[i].tag == Tag::tensor && !values_[i].memory) unallocated.emplace(i, unallocated.size());
  }
  size_t jumps = 0;
  for (const InstructionEffect& call : calls_) {
    for (const auto& [from, to] : call.aliases) unallocated.emplace(to, unallocated.size());
    jumps += call.condition != SIZE_MAX;
  }
  using Allocated = std::vector<bool>;
  if (!unallocated.empty() && jumps > kMaxCheckSteps / unallocated.size())
    damaged(method_ + "has too many tensors without memory");
  std::map<size_t, Allocated> joins;  // state at the target of a jump
  Allocated allocated(unallocated.size(), false);
  bool reached = true;
  const auto join = [&](size_t target) {
    const auto [it, added] = joins.emplace(target, allocated);
    for (size_t k = 0; !added && k < allocated.size(); ++k) it->second[k] = it->second[k] && allocated[k];
  };
  const auto check_allocated = [&](size_t value) {
    if (const auto it = unallocated.find(value); it != unallocated.end() && !allocated[it->second])
      damaged(method_ + label("tensor", value) + " is used before it has memory");
  };
  for (size_t i = 0; i <= calls_.size(); ++i) {
    if (const auto it = joins.find(i); it != joins.end()) {
      if (reached) join(i);
      allocated = it->second;
      reached = true;
    }
    if (i == calls_.size()) break;
    const InstructionEffect& call = calls_[i];
    for (size_t value : call.reads) check_allocated(value);
    for (const auto& [from, to] : call.aliases) {
      if (const auto it = unallocated.find(to); it != unallocated.end()) allocated[it->second] = true;
    }
    if (call.condition != SIZE_MAX && call.jump > i) join(call.jump);
  }
  for (size_t value : outputs) check_allocated(value);
}

}  // namespace keepdim
