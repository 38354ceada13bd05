"""README and docs say what the code does."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest
import torch

import keepdim
from keepdim import _native, ops, program

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


AS_2D = "comes as its 2d form, which is delegated"
# Core ATen ops without a row, and why.
LEFT = {
    "of training": """_adaptive_avg_pool2d_backward avg_pool2d_backward convolution_backward embedding_dense_backward
        max_pool2d_with_indices_backward native_group_norm_backward native_layer_norm_backward native_dropout
        _native_batch_norm_legit""",
    "random": "rand randn randperm",
    "complex numbers": "_fft_c2r _fft_r2c",
    "the size of the result is data": "nonzero",
    "reads data on the host": "_local_scalar_dense",
    "an integer or truth of a shape, no tensor": """sym_numel sym_size sym_storage_offset sym_stride
        sym_is_contiguous""",
    "writes into a given tensor": "atan2.out fill resize_",
    "what it holds is whatever was in memory": "empty empty_strided",
    AS_2D: "adaptive_avg_pool1d avg_pool1d",
}

INTRODUCTION = """\
Written by `pytest tests/test_docs.py --regen-golden` from the rows of keepdim/ops and torch's list of Core ATen ops. A
node is taken when its row, its dtypes and its contract allow it; the report of a lowering says why one was not. What is
not taken runs on ExecuTorch's kernels where it has one."""


def core_ops() -> dict[str, list[str]]:
    """The overloads that torch tags as core, by op."""
    found: dict[str, list[str]] = {}
    for name in sorted(dir(torch.ops.aten)):
        packet = getattr(torch.ops.aten, name)
        for o in packet.overloads() if hasattr(packet, "overloads") else ():
            if torch.Tag.core in getattr(packet, o).tags:
                found.setdefault(name, []).append(o)
    return found


def ops_page() -> str:
    """docs/ops.md: what becomes of every core op, and which others have rows."""
    from executorch.extension.pybindings.portable_lib import _get_operator_names

    kernels = {n.split("::")[1].split(".")[0] for n in _get_operator_names()}
    why = {name: reason for reason, names in LEFT.items() for name in names.split()}
    rows: dict[str, dict[str, str]] = {}
    for target, row in ops.ROWS.items():
        if target.namespace == "aten":
            rows.setdefault(target._schema.name.split("::")[1], {})[target._overloadname] = row.name
    done, left = [], []
    for name, overloads in core_ops().items():
        taken = rows.get(name) or rows.get(f"{name}_copy") or {}
        missing = [o for o in overloads if taken and o not in taken and f"{name}.{o}" not in why]
        if taken:
            note = f"not {', '.join(missing)}" if missing else ""
            done.append(f"| {name} | {', '.join(sorted(set(taken.values())))} | {note} |")
        else:
            reason = why.get(name, "?")
            kernel = "ExecuTorch's kernel" if name in kernels or f"{name}_copy" in kernels else "refused"
            left.append(f"| {name} | {'keepdim' if reason == AS_2D else kernel} | {reason} |")
    core = {n.removesuffix("_copy") for n in core_ops()}
    other = sorted(n for n in rows if n.removesuffix("_copy") not in core)
    lines = [
        *("# What is delegated", "", INTRODUCTION, ""),
        *(f"## Core ATen, delegated ({len(done)})", "", "| op | as | overloads |", "|---|---|---|", *done, ""),
        *(f"## Core ATen, without a row ({len(left)})", "", "| op | runs on | why |", "|---|---|---|", *left, ""),
        *("## Others that are taken as they are", "", ", ".join(other) + ".", ""),
        *("## Ops of the ggml engine", "", ", ".join(sorted(_native.engines()["ggml"])) + ".", ""),
    ]
    return "\n".join(lines)


def test_the_table_of_ops_is_the_rows(request):
    """docs/ops.md is what the rows give, and every core op is in it with a reason."""
    page, path = ops_page(), ROOT / "docs" / "ops.md"
    if request.config.getoption("--regen-golden"):
        path.write_text(page)
    assert path.read_text() == page
    assert "| ? |" not in page, [line for line in page.splitlines() if line.endswith("| ? |")]


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
