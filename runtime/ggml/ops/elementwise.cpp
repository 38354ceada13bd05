// Elementwise ops. A functor is a template over its compute type (kernels/elementwise_functor.h); FnByDType lists the dtypes
// it is instantiated for.
#include <cmath>
#include <limits>

#include "ggml/kernels/elementwise_functor.h"
#include "ggml/ops/ops.h"
#include "ggml/simd/vector_math.h"

namespace keepdim::ggml {
namespace {

// ---- unary functions

// Inlined always: a call would keep a loop from being vectorised.
template <class T> inline __attribute__((always_inline)) T exp_of(T x) {
  if constexpr (std::is_same_v<T, float>)
    return fast_exp(x);
  else
    return std::exp(x);
}
template <class T> T erf_of(T x) { return std::erf(x); }
template <> float erf_of(float x) { return fast_erf(x); }
template <class T> T normal_cdf(T x) { return T(0.5) * (1 + std::erf(x * T(0.70710678118654752))); }
template <> float normal_cdf(float x) { return fast_normal_cdf(x); }
template <class T> T tanh_of(T x) { return std::tanh(x); }
template <> float tanh_of(float x) { return fast_tanh(x); }

#define KEEPDIM_UNARY(Name, call)               \
  template <class T> struct Name {              \
    T operator()(T x) const { return call(x); } \
  }
KEEPDIM_UNARY(Sqrt, std::sqrt);
KEEPDIM_UNARY(Exp, exp_of);
KEEPDIM_UNARY(Exp2, std::exp2);
KEEPDIM_UNARY(Expm1, std::expm1);
KEEPDIM_UNARY(Log, std::log);
KEEPDIM_UNARY(Log1p, std::log1p);
KEEPDIM_UNARY(Log2, std::log2);
KEEPDIM_UNARY(Log10, std::log10);
KEEPDIM_UNARY(Sin, std::sin);
KEEPDIM_UNARY(Cos, std::cos);
KEEPDIM_UNARY(Tan, std::tan);
KEEPDIM_UNARY(Asin, std::asin);
KEEPDIM_UNARY(Acos, std::acos);
KEEPDIM_UNARY(Atan, std::atan);
KEEPDIM_UNARY(Sinh, std::sinh);
KEEPDIM_UNARY(Cosh, std::cosh);
KEEPDIM_UNARY(Asinh, std::asinh);
KEEPDIM_UNARY(Acosh, std::acosh);
KEEPDIM_UNARY(Atanh, std::atanh);
KEEPDIM_UNARY(Tanh, tanh_of);
KEEPDIM_UNARY(Erf, erf_of);
KEEPDIM_UNARY(Erfc, std::erfc);
KEEPDIM_UNARY(Ceil, std::ceil);
KEEPDIM_UNARY(Floor, std::floor);
KEEPDIM_UNARY(Round, std::nearbyint);  // ties to even
KEEPDIM_UNARY(Trunc, std::trunc);
#undef KEEPDIM_UNARY

template <class T> struct Neg {
  T operator()(T x) const {
    if constexpr (std::is_floating_point_v<T>)
      return -x;
    else
      return wrap(T(0), x, [](auto a, auto b) { return a - b; });
  }
};
template <class T> struct Abs {
  T operator()(T x) const {
    if constexpr (std::is_floating_point_v<T>)
      return std::fabs(x);
    else
      return x < 0 ? Neg<T>()(x) : x;
  }
};
// The same on the bits of a 16-bit float.
template <class T> struct FlipSignBit {
  T operator()(T x) const { return x ^ 0x8000; }
};
template <class T> struct ClearSignBit {
  T operator()(T x) const { return x & 0x7fff; }
};
template <class T> struct Sign {
  T operator()(T x) const { return static_cast<T>((x > 0) - (x < 0)); }
};
template <class T> struct Relu {
  T operator()(T x) const { return x < 0 ? T(0) : x; }
};  // NaN propagates
template <class T> struct Square {
  T operator()(T x) const { return x * x; }
};
template <class T> struct Cube {
  T operator()(T x) const { return x * x * x; }
};
template <class T> struct Reciprocal {
  T operator()(T x) const { return 1 / x; }
};
template <class T> struct Rsqrt {
  T operator()(T x) const { return 1 / std::sqrt(x); }
};
template <class T> T sigmoid(T x) {
  if constexpr (std::is_same_v<T, float>)
    return fast_sigmoid(x);
  else
    return 1 / (1 + std::exp(-x));
}
template <class T> struct Sigmoid {
  T operator()(T x) const { return sigmoid(x); }
};
template <class T> struct Silu {
  T operator()(T x) const { return x * sigmoid(x); }
};
template <class T> struct Gelu {
  T operator()(T x) const { return x * normal_cdf(x); }
};
template <class T> struct GeluTanh {
  T operator()(T x) const { return T(0.5) * x * (1 + tanh_of(T(0.79788456080286536) * (x + T(0.044715) * x * x * x))); }
};
template <class T> struct Hardsigmoid {  // relu6(x + 3) / 6
  T operator()(T x) const {
    const T y = x + 3;
    return (y < 0 ? T(0) : y > 6 ? T(6) : y) / 6;
  }
};
template <class T> struct Hardswish {
  T operator()(T x) const { return x * Hardsigmoid<T>()(x); }
};
template <class T> struct Relu6 {  // NaN passes through both comparisons
  T operator()(T x) const { return x < 0 ? T(0) : x > 6 ? T(6) : x; }
};

// Functions with scalar attributes: MapJob::scalar, in the order of the op's rule.
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
template <class T> struct Positive {
  bool operator()(T x) const { return x > 0; }
};
template <class T> struct Identity {
  T operator()(T x) const { return x; }
};
template <class T> struct Softplus {
  const T beta, threshold;
  explicit Softplus(const MapJob& job) : beta(job.scalar[0].as<T>()), threshold(job.scalar[1].as<T>()) {}
  T operator()(T x) const {
    const T scaled = x * beta;
    return scaled > threshold ? x : std::log1p(exp_of(scaled)) / beta;
  }
};
template <class T> struct Clamp {
  T lo, hi;
  bool nan;
  explicit Clamp(const MapJob& job) {
    using Limits = std::numeric_limits<T>;
    lo = Limits::has_infinity ? -Limits::infinity() : Limits::lowest();
    hi = Limits::has_infinity ? Limits::infinity() : Limits::max();
    if (job.has_scalar[0]) lo = job.scalar[0].as<T>();
    if (job.has_scalar[1]) hi = job.scalar[1].as<T>();
    if (lo != lo || hi != hi) lo = hi = lo != lo ? lo : hi;
    nan = lo != lo;
  }
  T operator()(T v) const {  // NaN passes through both comparisons
    v = (v < lo) | nan ? lo : v;
    return v > hi ? hi : v;
  }
};

// ---- binary functions

#define KEEPDIM_BINARY(Name, expression)                   \
  template <class T> struct Name {                         \
    auto operator()(T a, T b) const { return expression; } \
  }
KEEPDIM_BINARY(AddFn, Add::f(a, b));
KEEPDIM_BINARY(MulFn, Mul::f(a, b));
KEEPDIM_BINARY(SubFn, wrap(a, b, [](auto x, auto y) { return x - y; }));
KEEPDIM_BINARY(DivFn, a / b);
KEEPDIM_BINARY(MaximumFn, Maximum::f(a, b));
KEEPDIM_BINARY(MinimumFn, Minimum::f(a, b));
KEEPDIM_BINARY(Atan2, std::atan2(a, b));
KEEPDIM_BINARY(Eq, a == b);
KEEPDIM_BINARY(Ne, a != b);
KEEPDIM_BINARY(Lt, a < b);
KEEPDIM_BINARY(Le, a <= b);
KEEPDIM_BINARY(Gt, a > b);
KEEPDIM_BINARY(Ge, a >= b);
KEEPDIM_BINARY(And, static_cast<T>(a& b));
KEEPDIM_BINARY(Or, static_cast<T>(a | b));
KEEPDIM_BINARY(Xor, static_cast<T>(a ^ b));
#undef KEEPDIM_BINARY

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
template <class T> struct Swiglu {
  T operator()(T gate, T up) const { return Silu<T>()(gate) * up; }
};
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

// Truncating division. For integers b is not 0 here: `divide` has checked it.
template <class T> T quotient(T a, T b) {
  if constexpr (std::is_floating_point_v<T>)
    return std::trunc(a / b);
  else if constexpr (sizeof(T) <= 4)  // f64 has the exact quotient in its integer part, and its division is vectorised
    return static_cast<T>(static_cast<int64_t>(static_cast<double>(a) / static_cast<double>(b)));
  else
    return b == -1 ? Neg<T>()(a) : a / b;
}
template <class T> struct DivTrunc {
  T operator()(T a, T b) const { return quotient(a, b); }
};

// Remainder with the sign of a. General case; fmod loops internally.
struct FmodDivision {
  template <class T> static T remainder(T a, T b) {
    if constexpr (std::is_floating_point_v<T>)
      return std::fmod(a, b);
    else if constexpr (sizeof(T) <= 4)
      return wrap(a, wrap(quotient(a, b), b, [](auto x, auto y) { return x * y; }), [](auto x, auto y) { return x - y; });
    else
      return b == -1 ? 0 : a % b;
  }
};
// Floats with |a / b| < 2^digits (QuotientFits): the rounded quotient is at most one too large, and x - q * y is representable,
// so that fma computes it exactly. Branch-free.
struct FmaDivision {
  template <class T> static T remainder(T a, T b) {
    const T x = std::fabs(a), y = std::fabs(b), q = std::trunc(x / y);
    T r = std::fma(-q, y, x);
    r = r < 0 ? r + y : r;
    return std::copysign(q == 0 ? x : r, a);  // y may be inf if q is 0
  }
};
template <class T> struct QuotientFits {
  bool operator()(T a, T b) const { return std::fabs(a / b) < static_cast<T>(int64_t(1) << std::numeric_limits<T>::digits); }
};

template <class T, class Division> struct FmodBy {
  T operator()(T a, T b) const { return Division::remainder(a, b); }
};
template <class T, class Division> struct RemainderBy {  // with the sign of b
  T operator()(T a, T b) const {
    const T r = Division::remainder(a, b);
    return (r != 0) & ((b < 0) != (r < 0)) ? r + b : r;
  }
};
template <class T, class Division> struct DivFloorBy {
  T operator()(T a, T b) const {
    if constexpr (std::is_integral_v<T> && sizeof(T) <= 4)
      return static_cast<T>(static_cast<int64_t>(std::floor(static_cast<double>(a) / static_cast<double>(b))));
    const T r = Division::remainder(a, b);
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
template <class T> using Fmod = FmodBy<T, FmodDivision>;
template <class T> using Remainder = RemainderBy<T, FmodDivision>;
template <class T> using DivFloor = DivFloorBy<T, FmodDivision>;
template <class T> using FmaFmod = FmodBy<T, FmaDivision>;
template <class T> using FmaRemainder = RemainderBy<T, FmaDivision>;
template <class T> using FmaDivFloor = DivFloorBy<T, FmaDivision>;

// Integer division by zero fails the call, as in torch.
template <template <class> class F, class T>
void divide(const MapJob& job, void* y, const void* const* x, unsigned broadcast_mask, int64_t n) {
  if constexpr (std::is_integral_v<T>) {
    const T scalar_divisor = job.has_scalar[0] ? job.scalar[0].as<T>() : T(1);
    const T* b = job.has_scalar[0] ? &scalar_divisor : static_cast<const T*>(x[1]);
    const int64_t count = job.has_scalar[0] || broadcast_mask & 2 ? 1 : n;
    bool zero = false;
    for (int64_t i = 0; i < count; ++i) zero |= b[i] == 0;
    if (zero) return std::memset(y, 0, n * sizeof(T)), job.fail(0, "division by zero.");
  }
  binary_loop<F, T>(job, y, x, broadcast_mask, n);
}

// ---- ops

struct FnByDType {
  ElementwiseFn f32 = nullptr, f64 = nullptr, i64 = nullptr, i32 = nullptr;
  ElementwiseFn f16 = nullptr, bf16 = nullptr, i16 = nullptr, i8 = nullptr, u8 = nullptr, boolean = nullptr;
  bool wraps_around = false;  // the narrow integer result is the wide one truncated

  ElementwiseFn of(DType type) const {
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
  // Type in which tensors of `dtype` are read: `dtype` itself if implemented, else its compute type.
  DType read_type(DType dtype) const { return of(dtype) ? dtype : compute_type(dtype); }
  // The same with a scalar second operand, which may not fit in a narrow type.
  DType read_type_with_scalar(DType dtype) const {
    return wraps_around || compute_type(dtype) == DType::f32 ? read_type(dtype) : compute_type(dtype);
  }
};
template <template <class> class F> constexpr FnByDType kUnaryFloat = {unary_loop<F, float>, unary_loop<F, double>};
template <template <class> class F>
constexpr FnByDType kUnaryAny = {unary_loop<F, float>, unary_loop<F, double>, unary_loop<F, int64_t>, unary_loop<F, int32_t>};
template <template <class> class F> constexpr FnByDType kBinaryFloat = {binary_loop<F, float>, binary_loop<F, double>};
template <template <class> class F> constexpr FnByDType kBinaryInteger = {nullptr, nullptr, binary_loop<F, int64_t>,
                                                                          binary_loop<F, int32_t>};
template <template <class> class F>
constexpr FnByDType kBinaryAny = {binary_loop<F, float>, binary_loop<F, double>, binary_loop<F, int64_t>,
                                  binary_loop<F, int32_t>};
template <template <class> class F>
constexpr FnByDType kDivide = {divide<F, float>, divide<F, double>, divide<F, int64_t>, divide<F, int32_t>};
template <class T, template <class> class Fast, template <class> class Full>
constexpr ElementwiseFn kQuotient =
    dispatch_by_chunk<T, binary_loop<QuotientFits, T>, binary_loop<Fast, T>, binary_loop<Full, T>>;
template <template <class> class Fast, template <class> class Full>
constexpr FnByDType kQuotients = {kQuotient<float, Fast, Full>, kQuotient<double, Fast, Full>, divide<Full, int64_t>,
                                  divide<Full, int32_t>};
constexpr FnByDType kElu = {
    dispatch_by_chunk<float, unary_loop<Positive, float>, unary_loop<Identity, float>, unary_loop<Elu, float>>,
    dispatch_by_chunk<double, unary_loop<Positive, double>, unary_loop<Identity, double>, unary_loop<Elu, double>>};
// Cheap functions run on the storage types: widening would cost more than the function.
template <template <class> class F>
constexpr FnByDType kUnaryStorage = {unary_loop<F, float>,   unary_loop<F, double>,  unary_loop<F, int64_t>,
                                     unary_loop<F, int32_t>, unary_loop<F, Float16>, unary_loop<F, BFloat16>,
                                     unary_loop<F, int16_t>, unary_loop<F, int8_t>,  unary_loop<F, uint8_t>};
template <template <class> class F, template <class> class BitsFn>
constexpr FnByDType kUnaryBits = {unary_loop<F, float>,   unary_loop<F, double>,        unary_loop<F, int64_t>,
                                  unary_loop<F, int32_t>, unary_loop<BitsFn, uint16_t>, unary_loop<BitsFn, uint16_t>,
                                  unary_loop<F, int16_t>, unary_loop<F, int8_t>,        unary_loop<F, uint8_t>};
template <template <class> class F, bool wraps_around>
constexpr FnByDType kBinaryStorage = {binary_loop<F, float>,
                                      binary_loop<F, double>,
                                      binary_loop<F, int64_t>,
                                      binary_loop<F, int32_t>,
                                      binary_loop<F, Float16>,
                                      binary_loop<F, BFloat16>,
                                      binary_loop<F, int16_t>,
                                      binary_loop<F, int8_t>,
                                      binary_loop<F, uint8_t>,
                                      nullptr,
                                      wraps_around};
template <template <class> class F>
constexpr FnByDType kBinaryBits = {nullptr,
                                   nullptr,
                                   binary_loop<F, int64_t>,
                                   binary_loop<F, int32_t>,
                                   nullptr,
                                   nullptr,
                                   binary_loop<F, int16_t>,
                                   binary_loop<F, int8_t>,
                                   binary_loop<F, uint8_t>,
                                   binary_loop<F, uint8_t>,
                                   true};
template <template <class> class F>
constexpr FnByDType kCompare = {
    binary_loop<F, float>,   binary_loop<F, double>, binary_loop<F, int64_t>, binary_loop<F, int32_t>, nullptr, nullptr,
    binary_loop<F, int16_t>, binary_loop<F, int8_t>, binary_loop<F, uint8_t>, binary_loop<F, uint8_t>, false};

// Approximate cost per element in multiply-adds; decides the number of threads.
enum Cost { cheap = 2, medium = 10, expensive = 30 };

Tensor map_unary(Build& b, const FnByDType& fns, double cost, const MapJob& scalars = {}) {
  check_broadcast(b, b.in(0));
  const DType type = fns.read_type(b.in(0).dtype);
  return b.map(fns.of(type), type, type, b.out(), {&b.in(0)}, scalars, cost);
}

template <const FnByDType& fns, Cost cost>
Tensor unary(Build& b) {
  return map_unary(b, fns, cost);
}

Tensor map_binary(Build& b, const FnByDType& fns, double cost, bool is_comparison) {
  check_broadcast(b, b.in(0));
  const DType dtype = b.in(0).dtype, type = b.has(1) ? fns.read_type(dtype) : fns.read_type_with_scalar(dtype);
  const DType result_type = is_comparison ? DType::boolean : type;
  if (b.has(1)) {
    check_broadcast(b, b.in(1));
    return b.map(fns.of(type), type, result_type, b.out(), {&b.in(0), &b.in(1)}, {}, cost);
  }
  MapJob job;
  job.scalar[0] = b.scalar("other");
  job.has_scalar[0] = true;
  return b.map(fns.of(type), type, result_type, b.out(), {&b.in(0)}, job, cost);
}

template <const FnByDType& fns, Cost cost>
Tensor binary(Build& b) {
  return map_binary(b, fns, cost, false);
}
template <const FnByDType& fns>
Tensor comparison(Build& b) {
  return map_binary(b, fns, cheap, true);
}

// Common exponents use multiplication and sqrt, as in torch.
Tensor power(Build& b) {
  if (!b.has(1) && bit(b.out().dtype) & kFloats) {
    const Scalar exponent = b.scalar("other");
    const double e = exponent.data ? 0 : exponent.as<double>();
    if (e == 2) return map_unary(b, kUnaryFloat<Square>, cheap);
    if (e == 3) return map_unary(b, kUnaryFloat<Cube>, cheap);
    if (e == 0.5) return map_unary(b, kUnaryFloat<Sqrt>, cheap);
    if (e == -0.5) return map_unary(b, kUnaryFloat<Rsqrt>, cheap);
    if (e == -1) return map_unary(b, kUnaryFloat<Reciprocal>, cheap);
  }
  return map_binary(b, kBinaryAny<Pow>, expensive, false);
}

Tensor gelu(Build& b) {
  const bool tanh = b.attr("approximate") && b.choice("approximate", {"none", "tanh"}) == 1;
  return map_unary(b, tanh ? kUnaryFloat<GeluTanh> : kUnaryFloat<Gelu>, medium);
}

// A unary function with up to two scalar attributes, in the order of its rule.
template <const FnByDType& fns, Cost cost>
Tensor unary_with_scalars(Build& b) {
  MapJob job;
  int i = 0;
  for (const AttrRule& rule : b.rule().attrs) {
    job.has_scalar[i] = b.attr(rule.name);
    if (job.has_scalar[i]) job.scalar[i] = b.scalar(rule.name);
    ++i;
  }
  return map_unary(b, fns, cost, job);
}

// y = condition ? a : b, by element width.
template <class T>
void where_loop(const MapJob&, void* out, const void* const* in, unsigned broadcast_mask, int64_t n) {
  T* y = static_cast<T*>(out);
  const uint8_t* condition = static_cast<const uint8_t*>(in[0]);
  const T *a = static_cast<const T*>(in[1]), *b = static_cast<const T*>(in[2]);
  const T first = *a, second = *b;
  if (broadcast_mask & 1) {
    const bool cond = *condition, is_scalar = broadcast_mask & (cond ? 2 : 4);
    const T* from = cond ? a : b;
    return is_scalar ? (std::fill(y, y + n, *from), void()) : (std::memmove(y, from, n * sizeof(T)), void());
  }
  switch (broadcast_mask >> 1) {
    case 0:
      for (int64_t i = 0; i < n; ++i) y[i] = condition[i] ? a[i] : b[i];
      break;
    case 1:
      for (int64_t i = 0; i < n; ++i) y[i] = condition[i] ? first : b[i];
      break;
    case 2:
      for (int64_t i = 0; i < n; ++i) y[i] = condition[i] ? a[i] : second;
      break;
    default:
      for (int64_t i = 0; i < n; ++i) y[i] = condition[i] ? first : second;
  }
}

Tensor where(Build& b) {
  for (size_t i = 0; i < 3; ++i) check_broadcast(b, b.in(i));
  const int64_t width = b.out().width();
  const ElementwiseFn fn = width == 1   ? where_loop<uint8_t>
                           : width == 2 ? where_loop<uint16_t>
                           : width == 4 ? where_loop<uint32_t>
                                        : where_loop<uint64_t>;
  MapJob job;
  job.condition = true;
  return b.map(fn, b.out().dtype, b.out().dtype, b.out(), {&b.in(0), &b.in(1), &b.in(2)}, job, cheap);
}

constexpr OpBuilder kOps[] = {
    {"neg", unary<kUnaryBits<Neg, FlipSignBit>, cheap>},
    {"abs", unary<kUnaryBits<Abs, ClearSignBit>, cheap>},
    {"sign", unary<kUnaryStorage<Sign>, cheap>},
    {"relu", unary<kUnaryStorage<Relu>, cheap>},
    {"reciprocal", unary<kUnaryFloat<Reciprocal>, cheap>},
    {"ceil", unary<kUnaryFloat<Ceil>, cheap>},
    {"floor", unary<kUnaryFloat<Floor>, cheap>},
    {"round", unary<kUnaryFloat<Round>, cheap>},
    {"trunc", unary<kUnaryFloat<Trunc>, cheap>},
    {"sqrt", unary<kUnaryFloat<Sqrt>, cheap>},
    {"rsqrt", unary<kUnaryFloat<Rsqrt>, cheap>},
    {"exp", unary<kUnaryFloat<Exp>, medium>},
    {"exp2", unary<kUnaryFloat<Exp2>, medium>},
    {"expm1", unary<kUnaryFloat<Expm1>, medium>},
    {"log", unary<kUnaryFloat<Log>, medium>},
    {"log1p", unary<kUnaryFloat<Log1p>, medium>},
    {"log2", unary<kUnaryFloat<Log2>, medium>},
    {"log10", unary<kUnaryFloat<Log10>, medium>},
    {"sin", unary<kUnaryFloat<Sin>, medium>},
    {"cos", unary<kUnaryFloat<Cos>, medium>},
    {"tan", unary<kUnaryFloat<Tan>, medium>},
    {"asin", unary<kUnaryFloat<Asin>, medium>},
    {"acos", unary<kUnaryFloat<Acos>, medium>},
    {"atan", unary<kUnaryFloat<Atan>, medium>},
    {"sinh", unary<kUnaryFloat<Sinh>, medium>},
    {"cosh", unary<kUnaryFloat<Cosh>, medium>},
    {"asinh", unary<kUnaryFloat<Asinh>, medium>},
    {"acosh", unary<kUnaryFloat<Acosh>, medium>},
    {"atanh", unary<kUnaryFloat<Atanh>, medium>},
    {"tanh", unary<kUnaryFloat<Tanh>, medium>},
    {"erf", unary<kUnaryFloat<Erf>, medium>},
    {"erfc", unary<kUnaryFloat<Erfc>, medium>},
    {"sigmoid", unary<kUnaryFloat<Sigmoid>, medium>},
    {"silu", unary<kUnaryFloat<Silu>, medium>},
    {"hardsigmoid", unary<kUnaryFloat<Hardsigmoid>, cheap>},
    {"hardswish", unary<kUnaryFloat<Hardswish>, cheap>},
    {"gelu", gelu},
    {"leaky_relu", unary_with_scalars<kUnaryFloat<LeakyRelu>, cheap>},
    {"elu", unary_with_scalars<kElu, medium>},
    {"softplus", unary_with_scalars<kUnaryFloat<Softplus>, medium>},
    {"clamp", unary_with_scalars<kUnaryAny<Clamp>, cheap>},
    {"add", binary<kBinaryStorage<AddFn, true>, cheap>},
    {"sub", binary<kBinaryStorage<SubFn, true>, cheap>},
    {"mul", binary<kBinaryStorage<MulFn, true>, cheap>},
    {"div", binary<kBinaryFloat<DivFn>, cheap>},
    {"div_floor", binary<kQuotients<FmaDivFloor, DivFloor>, medium>},
    {"div_trunc", binary<kDivide<DivTrunc>, medium>},
    {"fmod", binary<kQuotients<FmaFmod, Fmod>, medium>},
    {"remainder", binary<kQuotients<FmaRemainder, Remainder>, medium>},
    {"pow", power},
    {"atan2", binary<kBinaryFloat<Atan2>, expensive>},
    {"maximum", binary<kBinaryStorage<MaximumFn, false>, cheap>},
    {"minimum", binary<kBinaryStorage<MinimumFn, false>, cheap>},
    {"swiglu", binary<kBinaryFloat<Swiglu>, medium>},
    {"bitwise_and", binary<kBinaryBits<And>, cheap>},
    {"bitwise_or", binary<kBinaryBits<Or>, cheap>},
    {"bitwise_xor", binary<kBinaryBits<Xor>, cheap>},
    {"bitwise_left_shift", binary<kBinaryInteger<Lshift>, cheap>},
    {"bitwise_right_shift", binary<kBinaryInteger<Rshift>, cheap>},
    {"eq", comparison<kCompare<Eq>>},
    {"ne", comparison<kCompare<Ne>>},
    {"lt", comparison<kCompare<Lt>>},
    {"le", comparison<kCompare<Le>>},
    {"gt", comparison<kCompare<Gt>>},
    {"ge", comparison<kCompare<Ge>>},
    {"where", where},
};

}  // namespace

OpTable elementwise_ops() { return {kOps, std::size(kOps)}; }

// x [.., n] + bias [n].
Tensor add_bias(Build& b, const Tensor& x, const Tensor& bias) {
  Tensor out = x;
  return b.map(kBinaryAny<AddFn>.of(x.dtype), x.dtype, x.dtype, out, {&x, &bias}, {}, cheap);
}

// Activations that can be fused into a matrix product.
ElementwiseFn activation_fn(const std::string& name, DType type) {
  static const std::pair<const char*, FnByDType> all[] = {
      {"relu", kUnaryAny<Relu>},     {"gelu", kUnaryFloat<Gelu>},           {"gelu_tanh", kUnaryFloat<GeluTanh>},
      {"silu", kUnaryFloat<Silu>},   {"tanh", kUnaryFloat<Tanh>},           {"sigmoid", kUnaryFloat<Sigmoid>},
      {"relu6", kUnaryFloat<Relu6>}, {"hardswish", kUnaryFloat<Hardswish>}, {"hardsigmoid", kUnaryFloat<Hardsigmoid>},
  };
  for (const auto& [known, fns] : all)
    if (name == known) return fns.of(type);
  return nullptr;
}

ElementwiseFn pow_fn(DType type) { return kBinaryAny<Pow>.of(type); }

}  // namespace keepdim::ggml
