"""Attention as models write it: projections around it, whole or taken apart, fused or not; always one delegate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from engines import BACKENDS
from torch import nn
from torch.export import Dim, export

import keepdim
from keepdim import passes

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
