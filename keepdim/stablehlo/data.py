"""Ops whose result has a size that data decides.

Each is two nodes of a Program: the count, which is that size from there on, and the elements, in an array with room for
all there can be. Engines know neither; here both have rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import torch
from jax import lax

from ..frontend.ops import ROWS as OPS
from ..frontend.ops import Args, Sink, Unsupported
from ..frontend.ops import Row as OpRow
from ..ir.program import NONE, Shape
from ..shapes.dim import Dim
from .table import Array, Call, highest, iota, nonempty, product, row, take

aten = torch.ops.aten
ROWS_OF_DATA: dict[Any, OpRow | None] = dict(OPS)  # with those of the engines
# What a model asserts of its data is not checked in StableHLO.
ROWS_OF_DATA |= {t: None for t in (aten._assert_scalar.default, aten.sym_constrain_range_for_size.default,
                                   aten.sym_constrain_range.default)}  # fmt: skip


def op(name: str, *targets: Any) -> Callable[[Any], Any]:
    """Register how an overload becomes nodes, in front of the engines' way."""

    def register(lower: Any) -> Any:
        ROWS_OF_DATA.update({t: OpRow(name, t, lower) for t in targets})
        return lower

    return register


def counted(b: Sink, name: str, ins: list[int], size: Dim, **attrs: Any) -> None:
    """The node that counts; what it finds is this size."""
    if size.sym is None:
        raise Unsupported(f"a size {size} that data decides is no symbol")
    b.emit(name, ins, Shape("i64", ()), symbol=size.sym.name, **attrs)


def truth(b: Sink, value: int) -> int:
    shape = b.shape(value)
    return value if shape.dtype == "bool" else b.emit("ne", [value], Shape("bool", shape.dims), other=Dim.const(0))


def places(b: Sink, mask: int, size: Dim) -> int:
    """The positions [size, rank] where a mask is true."""
    counted(b, "count", [mask], size)
    return b.emit("nonzero", [mask], Shape("i64", (size, Dim.const(len(b.shape(mask).dims)))))


@op("nonzero", aten.nonzero.default, aten.argwhere.default)
def _nonzero(b: Sink, name: str, a: Args, out: Shape) -> int:
    return places(b, truth(b, a.tensor("self")), out.dims[0])


def columns(b: Sink, found: int) -> list[int]:
    size, rank = b.shape(found).dims
    each = range(rank.value or 0)
    return [b.emit("select", [found], Shape("i64", (size,)), dim=Dim.const(1), index=Dim.const(k)) for k in each]


@op("nonzero", aten.nonzero_numpy.default)
def _nonzero_numpy(b: Sink, name: str, a: Args, out: list[Shape]) -> list[int | None]:
    return [*columns(b, places(b, truth(b, a.tensor("self")), out[0].dims[0]))]


@op("index", aten.masked_select.default)
def _masked_select(b: Sink, name: str, a: Args, out: Shape) -> int:
    x, mask = a.tensor("self"), a.tensor("mask")
    if b.shape(x).dims != b.shape(mask).dims:
        wide = max(b.shape(x).dims, b.shape(mask).dims, key=len)
        x, mask = (b.emit("expand", [v], Shape(b.shape(v).dtype, wide)) for v in (x, mask))
    dims = tuple(map(Dim.const, range(len(b.shape(x).dims))))
    return b.emit(name, [x, *columns(b, places(b, mask, out.dims[0]))], out, dims=dims)


@op("index", aten.index.Tensor)
def _index(b: Sink, name: str, a: Args, out: Shape) -> int:
    """As in engines; a mask is the positions where it is true, in each of its dims."""
    given = a.tensors("indices")
    masks = [i for i in given if i is not None and b.shape(i).dtype in ("bool", "u8")]
    if not masks:
        return OPS[aten.index.Tensor].lower(b, name, a, out)  # type: ignore[return-value]
    if len(masks) > 1:
        raise Unsupported("two masks at once are not handled")
    known = b.shape(a.tensor("self")).dims
    size = next(d for d in out.dims if d not in known and d.sym is not None)
    ins, dims, axis = [], [], 0
    for i in given:
        many = len(b.shape(i).dims) if i is not None and i in masks else 1
        found = [] if i is None else columns(b, places(b, truth(b, i), size)) if i in masks else [i]
        ins += found
        dims += [Dim.const(axis + k) for k in range(len(found))]
        axis += many
    return b.emit(name, [a.tensor("self"), *ins], out, dims=tuple(dims))


