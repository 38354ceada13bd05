"""All rules that take a node of a Program to jax: importing this registers those of every family."""

from . import data, elementwise, index, product, recurrent, reduce, sample, shape, window  # noqa: F401
from .table import ROWS

__all__ = ["ROWS"]
