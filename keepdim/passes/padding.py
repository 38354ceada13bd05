"""Marks padded rows that do not affect the output, so that an engine skips them.

A padded batch comes with a mask [batch, length] that is 0 where there is no token. If a model multiplies its hidden
states by that mask before summing them, and its attention masks those keys, padded rows never affect the output.
`skip_padding` proves this, and passes the list of the other rows to linear layers and attention.

The proof has two parts. Backwards from the results: rows of a value are unused if each reader multiplies them by 0,
masks them in attention, or computes only rows from them that are unused too. And everything multiplied by 0 is finite
for any inputs (`value_bounds`): 0 * inf is NaN, and has to stay NaN. 0 times a negative number is -0, so the product
may only be summed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from msgspec.structs import replace

from ..ir.program import NONE, Node, Program, Shape, walk
from ..shapes.dim import Dim
from .graph import Graph, Supports, drop_dead, supports_all
from .value_bounds import BOUNDED_BY_INPUT, LARGEST, ValueBounds

ROWS_OPERAND = {"linear": 3, "sdpa": 4}  # index of the operand that lists the rows


def _row_axes(op: str, rank: int) -> tuple[int, ...] | None:
    """The axes of an op's result that enumerate its rows, in order; the heads of attention are not rows."""
    if op == "sdpa":
        return (*range(rank - 3), rank - 2) if rank > 2 else None
    return tuple(range(rank - 1))


class MaskedRows(NamedTuple):
    """Rows of a value that correspond to the elements of a mask: for each dim of the mask, the dim of the value."""

    mask: int  # value id
    axes: tuple[int, ...]


def skip_padding(
    p: Program, weights: dict[str, torch.Tensor], supports: Supports = supports_all
) -> tuple[Program, dict[str, torch.Tensor]]:
    """Pass the list of unpadded rows to linear layers and attention whose padded rows are unused."""
    g = Graph(p)
    for n in p.nodes:
        g.put(n)
    unused = _unused_rows(g, p, ValueBounds(g, weights))
    lists: dict[int, list[Node]] = {}  # mask → the nodes that compute the list of its rows
    nodes, done = list[Node](), set[int]()  # done: values that these nodes produce

    def put(*new: Node) -> None:
        nodes.extend(new)
        done.update(i for n in new for i in n.outs)

    for n in p.nodes:
        operand = ROWS_OPERAND.get(n.op)
        rows = unused.get(n.outs[0]) if operand is not None and len(n.ins) <= operand else None
        if operand is not None and rows is not None and rows.axes == _row_axes(n.op, len(g.dims(n.outs[0]))):
            if rows.mask not in lists:
                lists[rows.mask] = _row_list(g, rows.mask)
            made = lists[rows.mask]
            marked = replace(n, ins=(*n.ins, *[NONE] * (operand - len(n.ins)), made[-1].outs[0]))
            first = _prerequisites(g, rows.mask, done)
            if first is not None and all(supports(g.single_node(m)) for m in (*made, marked)):
                put(*first, *(m for m in made if m.outs[0] not in done), marked)
                continue
        if not n.outs or n.outs[0] not in done:
            put(n)
    values = tuple(g.values[len(p.contract.inputs) :])
    return drop_dead(replace(p, values=values, nodes=tuple(nodes))), weights


def _row_list(g: Graph, mask: int) -> list[Node]:
    """Nodes that compute the list of rows where a mask is not 0."""
    name, dims, made = g.values[mask].name, g.dims(mask), list[Node]()
    if g.dtype(mask) != "bool":
        as_bool = g.temp(f"{name}.bool", Shape("bool", dims))
        made.append(Node("cast", (mask,), (as_bool,)))
        mask = as_bool
    count = math.prod(dims[1:], start=dims[0])
    return [*made, Node("flatnonzero", (mask,), (g.temp(f"{name}.rows", Shape("i64", (count,))),))]


