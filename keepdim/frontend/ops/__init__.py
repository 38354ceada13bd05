"""Every op keepdim lowers, a file a family; `table` has what their rows are made of."""

from ...ir.program import Shape
from . import attention, elementwise, index, product, recurrent, reduce, sample, shape, window  # noqa: F401
from .shape import dim_order_rows
from .table import ROWS, Args, Row, Sink, Unsupported, op, whole

__all__ = ["ROWS", "Args", "Row", "Shape", "Sink", "Unsupported", "dim_order_rows", "op", "whole"]
