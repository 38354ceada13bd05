"""The compiled library; importing this module loads it and registers its delegates with ExecuTorch.

All users import it from here: `from .native import _native`. `import keepdim` alone loads neither it nor torch.
"""

from __future__ import annotations

import torch  # noqa: F401  first, so that the library shares torch's OpenMP runtime
from executorch.extension.pybindings import _C  # noqa: F401  loads libexecutorch.so, which the library links to

import keepdim._native as _native  # not `from . import`: the package's __getattr__ imports this module

from .errors import fail
from .shapes.contract import DTYPES

_native.set_dtypes(DTYPES)
for _id, _status in _native.backends().items():
    if _status != 0:
        fail("import", f"backend {_id}", f"ExecuTorch did not register it (status {_status:#x})",
             "Install keepdim again, with the torch and executorch that it names")  # fmt: skip

__all__ = ["_native"]
