"""The layers of DESIGN.md: which file may import which, and where foreign headers, prints and variables may stand."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import keepdim

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "keepdim"
RUNTIME = ROOT / "runtime"
BASE = {"_native", "errors", "files", "cache", "progress", "settings"}  # every room may use these
# Room → the rooms that it may import. Imports go one way: a row names only rooms above it.
MAY_IMPORT: dict[str, set[str]] = {
    "shapes": set(),
    "compat": set(),
    "ir": {"shapes"},
    "passes": {"shapes", "ir"},
    "fx": {"shapes"},
    "frontend": {"shapes", "ir", "passes", "fx"},
    "artifact": {"shapes", "ir"},
    "ranges": {"shapes", "ir", "fx", "compat", "artifact"},
    "capture": {"shapes", "fx", "compat", "artifact", "ranges"},
    "lowering": {"shapes", "ir", "passes", "fx", "compat", "frontend", "artifact", "capture"},
    "stablehlo": {"shapes", "ir", "passes", "fx", "compat", "frontend", "artifact", "capture"},
    "module": {"compat", "artifact", "ranges", "capture", "lowering"},
    "profile": {"module"},
    "models": {"shapes", "ir", "compat", "frontend", "artifact", "capture", "lowering", "module"},
    "auditing": {"shapes", "fx", "compat", "artifact", "capture", "lowering", "module"},
    "report": {"shapes", "ir", "artifact", "profile"},
    "cli": {"shapes", "artifact", "ranges", "stablehlo", "module", "profile", "models", "auditing", "report"},
}
# Paths that are documented and lead into a room.
ALIASES = {"llm": "models", "generate": "models", "embed": "models", "refine": "stablehlo", "__main__": "cli"}
FILES = sorted({p.relative_to(PACKAGE).parts[0].removesuffix(".py") for p in PACKAGE.rglob("*.py")})


def files_of(name: str) -> list[Path]:
    """A module's file, or all files of a room: between themselves those are free."""
    return sorted((PACKAGE / name).rglob("*.py")) or [PACKAGE / f"{name}.py"]


def imports(path: Path) -> set[str]:
    """The rooms of keepdim that a file imports, also inside functions."""
    found: set[str] = set()
    where = path.relative_to(PACKAGE).parts
    for n in ast.walk(ast.parse(path.read_text())):
        if isinstance(n, ast.ImportFrom):
            up = [*where[: len(where) - n.level]] if n.level else None
            parts = [*(up or []), *(n.module or "").split(".")] if up is not None else (n.module or "").split(".")[1:]
            if n.level or (n.module or "").split(".")[0] == "keepdim":
                parts = [p for p in parts if p]
                found |= {parts[0]} if parts else {a.name for a in n.names}
        elif isinstance(n, ast.Import):
            found |= {(a.name.split(".") + ["__init__"])[1] for a in n.names if a.name.split(".")[0] == "keepdim"}
    return found


@pytest.mark.parametrize("name", [n for n in FILES if n != "__init__"])
def test_imports_go_one_way(name: str) -> None:
    """A room imports only what the table allows."""
    used = set().union(*(imports(p) for p in files_of(name))) - {name}
    if name in ALIASES:
        assert used == {ALIASES[name]}
    elif name in BASE:
        assert used <= BASE
    else:
        assert name in MAY_IMPORT, f"say in MAY_IMPORT what keepdim/{name} may import"
        assert used <= MAY_IMPORT[name] | BASE


def test_the_table_of_rooms_has_no_cycle() -> None:
    """Each row names only rooms above it, so that a later stage never asks an earlier one."""
    rooms = list(MAY_IMPORT)
    for i, room in enumerate(rooms):
        assert MAY_IMPORT[room] <= set(rooms[:i]), room


@pytest.mark.parametrize("name", [n for n in MAY_IMPORT if (PACKAGE / n).is_dir()])
def test_a_room_says_what_it_owns(name: str) -> None:
    """In the docstring of its package; and it has not the name of a public function."""
    text = ast.get_docstring(ast.parse((PACKAGE / name / "__init__.py").read_text())) or ""
    assert re.search(r"\bOwns\b", text) and re.search(r"\bNever\b|\bNo other\b", text), text
    assert name not in keepdim.__all__


def sources(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.suffix in (".h", ".cpp"))


def includes(path: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(), re.M)


@pytest.mark.parametrize("path", sources(RUNTIME), ids=lambda p: str(p.relative_to(RUNTIME)))
def test_foreign_headers_stand_in_one_place(path: Path) -> None:
    """ExecuTorch only in the adapters to it, an engine's library only in its folder, nanobind only in python.cpp."""
    where = path.relative_to(RUNTIME)
    for header in includes(path):
        if header.startswith("executorch/"):
            assert where.stem in ("backend", "kernels", "method", "module", "executorch", "guarded", "keepdim"), header
        if re.match(r"(ggml|gguf)[-_a-z]*\.h$", header) and header not in ("ggml_engine.h", "gguf_file.h"):
            assert where.parts[0] == "ggml", header
        if header.startswith("mlx/"):
            assert where.parts[0] == "mlx", header
        if header.startswith("nanobind/") or header == "Python.h":
            assert str(where) == "python.cpp", header


def test_the_core_does_not_include_an_engine() -> None:
    """dims ← program ← rules ← plan ← engine: no core file includes one of an engine but the one that registers it."""
    core = {
        "error",
        "lock",
        "json",
        "dims",
        "program",
        "contract",
        "rules",
        "quant",
        "plan",
        "engine",
        "cpu",
        "pte",
        "sha256",
    }
    for path in sources(RUNTIME):
        if path.parent == RUNTIME and path.stem in core:
            assert not [h for h in includes(path) if "ggml" in h or "mlx" in h], path.name


@pytest.mark.parametrize("name", [n for n in FILES if n not in ("cli", "demo")])
def test_the_library_prints_nothing(name: str) -> None:
    """`print` is for the command line; the library logs or raises."""
    trees = [ast.parse(p.read_text()) for p in files_of(name)]
    calls = [n for t in trees for n in ast.walk(t) if isinstance(n, ast.Call)]
    assert not [c.lineno for c in calls if isinstance(c.func, ast.Name) and c.func.id == "print"]


LAST_WORDS = {"ggml/engine.cpp": ["fprintf"]}  # of ggml's own abort, which ends the process: the message would be lost


@pytest.mark.parametrize("path", sources(RUNTIME), ids=lambda p: str(p.relative_to(RUNTIME)))
def test_the_runtime_neither_prints_nor_reads_the_environment(path: Path) -> None:
    """No prints, no environment variables, no signal handlers in C++."""
    code = re.sub(r'//[^\n]*|"(?:[^"\\\n]|\\.)*"', "", path.read_text())
    found = re.findall(r"\b(?:getenv|setenv|f?printf|puts|std::cout|std::cerr|std::clog|sigaction|std::signal)\b", code)
    assert found == LAST_WORDS.get(str(path.relative_to(RUNTIME)), [])


def test_public_names_exist() -> None:
    """What `__all__` promises is there, and no file is called utils or helpers."""
    assert all(hasattr(keepdim, name) for name in keepdim.__all__)
    assert not [n for n in FILES if re.search(r"utils|helpers|_v\d", n)]
