"""Ops that read or write at data-dependent positions. A position out of range reads NaN (for integers, the minimum) and
writes nothing: XLA cannot raise errors on data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..shapes.dim import Dim
from .table import Array, Extent, JaxCall, Scalar, highest, iota, lowest, nonempty, rule, take


def rows_of(x: Array, index: Array, size: Extent, axis: int = 0) -> Array:
    """x at positions of an axis of this size."""
    found = take(x, index, axis)
    outside = ((index < 0) | (index >= size)).reshape(*[1] * axis, *index.shape, *[1] * (x.ndim - axis - 1))
    return jnp.where(outside, _out_of_range_value(x.dtype), found)


def _out_of_range_value(dtype: np.dtype) -> Scalar:
    return np.asarray(np.nan if jnp.issubdtype(dtype, jnp.floating) else lowest(dtype), dtype)


@rule("embedding")
def _embedding(c: JaxCall) -> Array:
    return rows_of(c.ins[0], c.ins[1], c.size(0, 0)).astype(c.dtype)


@rule("index_select")
def _index_select(c: JaxCall) -> Array:
    axis = c.known("dim")
    return rows_of(c.ins[0], c.ins[1], c.size(0, axis), axis)


# ---------------------------------------------------------------- along a dim
def _grid(c: JaxCall, written: bool) -> tuple[Array, ...]:
    """Positions of every element of the index (second operand); out of range in its padding."""
    index, dims, axis = c.ins[1], c.given[1], c.known("dim")
    if written:
        beyond = highest(index.dtype)
        index = c.sizes.fill(index, dims, range(len(dims)), beyond)
        index = jnp.where((index < 0) | (index >= c.size(0, axis)), beyond, index)
    return tuple(index if a == axis else iota(index.shape, a) for a in range(index.ndim))


@rule("gather")
def _gather(c: JaxCall) -> Array:
    x, n = c.ins[0], c.size(0, c.known("dim"))
    if x.ndim != c.ins[1].ndim:  # only an empty index may have another rank
        return jnp.zeros(c.ins[1].shape, x.dtype)
    found = nonempty(x, range(x.ndim)).at[_grid(c, written=False)].get(mode="clip")
    return jnp.where((c.ins[1] < 0) | (c.ins[1] >= n), _out_of_range_value(x.dtype), found)


def _source(c: JaxCall) -> Array:
    """The part of the third operand that the index covers."""
    src = c.ins[2]
    return src[tuple(slice(0, n) for n in c.ins[1].shape)] if src.shape != c.ins[1].shape else src


@rule("scatter")
def _scatter(c: JaxCall) -> Array:
    return c.ins[0].at[_grid(c, written=True)].set(_source(c), mode="drop")


@rule("scatter_reduce")
def _scatter_reduce(c: JaxCall) -> Array:
    at = c.ins[0].at[_grid(c, written=True)]
    update = {"sum": at.add, "prod": at.multiply, "amax": at.max, "amin": at.min}[c.attr("reduce")]
    return update(_source(c), mode="drop")


# ---------------------------------------------------------------- by several indices
def broadcast(shapes: Sequence[Sequence[Dim]]) -> tuple[Dim, ...]:
    """The broadcast dims of several operands."""
    rank = max(map(len, shapes))
    wide = [(Dim.const(1),) * (rank - len(s)) + tuple(s) for s in shapes]
    return tuple(next((d for d in each if d.value != 1), Dim.const(1)) for each in zip(*wide, strict=True))


def _positions(c: JaxCall, first: int) -> tuple[tuple[object, ...], tuple[Dim, ...]]:
    """Indices for jax and their broadcast dims; out of range in their padding."""
    every = range(first, len(c.ins))
    together = broadcast([c.given[i] for i in every])
    at: list[object] = [slice(None)] * c.ins[0].ndim
    for i, axis in zip(every, c.each("dims"), strict=True):
        n, index = c.size(0, axis), c.spread(i, together)
        index = jnp.where(index < 0, index + n, index)
        index = jnp.where((index < 0) | (index >= n), highest(index.dtype), index)
        index = jnp.broadcast_to(index, [c.sizes.extent(d) for d in together])
        at[axis] = c.sizes.fill(index, together, range(len(together)), highest(index.dtype))
    return tuple(at), together


@rule("index")
def _index(c: JaxCall) -> Array:
    x = nonempty(c.ins[0], c.each("dims"))
    return x.at[_positions(c, 1)[0]].get(mode="fill", fill_value=_out_of_range_value(x.dtype))


@rule("index_put")
def _index_put(c: JaxCall) -> Array:
    at, values = _written(c)
    return at.set(values, mode="drop")


@rule("index_add")
def _index_add(c: JaxCall) -> Array:
    at, values = _written(c)
    return (at.max if c.dtype == jnp.bool_ else at.add)(values, mode="drop")


def _written(c: JaxCall) -> tuple[Any, Array]:
    """The indexed array to update, and the broadcast values."""
    at, together = _positions(c, 2)
    axes, dims = c.each("dims"), c.given[0]
    rest = [d for a, d in enumerate(dims) if a not in axes]
    adjacent = axes == list(range(axes[0], axes[0] + len(axes)))
    first = axes[0] if adjacent else 0
    want = (*rest[:first], *together, *rest[first:])
    return c.ins[0].at[at], c.spread(1, want)
