// Rows of elementwise ops.
#include <cmath>
#include <limits>

#include "op.h"

namespace keepdim::mlx {
namespace {

Array num(const Array& like, double value) { return number(value, like.dtype()); }

// To the shape that the program says: an operand may be smaller in some dims.
Array fit(Op& op, const Array& y) { return y.shape() == op.shape() ? y : mx::broadcast_to(y, op.shape()); }

template <Array (*f)(const Array&, mx::StreamOrDevice)>
Array one(Op& op) {
  return fit(op, f(op.in(0), {}));
}
template <Array (*f)(const Array&)>
Array own(Op& op) {
  return fit(op, f(op.in(0)));
}

// ---- functions of one array

Array truncated(const Array& x) { return mx::where(mx::less(x, num(x, 0)), mx::ceil(x), mx::floor(x)); }
Array relu(const Array& x) { return mx::maximum(x, num(x, 0)); }
Array negated(const Array& x) { return mx::negative(x); }
Array rounded(const Array& x) { return mx::round(x, 0); }
Array inverse(const Array& x) { return mx::divide(num(x, 1), x); }
// MLX computes some functions of f64 with the precision of f32; these come from others, which it does not.
bool is_f64(const Array& x) { return x.dtype() == mx::float64; }
Array sine(const Array& x) {
  if (!is_f64(x)) return mx::sin(x);
  const Array t = mx::tan(mx::multiply(x, num(x, 0.5)));
  return mx::divide(mx::multiply(num(x, 2), t), mx::add(num(x, 1), mx::square(t)));
}
Array cosine(const Array& x) {
  if (!is_f64(x)) return mx::cos(x);
  const Array square = mx::square(mx::tan(mx::multiply(x, num(x, 0.5))));
  return mx::divide(mx::subtract(num(x, 1), square), mx::add(num(x, 1), square));
}
Array logistic(const Array& x) {
  return is_f64(x) ? inverse(mx::add(num(x, 1), exponential(mx::negative(x)))) : mx::sigmoid(x);
}
Array silu(const Array& x) { return mx::multiply(x, logistic(x)); }
Array six(const Array& x) { return mx::divide(mx::clip(mx::add(x, num(x, 3)), num(x, 0), num(x, 6)), num(x, 6)); }
Array hardswish(const Array& x) { return mx::multiply(x, six(x)); }
Array exp2(const Array& x) { return mx::power(num(x, 2), x); }

// erf near 0 by a series whose terms all have one sign.
Array erf_near(const Array& x) {
  const Array square = mx::square(x);
  Array sum = mx::ones_like(x);
  for (int n = is_f64(x) ? 40 : 12; n > 0; --n) sum = mx::add(num(x, 1), mx::multiply(mx::multiply(square, num(x, 2.0 / (2 * n + 1))), sum));
  return mx::multiply(mx::multiply(num(x, 1.1283791670955126), x), mx::multiply(exponential(mx::negative(square)), sum));
}
// erfc far from 0 by its continued fraction. x² goes into the power in two parts, of which the first is exact.
Array erfc_far(const Array& x) {
  const Array y = mx::clip(x, num(x, 1), num(x, 30));
  Array c = y;
  for (int k = 60; k > 0; --k) c = mx::add(y, mx::divide(num(x, 0.5 * k), c));
  const Array most = mx::astype(mx::astype(y, mx::bfloat16), y.dtype());
  const Array rest = mx::multiply(mx::subtract(most, y), mx::add(most, y));
  const Array power = mx::multiply(exponential(mx::negative(mx::square(most))), exponential(rest));
  return mx::divide(power, mx::multiply(num(x, 1.7724538509055160), c));
}
double border(const Array& x) { return is_f64(x) ? 2 : 1; }
// MLX's own erf has the precision of f32, and near 0 not even that.
Array erf_of(const Array& x) {
  const Array far = is_f64(x) ? mx::multiply(mx::sign(x), mx::subtract(num(x, 1), erfc_far(mx::abs(x)))) : mx::erf(x);
  return mx::where(mx::less(mx::abs(x), num(x, border(x))), erf_near(x), far);
}
Array erfc_of(const Array& x) {
  const Array far = num(x, border(x)), below = mx::subtract(num(x, 2), erfc_far(mx::negative(x)));
  const Array near = mx::where(mx::less_equal(x, mx::negative(far)), below, mx::subtract(num(x, 1), erf_near(x)));
  return mx::where(mx::greater_equal(x, far), erfc_far(x), near);
}
Array gelu(const Array& x) {
  const Array half = mx::multiply(num(x, 0.5), x);
  const Array z = mx::multiply(x, num(x, 0.70710678118654752));
  return mx::multiply(half, mx::add(num(x, 1), is_f64(x) ? erf_of(z) : mx::erf(z)));
}
Array gelu_tanh(const Array& x) {
  const Array cube = mx::multiply(mx::multiply(x, x), x);
  const Array inner = mx::multiply(num(x, 0.79788456080286536), mx::add(x, mx::multiply(num(x, 0.044715), cube)));
  return mx::multiply(mx::multiply(num(x, 0.5), x), mx::add(num(x, 1), mx::tanh(inner)));
}

Array gelu_row(Op& op) {
  const bool tanh = op.attr("approximate") && op.choice("approximate", {"none", "tanh"}) == 1;
  return fit(op, tanh ? gelu_tanh(op.in(0)) : gelu(op.in(0)));
}

Array leaky_relu(Op& op) {
  const Array& x = op.in(0);
  return fit(op, mx::where(mx::greater(x, num(x, 0)), x, mx::multiply(x, op.scalar("negative_slope", op.type()))));
}

Array elu(Op& op) {
  const Array& x = op.in(0);
  const Array below = mx::multiply(op.scalar("alpha", op.type()), mx::expm1(mx::minimum(x, num(x, 0))));
  return fit(op, mx::where(mx::greater(x, num(x, 0)), x, below));
}

Array softplus(Op& op) {
  const Array& x = op.in(0);
  const Array beta = op.scalar("beta", op.type()), scaled = mx::multiply(x, beta);
  const Array soft = mx::divide(mx::log1p(exponential(scaled)), beta);
  return fit(op, mx::where(mx::greater(scaled, op.scalar("threshold", op.type())), x, soft));
}

// The type in which an array and a number meet: the number may not be one of a narrow dtype.
DType meeting(Op& op) {
  const DType type = op.stored(0);
  return bit(type) & kFloats ? compute_type(type) : DType::i64;
}

Array clamp(Op& op) {
  const DType type = meeting(op);
  Array x = mx::astype(op.in(0), to_mlx(type));
  if (op.attr("min")) x = mx::maximum(x, op.scalar("min", type));
  if (op.attr("max")) x = mx::minimum(x, op.scalar("max", type));
  return fit(op, x);
}

// ---- functions of two arrays, or of an array and a number

using Two = Array (*)(const Array& a, const Array& b);

template <Two f>
Array two(Op& op) {
  if (op.has(1)) return fit(op, f(op.in(0), op.in(1)));
  const DType type = meeting(op);
  return fit(op, f(mx::astype(op.in(0), to_mlx(type)), op.scalar("other", type)));
}
#define KEEPDIM_TWO(name, call) \
  Array name(const Array& a, const Array& b) { return call(a, b); }
KEEPDIM_TWO(add, mx::add)
KEEPDIM_TWO(sub, mx::subtract)
KEEPDIM_TWO(mul, mx::multiply)
KEEPDIM_TWO(div, mx::divide)
KEEPDIM_TWO(larger, mx::maximum)
KEEPDIM_TWO(smaller, mx::minimum)
KEEPDIM_TWO(atan2, mx::arctan2)
KEEPDIM_TWO(eq, mx::equal)
KEEPDIM_TWO(ne, mx::not_equal)
KEEPDIM_TWO(lt, mx::less)
KEEPDIM_TWO(le, mx::less_equal)
KEEPDIM_TWO(gt, mx::greater)
KEEPDIM_TWO(ge, mx::greater_equal)
KEEPDIM_TWO(bit_and, mx::bitwise_and)
KEEPDIM_TWO(bit_or, mx::bitwise_or)
KEEPDIM_TWO(bit_xor, mx::bitwise_xor)
#undef KEEPDIM_TWO
Array swiglu(const Array& gate, const Array& up) { return mx::multiply(silu(gate), up); }

bool is_float(const Array& x) { return mx::issubdtype(x.dtype(), mx::floating); }

// Shifts by less than the width; all others leave nothing, or the sign.
Array shift_left(const Array& a, const Array& b) {
  const double width = 8.0 * static_cast<double>(a.itemsize());
  const Array inside = mx::logical_and(mx::greater_equal(b, num(b, 0)), mx::less(b, num(b, width)));
  return mx::where(inside, mx::left_shift(a, mx::where(inside, b, num(b, 0))), num(a, 0));
}
Array shift_right(const Array& a, const Array& b) {
  const double width = 8.0 * static_cast<double>(a.itemsize());
  const Array inside = mx::logical_and(mx::greater_equal(b, num(b, 0)), mx::less(b, num(b, width)));
  return mx::right_shift(a, mx::where(inside, b, num(b, width - 1)));
}

// Integers to a negative power are 0 but for 1 and -1.
Array integer_power(const Array& a, const Array& b) {
  const Array one = num(a, 1), minus = num(a, -1), negative = mx::less(b, num(b, 0));
  const Array odd = mx::not_equal(mx::bitwise_and(b, num(b, 1)), num(b, 0));
  const Array below = mx::where(mx::equal(a, one), one, mx::where(mx::equal(a, minus), mx::where(odd, minus, one), num(a, 0)));
  return mx::where(negative, below, mx::power(a, mx::maximum(b, num(b, 0))));
}
Array power(const Array& a, const Array& b) { return is_float(a) ? mx::power(a, b) : integer_power(a, b); }
Array power_row(Op& op) {
  if (!op.has(1) && bit(op.stored(0)) & kFloats && !std::holds_alternative<DimId>(*op.attr("other")))
    return fit(op, pow_number(op.in(0), op.number("other")));
  return two<power>(op);
}

// ---- quotients. Integers have none by 0, which is an error of the call; by -1 the lowest has none either.

struct Quotient {
  Array down, rest;  // rounded down, and what is left: with the sign of b
};
Quotient integer_quotient(const Array& a, const Array& b) {
  const Array minus = mx::equal(b, num(b, -1));
  const Array safe = mx::where(mx::logical_or(minus, mx::equal(b, num(b, 0))), num(b, 1), b);
  const Array zero = num(a, 0);
  return {mx::where(minus, mx::negative(a), mx::floor_divide(a, safe)), mx::where(minus, zero, mx::remainder(a, safe))};
}
// With the sign of a.
Array float_rest(const Array& a, const Array& b) {
  const Array r = mx::remainder(mx::abs(a), mx::abs(b));
  return mx::where(mx::less(a, num(a, 0)), mx::negative(r), r);
}
Array signs_differ(const Array& a, const Array& b) { return mx::not_equal(mx::less(a, num(a, 0)), mx::less(b, num(b, 0))); }
Array corrected(const Array& r, const Array& b) { return mx::logical_and(mx::not_equal(r, num(r, 0)), signs_differ(r, b)); }

Array div_floor(const Array& a, const Array& b) {
  if (!is_float(a)) return integer_quotient(a, b).down;
  const Array plain = mx::divide(a, b), r = float_rest(a, b);
  Array q = mx::divide(mx::subtract(a, r), b);
  q = mx::where(corrected(r, b), mx::subtract(q, num(q, 1)), q);
  Array down = mx::floor(q);
  down = mx::where(mx::greater(mx::subtract(q, down), num(q, 0.5)), mx::add(down, num(q, 1)), down);
  return mx::where(mx::equal(b, num(b, 0)), plain, down);
}
Array div_trunc(const Array& a, const Array& b) {
  if (is_float(a)) return truncated(mx::divide(a, b));
  const Quotient q = integer_quotient(a, b);
  const Array up = mx::logical_and(mx::not_equal(q.rest, num(a, 0)), signs_differ(a, b));
  return mx::where(up, mx::add(q.down, num(a, 1)), q.down);
}
Array fmod(const Array& a, const Array& b) {
  if (is_float(a)) return float_rest(a, b);
  const Array r = integer_quotient(a, b).rest;
  const Array other = mx::logical_and(mx::not_equal(r, num(r, 0)), signs_differ(a, r));
  return mx::where(other, mx::subtract(r, b), r);
}
Array remainder(const Array& a, const Array& b) {
  if (!is_float(a)) return integer_quotient(a, b).rest;
  const Array r = float_rest(a, b);
  return mx::where(corrected(r, b), mx::add(r, b), r);
}

template <Two f>
Array quotient(Op& op) {
  const DType type = op.has(1) ? op.stored(0) : meeting(op);
  const DType computed = compute_type(type);
  const Array a = mx::astype(op.in(0), to_mlx(computed));
  const Array b = op.has(1) ? mx::astype(op.in(1), to_mlx(computed)) : op.scalar("other", computed);
  if (!(bit(computed) & kFloats)) op.expect(mx::all(mx::not_equal(b, num(b, 0))), [] { return "division by zero."; });
  return fit(op, f(a, b));
}

Array where(Op& op) { return fit(op, mx::where(op.in(0), op.in(1), op.in(2))); }

// Composed ones are wide: half precision would round after every step.
constexpr bool wide = true;
constexpr Row kRows[] = {
    {"neg", own<negated>},
    {"abs", one<mx::abs>},
    {"sign", one<mx::sign>},
    {"relu", own<relu>},
    {"reciprocal", own<inverse>, wide},
    {"ceil", one<mx::ceil>, wide},
    {"floor", one<mx::floor>, wide},
    {"round", own<rounded>, wide},
    {"trunc", own<truncated>, wide},
    {"sqrt", one<mx::sqrt>, wide},
    {"rsqrt", one<mx::rsqrt>, wide},
    {"exp", own<exponential>, wide},
    {"exp2", own<exp2>, wide},
    {"expm1", one<mx::expm1>, wide},
    {"log", one<mx::log>, wide},
    {"log1p", one<mx::log1p>, wide},
    {"log2", one<mx::log2>, wide},
    {"log10", one<mx::log10>, wide},
    {"sin", own<sine>, wide},
    {"cos", own<cosine>, wide},
    {"tan", one<mx::tan>, wide},
    {"asin", one<mx::arcsin>, wide},
    {"acos", one<mx::arccos>, wide},
    {"atan", one<mx::arctan>, wide},
    {"sinh", one<mx::sinh>, wide},
    {"cosh", one<mx::cosh>, wide},
    {"asinh", one<mx::arcsinh>, wide},
    {"acosh", one<mx::arccosh>, wide},
    {"atanh", one<mx::arctanh>, wide},
    {"tanh", one<mx::tanh>, wide},
    {"erf", own<erf_of>, wide},
    {"erfc", own<erfc_of>, wide},
    {"sigmoid", own<logistic>, wide},
    {"silu", own<silu>, wide},
    {"hardsigmoid", own<six>, wide},
    {"hardswish", own<hardswish>, wide},
    {"gelu", gelu_row, wide},
    {"leaky_relu", leaky_relu, wide},
    {"elu", elu, wide},
    {"softplus", softplus, wide},
    {"clamp", clamp},
    {"add", two<add>},
    {"sub", two<sub>},
    {"mul", two<mul>},
    {"div", two<div>},
    {"div_floor", quotient<div_floor>},
    {"div_trunc", quotient<div_trunc>},
    {"fmod", quotient<fmod>},
    {"remainder", quotient<remainder>},
    {"pow", power_row, wide},
    {"atan2", two<atan2>, wide},
    {"maximum", two<larger>},
    {"minimum", two<smaller>},
    {"swiglu", two<swiglu>},
    {"bitwise_and", two<bit_and>},
    {"bitwise_or", two<bit_or>},
    {"bitwise_xor", two<bit_xor>},
    {"bitwise_left_shift", two<shift_left>, wide},
    {"bitwise_right_shift", two<shift_right>, wide},
    {"eq", two<eq>},
    {"ne", two<ne>},
    {"lt", two<lt>},
    {"le", two<le>},
    {"gt", two<gt>},
    {"ge", two<ge>},
    {"where", where},
};

}  // namespace

Table map_rows() { return {kRows, std::size(kRows)}; }

// The exponents that models use are products and roots, as in torch.
Array pow_number(const Array& x, double e) {
  if (e == 2) return mx::square(x);
  if (e == 3) return mx::multiply(mx::square(x), x);
  if (e == 0.5) return mx::sqrt(x);
  if (e == -0.5) return mx::rsqrt(x);
  if (e == -1) return inverse(x);
  return mx::power(x, num(x, e));
}

Array exponential(const Array& x) { return is_f64(x) ? mx::power(num(x, 2.718281828459045235), x) : mx::exp(x); }

Array activate(const Array& x, const std::string& name) {
  if (name == "relu") return relu(x);
  if (name == "gelu") return gelu(x);
  if (name == "gelu_tanh") return gelu_tanh(x);
  if (name == "silu") return silu(x);
  if (name == "tanh") return mx::tanh(x);
  if (name == "sigmoid") return logistic(x);
  throw std::invalid_argument("activation '" + name + "' is not known");
}

}  // namespace keepdim::mlx
