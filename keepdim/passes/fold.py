"""Constant folding: nodes over weights alone are computed once, at lowering, by the reference interpreter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod

import torch
from msgspec.structs import replace

from ..ir import reference
from ..ir.program import NONE, Node, Program, Region, Value
from ..shapes.blocks import BLOCKS
from ..shapes.contract import DTYPE_BYTES
from ..shapes.dim import Dim
from .graph import drop_dead

SOURCES = ("full", "arange")
VIEWS = (
    "reshape",
    "permute",
    "expand",
    "slice",
    "select",
)  # free at run time; a folded copy would be stored in the file
WITHOUT_COPY = ("full", "permute", "expand", "slice", "select")
SMALL = 1 << 16  # bytes; a result larger than this and than its operands is cheaper to compute than to load


def fold_constants(p: Program, weights: Mapping[str, torch.Tensor]) -> tuple[Program, dict[str, torch.Tensor]]:
    """Replace nodes over weights and constants by weights; a rank-0 result becomes a `full`.

    Results of the program stay nodes. A `full` counts as one number whatever its size, so that nothing large
    is stored that is computed from little.
    """
    first, values = len(p.contract.inputs), list(p.values)
    known = {i: weights[v.key] for i, v in enumerate(values, first) if v.kind == "const" and v.dtype not in BLOCKS}
    stored = {i: t.numel() * t.element_size() for i, t in known.items()}  # bytes that a value is computed from
    out = dict(weights)

    def fold(n: Node) -> Node | None:
        """The node that remains, None if it was folded."""
        if n.regions:
            return replace(n, regions=tuple(Region(fold_all(r.nodes), r.results) for r in n.regions))
        size, made = _size(p, n, known), n.outs[0] if n.outs else NONE
        cost = sum(stored.get(i, 0) for i in n.ins)
        if size is None or (size > max(cost, SMALL) and n.op not in WITHOUT_COPY):
            return n
        if n.op in SOURCES or n.op in VIEWS:
            known[made], stored[made] = _compute(p, n, known), cost
            return n
        if made in p.results:
            return n
        known[made], stored[made] = _compute(p, n, known), size
        if not known[made].dim():
            x = known[made].item()
            number = x if isinstance(x, float) else Dim.const(int(x))
            return Node("full", (), n.outs, {"value": number})
        v = values[made - first]
        values[made - first] = Value(v.name, v.dtype, v.dims, "const", f"folded/{v.name}")
        out[f"folded/{v.name}"] = known[made]
        return None

    def fold_all(nodes: Iterable[Node]) -> tuple[Node, ...]:
        return tuple(m for n in nodes if (m := fold(n)) is not None)

    nodes = fold_all(p.nodes)
    p = drop_dead(replace(p, values=tuple(values), nodes=nodes))
    used = {v.key for v in p.values}
    return p, {k: w for k, w in out.items() if k in used}


def _size(p: Program, n: Node, known: Mapping[int, torch.Tensor]) -> int | None:
    """The bytes of a node's result, if it can be computed now: its operands and all sizes are known."""
    if len(n.outs) != 1 or n.regions or reference.torch_function(n.op) is None:
        return None
    if not n.ins and n.op not in SOURCES or any(i != NONE and i not in known for i in n.ins):
        return None
    v = p.value(n.outs[0])
    attrs = [d for a in n.attrs.values() for d in (a if isinstance(a, tuple) else (a,)) if isinstance(d, Dim)]
    if any(d.value is None for d in (*v.dims, *attrs)):
        return None
    return prod(d.eval({}) for d in v.dims) * DTYPE_BYTES[v.dtype]


def _compute(p: Program, n: Node, known: Mapping[int, torch.Tensor]) -> torch.Tensor:
    v = p.value(n.outs[0])
    if n.op == "full":  # a single number, expanded
        number = reference.apply(n, [Value(v.name, v.dtype, (), "temp")], [], {})[0]
        return number.expand([d.eval({}) for d in v.dims])
    return reference.apply(n, [v], [None if i == NONE else known[i] for i in n.ins], {})[0]