def _prerequisites(g: Graph, value: int, done: Collection[int]) -> list[Node] | None:
    """Nodes that must be moved up to compute a value here, in order; None if one of them must not be moved."""
    needed, left = dict[int, Node](), [value]
    while left:
        i = left.pop()
        n = g.made.get(i)
        if n is None or i in done or i in needed:
            continue
        if n.op in ROWS_OPERAND or n.regions or any(g.values[k].kind == "state" for k in n.ins if k != NONE):
            return None
        needed[i] = n
        left += n.ins
    return [n for n in g.p.nodes if n.outs and n.outs[0] in needed]


# ---------------------------------------------------------------- which rows are used
def _unused_rows(g: Graph, p: Program, bounds: ValueBounds) -> dict[int, MaskedRows]:
    """Value → rows (where a mask is 0) that no result depends on."""
    found: dict[int, MaskedRows | None] = dict.fromkeys(p.results)
    readers = [(i, m.op) for m in p.walk() for i in (*m.ins, *(i for r in m.regions for i in r.results))]
    added = {i for i, _ in readers} - {i for i, op in readers if op not in ("sum", "mean")} - {*p.results}

    def record(i: int, rows: MaskedRows | None) -> None:
        found[i] = rows if found.get(i, rows) == rows else None

    for n in reversed(p.nodes):
        plain = len(n.outs) == 1 and not n.regions
        for k, i in enumerate(n.ins):
            if i != NONE:
                adds = plain and n.outs[0] in added
                record(i, _of_operand(g, bounds, n, k, found.get(n.outs[0]), adds) if plain else None)
        for m in walk([n]) if n.regions else ():
            for i in (*m.ins, *(i for r in m.regions for i in r.results)):
                record(i, None)
    return {i: rows for i, rows in found.items() if rows is not None}


def _of_operand(
    g: Graph, bounds: ValueBounds, n: Node, k: int, made: MaskedRows | None, adds: bool
) -> MaskedRows | None:
    """Which rows of operand k are unused by this node, given the unused rows of its result.

    `adds`: the result is only summed, which does not distinguish 0 from -0.
    """
    if n.op == "mul" and len(n.ins) == 2 and adds:
        rows = _rows_of_factor(g, bounds, n.ins[k], n.ins[1 - k])
        if rows is not None:
            return rows
    if n.op == "sdpa" and k in (1, 2):
        return _masked_rows(g, bounds, n, k)
    axes = _axes_of_operand(g, n, k, made.axes) if made is not None else None
    if made is None or axes is None:
        return None
    rows = MaskedRows(made.mask, axes)
    return rows if _matches_mask(g, g.dims(n.ins[k]), rows) else None


def _rows_of_factor(g: Graph, bounds: ValueBounds, x: int, other: int) -> MaskedRows | None:
    """The rows of x that a product with a mask sets to 0: those must be finite, since 0 * inf is NaN."""
    dims = g.dims(x)
    for zero in _factors(g, other):  # aligned from the last dim, as in broadcasting
        rows = _shifted(zero, len(dims) - len(g.dims(other)))
        if _matches_mask(g, dims, rows) and bounds.finite(x):
            return rows
    return None


def _axes_of_operand(g: Graph, n: Node, k: int, axes: tuple[int, ...]) -> tuple[int, ...] | None:
    """The axes of operand k that these axes of the result come from, row by row: empty if rows are mixed, None for an
    op that is not known."""
    x, out = g.dims(n.ins[k]), g.dims(n.outs[0])
    last = len(out) - 1
    if n.op in ("add", "sub", "mul", "cast", *BOUNDED_BY_INPUT):
        return tuple(a + len(x) - len(out) for a in axes)
    if n.op == "linear" and k == 0:
        return () if last in axes else axes
    if n.op in ("layer_norm", "rms_norm") and k == 0:
        return () if max(axes) >= len(out) - int(n.attrs["axes"].value) else axes
    if n.op == "sdpa" and k == 0:
        return () if last in axes or x[:-1] != out[:-1] else axes
    if n.op == "permute":
        return tuple(int(n.attrs["dims"][a].value) for a in axes)
    if n.op == "slice":
        return () if n.attrs["dim"].value in axes else axes
    return _reshaped_axes(x, out, axes) if n.op == "reshape" else None


