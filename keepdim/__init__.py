"""keepdim: lower a PyTorch model once; run it at every shape its contract allows."""

import os
from typing import TYPE_CHECKING, Any

import torch  # noqa: F401  first: its OpenMP runtime is then the one our library shares
from executorch.extension.pybindings import _C  # noqa: F401  loads libexecutorch.so, which ours links to

from . import _native
from .compat.lock import importing
from .errors import KeepdimError
from .module import Module, load, lower
from .settings import options, set_options
from .shapes.contract import DTYPES, Contract

if TYPE_CHECKING:
    from .auditing import Audit, audit
    from .lowering.partitioner import GgmlPartitioner, MLXPartitioner
    from .models.decoder import LanguageModel, lower_llm
    from .ranges import dispatch
    from .stablehlo import StableHLOProgram, load_stablehlo, to_stablehlo

_native.set_dtypes(DTYPES)
# torch's threads are not in a forked process, where its parallel kernels would wait for them for ever.
os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))
for _id, _status in _native.backends().items():
    if _status != 0:
        raise KeepdimError(f"[import] backend {_id}: ExecuTorch did not register it (status {_status:#x}).")


def __getattr__(name: str) -> Any:
    """What needs all of exir, transformers or jax is imported when asked for: running a file does not."""
    with importing():
        return _imported(name)


def _imported(name: str) -> Any:
    if name in ("LanguageModel", "lower_llm"):
        from .models import decoder

        return getattr(decoder, name)
    if name in ("Audit", "audit"):
        from . import auditing

        return getattr(auditing, name)
    if name in ("GgmlPartitioner", "MLXPartitioner"):
        from .lowering import partitioner

        return getattr(partitioner, name)
    if name == "dispatch":
        from .ranges import dispatch

        return dispatch
    if name in ("StableHLOProgram", "load_stablehlo", "to_stablehlo"):
        from .errors import optional

        optional("stablehlo", "jax", "stablehlo")
        from . import stablehlo

        return getattr(stablehlo, name)
    raise AttributeError(f"module 'keepdim' has no attribute {name!r}")


__version__ = "0.1.0"
__all__ = [
    "Audit",
    "Contract",
    "GgmlPartitioner",
    "KeepdimError",
    "LanguageModel",
    "MLXPartitioner",
    "Module",
    "StableHLOProgram",
    "audit",
    "dispatch",
    "load",
    "load_stablehlo",
    "lower",
    "lower_llm",
    "options",
    "set_options",
    "to_stablehlo",
]
