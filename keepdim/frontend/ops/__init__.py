"""Lowering rules of all supported ops, one file per family; `table` has the registry and shared helpers.

An op that torch decomposes, such as `pixel_shuffle`, has no rule of its own: its parts have.
"""

from ...ir.program import Shape
from . import attention, conv_pool, elementwise, gather_scatter, matmul, recurrent, reduce, sample, shape  # noqa: F401
from .shape import register_dim_order_rules
from .table import RULES, Args, Rule, Sink, Unsupported, needs_preserving, op

__all__ = [
    "RULES",
    "Args",
    "Rule",
    "Shape",
    "Sink",
    "Unsupported",
    "needs_preserving",
    "op",
    "register_dim_order_rules",
]
