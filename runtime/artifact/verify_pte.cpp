// Verification of an ExecuTorch program (schema program.fbs): every index, size, type and reference that its loader and kernels
// use. This file checks program-wide tables; verify_method.cpp and verify_calls.cpp check the methods.
#include <set>

#include "artifact/verify_method.h"

namespace keepdim {

namespace {

using flatbuffer::Buffer;
using flatbuffer::damaged;
using flatbuffer::Table;

constexpr size_t kMaxMethodName = 255;

namespace program_fields {  // field order of program.fbs
enum : unsigned {
  version,
  execution_plan,
  constant_buffer,
  backend_delegate_data,
  segments,
  constant_segment,
  mutable_data_segments,
  named_data
};
}

struct Header {
  uint64_t program, segments;  // size of the program; offset of its segments
};

Header read_header(const ProgramLayout& layout) {
  const uint64_t bytes = layout.limits.file_bytes;
  if (bytes < 64) damaged("it is shorter than a program");
  const std::string head = layout.read(layout.file, 0, 64);
  const Buffer buffer(head);
  if (head.compare(8, 4, "eh00") != 0) return {bytes, 0};  // no header: the whole file is the program
  if (buffer.read<uint32_t>(12) < 24) damaged("its header is too short");
  const Header header{buffer.read<uint64_t>(16), buffer.read<uint64_t>(24)};
  if (header.program < 64 || header.program > bytes || header.segments > bytes) damaged("its header points beyond its end");
  return header;
}

void read_segments(const Table& program, uint64_t base, ProgramLayout& layout) {
  const auto list = program.vector<uint32_t>(program_fields::segments);
  const uint64_t left = layout.limits.file_bytes - base;
  for (size_t i = 0; list && i < list->size(); ++i) {
    const Table segment = program.element(*list, i);
    const uint64_t offset = segment.scalar<uint64_t>(0), size = segment.scalar<uint64_t>(1);
    if (offset > left || size > left - offset) damaged(label("segment", i) + " reaches beyond its end");
    layout.segments.push_back({base + offset, size});
  }
}

DataOffsets read_offsets(const Table& table, const ProgramLayout& layout, const std::string& what) {
  DataOffsets out;
  const auto list = table.vector<uint64_t>(1);
  for (size_t i = 0; list && i < list->size(); ++i) out.offsets.push_back((*list)[i]);
  if (out.offsets.size() > 1 || (!out.offsets.empty() && !layout.segments.empty()))
    out.segment = layout.segments[checked_index(table.scalar<uint32_t>(0), layout.segments.size(), "the segment of " + what)];
  return out;
}

void read_constants(const Table& program, ProgramLayout& layout) {
  if (const auto old = program.vector<uint32_t>(program_fields::constant_buffer); old && old->size() > 0)
    damaged("it keeps constants as ExecuTorch did before version 0.7");
  if (const auto constants = program.table(program_fields::constant_segment))
    layout.constants = read_offsets(*constants, layout, "constants");
  const auto list = program.vector<uint32_t>(program_fields::mutable_data_segments);
  for (size_t i = 0; list && i < list->size(); ++i)
    layout.initial_values.push_back(read_offsets(program.element(*list, i), layout, "initial values"));
}

void check_named_data(const Table& program, const ProgramLayout& layout) {
  const auto list = program.vector<uint32_t>(program_fields::named_data);
  std::set<std::string_view> keys;
  for (size_t i = 0; list && i < list->size(); ++i) {
    const Table named = program.element(*list, i);
    const auto key = named.string(0);
    if (!key || !keys.insert(*key).second) damaged(label("weight", i) + " has no key of its own");
    checked_index(named.scalar<uint32_t>(1), layout.segments.size(), "the segment of weight '" + std::string(*key) + "'");
  }
}

void read_inline_data(const Table& program, ProgramLayout& layout) {
  const auto list = program.vector<uint32_t>(program_fields::backend_delegate_data);
  for (size_t i = 0; list && i < list->size(); ++i) {
    const auto data = program.element(*list, i).vector<char>(0);
    if (!data) damaged(label("delegate data", i) + " is missing");
    layout.inline_data.emplace_back(data->data(), data->size());
  }
}

}  // namespace

std::map<std::string, MethodFacts> verify_program(const ProgramLimits& limits, const void* file, ReadFile read) {
  ProgramLayout layout{limits, file, read, {}, {}, {}, {}};
  const Header header = read_header(layout);
  const std::string bytes = read(file, 0, header.program);
  Buffer buffer(bytes);
  if (bytes.compare(4, 4, "ET12") != 0) damaged("it is not a program of ExecuTorch 1");
  const Table program = Table::root(buffer);
  read_segments(program, header.segments, layout);
  read_constants(program, layout);
  check_named_data(program, layout);
  read_inline_data(program, layout);
  const auto plans = program.vector<uint32_t>(program_fields::execution_plan);
  if (!plans || plans->size() == 0) damaged("it has no methods");
  std::set<std::string_view> names;
  MethodVerifier verifier(layout);
  std::map<std::string, MethodFacts> out;
  for (size_t i = 0; i < plans->size(); ++i) {
    const Table plan = program.element(*plans, i);
    const auto name = plan.string(plan_fields::name);
    if (!name || name->empty() || name->size() > kMaxMethodName || !names.insert(*name).second)
      damaged(label("method", i) + " has no name of its own");
    out.emplace(*name, verifier.verify(plan, *name));
  }
  return out;
}

}  // namespace keepdim
