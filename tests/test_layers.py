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
# errors ← bounds ← dims ← contract, program ← signature, pte, ops ← frontend ← partition ← capture, lowering ←
# module ← cli
SEES = {
    "errors": set(),
    "files": {"errors"},
    "factory": {"errors"},
    "bounds": {"errors"},
    "dims": {"errors", "bounds"},
    "contract": {"errors", "bounds", "dims"},
    "reading": {"errors", "bounds", "dims", "contract"},
    "program": {"errors", "bounds", "dims", "contract"},
    "text": {"errors", "dims", "contract", "program"},
    "cache": {"_native", "errors", "files"},
    "mapped": {"errors", "cache"},
    "treespec": {"errors"},
    "signature": {"_native", "errors", "contract", "mapped", "tables", "treespec"},
    "mlir": {"errors"},
    "own_passes": {"errors", "mlir"},
    "worker": {"errors", "files"},
    "refine": {"errors", "mlir", "own_passes", "worker"},
    "interpreter": {"errors", "mlir"},
    "worker_child": {"errors", "mlir", "refine", "interpreter", "worker"},
    "hlo": {
        *("_native", "errors", "files", "cache", "dims", "contract", "reading", "program", "signature", "quant", "ops"),
        *("passes", "nodes", "frontend", "propagate", "capture", "lowering", "refine", "mlir", "turns"),
        *("worker", "interpreter"),
    },
    "pte": {"_native", "errors", "program", "signature"},
    "torch_ops": {"quant"},
    "ops": {"dims", "contract", "program", "torch_ops"},
    "quant": {"_native", "errors", "contract"},
    "reference": {"errors", "dims", "contract", "program", "quant", "torch_ops"},
    "passes": {"dims", "contract", "program", "ops", "reference"},
    "nodes": {"dims", "reading", "ranges"},
    "outline": {"errors", "contract", "dims", "nodes", "pte", "reading"},
    "frontend": {"nodes", "_native", "errors", "dims", "contract", "reading", "program", "quant", "ops", "passes"},
    "propagate": {"errors", "dims", "contract", "reading"},
    "loops": {"errors", "reading", "nodes"},
    "kernels": {"_native", "errors", "nodes"},
    "partition": {
        *(
            "errors",
            "dims",
            "contract",
            "reading",
            "ops",
            "passes",
            "nodes",
            "frontend",
            "propagate",
            "rewrite",
            "tracing",
        ),
        "ranges",
        "owned",
        "_native",
    },
    "whole": {"contract", "dims", "ops", "passes", "quant", "frontend", "partition"},
    "guard": {"contract", "nodes", "partition", "passes", "program", "reading", "whole"},
    "trials": {"errors", "dims", "contract", "propagate"},
    "forms": set(),
    "rewrite": {"errors", "dims", "nodes", "reading", "tracing", "forms"},
    "tracing": set(),
    "capture": {
        *("errors", "dims", "contract", "reading", "signature"),
        *("propagate", "trials", "rewrite", "tracing", "ranges"),
    },
    "lowering": {
        *("errors", "files", "dims", "contract", "reading", "program", "signature", "pte"),
        *("ops", "nodes", "frontend", "kernels", "loops", "propagate", "partition", "capture", "tracing"),
        *("mapped", "passes", "quant", "whole", "foreign", "guard", "ranges", "owned", "outline", "_native"),
    },
    "module": {"_native", "errors", "files", "signature", "pte", "splits", "turns", "capture", "lowering"},
    "settings": {"_native", "errors"},
    "splits": {"_native", "errors", "files", "cache", "contract", "quant", "tables", "text", "ranges"},
    "owned": {"reading", "nodes"},
    "foreign": {"owned", "errors", "dims", "contract", "reading", "nodes", "propagate", "partition", "ranges"},
    "tables": {"errors", "files"},
    "progress": set(),
    "turns": {"errors"},
    "ranges": {"errors", "files", "cache", "tracing", "tables", "progress"},
    "demo": {"module"},
    "checkpoint": {"errors", "turns"},
    "template_child": set(),
    "templates": {"errors", "files"},
    "embed": {"errors", "files", "module", "cache", "checkpoint"},
    "llm": {
        *("errors", "files", "contract", "reading", "mapped", "pte", "signature", "quant", "torch_ops"),
        *("capture", "lowering", "module", "ops", "turns"),
    },
    "gguf": {"_native", "errors", "checkpoint", "mapped", "quant"},
    "generate": {"errors", "files", "cache", "checkpoint", "templates", "llm", "gguf"},
    "auditing": {
        *("errors", "dims", "contract", "reading", "signature", "pte", "trials", "capture", "partition", "foreign"),
        *("lowering", "module", "turns", "files"),
    },
    "cost": {"contract", "dims", "program"},
    "profile": {"module"},
    "inputs": {"contract", "errors"},
    "report": {"errors", "profile", "contract", "cost", "dims", "outline", "program", "pte", "signature"},
    "cli": {
        *("report", "profile", "inputs", "factory"),
        *("errors", "contract", "signature", "pte", "module", "progress", "splits", "demo", "embed", "generate"),
        *("refine", "hlo", "auditing", "files"),
    },
    "__main__": {"cli"},
    "__init__": {
        *(
            "_native",
            "errors",
            "settings",
            "contract",
            "module",
            "llm",
            "partition",
            "ranges",
            "hlo",
            "auditing",
            "turns",
        ),
    },
}
FILES = sorted({p.relative_to(PACKAGE).parts[0].removesuffix(".py") for p in PACKAGE.rglob("*.py")})


def files_of(name: str) -> list[Path]:
    """A module's file, or the files of a package: between themselves those are free."""
    return sorted((PACKAGE / name).glob("*.py")) or [PACKAGE / f"{name}.py"]


def imports(path: Path) -> set[str]:
    """The modules of keepdim that a file imports, also inside functions."""
    found: set[str] = set()
    up = len(path.relative_to(PACKAGE).parts)
    for n in ast.walk(ast.parse(path.read_text())):
        if isinstance(n, ast.ImportFrom) and n.level == up:
            found |= {n.module.split(".")[0]} if n.module else {a.name for a in n.names}
        elif isinstance(n, ast.ImportFrom) and (n.module or "").split(".")[0] == "keepdim":
            found.add((n.module or "").partition(".")[2] or "__init__")
        elif isinstance(n, ast.Import):
            found |= {a.name for a in n.names if a.name.split(".")[0] == "keepdim"}
    return found


@pytest.mark.parametrize("name", FILES)
def test_imports_go_one_way(name: str) -> None:
    """A file imports only what stands before it."""
    assert name in SEES, f"say in SEES what keepdim/{name}.py may import"
    assert set().union(*(imports(p) for p in files_of(name))) <= SEES[name]


def test_the_table_of_layers_has_no_cycle() -> None:
    """Layers can be put in an order, so that a later stage never asks an earlier one."""
    left, done = dict(SEES), {"_native"}
    while left:
        free = {n for n, seen in left.items() if seen & SEES.keys() <= done}
        assert free, f"a cycle among {sorted(left)}"
        done |= free
        left = {n: s for n, s in left.items() if n not in free}


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
