"""Ops that read or write at positions which are data."""

from __future__ import annotations

from .table import Args, Shape, Sink, aten, op


def _embedding(b: Sink, name: str, a: Args, out: Shape) -> int:
    a.ignore("padding_idx", "scale_grad_by_freq", "sparse")  # of training
    return b.emit(name, [a.tensor("weight"), a.tensor("indices")], out)


op("embedding", aten.embedding.default, lower=_embedding)
