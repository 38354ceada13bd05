"""StableHLO: a Program as jax functions, one row an op, and the dynamic program that jax writes of them.

`table` has what rows are made of, a file a family has the rows; `export` makes the module, `program` is what a user
holds, `file` saves it, `xla` runs it.
"""

from . import data, elementwise, index, product, recurrent, reduce, sample, shape, window  # noqa: F401
from .export import to_stablehlo
from .file import load_stablehlo
from .program import StableHLOProgram
from .table import ROWS

__all__ = ["ROWS", "StableHLOProgram", "load_stablehlo", "to_stablehlo"]
