"""StableHLO's reference interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..errors import fail
from ..mlir import Type, bindings, type_of
from ..refine import Hlo
from .xla import bits


def evaluate(hlo: Hlo, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The results of main on these tensors."""
    from jaxlib.mlir import ir

    stablehlo = bindings()
    if not hlo.static:  # it would end the process
        fail("run", "program", "has sizes that only data decides, which the interpreter does not know")
    hlo = _apart(hlo.copy())
    with hlo.reporting("interpreter"):
        given = [
            ir.DenseElementsAttr.get(bits(x), type=ir.Type.parse(t.text))
            for x, t in zip(inputs, hlo.inputs, strict=True)
        ]
        made = stablehlo.eval_module(hlo.module, given)
        return [_tensor(y, type_of(y.type)) for y in made]


def _apart(hlo: Hlo) -> Hlo:
    """Every scatter on a copy of its own, because the interpreter writes it into its operands."""
    from jaxlib.mlir import ir

    stablehlo = bindings()
    with hlo.reporting("interpreter"):
        for op in [op for op in hlo.operations() if op.name == "stablehlo.scatter"]:
            for i in range(len(op.results)):
                x = op.operands[i]
                axes = ir.DenseI64ArrayAttr.get(range(ir.RankedTensorType(x.type).rank))
                with ir.InsertionPoint(op), op.location:
                    op.operands[i] = stablehlo.broadcast_in_dim(x.type, x, axes)
    return hlo


def _tensor(y: Any, t: Type) -> torch.Tensor:
    from jaxlib.mlir import ir

    if t.element != "bf16":
        return torch.from_numpy(np.array(ir.DenseElementsAttr(y)))
    wide = t.text.replace("bf16", "f32")  # Python reads no elements of bf16
    body = f"%0 = stablehlo.convert %x : ({t}) -> {wide} return %0 : {wide}"
    widened = ir.Module.parse(f"func.func @main(%x: {t}) -> {wide} {{ {body} }}")
    return _tensor(bindings().eval_module(widened, [y])[0], type_of(ir.Type.parse(wide))).bfloat16()
