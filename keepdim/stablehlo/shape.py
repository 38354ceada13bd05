"""Shape ops and ops that create tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from ..shapes.dim import Dim
from .table import Array, JaxCall, along, iota, nonempty, number, product, rule, take


@rule("reshape")
def _reshape(c: JaxCall) -> Array:
    return c.sizes.reshape(c.ins[0], c.given[0], c.dims)


@rule("permute")
def _permute(c: JaxCall) -> Array:
    return jnp.transpose(c.ins[0], c.each("dims"))


@rule("expand")
def _expand(c: JaxCall) -> Array:
    return jnp.broadcast_to(c.spread(0), c.extents)


@rule("full")
def _full(c: JaxCall) -> Array:
    return jnp.full(c.extents, number(c.attr("value"), c.dtype), c.dtype)


@rule("arange")
def _arange(c: JaxCall) -> Array:
    wide = jnp.float64 if jnp.issubdtype(c.dtype, jnp.floating) else jnp.int64
    position = iota(c.extents, 0).astype(wide)  # 32 bits without x64
    return (position * number(c.attr("step"), position.dtype) + number(c.attr("start"), position.dtype)).astype(c.dtype)


# ---------------------------------------------------------------- pieces
@rule("cat")
def _cat(c: JaxCall) -> Array:
    axis, every = c.known("dim"), range(len(c.ins))
    if c.exact(*every):
        return lax.concatenate(c.ins, axis)
    position, first = iota([c.extents[axis]], 0), 0
    out = None
    for i in every:
        piece = take(c.ins[i], position - first, axis)
        out = piece if out is None else jnp.where(along(position >= first, axis, piece.ndim), piece, out)
        first = first + c.size(i, axis)
    return out


@rule("slice")
def _slice(c: JaxCall) -> Array:
    axis, start, step = c.known("dim"), c.dim("start"), c.dim("step")
    x, n = c.ins[0], c.extents[axis]
    if c.exact(0) and step.value is not None:
        first = c.sizes.extent(start)
        with contextlib.suppress(jax.errors.InconclusiveDimensionOperation):  # a result that may be empty
            return lax.slice_in_dim(x, first, first + n * step.value - (step.value - 1), step.value, axis)
    return take(x, iota([n], 0) * c.attr("step") + c.attr("start"), axis)


@rule("select")
def _select(c: JaxCall) -> Array:
    return lax.dynamic_index_in_dim(c.ins[0], c.attr("index"), c.known("dim"), keepdims=False)


@rule("slice_scatter")
def _slice_scatter(c: JaxCall) -> Array:
    axis, step, src = c.known("dim"), c.attr("step"), c.ins[1]
    off = iota([c.extents[axis]], 0) - c.attr("start")
    index = off // step
    hit = (off >= 0) & (off % step == 0) & (index < c.size(1, axis))
    if src.shape[axis] == 0:
        return c.ins[0]
    return jnp.where(along(hit, axis, src.ndim), take(src, index, axis), c.ins[0])


@rule("flip")
def _flip(c: JaxCall) -> Array:
    x = c.ins[0]
    for a in c.each("dims"):
        exact = c.sizes.exact(c.dims[a])
        x = lax.rev(x, [a]) if exact else take(x, c.size(0, a) - 1 - iota([x.shape[a]], 0), a)
    return x


def triangle(lower: bool) -> Callable[[JaxCall], Array]:
    def call(c: JaxCall) -> Array:
        x = c.ins[0]
        off = iota(x.shape, x.ndim - 1) - iota(x.shape, x.ndim - 2) - c.attr("diagonal")
        return jnp.where(off <= 0 if lower else off >= 0, x, jnp.zeros((), x.dtype))

    return call


rule("tril")(triangle(lower=True))
rule("triu")(triangle(lower=False))


@rule("diagonal")
def _diagonal(c: JaxCall) -> Array:
    first, second = c.each("dims")
    rest = [a for a in range(len(c.given[0])) if a not in (first, second)]
    x = jnp.transpose(c.ins[0], (*rest, first, second))
    position, offset = iota([c.extents[-1]], 0), c.attr("offset")
    rows, columns = position + jnp.maximum(-offset, 0), position + jnp.maximum(offset, 0)
    return nonempty(x, (x.ndim - 2, x.ndim - 1)).at[..., rows, columns].get(mode="clip")


@rule("unfold")
def _unfold(c: JaxCall) -> Array:
    axis, x = c.known("dim"), c.ins[0]
    count, width = c.extents[axis], c.extents[-1]
    position = iota([count, width], 0) * c.attr("step") + iota([count, width], 1)
    return jnp.moveaxis(take(x, position, axis), axis + 1, -1)


@rule("as_strided")
def _as_strided(c: JaxCall) -> Array:
    dims = c.given[0]
    flat = c.sizes.reshape(c.ins[0], dims, (product(dims),))
    position = jnp.full(c.extents, c.attr("offset"), jnp.int32)
    for a, step in enumerate(c.node.attrs["strides"]):
        position = position + iota(c.extents, a) * c.sizes.number(Dim.of(step))
    return take(flat, position, 0)


# ---------------------------------------------------------------- padding
@rule("pad")
def _pad(c: JaxCall) -> Array:
    x, mode, before = c.ins[0], c.attr("mode"), c.node.attrs["before"]
    first = len(c.dims) - len(before)
    if mode == "constant" and c.exact(0) and all(b.value is not None for b in before):
        lows = [0] * first + [b.value for b in before]
        ends = [n - m - low for n, m, low in zip(c.extents, x.shape, lows, strict=True)]
        value = jnp.asarray(number(c.attr("value"), x.dtype))
        return lax.pad(x, value, [(low, high, 0) for low, high in zip(lows, ends, strict=True)])
    for a, b in enumerate(before, first):
        n, position = c.size(0, a), iota([c.extents[a]], 0) - c.sizes.number(b)
        if mode == "constant":
            inside = along((position >= 0) & (position < n), a, x.ndim)
            x = jnp.where(inside, take(x, position, a), number(c.attr("value"), x.dtype))
            continue
        if mode == "reflect":
            position = jnp.abs(position)
            position = jnp.where(position >= n, 2 * (n - 1) - position, position)
        elif mode == "circular":
            position = position % n
        x = take(x, jnp.clip(position, 0, n - 1), a)
    return x
