"""Attention as models write it: projections around it, whole or taken apart, fused or not; always one delegate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim, export

import keepdim
from keepdim import passes
from support.engines import BACKENDS

HEADS, WIDTH, LONGEST = 4, 16, 64
SIZES = (1, 2, 17, LONGEST, 33, 5, 17)  # traced at 7; both ends, and back to an earlier one


class Bare(nn.Module):
    """Queries, keys and values of x, attention, and the projection back."""

    def __init__(self, kv_heads: int = HEADS, mask: str = "", **more: Any):
        super().__init__()
        self.kv_heads, self.mask, self.more = kv_heads, mask, more
        self.q, self.out = nn.Linear(HEADS * WIDTH, HEADS * WIDTH), nn.Linear(HEADS * WIDTH, HEADS * WIDTH)
        self.k, self.v = (nn.Linear(HEADS * WIDTH, kv_heads * WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            f(x).unflatten(-1, (heads, WIDTH)).transpose(1, 2)
            for f, heads in ((self.q, HEADS), (self.k, self.kv_heads), (self.v, self.kv_heads))
        )
        mask, place = None, torch.arange(x.shape[1])
        if self.mask == "bool":
            mask = (place[:, None] >= place) | (place == 0)
        elif self.mask == "float":
            mask = (place[:, None] - place).abs() * -0.25
        y = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=self.kv_heads != HEADS, **self.more)
        return self.out(y.transpose(1, 2).flatten(2))


FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "bool mask": {"mask": "bool"},
    "float mask": {"mask": "float"},
    "shared heads": {"kv_heads": 2},
    "shared heads, causal, scale": {"kv_heads": 2, "is_causal": True, "scale": 0.2},
    "shared heads, bool mask": {"kv_heads": 1, "mask": "bool"},
}


@pytest.mark.parametrize("way", ["whole", "decomposed, nothing fused"])
@pytest.mark.parametrize("form", FORMS)
def test_bare(form: str, way: str, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Bare(**FORMS[form]).eval().requires_grad_(False)
    x = torch.randn(2, 7, HEADS * WIDTH)
    shapes = ({0: Dim("batch", min=1, max=4), 1: Dim("length", min=1, max=LONGEST)},)
    program = export(model, (x,), dynamic_shapes=shapes, strict=False)
    if way != "whole":
        program = program.run_decompositions()
        assert not any("scaled_dot_product" in str(n.target) for n in program.graph.nodes)
        monkeypatch.setattr(passes, "PASSES", ())
    lowered = keepdim.lower(program, engine=engine)
    assert (lowered.report.delegates, lowered.report.remaining) == ([BACKENDS[engine]], {})
    for n in SIZES:
        for batch in (1, 4):
            x = torch.randn(batch, n, HEADS * WIDTH)
            torch.testing.assert_close(lowered(x), model(x), atol=1e-5, rtol=0)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_qwen3_without_a_cache(attention: str, engine: str) -> None:
    """Rope, norms of heads, shared heads and a causal mask over the whole sequence."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_hidden_layers=2,
        intermediate_size=128, vocab_size=256, max_position_embeddings=LONGEST, attn_implementation=attention,
    )  # fmt: skip
    model = transformers.Qwen3ForCausalLM(config).eval().requires_grad_(False)

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.model(input_ids=tokens, use_cache=False).logits

    tokens = torch.randint(256, (1, 7))
    shapes = ({1: Dim("length", min=1, max=LONGEST)},)
    lowered = keepdim.lower(Logits(), (tokens,), dynamic_shapes=shapes, engine=engine)
    assert (lowered.report.delegates, lowered.report.remaining) == ([BACKENDS[engine]], {})
    for n in SIZES:
        tokens = torch.randint(256, (1, n))
        torch.testing.assert_close(lowered(tokens), Logits()(tokens), atol=1e-5, rtol=0)


