"""GGUF files as llama.cpp's converters write them, from small models of transformers with random weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

from keepdim.ir.quant import Quantised, quantise
from keepdim.models.gguf import ARCHITECTURES

SMALL = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 512,
    "vocab_size": 320,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": None,
}
OWN: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "qwen3": {"head_dim": 32, "tie_word_embeddings": True},
    "gemma3": {
        **{"head_dim": 32, "query_pre_attn_scalar": 32, "num_hidden_layers": 7, "tie_word_embeddings": True},
        **{"sliding_window": 16, "hidden_size": 64, "intermediate_size": 96},
    },
    "phi3": {"sliding_window": 24, "rope_parameters": {"rope_theta": 5000.0, "partial_rotary_factor": 0.5}},
}


def small(family: str, **more: Any) -> Any:
    """A model of a family; its norms and biases are random too, and its rows whole blocks of every type."""
    torch.manual_seed(0)
    values = {**SMALL, "rope_parameters": {"rope_theta": 5000.0}, **OWN.get(family, {}), **more}
    if family == "gemma3":
        values.pop("rope_parameters")
    config = getattr(transformers, ARCHITECTURES[family])(**values)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for p in model.parameters():
        if p.dim() == 1:
            p.add_(torch.randn_like(p) / 8)
    return model


def turned(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries and keys as GGUF has them: pairs, not halves."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(
    path: Path,
    model: Any,
    dtype: str = "f32",
    family: str = "llama",
    fields: Mapping[str, Any] = {},
    tensors: Mapping[str, np.ndarray] = {},
) -> dict[str, Quantised]:
    """A file of the model with matrices of one type; what its parameters are then. A field that is None is left out."""
    c = model.config
    architecture = "llama" if family == "mistral" else family
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in {**_fields(family, c), **fields}.items():
        kinds = {str: gguf.GGUFValueType.STRING, float: gguf.GGUFValueType.FLOAT32, bool: gguf.GGUFValueType.BOOL}
        if value is not None:
            full = name if name.startswith("split.") else f"{architecture}.{name}"
            writer.add_key_value(full, value, kinds.get(type(value), gguf.GGUFValueType.UINT32))
    kind = gguf.MODEL_ARCH[(architecture if architecture in ARCHITECTURES else "llama").upper()]
    names = gguf.get_tensor_name_map(kind, c.num_hidden_layers)
    stored: dict[str, Quantised] = {}
    for name, p in model.named_parameters():
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        q = quantise(p, dtype) if p.dim() > 1 and dtype != "f32" else None
        raw = (
            (p + 1 if family == "gemma3" and name.endswith("norm.weight") else p).numpy()
            if q is None
            else q.raw.numpy()
        )
        if family in ("llama", "mistral") and (".attn_q." in target or ".attn_k." in target):
            raw = turned(raw, c.num_attention_heads if ".attn_q." in target else c.num_key_value_heads)
        if q is None:
            writer.add_tensor(target, np.ascontiguousarray(raw))
            continue
        stored[name] = q
        raw = raw.view(np.float16) if dtype == "f16" else raw
        writer.add_tensor(target, np.ascontiguousarray(raw), raw_dtype=gguf.GGMLQuantizationType[dtype.upper()])
    for name, more in tensors.items():
        writer.add_tensor(name, more)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def _fields(family: str, c: Any) -> dict[str, Any]:
    """What the converters write of a configuration."""
    rope = c.rope_parameters.get("full_attention", c.rope_parameters)
    out: dict[str, Any] = {
        "block_count": c.num_hidden_layers,
        "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size,
        "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.num_attention_heads,
        "attention.head_count_kv": c.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": c.rms_norm_eps,
        "rope.freq_base": float(rope["rope_theta"]),
    }
    width = c.hidden_size // c.num_attention_heads
    if family in ("llama", "mistral"):
        out |= {"vocab_size": c.vocab_size, "rope.dimension_count": width}
    if family in ("qwen3", "gemma3"):
        out |= {"attention.key_length": c.head_dim, "attention.value_length": c.head_dim}
    if family == "gemma3":
        theta = float(c.rope_parameters["sliding_attention"]["rope_theta"])
        out |= {"attention.sliding_window": c.sliding_window, "rope.freq_base_swa": theta}
    if family == "phi3":
        out |= {
            "rope.dimension_count": int(width * rope["partial_rotary_factor"]),
            "rope.scaling.original_context_length": c.original_max_position_embeddings,
            "attention.sliding_window": c.sliding_window or 0,
        }
    return out
