"""Op cases lowered in groups, run at all their sizes and compared with eager."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from executorch.exir.lowered_backend_module import executorch_call_delegate
from torch import nn
from torch.export import Dim

import keepdim
from cases import CASES, Case
from cases.table import NEAR
from keepdim import _native
from keepdim.artifact import pte
from keepdim.capture.contract_reader import read_shapes
from keepdim.frontend.ops import Unsupported
from keepdim.lowering.pipeline import Report
from keepdim.lowering.single_delegate import to_program
from support.engines import BACKENDS
from support.oracle import OnEngine, Oracle

GROUP = 16  # cases lowered together: one lowering costs about a second


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """Of the element that is farthest off, over its own and the mean magnitude, in f64."""
    error, size = (got.double() - want.double()).abs(), want.double().abs()
    return float((error / (size + size.mean()).clamp(min=torch.finfo(want.dtype).tiny)).max()) if len(error) else 0.0


def fault(got: Any, want: Any, near: float | None = None) -> str:
    """What is wrong with a result; empty when it is right."""
    if not isinstance(want, torch.Tensor):
        return "" if got == want and type(got) is type(want) else f"{got!r} instead of {want!r}"
    if got.dtype != want.dtype or got.shape != want.shape:
        return f"{got.dtype} {list(got.shape)} instead of {want.dtype} {list(want.shape)}"
    if not want.dtype.is_floating_point:
        return "" if torch.equal(got, want) else f"{got} instead of {want}"
    usual = want.isfinite()
    if not torch.equal(got[~usual].nan_to_num(9.0), want[~usual].nan_to_num(9.0)) or not got[usual].isfinite().all():
        return f"NaN or infinity in other places: {got} instead of {want}"
    off = distance(got[usual], want[usual])
    near = near or NEAR[want.dtype]
    return "" if off <= near else f"off by {off:.1e}, above {near:.0e}: {got} instead of {want}"


class Together(nn.Module):
    """Several cases as one model: a list of all their tensors → a tuple of their results."""

    def __init__(self, cases: list[Case]):
        super().__init__()
        self.cases = [replace(c, fn=copy.deepcopy(c.fn)) for c in cases]  # with states of its own
        self.parts = nn.ModuleList([c.fn for c in self.cases if isinstance(c.fn, nn.Module)])

    def forward(self, tensors: list[torch.Tensor]) -> tuple[Any, ...]:
        left, out = list(tensors), []
        for c in self.cases:
            mine, left = left[: len(c.tensors)], left[len(c.tensors) :]
            out.append(c.fn(*mine))
        return tuple(out)


@dataclass
class Outcome:
    """What happened to some cases: the module's report, and per case what was wrong."""

    report: Any = None
    faults: dict[str, list[str]] = field(default_factory=dict)
    oracle: dict[str, list[str]] = field(default_factory=dict)  # of the same Programs, run by reference.py
    exported: Any = None
    programs: list[bytes] = field(default_factory=list)


def inputs(cases: list[Case], step: int, traced: bool = False) -> list[torch.Tensor]:
    """All tensors of one call; a case with fewer steps starts again."""
    out = []
    for c in cases:
        steps = c.steps()
        sizes = c.traced() if traced else steps[step % len(steps)]
        out += [t.make(sizes, 1000 * step + k) for k, t in enumerate(c.tensors.values())]
    return out


def shapes(cases: list[Case]) -> Any:
    """dynamic_shapes of all tensors; cases share a symbol where it is run and traced at the same sizes."""
    known: dict[Any, Any] = {}
    out = []
    for c in cases:
        dims = {}
        for s, sizes in c.symbols.items():
            key = (sizes, c.traced()[s])
            dims[s] = known.setdefault(key, Dim(f"{s}{len(known)}", min=min(sizes), max=max(sizes)))
        for t in c.tensors.values():
            out.append({d: size for d, size in enumerate(t.sizes(dims)) if not isinstance(size, int)})
    return (out,)


def together(cases: list[Case]) -> Together:
    return Together(cases).eval().requires_grad_(False)


