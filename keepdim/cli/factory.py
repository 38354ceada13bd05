"""Models from the user's Python files: `FILE.py:FACTORY` on the command line."""

from __future__ import annotations

import importlib.util
import re
import symtable
import sys
import traceback
import warnings
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from ..errors import KeepdimError, fail

FORM = "Write it as path/to/file.py:function"
# Names that a file with one of these defines are known only after it ran.
DYNAMIC = re.compile(rb"import\s*\(?\s*\*|\b(?:exec|globals|locals|vars|setattr|global|__getattr__|__dict__)\b")


def check(text: str) -> None:
    """Raise unless the text is `FILE.py:NAME` and the file defines the name; the file is not run."""
    path, colon, name = text.rpartition(":")
    if not colon or not name.isidentifier():
        fail("cli", text, "does not name a function in a Python file", FORM)
    if not Path(path).exists():
        fail("cli", path, "does not exist", "Correct the path")
    if Path(path).suffix != ".py" or not Path(path).is_file():
        fail("cli", path, "is not a Python file", FORM)
    try:
        defined = may_define(Path(path).read_bytes(), path, name)
    except OSError as e:
        fail("cli", path, f"cannot be read ({e.strerror})", "Correct the path", e)
    except (SyntaxError, ValueError) as e:  # a ValueError for a NUL, or for bytes that are not text
        at = f" in line {e.lineno}" if isinstance(e, SyntaxError) and e.lineno else ""
        fail("cli", text, f"failed{at}: {type(e).__name__}: {getattr(e, 'msg', e)}", "Correct the file", e)
    if not defined:
        fail("cli", text, "there is no such function", "Name a function of that file")


def may_define(data: bytes, path: str, name: str) -> bool:
    """Whether Python source defines a name, as far as that is known without running it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are shown when the file runs
        names = symtable.symtable(importlib.util.decode_source(data), path, "exec").get_symbols()
    return bool(DYNAMIC.search(data)) or name in {s.get_name() for s in names if s.is_assigned() or s.is_imported()}


def file_of_module(module: str) -> Path | None:
    """The file of a module, which is not imported, and neither are the packages around it; a folder for a package
    without `__init__.py`, None if there is no such module."""
    top, *inner = module.split(".")
    loaded = sys.modules.get(top)
    spec = loaded.__spec__ if loaded is not None else importlib.util.find_spec(top)
    for i, name in enumerate(inner):
        if spec is None or spec.submodule_search_locations is None:
            return None
        full, path = ".".join([top, *inner[: i + 1]]), list(spec.submodule_search_locations)
        # importlib.util.find_spec imports parents, and so does PathFinder for a folder without __init__.py in another.
        others = (f.find_spec(full, path) for f in sys.meta_path if f is not PathFinder)
        spec = next((s for s in others if s is not None), None) or PathFinder.find_spec(name, path)
    if spec is None:
        return None
    return Path(
        spec.origin if spec.has_location and spec.origin else next(iter(spec.submodule_search_locations or ()), "")
    )


def call_factory(text: str) -> tuple[object, Any, object]:
    """(model, args, dynamic_shapes) from the factory in `FILE.py:FACTORY`."""
    made = call_function(text)
    if not isinstance(made, tuple) or len(made) != 3 or not isinstance(made[1], (tuple, list)):
        kinds = [type(x).__name__ for x in made] if isinstance(made, tuple) else [type(made).__name__]
        fact = f"returned {', '.join(kinds) or 'an empty tuple'}"
        fail("cli", text, fact, "Return (model, args, dynamic_shapes), where args is a tuple")
    return made


def call_function(text: str) -> object:
    """The result of calling `FILE.py:NAME`."""
    path, _, name = text.rpartition(":")
    try:
        return _factory(Path(path), name)()
    except KeepdimError:
        raise
    except Exception as e:  # the user's code: report the line and the message
        lines = [f.lineno for f in traceback.extract_tb(e.__traceback__) if f.filename == str(Path(path).absolute())]
        at = f" in line {lines[-1]}" if lines else ""
        fail("cli", text, f"failed{at}: {type(e).__name__}: {e}", "Correct the function", cause=e)


def _factory(path: Path, name: str) -> Callable[[], object]:
    spec = importlib.util.spec_from_file_location(f"keepdim_{path.stem}", path)
    if spec is None or spec.loader is None:
        fail("cli", str(path), "is not a Python file", FORM)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    if not callable(getattr(module, name, None)):
        fail("cli", f"{path}:{name}", "there is no such function", "Name a function of that file")
    return getattr(module, name)
