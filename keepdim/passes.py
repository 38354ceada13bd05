"""Rewrites of Programs, each a named function Program → Program that keeps the contract."""

from __future__ import annotations

from collections.abc import Callable

from .dims import Dim
from .program import NONE, Node, Program, Value

FLOATS = ("f16", "bf16", "f32", "f64")
COMMUTES = ("add", "mul", "maximum", "minimum")
BINARY = (*COMMUTES, "sub", "div", "pow")


def fold_scalars(p: Program) -> Program:
    """A rank-0 `full`, cast or not, becomes the attribute `other` of the binary op that uses it."""
    numbers: dict[int, Dim | float] = {}
    nodes = []
    for n in p.nodes:
        if n.op == "full" and not p.value(n.outs[0]).dims:
            numbers[n.outs[0]] = n.attrs["value"]
        elif n.op == "cast" and n.ins[0] in numbers:
            known = numbers[n.ins[0]]
            if p.value(n.outs[0]).dtype in FLOATS or (isinstance(known, Dim) and p.value(n.outs[0]).dtype != "bool"):
                numbers[n.outs[0]] = known
        nodes.append(_with_number(n, numbers) if n.op in BINARY and len(n.ins) == 2 else n)
    return Program(p.contract, p.values, tuple(nodes), p.results)


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
