"""Loops that stay with ExecuTorch: which of torch's loop ops it runs, and repairs of the instructions it emits.

ExecuTorch keeps a loop's results at the size they are planned with: what is carried is copied without a resize, and
what is stacked grows along its first dim alone. And it counts the steps from where the last call left off, which is not
0 after a call that failed. `repair` corrects this in the emitted instructions.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from executorch.exir.schema import (
    Bool,
    Chain,
    EValue,
    ExecutionPlan,
    Instruction,
    Int,
    JumpFalseCall,
    KernelCall,
    Operator,
)
from torch.fx import GraphModule

from ..errors import fail
from ..fx.symbols import Symbols, to_dim

hops = torch.ops.higher_order


def refuse(graphs: Iterable[GraphModule], symbols: Symbols) -> None:
    """Fail for a loop that ExecuTorch does not run, or runs once where it should not run at all."""
    for n in (n for gm in graphs for n in gm.graph.nodes):
        if n.target in (hops.while_loop, hops.associative_scan):
            remedy = (
                "Use scan, over a tensor with a row for each step, and torch.where to keep a state that is finished"
            )
            fail("lower", f"{n.target} {n.name!r}", "ExecuTorch's runtime does not have this loop", remedy)
        if n.target is hops.scan:
            steps = to_dim(n.args[2][0].meta["val"].shape[0], symbols)
            if steps.bounds[0] == 0:
                fact = f"it may have no steps ({steps} can be 0), and ExecuTorch's loop runs at least one"
                fail("lower", f"scan {n.name!r}", fact, "Give that size a min of 1")


def repair(plan: ExecutionPlan) -> bool:
    """Let every result of a loop in this plan be resized, and every loop start at 0; returns whether there is one."""
    changed = False
    for chain in plan.chains:
        i = 0
        while i < len(chain.instructions):
            call = chain.instructions[i].instr_args
            name = _name(plan.operators[call.op_index]) if isinstance(call, KernelCall) else ""
            if name == "aten::copy_" and _may_change(plan, call.args[0]):
                carried, source, blocking, _ = call.args
                call.op_index = _operator(plan, "aten::copy", "out")
                call.args = [source, source, blocking, carried, carried]
                changed = True
            elif name == "executorch_prim::et_copy_index.tensor":
                stacked, row, step = call.args
                new = _first_row(plan, stacked, row, step, i)
                _insert(chain, i, new)
                i, changed = i + len(new), True
            elif isinstance(call, JumpFalseCall) and call.destination_instruction <= i:  # the end of a loop
                step, _, _ = chain.instructions[i - 1].instr_args.args  # step == steps
                to_zero = Instruction(KernelCall(_operator(plan, "executorch_prim::sub", "Scalar"), [step, step, step]))
                _insert(chain, call.destination_instruction, [to_zero])
                call.destination_instruction += 1
                i, changed = i + 1, True
            i += 1
    return changed


def _first_row(plan: object, stacked: int, row: int, step: int, at: int) -> list[Instruction]:
    """In the first step the stacked result becomes that step's row: it then has the row's sizes, and grows."""
    zero, first = _value(plan, Int(0)), _value(plan, Bool(False))
    return [
        Instruction(KernelCall(_operator(plan, "executorch_prim::eq", "Scalar"), [step, zero, first])),
        Instruction(JumpFalseCall(first, at + 3)),
        Instruction(KernelCall(_operator(plan, "aten::unsqueeze_copy", "out"), [row, zero, stacked, stacked])),
    ]


def _insert(chain: Chain, at: int, new: list[Instruction]) -> None:
    """Put instructions before one; jumps to it find the new ones first, jumps to later ones are moved."""
    for call in (i.instr_args for i in chain.instructions):
        if isinstance(call, JumpFalseCall) and call.destination_instruction > at:
            call.destination_instruction += len(new)
    chain.instructions[at:at] = new


def _may_change(plan: ExecutionPlan, value: int) -> bool:
    return plan.values[value].val.shape_dynamism.name != "STATIC"


def _name(op: Operator) -> str:
    return op.name + (f".{op.overload}" if op.overload else "")


def _operator(plan: ExecutionPlan, name: str, overload: str) -> int:
    for i, op in enumerate(plan.operators):
        if (op.name, op.overload) == (name, overload):
            return i
    plan.operators.append(Operator(name, overload))
    return len(plan.operators) - 1


def _value(plan: ExecutionPlan, value: object) -> int:
    plan.values.append(EValue(value))
    return len(plan.values) - 1
