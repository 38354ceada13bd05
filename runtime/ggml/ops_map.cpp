// Rows of elementwise ops. A functor is a template over the type it computes in (map.h); its row names the dtypes.
#include <cmath>
#include <limits>

#include "map.h"
#include "ops.h"
#include "vector_math.h"

namespace keepdim::ggml {
namespace {

// ---- functions of one element

template <class T> T exponential(T x) { return std::exp(x); }
template <> float exponential(float x) { return fast_exp(x); }
template <class T> T error_function(T x) { return std::erf(x); }
template <> float error_function(float x) { return fast_erf(x); }
template <class T> T normal_integral(T x) { return T(0.5) * (1 + std::erf(x * T(0.70710678118654752))); }
template <> float normal_integral(float x) { return fast_normal_integral(x); }
template <class T> T hyperbolic_tangent(T x) { return std::tanh(x); }
template <> float hyperbolic_tangent(float x) { return fast_tanh(x); }

#define KEEPDIM_MATH(Name, call) \
  template <class T> struct Name { T operator()(T x) const { return call(x); } }
KEEPDIM_MATH(Sqrt, std::sqrt);
KEEPDIM_MATH(Exp, exponential);
KEEPDIM_MATH(Exp2, std::exp2);
KEEPDIM_MATH(Expm1, std::expm1);
KEEPDIM_MATH(Log, std::log);
KEEPDIM_MATH(Log1p, std::log1p);
KEEPDIM_MATH(Log2, std::log2);
KEEPDIM_MATH(Log10, std::log10);
KEEPDIM_MATH(Sin, std::sin);
KEEPDIM_MATH(Cos, std::cos);
KEEPDIM_MATH(Tan, std::tan);
KEEPDIM_MATH(Asin, std::asin);
KEEPDIM_MATH(Acos, std::acos);
KEEPDIM_MATH(Atan, std::atan);
KEEPDIM_MATH(Sinh, std::sinh);
KEEPDIM_MATH(Cosh, std::cosh);
KEEPDIM_MATH(Asinh, std::asinh);
KEEPDIM_MATH(Acosh, std::acosh);
KEEPDIM_MATH(Atanh, std::atanh);
KEEPDIM_MATH(Tanh, hyperbolic_tangent);
KEEPDIM_MATH(Erf, error_function);
KEEPDIM_MATH(Erfc, std::erfc);
KEEPDIM_MATH(Ceil, std::ceil);
KEEPDIM_MATH(Floor, std::floor);
KEEPDIM_MATH(Round, std::nearbyint);  // halves to even
KEEPDIM_MATH(Trunc, std::trunc);
#undef KEEPDIM_MATH

template <class T> struct Neg {
  T operator()(T x) const {
    if constexpr (std::is_floating_point_v<T>) return -x;
    else return wrap(T(0), x, [](auto a, auto b) { return a - b; });
  }
};
template <class T> struct Abs {
  T operator()(T x) const {
    if constexpr (std::is_floating_point_v<T>) return std::fabs(x);
    else return x < 0 ? Neg<T>()(x) : x;
  }
};
// The same of a 16-bit float's bits.
template <class T> struct TurnSign { T operator()(T x) const { return x ^ 0x8000; } };
template <class T> struct DropSign { T operator()(T x) const { return x & 0x7fff; } };
template <class T> struct Sign { T operator()(T x) const { return static_cast<T>((x > 0) - (x < 0)); } };
template <class T> struct Relu { T operator()(T x) const { return x < 0 ? T(0) : x; } };  // keeps a NaN
template <class T> struct Square { T operator()(T x) const { return x * x; } };
template <class T> struct Cube { T operator()(T x) const { return x * x * x; } };
template <class T> struct Reciprocal { T operator()(T x) const { return 1 / x; } };
template <class T> struct Rsqrt { T operator()(T x) const { return 1 / std::sqrt(x); } };
template <class T> struct Sigmoid { T operator()(T x) const { return 1 / (1 + exponential(-x)); } };
template <class T> struct Silu { T operator()(T x) const { return x / (1 + exponential(-x)); } };
template <class T> struct Gelu {
  T operator()(T x) const { return x * normal_integral(x); }
};
template <class T> struct GeluTanh {
  T operator()(T x) const {
    return T(0.5) * x * (1 + hyperbolic_tangent(T(0.79788456080286536) * (x + T(0.044715) * x * x * x)));
  }
};
template <class T> struct Six {  // relu6(x + 3) / 6
  T operator()(T x) const {
    const T y = x + 3;
    return (y < 0 ? T(0) : y > 6 ? T(6) : y) / 6;
  }
};
template <class T> struct Hardswish { T operator()(T x) const { return x * Six<T>()(x); } };

// With numbers of the node: those that `first` and `second` name.
template <class T> struct LeakyRelu {
  const T slope;
  explicit LeakyRelu(const MapJob& job) : slope(job.scalar[0].as<T>()) {}
  T operator()(T x) const { return x > 0 ? x : x * slope; }
};
template <class T> struct Elu {
  const T alpha;
  explicit Elu(const MapJob& job) : alpha(job.scalar[0].as<T>()) {}
  T operator()(T x) const { return x > 0 ? x : alpha * std::expm1(x < 0 ? x : T(0)) + (x != x ? x : T(0)); }
};
template <class T> struct Positive { bool operator()(T x) const { return x > 0; } };
template <class T> struct Same { T operator()(T x) const { return x; } };
template <class T> struct Softplus {
  const T beta, threshold;
  explicit Softplus(const MapJob& job) : beta(job.scalar[0].as<T>()), threshold(job.scalar[1].as<T>()) {}
  T operator()(T x) const {
    const T scaled = x * beta;
    return scaled > threshold ? x : std::log1p(exponential(scaled)) / beta;
  }
};
template <class T> struct Clamp {
  T lo, hi;
  bool nan;
  explicit Clamp(const MapJob& job) {
    using Limits = std::numeric_limits<T>;
    lo = Limits::has_infinity ? -Limits::infinity() : Limits::lowest();
    hi = Limits::has_infinity ? Limits::infinity() : Limits::max();
    if (job.has[0]) lo = job.scalar[0].as<T>();
    if (job.has[1]) hi = job.scalar[1].as<T>();
    if (lo != lo || hi != hi) lo = hi = lo != lo ? lo : hi;
    nan = lo != lo;
  }
  T operator()(T v) const {  // a NaN passes through both comparisons
    v = (v < lo) | nan ? lo : v;
    return v > hi ? hi : v;
  }
};

// ---- functions of two elements

#define KEEPDIM_TWO(Name, expression) \
  template <class T> struct Name { auto operator()(T a, T b) const { return expression; } }
KEEPDIM_TWO(AddFn, Add::f(a, b));
KEEPDIM_TWO(MulFn, Mul::f(a, b));
KEEPDIM_TWO(SubFn, wrap(a, b, [](auto x, auto y) { return x - y; }));
KEEPDIM_TWO(DivFn, a / b);
KEEPDIM_TWO(MaximumFn, Maximum::f(a, b));
KEEPDIM_TWO(MinimumFn, Minimum::f(a, b));
KEEPDIM_TWO(Atan2, std::atan2(a, b));
KEEPDIM_TWO(Eq, a == b);
KEEPDIM_TWO(Ne, a != b);
KEEPDIM_TWO(Lt, a < b);
KEEPDIM_TWO(Le, a <= b);
KEEPDIM_TWO(Gt, a > b);
KEEPDIM_TWO(Ge, a >= b);
KEEPDIM_TWO(And, static_cast<T>(a & b));
KEEPDIM_TWO(Or, static_cast<T>(a | b));
KEEPDIM_TWO(Xor, static_cast<T>(a ^ b));
#undef KEEPDIM_TWO

template <class T> struct Pow {
  T operator()(T a, T b) const {
    if constexpr (std::is_floating_point_v<T>) {
      return std::pow(a, b);
    } else {
      if (b < 0) return a == 1 ? 1 : a == -1 ? (b % 2 ? -1 : 1) : 0;
      T y = 1;
      for (; b; b >>= 1, a = Mul::f(a, a))
        if (b & 1) y = Mul::f(y, a);
      return y;
    }
  }
};
template <class T> struct Swiglu { T operator()(T gate, T up) const { return Silu<T>()(gate) * up; } };
template <class T> struct Lshift {
  T operator()(T a, T b) const {
    constexpr T width = 8 * sizeof(T);
    return b < 0 || b >= width ? T(0) : static_cast<T>(static_cast<Unsigned<T>>(a) << b);
  }
};
template <class T> struct Rshift {
  T operator()(T a, T b) const {
    constexpr T width = 8 * sizeof(T);
    return a >> (b < 0 || b >= width ? width - 1 : b);
  }
};

// Quotients and remainders. Of integers, b is not 0 here: the kernel has reported it.
template <class T> T quotient(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) return std::trunc(a / b);
  else return b == -1 ? Neg<T>()(a) : a / b;
}
template <class T> struct DivTrunc { T operator()(T a, T b) const { return quotient(a, b); } };

// What is left of a division. Every number: with a loop inside.
struct Any {
  template <class T> static T rest(T a, T b) {
    if constexpr (std::is_floating_point_v<T>) return std::fmod(a, b);
    else return b == -1 ? 0 : a % b;
  }
};
// Floats whose quotient is below 2^digits, which `Near` says: rounded, it is at most one too large, and x - q * y has no
// more digits than x and y, so that fma gives it exactly. No loop, no branch.
struct Short {
  template <class T> static T rest(T a, T b) {
    const T x = std::fabs(a), y = std::fabs(b), q = std::trunc(x / y);
    T r = std::fma(-q, y, x);
    r = r < 0 ? r + y : r;
    return std::copysign(q == 0 ? x : r, a);  // y may be infinite where q is 0
  }
};
template <class T> struct Near {
  bool operator()(T a, T b) const {
    return std::fabs(a / b) < static_cast<T>(int64_t(1) << std::numeric_limits<T>::digits);
  }
};

template <class T, class Division> struct FmodBy {
  T operator()(T a, T b) const { return Division::rest(a, b); }
};
template <class T, class Division> struct RemainderBy {  // with the sign of b
  T operator()(T a, T b) const {
    const T r = Division::rest(a, b);
    return (r != 0) & ((b < 0) != (r < 0)) ? r + b : r;
  }
};
template <class T, class Division> struct DivFloorBy {
  T operator()(T a, T b) const {
    const T r = Division::rest(a, b);
    if constexpr (std::is_floating_point_v<T>) {
      const T plain = a / b;
      T q = (a - r) / b;
      q = (r != 0) & ((b < 0) != (r < 0)) ? q - 1 : q;
      T down = std::floor(q);
      down = q - down > T(0.5) ? down + 1 : down;
      down = q == 0 ? std::copysign(T(0), plain) : down;
      return b == 0 ? plain : down;
    } else {
      return r != 0 && (a < 0) != (b < 0) ? quotient(a, b) - 1 : quotient(a, b);
    }
  }
};
template <class T> using Fmod = FmodBy<T, Any>;
template <class T> using Remainder = RemainderBy<T, Any>;
template <class T> using DivFloor = DivFloorBy<T, Any>;
template <class T> using ShortFmod = FmodBy<T, Short>;
template <class T> using ShortRemainder = RemainderBy<T, Short>;
template <class T> using ShortDivFloor = DivFloorBy<T, Short>;

// Integers have no quotient by 0: that is an error of the call, as in torch.
template <template <class> class F, class T>
void divide(const MapJob& job, void* y, const void* const* x, unsigned single, int64_t n) {
  if constexpr (std::is_integral_v<T>) {
    const T number = job.has[0] ? job.scalar[0].as<T>() : T(1);
    const T* b = job.has[0] ? &number : static_cast<const T*>(x[1]);
    const int64_t count = job.has[0] || single & 2 ? 1 : n;
    bool zero = false;
    for (int64_t i = 0; i < count; ++i) zero |= b[i] == 0;
    if (zero) return std::memset(y, 0, n * sizeof(T)), job.fail(0, "division by zero.");
  }
  two<F, T>(job, y, x, single, n);
}

// ---- rows

struct Blocks {
  Block f32 = nullptr, f64 = nullptr, i64 = nullptr, i32 = nullptr;
  Block f16 = nullptr, bf16 = nullptr, i16 = nullptr, i8 = nullptr, u8 = nullptr, boolean = nullptr;
  bool wraps = false;  // what it gives in narrow integers is what it gives in wide ones, cut off

