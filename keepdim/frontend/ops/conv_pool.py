"""Image ops: convolutions, pools, padding, resampling, channel norms."""

from __future__ import annotations

from collections.abc import Sequence

from ...ir.program import NONE, Shape
from ...shapes.dim import Dim, decide
from .table import Args, Lower, Outs, Sink, Unsupported, aten, op, reshape


def _each(dims: Sequence[Dim], rank: int, default: Sequence[Dim] = ()) -> tuple[Dim, ...]:
    """One value per spatial dim: a single one applies to all, none means the default."""
    dims = list(dims) or list(default)
    return tuple(dims * rank if len(dims) == 1 else dims)


ONE, ZERO = (Dim.const(1),), (Dim.const(0),)


def _conv(b: Sink, name: str, a: Args, out: Shape) -> int:
    x, w, bias = a.tensor("input"), a.tensor("weight"), a.tensor("bias")
    rank = len(b.shape(w).dims) - 2
    a.ignore("output_padding")  # implied by the result's size
    attrs = {
        "stride": _each(a.dims("stride"), rank, ONE),
        "padding": _each(a.dims("padding"), rank, ZERO),
        "dilation": _each(a.dims("dilation"), rank, ONE),
        "groups": a.dim("groups"),
        "transposed": a.plain("transposed"),
    }
    dims = b.shape(x).dims
    batched = len(dims) == rank + 2
    if not batched:
        x = reshape(b, x, (Dim.const(1), *dims))
    shape = out if batched else Shape(out.dtype, (Dim.const(1), *out.dims))
    return reshape(b, b.emit(name, [x, w, bias], shape, **attrs), out.dims)


def _max_pool(rank: int) -> Lower:
    def lower(b: Sink, name: str, a: Args, out: Shape | list[Shape]) -> Outs:
        a.ignore("ceil_mode")  # implied by the result's size
        kernel = _each(a.dims("kernel_size"), rank)
        attrs = {
            "kernel": kernel,
            "stride": _each(a.dims("stride"), rank, kernel),
            "padding": _each(a.dims("padding"), rank),
            "dilation": _each(a.dims("dilation"), rank),
        }
        x = a.tensor("self")
        if isinstance(out, Shape):
            return b.emit(name, [x], out, **attrs)
        return [b.emit(name, [x], out[0], **attrs), b.emit("max_pool_index", [x], out[1], **attrs)]

    return lower


def _avg_pool(rank: int) -> Lower:
    def lower(b: Sink, name: str, a: Args, out: Shape) -> int:
        a.ignore("ceil_mode")  # implied by the result's size
        kernel = _each(a.dims("kernel_size"), rank)
        divisor = a.number("divisor_override") if a.has("divisor_override") else None
        return b.emit(
            name,
            [a.tensor("self")],
            out,
            kernel=kernel,
            stride=_each(a.dims("stride"), rank, kernel),
            padding=_each(a.dims("padding"), rank),
            count_include_pad=a.plain("count_include_pad"),
            **({} if divisor is None else {"divisor": divisor}),
        )

    return lower


def _adaptive(rank: int) -> Lower:
    def lower(b: Sink, name: str, a: Args, out: Shape | list[Shape]) -> Outs:
        a.ignore("output_size")  # implied by the result's size
        x, axes = a.tensor("self"), Dim.const(rank)
        if isinstance(out, Shape):
            if name == "adaptive_avg_pool" and all(d.value == 1 for d in out.dims[-rank:]):
                count = len(out.dims)
                return b.emit("mean", [x], out, dims=tuple(Dim.const(i) for i in range(count - rank, count)))
            return b.emit(name, [x], out, axes=axes)
        return [b.emit(name, [x], out[0], axes=axes), b.emit("adaptive_max_pool_index", [x], out[1], axes=axes)]

    return lower


def _pad(mode: str | None) -> Lower:
    def lower(b: Sink, name: str, a: Args, out: Shape) -> int:
        kind = mode or a.plain("mode")
        pads = a.dims("padding" if a.has("padding") else "pad")
        value = a.number("value") if a.has("value") else Dim.const(0)
        before = tuple(reversed(pads[::2]))  # torch starts with the last dim
        if kind == "circular" and not all(decide(p, "ge", 0) for p in pads):
            raise Unsupported("negative circular padding is not supported")
        return b.emit(name, [a.tensor("self")], out, mode=kind, before=before, value=value)

    return lower


def _scales(a: Args) -> dict[str, float]:
    """Scale factors if they are given: torch then uses them instead of the sizes."""
    a.ignore("output_size")  # implied by the result's size
    factors = a.plain("scale_factors") or []
    return {f"scale_{i}": float(f) for i, f in enumerate(factors)}


