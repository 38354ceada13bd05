"""Ops with data-dependent result sizes.

Each becomes two nodes of a Program: the count, which defines that size, and the elements, in an array of the maximum
size. Only StableHLO has lowering rules for them, not the engines.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax.numpy as jnp
import torch
from jax import lax
from torch._ops import OpOverload

from ..frontend.ops import RULES as TORCH_RULES
from ..frontend.ops import Args, Rule, Sink, Unsupported
from ..frontend.ops.table import Lower
from ..ir.program import NONE, Attr, Shape
from ..shapes.dim import Dim
from .table import Array, Extent, JaxCall, highest, iota, nonempty, product, rule, take

L = TypeVar("L", bound=Lower)
aten = torch.ops.aten
RULES_WITH_DATA: dict[object, Rule | None] = dict(TORCH_RULES)  # including those of the engines
# A model's asserts over its data are not checked in StableHLO.
RULES_WITH_DATA |= {t: None for t in (aten._assert_scalar.default, aten.sym_constrain_range_for_size.default,
                                   aten.sym_constrain_range.default)}  # fmt: skip


def op(name: str, *targets: OpOverload) -> Callable[[L], L]:
    """Register the lowering of an overload to nodes; it takes precedence over the engines'."""

    def register(lower: L) -> L:
        RULES_WITH_DATA.update({t: Rule(name, t, lower) for t in targets})
        return lower

    return register


def emit_count(b: Sink, name: str, ins: list[int], size: Dim, **attrs: Attr) -> None:
    """Emit the node that computes a count and defines this size."""
    if size.sym is None:
        raise Unsupported(f"a data-dependent size {size} is not a symbol")
    b.emit(name, ins, Shape("i64", ()), symbol=size.sym.name, **attrs)


def as_bool(b: Sink, value: int) -> int:
    shape = b.shape(value)
    return value if shape.dtype == "bool" else b.emit("ne", [value], Shape("bool", shape.dims), other=Dim.const(0))


def emit_nonzero(b: Sink, mask: int, size: Dim) -> int:
    """Emit the positions [size, rank] where a mask is true."""
    emit_count(b, "count", [mask], size)
    return b.emit("nonzero", [mask], Shape("i64", (size, Dim.const(len(b.shape(mask).dims)))))


@op("nonzero", aten.nonzero.default, aten.argwhere.default)
def _nonzero(b: Sink, name: str, a: Args, out: Shape) -> int:
    return emit_nonzero(b, as_bool(b, a.tensor("self")), out.dims[0])


def columns(b: Sink, found: int) -> list[int]:
    size, rank = b.shape(found).dims
    each = range(rank.value or 0)
    return [b.emit("select", [found], Shape("i64", (size,)), dim=Dim.const(1), index=Dim.const(k)) for k in each]


@op("nonzero", aten.nonzero_numpy.default)
def _nonzero_numpy(b: Sink, name: str, a: Args, out: list[Shape]) -> list[int | None]:
    return [*columns(b, emit_nonzero(b, as_bool(b, a.tensor("self")), out[0].dims[0]))]


@op("index", aten.masked_select.default)
def _masked_select(b: Sink, name: str, a: Args, out: Shape) -> int:
    x, mask = a.tensor("self"), a.tensor("mask")
    if b.shape(x).dims != b.shape(mask).dims:
        wide = max(b.shape(x).dims, b.shape(mask).dims, key=len)
        x, mask = (b.emit("expand", [v], Shape(b.shape(v).dtype, wide)) for v in (x, mask))
    dims = tuple(map(Dim.const, range(len(b.shape(x).dims))))
    return b.emit(name, [x, *columns(b, emit_nonzero(b, mask, out.dims[0]))], out, dims=dims)


@op("index", aten.index.Tensor)
def _index(b: Sink, name: str, a: Args, out: Shape) -> int:
    """As for the engines; a mask becomes the positions where it is true, one index per dim."""
    given = a.tensors("indices")
    masks = [i for i in given if i is not None and b.shape(i).dtype in ("bool", "u8")]
    if not masks:
        return TORCH_RULES[aten.index.Tensor].lower(b, name, a, out)  # type: ignore[return-value]
    if len(masks) > 1:
        raise Unsupported("two masks at once are not handled")
    known = b.shape(a.tensor("self")).dims
    size = next(d for d in out.dims if d not in known and d.sym is not None)
    ins, dims, axis = [], [], 0
    for i in given:
        many = len(b.shape(i).dims) if i is not None and i in masks else 1
        found = [] if i is None else columns(b, emit_nonzero(b, as_bool(b, i), size)) if i in masks else [i]
        ins += found
        dims += [Dim.const(axis + k) for k in range(len(found))]
        axis += many
    return b.emit(name, [a.tensor("self"), *ins], out, dims=tuple(dims))


