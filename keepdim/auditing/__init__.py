"""Where did my dynamic shape go? `audit` follows a model's sizes through every stage to a file, and tries the file.

Owns the snapshots of every stage, the verdicts, and the trial runs of the file. Takes a model or a file and returns an
`Audit` (docs/guide/audit.md describes its terms and the JSON). Modules that import all of exir are imported lazily.
Never repairs what it finds.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..compat.lock import one_at_a_time
from ..errors import fail
from ..files import path_of
from .result import Audit, Stage

if TYPE_CHECKING:
    from .flows import Flow


@one_at_a_time
def audit(
    model: object,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    dynamic_shapes: object = None,
    partitioner: object = "ggml",
    tries: bool = True,
    seconds: int = 60,
    output: str | Path | None = None,
    name: str = "",
    trust: bool = False,
) -> Audit:
    """Follow the sizes of a model (or ExportedProgram, or a .pt2 or .pte file) through a lowering, and try the file.

    `partitioner` is ggml or mlx (keepdim's own flow), xnnpack, coreml, vulkan, `module:Class`, or an instance of one.
    `seconds` is the time limit of one trial run. `output` keeps the lowered file at that path. A .pt2 is read by torch,
    which imports and calls whatever the file names: pass `trust=True` only for a file of your own.

    >>> import torch, keepdim
    >>> from torch.export import Dim
    >>> shapes = ({0: Dim("batch", min=1, max=8)},)
    >>> model = torch.nn.Linear(4, 2).eval()
    >>> keepdim.audit(model, (torch.randn(3, 4),), dynamic_shapes=shapes, tries=False).check()
    """
    from . import files
    from .trial_runs import fork_server

    if isinstance(model, (str, Path)):
        name = name or str(model)
        if (file := path_of("audit", model)).suffix == ".pte":
            return files.audit_file(file, tries, seconds)
        model = files.load_exported(file, trust)
    if not isinstance(args, (tuple, list)):
        fail("audit", "args", f"is a {type(args).__name__}", "Give the example's inputs as a tuple: (x,)")
    if tries:
        fork_server()  # starts up while the model is lowered
    from . import flows

    name = name or type(model).__name__
    kwargs = dict(kwargs or {})
    with tempfile.TemporaryDirectory(prefix="keepdim-") as folder:
        path = Path(folder) / "method.pte" if output is None else path_of("audit", output)
        if isinstance(partitioner, str) and partitioner in flows.ENGINES:
            flow = flows.keepdim_flow(model, args, kwargs, dynamic_shapes, path, partitioner)
            backend = partitioner
        else:
            parts = [flows.partitioner_named(partitioner)] if isinstance(partitioner, str) else partitioner
            parts = list(parts) if isinstance(parts, (list, tuple)) else [parts]
            backend = ", ".join(type(p).__name__ for p in parts)
            flow = flows.executorch_flow(model, args, kwargs, dynamic_shapes, parts, path)
        return _audit_flow(flow, name, backend, tries, seconds)


def _audit_flow(flow: Flow, name: str, backend: str, tries: bool, seconds: int) -> Audit:
    """Run the trials of a recorded flow, and compare every tracked item over its stages."""
    from .tracked import tracked_items
    from .trial_runs import missing_backend, points, run_trials
    from .verdicts import audit_item

    stages, events = flow.recorder.stages, flow.recorder.events
    trials = []
    if tries and flow.file is not None and flow.path is not None:
        if missing := missing_backend(flow.file):
            flow.notes.append(missing)
        else:
            tried = [*flow.declared_points(), *points(flow.promised_contract(), flow.leaves)]
            trials = run_trials(flow.path, flow.file.contract is not None, tried, flow.run, seconds)
    exported = next(i for i, s in enumerate(stages) if s.kind == "export")
    items = [*flow.frozen, *tracked_items(flow.baseline, events, exported)]
    found = [audit_item(i, stages, events, trials) for i in items]
    return Audit(
        name, backend, [Stage(s.name, s.kind, s.hook) for s in stages], found, trials, flow.notes, flow.failure
    )


__all__ = ["Audit", "audit"]
