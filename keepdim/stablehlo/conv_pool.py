"""Ops over images: convolutions, pools, resampling."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from .table import Array, Extent, JaxCall, Scalar, along, highest, iota, lowest, number, rule, take


def end_of(c: JaxCall, d: int, kernel: Extent, stride: int, low: int, dilation: int, size: Extent) -> Extent:
    """High padding of a spatial dim, so that the result has its expected extent."""
    return (c.extents[d + 2] - 1) * stride + dilation * (kernel - 1) + 1 - low - size


@rule("conv")
def _conv(c: JaxCall) -> Array:
    rank, transposed, groups = len(c.dims) - 2, c.attr("transposed"), c.known("groups")
    spatial = range(rank)
    stride, pad, dilation = (c.each(k) for k in ("stride", "padding", "dilation"))
    x = c.wide(c.fill(0, [1, *(d + 2 for d in spatial)], 0))
    w = c.wide(c.fill(1, range(rank + 2), 0))
    steps, spread, low = stride, [1] * rank, pad
    if transposed:  # a convolution of the dilated input with the flipped kernel
        parts = w.shape[0] // groups
        w = jnp.flip(w, [d + 2 for d in spatial]).reshape(groups, parts, *w.shape[1:])
        w = jnp.swapaxes(w, 1, 2).reshape(-1, parts, *w.shape[3:])
        steps, spread = [1] * rank, stride
        low = [dilation[d] * (_kernel(c, d) - 1) - pad[d] for d in spatial]
    sizes = [(x.shape[d + 2] - 1) * spread[d] + 1 for d in spatial]
    high = [end_of(c, d, w.shape[d + 2], steps[d], low[d], dilation[d], sizes[d]) for d in spatial]
    if not transposed and c.exact(0, 1):
        high = [h if c.dims[d + 2].value is not None else pad[d] for d, h in enumerate(high)]
    y = lax.conv_general_dilated(x, w, steps, list(zip(low, high, strict=True)), spread, dilation,
                                 feature_group_count=groups)  # fmt: skip
    if (bias := c.operand(2)) is not None:
        y = y + c.wide(bias).reshape(-1, *[1] * rank)
    return y.astype(c.dtype)


def _kernel(c: JaxCall, d: int) -> int:
    size = c.given[1][d + 2]
    return c._known("kernel", size)


# ---------------------------------------------------------------- pools
class Window:
    """The window of a pool over the last dims."""

    def __init__(self, c: JaxCall):
        self.c, self.kernel = c, c.each("kernel")
        self.stride, self.pad = c.each("stride"), c.each("padding")
        self.rank = len(self.kernel)
        self.dilation = c.each("dilation") if c.has("dilation") else [1] * self.rank
        self.axes = [len(c.dims) - self.rank + d for d in range(self.rank)]

    def padded(self, value: Scalar) -> Array:
        """The input padded with this value, as far as windows reach."""
        c, config = self.c, [(0, 0, 0)] * len(self.c.dims)
        x = c.wide(c.fill(0, self.axes, value))
        for d, a in enumerate(self.axes):
            end = (c.extents[a] - 1) * self.stride[d] + self.dilation[d] * (self.kernel[d] - 1) + 1
            config[a] = (self.pad[d], end - self.pad[d] - x.shape[a], 0)
        return lax.pad(x, jnp.asarray(value, x.dtype), config)

    def offsets(self) -> Iterator[tuple[int, ...]]:
        """Offsets of the elements of a window, in order."""
        return itertools.product(*(range(k) for k in self.kernel))

    def at(self, x: Array, offset: tuple[int, ...]) -> Array:
        """The element at this offset of every window."""
        for d, a in enumerate(self.axes):
            first = offset[d] * self.dilation[d]
            last = first + (self.c.extents[a] - 1) * self.stride[d] + 1
            x = lax.slice_in_dim(x, first, last, self.stride[d], a)
        return x


@rule("max_pool")
def _max_pool(c: JaxCall) -> Array:
    w = Window(c)
    x = w.padded(lowest(c.ins[0].dtype))
    return reduce(jnp.maximum, (w.at(x, offset) for offset in w.offsets())).astype(c.dtype)


@rule("max_pool_index")
def _max_pool_index(c: JaxCall) -> Array:
    """The first maximum; for a window outside the input, its first non-negative position."""
    w = Window(c)
    x = w.padded(lowest(c.ins[0].dtype))
    starts = [iota(c.extents, a) * s - p for a, s, p in zip(w.axes, w.stride, w.pad, strict=True)]

    def flat(positions: Sequence[Array]) -> Array:
        total: object = 0
        for a, at in zip(w.axes, positions, strict=True):
            total = total * c.size(0, a) + at
        return total

    found = flat([at - jnp.minimum(at, 0) // d * d for at, d in zip(starts, w.dilation, strict=True)])
    best, seen = jnp.full(c.extents, lowest(x.dtype), x.dtype), jnp.zeros(c.extents, bool)
    for offset in w.offsets():
        positions = [at + k * d for at, k, d in zip(starts, offset, w.dilation, strict=True)]
        inside = reduce(
            jnp.logical_and, [(at >= 0) & (at < c.size(0, a)) for a, at in zip(w.axes, positions, strict=True)]
        )
        one = w.at(x, offset)
        better = inside & (~seen | (one > best) | (jnp.isnan(one) & ~jnp.isnan(best)))
        best, found, seen = jnp.where(better, one, best), jnp.where(better, flat(positions), found), seen | inside
    return found.astype(c.dtype)


@rule("avg_pool")
def _avg_pool(c: JaxCall) -> Array:
    w = Window(c)
    x = w.padded(0)
    total = reduce(jnp.add, (w.at(x, offset) for offset in w.offsets()))
    count: Any = 1
    for d, a in enumerate(w.axes):
        n, first = c.size(0, a), iota(c.extents, a) * w.stride[d] - w.pad[d]
        last = jnp.minimum(first + w.kernel[d], n + w.pad[d])
        inside = jnp.minimum(last, n) - jnp.maximum(first, 0)
        count = count * (last - first if c.attr("count_include_pad") else inside)
    return (total / number(c.attr("divisor") if c.has("divisor") else count, x.dtype)).astype(c.dtype)


def adaptive(
    f: Callable[[Array, Array, int], Array], value: Callable[[np.dtype], Scalar]
) -> Callable[[JaxCall], Array]:
    """Windows that tile each of the last dims, one dim at a time, by masking the elements of each window."""

    def call(c: JaxCall) -> Array:
        x = c.wide(c.ins[0])
        for a in range(len(c.dims) - c.known("axes"), len(c.dims)):
            n, m = c.size(0, a), c.sizes.number(c.dims[a])
            at = (c.extents[a], x.shape[a])
            first, last = iota(at, 0) * n // m, -((-(iota(at, 0) + 1) * n) // m)
            inside = (iota(at, 1) >= first) & (iota(at, 1) < last)
            inside = jnp.expand_dims(inside, list(range(2, 2 + x.ndim - a - 1)))
            windows = jnp.where(inside, jnp.expand_dims(x, a), jnp.asarray(value(x.dtype), x.dtype))
            x = f(windows, jnp.expand_dims((last - first)[:, 0], list(range(1, x.ndim - a))), a + 1)
        return x.astype(c.dtype)

    return call


rule("adaptive_avg_pool")(adaptive(lambda x, n, axis: jnp.sum(x, axis) / n.astype(x.dtype), lambda _: 0))
rule("adaptive_max_pool")(adaptive(lambda x, n, axis: jnp.max(x, axis), lowest))


@rule("adaptive_max_pool_index")
def _adaptive_max_pool_index(c: JaxCall) -> Array:
    """The first maximum: values and positions are reduced together, one dim at a time from the last."""
    x = c.wide(c.ins[0])
    axes = list(range(len(c.dims) - c.known("axes"), len(c.dims)))
    position: Array = jnp.zeros((), jnp.int32)
    for a in axes:
        position = position * c.size(0, a) + iota(x.shape, a)
    for a in reversed(axes):
        n, m = c.size(0, a), c.sizes.number(c.dims[a])
        at = (c.extents[a], x.shape[a])
        inside = (iota(at, 1) >= iota(at, 0) * n // m) & (iota(at, 1) < -((-(iota(at, 0) + 1) * n) // m))
        inside = jnp.expand_dims(inside, list(range(2, 2 + x.ndim - a - 1)))
        windows = jnp.where(inside, jnp.expand_dims(x, a), lowest(x.dtype))
        positions = jnp.where(inside, jnp.expand_dims(position, a), highest(jnp.int32))
        top = jnp.max(windows, a + 1, keepdims=True)
        same = inside & ((windows == top) | (jnp.isnan(windows) & jnp.isnan(top)))
        position = jnp.min(jnp.where(same, positions, highest(jnp.int32)), a + 1)
        x = jnp.squeeze(top, a + 1)
    return position.astype(c.dtype)


# ---------------------------------------------------------------- resampling
def _scale(c: JaxCall, d: int) -> Array:
    """Input positions per result position."""
    if c.has(f"scale_{d}"):
        return jnp.float32(1 / c.attr(f"scale_{d}"))
    return number(c.size(0, d + 2), jnp.float32) / number(c.sizes.number(c.dims[d + 2]), jnp.float32)


@rule("nearest")
def _nearest(c: JaxCall) -> Array:
    x = c.ins[0]
    for d in range(len(c.dims) - 2):
        position = iota([c.extents[d + 2]], 0).astype(jnp.float32)
        position = (position + 0.5) * _scale(c, d) if c.attr("exact") else position * _scale(c, d)
        x = take(x, jnp.clip(jnp.floor(position).astype(jnp.int32), 0, c.size(0, d + 2) - 1), d + 2)
    return x


def _cubic(t: Array) -> list[Array]:
    """Weights of the four neighbours of a position at `t` between the middle two."""
    a = -0.75

    def near(s: Array) -> Array:
        return ((a + 2) * s - (a + 3)) * s * s + 1

    def far(s: Array) -> Array:
        return ((a * s - 5 * a) * s + 8 * a) * s - 4 * a

    return [far(t + 1), near(t), near(1 - t), far(2 - t)]


@rule("resample")
def _resample(c: JaxCall) -> Array:
    x, cubic = c.wide(c.ins[0]), c.attr("mode") == "cubic"
    for d in range(len(c.dims) - 2):
        a, n = d + 2, c.size(0, d + 2)
        position = iota([c.extents[a]], 0).astype(jnp.float32)
        if c.attr("align_corners"):
            count = number(jnp.maximum(c.sizes.number(c.dims[a]) - 1, 1), jnp.float32)
            position = position * jnp.where(c.sizes.number(c.dims[a]) > 1, number(n - 1, jnp.float32) / count, 0)
        else:
            position = (position + 0.5) * _scale(c, d) - 0.5
            position = position if cubic else jnp.maximum(position, 0)
        first = jnp.floor(position)
        t = (position - first).astype(x.dtype)
        first = first.astype(jnp.int32)
        weights = _cubic(t) if cubic else [1 - t, t]
        parts = [take(x, jnp.clip(first + k - cubic, 0, n - 1), a) * along(w, a, x.ndim) for k, w in enumerate(weights)]
        x = sum(parts[1:], parts[0])
    return x.astype(c.dtype)
