"""GGUF files: architecture and weights as they stand in the file, for a model of transformers.

Tensors are views of the mapped file, quantised ones bit for bit. Rows that GGUF keeps in another order (queries and
keys of Llama) are moved whole, and norms that it keeps with one added (Gemma) are f32 there. The settings are read
here, and not by transformers, which takes defaults for those it does not know: here such a file is refused.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from .. import _native
from ..artifact.external_weights import Source
from ..errors import KeepdimError, fail, optional, sentence_of
from ..ir.quant import STORED, Quantised, dequantise
from . import checkpoint

# Architectures by their name in GGUF → the configuration of transformers. Mistral's models are "llama" there.
ARCHITECTURES = {
    "llama": "LlamaConfig",
    "mistral": "MistralConfig",
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
    "gemma3": "Gemma3TextConfig",
    "phi3": "Phi3Config",
}
PAIRS = ("llama", "mistral")  # rows of queries and keys are pairs of a head there, in transformers halves
KNOWN = ", ".join(name.upper() for name in STORED)
SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
# Fields of an architecture that say nothing about its numbers, or what tensors say too.
SILENT = ("vocab_size", "rope.scaling.finetuned", "tensor_data_layout")
LOCAL_THETA, LOCAL_LAYERS = 10000.0, 6  # of Gemma 3, where the file does not say: every sixth layer sees all
FREQUENCIES = "rope_freqs.weight"
FACTORS = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}  # of longrope
# How byte-level tokenizers cut a text before they merge: as GPT-2 did, or each digit by itself first. Transformers
# knows others, and takes GPT-2's for all that it does not know.
AS_GPT2, BY_DIGIT = ("gpt-2",), ("smollm", "starcoder", "refact")


class Checkpoint(NamedTuple):
    """A model with its weights: those in block formats beside it, the rest in it."""

    model: torch.nn.Module
    weights: dict[str, Quantised]  # by the name of the parameter, whose own data is not read
    source: Source  # of which weights are views


def read(path: Path) -> Checkpoint:
    """The model of a GGUF file."""
    reader, package = _reader(path)
    settings = _Settings(path, reader)
    architecture = settings.architecture
    transformers = optional("load", "transformers")
    tensors = {t.name: t for t in reader.tensors}
    if "token_embd.weight" not in tensors:
        fail("load", path.name, "has no tensor 'token_embd.weight'")
    vocabulary = int(tensors["token_embd.weight"].shape[-1])
    tie = "output.weight" not in tensors
    factors = {ours: tensors.pop(name) for ours, name in FACTORS.items() if architecture == "phi3" and name in tensors}
    name, values, factor = _config(settings, {k: t.data.reshape(-1).tolist() for k, t in factors.items()})
    try:
        config = getattr(transformers, name)(**values, vocab_size=vocabulary, tie_word_embeddings=tie)
        with optional("load", "transformers.initialization").no_init_weights(), torch.no_grad():
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
        model.tie_weights()
    except Exception as e:  # transformers raises many kinds
        fail("load", path.name, f"transformers makes no model of it ({type(e).__name__}: {sentence_of(e)})", cause=e)
    names = package.get_tensor_name_map(_architecture(package, architecture), config.num_hidden_layers)
    source = Source(path, torch.from_numpy(reader.data))
    weights: dict[str, Quantised] = {}
    tied = _tied(model)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        tensor = tensors.pop(found, None)
        if tensor is None and name not in tied:
            fail("load", path.name, f"has no tensor for {name!r} (expected {found!r})")
        if tensor is not None:
            shape = tuple(reversed(tensor.shape.tolist()))
            if shape != tuple(parameter.shape):
                want = list(parameter.shape)
                fail("load", path.name, f"its tensor {found!r} is {list(shape)}, expected {want} for {name!r}")
            raw = source.data[tensor.data_offset : tensor.data_offset + tensor.n_bytes]
            if architecture in PAIRS:
                raw = _halves(raw, found, shape[0], config)
            _place(path, name, parameter, tensor.tensor_type.name, raw, architecture, weights)
    for name in tied:
        other = tied[name]
        if name not in weights and other in weights:
            weights[name] = weights[other]
    _turn(path, model, factor, tensors.pop(FREQUENCIES, None))
    if tensors:
        fail("load", path.name, f"its tensor {sorted(tensors)[0]!r} has no place in {type(model).__name__}")
    return Checkpoint(model.eval().requires_grad_(False), weights, source)


def _mend_tokenizer(path: Path, tokenizer: Any) -> None:
    """What the file says of its tokenizer and transformers does not read: where a text is cut, what leads it."""
    reader, _ = _reader(path)
    backend, package = tokenizer.backend_tokenizer, optional("load", "tokenizers")
    kind, cut = (field(reader, f"tokenizer.ggml.{name}") for name in ("model", "pre"))
    if kind == "gpt2":
        known = optional("load", "transformers.integrations.gguf.gguf_tokenizer_mapping").GGUF_PRE_TOKENIZER_SPLITS
        if cut not in (*known, *AS_GPT2, *BY_DIGIT):
            fail("load", path.name, f"its tokenizer cuts texts as {cut!r}, which is not known")
        if cut in BY_DIGIT:
            parts = package.pre_tokenizers
            by_digit = [parts.Digits(individual_digits=True), parts.ByteLevel(add_prefix_space=False)]
            backend.pre_tokenizer = parts.Sequence(by_digit)
    if kind == "llama" and field(reader, "general.architecture") != "gemma3":
        space = package.normalizers.Replace(" ", "▁")
        led = field(reader, "tokenizer.ggml.add_space_prefix") is not False
        backend.normalizer = package.normalizers.Sequence([package.normalizers.Prepend("▁"), space] if led else [space])
        backend.pre_tokenizer = None
        parts = package.decoders
        ends = [parts.Strip(" ", 1, 0)] if led else []
        backend.decoder = parts.Sequence([parts.Replace("▁", " "), parts.ByteFallback(), parts.Fuse(), *ends])
    begin = field(reader, "tokenizer.ggml.add_bos_token")
    begin = kind == "llama" if begin is None else begin
    first = [(tokenizer.bos_token, tokenizer.bos_token_id)] if begin and tokenizer.bos_token is not None else []
    before = [token for token, _ in first]
    backend.post_processor = package.processors.TemplateProcessing(
        single=[*before, "$A"], pair=[*before, "$A", "$B"], special_tokens=first
    )


# ---------------------------------------------------------------- settings
class _Settings:
    """The fields of the file's architecture; what nobody asked for is refused at the end."""

    def __init__(self, path: Path, reader: Any):
        self.path, self.reader = path, reader
        self.architecture = field(reader, "general.architecture")
        if self.architecture not in ARCHITECTURES:
            fail("load", path.name, f"its architecture {self.architecture!r} is not known",
                 f"Known: {', '.join(ARCHITECTURES)}")  # fmt: skip
        if (parts := field(reader, "split.count") or 1) > 1:
            fail("load", path.name, f"is one of {parts} files", "Put them together: llama-gguf-split --merge")
        self.left = {n.partition(".")[2] for n in reader.fields if n.startswith(f"{self.architecture}.")} - {*SILENT}

    def number(self, name: str, default: float | None = None) -> float:
        """A field that is one number."""
        return self._one(name, default, (int, float), "a number")

    def size(self, name: str, default: int | None = None) -> int:
        """A field that is one integer above 0."""
        return self._one(name, default, (int,), "an integer above 0")

    def _one(self, name: str, default: Any, kinds: tuple[type, ...], expected: str) -> Any:
        self.left.discard(name)
        value = field(self.reader, f"{self.architecture}.{name}")
        value = default if value is None else value
        if type(value) not in kinds or not 0 < value < 1 << 31:
            fail("load", self.path.name, f"its field '{self.architecture}.{name}' is {value!r}, expected {expected}")
        return value

    def optional(self, name: str, default: Any = None) -> Any:
        """A field that may be missing; None where it is 0 or 'none'."""
        self.left.discard(name)
        value = field(self.reader, f"{self.architecture}.{name}")
        return default if value is None else None if value in (0, "none", "") else value

    def done(self) -> None:
        """Refuse what was not asked for: numbers may depend on it."""
        for name in sorted(self.left):
            if (value := self.optional(name)) is not None:
                fail("load", self.path.name, f"its field '{self.architecture}.{name}' = {value!r} is not known for it")


