"""The face: `lower` a model, `load` a file, call either at any shape its contract allows."""

from __future__ import annotations

import logging
import shutil
import tempfile
import threading
import warnings
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree

from . import _native, pte, splits
from .errors import KeepdimError, fail
from .signature import CONTRACT_METHOD, Signature
from .turns import in_turn

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

    def __init__(self, path: Path, weights: Path | None = None):
        self.path = path
        pte.check(path)
        splits.use()
        with _LOAD:
            before = {d["id"] for d in _native.live()}
            try:
                text = _native.Method(str(path), CONTRACT_METHOD)([])[0]
                self.signature = Signature.from_json(text)
                checked = _native.Contract(self.signature.contract.to_json())
                self._inputs, self._check_results = checked.inputs, checked.check_results
                self._method = _native.Method(str(path), "forward", *self._mapped(weights))
            except _native.Error as e:
                raise KeepdimError(str(e)) from None
            self._delegates = [d["id"] for d in _native.live() if d["id"] not in before]
        self.contract = self.signature.contract
        count = len(self.contract.inputs)
        self._plain_call = self.signature.in_spec == pytree.tree_structure((tuple(range(count)), {}))
        self._plain_result = self.signature.out_spec == pytree.tree_structure(0)
        self._special = any(t.kind for t in self.signature.transports) or any(
            s.dtype == "python" for s in self.contract.inputs
        )
        self._by_data = bool(self.contract.data)
        self.exported_program: ExportedProgram | None = None
        self.report: Report | None = None

    def _mapped(self, given: Path | None) -> tuple[str, dict[str, tuple[int, int]]]:
        """The file that holds weights outside this one, and where they lie in it."""
        table = self.signature.mapped
        if table is not None:
            return str(table.find(self.path, given)), table.spans
        if given is not None:
            fail("load", str(self.path), "holds all its weights itself", f"Leave weights={str(given)!r} out")
        return "", {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._plain_call and len(args) == len(self.contract.inputs) and not kwargs:
            flat: Sequence[Any] = args
        else:
            flat = self.signature.flatten(args, kwargs)
        outs = self.run_flat(flat)
        return outs[0] if self._plain_result else pytree.tree_unflatten(outs, self.signature.out_spec)

    def run_flat(self, flat: Sequence[Any], events: list[Any] | None = None) -> list[Any]:
        """One call on the contract's inputs in order; its outputs in order. `events` gets what took time in it."""
        try:
            inputs = self._inputs(flat)
            packed = self.signature.pack(flat) if self._special else inputs
            if events is None:
                outs = self._method(packed)
            else:
                outs, found = self._method.profile(packed)
                events += found
            if self._by_data:
                self._check_results(flat, outs[len(self.signature.mutated) :])
        except _native.Error as e:
            raise KeepdimError(str(e)) from None
        except RuntimeError as e:  # torch's own: a tensor without plain memory
            for i, x in enumerate(flat):
                if isinstance(x, torch.Tensor) and (x.layout != torch.strided or x.device.type != "cpu"):
                    fail("bind", f"input {i} {self.contract.inputs[i].name!r}", f"is {x.layout} on {x.device}",
                         "Give a dense tensor on the CPU", e)  # fmt: skip
            raise
        changed = self.signature.mutated
        for i, value in zip(changed, outs, strict=False):
            flat[i].copy_(value)
        return outs[len(changed) :] if changed else outs

    def save(self, path: str | Path) -> None:
        """Write the file; `keepdim.load` and any ExecuTorch app with keepdim's library read it.

        Weights that are mapped from another file are not in it: that file belongs beside it.
        """
        try:
            shutil.copyfile(self.path, path)
        except OSError as e:
            fail("save", str(path), f"cannot be written ({e.strerror})", cause=e)

    def counters(self) -> list[dict[str, Any]]:
        """What the delegates of this module did: calls, plans built, reused and evicted, bytes."""
        mine = set(self._delegates)
        return [d for d in _native.live() if d["id"] in mine]

    @property
    def planned_bytes(self) -> int:
        """What ExecuTorch plans outside the delegates, at the upper bounds; memory is committed where it is touched."""
        return self._method.planned_bytes

    def __repr__(self) -> str:
        return f"keepdim.Module({str(self.path)!r})\n{self.contract}"


@in_turn
def lower(
    model: torch.nn.Module | ExportedProgram,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    engine: str = "ggml",
    partitioner: Partitioner | Sequence[Partitioner] | None = None,
) -> Module:
    """Lower a model once, for every shape its contract allows, in delegates of an engine ("ggml", or "mlx" where it is
    installed); `partitioner` names others instead.

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
    from .lowering import engine_named, lower_method

    parts = [partitioner] if isinstance(partitioner, Partitioner) else partitioner
    if parts is None:
        engine_named(engine)
    folder = tempfile.mkdtemp(prefix="keepdim-")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", category=FutureWarning, module="copyreg"
            )  # torch's own, of its own copies
            log.info("exporting %s", type(model).__name__)
            captured = capture(model, args, kwargs, dynamic_shapes)
            log.info("lowering %d nodes", len(captured.program.graph.nodes))
            artifact = lower_method(captured, Path(folder) / "method.pte", engine, parts)
        module = Module(artifact.path)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    weakref.finalize(module, shutil.rmtree, folder, ignore_errors=True)
    log.info(
        "lowered (delegates: %d, nodes with ExecuTorch: %d)",
        len(artifact.report.delegates),
        len(artifact.report.remaining),
    )
    module.exported_program, module.report = artifact.exported_program, artifact.report
    return module


def load(path: str | Path, weights: str | Path | None = None) -> Module:
    """Load a file that `save` wrote; its checksum is checked first.

    `weights` is the file from which it maps its weights, where it does so and that file is not beside it.
    """
    for given in (path, path if weights is None else weights):
        if not isinstance(given, (str, Path)):
            fail("load", repr(given), "is not a path")
    return Module(Path(path), None if weights is None else Path(weights))


__all__ = ["Module", "load", "lower"]
