"""Cases of attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from keepdim.ir.quant import new_state
from keepdim.ir.torch_ops import cached_attention

from .table import N0, B, N, case, family

L = (1, 130, 33, 130)  # more than a tile of keys
M = (2, 70, 9, 70)
LONG = (1, 700, 33, 700)  # more than a part of keys
FEW = (1, 4, 2, 4)


def sdpa(**more: Any) -> Callable[..., torch.Tensor]:
    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *mask: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, *mask, **more)

    return run


def heads(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """As encoders have it: q, k and v are views of one product, and the result is one again."""
    q, k, v = (t.unflatten(-1, (3, 8)).transpose(1, 2) for t in x.split(24, -1))
    return F.scaled_dot_product_attention(q, k, v, mask[:, None, None, :]).transpose(1, 2).flatten(2)


def seen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The first query sees nothing."""
    row = torch.full((1, mask.size(-1)), -float("inf"))
    return F.scaled_dot_product_attention(q, k, v, torch.cat([row, mask[1:]]))


def masked_twice(q: torch.Tensor, mask: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Two ways to mask, of which each asks torch.export for other sizes."""
    return F.scaled_dot_product_attention(seen(q, q, q, mask), q, q, attn_mask=keys)


family("attention")
case("sdpa", sdpa(), q="b 2 n 8", k="b 2 n 8", v="b 2 n 8", n=L, b=B)
case("sdpa", sdpa(), "other lengths", q="b 2 n 8", k="b 2 m 8", v="b 2 m 5", n=L, m=M, b=B)
case("sdpa", sdpa(scale=0.5), "scale", q="b 2 n 8", k="b 2 n 8", v="b 2 n 8", n=N, b=B)
case("sdpa", sdpa(is_causal=True), "causal", q="b 2 n 8", k="b 2 n 8", v="b 2 n 8", n=L, b=B)
case("sdpa", sdpa(is_causal=True), "causal, other lengths", q="2 3 n 8", k="2 3 m 8", v="2 3 m 8", n=L, m=M)
case("sdpa", sdpa(), "a mask", q="b 2 n 8", k="b 2 m 8", v="b 2 m 8", mask="b 2 n m", n=L, m=M, b=B)
case("sdpa", sdpa(), "a mask for all", q="b 2 n 8", k="b 2 m 8", v="b 2 m 8", mask="n m", n=L, m=M, b=B)
case("sdpa", sdpa(), "a mask of keys", q="b 2 n 8", k="b 2 m 8", v="b 2 m 8", mask="b 1 1 m", n=L, m=M, b=B)
case("sdpa", sdpa(), "a mask of queries", q="b 2 n 8", k="b 2 m 8", v="b 2 m 8", mask="n 1", n=L, m=M, b=B)
case("sdpa", sdpa(), "a bool mask", q="b 2 n 8", k="b 2 m 8", v="b 2 m 8", mask="bool: b 1 n m", n=L, m=M, b=B)
case("sdpa", sdpa(), "a bool mask of keys", q="b 2 n 8", k="b 2 m 8", v="b 2 m 8", mask="bool: b 1 1 m", n=L, m=M, b=B)
case("sdpa", sdpa(), "a mask with infinities", q="n 8", k="m 8", v="m 8", mask="f32 nan: n m", n=N, m=M)
case("sdpa", seen, "a query that sees nothing", q="n 8", k="m 8", v="m 8", mask="n m", n=L, m=M)
case("sdpa", masked_twice, "masked twice", q="n 8", mask="n n", keys="bool: 1 n", n=L)
case("sdpa", sdpa(enable_gqa=True), "shared heads", q="b 6 n 8", k="b 2 m 8", v="b 2 m 8", n=L, m=M, b=B)
case(
    "sdpa", sdpa(enable_gqa=True), "shared heads and a mask",
    q="b 6 n 8", k="b 2 m 8", v="b 2 m 8", mask="b 6 n m", n=N, m=M, b=B,
)  # fmt: skip
case(
    "sdpa",
    sdpa(enable_gqa=True, is_causal=True),
    "shared heads, causal",
    q="b 4 n 8",
    k="b 2 n 8",
    v="b 2 n 8",
    n=L,
    b=B,
)
case("sdpa", sdpa(), "rank 2", q="n 16", k="m 16", v="m 16", n=N, m=M)
case("sdpa", sdpa(), "rank 3", q="b n 16", k="b m 16", v="b m 16", n=N, m=M, b=B)
case("sdpa", sdpa(), "rank 5", q="2 b 3 n 4", k="2 b 3 m 4", v="2 b 3 m 4", mask="bool: b 1 n m", n=N, m=M, b=B)
case("sdpa", sdpa(), "width is a symbol", q="b 2 n m", k="b 2 n m", v="b 2 n 5", n=N, m=M, b=B)
case("sdpa", sdpa(), "no width", q="2 m n", k="2 m n", v="2 m 5", n=N0, m=M)
case("sdpa", sdpa(), "queries for all", q="2 n 8", k="b 2 m 8", v="b 2 m 8", n=L, m=M, b=B)
case("sdpa", sdpa(), "one batch and head of queries", q="1 1 n 8", k="b 2 m 8", v="b 2 m 8", n=L, m=M, b=B)
case("sdpa", sdpa(enable_gqa=True), "few queries", q="b 6 1 40", k="b 2 m 40", v="b 2 m 24", m=LONG, b=B)
case("sdpa", sdpa(), "few queries, odd", q="2 n 19", k="2 m 19", v="2 m 7", n=FEW, m=LONG)
case("sdpa", sdpa(), "few queries, a mask", q="b 3 n 16", k="b 3 m 16", v="b 3 m 8", mask="b 3 n m", n=FEW, m=LONG, b=B)
case("sdpa", sdpa(), "few queries, a bool mask", q="b 2 8", k="b m 8", v="b m 8", mask="bool: b 1 m", m=LONG, b=B)
case("sdpa", seen, "few queries, one sees nothing", q="n 8", k="m 8", v="m 8", mask="n m", n=FEW, m=LONG)
case("sdpa", sdpa(is_causal=True), "few queries, causal", q="2 n 8", k="2 m 8", v="2 m 8", n=FEW, m=LONG)
case("sdpa", sdpa(), "few queries, nan", q="2 3 8", k="f32 nan: 2 m 8", v="f32 nan: 2 m 8", m=LONG)
case("sdpa", sdpa(), "odd", q="b 3 n 7", k="b 3 n 7", v="b 3 n 19", n=L, b=B)
case("sdpa", sdpa(), "wide", q="2 n 200", k="2 n 200", v="2 n 200", n=L)
case("sdpa", heads, "of views", x="b n 72", mask="bool: b n", n=L, b=B)
case("sdpa", sdpa(), "empty", q="b 2 n 8", k="b 2 n 8", v="b 2 n 8", n=N0, b=B)
case("sdpa", sdpa(), "no queries", q="2 n 8", k="2 m 8", v="2 m 8", n=N0, m=M)
case("sdpa", sdpa(), "no keys", q="2 m 8", k="2 n 8", v="2 n 8", n=N0, m=M)
case("sdpa", sdpa(), "nan in queries", q="f32 nan: n 8", k="n 8", v="n 8", n=L)
case("sdpa", sdpa(), "nan in keys", q="n 8", k="f32 nan: n 8", v="n 8", mask="bool: n n", n=N)
case("sdpa", sdpa(), "nan in values", q="n 8", k="n 8", v="f32 nan: n 8", n=N)
case(
    "sdpa", lambda q, k, v: sdpa()(q, k, v).float(), "f16", near=2e-3,  # eager rounds its weights to f16
    q="f16: 2 n 8", k="f16: 2 n 8", v="f16: 2 n 8", n=N,
)  # fmt: skip
case(
    "sdpa", lambda q, k, v, m: sdpa()(q, k, v, m).float(), "bf16", near=1.6e-2,  # eager rounds its weights to bf16
    q="bf16: 2 n 8", k="bf16: 2 n 8", v="bf16: 2 n 8", mask="bf16: n n", n=N,
)  # fmt: skip


class Cached(nn.Module):
    """Attention over a cache, some rows of it filled."""

    def __init__(
        self,
        heads: int,
        dtype: str = "f32",
        turned: bool = False,
        rows: int = 40,
        widths: tuple[int, int] = (8, 6),
        batch: int = 1,
        **more: Any,
    ):
        super().__init__()
        self.more, self.turned = more, turned
        for name, width in zip(("keys", "values"), widths, strict=True):
            self.register_buffer(name, new_state((batch, heads, rows, width), dtype))

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        if self.turned:
            half = q.size(3) // 2
            turns = torch.tensor([10 ** (-3 * i / half) for i in range(half)] * 2)
            angle = (position + torch.arange(q.size(2)))[:, None] * turns
            q, k = (x * angle.cos() + torch.cat([-x[..., half:], x[..., :half]], -1) * angle.sin() for x in (q, k))
        return cached_attention(q, k, v, self.keys, self.values, position, 0.3, **self.more)


family("state")
_QKV = {"q": "1 4 n 8", "k": "1 2 n 8", "v": "1 2 n 6", "position": "i64 <20: 1", "n": N}
case("cached_attention", Cached(2), **_QKV)
case("cached_attention", Cached(2, window=5), "window", **_QKV)
case("cached_attention", Cached(2, turned=True), "turned", **_QKV)
case("cached_attention", Cached(2, "f16"), "f16", **_QKV)
case("cached_attention", Cached(2, "bf16"), "bf16", **_QKV)
case("cached_attention", Cached(4), "as many heads", **{**_QKV, "k": "1 4 n 8", "v": "1 4 n 6"})
_BATCH = {**_QKV, "q": "3 4 n 8", "k": "3 2 n 8", "v": "3 2 n 6"}
case("cached_attention", Cached(2, batch=3, turned=True), "batch", **_BATCH)
_WIDE = {"q": "1 6 n 64", "k": "1 2 n 64", "v": "1 2 n 32", "position": "i64 <700: 1", "n": (1, 17, 2, 1)}
_LONG = {"rows": 720, "widths": (64, 32)}
case("cached_attention", Cached(2, **_LONG), "long", **_WIDE)
case("cached_attention", Cached(2, window=300, **_LONG), "long, window", **_WIDE)
case("cached_attention", Cached(2, "f16", **_LONG), "long, f16", **_WIDE)
case("cached_attention", Cached(2, "bf16", **_LONG), "long, bf16", **_WIDE)
case("cached_attention", Cached(2, "q8_0", **_LONG), "long, q8_0", **_WIDE)
case(
    "cached_attention", Cached(2, "q8_0", turned=True, **_LONG), "long, q8_0, turned",
    near=8e-3,  # a key that is turned by other roundings can be the next one of 255 steps
    **_WIDE,
)  # fmt: skip
