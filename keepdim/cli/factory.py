"""A model in a file of the user: `FILE.py:FACTORY` of the command line."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import KeepdimError, fail


def made(text: str) -> tuple[Any, Any, Any]:
    """What the factory in `FILE.py:FACTORY` returns."""
    if ":" not in text:
        fail("cli", text, "names no factory", "Say it as path/to/file.py:factory")
    made = called(text)
    if not isinstance(made, tuple) or len(made) != 3 or not isinstance(made[1], (tuple, list)):
        kinds = [type(x).__name__ for x in made] if isinstance(made, tuple) else [type(made).__name__]
        fact = f"returned {', '.join(kinds) or 'nothing'}"
        fail("cli", text, fact, "Return (model, args, dynamic_shapes), where args is a tuple")
    return made


def called(text: str) -> Any:
    """What `FILE.py:NAME` gives when it is called."""
    path, _, name = text.rpartition(":")
    try:
        return _factory(Path(path), name)()
    except KeepdimError:
        raise
    except Exception as e:  # the user's own code: where in it, and what it says
        lines = [f.lineno for f in traceback.extract_tb(e.__traceback__) if f.filename == str(Path(path).absolute())]
        at = f" in line {lines[-1]}" if lines else ""
        fail("cli", text, f"failed{at}: {type(e).__name__}: {e}", cause=e)


def _factory(path: Path, name: str) -> Callable[[], Any]:
    spec = importlib.util.spec_from_file_location(f"keepdim_{path.stem}", path) if path.suffix == ".py" else None
    if not path.exists():
        fail("cli", str(path), "does not exist")
    if spec is None or spec.loader is None:
        fail("cli", str(path), "is not a Python file", "Say it as path/to/file.py:factory")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    if not callable(getattr(module, name, None)):
        fail("cli", f"{path}:{name}", "there is no such function")
    return getattr(module, name)
