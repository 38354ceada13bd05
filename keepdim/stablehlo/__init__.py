"""StableHLO: a Program as jax functions, the dynamic program that jax writes of them, and its refinement.

Owns the rules that take nodes to jax (`table` and a file for each family), `export`, `refine` with the passes of MLIR
and our own, `program` (what a user holds), `file` (what is saved), `xla` (what runs it) and the worker process that
reads files of strangers. Takes models, Programs and files; gives `StableHLOProgram`. Never writes a .pte.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .export import to_stablehlo
    from .file import load_stablehlo
    from .program import StableHLOProgram
    from .rules import ROWS

# Imported when asked for: refining a module needs jaxlib alone, neither torch nor jax.
_HOMES = {"ROWS": "rules", "StableHLOProgram": "program", "load_stablehlo": "file", "to_stablehlo": "export"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


__all__ = ["ROWS", "StableHLOProgram", "load_stablehlo", "to_stablehlo"]