def _shifted(rows: MaskedRows, by: int) -> MaskedRows:
    return MaskedRows(rows.mask, tuple(a + by for a in rows.axes))


def _matches_mask(g: Graph, dims: Sequence[Dim], rows: MaskedRows) -> bool:
    """Whether these dims equal the mask's dims at these axes."""
    mask = g.dims(rows.mask)
    return len(mask) == len(rows.axes) and all(
        0 <= a < len(dims) and dims[a] == d for a, d in zip(rows.axes, mask, strict=True)
    )


def _reshaped_axes(x: Sequence[Dim], out: Sequence[Dim], axes: Sequence[int]) -> tuple[int, ...]:
    """The axes of a reshape's operand that equal these axes of its result: same size, same product of dims before.

    Empty if one of them has no counterpart.
    """

    def before(dims: Sequence[Dim], a: int) -> Dim:
        return math.prod(dims[:a], start=Dim.const(1))

    def candidates(a: int) -> list[int]:
        same = (b for b, size in enumerate(x) if size == out[a] and size.value != 1)
        return [b for b in same if before(x, b) == before(out, a)]

    found = [candidates(a) for a in axes]
    return tuple(b[0] for b in found) if all(found) else ()


def _masked_rows(g: Graph, bounds: ValueBounds, n: Node, k: int) -> MaskedRows | None:
    """Keys or values that attention masks for every query: their weight is 0, if the softmax gives no NaN."""
    mask = n.ins[3] if len(n.ins) > 3 else NONE
    if mask == NONE or g.dtype(mask) != "bool" or n.attrs.get("safe") is False:
        return None
    rank, x = len(g.dims(n.outs[0])), g.dims(n.ins[k])
    for zero in _factors(g, mask) if len(x) == rank else []:
        axes = _shifted(zero, rank - len(g.dims(mask))).axes  # of the scores [.., queries, keys]
        rows = MaskedRows(zero.mask, tuple(rank - 2 if a == rank - 1 else a for a in axes))
        if rank - 1 in axes and rank - 2 not in axes and _matches_mask(g, x, rows) and bounds.finite(n.outs[0]):
            return rows
    return None


def _factors(g: Graph, i: int) -> list[MaskedRows]:
    """The masks of which a value is a product: it is 0 wherever one of them is. The axes are the value's."""
    at = [*range(len(g.dims(i)))]  # for each dim of the current value, the dim of the original; -1 if it has none
    while (n := g.by(i, "cast", "reshape", "expand", "permute", "bitwise_and", "mul")) is not None:
        x, out = g.dims(n.ins[0]), g.dims(i)
        if n.op in ("bitwise_and", "mul"):
            if g.dtype(i) in LARGEST:  # 0 * inf
                break
            parts = [_shifted(rows, len(out) - len(g.dims(k))) for k in n.ins for rows in _factors(g, k)]
            made = [MaskedRows(rows.mask, tuple(at[a] for a in rows.axes)) for rows in parts]
            return [rows for rows in made if -1 not in rows.axes]
        if n.op == "permute":
            order = [int(d.value) for d in n.attrs["dims"]]
            at = [at[order.index(d)] for d in range(len(x))]
        elif n.op == "expand":
            at = [at[d + len(out) - len(x)] if x[d] == out[d + len(out) - len(x)] else -1 for d in range(len(x))]
        elif n.op == "reshape":
            kept = [d for d in range(len(out)) if out[d].value != 1]
            if [out[d] for d in kept] != [d for d in x if d.value != 1]:
                break
            left = iter(kept)
            at = [-1 if d.value == 1 else at[next(left)] for d in x]
        i = n.ins[0]
    return [MaskedRows(i, tuple(at))] if at and -1 not in at else []
