"""StableHLO's reference interpreter."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..mlir import bindings
from ..refine import Hlo


def evaluate(hlo: Hlo, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The results of main on these tensors."""
    from jaxlib.mlir import ir

    stablehlo = bindings()
    with hlo.reporting("interpreter"):
        given = [
            ir.DenseElementsAttr.get(_bits(x), type=ir.Type.parse(t.text))
            for x, t in zip(inputs, hlo.inputs, strict=True)
        ]
        made = stablehlo.eval_module(hlo.module, given)
        return [torch.from_numpy(np.array(ir.DenseElementsAttr(y))) for y in made]


def _bits(x: torch.Tensor) -> np.ndarray:
    return x.contiguous().numpy()
