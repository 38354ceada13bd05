"""Language models: every family against eager, in one piece, in chunks, step by step and after a rewind."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import keepdim
from keepdim.models.decoder import LanguageModel, lower_llm

transformers = pytest.importorskip("transformers")
CONTEXT, VOCABULARY = 128, 256
TINY = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": CONTEXT,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "Gemma": {"head_dim": 16},
    "Gemma3Text": {"head_dim": 16, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "Phi": {},
    "Phi3": {"pad_token_id": 0},
    "Mistral": {"head_dim": 16, "sliding_window": 8},
}


def tiny(family: str, attention: str = "sdpa", **more: Any) -> Any:
    """A model of a family with random weights, large enough that its logits differ."""
    torch.manual_seed(0)
    name = family.removesuffix("Text")
    config = getattr(transformers, f"{family}Config")(**{**TINY, **FAMILIES[family], **more})
    config._attn_implementation = attention
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval().requires_grad_(False)
    for key, p in model.named_parameters():
        p.add_(torch.randn_like(p) * 0.1) if "norm" in key else p.mul_(5)
    return model


def wanted(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Eager's logits behind every token."""
    with torch.no_grad():
        return model(input_ids=tokens[None], use_cache=False).logits[0]


def worst(lowered: LanguageModel, tokens: torch.Tensor, want: torch.Tensor, chunks: Sequence[int]) -> float:
    """The largest difference over all rows, with the tokens given in chunks."""
    lowered.reset()
    off, at = 0.0, 0
    for n in chunks:
        got = lowered(tokens[at : at + n], rows=range(n))
        off = max(off, (got - want[at : at + n]).abs().max().item())
        at += n
    assert lowered.position == at
    return off


@pytest.fixture(scope="module")
def qwen(engine: str) -> tuple[Any, LanguageModel]:
    """A tiny Qwen3, in eager and lowered."""
    model = tiny("Qwen3")
    return model, lower_llm(model, CONTEXT, engine=engine)


TOKENS = torch.randint(VOCABULARY, (95,), generator=torch.Generator().manual_seed(1))


def test_prefill_then_single_steps(qwen: tuple[Any, LanguageModel]) -> None:
    """A prompt of 31 and 64 steps."""
    model, lowered = qwen
    assert worst(lowered, TOKENS, wanted(model, TOKENS), [31] + [1] * 64) < 1e-5


@pytest.mark.parametrize("chunks", [[7, 1, 13, 1, 1, 25, 3, 44], [95], [1] * 5 + [90], [64, 31]])
def test_uneven_chunks(chunks: list[int], qwen: tuple[Any, LanguageModel]) -> None:
    """The same logits however the tokens are cut."""
    model, lowered = qwen
    assert worst(lowered, TOKENS, wanted(model, TOKENS), chunks) < 1e-5


def test_rewind(qwen: tuple[Any, LanguageModel]) -> None:
    """Tokens that were taken back leave no trace."""
    model, lowered = qwen
    worst(lowered, TOKENS, wanted(model, TOKENS), [60])
    lowered.rewind(25)
    other = torch.cat([TOKENS[:35], TOKENS[:40].flip(0)])
    got = lowered(other[35:], rows=range(40))
    assert (got - wanted(model, other)[35:]).abs().max() < 1e-5
    lowered.reset()
    assert (lowered([3]) - wanted(model, torch.tensor([3]))).abs().max() < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, engine: str) -> None:
    """Each with its own norms, biases, gates, windows and rotations."""
    model = tiny(family)
    lowered = lower_llm(model, CONTEXT, engine=engine)
    assert worst(lowered, TOKENS, wanted(model, TOKENS), [31, 1, 1, 17, 45]) < 2e-5
    assert model.config._attn_implementation == "sdpa"  # the model is as it was
    assert not any("keepdim" in name for name, _ in model.named_buffers())


def test_eager_attention_lowers_the_same() -> None:
    """What transformers would use makes no difference."""
    model = tiny("Qwen3", "eager")
    assert worst(lower_llm(model, CONTEXT), TOKENS, wanted(model, TOKENS), [31, 1, 1]) < 1e-5


