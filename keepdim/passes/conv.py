"""Rewrites around convolutions: batch norm folded into their weights; residual and activation computed with them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from msgspec.structs import replace

from ..ir.program import NONE, Node, Program, Value
from ..shapes.contract import DTYPE_OF
from ..shapes.dim import Dim
from .fuse import activation_of, pairs
from .graph import FULL, Graph, Made, Supports, rewrite, supports_all


def fold_batch_norm(
    p: Program, weights: Mapping[str, torch.Tensor], supports: Supports = supports_all
) -> tuple[Program, dict[str, torch.Tensor]]:
    """A batch norm with constant statistics is scale * x + shift per channel. After a convolution both go into its
    weight and bias; elsewhere they are two elementwise nodes, which run in any layout."""
    out = dict(weights)

    def constant(g: Graph, name: str, data: torch.Tensor, like: int) -> int:
        dtype = g.dtype(like)
        i = g.temp(name, g.shape(like)._replace(dims=tuple(Dim.const(d) for d in data.shape)))
        key = f"folded/{g.values[i].name}"
        g.values[i] = Value(g.values[i].name, dtype, g.values[i].dims, "const", key)
        out[key] = data.to(DTYPE_OF[dtype])
        return i

    def known(g: Graph, i: int) -> torch.Tensor | None:
        v = g.values[i] if i != NONE else None
        return out[v.key].double() if v is not None and v.kind == "const" and v.dtype in FULL else None

    def rule(g: Graph, n: Node) -> Made:
        if n.op != "batch_norm" or g.dtype(n.outs[0]) not in FULL:
            return None
        given = [known(g, i) for i in n.ins[1:]]
        if any(i != NONE and t is None for i, t in zip(n.ins[1:], given, strict=True)):
            return None
        weight, bias, mean, var = given
        assert mean is not None and var is not None  # its rule requires them
        scale = (var + n.attrs["eps"]).rsqrt() * (1 if weight is None else weight)
        shift = (0 if bias is None else bias) - mean * scale
        name, x = g.values[n.outs[0]].name, n.ins[0]
        conv = g.only(x, "conv")
        w = known(g, conv.ins[1]) if conv is not None and _nothing_fused(conv) else None
        b = known(g, conv.ins[2]) if conv is not None and _has_bias(conv) else None
        if conv is not None and w is not None and (b is not None or not _has_bias(conv)):
            folded = constant(g, f"{name}.weight", w * scale.reshape(-1, *[1] * (w.dim() - 1)), conv.ins[1])
            added = constant(g, f"{name}.bias", shift + (0 if b is None else b * scale), n.ins[3])
            return [Node("conv", (conv.ins[0], folded, added), n.outs, conv.attrs)]
        dims = (-1, *[1] * (len(g.dims(x)) - 2))
        scaled = g.temp(f"{name}.scaled", g.shape(x))
        factor = constant(g, f"{name}.scale", scale.reshape(dims), n.ins[3])
        offset = constant(g, f"{name}.shift", shift.reshape(dims), n.ins[3])
        return [Node("mul", (x, factor), (scaled,)), Node("add", (scaled, offset), n.outs)]

    return rewrite(p, rule, supports), out


def _has_bias(conv: Node) -> bool:
    return len(conv.ins) > 2 and conv.ins[2] != NONE


def _nothing_fused(conv: Node) -> bool:
    """Whether a convolution has nothing after it yet, and its output channels first in its weight."""
    return len(conv.ins) <= 3 and "activation" not in conv.attrs and not conv.attrs["transposed"]


def fuse_conv(p: Program, supports: Supports = supports_all) -> Program:
    """A sum with a tensor of the same shape, then an activation, as operand and attribute of the convolution before."""

    def rule(g: Graph, n: Node) -> Made:
        if g.dtype(n.outs[0]) not in FULL if n.outs else True:
            return None
        if n.op == "add":
            for y, r in pairs(n):
                conv = g.only(y, "conv")
                same = g.shape(y) == g.shape(r) == g.shape(n.outs[0])
                if conv is not None and same and len(conv.ins) <= 3 and "activation" not in conv.attrs and y != r:
                    return [replace(conv, ins=(*conv.ins, *[NONE] * (3 - len(conv.ins)), r), outs=n.outs)]
            return None
        name = activation_of(n)
        conv = g.only(n.ins[0], "conv") if name else None
        if conv is None or "activation" in conv.attrs:
            return None
        return [replace(conv, outs=n.outs, attrs={**conv.attrs, "activation": name})]

    return rewrite(p, rule, supports)
