// Op: operands, attributes and checks of a node.
#include "mlx/op.h"

#include <algorithm>
#include <cmath>

namespace keepdim::mlx {
namespace {

// MLX supports f64 only on the CPU.
bool needs_cpu(const std::vector<std::optional<Array>>& ins, DType result) {
  return result == DType::f64 ||
         std::any_of(ins.begin(), ins.end(), [](const auto& x) { return x && x->dtype() == mx::float64; });
}

}  // namespace

mx::Dtype to_mlx(DType dtype) {
  switch (dtype) {
    case DType::f32: return mx::float32;
    case DType::f16: return mx::float16;
    case DType::bf16: return mx::bfloat16;
    case DType::f64: return mx::float64;
    case DType::i8: return mx::int8;
    case DType::u8: return mx::uint8;
    case DType::i16: return mx::int16;
    case DType::i32: return mx::int32;
    case DType::i64: return mx::int64;
    case DType::boolean: return mx::bool_;
    default: fail(Code::internal, std::string("[load] mlx: ") + dtype_name(dtype) + " is not a dtype of arrays.");
  }
}

std::string dims_text(const mx::Shape& shape) {
  std::string text = "[";
  for (size_t d = 0; d < shape.size(); ++d) text += (d ? ", " : "") + std::to_string(shape[d]);
  return text + "]";
}

int64_t count_of(const mx::Shape& shape) {
  int64_t n = 1;
  for (auto size : shape) n *= size;
  return n;
}

Array number(double value, mx::Dtype dtype) {
  if (mx::issubdtype(dtype, mx::floating)) return Array(value, dtype);
  return mx::astype(Array(truncate(value), mx::int64), dtype);
}

Array slice_axis(const Array& x, int axis, int from, int to) {
  if (axis < 0) axis += rank_of(x);
  mx::Shape start(x.ndim(), 0), stop = x.shape();
  start[axis] = from;
  stop[axis] = to;
  return mx::slice(x, start, stop);
}

Array host_array(const std::vector<int64_t>& values, mx::Shape shape) {
  return Array(values.begin(), std::move(shape), mx::int64);
}

Op::Op(const Program& program, const Step& step, const int64_t* sizes, Values& values)
    : program_(program), step_(step), sizes_(sizes), values_(values), type_(step.dtype), operands_(step.node->ins.size()) {
  const bool widen = step.rule->widen || step.builder->widen;
  if (widen && step.rule->type_of_result() == 'T') type_ = compute_type(step.dtype);
  for (size_t i = 0; i < ins(); ++i) {
    if (!has(i) || !values_.arrays[step.node->ins[i]]) continue;
    operands_[i] = values_.arrays[step.node->ins[i]];
    if (widen && step.rule->type_of(i) == 'T') operands_[i] = mx::astype(*operands_[i], to_mlx(compute_type(dtype_of(i))));
  }
}

Array Op::run() {
  if (count_of(shape()) == 0) return mx::zeros(shape(), to_mlx(step_.dtype));
  std::optional<mx::StreamContext> on_cpu;
  if (needs_cpu(operands_, type_) && mx::default_device() != mx::Device::cpu) on_cpu.emplace(mx::Device(mx::Device::cpu));
  Array result = [&] {
    try {
      return step_.builder->build(*this);
    } catch (const std::invalid_argument& e) {  // shapes that MLX rejects: the program is invalid
      refuse(std::string(e.what()) + ".");
    }
  }();
  if (result.shape() != shape())
    refuse("result " + dims_text(shape()) + " is not " + dims_text(result.shape()) + ", the shape that its operands give.");
  if (result.dtype() != dtype()) result = mx::astype(result, dtype());
  if (step_.dtype == DType::boolean && type_ != DType::boolean) return mx::not_equal(result, integer(0, result.dtype()));
  return result.dtype() == to_mlx(step_.dtype) ? result : mx::astype(result, to_mlx(step_.dtype));
}

const Array& Op::in(size_t i) const {
  if (i >= operands_.size() || !operands_[i]) refuse("operand " + std::to_string(i) + " is not an array.");
  return *operands_[i];
}

const Attr* Op::attr(const char* name) const {
  const auto it = step_.node->attrs.find(name);
  return it == step_.node->attrs.end() ? nullptr : &it->second;
}

std::vector<int64_t> Op::sizes(const char* name) const {
  std::vector<int64_t> out;
  for (DimId id : std::get<std::vector<DimId>>(*attr(name))) out.push_back(sizes_[id]);
  return out;
}

Axes Op::axes(const char* name, int rank) const {
  Axes out;
  for (int64_t d : sizes(name)) {
    if (d < 0 || d >= rank || std::find(out.begin(), out.end(), d) != out.end())
      refuse(std::string(name) + " are not dims of its operand.");
    out.push_back(static_cast<int>(d));
  }
  return out;
}

int Op::axis(int rank) const {
  const int64_t dim = size("dim");
  if (dim < 0 || dim >= rank) refuse("dim " + std::to_string(dim) + " is out of range for its operand.");
  return static_cast<int>(dim);
}

int Op::choice(const char* name, std::initializer_list<const char*> known) const {
  const auto* found = std::find(known.begin(), known.end(), text(name));
  if (found == known.end()) refuse(std::string(name) + " = '" + text(name) + "' is not known.");
  return static_cast<int>(found - known.begin());
}

Array Op::scalar(const char* name, DType dtype) const {
  const mx::Dtype to = to_mlx(dtype);
  if (const auto* id = std::get_if<DimId>(attr(name))) {
    return bit(dtype) & kFloats ? Array(static_cast<double>(sizes_[*id]), to) : mx::astype(Array(sizes_[*id], mx::int64), to);
  }
  return mlx::number(number(name), to);
}

Array Op::index(const Array& given, int64_t limit, bool wrap) {
  const auto dtype = given.dtype();
  const Array low = integer(wrap ? -limit : 0, dtype), high = integer(limit - 1, dtype);
  const Array inside = mx::logical_and(mx::greater_equal(given, low), mx::less_equal(given, high));
  expect(mx::all(inside), [given, inside, limit, wrap] {
    const Array where = mx::argmin(mx::astype(mx::flatten(inside), mx::int32));
    const Array value = mx::astype(mx::take(mx::flatten(given), where), mx::int64);
    const std::string range = std::to_string(wrap ? -limit : 0) + ".." + std::to_string(limit - 1);
    return "index " + std::to_string(Array(value).item<int64_t>()) + " is " +
           (limit ? "out of range " + range : "not in an empty dim") + ".";
  });
  const Array from_front =
      wrap ? mx::where(mx::less(given, integer(0, dtype)), mx::add(given, integer(limit, dtype)), given) : given;
  return mx::clip(from_front, integer(0, dtype), integer(std::max<int64_t>(limit - 1, 0), dtype));
}

void Op::expect(const Array& ok, std::function<std::string()> fact) {
  const std::string head = "[run] " + step_.node->op + " '" + name() + "': ";
  values_.deferred_checks.push_back({ok, [head, fact = std::move(fact)] { return head + fact(); }});
}

void Op::refuse(const std::string& fact) const {
  fail(Code::invalid_program, "[build] " + step_.node->op + " '" + name() + "': " + fact);
}

void Op::fail_run(const std::string& fact) const {
  fail(Code::invalid_argument, "[run] " + step_.node->op + " '" + name() + "': " + fact);
}

}  // namespace keepdim::mlx
