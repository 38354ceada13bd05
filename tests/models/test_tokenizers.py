"""Tokenizers of GGUF files: where they cut a text and what they put before it, as llama.cpp does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from keepdim import KeepdimError
from keepdim.models import gguf as reading

gguf = pytest.importorskip("gguf")
pytest.importorskip("transformers")


def read_tokenizer(path: Path, kind: str, pieces: dict[str, int], merges: list[str], **more: Any) -> Any:
    """Of a file with these pieces (token → type), as `keepdim generate` reads it."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    writer.add_token_list(list(pieces))
    writer.add_token_types(list(pieces.values()))
    writer.add_bos_token_id(0)
    if merges:
        writer.add_token_merges(merges)
    else:
        writer.add_token_scores([-float(i) for i in range(len(pieces))])
    for name, value in more.items():
        add = writer.add_string if isinstance(value, str) else writer.add_bool
        add(f"tokenizer.ggml.{name}", value)
    for name in ("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count"):
        writer.add_uint32(f"llama.{name}", 8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return reading.read_tokenizer(path).backend_tokenizer


def test_where_a_tokenizer_cuts(tmp_path: Path) -> None:
    """As the file says, which transformers does not read wholly; the tokens are llama.cpp's."""
    pieces = {"<s>": 3} | {c: 1 for c in ("Ġ", "a", "1", "2", "ĠĠ", "12", "Ġ1")}
    merges = ["Ġ Ġ", "Ġ 1", "1 2"]
    path = tmp_path / "t.gguf"
    for cut, begins, want in [
        ("smollm", False, ["a", "ĠĠ", "1", "2"]),
        ("smollm", True, ["<s>", "a", "ĠĠ", "1", "2"]),
        ("gpt-2", False, ["a", "Ġ", "Ġ1", "2"]),
        ("llama-bpe", True, ["<s>", "a", "Ġ", "Ġ", "12"]),
    ]:
        found = read_tokenizer(path, "gpt2", pieces, merges, pre=cut, add_bos_token=begins)
        assert found.encode("a  12").tokens == want, (cut, found.encode("a  12").tokens)
    for cut in ("chameleon", "default"):
        with pytest.raises(KeepdimError, match=rf"^\[load\] t.gguf: its pre-tokenizer '{cut}' is not"):
            read_tokenizer(path, "gpt2", pieces, merges, pre=cut)
    with pytest.raises(KeepdimError, match="its pre-tokenizer None"):
        read_tokenizer(path, "gpt2", pieces, merges)


def test_what_leads_a_text(tmp_path: Path) -> None:
    """Sentencepiece puts a space before a text unless the file says no, whatever the text begins with."""
    pieces = {"<s>": 3, "<unk>": 2} | {c: 1 for c in ("▁a", "▁▁", "▁", "a")}
    path = tmp_path / "t.gguf"
    found = read_tokenizer(path, "llama", pieces, [])
    assert [found.encode(t).tokens[1:] for t in ("a", " a")] == [["▁a"], ["▁", "▁a"]]
    assert found.encode("a").tokens[0] == "<s>" and found.decode([2, 2]) == "a a"
    found = read_tokenizer(path, "llama", pieces, [], add_space_prefix=False, add_bos_token=False)
    assert [found.encode(t).tokens for t in ("a", " a")] == [["a"], ["▁a"]]
    assert found.decode([2, 2]) == " a a"