def test_products_in_bf16(engine: str) -> None:
    """Operands of products rounded to bf16 move logits a little; weights take half of the file."""
    model = tiny("Llama")
    lowered, full = (lower_llm(model, CONTEXT, precision=p, engine=engine) for p in ("bf16", "f32"))
    want = wanted(model, TOKENS)
    off = worst(lowered, TOKENS, want, [31, 1, 40, 1])
    assert 0 < off < 0.3  # bf16 has 8 bits, in each of some 20 products after each other; logits go up to ten
    assert worst(full, TOKENS, want, [31, 1, 40, 1]) < 1e-5
    (small,), (large,) = lowered.module.counters(), full.module.counters()
    assert small["weight_bytes"] < 0.6 * large["weight_bytes"]


def test_a_cache_of_16_bits(engine: str) -> None:
    """Keys and values rounded to f16 move logits a little."""
    model = tiny("Llama")
    lowered = lower_llm(model, CONTEXT, cache="f16", engine=engine)
    full = lower_llm(model, CONTEXT, engine=engine)
    off = worst(lowered, TOKENS, wanted(model, TOKENS), [31, 1, 40])
    assert 0 < off < 2e-2  # f16 has 11 bits, and logits of this model go up to ten
    (half,), (whole,) = lowered.module.counters(), full.module.counters()
    assert 2 * half["state_bytes"] == whole["state_bytes"]


def test_a_cache_of_blocks(engine: str) -> None:
    """Keys and values of 8 bits: as far off as eager is when they are rounded so."""
    model = tiny("Qwen3", head_dim=32)
    lowered, full = (lower_llm(model, CONTEXT, cache=c, engine=engine) for c in ("q8_0", "f32"))
    off = worst(lowered, TOKENS, wanted(model, TOKENS), [31, 1, 40, 1])
    assert 0 < off < 0.2  # a step of q8_0 is 1/127 of the largest of 32, and logits of this model go up to ten
    (blocks,), (whole,) = lowered.module.counters(), full.module.counters()
    assert blocks["state_bytes"] * 4 * 32 == whole["state_bytes"] * 34
    again = worst(lowered, TOKENS, wanted(model, TOKENS), [73])
    assert abs(again - off) < 0.1  # what is seen is the same rows


def test_a_file_keeps_nothing_of_the_sequence(qwen: tuple[Any, LanguageModel], tmp_path: Path) -> None:
    """Two loaded models never mix."""
    model, lowered = qwen
    lowered.save(tmp_path / "m.pte")
    want = wanted(model, TOKENS)
    one, two = LanguageModel.load(tmp_path / "m.pte"), LanguageModel.load(tmp_path / "m.pte")
    other = TOKENS.flip(0)
    one(TOKENS[:20])
    two(other[:30])
    assert (one(TOKENS[20:40], rows=range(20)) - want[20:40]).abs().max() < 1e-5
    assert (two(other[30:50], rows=range(20)) - wanted(model, other)[30:50]).abs().max() < 1e-5


def test_one_delegate_and_only_the_rows_asked_for(qwen: tuple[Any, LanguageModel]) -> None:
    """The whole model is one delegate, and a step of one token builds one plan."""
    _, lowered = qwen
    (before,) = lowered.module.counters()
    lowered.reset()
    for _ in range(50):
        assert lowered([1]).shape == (1, VOCABULARY)
    (after,) = lowered.module.counters()
    assert after["built"] - before["built"] <= 1
    assert lowered([1, 2, 3], rows=[0, 2]).shape == (2, VOCABULARY)


@pytest.mark.parametrize(
    ("tokens", "sentence"),
    [
        ([], r"\[generate\] tokens: empty"),
        ([VOCABULARY], r"\[run\] embedding .*256"),
        ([-1], r"\[run\] embedding .*-1"),
        ([1.5], r"\[generate\] tokens: are float32, expected integers"),
        ([True], r"\[generate\] tokens: are bool, expected integers"),
        ([2**70], r"\[generate\] tokens: are not a list of integers"),
        ([[1, 2], [3, 4]], r"\[generate\] tokens: have the shape \[2, 2\], and a model has one sequence"),
        (range(CONTEXT + 1), r"\[generate\] tokens: 129 more at position 0 are beyond the context of 128"),
    ],
)
def test_bad_tokens(tokens: Sequence[Any], sentence: str, qwen: tuple[Any, LanguageModel]) -> None:
    """A sentence, and the next good call works."""
    model, lowered = qwen
    lowered.reset()
    with pytest.raises(keepdim.KeepdimError, match=sentence):
        lowered(list(tokens))
    assert lowered.position == 0
    assert worst(lowered, TOKENS, wanted(model, TOKENS), [10, 5]) < 1e-5