def _nearest(exact: bool) -> Lower:
    def lower(b: Sink, name: str, a: Args, out: Shape) -> int:
        return b.emit(name, [a.tensor("input")], out, exact=exact, **_scales(a))

    return lower


def _resample(mode: str) -> Lower:
    def lower(b: Sink, name: str, a: Args, out: Shape) -> int:
        corners = a.plain("align_corners")
        return b.emit(name, [a.tensor("input")], out, mode=mode, align_corners=corners, **_scales(a))

    return lower


def _group_norm(b: Sink, name: str, a: Args, out: list[Shape]) -> Outs:
    a.ignore("N", "C", "HxW")  # implied by the input's shape
    ins = [a.tensor(n) for n in ("input", "weight", "bias")]
    return [b.emit(name, ins, out[0], eps=a.plain("eps"), groups=a.dim("group")), None, None]


def _batch_norm(b: Sink, name: str, a: Args, out: list[Shape]) -> Outs:
    a.ignore("momentum")  # for training only
    ins = [a.tensor(n) for n in ("input", "weight", "bias", "running_mean", "running_var")]
    return [b.emit(name, ins, out[0], eps=a.plain("eps")), None, None]


def _batch_statistics_norm(b: Sink, name: str, a: Args, out: list[Shape]) -> Outs:
    """Batch norm with the statistics of the batch, for a batch of 1: each channel is a group."""
    a.ignore("training", "momentum")
    ins = [a.tensor(n) for n in ("input", "weight", "bias")]
    if out[0].dims[0].value != 1:
        raise Unsupported("batch norm in training mode is supported for a batch of 1 only")
    return [b.emit("group_norm", ins, out[0], eps=a.plain("eps"), groups=out[0].dims[1]), None, None]


def _instance_norm(b: Sink, name: str, a: Args, out: Shape) -> int:
    a.ignore("momentum", "cudnn_enabled")
    from_input, eps = a.plain("use_input_stats"), a.plain("eps")
    x, weight, bias, mean, var = (a.tensor(n) for n in ("input", "weight", "bias", "running_mean", "running_var"))
    if not from_input:
        return b.emit("batch_norm", [x, weight, bias, mean, var], out, eps=eps)
    if mean != NONE:
        raise Unsupported("instance norm in training mode, which updates its running statistics, is not supported")
    return b.emit(name, [x, weight, bias], out, eps=eps, groups=out.dims[1])


op("conv", aten.convolution.default, lower=_conv)
op("max_pool", aten.max_pool2d_with_indices.default, lower=_max_pool(2))
op("max_pool", aten.max_pool3d.default, aten.max_pool3d_with_indices.default, lower=_max_pool(3))
op("avg_pool", aten.avg_pool2d.default, lower=_avg_pool(2))
op("avg_pool", aten.avg_pool3d.default, lower=_avg_pool(3))
op("adaptive_avg_pool", aten._adaptive_avg_pool2d.default, lower=_adaptive(2))
op("adaptive_avg_pool", aten.adaptive_avg_pool3d.default, aten._adaptive_avg_pool3d.default, lower=_adaptive(3))
op("adaptive_max_pool", aten.adaptive_max_pool1d.default, lower=_adaptive(1))
op("adaptive_max_pool", aten.adaptive_max_pool2d.default, lower=_adaptive(2))
op("adaptive_max_pool", aten.adaptive_max_pool3d.default, lower=_adaptive(3))
op("pad", aten.pad.default, lower=_pad(None))
op("pad", aten.constant_pad_nd.default, lower=_pad("constant"))
for _rank in ("1d", "2d", "3d"):
    op("pad", getattr(aten, f"reflection_pad{_rank}").default, lower=_pad("reflect"))
    op("pad", getattr(aten, f"replication_pad{_rank}").default, lower=_pad("replicate"))
    op("nearest", getattr(aten, f"upsample_nearest{_rank}").vec, lower=_nearest(exact=False))
    op("nearest", getattr(aten, f"_upsample_nearest_exact{_rank}").vec, lower=_nearest(exact=True))
for _kind in ("linear1d", "bilinear2d", "trilinear3d"):
    op("resample", getattr(aten, f"upsample_{_kind}").vec, lower=_resample("linear"))
op("resample", aten.upsample_bicubic2d.vec, lower=_resample("cubic"))
op("group_norm", aten.native_group_norm.default, lower=_group_norm)
op("group_norm", aten.instance_norm.default, lower=_instance_norm)
op("group_norm", aten._native_batch_norm_legit.no_stats, lower=_batch_statistics_norm)
op("batch_norm", aten._native_batch_norm_legit_no_training.default, lower=_batch_norm)
