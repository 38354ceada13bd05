"""Linear layers that read the same value become one, so that their input is read once and their weights in one go."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from msgspec.structs import replace

from ..ir.program import NONE, Node, Program, Region, Value
from ..shapes.dim import Dim
from .graph import drop_dead

Stays = Callable[[torch.Tensor], bool]  # whether a weight lies where it is to stay


def nothing(_: torch.Tensor) -> bool:
    """All weights may be copied."""
    return False


def merge_linears(
    p: Program, weights: Mapping[str, torch.Tensor], stays: Stays = nothing
) -> tuple[Program, dict[str, torch.Tensor]]:
    """Queries, keys and values; gate and up: one product, whose columns are the results.

    Weights of which each one `stays` are left apart, unless they lie under each other already.
    """

    def joins(group: Sequence[Node]) -> bool:
        parts = [weights[p.value(n.ins[1]).key] for n in group]
        return not all(map(stays, parts)) or adjoining(parts) is not None

    first, values, out = len(p.contract.inputs), list(p.values), dict(weights)
    together = {n.outs[0]: group for group in _groups(p) if joins(group) for n in group}
    done: set[int] = set()

    def one(group: Sequence[Node]) -> Iterator[Node]:
        n = group[0]
        ins = [n.ins[0]]
        for k in (1, 2):
            operands = [m.ins[k] if k < len(m.ins) else NONE for m in group]
            ins.append(NONE if operands[0] == NONE else _join(p, operands, values, out))
        columns = [p.value(m.outs[0]).dims[-1] for m in group]
        whole = p.value(n.outs[0])
        dims = (*whole.dims[:-1], sum(columns[1:], columns[0]))
        values.append(Value(f"{whole.name}.merged", whole.dtype, dims, "temp"))
        made, start = first + len(values) - 1, Dim.const(0)
        yield Node("linear", tuple(ins), (made,), n.attrs)
        for m, width in zip(group, columns, strict=True):
            attrs = {"dim": Dim.const(len(dims) - 1), "start": start, "step": Dim.const(1)}
            yield Node("slice", (made,), m.outs, attrs)
            start = start + width

    def merge(nodes: Iterable[Node]) -> Iterator[Node]:
        for n in nodes:
            group = together.get(n.outs[0]) if n.op == "linear" else None
            if n.regions:
                yield replace(n, regions=tuple(Region(tuple(merge(r.nodes)), r.results) for r in n.regions))
            elif group is None:
                yield n
            elif n.outs[0] not in done:
                done.update(m.outs[0] for m in group)
                yield from one(group)

    nodes = tuple(merge(p.nodes))
    merged = drop_dead(replace(p, values=tuple(values), nodes=nodes))
    used = {v.key for v in merged.values}
    return merged, {k: w for k, w in out.items() if k in used}


def _groups(p: Program) -> list[list[Node]]:
    """Linear nodes that can be one: of one input, with weights of one type that nobody else reads."""
    reads = Counter(p.results)
    for n in p.walk():
        reads.update([*n.ins, *(i for r in n.regions for i in r.results)])

    def own(i: int) -> str:
        v = p.value(i) if i != NONE else None
        return "none" if v is None else v.dtype if v.kind == "const" and reads[i] == 1 else ""

    def among(nodes: Sequence[Node]) -> Iterator[list[Node]]:
        found: dict[tuple[object, ...], list[Node]] = defaultdict(list)
        for n in nodes:
            for r in n.regions:
                yield from among(r.nodes)
            if n.op != "linear" or n.outs[0] in p.results:
                continue
            kinds = own(n.ins[1]), own(n.ins[2] if len(n.ins) > 2 else NONE)
            if all(kinds) and len(n.ins) <= 3:
                found[n.ins[0], *kinds, n.attrs.get("activation")].append(n)
        yield from (group for group in found.values() if len(group) > 1)

    return list(among(p.nodes))


def adjoining(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The tensors as one, without a copy: they lie under each other in one piece of memory.

    >>> x = torch.arange(6.0).reshape(3, 2)
    >>> adjoining([x[:1], x[1:]]).shape, adjoining([x[1:], x[:1]])
    (torch.Size([3, 2]), None)
    """
    first = parts[0]
    for a, b in itertools.pairwise(parts):
        same = a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() and a.dtype == b.dtype
        if not (same and a.is_contiguous() and b.is_contiguous() and a.data_ptr() + a.nbytes == b.data_ptr()):
            return None
    return first.as_strided((sum(len(t) for t in parts), *first.shape[1:]), first.stride())


def _join(p: Program, operands: Sequence[int], values: list[Value], weights: dict[str, torch.Tensor]) -> int:
    """The constants under each other, as a new one."""
    parts = [p.value(i) for i in operands]
    rows = [v.dims[0] for v in parts]
    name = f"{parts[0].name}.merged"
    values.append(Value(name, parts[0].dtype, (sum(rows[1:], rows[0]), *parts[0].dims[1:]), "const", name))
    tensors = [weights[v.key] for v in parts]
    joined = adjoining(tensors)
    weights[name] = torch.cat(tensors) if joined is None else joined
    return len(p.contract.inputs) + len(values) - 1
