"""The face: `lower` a model, `load` a file, call either at any shape its contract allows."""

from __future__ import annotations

import logging
import shutil
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
from executorch.extension.pybindings import _C as executorch_runtime

from . import _native, pte
from .errors import KeepdimError, fail
from .signature import CONTRACT_METHOD, Signature

if TYPE_CHECKING:  # exporting needs all of exir; running a file does not
    from executorch.exir.backend.partitioner import Partitioner
    from torch.export import ExportedProgram

    from .lowering import Report

log = logging.getLogger("keepdim")
_LOAD = threading.Lock()  # so that the delegates made by one load can be told from those of another


class Module:
    """A lowered method: call it like the model it came from.

    Every call is checked against the whole contract first; an input outside it is a KeepdimError with a sentence.
    """

    def __init__(self, path: Path):
        self.path = path
        pte.check(path)
        with _LOAD:
            before = {d["id"] for d in _native.live()}
            try:
                self._program = executorch_runtime._load_program(str(path))
                text = self._program.load_method(CONTRACT_METHOD)([])[0]
                self.signature = Signature.from_json(text)
                self._method = self._program.load_method("forward")
            except RuntimeError as e:
                if isinstance(e, KeepdimError):
                    raise
                fail("load", str(path), _native.last_error() or f"ExecuTorch cannot load it ({e})", cause=e)
            self._delegates = [d["id"] for d in _native.live() if d["id"] not in before]
        self.contract = self.signature.contract
        self._check = _native.Contract(self.contract.to_json()).check
        self._packs = [(i, t) for i, t in enumerate(self.signature.transports) if t.kind]
        self._fixed = [i for i, s in enumerate(self.contract.inputs) if s.dtype == "python"]
        self._lock = threading.Lock()
        self.exported_program: ExportedProgram | None = None
        self.report: Report | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        flat, spec = pytree.tree_flatten((args, kwargs))
        if spec != self.signature.in_spec:
            names = ", ".join(s.name for s in self.contract.inputs)
            fail("bind", "call", f"its arguments do not have the structure of the method's ({names})",
                 f"Expected {self.signature.in_spec}, got {spec}")  # fmt: skip
        return pytree.tree_unflatten(self.run_flat(flat), self.signature.out_spec)

    def run_flat(self, flat: Sequence[Any]) -> list[Any]:
        """One call on the contract's inputs in order; its outputs in order."""
        try:
            self._check(flat)
        except _native.Error as e:
            raise KeepdimError(str(e)) from None
        for i in self._fixed:
            if flat[i] != self.signature.constants[i]:
                fail("bind", f"input {i} {self.contract.inputs[i].name!r}",
                     f"is the constant {self.signature.constants[i]!r} of the contract, got {flat[i]!r}")  # fmt: skip
        inputs = [self._plain(i, x) if isinstance(x, torch.Tensor) else x for i, x in enumerate(flat)]
        for i, transport in self._packs:
            inputs[i] = transport.pack(inputs[i])
        with self._lock:
            return self._execute([x for x in inputs if x is not None])

    def _plain(self, i: int, x: torch.Tensor) -> torch.Tensor:
        """The tensor as ExecuTorch takes it: on the CPU, contiguous."""
        if x.device.type != "cpu":
            fail("bind", f"input {i} {self.contract.inputs[i].name!r}", f"is on {x.device}", "Move it to the CPU")
        return x if x.is_contiguous() else x.contiguous()

    def _execute(self, inputs: list[Any]) -> list[Any]:
        _native.clear_last_error()
        try:
            return list(self._method(inputs))
        except RuntimeError as e:
            said = _native.last_error()
            if said:
                raise KeepdimError(said) from None
            fail(
                "run",
                "method 'forward'",
                f"an ExecuTorch kernel refused the input ({' '.join(str(e).split())})",
                cause=e,
            )

    def save(self, path: str | Path) -> None:
        """Write the file; `keepdim.load` and any ExecuTorch app with keepdim's library read it."""
        shutil.copyfile(self.path, path)

    def counters(self) -> list[dict[str, Any]]:
        """What the delegates of this module did: calls, plans built, reused and evicted, bytes."""
        mine = set(self._delegates)
        return [d for d in _native.live() if d["id"] in mine]

    def __repr__(self) -> str:
        return f"keepdim.Module({str(self.path)!r})\n{self.contract}"


def lower(
    model: torch.nn.Module | ExportedProgram,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    engine: str = "ggml",
    partitioner: Partitioner | Sequence[Partitioner] | None = None,
) -> Module:
    """Lower a model once, for every shape its contract allows.

    >>> import torch, keepdim
    >>> from torch.export import Dim
    >>> model = torch.nn.Linear(8, 4).eval()
    >>> prog = keepdim.lower(model, (torch.randn(3, 8),), dynamic_shapes=({0: Dim("batch", min=1, max=64)},))
    >>> x = torch.randn(17, 8)
    >>> torch.allclose(prog(x), model(x), atol=1e-5)
    True
    >>> prog(torch.randn(65, 8))
    Traceback (most recent call last):
    keepdim.errors.KeepdimError: [bind] input 0 'input' dim 0: batch = 65 is out of range 1..64.
    """
    from executorch.exir.backend.partitioner import Partitioner

    from .capture import capture
    from .lowering import lower_method

    log.info("exporting %s", type(model).__name__)
    captured = capture(model, args, kwargs, dynamic_shapes)
    log.info("lowering %d nodes", len(captured.program.graph.nodes))
    parts = [partitioner] if isinstance(partitioner, Partitioner) else partitioner
    folder = tempfile.mkdtemp(prefix="keepdim-")
    try:
        artifact = lower_method(captured, Path(folder) / "method.pte", engine, parts)
        module = Module(artifact.path)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    weakref.finalize(module, shutil.rmtree, folder, ignore_errors=True)
    log.info(
        "lowered: %d delegates, %d nodes with ExecuTorch",
        len(artifact.report.delegates),
        len(artifact.report.remaining),
    )
    module.exported_program, module.report = artifact.exported_program, artifact.report
    return module


def load(path: str | Path) -> Module:
    """Load a file that `save` wrote; its checksum is checked first."""
    return Module(Path(path))


__all__ = ["Module", "load", "lower"]
