"""Plain ExecuTorch finds keepdim's delegates once `import keepdim` has run, in whatever order the two are imported.

ExecuTorch knows a delegate whose library is loaded, and ours is loaded late, because it needs torch. So it is loaded
after ExecuTorch's own, by an import finder that waits for that import and then removes itself.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from .patch import lasting

EXECUTORCH = "executorch.extension.pybindings._C"
OURS = "keepdim.native"


class _Follow:
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != EXECUTORCH:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            loader = spec.loader

            def load_both(module: ModuleType) -> None:
                del loader.exec_module  # which is the method of its class again
                loader.exec_module(module)
                importlib.import_module(OURS)

            loader.exec_module = load_both  # type: ignore[method-assign]
        return spec


@lasting(
    of="executorch",
    version="1.5.1",
    reason="ExecuTorch knows the delegates whose libraries are loaded, and has no way to be told of one before it is "
    "loaded itself",
    upstream="ExecuTorch loads the libraries of backends that packages declare as entry points",
)
def follow_executorch() -> None:
    """Load our library when ExecuTorch's is loaded; at once where it is already. The finder that waits for it and the
    loader that it changes are as before once ExecuTorch is imported."""
    if EXECUTORCH in sys.modules:
        importlib.import_module(OURS)
    else:
        sys.meta_path.insert(0, _Follow())


__all__ = ["follow_executorch"]
