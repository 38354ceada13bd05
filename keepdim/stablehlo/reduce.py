"""Reductions, softmax, norms, cumulative sums, sorting."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .elementwise import floats
from .table import Array, JaxCall, Scalar, highest, iota, lowest, nonempty, number, rule


def axes_of(c: JaxCall) -> tuple[int, ...]:
    """The dims that are reduced."""
    return tuple(c.each("dims"))


def kept(c: JaxCall) -> bool:
    """Whether reduced dims are kept as 1, by the result's rank."""
    return len(c.dims) == len(c.given[0])


def reduction(f: Callable[..., Array], neutral: Callable[[np.dtype], Scalar]) -> Callable[[JaxCall], Array]:
    """A reduction, with padding filled by its neutral element."""

    def call(c: JaxCall) -> Array:
        x = c.fill(0, axes_of(c), neutral(c.ins[0].dtype))
        return f(c.wide(x), axis=axes_of(c), keepdims=kept(c)).astype(c.dtype)

    return call


rule("sum")(reduction(jnp.sum, lambda _: 0))
rule("prod")(reduction(jnp.prod, lambda _: 1))
rule("amax")(reduction(jnp.max, lowest))
rule("amin")(reduction(jnp.min, highest))
rule("any")(reduction(jnp.any, lambda _: False))
rule("all")(reduction(jnp.all, lambda _: True))


def count(c: JaxCall, axes: tuple[int, ...], dtype: np.dtype) -> Array:
    """The number of reduced elements."""
    return number(prod(c.size(0, a) for a in axes), dtype)


def mean(c: JaxCall, x: Array, axes: tuple[int, ...], keep: bool) -> Array:
    """The mean over dims of the first operand; the padding of x may be anything."""
    x = c.sizes.fill(x, c.given[0], axes, 0)
    return jnp.sum(x, axis=axes, keepdims=keep) / count(c, axes, x.dtype)


@rule("mean")
def _mean(c: JaxCall) -> Array:
    return mean(c, c.wide(c.ins[0]), axes_of(c), kept(c)).astype(c.dtype)


@rule("var")
def _var(c: JaxCall) -> Array:
    x, axes = c.wide(c.ins[0]), axes_of(c)
    off = c.sizes.fill(x - mean(c, x, axes, True), c.given[0], axes, 0)
    left = jnp.maximum(count(c, axes, x.dtype) - number(c.attr("correction"), x.dtype), 0)
    return (jnp.sum(off * off, axis=axes, keepdims=kept(c)) / left).astype(c.dtype)


def arg_reduction(f: Callable[..., Array], neutral: Callable[[np.dtype], Scalar]) -> Callable[[JaxCall], Array]:
    """argmax or argmin: the position in the flattened reduced dims."""

    def call(c: JaxCall) -> Array:
        dims, axes = c.given[0], axes_of(c)
        x = c.fill(0, axes, neutral(c.ins[0].dtype))
        x = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x
        rest = [a for a in range(len(dims)) if a not in axes]
        x = jnp.transpose(x, (*rest, *axes))
        if not axes:
            return jnp.zeros(c.extents, c.dtype)
        if len(axes) > 1:
            inner = [dims[a] for a in axes]
            flat = [*(dims[a] for a in rest), prod(inner[1:], start=inner[0])]
            x = c.sizes.reshape(x, [*(dims[a] for a in rest), *inner], flat)
            x = c.sizes.fill(x, flat, [len(rest)], neutral(x.dtype))
        return f(x, axis=-1).astype(c.dtype).reshape(c.extents)

    return call


rule("argmax")(arg_reduction(jnp.argmax, lowest))
rule("argmin")(arg_reduction(jnp.argmin, highest))


# ---------------------------------------------------------------- along a dim
def softmax(f: Callable[..., Array]) -> Callable[[JaxCall], Array]:
    def call(c: JaxCall) -> Array:
        if not c.dims:
            return f(c.ins[0].reshape(1), axis=0).reshape(())
        return f(c.wide(c.fill(0, [c.known("dim")], -jnp.inf)), axis=c.known("dim")).astype(c.dtype)

    return call


