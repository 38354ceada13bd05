"""The public API: `lower` a model, `load` a file, call the module at any shape its contract allows."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from .artifact import pte
from .artifact.calling import CallProtocol
from .artifact.signature import CONTRACT_METHOD, Signature
from .compat.lock import one_at_a_time
from .errors import KeepdimError, fail
from .files import atomic_write, copy_open, new_folder, path_of, remove_with
from .native import _native
from .ranges import thresholds
from .settings import check_engine, check_precision

if TYPE_CHECKING:  # exporting needs all of exir, running a file does not
    from executorch.exir.backend.partitioner import Partitioner
    from torch.export import ExportedProgram

    from .lowering.pipeline import Report

log = logging.getLogger("keepdim")
_LOAD = threading.Lock()  # so that delegates are attributed to the load that created them
os.register_at_fork(after_in_child=_LOAD._at_fork_reinit)  # type: ignore[attr-defined]


class Module:
    """A lowered method: call it like the model.

    Every call is first checked against the contract; an input outside it is a KeepdimError.
    """

    def __init__(self, path: str | Path, weights: str | Path | None = None, verify: bool = False):
        path, weights = path_of("load", path), None if weights is None else path_of("load", weights)
        if not isinstance(verify, bool):
            fail("load", "verify", f"{verify!r:.80} is not a bool", "Give True or False")
        self.path = path
        self._file = pte.open_file(path, verify)  # keeps this file open even if its path is replaced
        thresholds.use()
        with _LOAD:
            before = {d["id"] for d in _native.live()}
            try:
                text = pte.text_of(self._file, CONTRACT_METHOD)
                self.signature = Signature.from_json(text)
                self._protocol = CallProtocol(self.signature)
                self._check_results = self._protocol.checker.check_results
                self._method = _native.Method(self._file, "forward", *self._mapped(weights))
            except _native.Error as e:
                raise KeepdimError(str(e)) from None
            self._delegates = [d["id"] for d in _native.live() if d["id"] not in before]
        self.contract = self.signature.contract
        self._by_data = bool(self.contract.data)
        self.exported_program: ExportedProgram | None = None
        self.report: Report | None = None

    def _mapped(self, given: Path | None) -> tuple[bytes, dict[str, tuple[int, int]]]:
        """The file with external weights, and their offsets in it."""
        table = self.signature.mapped
        if table is not None:
            return os.fsencode(table.find(self.path, given)), table.spans
        if given is not None:
            fail("load", str(self.path), "holds all its weights itself", f"Leave weights={str(given)!r} out")
        return b"", {}

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return self._protocol.result(self.run_flat(self._protocol.flatten(args, kwargs)))

    def run_flat(self, flat: Sequence[Any], events: list[object] | None = None) -> list[object]:
        """One call on flat inputs in the contract's order; returns flat outputs. Appends profile events to `events`."""
        packed = self._protocol.inputs(flat)
        for i in self.signature.mutated:
            self._refuse_unwritable(i, flat[i])
        try:
            if events is None:
                outs = self._method(packed)
            else:
                outs, found = self._method.profile(packed)
                events += found
            if self._by_data:
                self._check_results(flat, outs[len(self.signature.mutated) :])
        except _native.Error as e:
            raise KeepdimError(str(e)) from None
        except KeepdimError:
            raise
        except RuntimeError as e:  # raised by torch for a tensor without accessible memory
            self._protocol.refuse_memory(flat, e)
        changed = self.signature.mutated
        if len(outs) != len(changed) + len(self.contract.outputs):
            fail("run", str(self.path), f"returned {len(outs)} values, expected {len(changed)} changed inputs and "
                 f"{len(self.contract.outputs)} outputs", "Lower the model again")  # fmt: skip
        for i, value in zip(changed, outs, strict=False):
            if not isinstance(value, torch.Tensor) or value.shape != flat[i].shape:
                fail("run", f"input {i} {self.contract.inputs[i].name!r}", "got a new value of another shape",
                     "Lower the model again")  # fmt: skip
            flat[i].copy_(value)
        return outs[len(changed) :] if changed else outs

    def _refuse_unwritable(self, i: int, x: torch.Tensor) -> None:
        """Raise before computing if an input that the call mutates cannot be written to."""
        fact = None
        if x.requires_grad and x.is_leaf and torch.is_grad_enabled():
            fact = "requires a gradient"
        elif x.is_inference() and not torch.is_inference_mode_enabled():
            fact = "is an inference tensor"
        elif any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape, strict=True)):
            fact = "is expanded: several elements share memory"
        if fact is not None:
            fail("bind", f"input {i} {self.contract.inputs[i].name!r}", f"is changed by the call, and {fact}",
                 "Give a clone of it, or call under torch.no_grad()")  # fmt: skip

    def save(self, path: str | Path) -> None:
        """Write the file; `keepdim.load` and any ExecuTorch app with keepdim's library read it.

        It is written atomically, with the content that was loaded, even if that file was replaced or deleted since.
        Weights that are mapped from another file are not included: put that file next to it.
        """
        with atomic_write(path) as file:
            copy_open(self._file.fileno(), file)

    def __reduce_ex__(self, _: object) -> NoReturn:
        fail("save", "module", "cannot be copied or pickled: it has an open file and a runtime",
             "Write it with save(path), and load that where it is needed")  # fmt: skip

    def counters(self) -> list[dict[str, Any]]:
        """Counters of the module's delegates: calls, plans built, reused and evicted, bytes."""
        mine = set(self._delegates)
        return [d for d in _native.live() if d["id"] in mine]

    @property
    def planned_bytes(self) -> int:
        """Memory that ExecuTorch plans outside the delegates, at the upper bounds; pages are committed on first use."""
        return self._method.planned_bytes

    def __repr__(self) -> str:
        return f"keepdim.Module({str(self.path)!r})\n{self.contract}"