def run(cases: list[Case], engine: str) -> Outcome:
    """Lower once, run every step, compare with eager."""
    args = (inputs(cases, 0, traced=True),)
    module = keepdim.lower(together(cases), args, dynamic_shapes=shapes(cases), engine=engine)
    outcome = Outcome(module.report, {c.name: [] for c in cases}, {c.name: [] for c in cases}, module.exported_program)
    outcome.programs = [d.program.to_json() for d in pte.delegates(module.path) if d.program is not None]
    eager, oracle = together(cases), Oracle(module.exported_program)
    for step in range(max(len(c.steps()) for c in cases)):
        tensors = inputs(cases, step)
        wanted = eager(tensors)
        compare(cases, step, module(tensors), wanted, outcome.faults)
        compare(cases, step, oracle(tensors), wanted, outcome.oracle)
    return outcome


def again(cases: list[Case], exported: Any, engine: str) -> Outcome:
    """The same on another engine, from what was exported or lowered once: to write a file takes seconds."""
    call: Any = Oracle(exported, OnEngine(engine))
    if not any(n.target is executorch_call_delegate for n in exported.graph.nodes):
        program, weights = to_program(exported, read_shapes(exported).all_symbols, engine)
        call = functools.partial(OnEngine(engine), program, weights)
    outcome = Outcome(Report([BACKENDS[engine]]), {c.name: [] for c in cases}, {c.name: [] for c in cases})
    eager = together(cases)
    for step in range(max(len(c.steps()) for c in cases)):
        tensors = inputs(cases, step)
        compare(cases, step, call(tensors), eager(tensors), outcome.faults)
    return outcome


def compare(cases: list[Case], step: int, got: Any, wanted: Any, found: dict[str, list[str]]) -> None:
    """Note by case what is not as eager has it."""
    left = pytree.tree_leaves(got)
    for c, want in zip(cases, wanted, strict=True):
        results = pytree.tree_leaves(want)
        sizes = c.steps()[step % len(c.steps())]
        mine, left = left[: len(results)], left[len(results) :]
        pairs = zip(mine, results, strict=True)
        found[c.name] += [f"{sizes}: {why}" for g, w in pairs if (why := fault(g, w, c.near))]


@functools.cache
def groups() -> tuple[tuple[Case, ...], ...]:
    """Neighbours of one family; those that do not go whole into one delegate are alone."""
    out: list[list[Case]] = []
    for c in CASES:
        last = out[-1] if out else []
        together = last and last[0].family == c.family and len(last) < GROUP and not (c.remaining or last[0].remaining)
        if together:
            last.append(c)
        else:
            out.append([c])
    return tuple(tuple(g) for g in out)


@functools.cache
def outcome_of(group: tuple[Case, ...], engine: str) -> Outcome | Exception:
    try:
        first = outcome_of(group, "ggml") if engine != "ggml" else None
        if isinstance(first, Exception):
            return first
        if first is not None and whole(first.report, "ggml"):
            try:
                return again(list(group), first.exported, engine)
            except (Unsupported, _native.Error):  # it has less than the first
                if len(group) > 1:
                    raise
        return run(list(group), engine)
    except Exception as e:  # whatever it is: each case then runs alone and says it itself
        return e


def group_of(c: Case) -> tuple[Case, ...]:
    return next(g for g in groups() if any(x is c for x in g))


def whole(report: Any, engine: str) -> bool:
    return report.delegates == [BACKENDS[engine]] and not report.remaining


UNREACHED = {
    "export, or Edge dialect behind it, has another overload of it, which has a case": """
        _to_copy.default bitwise_left_shift.Tensor bitwise_right_shift.Tensor detach.default dropout.default
        masked_fill.Tensor to.device to.dtype_layout""",
    "a number becomes a rank-0 tensor": "add.Scalar sub.Scalar mul.Scalar div.Scalar",
}


def views(names: Iterable[str]) -> set[str]:
    """Overloads by name, copies of views as the views: which of the two a model has depends on what else is in it."""
    found = [(name, *name.replace("_copy.", ".").split(".")) for name in names]
    packets = {packet: getattr(torch.ops.aten, packet, None) for _, _, packet, _ in found}
    return {
        f"{space}.{packet}.{overload}" if hasattr(packets[packet], overload) else name
        for name, space, packet, overload in found
    }