rule("softmax")(softmax(jax.nn.softmax))
rule("log_softmax")(softmax(jax.nn.log_softmax))


def cumulative(f: Callable[..., Array]) -> Callable[[JaxCall], Array]:
    """A cumulative op; padding is at the end and does not affect what is before it."""

    def call(c: JaxCall) -> Array:
        if not c.dims:
            return c.ins[0]
        x, axis = c.wide(c.ins[0]), c.known("dim")
        return lax.slice_in_dim(f(nonempty(x, [axis]), axis), 0, x.shape[axis], axis=axis).astype(c.dtype)

    return call


rule("cumsum")(cumulative(lambda x, axis: lax.cumsum(x, axis)))
rule("cumprod")(cumulative(lambda x, axis: lax.cumprod(x, axis)))


@rule("argsort")
def _argsort(c: JaxCall) -> Array:
    x, axis, down = c.ins[0], c.known("dim"), c.attr("descending", False)
    if not c.dims:
        return jnp.zeros((), c.dtype)
    x = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x
    positions = iota(x.shape, axis)
    keys = [positions >= c.size(0, axis)] if not c.sizes.exact(c.given[0][axis]) else []
    if down and floats(x.dtype):
        keys += [~jnp.isnan(x), -x]  # NaN is the largest
    else:
        keys += [~x if down else x]
    order = lax.sort([*keys, positions], dimension=axis, is_stable=True, num_keys=len(keys))[-1]
    return lax.slice_in_dim(order, 0, c.extents[axis], axis=axis).astype(c.dtype)


# ---------------------------------------------------------------- norms
def _last_axes(c: JaxCall) -> tuple[int, ...]:
    rank = len(c.given[0])
    return tuple(range(rank - c.known("axes"), rank))


@rule("layer_norm")
def _layer_norm(c: JaxCall) -> Array:
    x, axes = c.wide(c.ins[0]), _last_axes(c)
    x = x - mean(c, x, axes, True)
    x = x * lax.rsqrt(mean(c, x * x, axes, True) + number(c.attr("eps"), x.dtype))
    return scaled(c, x, x.ndim - len(axes))


@rule("rms_norm")
def _rms_norm(c: JaxCall) -> Array:
    x, axes = c.wide(c.ins[0]), _last_axes(c)
    x = x * lax.rsqrt(mean(c, x * x, axes, True) + number(c.attr("eps"), x.dtype))
    return scaled(c, x, x.ndim - len(axes))


def scaled(c: JaxCall, x: Array, axis: int) -> Array:
    """Times the second operand, plus the third, if present; their first dim is `axis` of x."""
    for i, f in ((1, jnp.multiply), (2, jnp.add)):
        if (w := c.operand(i)) is not None:
            x = f(x, c.wide(w).reshape(*w.shape, *[1] * (x.ndim - axis - w.ndim)))
    return x.astype(c.dtype)


@rule("group_norm")
def _group_norm(c: JaxCall) -> Array:
    dims, groups = c.given[0], c.dim("groups")
    grouped = (dims[0], groups, dims[1] // groups, *dims[2:])
    x = c.sizes.reshape(c.wide(c.ins[0]), dims, grouped)
    axes = tuple(range(2, len(grouped)))
    count_in_group = number(prod(c.sizes.number(grouped[a]) for a in axes), x.dtype)

    def over(y: Array) -> Array:
        return jnp.sum(c.sizes.fill(y, grouped, axes, 0), axis=axes, keepdims=True) / count_in_group

    x = x - over(x)
    x = x * lax.rsqrt(over(x * x) + number(c.attr("eps"), x.dtype))
    return scaled(c, c.sizes.reshape(x, grouped, dims), 1)


@rule("batch_norm")
def _batch_norm(c: JaxCall) -> Array:
    x = c.wide(c.ins[0])
    mean_of, var = (c.wide(c.ins[i]).reshape(-1, *[1] * (x.ndim - 2)) for i in (3, 4))
    return scaled(c, (x - mean_of) * lax.rsqrt(var + number(c.attr("eps"), x.dtype)), 1)
