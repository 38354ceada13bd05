"""Weights of products that a model stores as 8-bit integers and casts in the graph (weight-only quantisation)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..ir import reference
from ..ir.program import NONE, Node, Program, Value
from ..shapes.dim import Dim
from .graph import Graph, Made, Supports, rewrite, supports_all

_INTEGERS = ("i8", "u8")


def store_integer_weights(
    p: Program, weights: Mapping[str, torch.Tensor], supports: Supports = supports_all
) -> tuple[Program, dict[str, torch.Tensor]]:
    """The product of f32 rows with a cast integer weight → `linear` with a constant f16 weight, packed once at load.

    f16 holds 8-bit integers exactly, so the numbers stay. Without it the weight would be cast in every call.
    """
    out = dict(weights)

    def cast_weight(g: Graph, i: int) -> torch.Tensor | None:
        """The value of a cast integer constant, if i is one or a view of one."""
        chain = list[Node]()
        while (n := g.by(i, "cast", "permute", "reshape")) is not None and len(n.ins) == 1:
            chain.append(n)
            i = n.ins[0]
        if not any(n.op == "cast" for n in chain) or g.values[i].kind != "const" or g.dtype(i) not in _INTEGERS:
            return None
        if any(d.value is None for n in chain for d in g.dims(n.outs[0])):
            return None
        w = out[g.values[i].key]
        for n in reversed(chain):
            w = reference.apply(n, [g.values[n.outs[0]]], [w], {})[0]
        return w

    def rule(g: Graph, n: Node) -> Made:
        if n.op not in ("matmul", "linear") or g.dtype(n.outs[0]) != "f32" or len(g.dims(n.ins[1])) != 2:
            return None
        w = cast_weight(g, n.ins[1])
        if w is None:
            return None
        w = w.T if n.op == "matmul" else w  # [n, k]
        name = f"{g.values[n.ins[1]].name}.f16"
        i = g.temp(name, g.shape(n.ins[1])._replace(dtype="f16", dims=tuple(map(Dim.const, w.shape))))
        key = f"folded/{g.values[i].name}"
        g.values[i] = Value(g.values[i].name, "f16", g.values[i].dims, "const", key)
        out[key] = w.half().contiguous()
        return [Node("linear", (n.ins[0], i, *(n.ins[2:] or (NONE,))), n.outs, n.attrs)]

    return rewrite(p, rule, supports), out
