// Verification of one method of an ExecuTorch program.
#pragma once
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "artifact/flatbuffer.h"
#include "artifact/pte.h"

namespace keepdim {

struct FileSpan {
  uint64_t offset, size;
};

// Tensor data in one segment; tensors refer to offsets by index.
struct DataOffsets {
  FileSpan segment{0, 0};
  std::vector<uint64_t> offsets;
};

// Program-wide tables shared by its methods.
struct ProgramLayout {
  ProgramLimits limits;
  const void* file;
  ReadFile read;
  std::vector<FileSpan> segments;
  DataOffsets constants;
  std::vector<DataOffsets> initial_values;    // of mutable tensors
  std::vector<std::string_view> inline_data;  // inline payloads of delegates
};

namespace plan_fields {  // field order of program.fbs
enum : unsigned { name, container_meta_type, values, inputs, outputs, chains, operators, delegates, buffer_sizes, buffer_device };
}

enum class Tag : uint8_t {
  none,
  null,
  integer,
  boolean,
  number,
  tensor,
  string,
  int_list,
  number_list,
  bool_list,
  tensor_list,
  optional_list
};

constexpr int64_t kNoWriter = -1, kManyWriters = -2;  // values of FileValue::writer

struct FileValue {
  Tag tag = Tag::none;
  int8_t dtype = 0;            // tensors only
  size_t rank = 0;             // tensors only
  bool memory = false;         // has memory when the method is loaded
  bool input = false;          // is an input of the method
  bool planned_input = false;  // input that is copied into planned memory
  bool used = false;           // an instruction or list has read it with its current type
  uint64_t bytes = 0;          // at the upper bound of its sizes
  bool read_only = false;      // a constant, or an alias of another value
  int64_t number = 0;          // value of an integer
  int64_t writer = kNoWriter;  // instruction that writes it
  std::vector<int64_t> items;  // value indices of a list; -1: none
};

// Effect of one instruction: values read and written, and control flow.
struct InstructionEffect {
  std::string kernel;
  std::vector<size_t> args;                        // kernel arguments
  std::vector<size_t> reads, writes;               // tensors that must be allocated; the written ones among them
  std::vector<std::pair<size_t, size_t>> aliases;  // (from, to): `to` uses the memory of `from` afterwards
  size_t jump = 0;                                 // target if `condition` is false
  size_t condition = SIZE_MAX;
};

// Signature of a keepdim delegate; unknown for other backends.
struct DelegateShape {
  bool is_keepdim = false;
  size_t inputs = 0;
  std::vector<bool> integers;
};

inline std::string label(const char* what, size_t i) { return std::string(what) + " " + std::to_string(i); }
size_t checked_index(int64_t i, size_t count, const std::string& what);

class MethodVerifier {
 public:
  explicit MethodVerifier(const ProgramLayout& layout) : layout_(layout) {}

  // Throws on the first error.
  MethodFacts verify(const flatbuffer::Table& plan, std::string_view name);

 private:
  using Table = flatbuffer::Table;

  // verify_method.cpp: values, kernels and delegates.
  void read_plan(const Table& plan);
  void read_buffers(const Table& plan);
  std::vector<size_t> read_indices(const std::optional<flatbuffer::Vector<int32_t>>& list, const std::string& what);
  size_t value_index(int64_t i, const std::string& what);
  void read_value(const Table& table, size_t i);
  template <typename T>
  void read_items(const Table& body, size_t i, size_t known);
  uint64_t read_sizes(const Table& t, FileValue& v, const std::string& subject);
  void read_memory(const Table& t, FileValue& v, const std::string& subject);
  void read_tensor(const Table& t, size_t i);
  void read_operator(const Table& op);
  void read_delegates(const Table& plan);
  static void read_shape(std::string_view json, DelegateShape& out);

  // verify_calls.cpp: instructions, and checks of the whole method.
  void read_chain(const Table& chain);
  void add_writer(size_t value);
  void add_reads(size_t value, InstructionEffect& call);
  void add_writes(size_t value, InstructionEffect& call);
  void read_kernel(const Table& table, InstructionEffect& call);
  [[noreturn]] void wrong_arguments(const InstructionEffect& call);
  void check_size_of(InstructionEffect& call);
  void check_view(InstructionEffect& call);
  void check_scalars(InstructionEffect& call, std::string_view letters);
  void check_window(const InstructionEffect& call);
  void check_types(InstructionEffect& call, std::string_view letters, bool results);
  void read_delegate_call(const Table& table, InstructionEffect& call);
  void read_move(const Table& table, InstructionEffect& call);
  void alias_memory(size_t from, size_t to, InstructionEffect& call);
  void read_jump(const Table& table, InstructionEffect& call, size_t first, size_t count);
  void check_loop(size_t jump, size_t first);
  void check_writes(const std::vector<size_t>& inputs);
  void check_memory(const std::vector<size_t>& outputs);

  const ProgramLayout& layout_;
  std::string method_;  // "method 'forward' ", for error messages
  std::vector<uint64_t> planned_;
  std::vector<FileValue> values_;
  std::vector<std::string> operators_;
  std::vector<DelegateShape> delegates_;
  std::vector<InstructionEffect> calls_;
  std::vector<size_t> must_not_change_;  // values that no instruction may write
  int64_t instruction_ = 0;              // current instruction
  size_t check_steps_ = 0;               // work of superlinear checks, over all methods
  MethodFacts facts_;
};

}  // namespace keepdim
