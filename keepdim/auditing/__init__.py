"""Where did my dynamic shape go? `audit` follows a model's sizes through every stage to a file, and tries the file.

Owns the snapshots of every stage, the verdicts and the trials. Takes a model or a file; gives an `Audit`
(docs/audit.md has its words and the JSON). What needs all of exir is imported when an audit is made. Never mends what
it finds.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..compat.lock import in_turn
from ..errors import fail
from ..files import path_of
from .result import Audit, Stage

if TYPE_CHECKING:
    from .flows import Flow


@in_turn
def audit(
    model: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    partitioner: Any = "ggml",
    tries: bool = True,
    seconds: int = 60,
    output: str | Path | None = None,
    name: str = "",
    trust: bool = False,
) -> Audit:
    """Follow the sizes of a model (or ExportedProgram, or a .pt2 or .pte file) through a lowering, and try the file.

    `partitioner` is ggml or mlx (keepdim's own flow), xnnpack, coreml, vulkan, `module:Class`, or an instance of one.
    A trial may take so many `seconds`. The file is kept as `output`, where one is named. A .pt2 is read by torch, which
    imports and calls what the file names: say `trust=True` for one that is your own.

    >>> import torch, keepdim
    >>> from torch.export import Dim
    >>> shapes = ({0: Dim("batch", min=1, max=8)},)
    >>> model = torch.nn.Linear(4, 2).eval()
    >>> keepdim.audit(model, (torch.randn(3, 4),), dynamic_shapes=shapes, tries=False).check()
    """
    from . import files
    from .tries import children

    if isinstance(model, (str, Path)):
        name = name or str(model)
        if (file := path_of("audit", model)).suffix == ".pte":
            return files.audit_file(file, tries, seconds)
        model = files.exported(file, trust)
    if not isinstance(args, (tuple, list)):
        fail("audit", "args", f"is a {type(args).__name__}", "Give the example's inputs as a tuple: (x,)")
    if tries:
        children()  # they start while the model is lowered
    from . import flows

    name = name or type(model).__name__
    kwargs = dict(kwargs or {})
    with tempfile.TemporaryDirectory(prefix="keepdim-") as folder:
        path = Path(folder) / "method.pte" if output is None else path_of("audit", output)
        if isinstance(partitioner, str) and partitioner in flows.ENGINES:
            flow, who = flows.ours(model, args, kwargs, dynamic_shapes, path, partitioner), partitioner
        else:
            parts = [flows.partitioner_named(partitioner)] if isinstance(partitioner, str) else partitioner
            parts = list(parts) if isinstance(parts, (list, tuple)) else [parts]
            who = ", ".join(type(p).__name__ for p in parts)
            flow = flows.stock(model, args, kwargs, dynamic_shapes, parts, path)
        return _judged(flow, name, who, tries, seconds)


def _judged(flow: Flow, name: str, who: str, tries: bool, seconds: int) -> Audit:
    from .items import tracked
    from .judge import judge
    from .tries import absent, points, try_all

    stages, events = flow.recorder.stages, flow.recorder.events
    trials = []
    if tries and flow.file is not None and flow.path is not None:
        if missing := absent(flow.file):
            flow.notes.append(missing)
        else:
            where = [*flow.declared_points(), *points(flow.promised(), flow.leaves)]
            trials = try_all(flow.path, flow.file.contract is not None, where, flow.run, seconds)
    exported = next(i for i, s in enumerate(stages) if s.kind == "export")
    items = [*flow.frozen, *tracked(flow.subject, events, exported)]
    found = [judge(i, stages, events, trials) for i in items]
    return Audit(name, who, [Stage(s.name, s.kind, s.hook) for s in stages], found, trials, flow.notes, flow.failure)


__all__ = ["Audit", "audit"]
