"""The table of op cases, a file a family of ops, run by test_ops.py."""

import torch

torch.manual_seed(0)  # of the weights in the table

from . import attention, elementwise, forms, fused, index, product, recurrent, reduce, sample, shape, window  # noqa: E402, F401
from .table import CASES, Case  # noqa: E402

__all__ = ["CASES", "Case"]
