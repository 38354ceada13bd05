"""Merges linear layers with the same input into one, so that the input is read once and there is one larger product."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from msgspec.structs import replace

from ..ir.program import NONE, Node, Program, Region, Value
from ..shapes.dim import Dim
from .graph import drop_dead

IsMapped = Callable[[torch.Tensor], bool]  # whether a weight is mapped from a file and should not be copied


def none_mapped(_: torch.Tensor) -> bool:
    """No weight is mapped: all may be copied."""
    return False


def merge_linears(
    p: Program, weights: Mapping[str, torch.Tensor], is_mapped: IsMapped = none_mapped
) -> tuple[Program, dict[str, torch.Tensor]]:
    """q, k and v projections, or gate and up: one product, sliced by columns.

    Weights that are all mapped are not merged, unless they are adjacent in memory.
    """

    def mergeable(group: Sequence[Node]) -> bool:
        parts = [weights[p.value(n.ins[1]).key] for n in group]
        return not all(map(is_mapped, parts)) or adjacent_view(parts) is not None

    values, out = list(p.values), dict(weights)
    together = {n.outs[0]: group for group in _groups(p) if mergeable(group) for n in group}
    done: set[int] = set()

    def merge(nodes: Iterable[Node]) -> Iterator[Node]:
        for n in nodes:
            group = together.get(n.outs[0]) if n.op == "linear" else None
            if n.regions:
                yield replace(n, regions=tuple(Region(tuple(merge(r.nodes)), r.results) for r in n.regions))
            elif group is None:
                yield n
            elif n.outs[0] not in done:
                done.update(m.outs[0] for m in group)
                yield from _merged_nodes(p, group, values, out)

    nodes = tuple(merge(p.nodes))
    merged = drop_dead(replace(p, values=tuple(values), nodes=nodes))
    used = {v.key for v in merged.values}
    return merged, {k: w for k, w in out.items() if k in used}


def _merged_nodes(
    p: Program, group: Sequence[Node], values: list[Value], out: dict[str, torch.Tensor]
) -> Iterator[Node]:
    """One product for all of a group, and a slice of its columns for each; new values and weights are appended."""
    n = group[0]
    ins = [n.ins[0]]
    for k in (1, 2):
        operands = [m.ins[k] if k < len(m.ins) else NONE for m in group]
        ins.append(NONE if operands[0] == NONE else _concat(p, operands, values, out))
    columns = [p.value(m.outs[0]).dims[-1] for m in group]
    part = p.value(n.outs[0])
    dims = (*part.dims[:-1], sum(columns[1:], columns[0]))
    values.append(Value(f"{part.name}.merged", part.dtype, dims, "temp"))
    made, start = len(p.contract.inputs) + len(values) - 1, Dim.const(0)
    yield Node("linear", tuple(ins), (made,), n.attrs)
    for m, width in zip(group, columns, strict=True):
        yield Node("slice", (made,), m.outs, {"dim": Dim.const(len(dims) - 1), "start": start, "step": Dim.const(1)})
        start = start + width


def _groups(p: Program) -> list[list[Node]]:
    """Groups of linear nodes that can be merged: same input, weights of one dtype without other readers."""
    reads = Counter(p.results)
    for n in p.walk():
        reads.update([*n.ins, *(i for r in n.regions for i in r.results)])

    def unshared_dtype(i: int) -> str:
        v = p.value(i) if i != NONE else None
        return "none" if v is None else v.dtype if v.kind == "const" and reads[i] == 1 else ""

    def among(nodes: Sequence[Node]) -> Iterator[list[Node]]:
        found: dict[tuple[object, ...], list[Node]] = defaultdict(list)
        for n in nodes:
            for r in n.regions:
                yield from among(r.nodes)
            if n.op != "linear" or n.outs[0] in p.results:
                continue
            kinds = unshared_dtype(n.ins[1]), unshared_dtype(n.ins[2] if len(n.ins) > 2 else NONE)
            if all(kinds) and len(n.ins) <= 3:
                found[n.ins[0], *kinds, n.attrs.get("activation")].append(n)
        yield from (group for group in found.values() if len(group) > 1)

    return list(among(p.nodes))


def adjacent_view(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The tensors as one view, if they are adjacent in one storage; else None.

    >>> x = torch.arange(6.0).reshape(3, 2)
    >>> adjacent_view([x[:1], x[1:]]).shape, adjacent_view([x[1:], x[:1]])
    (torch.Size([3, 2]), None)
    """
    first = parts[0]
    for a, b in itertools.pairwise(parts):
        same = a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() and a.dtype == b.dtype
        if not (same and a.is_contiguous() and b.is_contiguous() and a.data_ptr() + a.nbytes == b.data_ptr()):
            return None
    return first.as_strided((sum(len(t) for t in parts), *first.shape[1:]), first.stride())


def _concat(p: Program, operands: Sequence[int], values: list[Value], weights: dict[str, torch.Tensor]) -> int:
    """Concatenate constants along dim 0 into a new one; returns its value id."""
    parts = [p.value(i) for i in operands]
    rows = [v.dims[0] for v in parts]
    name = f"{parts[0].name}.merged"
    values.append(Value(name, parts[0].dtype, (sum(rows[1:], rows[0]), *parts[0].dims[1:]), "const", name))
    tensors = [weights[v.key] for v in parts]
    joined = adjacent_view(tensors)
    weights[name] = torch.cat(tensors) if joined is None else joined
    return len(p.contract.inputs) + len(values) - 1