@op("unique", aten._unique2.default, aten.unique_consecutive.default)
def _unique(b: Sink, name: str, a: Args, out: list[Shape]) -> list[int | None]:
    """The values, where each element is among them, and how often each stands there."""
    x = a.tensor("self")
    sorting = "sorted" in a.names
    a.ignore("sorted", "return_inverse", "return_counts")  # they are sorted, and what nobody reads is not computed
    dims = b.shape(x).dims
    if a.has("dim") and len(dims) != 1:
        raise Unsupported("unique along a dim is not handled")
    a.ignore("dim")
    flat = b.emit("reshape", [x], Shape(out[0].dtype, (product(dims),))) if len(dims) != 1 else x
    own = {"ordered": sorting}
    counted(b, "unique_count", [flat], out[0].dims[0], **own)
    values = b.emit(name, [flat], out[0], **own)
    inverse = b.emit("unique_inverse", [flat], out[1], **own) if out[1].dims == dims else None
    counts = b.emit("unique_counts", [flat], out[2], **own) if out[2].dims == out[0].dims else None
    return [values, inverse, counts]


@op("item", aten.item.default, aten._local_scalar_dense.default)
def _item(b: Sink, name: str, a: Args, out: Shape) -> int:
    if (x := a.tensor("self")) == NONE or b.shape(x).dtype in ("f16", "bf16", "f32", "f64"):
        raise Unsupported("a float read on the host is not handled")
    whole = b.emit("cast", [x], Shape("i64", b.shape(x).dims)) if b.shape(x).dtype != "i64" else x
    counted(b, name, [whole], out.dims[0])
    return whole


# ---------------------------------------------------------------- in jax
@row("item")
def _item_row(c: Call) -> Array:
    return c.ins[0].reshape(()).astype(c.dtype)


@row("count")
def _count_row(c: Call) -> Array:
    return jnp.sum(c.fill(0, range(len(c.given[0])), False), dtype=c.dtype)


def gathered(mask: Array, room: Any) -> Array:
    """Positions where a flat mask is true, in order, in front; as many as there is room for."""
    order = lax.sort([~mask, iota(mask.shape, 0)], is_stable=True, num_keys=1)[1]
    return lax.slice_in_dim(order, 0, room, axis=0)


@row("nonzero")
def _nonzero_row(c: Call) -> Array:
    dims = c.given[0]
    mask = c.fill(0, range(len(dims)), False)
    if not dims:
        return jnp.zeros(c.extents, c.dtype)
    flat = gathered(mask.reshape(-1), c.extents[0])  # rooms stand in order too, and none of them is true
    out = []
    for n in reversed(mask.shape):
        out.append(flat % n)
        flat = flat // n
    return jnp.stack(out[::-1], -1).astype(c.dtype)


class Runs:
    """A list put in order (or left as it is), and where a new value begins."""

    def __init__(self, c: Call):
        self.c, x, places = c, c.ins[0], iota(c.ins[0].shape, 0)
        self.here = places < c.size(0, 0)
        beyond = [~self.here]
        if c.attr("ordered"):
            key = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x
            *_, self.order = lax.sort([*beyond, key, places], is_stable=True, num_keys=2)
            self.x = take(x, self.order, 0)
        else:
            self.x, self.order = x, places
        before = take(self.x, places - 1, 0)
        self.first = self.here & ((places == 0) | (self.x != before))
        first = nonempty(self.first.astype(jnp.int32), [0])
        self.number = lax.slice_in_dim(jnp.cumsum(first), 0, x.shape[0]) - 1  # of the run that an element belongs to


@row("unique_count")
def _unique_count(c: Call) -> Array:
    return jnp.sum(Runs(c).first, dtype=c.dtype)


@row("unique")
def _unique_row(c: Call) -> Array:
    runs = Runs(c)
    return take(runs.x, gathered(runs.first, c.extents[0]), 0)


@row("unique_inverse")
def _unique_inverse(c: Call) -> Array:
    runs = Runs(c)
    flat = jnp.zeros(runs.x.shape, c.dtype).at[runs.order].set(runs.number.astype(c.dtype))
    return c.sizes.reshape(flat, c.given[0], c.dims)


@row("unique_counts")
def _unique_counts(c: Call) -> Array:
    runs = Runs(c)
    run = jnp.where(runs.here, runs.number, highest(jnp.int32))
    return jnp.zeros(c.extents, c.dtype).at[run].add(1, mode="drop")
