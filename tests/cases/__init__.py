"""The table of op cases, a file a family of ops, run by frontend/test_op_cases.py."""

import torch

torch.manual_seed(0)  # of the weights in the table, which are drawn in the order of these imports

# ruff: noqa: E402, F401, I001
from . import (
    attention,
    elementwise,
    decompositions,
    fused,
    gather_scatter,
    matmul,
    recurrent,
    reduce,
    sample,
    shape,
    conv_pool,
)
from .table import CASES, Case

__all__ = ["CASES", "Case"]
