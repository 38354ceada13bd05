"""The face: `lower` a model, `load` a file, call either at any shape its contract allows."""

from __future__ import annotations

import logging
import shutil
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from executorch.exir.backend.partitioner import Partitioner
from executorch.runtime import Runtime, Verification
from torch.export import ExportedProgram

from . import _native, lower as lowering, pte
from .capture import Transport, capture
from .contract import Contract
from .errors import KeepdimError, fail
from .lower import Report

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
                self._program = Runtime.get().load_program(path, verification=Verification.InternalConsistency)
                text = self._program.load_method(lowering.CONTRACT_METHOD).execute([])[0]  # type: ignore[union-attr]
                self.contract, self._signature = lowering.read_signature(text)
                method = self._program.load_method("forward")
            except (RuntimeError, KeyError, ValueError) as e:
                if isinstance(e, KeepdimError):
                    raise
                fail("load", str(path), _native.last_error() or f"ExecuTorch cannot load it ({e})", cause=e)
            self._delegates = [d["id"] for d in _native.live() if d["id"] not in before]
        assert method is not None
        self._method = method
        self._check = _native.Contract(self.contract.to_json()).check
        self._in_spec = pytree.treespec_loads(self._signature.in_spec)
        self._out_spec = pytree.treespec_loads(self._signature.out_spec)
        self._transports = [Transport(*t) for t in self._signature.transports]
        self._packs = [i for i, t in enumerate(self._transports) if t.kind]
        self._lock = threading.Lock()
        self._results = [o.dtype for o in self.contract.outputs]
        self.exported_program: ExportedProgram | None = None
        self.report: Report | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return pytree.tree_unflatten(self.run_flat(self._flatten(args, kwargs)), self._out_spec)

    def run_flat(self, flat: Sequence[Any]) -> list[Any]:
        """One call on the contract's inputs in order; its outputs in order."""
        try:
            self._check(flat)
        except _native.Error as e:
            raise KeepdimError(str(e)) from None
        inputs = [x.contiguous() if isinstance(x, torch.Tensor) else x for x in flat]
        for i in self._packs:
            inputs[i] = self._transports[i].pack(inputs[i])
        with self._lock:
            return self._execute([x for x in inputs if x is not None])

    def _flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        flat, spec = pytree.tree_flatten((args, kwargs))
        if spec != self._in_spec:
            want = [s.name for s in self.contract.inputs]
            fail("bind", "call", f"its arguments do not have the structure of the method's ({', '.join(want)})",
                 f"Expected {self._in_spec}, got {spec}")  # fmt: skip
        for i, (x, known) in enumerate(zip(flat, self._signature.constants, strict=True)):
            spec_i = self.contract.inputs[i]
            if spec_i.dtype == "python" and x != known:
                fail("bind", f"input {i} {spec_i.name!r}", f"is the constant {known!r} of the contract, got {x!r}")
            if isinstance(x, torch.Tensor) and x.device.type != "cpu":
                fail("bind", f"input {i} {spec_i.name!r}", f"is on {x.device}", "Move it to the CPU")
        return flat

    def _execute(self, inputs: list[Any]) -> list[Any]:
        _native.clear_last_error()
        try:
            outs = list(self._method.execute(inputs))
        except RuntimeError as e:
            said = _native.last_error()
            if said:
                raise KeepdimError(said) from None
            fail("run", "method 'forward'", f"an ExecuTorch kernel refused the input ({' '.join(str(e).split())})", cause=e)
        return outs

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
    log.info("exporting %s", type(model).__name__)
    captured = capture(model, args, kwargs, dynamic_shapes)
    log.info("lowering %d nodes", len(captured.program.graph.nodes))
    leaves = pytree.tree_leaves((tuple(args), dict(kwargs or {})))
    constants = [
        leaves[i] if spec.dtype == "python" and i < len(leaves) else None for i, spec in enumerate(captured.contract.inputs)
    ]
    parts = [partitioner] if isinstance(partitioner, Partitioner) else partitioner
    folder = tempfile.mkdtemp(prefix="keepdim-")
    try:
        artifact = lowering.lower_method(captured, constants, Path(folder) / "method.pte", engine, parts)
        module = Module(artifact.path)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    weakref.finalize(module, shutil.rmtree, folder, ignore_errors=True)
    log.info("lowered: %d delegates, %d nodes with ExecuTorch", len(artifact.report.delegates), len(artifact.report.remaining))
    module.exported_program, module.report = artifact.exported_program, artifact.report
    return module


def load(path: str | Path) -> Module:
    """Load a file that `save` wrote; its checksum is checked first."""
    return Module(Path(path))


__all__ = ["Contract", "Module", "lower", "load"]