def test_positions_out_of_the_cache(qwen: tuple[Any, LanguageModel]) -> None:
    """The file itself refuses them, whoever calls it."""
    _, lowered = qwen
    ids, row = torch.tensor([[1, 2, 3]]), torch.tensor([0])
    for position in (-1, CONTEXT - 2, 2**63 - 1, -(2**63)):
        with pytest.raises(keepdim.KeepdimError, match=f"3 new rows at position {position} do not fit a cache of 128"):
            lowered.module(ids, torch.tensor([position]), row)


def test_rewinding_too_far(qwen: tuple[Any, LanguageModel]) -> None:
    """Only what was given can be taken back."""
    _, lowered = qwen
    lowered.reset()
    lowered([1, 2])
    for count in (3, -1, 1.5, None):
        with pytest.raises(keepdim.KeepdimError, match=rf"\[generate\] rewind: {count} is out of range 0..2"):
            lowered.rewind(count)  # type: ignore[arg-type]
    for rows in ([], [3], [0.5], 3):
        with pytest.raises(keepdim.KeepdimError, match=r"rows: empty|index 3 is out|rows: are float32|index 3 is out"):
            lowered([1, 2, 3], rows)  # type: ignore[arg-type]
    assert lowered.position == 2 and lowered.tokens == [1, 2]


ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "llama3": {
        **{"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": 16,
    },
    "dynamic": {"factor": 4.0},
    "longrope": {
        **{"short_factor": [1 + i / 8 for i in range(8)], "long_factor": [2.0 + i for i in range(8)]},
        "original_max_position_embeddings": 40,
    },
}


@pytest.mark.parametrize("kind", ROPES)
def test_scaled_ropes(kind: str) -> None:
    """As eager's; one that changes with the length is lowered up to where it does, and the model is as it was."""
    model = tiny("Llama", rope_parameters={"rope_theta": 10000.0, "rope_type": kind, **ROPES[kind]})
    context = 40 if kind == "longrope" else CONTEXT
    tokens = TOKENS[:context]
    if kind == "longrope":
        with pytest.raises(keepdim.KeepdimError, match=r"max_context: 41 is more than 40, where .*\(longrope\)"):
            lower_llm(model, 41)
    wanted(model, TOKENS)  # may leave other frequencies in the model
    rope = model.model.rotary_emb
    before = rope.inv_freq
    lowered = lower_llm(model, context)
    assert (rope.rope_type, rope.inv_freq) == (kind, before) and type(before) is torch.Tensor
    want = wanted(model, tokens)
    assert worst(lowered, tokens, want, [7, 1, 13, len(tokens) - 21]) < 1e-5
    assert (want - wanted(tiny("Llama"), tokens)).abs().max() > 1e-3 or kind == "dynamic"


def other(name: str, **more: Any) -> Any:
    """A model of another family."""
    config = getattr(transformers, f"{name}Config")(**{**TINY, **more})
    return transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