def padded(kind: str, batch: int, n: int) -> torch.Tensor:
    """A mask [batch, 1, 1 or n, n] that hides keys at the ends, each text of the batch its own number of them."""
    place, hidden = torch.arange(n), torch.arange(batch)[:, None, None, None] * n // batch  # of the first text none
    seen = {
        "behind": place < n - hidden,
        "before": place >= hidden,
        "on both sides": (place >= hidden // 2) & (place < n - hidden // 2),
        "all of a text": (place < n).expand(batch, 1, 1, n) & (hidden == 0),
        "later ones": place <= place[:, None] - hidden,
    }
    return seen[kind]


class Masked(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask)


class ByHand(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (q @ k.transpose(-1, -2) * 0.25 + mask).softmax(-1) @ v


@pytest.mark.parametrize("hidden_by", ["False", "-inf", "finfo.min", "-inf, by hand", "finfo.min, by hand"])
@pytest.mark.parametrize("kind", ["behind", "before", "on both sides", "all of a text", "later ones"])
def test_hidden_keys(kind: str, hidden_by: str, engine: str) -> None:
    """Hidden keys may be left out only where that changes nothing: a NaN and an infinity among them flow on."""
    value = {"False": None, "-inf": -float("inf"), "finfo.min": torch.finfo(torch.float32).min}[hidden_by.split(",")[0]]
    model = ByHand() if "by hand" in hidden_by else Masked()

    def inputs(batch: int, n: int) -> list[torch.Tensor]:
        mask = padded(kind, batch, n)
        if value is not None:
            mask = torch.zeros(()).where(mask, value)
        return [*torch.randn(3, batch, HEADS, n, WIDTH), mask]

    torch.manual_seed(0)
    batch, n = Dim("batch", min=2, max=4), Dim("n", min=2, max=300)
    rows = {2: n} if kind == "later ones" else {}
    shapes = (*[{0: batch, 2: n}] * 3, {0: batch, **rows, 3: n})
    lowered = keepdim.lower(export(model, tuple(inputs(3, 19)), dynamic_shapes=shapes), engine=engine)
    for batch_size, length in ((2, 2), (4, 300), (3, 70), (2, 131), (4, 300)):
        args = inputs(batch_size, length)
        torch.testing.assert_close(lowered(*args), model(*args), atol=1e-5, rtol=0, equal_nan=True)
    for place, number in ((1, float("nan")), (2, float("nan")), (1, float("inf")), (2, -float("inf")), (0, 1e25)):
        for key in (0, 130):  # the first and the last
            args = inputs(2, 131)
            args[place][-1, 0, key, 0] = number
            got, want = lowered(*args), model(*args)
            if place:
                torch.testing.assert_close(got, want, atol=1e-5, rtol=0, equal_nan=True)
            else:  # scores of 1e25 leave one key, whose value is the result
                torch.testing.assert_close(got.isnan(), want.isnan())


def test_hidden_keys_with_more_threads(threads: Callable[[int], None]) -> None:
    """Which keys are left out, and so the last bits, do not depend on who computes them."""

    def inputs(n: int, number: float) -> tuple[torch.Tensor, ...]:
        q, k, v = torch.randn(3, 1, 1, n, WIDTH)
        q[0, 0, 0, 0] = number
        return q, k, v, (torch.arange(n) < n - 5).expand(1, 1, 1, n)

    n = Dim("n", min=6, max=400)
    program = export(Masked(), inputs(23, 0.0), dynamic_shapes=({2: n}, {2: n}, {2: n}, {3: n}))
    lowered = keepdim.lower(program)
    for number in (0.5, 1e25, float("inf"), float("nan")):
        for length in (70, 257, 397):
            args, results = inputs(length, number), []
            for count in (1, 2, 3):
                threads(count)
                results.append(lowered(*args))
            for other in results[1:]:
                torch.testing.assert_close(other, results[0], atol=0, rtol=0, equal_nan=True)
