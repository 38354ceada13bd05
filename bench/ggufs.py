"""GGUF files for the benchmarks of language models: SmolLM2 with its own weights, Qwen3-0.6B with random ones."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy

from interleave import THREADS  # in this folder

TYPES = ("f32", "q8_0", "q4_0")
MODELS = ("smollm2", "qwen3")


def qwen3() -> Any:
    """Qwen3-0.6B as it is published, with random weights."""
    import torch
    import transformers

    config = transformers.Qwen3Config(
        vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.Qwen3ForCausalLM(config).eval().requires_grad_(False)


def write_qwen3(path: Path) -> None:
    """The f32 GGUF of it, without a tokenizer."""
    import gguf

    model = qwen3()
    c = model.config
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(1e6)
    writer.add_vocab_size(c.vocab_size)
    writer.add_tokenizer_model("none")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, c.num_hidden_layers)
    for name, p in model.named_parameters():
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), p.numpy())
    close(writer)


def write_as(path: Path, source: Path, dtype: str) -> None:
    """The same GGUF with matrices of another type; embeddings have at least q8_0, as llama.cpp's quantiser has it."""
    import gguf
    import torch

    from keepdim.ir.quant import quantise

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kinds = field.types
        writer.add_key_value(name, field.contents(), kinds[0], kinds[1] if len(kinds) > 1 else None)
    for t in reader.tensors:
        wide = gguf.quants.dequantize(t.data, t.tensor_type).reshape(t.shape[::-1])
        kind = "q8_0" if dtype != "f32" and t.name == "token_embd.weight" else dtype
        if wide.ndim == 1 or kind == "f32":
            writer.add_tensor(t.name, numpy.ascontiguousarray(wide, numpy.float32))
        else:
            raw = quantise(torch.from_numpy(numpy.array(wide)), kind).raw.numpy()
            writer.add_tensor(t.name, raw, raw_dtype=gguf.GGMLQuantizationType[kind.upper()])
    close(writer)


def close(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_models(name: str, folder: Path) -> None:
    """GGUF files of all types."""
    from keepdim.models.generate import packaged

    for dtype in TYPES:
        print(f"writing {name} in {dtype}", file=sys.stderr, flush=True)
        if name == "qwen3" and dtype == "f32":
            write_qwen3(folder / "qwen3.f32.gguf")
        else:
            source = packaged() if name == "smollm2" else folder / "qwen3.f32.gguf"
            write_as(folder / f"{name}.{dtype}.gguf", source, dtype)


def widened(path: Path) -> Any:
    """The torch model of an f32 GGUF, with its weights in it."""
    import torch

    from keepdim.models import gguf

    torch.set_num_threads(THREADS)
    return gguf.read(path).model
