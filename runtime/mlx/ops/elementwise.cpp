// Elementwise ops.
#include <cmath>
#include <limits>

#include "mlx/op.h"

namespace keepdim::mlx {
namespace {

// Broadcasts to the shape of the result.
Array broadcast_result(Op& op, const Array& y) { return y.shape() == op.shape() ? y : mx::broadcast_to(y, op.shape()); }

template <Array (*f)(const Array&, mx::StreamOrDevice)>
Array mlx_unary(Op& op) {
  return broadcast_result(op, f(op.in(0), {}));
}
template <Array (*f)(const Array&)>
Array unary(Op& op) {
  return broadcast_result(op, f(op.in(0)));
}

// ---- unary functions

Array truncated(const Array& x) { return mx::where(mx::less(x, scalar_like(x, 0)), mx::ceil(x), mx::floor(x)); }
Array relu(const Array& x) { return mx::maximum(x, scalar_like(x, 0)); }
Array negated(const Array& x) { return mx::negative(x); }
Array rounded(const Array& x) { return mx::round(x, 0); }
Array inverse(const Array& x) { return mx::divide(scalar_like(x, 1), x); }
// MLX evaluates some f64 functions in f32 precision; these are expressed through functions that are accurate in f64.
bool is_f64(const Array& x) { return x.dtype() == mx::float64; }
Array sin_of(const Array& x) {
  if (!is_f64(x)) return mx::sin(x);
  const Array t = mx::tan(mx::multiply(x, scalar_like(x, 0.5)));
  return mx::divide(mx::multiply(scalar_like(x, 2), t), mx::add(scalar_like(x, 1), mx::square(t)));
}
Array cos_of(const Array& x) {
  if (!is_f64(x)) return mx::cos(x);
  const Array square = mx::square(mx::tan(mx::multiply(x, scalar_like(x, 0.5))));
  return mx::divide(mx::subtract(scalar_like(x, 1), square), mx::add(scalar_like(x, 1), square));
}
Array sigmoid_of(const Array& x) {
  return is_f64(x) ? inverse(mx::add(scalar_like(x, 1), exponential(mx::negative(x)))) : mx::sigmoid(x);
}
Array silu(const Array& x) { return mx::multiply(x, sigmoid_of(x)); }
Array hardsigmoid(const Array& x) {
  return mx::divide(mx::clip(mx::add(x, scalar_like(x, 3)), scalar_like(x, 0), scalar_like(x, 6)), scalar_like(x, 6));
}
Array hardswish(const Array& x) { return mx::multiply(x, hardsigmoid(x)); }
Array exp2(const Array& x) { return mx::power(scalar_like(x, 2), x); }

// erf for small |x|: series with terms of equal sign, without cancellation.
Array erf_near(const Array& x) {
  const Array square = mx::square(x);
  Array sum = mx::ones_like(x);
  for (int n = is_f64(x) ? 40 : 12; n > 0; --n)
    sum = mx::add(scalar_like(x, 1), mx::multiply(mx::multiply(square, scalar_like(x, 2.0 / (2 * n + 1))), sum));
  return mx::multiply(mx::multiply(scalar_like(x, 1.1283791670955126), x), mx::multiply(exponential(mx::negative(square)), sum));
}
// erfc for large x: continued fraction. exp(-y²) is split as exp(-h²) * exp(h² - y²), with h² exact.
Array erfc_far(const Array& x) {
  const Array y = mx::clip(x, scalar_like(x, 1), scalar_like(x, 30));
  Array c = y;
  for (int k = 60; k > 0; --k) c = mx::add(y, mx::divide(scalar_like(x, 0.5 * k), c));
  const Array y_high = mx::astype(mx::astype(y, mx::bfloat16), y.dtype());
  const Array correction = mx::multiply(mx::subtract(y_high, y), mx::add(y_high, y));
  const Array power = mx::multiply(exponential(mx::negative(mx::square(y_high))), exponential(correction));
  return mx::divide(power, mx::multiply(scalar_like(x, 1.7724538509055160), c));
}
double erf_threshold(const Array& x) { return is_f64(x) ? 2 : 1; }
// mx::erf has f32 precision, and less near 0.
Array erf_of(const Array& x) {
  const Array far = is_f64(x) ? mx::multiply(mx::sign(x), mx::subtract(scalar_like(x, 1), erfc_far(mx::abs(x)))) : mx::erf(x);
  return mx::where(mx::less(mx::abs(x), scalar_like(x, erf_threshold(x))), erf_near(x), far);
}
Array erfc_of(const Array& x) {
  const Array far = scalar_like(x, erf_threshold(x)), below = mx::subtract(scalar_like(x, 2), erfc_far(mx::negative(x)));
  const Array near = mx::where(mx::less_equal(x, mx::negative(far)), below, mx::subtract(scalar_like(x, 1), erf_near(x)));
  return mx::where(mx::greater_equal(x, far), erfc_far(x), near);
}
Array gelu(const Array& x) {
  const Array half = mx::multiply(scalar_like(x, 0.5), x);
  const Array z = mx::multiply(x, scalar_like(x, 0.70710678118654752));
  return mx::multiply(half, mx::add(scalar_like(x, 1), is_f64(x) ? erf_of(z) : mx::erf(z)));
}
Array gelu_tanh(const Array& x) {
  const Array cube = mx::multiply(mx::multiply(x, x), x);
  const Array inner = mx::multiply(scalar_like(x, 0.79788456080286536), mx::add(x, mx::multiply(scalar_like(x, 0.044715), cube)));
  return mx::multiply(mx::multiply(scalar_like(x, 0.5), x), mx::add(scalar_like(x, 1), mx::tanh(inner)));
}

Array gelu_op(Op& op) {
  const bool tanh = op.attr("approximate") && op.choice("approximate", {"none", "tanh"}) == 1;
  return broadcast_result(op, tanh ? gelu_tanh(op.in(0)) : gelu(op.in(0)));
}

Array leaky_relu(Op& op) {
  const Array& x = op.in(0);
  return broadcast_result(
      op, mx::where(mx::greater(x, scalar_like(x, 0)), x, mx::multiply(x, op.scalar("negative_slope", op.type()))));
}

Array elu(Op& op) {
  const Array& x = op.in(0);
  const Array below = mx::multiply(op.scalar("alpha", op.type()), mx::expm1(mx::minimum(x, scalar_like(x, 0))));
  return broadcast_result(op, mx::where(mx::greater(x, scalar_like(x, 0)), x, below));
}

Array softplus(Op& op) {
  const Array& x = op.in(0);
  const Array beta = op.scalar("beta", op.type()), scaled = mx::multiply(x, beta);
  const Array soft = mx::divide(mx::log1p(exponential(scaled)), beta);
  return broadcast_result(op, mx::where(mx::greater(scaled, op.scalar("threshold", op.type())), x, soft));
}

// Compute type of an array with a scalar, which may not fit in a narrow dtype.
DType scalar_compute_type(Op& op) {
  const DType type = op.dtype_of(0);
  return bit(type) & kFloats ? compute_type(type) : DType::i64;
}

Array clamp(Op& op) {
  const DType type = scalar_compute_type(op);
  Array x = mx::astype(op.in(0), to_mlx(type));
  if (op.attr("min")) x = mx::maximum(x, op.scalar("min", type));
  if (op.attr("max")) x = mx::minimum(x, op.scalar("max", type));
  return broadcast_result(op, x);
}

// ---- binary functions, of two arrays or an array and a scalar

using BinaryFn = Array (*)(const Array& a, const Array& b);

template <BinaryFn f>
Array binary(Op& op) {
  if (op.has(1)) return broadcast_result(op, f(op.in(0), op.in(1)));
  const DType type = scalar_compute_type(op);
  return broadcast_result(op, f(mx::astype(op.in(0), to_mlx(type)), op.scalar("other", type)));
}
#define KEEPDIM_BINARY(name, call) \
  Array name(const Array& a, const Array& b) { return call(a, b); }
KEEPDIM_BINARY(add, mx::add)
KEEPDIM_BINARY(sub, mx::subtract)
KEEPDIM_BINARY(mul, mx::multiply)
KEEPDIM_BINARY(div, mx::divide)
KEEPDIM_BINARY(larger, mx::maximum)
KEEPDIM_BINARY(smaller, mx::minimum)
KEEPDIM_BINARY(atan2, mx::arctan2)
KEEPDIM_BINARY(eq, mx::equal)
KEEPDIM_BINARY(ne, mx::not_equal)
KEEPDIM_BINARY(lt, mx::less)
KEEPDIM_BINARY(le, mx::less_equal)
KEEPDIM_BINARY(gt, mx::greater)
KEEPDIM_BINARY(ge, mx::greater_equal)
KEEPDIM_BINARY(bit_and, mx::bitwise_and)
KEEPDIM_BINARY(bit_or, mx::bitwise_or)
KEEPDIM_BINARY(bit_xor, mx::bitwise_xor)
#undef KEEPDIM_BINARY
Array swiglu(const Array& gate, const Array& up) { return mx::multiply(silu(gate), up); }

bool is_float(const Array& x) { return mx::issubdtype(x.dtype(), mx::floating); }

// Shifts by the width or more give 0 (left) or the sign (right).
Array shift_left(const Array& a, const Array& b) {
  const double width = 8.0 * static_cast<double>(a.itemsize());
  const Array inside = mx::logical_and(mx::greater_equal(b, scalar_like(b, 0)), mx::less(b, scalar_like(b, width)));
  return mx::where(inside, mx::left_shift(a, mx::where(inside, b, scalar_like(b, 0))), scalar_like(a, 0));
}
Array shift_right(const Array& a, const Array& b) {
  const double width = 8.0 * static_cast<double>(a.itemsize());
  const Array inside = mx::logical_and(mx::greater_equal(b, scalar_like(b, 0)), mx::less(b, scalar_like(b, width)));
  return mx::right_shift(a, mx::where(inside, b, scalar_like(b, width - 1)));
}

// Integers to a negative power are 0, except for 1 and -1.
Array integer_power(const Array& a, const Array& b) {
  const Array one = scalar_like(a, 1), minus = scalar_like(a, -1), negative = mx::less(b, scalar_like(b, 0));
  const Array odd = mx::not_equal(mx::bitwise_and(b, scalar_like(b, 1)), scalar_like(b, 0));
  const Array below =
      mx::where(mx::equal(a, one), one, mx::where(mx::equal(a, minus), mx::where(odd, minus, one), scalar_like(a, 0)));
  return mx::where(negative, below, mx::power(a, mx::maximum(b, scalar_like(b, 0))));
}
Array power(const Array& a, const Array& b) { return is_float(a) ? mx::power(a, b) : integer_power(a, b); }
Array power_op(Op& op) {
  if (!op.has(1) && bit(op.dtype_of(0)) & kFloats && !std::holds_alternative<DimId>(*op.attr("other")))
    return broadcast_result(op, pow_scalar(op.in(0), op.number("other")));
  return binary<power>(op);
}

// ---- division. Integer division by 0 fails the call; division by -1 is handled separately, since INT_MIN / -1 overflows.

struct Quotient {
  Array floored, mod;  // floor division; remainder with the sign of b
};
Quotient integer_quotient(const Array& a, const Array& b) {
  const Array minus = mx::equal(b, scalar_like(b, -1));
  const Array safe = mx::where(mx::logical_or(minus, mx::equal(b, scalar_like(b, 0))), scalar_like(b, 1), b);
  const Array zero = scalar_like(a, 0);
  return {mx::where(minus, mx::negative(a), mx::floor_divide(a, safe)), mx::where(minus, zero, mx::remainder(a, safe))};
}
// Remainder with the sign of a.
Array float_fmod(const Array& a, const Array& b) {
  const Array r = mx::remainder(mx::abs(a), mx::abs(b));
  return mx::where(mx::less(a, scalar_like(a, 0)), mx::negative(r), r);
}
Array signs_differ(const Array& a, const Array& b) {
  return mx::not_equal(mx::less(a, scalar_like(a, 0)), mx::less(b, scalar_like(b, 0)));
}
Array needs_correction(const Array& r, const Array& b) {
  return mx::logical_and(mx::not_equal(r, scalar_like(r, 0)), signs_differ(r, b));
}

Array div_floor(const Array& a, const Array& b) {
  if (!is_float(a)) return integer_quotient(a, b).floored;
  const Array plain = mx::divide(a, b), r = float_fmod(a, b);
  Array q = mx::divide(mx::subtract(a, r), b);
  q = mx::where(needs_correction(r, b), mx::subtract(q, scalar_like(q, 1)), q);
  Array down = mx::floor(q);
  down = mx::where(mx::greater(mx::subtract(q, down), scalar_like(q, 0.5)), mx::add(down, scalar_like(q, 1)), down);
  return mx::where(mx::equal(b, scalar_like(b, 0)), plain, down);
}
Array div_trunc(const Array& a, const Array& b) {
  if (is_float(a)) return truncated(mx::divide(a, b));
  const Quotient q = integer_quotient(a, b);
  const Array up = mx::logical_and(mx::not_equal(q.mod, scalar_like(a, 0)), signs_differ(a, b));
  return mx::where(up, mx::add(q.floored, scalar_like(a, 1)), q.floored);
}
Array fmod(const Array& a, const Array& b) {
  if (is_float(a)) return float_fmod(a, b);
  const Array r = integer_quotient(a, b).mod;
  const Array other = mx::logical_and(mx::not_equal(r, scalar_like(r, 0)), signs_differ(a, r));
  return mx::where(other, mx::subtract(r, b), r);
}
Array remainder(const Array& a, const Array& b) {
  if (!is_float(a)) return integer_quotient(a, b).mod;
  const Array r = float_fmod(a, b);
  return mx::where(needs_correction(r, b), mx::add(r, b), r);
}

template <BinaryFn f>
Array quotient(Op& op) {
  const DType type = op.has(1) ? op.dtype_of(0) : scalar_compute_type(op);
  const DType computed = compute_type(type);
  const Array a = mx::astype(op.in(0), to_mlx(computed));
  const Array b = op.has(1) ? mx::astype(op.in(1), to_mlx(computed)) : op.scalar("other", computed);
  if (!(bit(computed) & kFloats)) op.expect(mx::all(mx::not_equal(b, scalar_like(b, 0))), [] { return "division by zero."; });
  return broadcast_result(op, f(a, b));
}

Array where(Op& op) { return broadcast_result(op, mx::where(op.in(0), op.in(1), op.in(2))); }

// Composite functions are widened: 16-bit floats would round after every step.
constexpr bool widen = true;
constexpr OpBuilder kOps[] = {
    {"neg", unary<negated>},
    {"abs", mlx_unary<mx::abs>},
    {"sign", mlx_unary<mx::sign>},
    {"relu", unary<relu>},
    {"reciprocal", unary<inverse>, widen},
    {"ceil", mlx_unary<mx::ceil>, widen},
    {"floor", mlx_unary<mx::floor>, widen},
    {"round", unary<rounded>, widen},
    {"trunc", unary<truncated>, widen},
    {"sqrt", mlx_unary<mx::sqrt>, widen},
    {"rsqrt", mlx_unary<mx::rsqrt>, widen},
    {"exp", unary<exponential>, widen},
    {"exp2", unary<exp2>, widen},
    {"expm1", mlx_unary<mx::expm1>, widen},
    {"log", mlx_unary<mx::log>, widen},
    {"log1p", mlx_unary<mx::log1p>, widen},
    {"log2", mlx_unary<mx::log2>, widen},
    {"log10", mlx_unary<mx::log10>, widen},
    {"sin", unary<sin_of>, widen},
    {"cos", unary<cos_of>, widen},
    {"tan", mlx_unary<mx::tan>, widen},
    {"asin", mlx_unary<mx::arcsin>, widen},
    {"acos", mlx_unary<mx::arccos>, widen},
    {"atan", mlx_unary<mx::arctan>, widen},
    {"sinh", mlx_unary<mx::sinh>, widen},
    {"cosh", mlx_unary<mx::cosh>, widen},
    {"asinh", mlx_unary<mx::arcsinh>, widen},
    {"acosh", mlx_unary<mx::arccosh>, widen},
    {"atanh", mlx_unary<mx::arctanh>, widen},
    {"tanh", mlx_unary<mx::tanh>, widen},
    {"erf", unary<erf_of>, widen},
    {"erfc", unary<erfc_of>, widen},
    {"sigmoid", unary<sigmoid_of>, widen},
    {"silu", unary<silu>, widen},
    {"hardsigmoid", unary<hardsigmoid>, widen},
    {"hardswish", unary<hardswish>, widen},
    {"gelu", gelu_op, widen},
    {"leaky_relu", leaky_relu, widen},
    {"elu", elu, widen},
    {"softplus", softplus, widen},
    {"clamp", clamp},
    {"add", binary<add>},
    {"sub", binary<sub>},
    {"mul", binary<mul>},
    {"div", binary<div>},
    {"div_floor", quotient<div_floor>},
    {"div_trunc", quotient<div_trunc>},
    {"fmod", quotient<fmod>},
    {"remainder", quotient<remainder>},
    {"pow", power_op, widen},
    {"atan2", binary<atan2>, widen},
    {"maximum", binary<larger>},
    {"minimum", binary<smaller>},
    {"swiglu", binary<swiglu>},
    {"bitwise_and", binary<bit_and>},
    {"bitwise_or", binary<bit_or>},
    {"bitwise_xor", binary<bit_xor>},
    {"bitwise_left_shift", binary<shift_left>, widen},
    {"bitwise_right_shift", binary<shift_right>, widen},
    {"eq", binary<eq>},
    {"ne", binary<ne>},
    {"lt", binary<lt>},
    {"le", binary<le>},
    {"gt", binary<gt>},
    {"ge", binary<ge>},
    {"where", where},
};

}  // namespace

OpTable elementwise_ops() { return {kOps, std::size(kOps)}; }

// Common exponents use multiplication and sqrt, as in torch.
Array pow_scalar(const Array& x, double e) {
  if (e == 2) return mx::square(x);
  if (e == 3) return mx::multiply(mx::square(x), x);
  if (e == 0.5) return mx::sqrt(x);
  if (e == -0.5) return mx::rsqrt(x);
  if (e == -1) return inverse(x);
  return mx::power(x, scalar_like(x, e));
}

Array exponential(const Array& x) { return is_f64(x) ? mx::power(scalar_like(x, 2.718281828459045235), x) : mx::exp(x); }

Array activate(const Array& x, const std::string& name) {
  if (name == "relu") return relu(x);
  if (name == "gelu") return gelu(x);
  if (name == "gelu_tanh") return gelu_tanh(x);
  if (name == "silu") return silu(x);
  if (name == "tanh") return mx::tanh(x);
  if (name == "sigmoid") return sigmoid_of(x);
  if (name == "relu6") return mx::minimum(relu(x), scalar_like(x, 6));
  if (name == "hardswish") return hardswish(x);
  if (name == "hardsigmoid") return hardsigmoid(x);
  throw std::invalid_argument("activation '" + name + "' is not supported");
}

}  // namespace keepdim::mlx
