"""Cases of samples of an image, patches added up, distances between points, and bags of a table's rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .table import N0, B, N, aten, case, family

H = (3, 21, 8, 21)
W = (2, 34, 13, 34)
HALVES = {"f16": 2e-3, "bf16": 1.6e-2}  # the result itself is rounded to 11 and 8 bits
PLACES = 1e-4  # a place among 34 pixels is known to some last places of 34

for _mode in ("bilinear", "nearest", "bicubic"):
    family(f"grid samples, {_mode}")
    for _pad in ("zeros", "border", "reflection"):
        for _corners in (False, True):
            case(
                "grid_sample",
                lambda x, g, m=_mode, p=_pad, c=_corners: F.grid_sample(x, 1.5 * g, m, p, c),
                f"{_mode} {_pad}{' corners' if _corners else ''}",
                PLACES,
                x="b 3 h w",
                g="b n 5 2",
                b=B,
                h=H,
                w=W,
                n=N,
            )
    for _t in ("f64", *HALVES):
        # Places that are as exact in few bits.
        case("grid_sample", lambda x, g, m=_mode: F.grid_sample(x, (g * 4).round() / 8, m, align_corners=True),
             f"{_mode} {_t}", HALVES.get(_t), x=f"{_t}: b 3 9 17", g=f"{_t}: b n 5 2", b=B, n=N)  # fmt: skip
    case("grid_sample", lambda x, g, m=_mode: F.grid_sample(x, g, m, align_corners=False), f"{_mode} nan",
         x="f32 nan: b 3 h w", g="b n 5 2", b=B, h=H, w=W, n=N)  # fmt: skip
    case("grid_sample", lambda x, g, m=_mode: F.grid_sample(x, g, m, align_corners=False), f"{_mode} nan in the grid",
         x="b 3 h w", g="f32 nan: b n 5 2", b=B, h=H, w=W, n=N)  # fmt: skip
    for _pad in ("border", "reflection"):
        case("grid_sample", lambda x, g, m=_mode, p=_pad: F.grid_sample(x, g, m, p, align_corners=False),
             f"{_mode} {_pad} nan in the grid", x="b 3 h w", g="f32 nan: b n 5 2", b=B, h=H, w=W, n=N)  # fmt: skip
family("affine grids")
for _r, _x in ((2, "b 3 h w"), (3, "b 3 4 h w")):
    case("grid_sample", lambda x, t: F.grid_sample(x, F.affine_grid(t, x.shape, False), align_corners=False),
         f"affine {_r}d", PLACES, x=_x, t=f"b {_r} {_r + 1}", b=B, h=N, w=W)  # fmt: skip
    case("grid_sample",  # F.affine_grid asks whether a size is 1 if corners are aligned
         lambda x, t: F.grid_sample(x, torch.affine_grid_generator(t, x.shape, True), align_corners=True),
         f"affine corners {_r}d", PLACES, x=_x, t=f"b {_r} {_r + 1}", b=B, h=N, w=W)  # fmt: skip
family("grid samples")
case("grid_sample", lambda x, g: F.grid_sample(x, g, align_corners=False), "many channels", PLACES,
     x="b 130 h w", g="b n 5 2", b=B, h=H, w=W, n=N)  # fmt: skip
case("grid_sample", lambda x, g: F.grid_sample(x, g, align_corners=False), "many places", PLACES,
     x="1 2 h w", g="1 n 33 2", h=H, w=W, n=N)  # fmt: skip
case("grid_sample", lambda x, g: F.grid_sample(x, g, align_corners=False), "empty", x="n 3 4 5", g="n 3 2 2", n=N0)
case("grid_sample", lambda x, g: F.grid_sample(x, g, align_corners=False), "no places", x="b 3 4 5", g="b n 2 2",
     b=B, n=N0)  # fmt: skip
case("grid_sample", lambda x, g: F.grid_sample(x, g, padding_mode="reflection", align_corners=True), "one pixel",
     x="b 3 n w", g="b 4 2 2", b=B, n=N, w=(1, 5, 3, 5))  # fmt: skip
case("grid_sample", lambda x, g: F.grid_sample(x.transpose(2, 3), g.permute(0, 2, 3, 1), align_corners=False),
     "not contiguous", x="b 3 h w", g="b 2 n 5", b=B, h=H, w=W, n=N)  # fmt: skip
for _mode in ("bilinear", "nearest"):
    for _pad in ("zeros", "border", "reflection"):
        case("grid_sample", lambda x, g, m=_mode, p=_pad: F.grid_sample(x, 1.5 * g, m, p, align_corners=False),
             f"3d {_mode} {_pad}", PLACES, x="b 3 d h w", g="b n 3 2 3", b=B, d=(4, 7, 5, 7), h=H, w=W,
             n=N)  # fmt: skip

family("patches")
case("fold", lambda x: F.fold(x, (6, 7), (2, 3)), x="b 12 25", b=B)
case("fold", lambda x: F.fold(x, (6, 7), (2, 3), dilation=(2, 1), padding=(1, 2), stride=(2, 1)), "each its own",
     x="b 12 27", b=B)  # fmt: skip
case("fold", lambda x: F.fold(x, (9, 12), 3, stride=3), "patches", x="b 27 12", b=B)
case("fold", lambda x: F.fold(x, (9, 8), 2, stride=3), "with gaps", x="b 12 9", b=B)
case("fold", lambda x: F.fold(x, (6, 7), (2, 3)), "unbatched", x="6*n 25", n=N)
case("fold", lambda x: F.fold(x, (6, 7), (2, 3)), "empty", x="n 12 25", n=N0)
case("fold", lambda x: F.fold(x, (6, 7), (2, 3)), "nan", x="f32 nan: b 12 25", b=B)
case("fold", lambda x: F.fold(x.transpose(1, 2), (6, 7), (2, 3)), "not contiguous", x="b 25 12", b=B)
case("fold", lambda x: F.fold(x, (1, x.size(2) + 2), (1, 3)), "a row of patches", x="b 6 n", b=B, n=N)
case("fold", lambda x: F.fold(F.unfold(x, 3, padding=1), x.shape[2:], 3, padding=1), "of an unfold",
     x="b 3 h w", b=B, h=H, w=(3, 34, 13, 34))  # fmt: skip
for _t in ("f64", *HALVES):
    case("fold", lambda x: F.fold(x, (6, 7), (2, 3)).float(), _t, HALVES.get(_t), x=f"{_t}: b 12 25", b=B)

family("distances")
INF = float("inf")
EXACT = "donot_use_mm_for_euclid_dist"
for _p in (0.0, 0.5, 1.0, 2.0, 3.0, INF):
    case("cdist", lambda x, y, p=_p: torch.cdist(x, y, p), f"p {_p}", x="n 9", y="m 9", n=N, m=(1, 70, 33, 70))
    case("cdist", lambda x, y, p=_p: torch.cdist(x, y, p), f"p {_p} f64", x="f64: n 9", y="f64: 12 9", n=N)
    # In the norm of the largest, torch's own result depends on where in the point the NaN is.
    _known = (lambda x: x) if _p < INF else (lambda x: torch.nan_to_num(x, 0, INF, -INF))
    case("cdist", lambda x, y, p=_p, f=_known: torch.cdist(f(x), y, p, EXACT), f"p {_p} nan", x="f32 nan: n 9",
         y="30 9", n=N)  # fmt: skip
    case("pdist", lambda x, p=_p: aten._pdist_forward(x, p), f"p {_p}", x="n 9", n=(2, 70, 33, 70))
case("cdist", lambda x, y: torch.cdist(x.round(), y.round(), 0.0), "equal numbers", x="n 9", y="5 9", n=N)
case("cdist", lambda x, y: torch.cdist(x + 100, x + 100 + y * 1e-4, compute_mode=EXACT), "near points",
     x="n 9", y="n 9", n=(1, 60, 20, 60))  # fmt: skip
case("cdist", torch.cdist, "batch", x="b n 4", y="b m 4", b=B, n=N, m=(1, 40, 7, 40))
case("cdist", torch.cdist, "one batch for all", x="b 3 n 4", y="3 5 4", b=B, n=N)
case("cdist", lambda x, y: torch.cdist(x, y[:1], 1.0), "one of a batch", x="b n 4", y="b 6 4", b=B, n=N)
case("cdist", lambda x, y: torch.cdist(x, y, 1.0), "long points", x="n 700", y="5 700", n=(1, 60, 20, 60))
case("cdist", lambda x, y: torch.cdist(x, y, 1.0), "size is a symbol", x="7 n", y="5 n", n=N0)
case("cdist", torch.cdist, "empty", x="n 4", y="5 4", n=N0)
case("cdist", lambda x, y: torch.cdist(x.t(), y.transpose(0, 1)), "not contiguous", x="4 n", y="4 7", n=N)
family("distances in a set")
case("pdist", F.pdist, "default", x="n 4", n=(3, 60, 9, 60))
case("pdist", F.pdist, "f64", x="f64: n 4", n=(3, 60, 9, 60))
case("pdist", F.pdist, "nan", x="f32 nan: n 4", n=(3, 60, 9, 60))
case("pdist", F.pdist, "one point", x="1 4")
case("pdist", F.pdist, "points of nothing", x="5 0")


def _starts(lengths: torch.Tensor) -> torch.Tensor:
    return lengths.cumsum(0) - lengths


def _ends(lengths: torch.Tensor) -> torch.Tensor:
    return F.pad(lengths.cumsum(0), (1, 0))


family("bags")
for _mode in ("sum", "mean", "max"):
    case("embedding_bag", nn.EmbeddingBag(9, 6, mode=_mode), _mode, x="i64 <9: b n", b=B, n=N)
    case("embedding_bag", nn.EmbeddingBag(9, 6, mode=_mode, padding_idx=2), f"{_mode} padding",
         x="i64 <9: b n", b=B, n=N)  # fmt: skip
    case("embedding_bag", lambda i, k, w, m=_mode: F.embedding_bag(i, w, _starts(k), mode=m), f"{_mode} offsets",
         i="i64 <9: 3*n", k="i64 <3: n", w="9 6", n=N)  # fmt: skip
    case("embedding_bag", lambda i, k, w, m=_mode: F.embedding_bag(i, w, _starts(k), mode=m, padding_idx=-2),
         f"{_mode} offsets padding", i="i64 <9: 3*n", k="i64 <3: n", w="9 6", n=N)  # fmt: skip
    case("embedding_bag", lambda i, w, m=_mode: F.embedding_bag(i, w, mode=m), f"{_mode} wide rows",
         i="i64 <9: b n", w="9 1300", b=B, n=N)  # fmt: skip
    case("embedding_bag", lambda i, w, m=_mode: F.embedding_bag(i, w, mode=m), f"{_mode} nan",
         i="i64 <5: b n", w="f32 nan: 5 6", b=B, n=N)  # fmt: skip
    for _t in ("f64", *HALVES):
        case("embedding_bag", lambda i, w, m=_mode: F.embedding_bag(i, w, mode=m).float(), f"{_mode} {_t}",
             HALVES.get(_t), i="i64 <9: b n", w=f"{_t}: 9 6", b=B, n=N)  # fmt: skip
case("embedding_bag", lambda i, w, f: F.embedding_bag(i, w, mode="sum", per_sample_weights=f), "factors",
     i="i64 <9: b n", w="9 6", f="b n", b=B, n=N)  # fmt: skip
case("embedding_bag", lambda i, k, w, f: F.embedding_bag(i, w, _starts(k), mode="sum", per_sample_weights=f,
                                                         padding_idx=0), "factors padding",
     i="i64 <9: 3*n", k="i64 <3: n", w="9 6", f="3*n", n=N)  # fmt: skip
case("embedding_bag", lambda i, k, w: F.embedding_bag(i, w, _ends(k), mode="sum", include_last_offset=True), "last",
     i="i64 <9: 3*n", k="i64 <3: n", w="9 6", n=N)  # fmt: skip
case("embedding_bag", lambda i, k, w: F.embedding_bag(i, w, _ends(k), include_last_offset=True), "last before the end",
     i="i64 <9: 3*n", k="i64 <3: n", w="9 6", n=N)  # fmt: skip
case("embedding_bag", lambda i, k, w: F.embedding_bag(i, w, _ends(k + 2), include_last_offset=True), "last mean",
     i="i64 <9: 2*n", k="i64 <1: n", w="9 6", n=N)  # fmt: skip
case("embedding_bag", lambda i, w: F.embedding_bag(i, w, mode="sum"), "by i32", i="i32 <9: b n", w="9 6", b=B, n=N)
case("embedding_bag", lambda i, k, w: F.embedding_bag(i, w, _starts(k)), "no indices in a bag",
     i="i64 <9: n", k="i64 <1: b", w="9 6", n=N, b=B)  # fmt: skip
case("embedding_bag", lambda i, k, w: F.embedding_bag(i, w, _starts(k)), "no bags", i="i64 <9: 0", k="i64 <1: n",
     w="9 6", n=N0)  # fmt: skip
case("embedding_bag", lambda i, w: aten._embedding_bag(w, i, torch.zeros(1, dtype=torch.int64))[0], "core form",
     i="i64 <9: n", w="9 6", n=N)  # fmt: skip
case("embedding_bag", lambda i, w: F.embedding_bag(i, w.t()), "not contiguous", i="i64 <9: b n", w="6 9", b=B, n=N)