def _config(s: _Settings, factors: dict[str, list[float]]) -> tuple[str, dict[str, Any], float]:
    """The configuration's class and its values, and by what rope's frequencies are divided."""
    values: dict[str, Any] = {ours: s.size(name) for name, ours in SIZES.items()}
    hidden, heads, layers = values["hidden_size"], values["num_attention_heads"], values["num_hidden_layers"]
    if layers > len(s.reader.tensors):
        fail("load", s.path.name, f"has {len(s.reader.tensors)} tensors for {layers} layers")
    values["num_key_value_heads"] = s.size("attention.head_count_kv", heads)
    values["rms_norm_eps"] = s.number("attention.layer_norm_rms_epsilon")
    values["head_dim"] = width = s.size("attention.key_length", hidden // heads)
    turned, of_values = s.size("rope.dimension_count", width), s.size("attention.value_length", width)
    if of_values != width or (turned != width and s.architecture != "phi3"):
        fail("load", s.path.name, f"a head of its keys has {width} columns, of which rope turns {turned}, and one of "
             f"its values {of_values}: only equal widths are known")  # fmt: skip
    if not s.optional("attention.causal", True):
        fail("load", s.path.name, "its attention is not causal, as a language model's is")
    for name in ("bos_token_id", "eos_token_id"):
        values[name] = field(s.reader, f"tokenizer.ggml.{name}")
    values["pad_token_id"] = None  # its row of the embedding is as any other
    rope = {"rope_type": "default", "rope_theta": s.number("rope.freq_base", 10000.0)}
    name = ARCHITECTURES[s.architecture]
    if s.architecture in ("llama", "mistral", "phi3"):
        values["sliding_window"] = s.optional("attention.sliding_window")
        name = "MistralConfig" if s.architecture == "llama" and values["sliding_window"] else name
    if s.architecture == "phi3":
        rope["partial_rotary_factor"] = turned / width
        if (trained := s.optional("rope.scaling.original_context_length")) is not None:
            values["original_max_position_embeddings"] = trained
    if s.architecture == "gemma3":
        window = s.optional("attention.sliding_window")
        every = s.size("attention.sliding_window_pattern", LOCAL_LAYERS)
        local = [window is not None and bool((i + 1) % every) for i in range(layers)]
        values["layer_types"] = ["sliding_attention" if x else "full_attention" for x in local]
        values["sliding_window"] = window or values["max_position_embeddings"]  # asked for even where no layer has it
        values["query_pre_attn_scalar"] = hidden // heads if layers == 62 else width  # the largest has its own
        values["final_logit_softcapping"] = s.optional("final_logit_softcapping")
        theta = s.number("rope.freq_base_swa", LOCAL_THETA)
        rope = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": theta}}
    values["rope_parameters"] = rope
    factor = _scaling(s, rope, factors)
    s.done()
    return name, values, factor


def _scaling(s: _Settings, rope: dict[str, Any], factors: dict[str, list[float]]) -> float:
    """Positions beyond those of the training: yarn and longrope (whose factors are tensors) are transformers' own, of a
    linear scaling the factor is returned."""
    kind = s.optional("rope.scaling.type", "linear")  # a factor alone means that
    factor = s.optional("rope.scaling.factor") or s.optional("rope.scale_linear") or 1.0
    trained = s.optional("rope.scaling.original_context_length")  # Phi's files have it without a scaling
    if factors:  # longrope, which files do not name
        if len(factors) < len(FACTORS) or trained is None:
            needed = f"{', '.join(FACTORS.values())} and {s.architecture}.rope.scaling.original_context_length"
            fail("load", s.path.name, "has not all that its rope is scaled by", f"Needed: {needed}")
        rope |= {
            "rope_type": "longrope",
            **factors,
            "original_max_position_embeddings": trained,
            "factor": s.size("context_length") / trained,
            "attention_factor": float(s.number("rope.scaling.attn_factor", 1.0)),
        }
        return 1.0
    if kind is None or kind == "linear":
        return float(factor) if kind else 1.0
    if kind != "yarn" or s.architecture in ("gemma3", "phi3") or trained is None:
        fail("load", s.path.name, f"its rope is scaled by {kind!r}, which is not known for {s.architecture}",
             "Known: linear, yarn; longrope with its factors")  # fmt: skip
    rope |= {
        "rope_type": "yarn",
        "factor": float(factor),
        "original_max_position_embeddings": trained,
        "beta_fast": float(s.number("rope.scaling.yarn_beta_fast", 32.0)),
        "beta_slow": float(s.number("rope.scaling.yarn_beta_slow", 1.0)),
    }
    return 1.0


def _turn(path: Path, model: Any, factor: float, frequencies: Any) -> None:
    """Divide rope's frequencies by the file's factors: one for all (linear), or one each (Llama 3)."""
    if factor == 1 and frequencies is None:
        return
    rope = model.model.rotary_emb
    own = rope.full_attention_inv_freq if hasattr(rope, "full_attention_inv_freq") else rope.inv_freq
    if frequencies is not None:
        if frequencies.tensor_type.name != "F32" or frequencies.n_elements != own.numel():
            fail("load", path.name, f"its tensor {FREQUENCIES!r} has {frequencies.n_elements} elements of "
                 f"{frequencies.tensor_type.name}, expected {own.numel()} of F32")  # fmt: skip
        own.div_(torch.from_numpy(frequencies.data.copy()).reshape(-1))
    own.div_(factor)


# ---------------------------------------------------------------- tensors
def _place(path: Path, name: str, parameter: torch.nn.Parameter, kind: str, raw: torch.Tensor, architecture: str,
           weights: dict[str, Quantised]) -> None:  # fmt: skip
    """One tensor to where it belongs: into the model, or beside it as it is."""
    dtype = kind.lower()
    if dtype == "f32":
        value = raw.view(torch.float32).reshape(parameter.shape)
        if architecture == "gemma3" and name.endswith("norm.weight"):
            value = value - 1  # as transformers keeps it
        parameter.data = value if value.dim() > 1 else value.clone()  # small ones are not worth a place in a table
        return
    if dtype not in STORED:
        fail("load", path.name, f"tensor for {name!r} is of type {kind}, which is not known", f"Known: F32, {KNOWN}")
    rows = parameter.shape[0] if parameter.dim() > 1 else 1
    value = Quantised(dtype, tuple(parameter.shape), raw.reshape(rows, -1)).check(f"{path.name}, tensor for {name!r}")
    if parameter.dim() == 2:
        weights[name] = value
    else:
        parameter.data.copy_(dequantise(value))


def _halves(raw: torch.Tensor, name: str, rows: int, config: Any) -> torch.Tensor:
    """Rows of queries and keys in the order of transformers: halves of a head, not pairs."""
    counts = {".attn_q.": config.num_attention_heads, ".attn_k.": config.num_key_value_heads}
    heads = next((n for part, n in counts.items() if part in name), None)
    if heads is None:
        return raw
    return raw.reshape(heads, rows // heads // 2, 2, -1).transpose(1, 2).reshape(-1)


def _tied(model: Any) -> Mapping[str, str]:
    """Parameters that are another one: name → that one's."""
    first: dict[int, str] = {}
    out = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if id(p) in first:
            out[name] = first[id(p)]
            out[first[id(p)]] = name
        first.setdefault(id(p), name)
    return out


def field(reader: Any, name: str) -> Any:
    """A field of the file's head; None where there is none."""
    try:
        return reader.fields[name].contents() if name in reader.fields else None
    except UnicodeDecodeError as e:
        fail("load", f"field {name!r}", "is not UTF-8", "The GGUF file is damaged: copy it again", e)


@functools.cache
def fast_reader() -> Any:
    """The package's reader with lists read at once: its own makes several arrays for each element, one by one."""
    package = optional("load", "gguf")
    kinds, slow = package.GGUFValueType, package.GGUFReader

    class Reader(slow):  # type: ignore[misc, valid-type]
        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type != kinds.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            kind, count = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
            start, n = orig_offs + 12, int(count[0])
            types = [kinds.ARRAY, kinds(int(kind[0]))] if n else [kinds.ARRAY]
            if (number := self.gguf_scalar_to_np.get(kinds(int(kind[0])))) is not None:
                values = self._get(start, number, n)
                parts = list(np.asarray(values).reshape(n, 1))
                return 12 + values.nbytes, [kind, count, *parts], list(range(2, n + 2)), types
            raw, at, parts = np.asarray(self.data), start, []
            for _ in range(n):
                length = raw[at : at + 8].view(np.uint64)
                end = at + 8 + int(length[0])
                parts += [length, raw[at + 8 : end]]
                at = end
            return at - orig_offs, [kind, count, *parts], list(range(3, 2 * n + 3, 2)), types

    return Reader


def read_tokenizer(path: Path) -> Any:
    """The tokenizer of a file, as transformers makes it, with what it does not read."""
    package = optional("load", "gguf")
    slow, package.GGUFReader = package.GGUFReader, fast_reader()
    try:
        tokenizer = checkpoint.read_tokenizer("generate", path.parent, gguf_file=path.name)
    finally:
        package.GGUFReader = slow
    _mend_tokenizer(path, tokenizer)
    return tokenizer


def _reader(path: Path) -> tuple[Any, Any]:
    package = optional("load", "gguf")
    if not path.is_file():
        fail("load", str(path), "does not exist")
    try:
        _native.check_gguf(os.fsencode(path))  # the package believes every count that a file has
    except _native.Error as e:
        raise KeepdimError(str(e)) from None
    try:
        reader = fast_reader()(path, "c")  # private pages: torch has no read-only tensors
    except Exception as e:  # the package raises many kinds for a file that is cut short or not its own
        fail("load", str(path), f"cannot be read as GGUF ({type(e).__name__}: {sentence_of(e)})", cause=e)
    return reader, package


def _architecture(package: Any, name: str) -> Any:
    known = {v: k for k, v in package.MODEL_ARCH_NAMES.items()}
    return known["llama" if name == "mistral" else name]


__all__ = ["Checkpoint", "field", "read", "read_tokenizer"]
