"""GGUF files: architecture, text side and weights as they stand in the file, for a model of transformers.

Quantised tensors are taken bit for bit. Rows that GGUF keeps in another order (queries and keys of Llama) are moved
whole, and norms that it keeps with one added (Gemma) are f32 there.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from .errors import fail, optional
from .quant import STORED, Quantised, dequantise

# What transformers calls the architectures whose tensors are known here, by their name in GGUF.
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "gemma3", "phi3")
KNOWN = ", ".join(name.upper() for name in STORED)


class Checkpoint(NamedTuple):
    """A model with its weights: those in block formats beside it, the rest in it."""

    model: torch.nn.Module
    weights: dict[str, Quantised]  # by the name of the parameter, whose own data is not read


def read(path: Path) -> Checkpoint:
    """The model of a GGUF file."""
    reader, package = _reader(path)
    architecture = field(reader, "general.architecture")
    if architecture not in ARCHITECTURES:
        fail("load", path.name, f"its architecture {architecture!r} is not known", f"Known: {', '.join(ARCHITECTURES)}")
    transformers = optional("load", "transformers")
    tensors = {t.name: t for t in reader.tensors}
    try:
        config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
        config.tie_word_embeddings = "output.weight" not in tensors
        with optional("load", "transformers.initialization").no_init_weights(), torch.no_grad():
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.tie_weights()
    except Exception as e:  # transformers raises many kinds
        fail("load", path.name, f"transformers makes no model of it ({type(e).__name__}: {_short(e)})", cause=e)
    names = package.get_tensor_name_map(_architecture(package, architecture), config.num_hidden_layers)
    weights: dict[str, Quantised] = {}
    tied = _tied(model)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if found not in tensors:
            if name not in tied:
                fail("load", path.name, f"has no tensor for {name!r} (expected {found!r})")
            continue
        tensor = tensors[found]
        data = _rows(np.asarray(tensor.data), found, architecture, config)
        _place(path, name, parameter, tensor.tensor_type.name, data, architecture, weights)
    for name in tied:
        source = tied[name]
        if name not in weights and source in weights:
            weights[name] = weights[source]
    return Checkpoint(model.eval().requires_grad_(False), weights)


def _place(path: Path, name: str, parameter: torch.nn.Parameter, kind: str, data: np.ndarray, architecture: str,
           weights: dict[str, Quantised]) -> None:  # fmt: skip
    """One tensor to where it belongs: into the model, or beside it as it is."""
    dtype = kind.lower()
    raw = torch.from_numpy(np.require(data, requirements=["C", "W"]).view(np.uint8))
    if dtype == "f32":
        value = raw.view(torch.float32).reshape(-1)
        if value.numel() != parameter.numel():
            fail("load", path.name, f"tensor for {name!r} has {value.numel()} elements, expected {parameter.numel()}")
        value = value.reshape(parameter.shape)
        if architecture == "gemma3" and name.endswith("norm.weight"):
            value = value - 1  # as transformers keeps it
        parameter.data.copy_(value)
        return
    if dtype not in STORED:
        fail("load", path.name, f"tensor for {name!r} is of type {kind}, which is not known", f"Known: F32, {KNOWN}")
    rows = parameter.shape[0] if parameter.dim() > 1 else 1
    value = Quantised(dtype, tuple(parameter.shape), raw.reshape(rows, -1)).check(f"{path.name}, tensor for {name!r}")
    if parameter.dim() == 2:
        weights[name] = value
    else:
        parameter.data.copy_(dequantise(value))


def _rows(data: np.ndarray, name: str, architecture: str, config: Any) -> np.ndarray:
    """Rows of queries and keys in the order of transformers: halves of a head, not pairs."""
    if architecture not in ("llama", "mistral") or not (".attn_q." in name or ".attn_k." in name):
        return data
    heads = config.num_attention_heads if ".attn_q." in name else config.num_key_value_heads
    pairs = data.reshape(heads, data.shape[0] // heads // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(data.shape)


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
    return reader.fields[name].contents() if name in reader.fields else None


def _reader(path: Path) -> tuple[Any, Any]:
    package = optional("load", "gguf")
    if not path.is_file():
        fail("load", str(path), "does not exist")
    try:
        return package.GGUFReader(path), package
    except Exception as e:  # the package raises many kinds for a file that is cut short or not its own
        fail("load", str(path), f"cannot be read as GGUF ({type(e).__name__}: {_short(e)})", cause=e)


def _architecture(package: Any, name: str) -> Any:
    known = {v: k for k, v in package.MODEL_ARCH_NAMES.items()}
    return known["llama" if name == "mistral" else name]


def _short(e: Exception) -> str:
    return " ".join(str(e).split())[:200]


__all__ = ["Checkpoint", "field", "read"]
