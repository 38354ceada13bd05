"""README and docs say what the code does: their examples run, and what can be written from the sources is.

Of a page's fenced blocks, those marked `python` run one after the other in one namespace; behind a statement that is
refused stands `# KeepdimError: ` and its sentence. In those marked `console` the lines behind `$ ` run in a shell, and
the lines below are what they print, `...` for any text. Other blocks are not run; commands of keepdim there are parsed.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sentences
import torch

import keepdim
from keepdim import _native
from keepdim.capture.decompose import FORMS
from keepdim.cli import commands as cli
from keepdim.frontend import ops
from keepdim.ir import program
from keepdim.lowering.executorch_kernels import FAULTS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NEEDS = {"llm": "transformers", "stablehlo": "jax"}  # extras


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
Written by `pytest tests/test_docs.py --regen-golden` from the rules of keepdim/frontend/ops and torch's list of Core
ATen ops. A node is taken when its row, its dtypes and its contract allow it; the report of a lowering says why one
was not. What is not taken runs on ExecuTorch's kernels where it has one."""


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
            if any(str(op).startswith(f"aten.{name}.") for op in FAULTS):
                kernel += ", where that is right"
            left.append(f"| {name} | {'keepdim' if reason == AS_2D else kernel} | {reason} |")
    core = {n.removesuffix("_copy") for n in core_ops()}
    other = sorted(n for n in rows if n.removesuffix("_copy") not in core)
    lines = [
        *("# What is delegated", "", INTRODUCTION, ""),
        *(f"## Core ATen, delegated ({len(done)})", "", "| op | as | overloads |", "|---|---|---|", *done, ""),
        *(f"## Core ATen, without a row ({len(left)})", "", "| op | runs on | why |", "|---|---|---|", *left, ""),
        *("## Others that are taken as they are", "", ", ".join(other) + ".", ""),
        *("## Others that are written in other ops", "", ", ".join(sorted(map(str, FORMS))) + ".", ""),
        *("## Ops of every engine", "", ", ".join(sorted(_native.engines()["ggml"])) + ".", ""),
    ]
    return "\n".join(lines)


def test_the_table_of_ops_is_the_rows(request):
    """docs/ops.md is what the rows give, and every core op is in it with a reason."""
    page, path = ops_page(), ROOT / "docs" / "ops.md"
    if request.config.getoption("--regen-golden"):
        path.write_text(page)
    assert path.read_text() == page
    assert "| ? |" not in page, [line for line in page.splitlines() if line.endswith("| ? |")]


def test_the_list_of_errors_is_that_of_the_sources(request):
    """docs/errors.md holds every sentence, and every stage says what to do."""
    page, path = sentences.page(), ROOT / "docs" / "errors.md"
    if request.config.getoption("--regen-golden"):
        path.write_text(page)
    assert path.read_text() == page
    assert {s.stage for s in sentences.sentences()} - {""} <= set(sentences.STAGES)


def blocks(path: Path) -> list[tuple[str, str]]:
    """A page's fenced blocks: what they are marked with, and their text."""
    return re.findall(r"^```(\w*)\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)


def run_python(text: str, scope: dict[str, Any]) -> None:
    """Statement by statement; one with a sentence behind it has to be refused with it."""
    refusals = {i: m[1] for i, line in enumerate(text.splitlines(), 1) if (m := re.match("# KeepdimError: (.*)", line))}
    for statement in ast.parse(text).body:
        code = compile(ast.Module([statement], []), "<page>", "exec")
        sentence = refusals.pop((statement.end_lineno or 0) + 1, None)
        if sentence is None:
            exec(code, scope)
        else:
            with pytest.raises(keepdim.KeepdimError, match=re.escape(sentence)):
                exec(code, scope)
    assert not refusals


def run_console(text: str, folder: Path) -> None:
    """Command by command; what is printed is as on the page."""
    for command, _, printed in (part.partition("\n") for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]):
        out, err = keepdim_command(command) if command.startswith("keepdim ") else shell_command(command, folder)
        want = ".*".join(re.escape(part) for part in printed.strip().split("..."))
        said = "\n".join(line for line in err.splitlines() if line.startswith("["))  # a refusal
        assert re.fullmatch(want, (out + said).strip(), re.DOTALL), f"{command}\n{out}{err}"


def keepdim_command(command: str) -> tuple[str, str]:
    """In this process, which has imported everything."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        cli.main(shlex.split(command)[1:])
    return out.getvalue(), err.getvalue()


def shell_command(command: str, folder: Path) -> tuple[str, str]:
    """In a shell that finds this environment's programs."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "PATH": path}
    done = subprocess.run(command, shell=True, cwd=folder, text=True, capture_output=True, env=env)
    return done.stdout, done.stderr


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.stem)
def test_examples_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page's examples, in the order of the page, in a folder of its own."""
    if path.stem in NEEDS:
        pytest.importorskip(NEEDS[path.stem])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    torch.manual_seed(0)
    scope: dict[str, Any] = {"__name__": "__page__"}
    for kind, text in blocks(path) if path.stem != "CONTRIBUTING" else []:
        if kind == "python":
            run_python(text, scope)
        elif kind == "console":
            run_console(text, tmp_path)


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.stem)
def test_commands_parse(path: Path) -> None:
    """Every command of keepdim on a page, in blocks and in the text, is one that the command line takes."""
    inline = re.findall(r"`(keepdim [a-z]+ [^`]*)`", re.sub(r"^```.*?^```", "", path.read_text(), flags=re.S | re.M))
    lines = [line.removeprefix("$ ") for kind, text in blocks(path) for line in text.splitlines() if kind != "python"]
    for line in [*inline, *(line for line in lines if line.startswith("keepdim "))]:
        if "…" in line or "..." in line or "COMMAND" in line:
            continue  # a form of commands
        cli._parser().parse_args(shlex.split(line, comments=True)[1:])


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.stem)
def test_links_lead_somewhere(path: Path) -> None:
    """Files that a page links to or shows exist, and so do their headings."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.S | re.M)
    for target in re.findall(r"\]\(([^)#\s]*(?:#[^)\s]*)?)\)|<img [^>]*src=\"([^\"]+)\"", text):
        name, _, heading = (target[0] or target[1]).partition("#")
        if name.startswith("http"):
            continue
        other = path.parent / name if name else path
        assert other.exists(), name
        if heading:
            titles = re.findall(r"^#+ (.*)$", other.read_text(), re.M)
            known = {re.sub(r"[^\w -]", "", t.lower()).replace(" ", "-") for t in titles}
            assert heading in known, f"{name}#{heading}"


def test_the_rows_of_an_op_are_those_of_the_sources() -> None:
    """What CONTRIBUTING.md shows of adding an op stands in the files it names."""
    shown = [text for kind, text in blocks(ROOT / "CONTRIBUTING.md") if kind in ("python", "cpp")]
    assert len(shown) == 5
    for text in shown:
        comment, row = text.splitlines()
        file = re.match(r"(?:#|//) ([\w/.]+):", comment)
        assert file and row in (ROOT / file[1]).read_text(), text


def test_schema_is_published():
    """docs/program.schema.json is what `schema()` gives."""
    published = json.loads((ROOT / "docs" / "program.schema.json").read_text())
    assert published == json.loads(msgspec.json.encode(program.schema()))
