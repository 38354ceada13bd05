"""grid_sample, fold, pairwise distances and embedding_bag."""

from __future__ import annotations

import itertools
from typing import Any

import jax.numpy as jnp
from jax import lax

from ..shapes.dim import Dim
from .conv_pool import _cubic
from .gather_scatter import rows_of
from .table import Array, JaxCall, iota, nonempty, number, rule, take


def _reflected(position: Array, low: Array | float, high: Array | float) -> Array:
    """Reflect into the range between two ends, which are given doubled."""
    low, span = low / 2, (high - low) / 2
    off = jnp.abs(position - low)
    extra, flips = jnp.fmod(off, jnp.maximum(span, 1e-30)), jnp.floor(off / jnp.maximum(span, 1e-30))
    folded = jnp.where(flips % 2 == 0, extra + low, span - extra + low)
    return jnp.where(span == 0, 0.0, folded)


class Grid:
    """Positions of a sampling grid in an image of sizes n."""

    def __init__(self, c: JaxCall):
        self.c, self.rank = c, len(c.dims) - 2
        self.corners, self.padding = c.attr("align_corners"), c.attr("padding_mode")
        self.n = [c.size(0, d + 2) for d in range(self.rank)]

    def position(self, d: int, clipped: bool) -> Array:
        """The position in pixels along dim d; the grid's coordinates are in reverse order of dims."""
        at, n = self.c.wide(self.c.ins[1])[..., self.rank - 1 - d], number(self.n[d], jnp.float32)
        at = (at + 1) / 2 * (n - 1) if self.corners else ((at + 1) * n - 1) / 2
        return self.fold(at, d) if clipped else at

    def fold(self, at: Array, d: int) -> Array:
        n = number(self.n[d], at.dtype)
        if self.padding == "reflection":
            at = _reflected(at, 0, 2 * (n - 1)) if self.corners else _reflected(at, -1, 2 * n - 1)
        return at if self.padding == "zeros" else jnp.where(at > 0, jnp.minimum(at, n - 1), 0)  # NaN becomes 0

    def read(self, index: list[Array]) -> Array:
        """The pixels at these positions, [batch, channel, ...], 0 outside."""
        inside, at = jnp.ones((), bool), []
        for d, i in enumerate(index):
            inside = inside & (i >= 0) & (i <= self.n[d] - 1)
            at.append(jnp.clip(i, 0, self.n[d] - 1).astype(jnp.int32))
        x = jnp.moveaxis(self.c.wide(self.c.ins[0]), 1, -1)
        batch = iota(at[0].shape, 0)
        found = nonempty(x, range(x.ndim - 1)).at[(batch, *at)].get(mode="clip")
        return jnp.moveaxis(jnp.where(inside[..., None], found, 0), -1, 1)


@rule("grid_sample")
def _grid_sample(c: JaxCall) -> Array:
    g, mode = Grid(c), c.attr("mode")
    positions = [g.position(d, clipped=mode != "bicubic") for d in range(g.rank)]
    if mode == "nearest":
        return g.read([jnp.round(p) for p in positions]).astype(c.dtype)
    first = [jnp.floor(p) for p in positions]
    parts = [p - f for p, f in zip(positions, first, strict=True)]
    weights = [_cubic(t) if mode == "bicubic" else [1 - t, t] for t in parts]
    start = 1 if mode == "bicubic" else 0
    total: Any = 0
    for offset in itertools.product(*(range(len(w)) for w in weights)):
        at = [f + k - start for f, k in zip(first, offset, strict=True)]
        at = [g.fold(i, d) for d, i in enumerate(at)] if mode == "bicubic" else at
        share = weights[0][offset[0]]
        for d in range(1, g.rank):
            share = share * weights[d][offset[d]]
        total = total + g.read(at) * share[:, None]
    return total.astype(c.dtype)


