"""keepdim: lower a PyTorch model once; run it at every shape its contract allows.

Importing this package is cheap. Public names are imported on first use: running a file needs neither exir,
transformers nor jax, and `keepdim --help` not even torch. The compiled library is loaded with the first name, or with
ExecuTorch (`compat.registration`).
"""

from importlib import import_module
from typing import TYPE_CHECKING

from .compat.lock import importing
from .compat.registration import follow_executorch
from .compat.threads import one_thread_after_fork
from .errors import KeepdimError, optional

if TYPE_CHECKING:
    from . import _native as _native
    from .auditing import Audit, audit
    from .lowering.partitioner import GgmlPartitioner, MLXPartitioner
    from .models.decoder import LanguageModel, lower_llm
    from .module import Module, load, lower
    from .ranges import dispatch
    from .settings import options, set_options
    from .shapes.contract import Contract
    from .stablehlo import StableHLOProgram, load_stablehlo, to_stablehlo

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
_HOMES = {
    "Audit": "auditing",
    "Contract": "shapes.contract",
    "GgmlPartitioner": "lowering.partitioner",
    "LanguageModel": "models.decoder",
    "MLXPartitioner": "lowering.partitioner",
    "Module": "module",
    "StableHLOProgram": "stablehlo",
    "audit": "auditing",
    "dispatch": "ranges",
    "load": "module",
    "load_stablehlo": "stablehlo",
    "lower": "module",
    "lower_llm": "models.decoder",
    "options": "settings",
    "set_options": "settings",
    "to_stablehlo": "stablehlo",
}


def __getattr__(name: str) -> object:
    if name == "_native":  # without keepdim's lock: modules import it while Python holds their import locks
        return import_module(".native", __name__)._native
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with importing():
        if _HOMES[name] == "stablehlo":
            optional("stablehlo", "jax", "stablehlo")
        import_module(".native", __name__)
        globals()[name] = value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


one_thread_after_fork()
follow_executorch()
