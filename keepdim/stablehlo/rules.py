"""All lowering rules from nodes of a Program to jax: importing this module registers every op family."""

from . import conv_pool, data_dependent, elementwise, gather_scatter, matmul, recurrent, reduce, sample, shape  # noqa: F401
from .table import RULES

__all__ = ["RULES"]
