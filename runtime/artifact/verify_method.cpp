// Verification of the values of a method: buffers, tensors, lists, kernels and delegates.
#include "artifact/verify_method.h"

#include <algorithm>
#include <array>

#include "core/json.h"

namespace keepdim {

using flatbuffer::damaged;
using flatbuffer::Vector;

namespace {

namespace tensor_fields {  // field order of program.fbs
enum : unsigned {
  scalar_type,
  storage_offset,
  sizes,
  dim_order,
  requires_grad,
  data_buffer_idx,
  allocation_info,
  layout,
  shape_dynamism,
  extra_tensor_info
};
}

const char* const kTagNames[] = {"nothing",           "None",
                                 "an integer",        "a bool",
                                 "a float",           "a tensor",
                                 "a string",          "a list of integers",
                                 "a list of floats",  "a list of bools",
                                 "a list of tensors", "a list of optional tensors"};

constexpr size_t kMaxRank = 16;          // ExecuTorch's limit
constexpr size_t kMaxOperatorName = 99;  // likewise

// Element size by torch's dtype number; 0 if ExecuTorch has no such tensors.
size_t element_bytes(int8_t dtype) {
  static constexpr uint8_t bytes[] = {1, 1, 2, 4, 8, 2, 4, 8, 4, 8, 16, 1, 0, 0, 0, 2};
  if (dtype >= 27 && dtype <= 29) return size_t{2} << (dtype - 27);  // uint16, uint32, uint64
  return dtype >= 0 && static_cast<size_t>(dtype) < std::size(bytes) ? bytes[dtype] : 0;
}

// Checks that the data of a tensor are inside their segment and aligned for the element type.
void check_data_span(const DataOffsets& all, uint32_t i, uint64_t bytes, size_t width, const std::string& subject) {
  const uint64_t offset = all.offsets[checked_index(i, all.offsets.size(), "the data of " + subject)];
  if (offset > all.segment.size || bytes > all.segment.size - offset)
    damaged("the data of " + subject + " reach beyond their segment");
  if ((all.segment.offset + offset) % width != 0) damaged("the data of " + subject + " are not aligned");
}

}  // namespace

size_t checked_index(int64_t i, size_t count, const std::string& what) {
  if (i < 0 || static_cast<uint64_t>(i) >= count) {
    damaged(what + " is " + std::to_string(i) + ", and there are " + std::to_string(count));
  }
  return static_cast<size_t>(i);
}

MethodFacts MethodVerifier::verify(const Table& plan, std::string_view name) {
  method_ = "method '" + std::string(name) + "' ";
  read_plan(plan);
  return std::move(facts_);
}

void MethodVerifier::read_plan(const Table& plan) {
  facts_ = {};
  values_.clear();
  operators_.clear();
  calls_.clear();
  read_buffers(plan);
  const auto values = plan.vector<uint32_t>(plan_fields::values);
  if (!values) damaged(method_ + "has no values");
  values_.resize(values->size());
  for (size_t i = 0; i < values->size(); ++i) read_value(plan.element(*values, i), i);
  for (const FileValue& v : values_) {  // after all are read: items may refer to later values
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
    if (v.tag == Tag::tensor && v.read_only) damaged(method_ + "takes a constant as an input");
    if (v.writer != kNoWriter) damaged(method_ + "takes a value as two inputs");
    v.input = true;
    v.planned_input = v.memory;
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
  check_writes(inputs);
  check_memory(outputs);
}

void MethodVerifier::read_buffers(const Table& plan) {
  planned_.clear();
  uint64_t all = 0;
  const auto sizes = plan.vector<int64_t>(plan_fields::buffer_sizes);
  for (size_t i = 1; sizes && i < sizes->size(); ++i) {  // buffer 0 is reserved
    const int64_t size = (*sizes)[i];
    if (size < 0) damaged(method_ + "plans a negative number of bytes");
    all += std::min<uint64_t>(static_cast<uint64_t>(size), layout_.limits.planned_bytes);
    if (static_cast<uint64_t>(size) > layout_.limits.planned_bytes || all > layout_.limits.planned_bytes) {
      fail(Code::out_of_memory, "[load] " + method_.substr(0, method_.size() - 1) + ": plans more than " +
                                    std::to_string(layout_.limits.planned_bytes) +
                                    " bytes, the memory limit. Lower with smaller upper bounds, or raise memory_limit.");
    }
    planned_.push_back(static_cast<uint64_t>(size));
  }
  if (const auto devices = plan.vector<uint32_t>(plan_fields::buffer_device)) {
    for (size_t i = 0; i < devices->size(); ++i) {
      if (plan.element(*devices, i).scalar<int8_t>(1) != 0) damaged(method_ + "plans memory that is not CPU memory");
    }
  }
}

std::vector<size_t> MethodVerifier::read_indices(const std::optional<Vector<int32_t>>& list, const std::string& what) {
  std::vector<size_t> out;
  for (size_t i = 0; list && i < list->size(); ++i) out.push_back(value_index((*list)[i], what));
  return out;
}

size_t MethodVerifier::value_index(int64_t i, const std::string& what) {
  return checked_index(i, values_.size(), method_ + what);
}

void MethodVerifier::read_value(const Table& table, size_t i) {
  FileValue& v = values_[i];
  const uint8_t tag = table.scalar<uint8_t>(0);
  if (tag == 0 || tag > static_cast<uint8_t>(Tag::optional_list)) damaged(method_ + label("value", i) + " has no type");
  v.tag = static_cast<Tag>(tag);
  const auto body = table.table(1);
  if (v.tag == Tag::null) return;
  if (!body) damaged(method_ + label("value", i) + " is missing");
  switch (v.tag) {
    case Tag::integer: v.number = body->scalar<int64_t>(0); return;
    case Tag::boolean:
      if (body->scalar<uint8_t>(0) > 1) damaged(method_ + label("value", i) + " is neither true nor false");
      return;
    case Tag::number: body->scalar<double>(0); return;
    case Tag::string:
      if (!body->string(0)) damaged(method_ + label("string", i) + " is missing");
      return;
    case Tag::tensor: return read_tensor(*body, i);
    case Tag::int_list: return read_items<int64_t>(*body, i, values_.size());
    case Tag::tensor_list:
    case Tag::optional_list:
      return read_items<int32_t>(*body, i, i);  // ExecuTorch resolves them immediately, so only earlier values
    case Tag::number_list:
      if (!body->vector<double>(0)) damaged(method_ + label("list", i) + " is missing");
      return;
    case Tag::bool_list: {
      const auto items = body->vector<uint8_t>(0);
      if (!items) damaged(method_ + label("list", i) + " is missing");
      for (size_t k = 0; k < items->size(); ++k) {
        if ((*items)[k] > 1) damaged(method_ + label("list", i) + " holds what is neither true nor false");
      }
      return;
    }
    default: return;
  }
}

// List of value indices below `known`.
template <typename T>
void MethodVerifier::read_items(const Table& body, size_t i, size_t known) {
  FileValue& v = values_[i];
  const auto items = body.vector<T>(0);
  if (!items) damaged(method_ + label("list", i) + " is missing");
  for (size_t k = 0; k < items->size(); ++k) {
    const int64_t item = (*items)[k];
    if (v.tag == Tag::optional_list && item == -1) {
      v.items.push_back(-1);
      continue;
    }
    const size_t at_item = checked_index(item, known, method_ + label("list", i) + ": its element");
    if (v.tag != Tag::int_list && values_[at_item].tag != Tag::tensor)
      damaged(method_ + label("list", i) + " holds what is not a tensor");
    v.items.push_back(item);
  }
}

// Reads sizes and dim order; returns the size in bytes at the upper bounds.
uint64_t MethodVerifier::read_sizes(const Table& t, FileValue& v, const std::string& subject) {
  const auto sizes = t.vector<int32_t>(tensor_fields::sizes);
  const auto order = t.vector<uint8_t>(tensor_fields::dim_order);
  if (!sizes || !order || sizes->size() > kMaxRank || order->size() != sizes->size())
    damaged(subject + " has no sizes, or too many");
  v.rank = sizes->size();
  std::array<bool, kMaxRank> seen{};
  uint64_t bytes = element_bytes(v.dtype);
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
  return empty ? 0 : bytes;
}

// Memory of a tensor: planned, a constant in the file, or none.
void MethodVerifier::read_memory(const Table& t, FileValue& v, const std::string& subject) {
  const size_t width = element_bytes(v.dtype);
  const uint32_t data = t.scalar<uint32_t>(tensor_fields::data_buffer_idx);
  const auto planned = t.table(tensor_fields::allocation_info);
  if (planned) {
    const uint64_t offset = planned->scalar<uint32_t>(1) | static_cast<uint64_t>(planned->scalar<uint32_t>(2)) << 32;
    const size_t memory =
        checked_index(static_cast<int64_t>(planned->scalar<uint32_t>(0)) - 1, planned_.size(), subject + ": its memory");
    if (offset > planned_[memory] || v.bytes > planned_[memory] - offset) damaged(subject + " reaches beyond its memory");
    if (offset % width != 0) damaged(subject + " is not aligned");
    if (data > 0) {
      if (layout_.initial_values.empty()) damaged(subject + " has no initial values");
      check_data_span(layout_.initial_values[0], data, v.bytes, 1, subject);
    }
  } else if (data > 0) {
    check_data_span(layout_.constants, data, v.bytes, width, subject);
    v.read_only = true;
  }
  v.memory = planned || data > 0;
}

void MethodVerifier::read_tensor(const Table& t, size_t i) {
  FileValue& v = values_[i];
  const std::string subject = method_ + label("tensor", i);
  v.dtype = t.scalar<int8_t>(tensor_fields::scalar_type);
  if (element_bytes(v.dtype) == 0) damaged(subject + " has the dtype " + std::to_string(v.dtype) + ", which is not known");
  if (t.scalar<int32_t>(tensor_fields::storage_offset) != 0) damaged(subject + " begins inside its data");
  if (const int8_t dynamism = t.scalar<int8_t>(tensor_fields::shape_dynamism); dynamism < 0 || dynamism > 1)
    damaged(subject + " has sizes without a bound");
  v.bytes = read_sizes(t, v, subject);
  if (const auto extra = t.table(tensor_fields::extra_tensor_info)) {
    if (extra->scalar<int8_t>(2) != 0) damaged(subject + " has its data in another file");
    if (extra->scalar<int8_t>(3) != 0) damaged(subject + " is not CPU memory");
  }
  read_memory(t, v, subject);
}

void MethodVerifier::read_operator(const Table& op) {
  const auto name = op.string(0), overload = op.string(1);
  if (!name || name->empty()) damaged(method_ + "names no kernel");
  std::string full(*name);
  if (overload && !overload->empty()) full += "." + std::string(*overload);
  if (full.size() > kMaxOperatorName) damaged(method_ + "names a kernel that is too long");
  operators_.push_back(std::move(full));
}

void MethodVerifier::read_delegates(const Table& plan) {
  delegates_.clear();
  const auto list = plan.vector<uint32_t>(plan_fields::delegates);
  if (!list) damaged(method_ + "has no list of delegates");
  for (size_t i = 0; i < list->size(); ++i) {
    const Table delegate = plan.element(*list, i);
    const std::string subject = method_ + label("delegate", i);
    const auto id = delegate.string(0);
    const auto processed = delegate.table(1);
    if (!id || id->empty() || !processed) damaged(subject + " has no backend or no data");
    const int8_t location = processed->scalar<int8_t>(0);
    const uint32_t index = processed->scalar<uint32_t>(1);
    if (location < 0 || location > 1) damaged(subject + " has its data nowhere");
    checked_index(index, location == 0 ? layout_.inline_data.size() : layout_.segments.size(), subject + ": its data");
    if (const auto specs = delegate.vector<uint32_t>(2)) {
      for (size_t k = 0; k < specs->size(); ++k) {
        const Table spec = delegate.element(*specs, k);
        if (!spec.string(0) || !spec.vector<uint8_t>(1)) damaged(subject + " has a compile spec without a key or a value");
      }
    }
    DelegateShape shape;
    shape.is_keepdim = id->rfind("Keepdim", 0) == 0;
    if (shape.is_keepdim) {
      if (location == 0)
        read_shape(layout_.inline_data[index], shape);
      else
        read_shape(layout_.read(layout_.file, layout_.segments[index].offset, layout_.segments[index].size), shape);
    }
    delegates_.push_back(std::move(shape));
  }
}

void MethodVerifier::read_shape(std::string_view json, DelegateShape& out) {
  constexpr JsonReader in{"verify"};
  const Json program = in.parse(json, "program");
  const Json& contract = in.field(program, "contract", "program");
  out.inputs = in.list(contract, "inputs", "contract").size();
  for (const Json& output : in.list(contract, "outputs", "contract"))
    out.integers.push_back(in.string(output, "dtype", "output") == "int");
}

}  // namespace keepdim