@rule("fold")
def _fold(c: JaxCall) -> Array:
    kernel, stride, pad, dilation = (c.each(k) for k in ("kernel", "stride", "padding", "dilation"))
    batched = len(c.given[0]) == 3
    x = c.fill(0, [-1], 0)
    x = x if batched else x[None]
    out = c.dims if batched else (Dim.const(1), *c.dims)
    counts = [
        (out[2 + d] + (2 * pad[d] - dilation[d] * (kernel[d] - 1) - 1)) // Dim.const(stride[d]) + 1 for d in (0, 1)
    ]
    have = (Dim.const(1) if not batched else c.given[0][0], c.given[0][-2], c.given[0][-1])
    patches = (have[0], have[1] // (kernel[0] * kernel[1]), Dim.const(kernel[0]), Dim.const(kernel[1]), *counts)
    x = c.sizes.fill(c.sizes.reshape(x, have, patches), patches, (4, 5), 0)
    sizes = [c.sizes.extent(out[2 + d]) for d in (0, 1)]
    total: Any = 0
    for i, j in itertools.product(range(kernel[0]), range(kernel[1])):
        config = [(0, 0, 0), (0, 0, 0)]
        for d, k in enumerate((i, j)):
            low = k * dilation[d] - pad[d]
            wide = (x.shape[4 + d] - 1) * stride[d] + 1
            config.append((low, sizes[d] - low - wide, stride[d] - 1))
        total = total + lax.pad(x[:, :, i, j], jnp.zeros((), x.dtype), config)
    return total if batched else total[0]


# ---------------------------------------------------------------- distances
def _distance(off: Array, p: float, axis: int) -> Array:
    off = jnp.abs(off)
    if p == 0:
        return jnp.sum((off != 0).astype(off.dtype), axis)
    if p == float("inf"):
        return jnp.max(off, axis, initial=0)
    if p == 1:
        return jnp.sum(off, axis)
    return jnp.sqrt(jnp.sum(off * off, axis)) if p == 2 else jnp.sum(off**p, axis) ** (1 / p)


@rule("cdist")
def _cdist(c: JaxCall) -> Array:
    x, y = c.fill(0, [-1], 0), c.fill(1, [-1], 0)
    return _distance(x[..., :, None, :] - y[..., None, :, :], c.attr("p"), -1)


@rule("pdist")
def _pdist(c: JaxCall) -> Array:
    """Pairs of rows i < j in order: pair k of row i is k - (pairs of the rows before it)."""
    x, n = c.fill(0, [-1], 0), c.size(0, 0)
    k, i = iota(c.extents, 0), jnp.zeros(c.extents, jnp.int32)
    before = lambda r: r * n - r * (r + 1) // 2  # noqa: E731
    rows = jnp.arange(x.shape[0], dtype=jnp.int32)
    i = jnp.sum((before(rows + 1)[None, :] <= k[:, None]) & (rows[None, :] < n), -1).astype(jnp.int32)
    j = k - before(i) + i + 1
    return _distance(rows_of(x, i, n) - rows_of(x, j, n), c.attr("p"), -1)


# ---------------------------------------------------------------- bags
@rule("embedding_bag")
def _embedding_bag(c: JaxCall) -> Array:
    table, index, offsets, weights = (c.operand(i) for i in range(4))
    count, position = c.size(1, 0), iota([index.shape[0]], 0)
    bags = c.extents[0]
    first = offsets[:bags]
    end = jnp.concatenate([offsets[1:], offsets[:1]])[:bags]
    last_bag = c.sizes.number(c.dims[0]) - 1
    if not c.attr("include_last_offset"):
        end = jnp.where(iota([bags], 0) >= last_bag, count, end)
    inside = (position[None] >= first[:, None]) & (position[None] < end[:, None]) & (position[None] < count)
    if c.has("padding_idx"):
        inside = inside & (index != c.attr("padding_idx"))[None]
    rows = rows_of(table, index, c.size(0, 0))
    rows = rows if weights is None else rows * weights[:, None]
    wide = inside[:, :, None]
    if c.attr("mode") == "max":
        top = jnp.max(jnp.where(wide & ~jnp.isnan(rows)[None], rows[None], -jnp.inf), 1)
        first_row = take(rows, jnp.argmax(inside, 1), 0)
        top = jnp.where(jnp.isnan(first_row), first_row, top)  # as in torch: only a NaN in the first row is kept
        return jnp.where(inside.any(1)[:, None], top, 0).astype(c.dtype)
    total = jnp.sum(jnp.where(wide, c.wide(rows)[None], 0), 1)
    trailing = jnp.where(
        (iota([bags], 0) == last_bag) & (end > first), count - end, 0
    )  # torch counts them in the last bag
    members = jnp.maximum(inside.sum(1) + trailing, 1)[:, None].astype(total.dtype)
    return (total / members if c.attr("mode") == "mean" else total).astype(c.dtype)
