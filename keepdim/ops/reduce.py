"""Reductions, softmax and norms."""

from __future__ import annotations

from typing import Any

import torch

from ..dims import Dim
from .table import Args, Outs, Shape, Sink, Unsupported, aten, axes_of, axis_of, cast, op


def _reduce(b: Sink, name: str, a: Args, out: Shape) -> int:
    x = cast(b, a.tensor("self"), out.dtype)
    a.ignore("keepdim", "dtype")  # both stand in the result's shape
    return b.emit(name, [x], out, dims=axes_of(a.dims("dim"), len(b.shape(x).dims)))


def _softmax(b: Sink, name: str, a: Args, out: Shape) -> int:
    if a.plain("half_to_float"):
        raise Unsupported("half_to_float is not handled")
    a.ignore("dtype")
    x = cast(b, a.tensor("self"), out.dtype)
    return b.emit(name, [x], out, dim=Dim.const(axis_of(a, "dim", len(out.dims))))


def _layer_norm(b: Sink, name: str, a: Args, out: Any) -> Outs:
    a.ignore("cudnn_enable")
    first = out[0] if isinstance(out, list) else out
    ins = [a.tensor(n) for n in ("input", "weight", "bias")]
    y = b.emit(name, ins, first, eps=a.plain("eps"), axes=Dim.const(len(a.dims("normalized_shape"))))
    return [y, None, None] if isinstance(out, list) else y


def _rms_norm(b: Sink, name: str, a: Args, out: Shape) -> int:
    eps = a.plain("eps")
    if eps is None:
        eps = torch.finfo(torch.float32).eps if out.dtype == "f32" else None
    if eps is None:
        raise Unsupported(f"the default eps of {out.dtype} is not handled")
    ins = [a.tensor("input"), a.tensor("weight")]
    return b.emit(name, ins, out, eps=eps, axes=Dim.const(len(a.dims("normalized_shape"))))


op("sum", aten.sum.default, aten.sum.dim_IntList, lower=_reduce)
op("mean", aten.mean.default, aten.mean.dim, lower=_reduce)
op("amax", aten.amax.default, aten.max.default, lower=_reduce)
op("amin", aten.amin.default, aten.min.default, lower=_reduce)
op("softmax", aten.softmax.int, aten._softmax.default, lower=_softmax)
op("layer_norm", aten.layer_norm.default, aten.native_layer_norm.default, lower=_layer_norm)
op("rms_norm", aten.rms_norm.default, lower=_rms_norm)
