"""StableHLO: a Program as jax functions, the dynamic StableHLO that jax exports from them, and its refinement.

Owns the lowering rules from nodes to jax (`table` and a file for each op family), `export`, `refine` with MLIR's and
additional passes, `program` (the user's object), `file` (saving and loading), `xla` (compiling and running) and the
worker process that reads untrusted files. Takes models, Programs and files; returns `StableHLOProgram`. Never writes a
.pte.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .export import to_stablehlo
    from .file import load_stablehlo
    from .program import StableHLOProgram
    from .rules import RULES

# Imported lazily: refining a module needs only jaxlib, neither torch nor jax.
_HOMES = {"RULES": "rules", "StableHLOProgram": "program", "load_stablehlo": "file", "to_stablehlo": "export"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


__all__ = ["RULES", "StableHLOProgram", "load_stablehlo", "to_stablehlo"]
