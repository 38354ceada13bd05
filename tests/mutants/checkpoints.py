"""Damaged and hostile GGUF files: `python tests/mutants/checkpoints.py 20000 0` reads model and tokenizer of each."""

from __future__ import annotations

import random
import re
import struct
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import gguf
import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
import keepdim
from keepdim.models import gguf as reading
from keepdim.models.generate import _text
from mutants.harness import NUMBERS, Attempts, damage, main
from support.gguf_files import small, write_gguf

TINY = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 40, "num_attention_heads": 2}
TOKENS = ["<s>", "</s>", "<unk>", "Ġ", "Ġa", *"abcdefghijklmnopqrstuvwxyz0123456789"][:40]


# ---------------------------------------------------------------- good files
def _write(path: Path, family: str, kind: str, dtype: str) -> None:
    """A model of a few kilobytes with a tokenizer."""
    model = small(family, **TINY, **({"head_dim": 32} if family == "gemma3" else {}))
    plain = path.with_suffix(".plain")
    write_gguf(plain, model, dtype, family)
    reader, writer = gguf.GGUFReader(plain), gguf.GGUFWriter(path, family)
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            writer.add_key_value(field.name, field.contents(), field.types[0])
    writer.add_tokenizer_model(kind)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 2] + [1] * (len(TOKENS) - 3))
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    if kind == "gpt2":
        writer.add_token_merges(["Ġ a"])
        writer.add_tokenizer_pre("gpt-2")
    else:
        writer.add_token_scores([-float(i) for i in range(len(TOKENS))])
    for t in reader.tensors:
        writer.add_tensor(t.name, t.data, raw_dtype=t.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    plain.unlink()


@cache
def originals() -> dict[str, bytes]:
    """Name → the bytes of a good file."""
    torch.manual_seed(0)
    out = {}
    with tempfile.TemporaryDirectory() as folder:
        for family, kind, dtype in (("llama", "llama", "q8_0"), ("qwen2", "gpt2", "f32"), ("gemma3", "llama", "q4_0")):
            path = Path(folder) / "m.gguf"
            _write(path, family, kind, dtype)
            out[family] = path.read_bytes()
    return out


# ---------------------------------------------------------------- mutations
def _of_head(data: bytes, r: random.Random) -> bytes:
    """Bytes of the head, where every count, name and offset is."""
    head = 8 << 10
    return damage(data[:head], r) + data[head:]


def _of_numbers(data: bytes, r: random.Random) -> bytes:
    """The number behind one of the names, or the kind of a field: well-formed otherwise."""
    names = [m.end() for m in re.finditer(rb"[a-z_0-9]+\.[a-z_0-9.]+", data[: 8 << 10])]
    at = r.choice(names) + r.choice((0, 4, 4, 8, 12, 20))
    width, number = r.choice((4, 8)), r.choice(NUMBERS)
    raw = (
        struct.pack("<d", r.choice((0.0, -1.0, 1e300, float("nan"))))
        if r.random() < 0.1
        else number.to_bytes(9, "little", signed=True)
    )
    return data[:at] + raw[:width] + data[at + width :]


def mutants(folder: Path, count: int, seed: int) -> Iterator[tuple[str, Path]]:
    """(what was done to which, the file): the same ones for the same seed, one at a time in the folder."""
    kinds = {"bytes": damage, "head": _of_head, "numbers": _of_numbers}
    for i in range(count):
        r = random.Random(f"{seed}.{i}")
        kind, name = r.choice(list(kinds)), r.choice(list(originals()))
        data = originals()[name]
        for _ in range(r.choice((1, 1, 1, 2))):
            data = kinds[kind](data, r)
        path = folder / "m.gguf"
        path.write_bytes(data)
        yield f"{i} {name}: {kind}", path


# ---------------------------------------------------------------- what a user does
def attempt(path: Path) -> str:
    """Read the model and its tokenizer, as before it is lowered: "ran", or the sentence that refuses it."""
    try:
        checkpoint = reading.read(path)
        tokenizer = reading.read_tokenizer(path)
        text = _text(tokenizer, checkpoint.model).to_json()
        sum(float(p.sum()) for p in checkpoint.model.parameters())
        del checkpoint, text
    except keepdim.KeepdimError as e:
        return str(e)
    return "ran"


if __name__ == "__main__":
    main(mutants, Attempts(attempt))