NOT_HANDLED: dict[str, tuple[Any, str]] = {
    "no transformer": (lambda: torch.nn.Linear(2, 2), "Linear: is not a model of transformers"),
    "no head": (lambda: tiny("Llama").model, "LlamaModel: its forward does not take 'logits_to_keep'"),
    "training": (lambda: tiny("Llama").train(), "LlamaForCausalLM: is in training mode"),
    "halves": (lambda: tiny("Llama").bfloat16(), r"its parameter 'model.embed_tokens.weight' is bf16, expected f32"),
    "an encoder": (lambda: other("Bert"), "attention of BertSelfAttention: it is not causal"),
    "both ways": (
        lambda: tiny("Gemma3Text", use_bidirectional_attention=True),
        "attention of Gemma3Attention: it is not causal",
    ),
    "own positions": (lambda: other("Bart"), "BartForCausalLM: its forward does not take 'position_ids'"),
    "own attention": (lambda: other("Falcon"), "FalconForCausalLM: 0 of its 2 layers call the attention"),
    "twice": (lambda: other("DiffLlama"), "a layer that is called twice is not handled"),
    "own mask": (lambda: other("Doge"), "attention of DogeAttention: a custom mask is not handled"),
    "convolutions": (
        lambda: other("Lfm2", layer_types=["conv", "full_attention"]),
        "Lfm2ForCausalLM: layers of the kind 'conv' are not handled",
    ),
    "softcap": (lambda: other("Gemma2"), "attention of Gemma2Attention: its softcap is not handled"),
}


@pytest.mark.parametrize("name", NOT_HANDLED)
def test_what_would_be_wrong_is_refused(name: str) -> None:
    """Models that see more or less than the tokens before, or keep something of their own between calls."""
    make, sentence = NOT_HANDLED[name]
    with pytest.raises(keepdim.KeepdimError, match=rf"^\[lower\] .*{sentence}"):
        lower_llm(make(), CONTEXT)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"max_context": 129}, r"\[lower\] max_context: 129 is out of range 8..128"),
        ({"cache": "q3"}, r"\[lower\] cache 'q3': is not one of f32, f16, q8_0"),
        (
            {"cache": "q8_0"},
            r"\[lower\] state \[1, 2, 128, 16\]: its rows are not a multiple of 32 elements, as q8_0 needs",
        ),
    ],
)
def test_bad_settings(more: dict[str, Any], sentence: str) -> None:
    """Said before anything is exported."""
    model = tiny("Llama")
    with pytest.raises(keepdim.KeepdimError, match=sentence):
        lower_llm(model, **{"max_context": CONTEXT, **more})
    assert model.config._attn_implementation == "sdpa" and not any("keepdim" in n for n, _ in model.named_buffers())


def test_nothing_of_the_model_is_kept() -> None:
    """A lowered model has its file, not the torch model."""
    model = tiny("Llama")
    lowered, gone = lower_llm(model, CONTEXT), weakref.ref(model)
    weight = weakref.ref(model.lm_head.weight)
    del model
    gc.collect()
    assert gone() is None and weight() is None
    assert lowered([1]).shape == (1, VOCABULARY)


def test_steps_leave_nothing_behind(qwen: tuple[Any, LanguageModel]) -> None:
    """Memory after 10,000 steps is that after 1,000."""

    def resident() -> int:
        status = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS"))

    _, lowered = qwen
    used = []
    for step in range(10_001):
        if lowered.position == CONTEXT:
            lowered.reset()
        elif step % 7 == 6:
            lowered.rewind(min(2, lowered.position))
        lowered([step % VOCABULARY])
        if step in (1_000, 10_000):
            gc.collect()
            used.append(resident())
    assert used[1] - used[0] < 2 << 20  # an allocator's noise; the logits of 9,000 steps alone would be 9 MB


def test_a_model_that_does_not_go_into_one_delegate() -> None:
    """The op is named, in our words."""

    class Rising(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cummax(x, -1).values

    model = tiny("Llama")
    model.lm_head = torch.nn.Sequential(model.lm_head, Rising())
    with pytest.raises(keepdim.KeepdimError, match=r"\[lower\] LlamaForCausalLM: does not go .*aten.cummax"):
        lower_llm(model, CONTEXT)


class DoubledAtOne(torch.nn.Module):
    """A layer that does something else for a single token, which torch.export does not see."""

    def __init__(self, inner: torch.nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * (2 if x.shape[1] == 1 else 1)


def test_a_decoder_is_compared_with_eager() -> None:
    """As every model is: one that branches on the number of tokens is refused, not wrong at the first step."""
    model = tiny("Llama")
    model.model.layers[0].mlp = DoubledAtOne(model.model.layers[0].mlp)
    with pytest.raises(keepdim.KeepdimError, match=r"\[capture\] seq_len = 1, .*The model branches on a size"):
        lower_llm(model, CONTEXT)
