"""Which package may import which; where headers of other libraries, prints and environment variables may be."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import keepdim

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "keepdim"
RUNTIME = ROOT / "runtime"
BASE = {"native", "errors", "files", "cache", "progress", "settings"}  # every room but `shapes` may use these
# Room → the rooms that it may import. Imports go one way: a row names only rooms above it.
MAY_IMPORT: dict[str, set[str]] = {
    "shapes": set(),
    "native": {"_native", "shapes"},
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
    "cli": {
        "shapes",
        "artifact",
        "ranges",
        "lowering",
        "stablehlo",
        "module",
        "profile",
        "models",
        "auditing",
        "report",
    },
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
    used = set().union(*(imports(p) for p in files_of(name))) - {name, "__version__"}
    if name in ALIASES:
        assert used == {ALIASES[name]}
    elif name in ("shapes", "native"):
        assert used <= MAY_IMPORT[name] | {"errors"}  # what loads the library needs them first
    elif name in BASE:
        assert used <= BASE
    else:
        assert name in MAY_IMPORT, f"say in MAY_IMPORT what keepdim/{name} may import"
        assert used <= MAY_IMPORT[name] | BASE


def test_the_table_of_rooms_has_no_cycle() -> None:
    """Each row names only rooms above it, so that a later stage never asks an earlier one."""
    rooms = list(MAY_IMPORT)
    for i, room in enumerate(rooms):
        assert MAY_IMPORT[room] <= {"_native", *rooms[:i]}, room


@pytest.mark.parametrize("name", [n for n in MAY_IMPORT if (PACKAGE / n).is_dir()])
def test_a_room_says_what_it_owns(name: str) -> None:
    """In the docstring of its package; and it has not the name of a public function."""
    text = ast.get_docstring(ast.parse((PACKAGE / name / "__init__.py").read_text())) or ""
    assert re.search(r"\bOwns\b", text) and re.search(r"\bNever\b|\bNo other\b", text), text
    assert name not in keepdim.__all__


def sources(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.suffix in (".h", ".cpp"))


# What a room of the runtime may include of the others; itself always.
MAY_INCLUDE = {
    "core": set(),
    "artifact": {"core"},
    "include": set(),
    "ggml": {"core"},
    "mlx": {"core"},
    "executorch": {"core", "artifact", "ggml", "keepdim"},  # it registers the ggml engine
    "python": {"core", "artifact", "ggml", "executorch"},
}
# Where the headers of a library may be included.
LIBRARIES = {
    r"executorch/": {"executorch", "include"},
    r"(ggml|gguf)[-_a-z]*\.h": {"ggml"},
    r"mlx/": {"mlx"},
    r"nanobind/|Python\.h": {"python"},
}


@pytest.mark.parametrize("path", sources(RUNTIME), ids=lambda p: str(p.relative_to(RUNTIME)))
def test_a_room_of_the_runtime_includes_only_what_it_may(path: Path) -> None:
    """Our own headers by a path from `runtime/`, a library's in angle brackets and in one room alone."""
    room = path.relative_to(RUNTIME).parts[0]
    for bracket, header in re.findall(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', path.read_text(), re.M):
        if bracket == '"' and header not in ("kernel_arguments.inc",):
            assert header.split("/")[0] in {room, *MAY_INCLUDE[room]}, header
            continue
        for pattern, rooms in LIBRARIES.items():
            assert not re.match(pattern, header) or room in rooms, header


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


FOREIGN = {"torch", "executorch", "transformers", "gguf", "tokenizers", "jax", "jaxlib", "sympy", "numpy"}
CHANGES = {"update", "pop", "popitem", "setdefault", "discard", "append", "clear", "insert", "__setitem__", "register"}
# Functions that change torch for the whole process, however torch is reached; and others of that form.
SETTINGS = {"set_num_threads", "set_num_interop_threads", "set_default_dtype", "set_default_device", "set_grad_enabled"}
SETTER = re.compile(r"_?set_|use_deterministic")
# Methods and public attributes of their objects: of a ShapeEnv, of a user's model, of an import.
METHODS = {"register_buffer", "register_parameter", "set_attn_implementation"}
STATE = {"var_to_range", "replacements", "guards", "rope_type", "inv_freq", "meta_path", "exec_module"}
IMPORTS = ("optional", "importlib.import_module", "import_module", "__import__")
# What is set outside compat all the same.
SET_ELSEWHERE = {
    "capture/validate.py": ["torch.backends.mha.set_fastpath_enabled"] * 2,  # a public setting, and its restoration
    "stablehlo/refine.py": ["out._divides"],  # a class of its own file
}


def foreign_names(tree: ast.Module) -> set[str]:
    """Names in a file that stand for modules and objects of other libraries."""
    found: set[str] = set()
    for n in ast.walk(tree):
        if isinstance(n, ast.Import):
            found |= {a.asname or a.name.split(".")[0] for a in n.names if a.name.split(".")[0] in FOREIGN}
        elif isinstance(n, ast.ImportFrom) and not n.level and (n.module or "").split(".")[0] in FOREIGN:
            found |= {a.asname or a.name for a in n.names}
        elif isinstance(n, ast.Assign) and not isinstance(n.value, ast.Lambda):
            part = n.value  # what an attribute of an import is an attribute of
            while isinstance(part, ast.Attribute):
                part = part.value
            if isinstance(part, ast.Call) and ast.unparse(part.func) in IMPORTS:
                found |= {ast.unparse(t) for t in n.targets if isinstance(t, (ast.Name, ast.Attribute))}
    return found


def in_foreign(text: str, names: set[str]) -> bool:
    """Whether `a.b.c` is one of the names or a part of one."""
    parts = re.split(r"[.\[(]", text)
    return any(".".join(parts[:i]) in names for i in range(1, len(parts) + 1))


def is_private(node: ast.AST) -> bool:
    """`x._name`, `x.__class__` or an attribute that only other libraries' objects have, of somebody else's x."""
    if not isinstance(node, ast.Attribute) or ast.unparse(node.value).split(".")[0] in ("self", "cls"):
        return False
    private = node.attr.startswith("_") and not node.attr.endswith("__")
    return node.attr == "__class__" or node.attr in STATE or private


def changes_of_others(tree: ast.Module) -> list[str]:
    """What a file sets in other libraries or in private parts of objects, as text."""
    names, found = foreign_names(tree), []
    for n in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(n, (ast.Assign, ast.Delete)):
            targets = list(n.targets)
        elif isinstance(n, (ast.AugAssign, ast.AnnAssign)):
            targets = [n.target]
        for t in (part for target in targets for part in ast.walk(target)):
            if isinstance(t, (ast.Attribute, ast.Subscript)) and isinstance(t.ctx, (ast.Store, ast.Del)):
                held = t.value if isinstance(t, ast.Subscript) else t
                if in_foreign(ast.unparse(t.value), names) or is_private(held):
                    found.append(ast.unparse(t))
        if isinstance(n, ast.Call):
            name = ast.unparse(n.func)
            if name in ("setattr", "delattr", "object.__setattr__") and ast.unparse(n.args[0]) != "self":
                found.append(ast.unparse(n))
            elif isinstance(n.func, ast.Attribute) and n.func.attr in CHANGES:
                if is_private(n.func.value) or in_foreign(name, names):
                    found.append(name)
            elif isinstance(n.func, ast.Attribute) and n.func.attr in SETTINGS:
                found.append(name)
            elif isinstance(n.func, ast.Attribute) and SETTER.match(n.func.attr) and in_foreign(name, names):
                found.append(name)
            elif isinstance(n.func, ast.Attribute) and n.func.attr in METHODS and name.split(".")[0] != "self":
                found.append(name)
        if isinstance(n, (ast.Import, ast.ImportFrom)) and "mock" in ast.unparse(n):
            found.append(ast.unparse(n))
    return found


OUTSIDE_COMPAT = [p for p in sorted(PACKAGE.rglob("*.py")) if p.parent.name != "compat"]


@pytest.mark.parametrize("path", OUTSIDE_COMPAT, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_only_compat_changes_other_libraries(path: Path) -> None:
    """No attribute of a foreign module or object, no private one of any object, and no table of theirs is set."""
    allowed = SET_ELSEWHERE.get(str(path.relative_to(PACKAGE)), [])
    assert changes_of_others(ast.parse(path.read_text())) == allowed


def test_changes_of_others_are_found() -> None:
    """The forms that patches had before they were in compat, and settings of the whole process."""
    text = """
import torch
from executorch.exir.program import _program
from torch.fx.node import _side_effectful_functions
env.__class__ = Open
ep._range_constraints = {}
_program.get_control_flow_submodules = all_of
package = optional("load", "gguf")
slow, package.GGUFReader = package.GGUFReader, fast
torch.ops.aten.add.py_kernels[key] = kernel
_side_effectful_functions.discard(call)
ep._state_dict.update(more)
setattr(owner, name, new)
del torch.export.ExportedProgram.ranges
env.var_to_range[symbol] = known
self.interface = optional("lower", "transformers").AttentionInterface
self.interface.register("keepdim", attend)
model.set_attn_implementation("keepdim")
rope.rope_type, rope.inv_freq = "default", rope.original_inv_freq
layer.register_buffer("keys", data)
layer._buffers.pop("keys")
sys.meta_path.insert(0, finder)
sys.modules["torch"].set_num_threads(1)
torch.backends.cuda.matmul.set_precision(order)
torch.use_deterministic_algorithms(True)
"""
    assert len(changes_of_others(ast.parse(text))) == 20


def test_public_names_exist() -> None:
    """What `__all__` promises is there, and no file is called utils or helpers."""
    assert all(hasattr(keepdim, name) for name in keepdim.__all__)
    assert not [n for n in FILES if re.search(r"utils|helpers|_v\d", n)]


@pytest.mark.parametrize("path", sorted((ROOT / "tests").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_is_imported_from_a_test(path: Path) -> None:
    """What tests share is in tests/support."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert not [n for n in names if n.split(".")[-1].startswith("test_")]


def test_every_room_has_tests() -> None:
    """In a folder of the same name."""
    rooms = {p.parent.name for p in PACKAGE.glob("*/__init__.py")}
    tested = {p.parent.name for p in (ROOT / "tests").glob("*/test_*.py")}
    assert rooms <= tested