@one_at_a_time
def lower(
    model: torch.nn.Module | ExportedProgram,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    dynamic_shapes: object = None,
    engine: str = "ggml",
    precision: str = "f32",
    partitioner: Partitioner | Sequence[Partitioner] | None = None,
) -> Module:
    """Lower a model once, for every shape its contract allows, with delegates of an engine ("ggml", or "mlx" if it is
    installed); `partitioner` uses other partitioners instead.

    With precision="bf16", linear layers of f32 models round the operands of their products to bf16 (8 bits of mantissa;
    sums stay f32) and store their weights so: half of the memory, and faster on CPUs with AVX-512 BF16.

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
    if partitioner is None:  # before the imports below, which take seconds
        check_engine(engine)
        check_precision(precision)
    from executorch.exir.backend.partitioner import Partitioner

    from .capture.export import capture
    from .lowering.pipeline import check_options, lower_method

    parts = [partitioner] if isinstance(partitioner, Partitioner) else partitioner
    if parts is None:
        check_options(engine, precision)
    elif not isinstance(parts, Sequence) or not all(isinstance(p, Partitioner) for p in parts):
        fail("lower", "partitioner", f"{partitioner!r:.80} is neither a Partitioner nor a list of them",
             "Give instances, as keepdim.GgmlPartitioner()")  # fmt: skip
    elif precision != "f32":
        fail("lower", "precision", f"is {precision!r}, and a given partitioner has its own",
             f"Give it to the partitioner: keepdim.GgmlPartitioner(precision={precision!r})")  # fmt: skip
    folder = new_folder()
    try:
        with warnings.catch_warnings():
            # torch warns about its own use of copyreg.
            warnings.filterwarnings("ignore", category=FutureWarning, module="copyreg")
            log.info("exporting %s", type(model).__name__)
            captured = capture(model, args, kwargs, dynamic_shapes)
            log.info("lowering %d nodes", len(captured.program.graph.nodes))
            artifact = lower_method(captured, folder / "method.pte", engine, parts, precision)
        module = Module(artifact.path)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    remove_with(module, folder)
    log.info(
        "lowered (delegates: %d, nodes with ExecuTorch: %d)",
        len(artifact.report.delegates),
        len(artifact.report.remaining),
    )
    module.exported_program, module.report = artifact.exported_program, artifact.report
    return module


def load(path: str | Path, weights: str | Path | None = None, *, verify: bool = False) -> Module:
    """Load a file that `save` wrote; the checksum of everything but its weights is checked first.

    `weights` is the file that it maps weights from, if that is not next to it. `verify` also checks the checksums of
    the weights, which reads the whole file.
    """
    return Module(path, weights, verify)


__all__ = ["Module", "load", "lower"]
