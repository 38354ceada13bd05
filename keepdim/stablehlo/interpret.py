"""StableHLO's reference interpreter on tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import reference_interpreter, worker
from .refine import Hlo
from .xla import bits


def interpret_tensors(hlo: Hlo, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The results of main on these tensors."""
    given = [bits(x) for x in inputs]
    if hlo.untrusted:
        outs = worker.interpret(hlo.bytecode(), hlo.untrusted, given)
    else:
        outs = reference_interpreter.interpret_arrays(hlo.copy(), given)
    types = [t.element for t in hlo.results]
    found = [torch.from_numpy(y) for y in outs]
    return [y.bfloat16() if t == "bf16" else y for y, t in zip(found, types, strict=True)]
