"""Elementwise ops."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .table import DTYPES, Array, Extent, JaxCall, iota, number, rule, take


def floats(dtype: np.dtype) -> bool:
    """Whether a dtype is floating point."""
    return bool(jnp.issubdtype(dtype, jnp.floating))


def each(f: Callable[..., Array]) -> Callable[[JaxCall], Array]:
    """A function of all operands, broadcast."""
    return lambda c: f(*c.args())


def in_f32(f: Callable[..., Array]) -> Callable[[JaxCall], Array]:
    """As `each`, computed in f32 for 16-bit floats."""
    return lambda c: f(*c.wide_args()).astype(c.dtype)


def gelu(x: Array, tanh: bool = False) -> Array:
    return jax.nn.gelu(x, approximate=tanh)


def sign(x: Array) -> Array:
    """The sign; 0 for NaN."""
    return x if x.dtype == jnp.bool_ else (x > 0).astype(x.dtype) - (x < 0).astype(x.dtype)


def divide_floor(x: Array, y: Array) -> Array:
    if not floats(x.dtype):
        return jnp.floor_divide(x, y)
    rest = lax.rem(x, y)
    quotient = (x - rest) / y - ((rest != 0) & ((y < 0) != (rest < 0))).astype(x.dtype)
    whole = jnp.floor(quotient)
    whole = whole + (quotient - whole > 0.5).astype(x.dtype)
    return jnp.where(y == 0, x / y, jnp.where(quotient == 0, jnp.copysign(jnp.zeros_like(x), x / y), whole))


def power(x: Array, y: Array) -> Array:
    if floats(x.dtype):
        return lax.pow(*jnp.broadcast_arrays(x, y))
    if x.dtype == jnp.bool_:
        return x | ~y
    y = jnp.asarray(y)
    whole = jnp.power(x, jnp.maximum(y, 0))
    odd = jnp.where(y % 2 == 0, 1, x)
    return jnp.where(y >= 0, whole, jnp.where(x == 1, 1, jnp.where(x == -1, odd, 0))).astype(x.dtype)


ROOTS = {0.5: jnp.sqrt, -0.5: lax.rsqrt}  # as in torch: differs from pow at -inf and -0
NATIVE: dict[str, Callable[..., Array]] = {
    "abs": jnp.abs, "neg": lambda x: -x, "sign": sign, "ceil": jnp.ceil, "floor": jnp.floor, "round": jnp.round,
    "trunc": jnp.trunc, "relu": lambda x: jnp.maximum(x, jnp.zeros((), x.dtype)),
    "add": jnp.add, "sub": jnp.subtract, "maximum": jnp.maximum, "minimum": jnp.minimum,
    "eq": jnp.equal, "ne": jnp.not_equal, "lt": jnp.less, "le": jnp.less_equal, "gt": jnp.greater,
    "ge": jnp.greater_equal, "where": jnp.where, "remainder": jnp.remainder, "fmod": jnp.fmod,
    "bitwise_and": jnp.bitwise_and, "bitwise_or": jnp.bitwise_or, "bitwise_xor": jnp.bitwise_xor,
    "bitwise_left_shift": jnp.left_shift, "bitwise_right_shift": jnp.right_shift,
}  # fmt: skip
IN_F32: dict[str, Callable[..., Array]] = {
    "sqrt": jnp.sqrt, "rsqrt": lax.rsqrt, "reciprocal": lambda x: 1 / x, "exp": jnp.exp, "exp2": jnp.exp2,
    "expm1": jnp.expm1, "log": jnp.log, "log1p": jnp.log1p, "log2": jnp.log2, "log10": jnp.log10,
    "sin": jnp.sin, "cos": jnp.cos, "tan": jnp.tan, "asin": jnp.arcsin, "acos": jnp.arccos, "atan": jnp.arctan,
    "sinh": jnp.sinh, "cosh": jnp.cosh, "tanh": jnp.tanh, "asinh": jnp.arcsinh, "acosh": jnp.arccosh,
    "atanh": jnp.arctanh, "erf": lax.erf, "erfc": lax.erfc, "sigmoid": jax.nn.sigmoid, "silu": jax.nn.silu,
    "hardsigmoid": lambda x: jnp.clip(x + 3, 0, 6) / 6, "hardswish": lambda x: x * jnp.clip(x + 3, 0, 6) / 6,
    "mul": jnp.multiply, "div": jnp.divide, "div_floor": divide_floor, "atan2": jnp.arctan2,
    "swiglu": lambda gate, x: jax.nn.silu(gate) * x,
}  # fmt: skip
for _name, _f in NATIVE.items():
    rule(_name)(each(_f))
for _name, _f in IN_F32.items():
    rule(_name)(in_f32(_f))


@rule("div_trunc")
def _div_trunc(c: JaxCall) -> Array:
    x, y = jnp.broadcast_arrays(*c.wide_args())
    return jnp.trunc(x / y).astype(c.dtype) if floats(x.dtype) else lax.div(x, y)


@rule("gelu")
def _gelu(c: JaxCall) -> Array:
    return gelu(c.wide(c.ins[0]), c.attr("approximate", "none") == "tanh").astype(c.dtype)


@rule("leaky_relu")
def _leaky_relu(c: JaxCall) -> Array:
    x = c.wide(c.ins[0])
    return jnp.where(x > 0, x, x * number(c.attr("negative_slope"), x.dtype)).astype(c.dtype)


@rule("elu")
def _elu(c: JaxCall) -> Array:
    x = c.wide(c.ins[0])
    return jnp.where(x > 0, x, number(c.attr("alpha"), x.dtype) * jnp.expm1(x)).astype(c.dtype)


@rule("softplus")
def _softplus(c: JaxCall) -> Array:
    x = c.wide(c.ins[0])
    scaled = x * number(c.attr("beta"), x.dtype)
    soft = jnp.log1p(jnp.exp(scaled)) / number(c.attr("beta"), x.dtype)
    return jnp.where(scaled > number(c.attr("threshold"), x.dtype), x, soft).astype(c.dtype)


@rule("clamp")
def _clamp(c: JaxCall) -> Array:
    x = c.ins[0]
    x = jnp.maximum(x, number(c.attr("min"), x.dtype)) if c.has("min") else x
    return jnp.minimum(x, number(c.attr("max"), x.dtype)) if c.has("max") else x


def cast(x: Array, dtype: np.dtype) -> Array:
    """A float is cast to a small integer through i32, as in C."""
    if x.dtype == dtype:
        return x
    if dtype == jnp.bool_:
        return x != 0
    if floats(x.dtype) and dtype in (jnp.int8, jnp.uint8, jnp.int16):
        x = x.astype(jnp.int32)
    return x.astype(dtype)


@rule("cast")
def _cast(c: JaxCall) -> Array:
    return cast(c.ins[0], DTYPES[c.out.dtype])


def apply_rope(x: Array, cos: Array, sin: Array, half: Extent | None = None) -> Array:
    """Rotary embedding over the two halves of the last dim; `half` is their size if x is padded."""
    if half is None:
        half = x.shape[-1] // 2
        rotated = jnp.concatenate((-x[..., half:], x[..., :half]), -1)
    else:
        position = iota([x.shape[-1]], 0)
        first = position < half
        rotated = take(x, jnp.where(first, position + half, position - half), x.ndim - 1)
        rotated = jnp.where(first, -rotated, rotated)
    return x * cos + rotated * sin


@rule("rope")
def _rope(c: JaxCall) -> Array:
    x, cos, sin = c.args()
    return apply_rope(x, cos, sin, None if c.sizes.exact(c.dims[-1]) else c.size(0, -1) // 2)


@rule("pow")
def _pow(c: JaxCall) -> Array:
    root = ROOTS.get(c.attr("other")) if isinstance(c.attr("other"), float) and floats(c.dtype) else None
    return in_f32(power)(c) if root is None else root(c.wide(c.ins[0])).astype(c.dtype)
