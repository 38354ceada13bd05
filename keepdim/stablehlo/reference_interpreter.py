"""StableHLO's reference interpreter, over arrays of numpy. It ends the process on some modules: `worker.py` runs it for
those that came from a file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import fail
from .mlir import Type, bindings, type_of


def evaluate(hlo: Any, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The results of main of an Hlo, which is changed; 16-bit floats that numpy does not have come as f32."""
    from jaxlib.mlir import ir

    stablehlo = bindings()
    if not hlo.static:  # it would end the process
        fail("run", "program", "has sizes that only data decides, which the interpreter does not know")
    _copy_scattered(hlo)
    with hlo.reporting("interpreter"):
        given = [
            ir.DenseElementsAttr.get(x, type=ir.Type.parse(t.text)) for x, t in zip(inputs, hlo.inputs, strict=True)
        ]
        return [_array(y, type_of(y.type)) for y in stablehlo.eval_module(hlo.module, given)]


def _copy_scattered(hlo: Any) -> None:
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


def _array(y: Any, t: Type) -> np.ndarray:
    from jaxlib.mlir import ir

    if t.element != "bf16":
        return np.array(ir.DenseElementsAttr(y))
    wide = t.text.replace("bf16", "f32")  # Python reads no elements of bf16
    body = f"%0 = stablehlo.convert %x : ({t}) -> {wide} return %0 : {wide}"
    widened = ir.Module.parse(f"func.func @main(%x: {t}) -> {wide} {{ {body} }}")
    return _array(bindings().eval_module(widened, [y])[0], type_of(ir.Type.parse(wide)))
