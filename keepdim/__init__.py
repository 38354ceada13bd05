"""keepdim: lower a PyTorch model once; run it at every shape its contract allows."""

import torch  # noqa: F401  first: its OpenMP runtime is then the one our library shares
import executorch.extension.pybindings.portable_lib  # noqa: F401  loads libexecutorch.so, which ours links to

from . import _native
from .contract import DTYPES, Contract
from .errors import KeepdimError

_native.set_dtypes(DTYPES)
for _id, _status in _native.backends().items():
    if _status != 0:
        raise KeepdimError(f"[import] backend {_id}: ExecuTorch did not register it (status {_status:#x}).")

from .module import Module, load, lower  # noqa: E402  needs the library loaded
from .partition import GgmlPartitioner  # noqa: E402

__version__ = "0.1.0"
__all__ = ["Contract", "GgmlPartitioner", "KeepdimError", "Module", "load", "lower"]
