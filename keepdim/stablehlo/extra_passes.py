"""Passes that StableHLO does not have; `refine.py` runs them by name. Each takes an Hlo."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ..errors import fail
from .mlir import bindings, inside, type_of

if TYPE_CHECKING:
    from jaxlib.mlir import ir

    from .refine import Hlo


def fold_constant_broadcast(hlo: Hlo) -> None:
    """Replace a splat constant that is broadcast to a static shape by a constant of that shape."""
    from jaxlib.mlir import ir

    stablehlo = bindings()
    for op in list(hlo.operations()):
        if op.name != "stablehlo.broadcast_in_dim" or type_of(op.results[0].type).dynamic:
            continue
        source = getattr(op.operands[0].owner, "operation", None)  # an argument's owner is a block
        if source is None or source.name != "stablehlo.constant":
            continue
        value = ir.DenseElementsAttr(source.attributes["value"])
        if not value.is_splat:
            continue
        with ir.InsertionPoint(op), op.location:
            whole = ir.DenseElementsAttr.get_splat(op.results[0].type, value.get_splat_value())
            made = stablehlo.ConstantOp(whole)
        op.results[0].replace_all_uses_with(made.result)
        op.erase()
        if not list(source.results[0].uses):
            source.erase()


def refine_polymorphic_shapes(hlo: Hlo) -> None:
    """XLA's pass from refined arguments to a static module: inlines, refines, and checks shape assertions."""
    from jaxlib import _jax
    from jaxlib.mlir import ir

    made = _jax.mlir.refine_polymorphic_shapes(
        hlo.bytecode(), enable_shape_assertions=True, validate_static_shapes=True
    )
    hlo.module = ir.Module.parse(made, hlo.context)


def inline(hlo: Hlo) -> None:
    """Inline calls in main; MLIR's inliner does not support StableHLO's operations."""
    from jaxlib.mlir import ir

    functions = {f.name.value: f for f in hlo.module.body.operations if f.operation.name == "func.func"}
    _check_calls(hlo.main, functions, ())
    while calls := [op for op in hlo.operations() if op.name == "func.call" and _owner(op) == hlo.main.name.value]:
        for call in calls:
            body = functions[call.attributes["callee"].value].entry_block
            known = dict(zip(body.arguments, call.operands, strict=True))
            for op in body.operations:
                if op.operation.name == "func.return":
                    made = [known.get(v, v) for v in op.operation.operands]
                    break
                copy = op.operation.clone(ir.InsertionPoint(call))
                for inner in (copy, *inside(copy)):
                    for i, v in enumerate(inner.operands):
                        if v in known:
                            inner.operands[i] = known[v]
                known.update(zip(op.operation.results, copy.results, strict=True))
            for old, new in zip(call.results, made, strict=True):
                old.replace_all_uses_with(new)
            call.erase()


def _check_calls(function: ir.Operation, functions: Mapping[str, ir.Operation], path: tuple[str, ...]) -> None:
    """Raise for what cannot be inlined: recursion, a function without a body or with several blocks."""
    path = (*path, function.name.value)
    called = (op.attributes["callee"].value for op in inside(function.operation) if op.name == "func.call")
    for name in dict.fromkeys(called):
        if name in path:
            fail("refine", f"function {name}", f"calls itself ({' -> '.join((*path, name))}) and cannot be inlined")
        blocks = len(functions[name].regions[0].blocks)
        if blocks != 1:
            fail("refine", f"function {name}", f"has {blocks} blocks and cannot be inlined")
        _check_calls(functions[name], functions, path)


def _owner(op: ir.Operation) -> str:
    """The name of the function that contains an operation."""
    while op.name != "func.func":
        op = op.parent.operation
    return op.attributes["sym_name"].value


EXTRA_PASSES: dict[str, Callable[[Hlo], None]] = {
    "inline": inline,
    "fold-constant-broadcast": fold_constant_broadcast,
    "refine-polymorphic-shapes": refine_polymorphic_shapes,
}
