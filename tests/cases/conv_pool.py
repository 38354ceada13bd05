"""Cases of ops over images: convolutions, pools, padding, resampling, norms of channels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .table import N0, B, N, aten, case, family

H = (5, 21, 8, 21)  # spatial sizes: no kernel below is larger
W = (6, 34, 13, 34)
D = (4, 7, 5, 7)

family("convolutions")
case("conv", nn.Conv1d(3, 5, 3), x="b 3 n", n=(3, 40, 9, 40), b=B)
case("conv", nn.Conv1d(3, 5, 3, padding=1), "1d padded", x="b 3 n", n=N, b=B)
case("conv", nn.Conv1d(1, 4, 70, stride=7, bias=False), "1d long kernel", x="b 1 n", n=(70, 300, 99, 300), b=B)
case("conv", nn.Conv1d(2, 4, 300), "1d deep kernel", x="b 2 n", n=(300, 400, 350, 400), b=B)
case("conv", nn.Conv2d(3, 16, 3, padding=1), "2d", x="b 3 h w", b=B, h=H, w=W)
case("conv", nn.Conv2d(40, 50, 3, stride=2, padding=1, bias=False), "2d stride", x="b 40 h w", b=B, h=H, w=W)
case("conv", nn.Conv2d(3, 4, (3, 2), (1, 3), (2, 0), (2, 1)), "2d each its own", x="b 3 h w", b=B, h=H, w=W)
case("conv", nn.Conv2d(3, 4, 7, 2, 3), "2d larger than the image", x="b 3 h w", b=B, h=(1, 9, 4, 9), w=N)
case("conv", nn.Conv2d(33, 20, 1), "pointwise", x="b 33 h w", b=B, h=H, w=W)
case("conv", nn.Conv2d(300, 7, 1), "pointwise deep", x="b 300 h w", b=B, h=(1, 5, 3, 5), w=(1, 6, 2, 6))
case("conv", nn.Conv2d(8, 20, 1, stride=2), "pointwise stride", x="b 8 h w", b=B, h=H, w=W)
case("conv", nn.Conv2d(3, 270, 3), "2d many rows", x="b 3 h w", b=B, h=H, w=W)
case("conv", nn.Conv2d(12, 12, 3, padding=1, groups=12), "depthwise", x="b 12 h w", b=B, h=H, w=W)
case("conv", nn.Conv2d(6, 12, 5, stride=2, padding=2, groups=6), "depthwise stride", x="b 6 h w", b=B, h=H, w=W)
case("conv", nn.Conv2d(6, 6, 3, stride=3, dilation=2, groups=6), "depthwise dilation", x="b 6 h w", b=B, h=H, w=W)
case("conv", nn.Conv2d(40, 40, 5, padding=2, groups=40), "depthwise wide", x="b 40 h w", b=B, h=H, w=W)
case("conv", nn.Conv2d(20, 20, 3, 2, 2, 2, 20), "depthwise wide stride dilation", x="b 20 h w", b=B, h=H, w=W)
case("conv", nn.Conv1d(48, 48, 7, padding=3, groups=48), "1d depthwise wide", x="b 48 n", n=N, b=B)
case("conv", nn.Conv3d(16, 16, 3, padding=1, groups=16), "3d depthwise", x="b 16 d h w", b=B, d=D, h=H, w=W)
case("conv", nn.Conv2d(3, 70, 5, stride=5), "patches", x="b 3 h w", b=B, h=H, w=W)
case("conv", nn.Conv1d(1, 130, 64, stride=4, padding=30), "1d of one channel", x="b 1 n", n=(8, 300, 99, 300), b=B)
case("conv", nn.Conv2d(2, 33, 9, 3, 4), "2d of few channels", x="b 2 h w", b=B, h=H, w=W)
case("conv", nn.Conv2d(130, 40, (5, 1), padding=(2, 0)), "one column", x="b 130 h 1", b=B, h=H)
case("conv", nn.Conv2d(1, 40, (64, 1), (4, 1)), "one column of one channel", x="b 1 n 1", n=(64, 300, 99, 300), b=B)
case("conv", nn.Conv3d(20, 40, (5, 1, 1)), "3d of one column", x="b 20 h 1 1", b=B, h=H)
case("conv", nn.Conv2d(32, 40, 3, padding=1), "winograd", x="b 32 h w", b=B, h=(1, 21, 8, 21), w=(1, 34, 13, 34))
case(
    "conv",
    nn.Conv2d(48, 70, 3, bias=False),
    "winograd not padded",
    x="b 48 h w",
    b=B,
    h=(3, 21, 8, 21),
    w=(3, 34, 9, 34),
)
case("conv", nn.Conv2d(64, 64, 3, padding=(2, 0)), "winograd padded by 2", x="b 64 h w", b=B, h=H, w=W)
case("conv", nn.Conv2d(32, 32, 3, padding=1), "winograd nan", x="f32 nan: b 32 8 w", b=B, w=W)
case("conv", nn.Conv2d(36, 36, 3, padding=1, groups=9), "groups of 4", x="b 36 h w", b=B, h=H, w=W)
case("conv", nn.Conv2d(40, 40, 3, stride=2, padding=1, groups=5), "groups of 8", x="b 40 h w", b=B, h=H, w=W)
case("conv", nn.Conv1d(18, 18, 5, padding=2, groups=9), "1d groups of 2", x="b 18 n", n=N, b=B)
case("conv", nn.Conv2d(24, 80, 3, padding=1, groups=2), "groups wide", x="b 24 h w", b=B, h=H, w=W)
case("conv", nn.Conv2d(12, 8, 3, padding=1, groups=4), "groups", x="b 12 h w", b=B, h=H, w=W)
case("conv", nn.Conv2d(3, 4, 4, padding="same"), "same", x="b 3 h w", b=B, h=H, w=W)
case("conv", nn.Conv2d(3, 4, 3, padding="same", dilation=2), "same dilation", x="b 3 h w", b=B, h=H, w=W)
case("conv", nn.Conv2d(3, 4, 3, padding="valid"), "valid", x="b 3 h w", b=B, h=H, w=W)
case("conv", nn.Conv3d(3, 7, 3, padding=1), "3d", x="b 3 d h w", b=B, d=D, h=H, w=W)
case("conv", nn.Conv3d(4, 4, (1, 2, 3), stride=(2, 1, 2), groups=2), "3d groups", x="b 4 d h w", b=B, d=D, h=H, w=W)
case("conv", nn.Conv2d(3, 4, 3), "unbatched", x="3 h w", h=H, w=W)
case("conv", nn.Conv1d(3, 4, 3), "unbatched 1d", x="3 w", w=W)
case("conv", nn.Conv2d(3, 4, 3), "empty", x="n 3 8 9", n=N0)
case("conv", nn.Conv2d(3, 4, 3), "nan", x="f32 nan: b 3 8 w", b=B, w=W)
case("conv", F.conv2d, "weights are inputs", x="b 3 h w", k="4 3 3 3", c="4", b=B, h=H, w=W)
case("conv", lambda x, k: F.conv1d(x.transpose(1, 2), k), "not contiguous", x="b n 3", k="4 3 3", b=B, n=W)
case("conv", lambda x, k: F.conv1d(x, k), "kernel is a symbol", x="1 2 40", k="4 2 n", n=N)
case("conv", F.conv2d, "channels are a symbol", x="b n 8 8", k="4 n 3 3", n=N, b=B)
family("transposed convolutions")
case("conv", nn.ConvTranspose1d(3, 5, 4, 2, 1), "1d transposed", x="b 3 n", n=N, b=B)
case("conv", nn.ConvTranspose2d(3, 5, 2, 2), "transposed", x="b 3 h w", b=B, h=H, w=W)
case("conv", nn.ConvTranspose2d(40, 60, 3, 2, 1, output_padding=1), "transposed padded", x="b 40 h w", b=B, h=H, w=W)
case("conv", nn.ConvTranspose2d(3, 5, 3), "transposed stride 1", x="b 3 h w", b=B, h=H, w=W)
case("conv", nn.ConvTranspose2d(3, 4, 3, 2, dilation=2), "transposed dilation", x="b 3 h w", b=B, h=H, w=W)
case("conv", nn.ConvTranspose2d(3, 4, 2, 3, output_padding=2), "transposed with gaps", x="b 3 h w", b=B, h=H, w=W)
case("conv", nn.ConvTranspose2d(6, 4, 3, 2, groups=2), "transposed groups", x="b 6 h w", b=B, h=H, w=W)
case("conv", nn.ConvTranspose2d(6, 6, 4, 2, 1, groups=6), "transposed depthwise", x="b 6 h w", b=B, h=H, w=W)
case("conv", nn.ConvTranspose3d(3, 4, 3, (1, 2, 3), 1, (0, 1, 2)), "3d transposed", x="b 3 d h w", b=B, d=D, h=H, w=W)
case("conv", nn.ConvTranspose2d(3, 5, 2, 2), "transposed unbatched", x="3 h w", h=H, w=W)
family("convolution dtypes")
HALVES = {"f16": 2e-3, "bf16": 1.6e-2}  # the result itself is rounded to 11 and 8 bits
for _t, _limit in HALVES.items():
    case("conv", lambda x, k: F.conv2d(x, k).float(), _t, _limit, x=f"{_t}: b 8 h w", k=f"{_t}: 4 8 3 3", b=B, h=H, w=W)
case("conv", lambda x, k: F.conv2d(x, k).float(), "f64", x="f64: b 8 h w", k="f64: 4 8 3 3", b=B, h=H, w=W)
case("conv", lambda x, k: F.conv_transpose2d(x, k, stride=2).float(), "transposed f64",
     x="f64: b 4 h w", k="f64: 4 8 3 3", b=B, h=H, w=W)  # fmt: skip
for _t in ("u8", "i8", "i16", "i32"):  # their sums wrap
    case("conv", F.conv2d, _t, x=f"{_t}: b 8 h w", k=f"{_t}: 4 8 3 3", c=f"{_t}: 4", b=B, h=H, w=W)
case("conv", lambda x, k: F.conv2d(x, k, groups=4, padding=1), "i64 depthwise",
     x="i64 big: b 4 h w", k="i64 big: 4 1 3 3", b=B, h=H, w=W)  # fmt: skip
case("conv", lambda x, k: F.conv3d(x, k, groups=2, dilation=2, padding=2, stride=(1, 2, 1)), "i64 3d",
     x="i64: b 4 d h w", k="i64 big: 4 2 3 2 3", b=B, d=D, h=H, w=W)  # fmt: skip
case("conv", lambda x, k, c: F.conv_transpose3d(x, k, c, stride=2, padding=1), "i64 3d transposed",
     x="i64 big: b 4 d h w", k="i64 big: 4 2 3 3 2", c="i64: 2", b=B, d=D, h=H, w=W)  # fmt: skip

family("max pools")
case("max_pool", nn.MaxPool1d(3, 2, 1), "1d", x="b 3 w", b=B, w=W)
case("max_pool", nn.MaxPool2d(2), x="b 3 h w", b=B, h=H, w=W)
case("max_pool", nn.MaxPool2d(3, 2, 1), "padded", x="b 3 h w", b=B, h=N, w=W)
case("max_pool", nn.MaxPool2d((2, 3), (1, 2), (1, 0), (2, 1)), "each its own", x="b 3 h w", b=B, h=H, w=W)
case("max_pool", nn.MaxPool2d((2, 3), (2, 1), (1, 0), 2, return_indices=True), "input between taps",
     x="b 3 n w", b=B, n=N, w=(6, 34, 13, 34))  # fmt: skip
case("max_pool_index", nn.MaxPool2d(2, return_indices=True), "indices", x="b 3 h w", b=B, h=H, w=W)
case("max_pool", nn.MaxPool2d(3, 1, 1, return_indices=True), "nan", x="f32 nan: b 3 5 w", b=B, w=W)
case("max_pool", nn.MaxPool2d(2), "unbatched", x="3 h w", h=H, w=W)
case("max_pool", nn.MaxPool2d(2), "empty", x="n 3 8 9", n=N0)
case("max_pool", lambda x: F.max_pool2d(x.transpose(2, 3), 2), "not contiguous", x="b 3 h w", b=B, h=H, w=W)
case("max_pool", nn.MaxPool2d(2, return_indices=True), "i64", x="i64: b 3 h w", b=B, h=H, w=W)
case("max_pool", nn.MaxPool2d(2), "u8", x="u8: b 3 h w", b=B, h=H, w=W)
for _t in ("f16", "bf16", "f64"):
    case("max_pool", nn.MaxPool2d(2, return_indices=True), _t, x=f"{_t}: b 3 h w", b=B, h=H, w=W)
case("max_pool", nn.MaxPool3d(2), "3d", x="b 3 d h w", b=B, d=D, h=H, w=W)
family("average pools")
case("avg_pool", nn.AvgPool1d(3, 2, 1), "1d", x="b 3 w", b=B, w=W)
case("avg_pool", nn.AvgPool2d(2), x="b 3 h w", b=B, h=H, w=W)
case("avg_pool", nn.AvgPool2d((2, 3), (1, 2), (1, 0), divisor_override=5), "divisor", x="b 3 h w", b=B, h=H, w=W)
case("avg_pool", nn.AvgPool2d(2), "unbatched", x="3 h w", h=H, w=W)
case("avg_pool", nn.AvgPool2d(2), "empty", x="n 3 8 9", n=N0)
case("avg_pool", nn.AvgPool2d(2), "nan", x="f32 nan: b 3 5 w", b=B, w=W)
case("avg_pool", nn.LocalResponseNorm(3), "local response norm", x="b 6 h w", b=B, h=H, w=W)
case("avg_pool", lambda x: F.avg_pool2d(x, 3).float(), "f16", HALVES["f16"], x="f16: b 3 h w", b=B, h=H, w=W)
case("adaptive_avg_pool", nn.AdaptiveAvgPool1d(3), "1d", x="b 3 w", b=B, w=W)
case("adaptive_avg_pool", nn.AdaptiveAvgPool2d((3, 2)), x="b 3 h w", b=B, h=N, w=W)
case("adaptive_avg_pool", nn.AdaptiveAvgPool2d((None, 7)), "one dim", x="b 3 h w", b=B, h=H, w=W)
case("adaptive_avg_pool", lambda x: F.adaptive_avg_pool2d(x, (x.size(3), x.size(2))), "to a symbol",
     x="b 3 h w", b=B, h=H, w=W)  # fmt: skip
case("adaptive_avg_pool", nn.AdaptiveAvgPool2d(2), "unbatched", x="3 h w", h=H, w=W)
case("adaptive_avg_pool", nn.AdaptiveAvgPool2d(2), "empty", x="n 3 8 9", n=N0)
case("mean", lambda x: aten._adaptive_avg_pool2d(x, [1, 1]), "pool to one", x="b 3 h w", b=B, h=H, w=W)
case("adaptive_avg_pool", nn.AdaptiveAvgPool3d(2), "3d", x="b 3 d h w", b=B, d=D, h=H, w=W)
case("adaptive_avg_pool", lambda x: aten._adaptive_avg_pool3d(x, [2, 3, 4]), "3d core",
     x="b 3 d h w", b=B, d=D, h=H, w=W)  # fmt: skip
case("adaptive_max_pool", nn.AdaptiveMaxPool1d(3), "1d", x="b 3 w", b=B, w=W)
case("adaptive_max_pool_index", nn.AdaptiveMaxPool2d((3, 2), return_indices=True), x="b 3 h w", b=B, h=H, w=W)
case("adaptive_max_pool", nn.AdaptiveMaxPool2d(2), "nan", x="f32 nan: b 3 5 w", b=B, w=W)
case("adaptive_max_pool", nn.AdaptiveMaxPool3d(2), "3d", x="b 3 d h w", b=B, d=D, h=H, w=W)
for _k, _s, _p in ((2, 2, 0), (2, 2, 1), (2, 3, 1)):  # both ways in which the size that is rounded up is bounded
    case("max_pool", nn.MaxPool2d(_k, _s, _p, ceil_mode=True), f"ceil {_k} {_s} {_p}", x="b 3 h w", b=B, h=N, w=N)
    case("avg_pool", nn.AvgPool2d(_k, _s, _p, True, False), f"ceil {_k} {_s} {_p}", x="b 3 h w", b=B, h=N, w=N)
case("avg_pool", nn.AvgPool1d(2, 2, 1, True), "ceil 1d", x="b 3 n", b=B, n=N)
case("max_pool", nn.MaxPool1d(2, 3, 1, ceil_mode=True), "ceil 1d", x="b 3 n", b=B, n=N)
case("max_pool", nn.MaxPool2d(3, 2, 1, ceil_mode=True), "ceil", x="b 3 h w", b=B, h=H, w=W)
case("max_pool", nn.MaxPool2d(3, 2, 1, 2, True, True), "indices ceil dilation", x="b 3 h w", b=B, h=H, w=W)
case("max_pool", lambda x: aten.max_pool3d_with_indices(x, [3], [2], [1], ceil_mode=True), "3d indices",
     x="b 3 d h w", b=B, d=D, h=H, w=W)  # fmt: skip
case("avg_pool", nn.AvgPool2d(3, 2, 1, ceil_mode=True), "ceil", x="b 3 h w", b=B, h=H, w=W)
case("avg_pool", nn.AvgPool2d(3, 2, 1, True, False), "without padding", x="b 3 h w", b=B, h=H, w=W)
case("avg_pool", nn.AvgPool3d(3, 2, 1, True, False), "3d", x="b 3 d h w", b=B, d=D, h=H, w=W)

family("padding")
case("pad", lambda x: F.pad(x, (1, 2, -1, 3), value=1.5), x="b 3 h w", b=B, h=N, w=W)
case("pad", lambda x: F.pad(x, (0, 0, 0, 0, 2, 1)), "an outer dim", x="b 3 h w", b=B, h=N, w=W)
case("pad", lambda x: F.pad(x, (0, 0, 1, 2), value=1.5), "rows of two", x="n 2", n=N)
case("pad", lambda x: F.pad(x, (0, 0, 1, 2), value=1.5), "rows of four f16", x="f16: n 4", n=N)
case("pad", lambda x: F.pad(x, (-1, -2)), "less", x="b w", b=B, w=W)
case("pad", lambda x: F.pad(x, (1, x.size(0)), value=float("-inf")), "by a size", x="b w", b=B, w=W)
case("pad", lambda x: F.pad(x, (1, 1), value=2**40), "i64", x="i64 big: b w", b=B, w=W)
for _t in ("bool", "u8", "i32", "f16", "bf16", "f64"):
    case("pad", lambda x: F.pad(x, (1, 2, 3, 0), value=1), _t, x=f"{_t}: b h w", b=B, h=N, w=W)
case("pad", lambda x: F.pad(x, (1, 2, 0, 1)), "empty", x="n 4", n=N0)
case("pad", lambda x: F.pad(x.transpose(0, 1), (1, 2)), "not contiguous", x="n b", b=B, n=N)
case("pad", lambda x: aten.constant_pad_nd(x, [2, 1], 3.0) + 1, "core form", x="b w", b=B, w=W)
for _mode in ("reflect", "replicate", "circular"):
    case("pad", lambda x, m=_mode: F.pad(x, (1, 2), mode=m), f"{_mode} 1d", x="b 3 n", b=B, n=(3, 17, 4, 17))
    case("pad", lambda x, m=_mode: F.pad(x, (1, 2, 2, 0), mode=m), f"{_mode} 2d", x="b 3 h w", b=B, h=H, w=W)
    case("pad", lambda x, m=_mode: F.pad(x, (1, 2, 2, 0, 0, 1), mode=m), f"{_mode} 3d",
         x="b 3 d h w", b=B, d=D, h=H, w=W)  # fmt: skip
case("pad", lambda x: F.pad(x, (-1, 2, 2, -2), mode="reflect"), "reflect less", x="b 3 h w", b=B, h=H, w=W)
for _mode in ("reflection", "replication"):
    for _r, _x in ((1, "b 3 w"), (2, "b 3 h w"), (3, "b 3 d h w")):
        _sizes = {s: v for s, v in (("b", B), ("d", D), ("h", H), ("w", W)) if s in _x}
        _pad = getattr(aten, f"{_mode}_pad{_r}d")
        case("pad", lambda x, p=_pad, r=_r: p(x, [1, 2] * r), f"{_mode} {_r}d core", x=_x, **_sizes)
family("resampling")
case("nearest", lambda x: F.interpolate(x, scale_factor=2), "1d", x="b 3 n", b=B, n=N)
case("nearest", lambda x: F.interpolate(x, scale_factor=2), x="b 3 h w", b=B, h=N, w=W)
case("nearest", lambda x: F.interpolate(x, scale_factor=(3, 0.5)), "two factors", x="b 3 h w", b=B, h=N, w=W)
case("nearest", lambda x: F.interpolate(x, scale_factor=1.5), "one and a half", x="b 3 h w", b=B, h=N, w=W)
case("nearest", lambda x: F.interpolate(x, scale_factor=(1.7, 0.6)), "no exact factors", x="b 3 h w", b=B, h=N, w=W)
case("nearest", lambda x: F.interpolate(x, scale_factor=(1.7, 0.6), recompute_scale_factor=True), "by sizes",
     x="b 3 h w", b=B, h=N, w=W)  # fmt: skip
case("nearest", lambda x: F.interpolate(x, size=(7, 5)), "size", x="b 3 h w", b=B, h=N, w=W)
case(
    "nearest",
    lambda x: F.interpolate(x, size=(x.size(3), 2 * x.size(2) + 1)),
    "to a symbol",
    x="b 3 h w",
    b=B,
    h=N,
    w=W,
)
case("nearest", lambda x: F.interpolate(x, scale_factor=2), "3d", x="b 3 d h w", b=B, d=D, h=H, w=W)
case("nearest", lambda x: F.interpolate(x, scale_factor=2), "u8", x="u8: b 3 h w", b=B, h=N, w=W)
case("nearest", lambda x: F.interpolate(x, scale_factor=2), "f16", x="f16: b 3 h w", b=B, h=N, w=W)
case("nearest", lambda x: F.interpolate(x, scale_factor=2), "f64", x="f64: b 3 h w", b=B, h=N, w=W)
case("nearest", lambda x: F.interpolate(x, scale_factor=2), "empty", x="n 3 4 5", n=N0)
case("nearest", lambda x: F.pixel_unshuffle(F.interpolate(F.pixel_shuffle(x, 2), scale_factor=2), 4), "pixel shuffle",
     x="b 8 h w", b=B, h=N, w=W)  # fmt: skip
for _r, _x in ((1, "b 3 w"), (2, "b 3 h w"), (3, "b 3 d h w")):
    _sizes = {s: v for s, v in (("b", B), ("d", D), ("h", H), ("w", W)) if s in _x}
    case("nearest", lambda x: F.interpolate(x, scale_factor=1.5, mode="nearest-exact"), f"exact {_r}d", x=_x, **_sizes)
    _mode = ("linear", "bilinear", "trilinear")[_r - 1]
    case("resample", lambda x, m=_mode: F.interpolate(x, scale_factor=2, mode=m), _mode, x=_x, **_sizes)
case("resample", lambda x: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True), "corners",
     x="b 3 h w", b=B, h=N, w=W)  # fmt: skip
case("resample", lambda x: F.interpolate(x, size=(9, 7), mode="bilinear"), "size", x="b 3 h w", b=B, h=N, w=W)
case("resample", lambda x: F.interpolate(x, size=(1, 7), mode="bilinear", align_corners=True), "size corners",
     x="b 3 h w", b=B, h=N, w=W)  # fmt: skip
case("resample", lambda x, y: F.interpolate(x, size=y.shape[2:], mode="bilinear"), "to another's size",
     x="b 3 h w", y="b 3 n m", b=B, h=H, w=W, n=N, m=(2, 9, 3, 9))  # fmt: skip
case("resample", lambda x: F.interpolate(x, scale_factor=0.5, mode="bilinear"), "down", x="b 3 h w", b=B, h=H, w=W)
case("resample", lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), "bicubic", x="b 3 h w", b=B, h=N, w=W)
case("resample", lambda x: F.interpolate(x, size=(9, 7), mode="bicubic", align_corners=True), "bicubic corners",
     x="b 3 h w", b=B, h=N, w=W)  # fmt: skip
case("resample", lambda x: F.interpolate(x, scale_factor=2, mode="bilinear").float(), "f16", HALVES["f16"],
     x="f16: b 3 h w", b=B, h=N, w=W)  # fmt: skip
case("resample", lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), "empty", x="n 3 4 5", n=N0)
family("norms of channels")


def _random(norm: nn.Module) -> nn.Module:
    """With weights and statistics that are not 0 and 1."""
    for v in (*norm.parameters(), *norm.buffers()):
        if v.is_floating_point():
            v.data = torch.rand_like(v) + 0.5
    return norm.eval()


case("group_norm", _random(nn.GroupNorm(3, 6)), x="b 6 h w", b=B, h=N, w=W)
case("group_norm", nn.GroupNorm(2, 6, affine=False), "no weight", x="b 6 w", b=B, w=W)
case("group_norm", _random(nn.GroupNorm(2, 6)), "vectors", x="n 6", n=N)
case("group_norm", lambda x: F.group_norm(x + 1000, 2), "far from 0", near=3e-4,  # a last place of 1000 is 6e-5
     x="b 6 w", b=B, w=W)  # fmt: skip
case("group_norm", _random(nn.GroupNorm(3, 6)), "empty", x="n 6 4", n=N0)
case("group_norm", _random(nn.GroupNorm(3, 6)), "nan", x="f32 nan: b 6 w", b=B, w=W)
case("group_norm", lambda x: F.group_norm(x, 2).float(), "f64", x="f64: b 6 w", b=B, w=W)
case("group_norm", lambda x: F.group_norm(x, 2).float(), "bf16", HALVES["bf16"], x="bf16: b 6 w", b=B, w=W)
case("group_norm", _random(nn.InstanceNorm1d(6)), "instance 1d", x="b 6 n", b=B, n=(2, 17, 3, 17))
case("group_norm", _random(nn.InstanceNorm2d(6, affine=True)), "instance", x="b 6 h w", b=B, h=H, w=W)
case("group_norm", lambda x: torch.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5)[0], "one batch",
     x="1 6 w", w=W)  # fmt: skip
case("batch_norm", _random(nn.BatchNorm2d(6)), x="b 6 h w", b=B, h=N, w=W)
case("batch_norm", _random(nn.BatchNorm1d(6)), "vectors", x="n 6", n=N)
case("batch_norm", _random(nn.BatchNorm3d(6, affine=False)), "no weight", x="b 6 d h w", b=B, d=D, h=H, w=W)
case("batch_norm", _random(nn.BatchNorm2d(6)), "empty", x="n 6 3 4", n=N0)
case("batch_norm", _random(nn.BatchNorm1d(6)), "nan", x="f32 nan: b 6 w", b=B, w=W)
case(
    "batch_norm",
    _random(nn.InstanceNorm2d(6, affine=True, track_running_stats=True)),
    "instance",
    x="b 6 h w",
    b=B,
    h=H,
    w=W,
)
