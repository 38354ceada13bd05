"""GGUF files: architecture and weights of the file, as a model of transformers.

Tensors are views of the mapped file, quantised ones bit for bit. Rows that GGUF stores in another order (q and k of
Llama) are permuted, and norm weights that it stores plus one (Gemma) are corrected. The settings are read here and not
by transformers, which silently uses defaults for fields it does not know: here such a file is an error.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import numpy
import torch

from ..artifact.external_weights import MappedFile
from ..compat.transformers import fast_gguf_lists, fast_reader
from ..errors import KeepdimError, fail, optional, sentence_of
from ..ir.quant import Quantised, dequantise
from ..native import _native
from ..shapes.blocks import STORED
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
INTERLEAVED = (
    "llama",
    "mistral",
)  # q and k rows are stored for interleaved rope; transformers rotates the two halves of a head
KNOWN = ", ".join(name.upper() for name in STORED)
SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
# Fields that do not affect the results, or that the tensors imply.
IGNORED = ("vocab_size", "rope.scaling.finetuned", "tensor_data_layout")
LOCAL_THETA, LOCAL_LAYERS = 10000.0, 6  # defaults of Gemma 3: every sixth layer has full attention
FREQUENCIES = "rope_freqs.weight"
FACTORS = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}  # for longrope
# Pre-tokenizers of byte-level BPE: GPT-2's, or with each digit split off first. transformers knows others, and uses
# GPT-2's for every name it does not know.
GPT2_SPLIT, DIGIT_SPLIT = ("gpt-2",), ("smollm", "starcoder", "refact")


class Kind(Protocol):
    """A ggml type."""

    @property
    def name(self) -> str: ...


class ReaderTensor(Protocol):
    """A tensor of a file, as the package gguf reads it."""

    name: str
    tensor_type: Kind
    shape: numpy.ndarray  # innermost first
    n_elements: int
    n_bytes: int
    data_offset: int
    data: numpy.ndarray


class ReaderField(Protocol):
    """A metadata field."""

    def contents(self) -> object: ...


class GgufReader(Protocol):
    """The reader of the package gguf."""

    fields: Mapping[str, ReaderField]
    tensors: list[ReaderTensor]
    data: numpy.ndarray


class Checkpoint(NamedTuple):
    """A model with its weights: quantised ones in `weights`, the rest in the model."""

    model: torch.nn.Module
    weights: dict[str, Quantised]  # by parameter name; the parameter's own data is not read
    source: MappedFile  # the mapped file that weights are views of


def read(path: Path) -> Checkpoint:
    """The model of a GGUF file."""
    reader, package = _reader(path)
    settings = _Settings(path, reader)
    tensors = {t.name: t for t in reader.tensors}
    model, factor = _make_model(settings, tensors)
    layers = model.config.num_hidden_layers
    names = package.get_tensor_name_map(_architecture(package, settings.architecture), layers)
    source = MappedFile(path, torch.from_numpy(reader.data))
    weights = _load_tensors(settings, model, tensors, names, source.data)
    _scale_rope_frequencies(path, model, factor, tensors.pop(FREQUENCIES, None))
    if tensors:
        fail("load", path.name, f"its tensor {sorted(tensors)[0]!r} is not used by {type(model).__name__}")
    return Checkpoint(model.eval().requires_grad_(False), weights, source)


def _make_model(settings: _Settings, tensors: dict[str, ReaderTensor]) -> tuple[torch.nn.Module, float]:
    """The model of transformers without weights, and the factor of its rope. Takes the factors of longrope out of
    `tensors`: they are settings."""
    file = settings.path.name
    if "token_embd.weight" not in tensors:
        fail("load", file, "has no tensor 'token_embd.weight'")
    vocabulary, tie = int(tensors["token_embd.weight"].shape[-1]), "output.weight" not in tensors
    longrope = FACTORS.items() if settings.architecture == "phi3" else ()
    factors = {ours: tensors.pop(name).data.reshape(-1).tolist() for ours, name in longrope if name in tensors}
    name, values, factor = _config(settings, factors)
    transformers = optional("load", "transformers")
    try:
        config = getattr(transformers, name)(**values, vocab_size=vocabulary, tie_word_embeddings=tie)
        with optional("load", "transformers.initialization").no_init_weights(), torch.no_grad():
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
        model.tie_weights()
    except Exception as e:  # transformers raises many types
        fail("load", file, f"transformers makes no model of it ({type(e).__name__}: {sentence_of(e)})", cause=e)
    return model, factor


def _repair_tokenizer(path: Path, tokenizer: Any) -> None:
    """Apply tokenizer settings that transformers does not read: the pre-tokenizer, and the tokens before a text."""
    reader, _ = _reader(path)
    backend, package = tokenizer.backend_tokenizer, optional("load", "tokenizers")
    kind, cut = (field(reader, f"tokenizer.ggml.{name}") for name in ("model", "pre"))
    if kind == "gpt2":
        known = optional("load", "transformers.integrations.gguf.gguf_tokenizer_mapping").GGUF_PRE_TOKENIZER_SPLITS
        if cut not in (*known, *GPT2_SPLIT, *DIGIT_SPLIT):
            fail("load", path.name, f"its pre-tokenizer {cut!r} is not known")
        if cut in DIGIT_SPLIT:
            parts = package.pre_tokenizers
            by_digit = [parts.Digits(individual_digits=True), parts.ByteLevel(add_prefix_space=False)]
            backend.pre_tokenizer = parts.Sequence(by_digit)
    if kind == "llama" and field(reader, "general.architecture") != "gemma3":
        space = package.normalizers.Replace(" ", "▁")
        prefixed = field(reader, "tokenizer.ggml.add_space_prefix") is not False
        prefix = [package.normalizers.Prepend("▁")] if prefixed else []
        backend.normalizer = package.normalizers.Sequence([*prefix, space])
        backend.pre_tokenizer = None
        parts = package.decoders
        ends = [parts.Strip(" ", 1, 0)] if prefixed else []
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
    """The fields of the file's architecture; `done` raises for fields that were not read."""

    def __init__(self, path: Path, reader: GgufReader):
        self.path, self.reader = path, reader
        self.architecture = field(reader, "general.architecture")
        if self.architecture not in ARCHITECTURES:
            fail("load", path.name, f"its architecture {self.architecture!r} is not known",
                 f"Known: {', '.join(ARCHITECTURES)}")  # fmt: skip
        if (parts := field(reader, "split.count") or 1) > 1:
            fail("load", path.name, f"is one of {parts} files", "Put them together: llama-gguf-split --merge")
        self.unread = {n.partition(".")[2] for n in reader.fields if n.startswith(f"{self.architecture}.")} - {*IGNORED}

    def number(self, name: str, default: float | None = None) -> float:
        """A numeric field."""
        return self._one(name, default, (int, float), "a number")

    def size(self, name: str, default: int | None = None) -> int:
        """A positive integer field."""
        return self._one(name, default, (int,), "an integer above 0")

    def _one(self, name: str, default: Any, kinds: tuple[type, ...], expected: str) -> Any:
        self.unread.discard(name)
        value = field(self.reader, f"{self.architecture}.{name}")
        value = default if value is None else value
        if type(value) not in kinds or not 0 < value < 1 << 31:
            fail("load", self.path.name, f"its field '{self.architecture}.{name}' is {value!r}, expected {expected}")
        return value

    def optional(self, name: str, default: object = None) -> Any:
        """A field that may be missing; None if it is 0 or 'none'."""
        self.unread.discard(name)
        value = field(self.reader, f"{self.architecture}.{name}")
        return default if value is None else None if value in (0, "none", "") else value

    def done(self) -> None:
        """Raise for a field that was not read: the results may depend on it."""
        for name in sorted(self.unread):
            if (value := self.optional(name)) is not None:
                fail("load", self.path.name, f"its field '{self.architecture}.{name}' = {value!r} is not known for it")


