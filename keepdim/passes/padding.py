"""Rows of padding that no result depends on are marked, so that an engine need not compute them.

A padded batch comes with a mask [batch, length] that is 0 where there is no token. Where a model multiplies its hidden
states by that mask before it adds them up, and its attention hides those keys, nothing of a padded row is ever seen. It
is still computed by everybody. `skip_padding` proves that it need not be, and gives linear layers and attention the
list of the rows that somebody reads.

The proof has two halves. Backwards from the results: a value's rows are unread where each reader multiplies them by 0,
hides them from every query, or computes rows of its own from them that are unread too. And all that is multiplied by 0
is finite whatever the inputs are (`magnitude`): 0 * inf is NaN, and has to stay so. 0 times a negative number is -0, so
what is multiplied may only be added up.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from msgspec.structs import replace

from ..ir.program import NONE, Node, Program, Shape, walk
from ..shapes.dim import Dim
from .graph import Graph, Takes, anything, drop_dead
from .magnitude import LARGEST, NARROWS, Magnitudes

PLACE = {"linear": 3, "sdpa": 4}  # of the operand that lists the rows


def _row_axes(op: str, rank: int) -> tuple[int, ...] | None:
    """The axes of an op's result that its rows are counted along, in order: attention's heads are no rows."""
    if op == "sdpa":
        return (*range(rank - 3), rank - 2) if rank > 2 else None
    return tuple(range(rank - 1))


class Rows(NamedTuple):
    """What of a value stands for the elements of a mask: for each dim of the mask, the dim of the value."""

    mask: int  # the value that it is
    axes: tuple[int, ...]


def skip_padding(
    p: Program, weights: dict[str, torch.Tensor], takes: Takes = anything
) -> tuple[Program, dict[str, torch.Tensor]]:
    """Linear layers and attention get the list of rows that are not padding, where only those are read."""
    g = Graph(p)
    for n in p.nodes:
        g.put(n)
    unread = _unread(g, p, Magnitudes(g, weights))
    lists: dict[int, list[Node]] = {}  # of a mask: what makes the list of its rows
    nodes, done = list[Node](), set[int]()  # with the values that they make

    def put(*new: Node) -> None:
        nodes.extend(new)
        done.update(i for n in new for i in n.outs)

    for n in p.nodes:
        place = PLACE.get(n.op)
        rows = unread.get(n.outs[0]) if place is not None and len(n.ins) <= place else None
        if place is not None and rows is not None and rows.axes == _row_axes(n.op, len(g.dims(n.outs[0]))):
            if rows.mask not in lists:
                lists[rows.mask] = _list(g, rows.mask)
            made = lists[rows.mask]
            marked = replace(n, ins=(*n.ins, *[NONE] * (place - len(n.ins)), made[-1].outs[0]))
            first = _first(g, rows.mask, done)
            if first is not None and all(takes(g.alone(m)) for m in (*made, marked)):
                put(*first, *(m for m in made if m.outs[0] not in done), marked)
                continue
        if not n.outs or n.outs[0] not in done:
            put(n)
    values = tuple(g.values[len(p.contract.inputs) :])
    return drop_dead(replace(p, values=values, nodes=tuple(nodes))), weights


def _list(g: Graph, mask: int) -> list[Node]:
    """Nodes that list the rows where a mask is not 0."""
    name, dims, made = g.values[mask].name, g.dims(mask), list[Node]()
    if g.dtype(mask) != "bool":
        as_bool = g.temp(f"{name}.bool", Shape("bool", dims))
        made.append(Node("cast", (mask,), (as_bool,)))
        mask = as_bool
    count = math.prod(dims[1:], start=dims[0])
    return [*made, Node("flatnonzero", (mask,), (g.temp(f"{name}.rows", Shape("i64", (count,))),))]


def _first(g: Graph, value: int, done: Collection[int]) -> list[Node] | None:
    """Nodes that have to come first for a value to be there, in order; None where one of them should not be moved."""
    needed, left = dict[int, Node](), [value]
    while left:
        i = left.pop()
        n = g.made.get(i)
        if n is None or i in done or i in needed:
            continue
        if n.op in PLACE or n.regions or any(g.values[k].kind == "state" for k in n.ins if k != NONE):
            return None
        needed[i] = n
        left += n.ins
    return [n for n in g.p.nodes if n.outs and n.outs[0] in needed]


# ---------------------------------------------------------------- which rows are read
def _unread(g: Graph, p: Program, bounds: Magnitudes) -> dict[int, Rows]:
    """Values of which no result depends on the rows where a mask is 0."""
    found: dict[int, Rows | None] = dict.fromkeys(p.results)
    readers = [(i, m.op) for m in p.walk() for i in (*m.ins, *(i for r in m.regions for i in r.results))]
    added = {i for i, _ in readers} - {i for i, op in readers if op not in ("sum", "mean")} - {*p.results}

    def say(i: int, rows: Rows | None) -> None:
        found[i] = rows if found.get(i, rows) == rows else None

    for n in reversed(p.nodes):
        plain = len(n.outs) == 1 and not n.regions
        for k, i in enumerate(n.ins):
            if i != NONE:
                adds = plain and n.outs[0] in added
                say(i, _of_operand(g, bounds, n, k, found.get(n.outs[0]), adds) if plain else None)
        for m in walk([n]) if n.regions else ():
            for i in (*m.ins, *(i for r in m.regions for i in r.results)):
                say(i, None)
    return {i: rows for i, rows in found.items() if rows is not None}


def _of_operand(g: Graph, bounds: Magnitudes, n: Node, k: int, made: Rows | None, adds: bool) -> Rows | None:
    """Which rows of operand k this node does not read, given those of its result that nobody does.

    `adds`: the result is only added up, which does not tell a 0 from a -0.
    """
    x, out = g.dims(n.ins[k]), g.dims(n.outs[0])
    if n.op == "mul" and len(n.ins) == 2 and adds:
        other = n.ins[1 - k]
        for zero in _zeros(g, other):  # both counted from the end, as they are broadcast
            rows = _shifted(zero, len(x) - len(g.dims(other)))
            if _has(g, x, rows) and bounds.finite(n.ins[k]):
                return rows
    if n.op == "sdpa" and k in (1, 2):
        return _hidden(g, bounds, n, k)
    if made is None:
        return None
    axes = made.axes
    if n.op in ("add", "sub", "mul", "cast", *NARROWS):
        axes = tuple(a + len(x) - len(out) for a in axes)
    elif n.op == "linear" and k == 0:
        axes = () if len(out) - 1 in axes else axes
    elif n.op in ("layer_norm", "rms_norm") and k == 0:
        axes = () if max(axes) >= len(out) - int(n.attrs["axes"].value) else axes
    elif n.op == "sdpa" and k == 0:
        axes = () if len(out) - 1 in axes or x[:-1] != out[:-1] else axes
    elif n.op == "permute":
        axes = tuple(int(n.attrs["dims"][a].value) for a in axes)
    elif n.op == "slice":
        axes = () if n.attrs["dim"].value in axes else axes
    elif n.op == "reshape":
        axes = _before(x, out, axes)
    else:
        return None
    rows = Rows(made.mask, axes)
    return rows if _has(g, x, rows) else None


def _shifted(rows: Rows, by: int) -> Rows:
    return Rows(rows.mask, tuple(a + by for a in rows.axes))


def _has(g: Graph, dims: Sequence[Dim], rows: Rows) -> bool:
    """Whether a value of these dims has those of the mask at these axes."""
    mask = g.dims(rows.mask)
    return len(mask) == len(rows.axes) and all(
        0 <= a < len(dims) and dims[a] == d for a, d in zip(rows.axes, mask, strict=True)
    )


def _before(x: Sequence[Dim], out: Sequence[Dim], axes: Sequence[int]) -> tuple[int, ...]:
    """Where a reshape's operand has these axes of its result: of the same size, behind as many elements.

    None of them if one is nowhere.
    """

    def before(dims: Sequence[Dim], a: int) -> Dim:
        return math.prod(dims[:a], start=Dim.const(1))

    def places(a: int) -> list[int]:
        same = (b for b, size in enumerate(x) if size == out[a] and size.value != 1)
        return [b for b in same if before(x, b) == before(out, a)]

    found = [places(a) for a in axes]
    return tuple(b[0] for b in found) if all(found) else ()


def _hidden(g: Graph, bounds: Magnitudes, n: Node, k: int) -> Rows | None:
    """Keys or values that attention hides from every query: they weigh 0, in a softmax that gives no NaN."""
    mask = n.ins[3] if len(n.ins) > 3 else NONE
    if mask == NONE or g.dtype(mask) != "bool" or n.attrs.get("safe") is False:
        return None
    rank, x = len(g.dims(n.outs[0])), g.dims(n.ins[k])
    for zero in _zeros(g, mask) if len(x) == rank else []:
        axes = _shifted(zero, rank - len(g.dims(mask))).axes  # of the scores [.., queries, keys]
        rows = Rows(zero.mask, tuple(rank - 2 if a == rank - 1 else a for a in axes))
        if rank - 1 in axes and rank - 2 not in axes and _has(g, x, rows) and bounds.finite(n.outs[0]):
            return rows
    return None


def _zeros(g: Graph, i: int) -> list[Rows]:
    """The masks that a value is made of, which is 0 wherever one of them is; the axes are the value's."""
    at = [*range(len(g.dims(i)))]  # for each dim of what we are at, that of the value; -1 where it has none
    while (n := g.by(i, "cast", "reshape", "expand", "permute", "bitwise_and", "mul")) is not None:
        x, out = g.dims(n.ins[0]), g.dims(i)
        if n.op in ("bitwise_and", "mul"):
            if g.dtype(i) in LARGEST:  # 0 * inf
                break
            parts = [_shifted(rows, len(out) - len(g.dims(k))) for k in n.ins for rows in _zeros(g, k)]
            made = [Rows(rows.mask, tuple(at[a] for a in rows.axes)) for rows in parts]
            return [rows for rows in made if -1 not in rows.axes]
        if n.op == "permute":
            places = [int(d.value) for d in n.attrs["dims"]]
            at = [at[places.index(d)] for d in range(len(x))]
        elif n.op == "expand":
            at = [at[d + len(out) - len(x)] if x[d] == out[d + len(out) - len(x)] else -1 for d in range(len(x))]
        elif n.op == "reshape":
            kept = [d for d in range(len(out)) if out[d].value != 1]
            if [out[d] for d in kept] != [d for d in x if d.value != 1]:
                break
            left = iter(kept)
            at = [-1 if d.value == 1 else at[next(left)] for d in x]
        i = n.ins[0]
    return [Rows(i, tuple(at))] if at and -1 not in at else []
