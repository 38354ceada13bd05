"""StableHLO's reference interpreter on numpy arrays. It crashes on some modules: `worker.py` runs it for modules from
files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..errors import fail
from .mlir import Type, bindings, type_of

if TYPE_CHECKING:
    from jaxlib.mlir import ir

    from .refine import Hlo


def interpret_arrays(hlo: Hlo, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Results of main; the Hlo is modified. bf16, which numpy lacks, is returned as f32."""
    from jaxlib.mlir import ir

    stablehlo = bindings()
    if not hlo.static:  # it would crash
        fail("run", "program", "has sizes that only data decides, which the interpreter does not know")
    _copy_scattered(hlo)
    with hlo.reporting("interpreter"):
        given = [
            ir.DenseElementsAttr.get(x, type=ir.Type.parse(t.text)) for x, t in zip(inputs, hlo.inputs, strict=True)
        ]
        return [_array(y, type_of(y.type)) for y in stablehlo.eval_module(hlo.module, given)]


def _copy_scattered(hlo: Hlo) -> None:
    """Copy the operands of every scatter, because the interpreter writes into them."""
    from jaxlib.mlir import ir

    stablehlo = bindings()
    with hlo.reporting("interpreter"):
        for op in [op for op in hlo.operations() if op.name == "stablehlo.scatter"]:
            for i in range(len(op.results)):
                x = op.operands[i]
                axes = ir.DenseI64ArrayAttr.get(range(ir.RankedTensorType(x.type).rank))
                with ir.InsertionPoint(op), op.location:
                    op.operands[i] = stablehlo.broadcast_in_dim(x.type, x, axes)


def _array(y: ir.DenseElementsAttr, t: Type) -> np.ndarray:
    from jaxlib.mlir import ir

    if t.element != "bf16":
        return np.array(ir.DenseElementsAttr(y))
    wide = t.text.replace("bf16", "f32")  # the bindings cannot read bf16 elements
    body = f"%0 = stablehlo.convert %x : ({t}) -> {wide} return %0 : {wide}"
    widened = ir.Module.parse(f"func.func @main(%x: {t}) -> {wide} {{ {body} }}")
    return _array(bindings().eval_module(widened, [y])[0], type_of(ir.Type.parse(wide)))