def _config(s: _Settings, factors: dict[str, list[float]]) -> tuple[str, dict[str, object], float]:
    """The class of the configuration, its values, and the divisor of rope's frequencies."""
    values: dict[str, Any] = {ours: s.size(name) for name, ours in SIZES.items()}
    hidden, heads, layers = values["hidden_size"], values["num_attention_heads"], values["num_hidden_layers"]
    if layers > len(s.reader.tensors):
        fail("load", s.path.name, f"has {len(s.reader.tensors)} tensors for {layers} layers")
    values["num_key_value_heads"] = s.size("attention.head_count_kv", heads)
    values["rms_norm_eps"] = s.number("attention.layer_norm_rms_epsilon")
    values["head_dim"] = width = s.size("attention.key_length", hidden // heads)
    rotary, value_width = s.size("rope.dimension_count", width), s.size("attention.value_length", width)
    if value_width != width or (rotary != width and s.architecture != "phi3"):
        fail("load", s.path.name, f"a head of its keys has {width} columns, of which rope rotates {rotary}, and one of "
             f"its values {value_width}: only equal widths are known")  # fmt: skip
    if not s.optional("attention.causal", True):
        fail("load", s.path.name, "its attention is not causal, as a language model's is")
    for name in ("bos_token_id", "eos_token_id"):
        values[name] = field(s.reader, f"tokenizer.ggml.{name}")
    values["pad_token_id"] = None  # its embedding row is not zeroed
    rope = {"rope_type": "default", "rope_theta": s.number("rope.freq_base", 10000.0)}
    name = ARCHITECTURES[s.architecture]
    if s.architecture in ("llama", "mistral", "phi3"):
        values["sliding_window"] = s.optional("attention.sliding_window")
        name = "MistralConfig" if s.architecture == "llama" and values["sliding_window"] else name
    if s.architecture == "phi3":
        rope["partial_rotary_factor"] = rotary / width
        if (trained := s.optional("rope.scaling.original_context_length")) is not None:
            values["original_max_position_embeddings"] = trained
    if s.architecture == "gemma3":
        window = s.optional("attention.sliding_window")
        every = s.size("attention.sliding_window_pattern", LOCAL_LAYERS)
        local = [window is not None and bool((i + 1) % every) for i in range(layers)]
        values["layer_types"] = ["sliding_attention" if x else "full_attention" for x in local]
        values["sliding_window"] = window or values["max_position_embeddings"]  # required even if no layer uses it
        values["query_pre_attn_scalar"] = hidden // heads if layers == 62 else width  # Gemma 3 27B differs
        values["final_logit_softcapping"] = s.optional("final_logit_softcapping")
        theta = s.number("rope.freq_base_swa", LOCAL_THETA)
        rope = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": theta}}
    values["rope_parameters"] = rope
    factor = _scaling(s, rope, factors)
    s.done()
    return name, values, factor


def _scaling(s: _Settings, rope: dict[str, object], factors: dict[str, list[float]]) -> float:
    """Rope scaling for longer contexts: yarn and longrope (whose factors are tensors) go into `rope` for transformers;
    the factor of a linear scaling is returned."""
    kind = s.optional("rope.scaling.type", "linear")  # the default if there is only a factor
    factor = s.optional("rope.scaling.factor") or s.optional("rope.scale_linear") or 1.0
    trained = s.optional("rope.scaling.original_context_length")  # Phi's files have it without a scaling
    if factors:  # longrope, which files do not name as a type
        if len(factors) < len(FACTORS) or trained is None:
            needed = f"{', '.join(FACTORS.values())} and {s.architecture}.rope.scaling.original_context_length"
            fail("load", s.path.name, "lacks a part of its rope scaling", f"Needed: {needed}")
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


def _scale_rope_frequencies(path: Path, model: torch.nn.Module, factor: float, frequencies: ReaderTensor | None
                            ) -> None:  # fmt: skip
    """Divide rope's frequencies by the file's factors: one for all (linear), or one each (Llama 3)."""
    if factor == 1 and frequencies is None:
        return
    rope = model.model.rotary_emb
    inv_freq = rope.full_attention_inv_freq if hasattr(rope, "full_attention_inv_freq") else rope.inv_freq
    if frequencies is not None:
        if frequencies.tensor_type.name != "F32" or frequencies.n_elements != inv_freq.numel():
            fail("load", path.name, f"its tensor {FREQUENCIES!r} has {frequencies.n_elements} elements of "
                 f"{frequencies.tensor_type.name}, expected {inv_freq.numel()} of F32")  # fmt: skip
        inv_freq.div_(torch.from_numpy(frequencies.data.copy()).reshape(-1))
    inv_freq.div_(factor)


# ---------------------------------------------------------------- tensors
def _load_tensors(settings: _Settings, model: torch.nn.Module, tensors: dict[str, ReaderTensor], names: Any,
                  data: torch.Tensor) -> dict[str, Quantised]:  # fmt: skip
    """Load every parameter from the file's bytes; the quantised weights. Takes what is loaded out of `tensors`."""
    path, weights, tied = settings.path, dict[str, Quantised](), _tied(model)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        tensor = tensors.pop(found, None)
        if tensor is None:
            if name not in tied:
                fail("load", path.name, f"has no tensor for {name!r} (expected {found!r})")
            continue
        shape = tuple(reversed(tensor.shape.tolist()))
        if shape != tuple(parameter.shape):
            want = list(parameter.shape)
            fail("load", path.name, f"its tensor {found!r} is {list(shape)}, expected {want} for {name!r}")
        raw = data[tensor.data_offset : tensor.data_offset + tensor.n_bytes]
        if settings.architecture in INTERLEAVED:
            raw = _deinterleave(raw, found, shape[0], model.config)
        _load_tensor(path, name, parameter, tensor.tensor_type.name, raw, settings.architecture, weights)
    return weights | {name: weights[other] for name, other in tied.items() if name not in weights and other in weights}


def _load_tensor(path: Path, name: str, parameter: torch.nn.Parameter, kind: str, raw: torch.Tensor, architecture: str,
                 weights: dict[str, Quantised]) -> None:  # fmt: skip
    """Load one tensor: into the parameter, or quantised into `weights`."""
    dtype = kind.lower()
    if dtype == "f32":
        value = raw.view(torch.float32).reshape(parameter.shape)
        if architecture == "gemma3" and name.endswith("norm.weight"):
            value = value - 1  # transformers adds the 1 itself
        parameter.data = value if value.dim() > 1 else value.clone()  # vectors are too small to be mapped
        return
    if dtype not in STORED:
        fail("load", path.name, f"tensor for {name!r} is of type {kind}, which is not known", f"Known: F32, {KNOWN}")
    rows = parameter.shape[0] if parameter.dim() > 1 else 1
    value = Quantised(dtype, tuple(parameter.shape), raw.reshape(rows, -1)).check(f"{path.name}, tensor for {name!r}")
    if parameter.dim() == 2:
        weights[name] = value
    else:
        parameter.data.copy_(dequantise(value))


def _deinterleave(raw: torch.Tensor, name: str, rows: int, config: Any) -> torch.Tensor:
    """Permute rows of q and k from interleaved pairs to halves of a head, as transformers expects."""
    counts = {".attn_q.": config.num_attention_heads, ".attn_k.": config.num_key_value_heads}
    heads = next((n for part, n in counts.items() if part in name), None)
    if heads is None:
        return raw
    return raw.reshape(heads, rows // heads // 2, 2, -1).transpose(1, 2).reshape(-1)


def _tied(model: torch.nn.Module) -> Mapping[str, str]:
    """Tied parameters: name → the other name."""
    first: dict[int, str] = {}
    out = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if id(p) in first:
            out[name] = first[id(p)]
            out[first[id(p)]] = name
        first.setdefault(id(p), name)
    return out


def field(reader: GgufReader, name: str) -> Any:
    """A metadata field of the file; None if it is missing."""
    try:
        return reader.fields[name].contents() if name in reader.fields else None
    except UnicodeDecodeError as e:
        fail("load", f"field {name!r}", "is not UTF-8", "The GGUF file is damaged: copy it again", e)


def read_tokenizer(path: Path) -> object:
    """The tokenizer of a file: made by transformers, then corrected by settings that it does not read."""
    with fast_gguf_lists():
        tokenizer = checkpoint.read_tokenizer("generate", path.parent, gguf_file=path.name)
    _repair_tokenizer(path, tokenizer)
    return tokenizer


def _reader(path: Path) -> tuple[GgufReader, ModuleType]:
    package = optional("load", "gguf")
    if not path.is_file():
        fail("load", str(path), "does not exist")
    try:
        _native.check_gguf(os.fsencode(path))  # the package does not validate the file's counts
    except _native.Error as e:
        raise KeepdimError(str(e)) from None
    try:
        reader = fast_reader()(path, "c")  # copy-on-write: torch has no read-only tensors
    except Exception as e:  # the package raises many types for truncated or foreign files
        fail("load", str(path), f"cannot be read as GGUF ({type(e).__name__}: {sentence_of(e)})", cause=e)
    return reader, package


def _architecture(package: ModuleType, name: str) -> int:
    known = {v: k for k, v in package.MODEL_ARCH_NAMES.items()}
    return known["llama" if name == "mistral" else name]


__all__ = ["Checkpoint", "field", "read", "read_tokenizer"]