@op("unique", aten._unique2.default, aten.unique_consecutive.default)
def _unique(b: Sink, name: str, a: Args, out: list[Shape]) -> list[int | None]:
    """The unique values, the inverse, and the counts."""
    x = a.tensor("self")
    sorting = "sorted" in a.names
    a.ignore("sorted", "return_inverse", "return_counts")  # always sorted; unused results are not computed
    dims = b.shape(x).dims
    if a.has("dim") and len(dims) != 1:
        raise Unsupported("unique along a dim is not handled")
    a.ignore("dim")
    flat = b.emit("reshape", [x], Shape(out[0].dtype, (product(dims),))) if len(dims) != 1 else x
    own = {"ordered": sorting}
    emit_count(b, "unique_count", [flat], out[0].dims[0], **own)
    values = b.emit(name, [flat], out[0], **own)
    inverse = b.emit("unique_inverse", [flat], out[1], **own) if out[1].dims == dims else None
    counts = b.emit("unique_counts", [flat], out[2], **own) if out[2].dims == out[0].dims else None
    return [values, inverse, counts]


@op("item", aten.item.default, aten._local_scalar_dense.default)
def _item(b: Sink, name: str, a: Args, out: Shape) -> int:
    if (x := a.tensor("self")) == NONE or b.shape(x).dtype in ("f16", "bf16", "f32", "f64"):
        raise Unsupported("a float read on the host is not handled")
    whole = b.emit("cast", [x], Shape("i64", b.shape(x).dims)) if b.shape(x).dtype != "i64" else x
    emit_count(b, name, [whole], out.dims[0])
    return whole


# ---------------------------------------------------------------- lowering rules
@rule("item")
def _item_rule(c: JaxCall) -> Array:
    return c.ins[0].reshape(()).astype(c.dtype)


@rule("count")
def _count_rule(c: JaxCall) -> Array:
    return jnp.sum(c.fill(0, range(len(c.given[0])), False), dtype=c.dtype)


def true_positions(mask: Array, size: Extent) -> Array:
    """Positions where a flat mask is true, in order, followed by the others; the first `size` of them."""
    order = lax.sort([~mask, iota(mask.shape, 0)], is_stable=True, num_keys=1)[1]
    return lax.slice_in_dim(order, 0, size, axis=0)


@rule("nonzero")
def _nonzero_rule(c: JaxCall) -> Array:
    dims = c.given[0]
    mask = c.fill(0, range(len(dims)), False)
    if not dims:
        return jnp.zeros(c.extents, c.dtype)
    flat = true_positions(mask.reshape(-1), c.extents[0])  # padding keeps the order, and is false in the mask
    out = []
    for n in reversed(mask.shape):
        out.append(flat % n)
        flat = flat // n
    return jnp.stack(out[::-1], -1).astype(c.dtype)


class Runs:
    """A list, sorted or as it is, and where runs of equal values begin."""

    def __init__(self, c: JaxCall):
        self.c, x, positions = c, c.ins[0], iota(c.ins[0].shape, 0)
        self.here = positions < c.size(0, 0)
        beyond = [~self.here]
        if c.attr("ordered"):
            key = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x
            *_, self.order = lax.sort([*beyond, key, positions], is_stable=True, num_keys=2)
            self.x = take(x, self.order, 0)
        else:
            self.x, self.order = x, positions
        before = take(self.x, positions - 1, 0)
        self.first = self.here & ((positions == 0) | (self.x != before))
        first = nonempty(self.first.astype(jnp.int32), [0])
        self.number = (
            lax.slice_in_dim(jnp.cumsum(first), 0, x.shape[0]) - 1
        )  # index of the run that an element belongs to


@rule("unique_count")
def _unique_count(c: JaxCall) -> Array:
    return jnp.sum(Runs(c).first, dtype=c.dtype)


@rule("unique")
def _unique_rule(c: JaxCall) -> Array:
    runs = Runs(c)
    return take(runs.x, true_positions(runs.first, c.extents[0]), 0)


@rule("unique_inverse")
def _unique_inverse(c: JaxCall) -> Array:
    runs = Runs(c)
    flat = jnp.zeros(runs.x.shape, c.dtype).at[runs.order].set(runs.number.astype(c.dtype))
    return c.sizes.reshape(flat, c.given[0], c.dims)


@rule("unique_counts")
def _unique_counts(c: JaxCall) -> Array:
    runs = Runs(c)
    run = jnp.where(runs.here, runs.number, highest(jnp.int32))
    return jnp.zeros(c.extents, c.dtype).at[run].add(1, mode="drop")
