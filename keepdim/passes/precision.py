"""Products of linear layers in bf16, where the user asks for them: operands are rounded, sums stay f32."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from msgspec.structs import replace

from ..ir.program import Node, Program, Region, Value
from ..shapes.contract import DTYPE_OF


def round_products(
    p: Program, weights: Mapping[str, torch.Tensor], precision: str
) -> tuple[Program, dict[str, torch.Tensor]]:
    """Linear layers over f32 with a constant weight of f32 or bf16 multiply operands rounded to `precision`.

    Weights are stored so, once: also where an embedding reads the same one. A weight that another op reads stays f32.
    """
    first, values, out = len(p.contract.inputs), list(p.values), dict(weights)

    def is_product(n: Node) -> bool:
        if n.op != "linear" or n.ins[1] < first or p.value(n.outs[0]).dtype != "f32":
            return False
        w = p.value(n.ins[1])
        return w.kind == "const" and (w.dtype == precision or (w.dtype == "f32" and readers[w.key] <= _ROUNDED))

    readers: dict[str, set[tuple[str, int]]] = {}
    for n in p.walk():
        for k, i in enumerate(n.ins):
            if i >= first and p.value(i).kind == "const":
                readers.setdefault(p.value(i).key, set()).add((n.op, k))
    rounded = {p.value(n.ins[1]).key for n in p.walk() if is_product(n)}
    for i in p.results:
        rounded -= {p.value(i).key} if i >= first else set()
    for i, v in enumerate(values):
        if v.kind == "const" and v.key in rounded and v.dtype == "f32":
            values[i] = Value(v.name, precision, v.dims, v.kind, v.key)
    for key in rounded:
        out[key] = out[key].to(DTYPE_OF[precision])

    def mark(n: Node) -> Node:
        if n.regions:
            return replace(n, regions=tuple(Region(tuple(map(mark, r.nodes)), r.results) for r in n.regions))
        if n.op == "linear" and n.ins[1] >= first and p.value(n.ins[1]).key in rounded:
            return replace(n, attrs={**n.attrs, "precision": precision})
        return n

    return replace(p, values=tuple(values), nodes=tuple(map(mark, p.nodes))), out


_ROUNDED = {("linear", 1), ("embedding", 0)}  # operands that may be stored with 16 bits
