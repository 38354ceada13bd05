"""Every name that tests, benchmarks and examples import from keepdim exists.

mypy reads keepdim alone, and many of these files are run by hand: a renamed function would be noticed late. The files
are parsed, not imported.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MEANT = "type: ignore[attr-defined]"
FILES = sorted(p for folder in ("tests", "bench", "examples") for p in (ROOT / folder).rglob("*.py"))


def imported(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """(line, module, name) of every import from keepdim; the name is empty where the module itself is imported.

    >>> list(imported(ast.parse("import os, keepdim.cli as c\\nfrom keepdim.ir import program, quant as q")))
    [(1, 'keepdim.cli', ''), (2, 'keepdim.ir', 'program'), (2, 'keepdim.ir', 'quant')]
    """
    for n in ast.walk(tree):
        if isinstance(n, ast.Import):
            yield from ((n.lineno, a.name, "") for a in n.names if a.name.split(".")[0] == "keepdim")
        elif isinstance(n, ast.ImportFrom) and n.level == 0 and (n.module or "").split(".")[0] == "keepdim":
            yield from ((n.lineno, str(n.module), a.name) for a in n.names)


def attributes(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """(line, module, name) of every attribute that is read of an imported module of keepdim, such as `keepdim.load`.

    A name that the file also uses for something else, for instance for a parameter, is left out.

    >>> list(attributes(ast.parse("import keepdim\\nfrom keepdim.ir import program as p\\nkeepdim.load, p.Node")))
    [(3, 'keepdim', 'load'), (3, 'keepdim.ir.program', 'Node')]
    """
    meanings: dict[
        str, set[str]
    ] = {}  # a name of the file → the modules it is imported from; "" if it is something else
    for n in ast.walk(tree):
        if isinstance(n, ast.Import):
            found = [(a.asname, a.name) if a.asname else (a.name.split(".")[0],) * 2 for a in n.names]
        elif isinstance(n, ast.ImportFrom):
            found = [(a.asname or a.name, f"{n.module}.{a.name}") for a in n.names]
        elif isinstance(n, ast.arg):
            found = [(n.arg, "")]
        elif isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load):
            found = [(n.id, "")]
        else:
            continue
        for name, module in found:
            meanings.setdefault(name, set()).add(module)
    known = {name: min(m) for name, m in meanings.items() if len(m) == 1}
    modules = {name: m for name, m in known.items() if m.split(".")[0] == "keepdim" and is_module(m)}
    for n in ast.walk(tree):
        if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load) and isinstance(n.value, ast.Name):
            if n.value.id in modules:
                yield n.lineno, modules[n.value.id], n.attr


def is_module(name: str) -> bool:
    """Whether this is the name of a module, not of something inside one."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is not a package
        return False


def missing(module: str, name: str) -> str | None:
    """What of the two does not exist; None if both do. A package that is not installed is not missing here."""
    if not is_module(module):
        return f"there is no module {module}"
    try:
        found = importlib.import_module(module)
    except ImportError as e:
        return None if (e.name or "").split(".")[0] != "keepdim" else str(e)
    if name in ("", "*") or hasattr(found, name) or is_module(f"{module}.{name}"):
        return None
    return f"{module} has no {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_what_is_imported_exists(path: Path) -> None:
    """Also the attributes of imported modules, but for those that a test expects not to exist."""
    text = path.read_text()
    tree, lines = ast.parse(text), text.splitlines()
    wrong = [(line, missing(module, name)) for line, module, name in (*imported(tree), *attributes(tree))]
    assert not [f"{path.name}:{line}: {what}" for line, what in wrong if what and MEANT not in lines[line - 1]]


def test_what_does_not_exist_is_found() -> None:
    """A module, a name of a module, and an attribute; what is imported on first use exists."""
    assert missing("keepdim.shapes.dims", "Dim") == "there is no module keepdim.shapes.dims"
    assert missing("keepdim.shapes.dim", "Dimension") == "keepdim.shapes.dim has no Dimension"
    assert missing("keepdim", "lowered") == "keepdim has no lowered"
    assert [missing(*names) for names in (("keepdim", "lower"), ("keepdim", "shapes"), ("keepdim.cli", ""))] == [
        None
    ] * 3
