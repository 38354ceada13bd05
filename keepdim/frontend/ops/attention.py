"""Attention."""

from __future__ import annotations

import torch

from ...ir import torch_ops  # noqa: F401  (defines the ops)
from ...ir.program import NONE, Shape
from ...shapes.dim import Dim, decide
from .table import Args, Sink, Unsupported, aten, op


def _sdpa(b: Sink, name: str, a: Args, out: Shape) -> int:
    if a.number("dropout_p"):
        raise Unsupported("dropout is in training mode")
    q, k, v, mask = (a.tensor(n) for n in ("query", "key", "value", "attn_mask"))
    shared = bool(a.plain("enable_gqa"))
    for x in (k, v):
        dims = b.shape(x).dims
        for d, (have, want) in enumerate(zip(reversed(dims[:-2]), reversed(out.dims[:-2]), strict=False)):
            _need_fit(have, want, divides=shared and d == 0)
    if mask != NONE:
        scores = (*out.dims[:-1], b.shape(k).dims[-2])
        for have, want in zip(reversed(b.shape(mask).dims), reversed(scores), strict=False):
            _need_fit(have, want, divides=False)
    scale = a.number("scale")
    attrs = ({} if scale is None else {"scale": scale}) | ({"causal": True} if a.plain("is_causal") else {})
    return b.emit(name, [q, k, v] if mask == NONE else [q, k, v, mask], out, **attrs)


def _need_fit(have: Dim, want: Dim, divides: bool) -> None:
    if have == want or have.value == 1 or decide(have, "eq", want):
        return
    if not (divides and have.value and want.value and want.value % have.value == 0):
        raise Unsupported(f"broadcasting {have} to {want} is not decided by the contract")


def _cached(b: Sink, name: str, a: Args, out: Shape) -> int:
    ins = [a.tensor(n) for n in ("query", "key", "value", "position", "key_cache", "value_cache")]
    window = a.dim("window")
    return b.emit(name, ins, out, scale=a.number("scale"), **({} if window == 0 else {"window": window}))


op("cached_attention", torch.ops.keepdim.cached_attention.default, lower=_cached)
op("sdpa", aten.scaled_dot_product_attention.default, lower=_sdpa)