  Block of(DType type) const {
    switch (type) {
      case DType::f32: return f32;
      case DType::f64: return f64;
      case DType::i64: return i64;
      case DType::i32: return i32;
      case DType::f16: return f16;
      case DType::bf16: return bf16;
      case DType::i16: return i16;
      case DType::i8: return i8;
      case DType::u8: return u8;
      case DType::boolean: return boolean;
      default: return nullptr;
    }
  }
  // The type that it reads tensors of a dtype in: that one, or the wide type it is computed in.
  DType reads(DType dtype) const { return of(dtype) ? dtype : compute_type(dtype); }
  // The same, with a number for the second operand, which a narrow type may not hold.
  DType reads_with_number(DType dtype) const {
    return wraps || compute_type(dtype) == DType::f32 ? reads(dtype) : compute_type(dtype);
  }
};
template <template <class> class F> constexpr Blocks kOneFloat = {one<F, float>, one<F, double>};
template <template <class> class F>
constexpr Blocks kOneAny = {one<F, float>, one<F, double>, one<F, int64_t>, one<F, int32_t>};
template <template <class> class F> constexpr Blocks kTwoFloat = {two<F, float>, two<F, double>};
template <template <class> class F> constexpr Blocks kTwoInteger = {nullptr, nullptr, two<F, int64_t>, two<F, int32_t>};
template <template <class> class F>
constexpr Blocks kTwoAny = {two<F, float>, two<F, double>, two<F, int64_t>, two<F, int32_t>};
template <template <class> class F>
constexpr Blocks kDivide = {divide<F, float>, divide<F, double>, divide<F, int64_t>, divide<F, int32_t>};
template <class T, template <class> class Quick, template <class> class Full>
constexpr Block kQuotient = by_chunk<T, two<Near, T>, two<Quick, T>, two<Full, T>>;
template <template <class> class Quick, template <class> class Full>
constexpr Blocks kQuotients = {kQuotient<float, Quick, Full>, kQuotient<double, Quick, Full>, divide<Full, int64_t>,
                               divide<Full, int32_t>};
constexpr Blocks kElu = {by_chunk<float, one<Positive, float>, one<Same, float>, one<Elu, float>>,
                         by_chunk<double, one<Positive, double>, one<Same, double>, one<Elu, double>>};
// Cheap functions: to widen what is stored would take longer than they do.
template <template <class> class F>
constexpr Blocks kOneStored = {one<F, float>, one<F, double>,  one<F, int64_t>, one<F, int32_t>, one<F, Half>,
                               one<F, Brain>, one<F, int16_t>, one<F, int8_t>,  one<F, uint8_t>};
template <template <class> class F, template <class> class OfBits>
constexpr Blocks kOneBits = {one<F, float>,         one<F, double>,  one<F, int64_t>, one<F, int32_t>, one<OfBits, uint16_t>,
                             one<OfBits, uint16_t>, one<F, int16_t>, one<F, int8_t>,  one<F, uint8_t>};
template <template <class> class F, bool wraps>
constexpr Blocks kTwoStored = {two<F, float>,   two<F, double>, two<F, int64_t>, two<F, int32_t>,
                               two<F, Half>,    two<F, Brain>,  two<F, int16_t>, two<F, int8_t>,
                               two<F, uint8_t>, nullptr,        wraps};
template <template <class> class F>
constexpr Blocks kTwoBits = {nullptr,         nullptr,        two<F, int64_t>, two<F, int32_t>, nullptr, nullptr,
                             two<F, int16_t>, two<F, int8_t>, two<F, uint8_t>, two<F, uint8_t>, true};
template <template <class> class F>
constexpr Blocks kCompare = {two<F, float>,   two<F, double>, two<F, int64_t>, two<F, int32_t>, nullptr, nullptr,
                             two<F, int16_t>, two<F, int8_t>, two<F, uint8_t>, two<F, uint8_t>, false};

// Multiply-adds that an element costs, roughly: what decides on threads.
enum Cost { cheap = 2, medium = 10, dear = 30 };

Tensor map_one(Build& b, const Blocks& blocks, double cost, const MapJob& numbers = {}) {
  need_fit(b, b.in(0));
  const DType type = blocks.reads(b.in(0).dtype);
  return b.map(blocks.of(type), type, type, b.out(), {&b.in(0)}, numbers, cost);
}

template <const Blocks& blocks, Cost cost>
Tensor unary_row(Build& b) {
  return map_one(b, blocks, cost);
}

Tensor map_two(Build& b, const Blocks& blocks, double cost, bool truth) {
  need_fit(b, b.in(0));
  const DType dtype = b.in(0).dtype, type = b.has(1) ? blocks.reads(dtype) : blocks.reads_with_number(dtype);
  const DType made = truth ? DType::boolean : type;
  if (b.has(1)) {
    need_fit(b, b.in(1));
    return b.map(blocks.of(type), type, made, b.out(), {&b.in(0), &b.in(1)}, {}, cost);
  }
  MapJob job;
  job.scalar[0] = b.scalar("other");
  job.has[0] = true;
  return b.map(blocks.of(type), type, made, b.out(), {&b.in(0)}, job, cost);
}

template <const Blocks& blocks, Cost cost>
Tensor binary_row(Build& b) {
  return map_two(b, blocks, cost, false);
}
template <const Blocks& blocks>
Tensor compare_row(Build& b) {
  return map_two(b, blocks, cheap, true);
}

// The exponents that models use are products and roots, as in torch.
Tensor power(Build& b) {
  if (!b.has(1) && bit(b.out().dtype) & kFloats) {
    const Scalar exponent = b.scalar("other");
    const double e = exponent.data ? 0 : exponent.as<double>();
    if (e == 2) return map_one(b, kOneFloat<Square>, cheap);
    if (e == 3) return map_one(b, kOneFloat<Cube>, cheap);
    if (e == 0.5) return map_one(b, kOneFloat<Sqrt>, cheap);
    if (e == -0.5) return map_one(b, kOneFloat<Rsqrt>, cheap);
    if (e == -1) return map_one(b, kOneFloat<Reciprocal>, cheap);
  }
  return map_two(b, kTwoAny<Pow>, dear, false);
}

Tensor gelu(Build& b) {
  const bool tanh = b.attr("approximate") && b.choice("approximate", {"none", "tanh"}) == 1;
  return map_one(b, tanh ? kOneFloat<GeluTanh> : kOneFloat<Gelu>, medium);
}

// A function with up to two numbers, by the names of its attributes.
template <const Blocks& blocks, Cost cost>
Tensor with_numbers(Build& b) {
  MapJob job;
  int i = 0;
  for (const AttrRule& rule : b.rule().attrs) {
    job.has[i] = b.attr(rule.name);
    if (job.has[i]) job.scalar[i] = b.scalar(rule.name);
    ++i;
  }
  return map_one(b, blocks, cost, job);
}

// Elements are moved, not computed: any dtype of the width.
template <class T>
void choose(const MapJob&, void* out, const void* const* in, unsigned single, int64_t n) {
  T* y = static_cast<T*>(out);
  const uint8_t* condition = static_cast<const uint8_t*>(in[0]);
  const T *a = static_cast<const T*>(in[1]), *b = static_cast<const T*>(in[2]);
  const T first = *a, second = *b;
  if (single & 1) {
    const bool taken = *condition, one_value = single & (taken ? 2 : 4);
    const T* from = taken ? a : b;
    return one_value ? (std::fill(y, y + n, *from), void()) : (std::memmove(y, from, n * sizeof(T)), void());
  }
  switch (single >> 1) {
    case 0: for (int64_t i = 0; i < n; ++i) y[i] = condition[i] ? a[i] : b[i]; break;
    case 1: for (int64_t i = 0; i < n; ++i) y[i] = condition[i] ? first : b[i]; break;
    case 2: for (int64_t i = 0; i < n; ++i) y[i] = condition[i] ? a[i] : second; break;
    default: for (int64_t i = 0; i < n; ++i) y[i] = condition[i] ? first : second;
  }
}

Tensor where(Build& b) {
  for (size_t i = 0; i < 3; ++i) need_fit(b, b.in(i));
  const int64_t width = b.out().width();
  const Block block = width == 1   ? choose<uint8_t>
                      : width == 2 ? choose<uint16_t>
                      : width == 4 ? choose<uint32_t>
                                   : choose<uint64_t>;
  MapJob job;
  job.condition = true;
  return b.map(block, b.out().dtype, b.out().dtype, b.out(), {&b.in(0), &b.in(1), &b.in(2)}, job, cheap);
}

constexpr Row kRows[] = {
    {"neg", unary_row<kOneBits<Neg, TurnSign>, cheap>},
    {"abs", unary_row<kOneBits<Abs, DropSign>, cheap>},
    {"sign", unary_row<kOneStored<Sign>, cheap>},
    {"relu", unary_row<kOneStored<Relu>, cheap>},
    {"reciprocal", unary_row<kOneFloat<Reciprocal>, cheap>},
    {"ceil", unary_row<kOneFloat<Ceil>, cheap>},
    {"floor", unary_row<kOneFloat<Floor>, cheap>},
    {"round", unary_row<kOneFloat<Round>, cheap>},
    {"trunc", unary_row<kOneFloat<Trunc>, cheap>},
    {"sqrt", unary_row<kOneFloat<Sqrt>, cheap>},
    {"rsqrt", unary_row<kOneFloat<Rsqrt>, cheap>},
    {"exp", unary_row<kOneFloat<Exp>, medium>},
    {"exp2", unary_row<kOneFloat<Exp2>, medium>},
    {"expm1", unary_row<kOneFloat<Expm1>, medium>},
    {"log", unary_row<kOneFloat<Log>, medium>},
    {"log1p", unary_row<kOneFloat<Log1p>, medium>},
    {"log2", unary_row<kOneFloat<Log2>, medium>},
    {"log10", unary_row<kOneFloat<Log10>, medium>},
    {"sin", unary_row<kOneFloat<Sin>, medium>},
    {"cos", unary_row<kOneFloat<Cos>, medium>},
    {"tan", unary_row<kOneFloat<Tan>, medium>},
    {"asin", unary_row<kOneFloat<Asin>, medium>},
    {"acos", unary_row<kOneFloat<Acos>, medium>},
    {"atan", unary_row<kOneFloat<Atan>, medium>},
    {"sinh", unary_row<kOneFloat<Sinh>, medium>},
    {"cosh", unary_row<kOneFloat<Cosh>, medium>},
    {"asinh", unary_row<kOneFloat<Asinh>, medium>},
    {"acosh", unary_row<kOneFloat<Acosh>, medium>},
    {"atanh", unary_row<kOneFloat<Atanh>, medium>},
    {"tanh", unary_row<kOneFloat<Tanh>, medium>},
    {"erf", unary_row<kOneFloat<Erf>, medium>},
    {"erfc", unary_row<kOneFloat<Erfc>, medium>},
    {"sigmoid", unary_row<kOneFloat<Sigmoid>, medium>},
    {"silu", unary_row<kOneFloat<Silu>, medium>},
    {"hardsigmoid", unary_row<kOneFloat<Six>, cheap>},
    {"hardswish", unary_row<kOneFloat<Hardswish>, cheap>},
    {"gelu", gelu},
    {"leaky_relu", with_numbers<kOneFloat<LeakyRelu>, cheap>},
    {"elu", with_numbers<kElu, medium>},
    {"softplus", with_numbers<kOneFloat<Softplus>, medium>},
    {"clamp", with_numbers<kOneAny<Clamp>, cheap>},
    {"add", binary_row<kTwoStored<AddFn, true>, cheap>},
    {"sub", binary_row<kTwoStored<SubFn, true>, cheap>},
    {"mul", binary_row<kTwoStored<MulFn, true>, cheap>},
    {"div", binary_row<kTwoFloat<DivFn>, cheap>},
    {"div_floor", binary_row<kQuotients<ShortDivFloor, DivFloor>, medium>},
    {"div_trunc", binary_row<kDivide<DivTrunc>, medium>},
    {"fmod", binary_row<kQuotients<ShortFmod, Fmod>, medium>},
    {"remainder", binary_row<kQuotients<ShortRemainder, Remainder>, medium>},
    {"pow", power},
    {"atan2", binary_row<kTwoFloat<Atan2>, dear>},
    {"maximum", binary_row<kTwoStored<MaximumFn, false>, cheap>},
    {"minimum", binary_row<kTwoStored<MinimumFn, false>, cheap>},
    {"swiglu", binary_row<kTwoFloat<Swiglu>, medium>},
    {"bitwise_and", binary_row<kTwoBits<And>, cheap>},
    {"bitwise_or", binary_row<kTwoBits<Or>, cheap>},
    {"bitwise_xor", binary_row<kTwoBits<Xor>, cheap>},
    {"bitwise_left_shift", binary_row<kTwoInteger<Lshift>, cheap>},
    {"bitwise_right_shift", binary_row<kTwoInteger<Rshift>, cheap>},
    {"eq", compare_row<kCompare<Eq>>},
    {"ne", compare_row<kCompare<Ne>>},
    {"lt", compare_row<kCompare<Lt>>},
    {"le", compare_row<kCompare<Le>>},
    {"gt", compare_row<kCompare<Gt>>},
    {"ge", compare_row<kCompare<Ge>>},
    {"where", where},
};

}  // namespace

Table map_rows() { return {kRows, std::size(kRows)}; }

// A row [n] added to every row of x [.., n].
Tensor add_bias(Build& b, const Tensor& x, const Tensor& bias) {
  Tensor out = x;
  return b.map(kTwoAny<AddFn>.of(x.dtype), x.dtype, x.dtype, out, {&x, &bias}, {}, cheap);
}

// Functions that a product applies to its result.
Block activation_block(const std::string& name, DType type) {
  static const std::pair<const char*, Blocks> all[] = {
      {"relu", kOneAny<Relu>}, {"gelu", kOneFloat<Gelu>}, {"gelu_tanh", kOneFloat<GeluTanh>},
      {"silu", kOneFloat<Silu>}, {"tanh", kOneFloat<Tanh>}, {"sigmoid", kOneFloat<Sigmoid>},
  };
  for (const auto& [known, blocks] : all)
    if (name == known) return blocks.of(type);
  return nullptr;
}

Block power_block(DType type) { return kTwoAny<Pow>.of(type); }

}  // namespace keepdim::ggml
