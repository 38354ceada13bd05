"""README and docs say what the code does."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest

import keepdim
from keepdim import _native, program

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_readme_lists_the_delegated_ops():
    """The ops line is the engine's table."""
    line = re.search(r"^Delegated: (.*)\.$", README, re.MULTILINE)
    assert line and line.group(1) == ", ".join(sorted(_native.engines()["ggml"]))


def test_readme_example_runs(tmp_path, monkeypatch):
    """The first example, up to the call that it says is refused, and its sentence."""
    monkeypatch.chdir(tmp_path)
    example = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert example
    code, sentence = example.group(1).rsplit("# KeepdimError: ", 1)
    with pytest.raises(keepdim.KeepdimError, match=re.escape(sentence.strip())):
        exec(code, {})
    assert (tmp_path / "model.pte").exists()


def test_schema_is_published():
    """docs/program.schema.json is what `schema()` gives."""
    published = json.loads((ROOT / "docs" / "program.schema.json").read_text())
    assert published == json.loads(msgspec.json.encode(program.schema()))
