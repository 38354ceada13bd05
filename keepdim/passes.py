"""Rewrites of Programs, each a named function Program → Program that keeps the contract."""

from __future__ import annotations

from collections.abc import Callable

from .dims import Dim
from .program import NONE, Node, Program, Value

FLOATS = ("f16", "bf16", "f32", "f64")
WHOLE = {"i8": 8, "i16": 16, "i32": 32, "i64": 64}
COMMUTES = ("add", "mul", "maximum", "minimum")
BINARY = (*COMMUTES, "sub", "div", "pow")


def fold_scalars(p: Program) -> Program:
    """A rank-0 `full`, cast or not, becomes the attribute `other` of the binary op that uses it."""
    numbers: dict[int, Dim | float] = {}
    nodes = []
    for n in p.nodes:
        made = p.value(n.outs[0]) if n.op in ("full", "cast") else None
        number = n.attrs.get("value") if n.op == "full" else numbers.get(n.ins[0]) if n.op == "cast" else None
        if made is not None and number is not None and not made.dims and _fits(number, made.dtype):
            numbers[n.outs[0]] = number
        nodes.append(_with_number(n, numbers) if n.op in BINARY and len(n.ins) == 2 else n)
    return Program(p.contract, p.values, tuple(nodes), p.results)


def _fits(number: Dim | float, dtype: str) -> bool:
    """Whether the dtype holds the number as it is."""
    if dtype in FLOATS:
        return True
    if dtype not in WHOLE or not isinstance(number, Dim):
        return False
    lo, hi = number.bounds
    return lo is not None and hi is not None and -(2 ** (WHOLE[dtype] - 1)) <= lo and hi < 2 ** (WHOLE[dtype] - 1)


def _with_number(n: Node, numbers: dict[int, Dim | float]) -> Node:
    a, b = n.ins
    if b in numbers:
        return Node(n.op, (a,), n.outs, {**n.attrs, "other": numbers[b]})
    if a in numbers and n.op in COMMUTES:
        return Node(n.op, (b,), n.outs, {**n.attrs, "other": numbers[a]})
    return n


def drop_dead(p: Program) -> Program:
    """Nodes and values that no result needs."""
    first = len(p.contract.inputs)
    needed = set(p.results) - {NONE}
    nodes: list[Node] = []
    for n in reversed(p.nodes):
        if needed & set(n.outs):
            needed |= set(n.ins) - {NONE}
            needed |= {i for r in n.regions for m in _all(r.nodes) for i in (*m.ins, *m.outs)} - {NONE}
            needed |= {i for r in n.regions for i in r.results} | set(n.outs)
            nodes.append(n)
    new: dict[int, int] = {i: i for i in range(first)} | {NONE: NONE}
    values: list[Value] = []
    for i, v in enumerate(p.values, first):
        if i in needed:
            new[i] = first + len(values)
            values.append(v)
    results = tuple(new[r] for r in p.results)
    return Program(p.contract, tuple(values), tuple(_renumber(n, new) for n in reversed(nodes)), results)


def _all(nodes: tuple[Node, ...]) -> list[Node]:
    return [m for n in nodes for m in (n, *(x for r in n.regions for x in _all(r.nodes)))]


def _renumber(n: Node, new: dict[int, int]) -> Node:
    regions = tuple(
        type(r)(tuple(_renumber(m, new) for m in r.nodes), tuple(new[i] for i in r.results)) for r in n.regions
    )
    return Node(n.op, tuple(new[i] for i in n.ins), tuple(new[i] for i in n.outs), n.attrs, regions)


PASSES: tuple[Callable[[Program], Program], ...] = (fold_scalars, drop_dead)


def run(p: Program) -> Program:
    """All passes, in order."""
    for f in PASSES:
        p = f(p)
    return p
