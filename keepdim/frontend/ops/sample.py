"""grid_sample, fold, pairwise distances and embedding_bag."""

from __future__ import annotations

from ...ir.program import Shape
from .table import Args, Outs, Sink, aten, op

INTERPOLATION = ("bilinear", "nearest", "bicubic")
PADDING = ("zeros", "border", "reflection")
BAGS = ("sum", "mean", "max")


def _grid_sample(b: Sink, name: str, a: Args, out: Shape) -> int:
    mode, padding = INTERPOLATION[a.static("interpolation_mode")], PADDING[a.static("padding_mode")]
    ins = [a.tensor("input"), a.tensor("grid")]
    return b.emit(name, ins, out, mode=mode, padding_mode=padding, align_corners=a.plain("align_corners"))


def _fold(b: Sink, name: str, a: Args, out: Shape) -> int:
    a.ignore("output_size")  # implied by the result's size
    window = {k: tuple(a.dims(k)) for k in ("stride", "padding", "dilation")}
    return b.emit(name, [a.tensor("self")], out, kernel=tuple(a.dims("kernel_size")), **window)


def _cdist(b: Sink, name: str, a: Args, out: Shape) -> int:
    a.ignore("compute_mode")  # whether eager may use matrix products
    return b.emit(name, [a.tensor("x1"), a.tensor("x2")], out, p=float(a.plain("p")))


def _pdist(b: Sink, name: str, a: Args, out: Shape) -> int:
    return b.emit(name, [a.tensor("self")], out, p=float(a.plain("p")))


def _embedding_bag(b: Sink, name: str, a: Args, out: list[Shape]) -> Outs:
    """The bags; the other results are for training only."""
    a.ignore("scale_grad_by_freq", "sparse")
    ins = [a.tensor(n) for n in ("weight", "indices", "offsets", "per_sample_weights")]
    padding = a.static("padding_idx")
    padding_attr = {"padding_idx": a.dim("padding_idx")} if padding >= 0 else {}
    last = bool(a.plain("include_last_offset"))
    y = b.emit(name, ins, out[0], mode=BAGS[a.static("mode")], include_last_offset=last, **padding_attr)
    return [y, None, None, None]


op("grid_sample", aten.grid_sampler_2d.default, aten.grid_sampler_3d.default, lower=_grid_sample)
op("fold", aten.col2im.default, lower=_fold)
op("cdist", aten._cdist_forward.default, lower=_cdist)
op("pdist", aten._pdist_forward.default, lower=_pdist)
op("embedding_bag", aten._embedding_bag.default, aten._embedding_bag_forward_only.default, lower=_embedding_bag)
