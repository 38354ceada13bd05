"""Samples that others wrote (torch's OpInfo, ExecuTorch's operator suite) as models with dynamic sizes.

A sample is exported with every dim above 1 dynamic, with fewer where that is refused, lowered, and compared with eager
at its own sizes, at the lowest and at larger ones. Several samples go through one lowering where that works: one costs
about a second. Used by test_opinfo.py (a few samples) and bench/conformance/suite.py (all of them).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.fx.experimental._config as fx_config
import torch.utils._pytree as pytree
from torch import nn
from torch.export import Dim
from torch.testing._internal.common_methods_invocations import op_db

import keepdim
from keepdim.capture.validate import broken, sized
from keepdim.errors import KeepdimError
from support.op_runs import fault

LOOSER = {torch.bfloat16: 1.6e-2}  # eager rounds inside some ops as well: off by two last places
DTYPES = {"f32": torch.float32, "i64": torch.int64, "bool": torch.bool}
UNDEFINED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided",
             "resize_", "resize_as_"}  # fmt: skip  # their results are what was in memory

TRAINING = {"max_pool2d_with_indices_backward"}  # 1,440 samples, each refused for the same reason: test_lowering.py

ANY_ORDER = {"argsort", "kthvalue", "sort", "topk"}  # of equal values


class Call(nn.Module):
    """A function as a model: its tensors are the inputs, its other arguments constants, its results tensors."""

    def __init__(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]):
        super().__init__()
        self.fn = fn
        leaves, self.spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        self.constants = [None if isinstance(x, torch.Tensor) else x for x in leaves]
        self.places = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
        self.tensors = [leaves[i].detach() for i in self.places]
        self.others: list[Sequence[torch.Tensor]] = []  # more inputs of the same sizes

    def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        leaves = list(self.constants)
        for i, x in zip(self.places, tensors, strict=True):
            leaves[i] = x
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return [x for x in pytree.tree_leaves(self.fn(*args, **kwargs)) if isinstance(x, torch.Tensor)]

    def eager(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """The results; None where eager itself refuses these inputs."""
        try:
            with torch.no_grad():
                return self(*(x.clone() for x in tensors))
        except Exception:  # whatever it says: there is nothing to compare with
            return None


class Together(nn.Module):
    """Several samples as one model: a list of all their tensors → a list of their results."""

    def __init__(self, calls: Sequence[Call]):
        super().__init__()
        self.calls = nn.ModuleList(calls)

    def forward(self, tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        left, out = list(tensors), []
        for call in self.calls:
            n = len(call.places)
            out.append(call(*left[:n]))
            left = left[n:]
        return out


@dataclass
class Verdict:
    """What became of one sample."""

    result: str  # right, refused (a sentence at lowering), wrong, error (anything else that was raised)
    detail: str = ""
    dynamic: int = 0  # dims that are dynamic in the lowered program
    wanted: int = 0  # dims above 1
    delegated: str = ""  # whole, part, none
    overloads: frozenset[str] = frozenset()  # that the lowering delegated, for this sample or one beside it
    reasons: tuple[str, ...] = ()  # why the rest stays with ExecuTorch
    static: str = ""  # why the program was not lowered with all of them dynamic


def judge(calls: Sequence[Call]) -> list[Verdict]:
    """Each sample's verdict: all in one lowering if that is right for all of them, each alone otherwise."""
    if len(calls) > 1:
        try:
            verdicts = _compare(calls, _lower_exported(calls))
            if all(v.result == "right" for v in verdicts):
                return verdicts
        except Exception:  # whatever it is: each sample says it itself
            pass
    return [_alone(call) for call in calls]


# ---------------------------------------------------------------- lowering
def _auto(call: Call, lowest: int, dims: int | None = None) -> list[dict[int, Any]]:
    """Every dim above 1 dynamic, or only the first `dims` of each tensor."""
    return [
        {d: Dim.AUTO(min=min(lowest, n), max=2 * n + 2) for d, n in enumerate(x.shape[:dims]) if n > 1}
        for x in call.tensors
    ]


# Of a refusal that other sizes do not change.
AT_NO_SHAPE = ("neither keepdim nor ExecuTorch's CPU kernels have it", "kernel reads or writes out of bounds")
LEVELS: tuple[Callable[[Call], Any], ...] = (
    lambda call: _auto(call, 1),
    lambda call: _auto(call, 2),
    lambda call: _auto(call, 2, 1),
    lambda call: None,
)


def _lower_exported(calls: Sequence[Call]) -> keepdim.Module:
    """torch.export first, the program to keepdim: without its trials at other sizes, which are made here."""
    model = Together(calls).eval()
    tensors = [x for c in calls for x in c.tensors]
    with fx_config.patch(backed_size_oblivious=True), torch.no_grad():
        shapes = ([s for c in calls for s in _auto(c, 1)],)
        return keepdim.lower(torch.export.export(model, (tensors,), dynamic_shapes=shapes))


def _alone(call: Call) -> Verdict:
    """The verdict of the first level that is lowered; a level that is refused is why there are fewer dynamic dims."""
    static = ""
    for level in LEVELS:
        spec = level(call)
        if spec is not None and not any(spec):  # nothing that could be dynamic
            continue
        try:
            shapes = None if spec is None else (spec,)
            module = keepdim.lower(Together([call]).eval(), (call.tensors,), dynamic_shapes=shapes)
            (verdict,) = _compare([call], module)
        except KeepdimError as e:
            verdict = Verdict("refused", str(e), wanted=wanted(call))
        except Exception as e:  # anything but a sentence of ours is a fault
            verdict = Verdict("error", f"{type(e).__name__}: {' '.join(str(e).split())[:300]}", wanted=wanted(call))
        if verdict.result != "refused":
            verdict.static = static
            return verdict
        if any(text in verdict.detail for text in AT_NO_SHAPE):
            return verdict
        static = static or verdict.detail
    return verdict


def wanted(call: Call) -> int:
    """How many dims can be dynamic."""
    return sum(n > 1 for x in call.tensors for n in x.shape)


# ---------------------------------------------------------------- comparing
def _owners(calls: Sequence[Call]) -> list[int]:
    return [k for k, c in enumerate(calls) for _ in c.places]


def _points(calls: Sequence[Call], module: keepdim.Module) -> Iterator[dict[str, int]]:
    """Where to compare: at the samples' own sizes, one above, the lowest, and back. A sample that cannot move stays."""
    contract, leaves = module.contract, [x for c in calls for x in c.tensors]
    start, owners = contract.bind(leaves), _owners(calls)
    yield start
    for where in ("above", "lowest"):
        point = dict(start)
        for k, call in enumerate(calls):
            mine = [s for s in contract.symbols if owners[s.source.input] == k]
            moved = {**point}
            for s in mine:
                assert s.lo is not None and s.hi is not None
                moved[s.name] = min(start[s.name] + 1, s.hi) if where == "above" else s.lo
            if not broken(contract, moved) and call.eager(_mine(sized(contract, leaves, moved), owners, k)) is not None:
                point = moved
        if point != start:
            yield point
    yield start


def _mine(flat: Sequence[Any], owners: Sequence[int], k: int) -> list[Any]:
    return [x for x, owner in zip(flat, owners, strict=True) if owner == k]


def _compare(calls: Sequence[Call], module: keepdim.Module) -> list[Verdict]:
    leaves = [x for c in calls for x in c.tensors]
    owners = _owners(calls)
    verdicts = [Verdict("right", wanted=wanted(c)) for c in calls]
    for spec, k in zip(module.contract.inputs, owners, strict=True):
        verdicts[k].dynamic += sum(d.value is None for d in spec.dims)
    assert module.report is not None
    for v, mine in zip(verdicts, left_over(module.report, len(calls)), strict=True):
        v.reasons = tuple(dict.fromkeys(mine))
        v.delegated = "none" if not module.report.delegates else "part" if mine else "whole"
        v.overloads = frozenset(module.report.delegated)
    for first, point in enumerate(_points(calls, module)):
        flat = leaves if first == 0 else sized(module.contract, leaves, point)
        wants = [c.eager(_mine(flat, owners, k)) for k, c in enumerate(calls)]
        at = ", ".join(f"{k} = {v}" for k, v in point.items()) or "its sizes"
        try:
            gots = module([x.clone() for x in flat])
        except KeepdimError as e:
            for v in verdicts:
                v.result, v.detail = "wrong", f"{at}: refused in its contract: {e}"
            return verdicts
        for k, (v, got, want) in enumerate(zip(verdicts, gots, wants, strict=True)):
            assert want is not None  # the point was chosen so
            faults = [why for g, w in zip(got, want, strict=True) if (why := unlike(g, w))]
            if faults and v.result == "right" and not _nearer(calls[k], _mine(flat, owners, k), got, want):
                v.result, v.detail = "wrong", f"{at}: {' '.join(faults[0].split())[:300]}"
    return verdicts


def unlike(got: torch.Tensor, want: torch.Tensor) -> str:
    """What is wrong with a result; empty when it is right."""
    return fault(got, want, LOOSER.get(want.dtype))


def _nearer(call: Call, tensors: Sequence[torch.Tensor], got: Sequence[Any], want: Sequence[Any]) -> bool:
    """Is each result as near to that in f64 as eager's is? Where all of one is rounding, eager is not a measure."""
    exact = call.eager([x.double() if x.dtype == torch.float32 else x for x in tensors])
    alike = all(g.shape == w.shape and g.dtype == w.dtype for g, w in zip(got, want, strict=True))
    if exact is None or not alike or any(w.dtype != torch.float32 for w in want):
        return False
    ours, eager = ([(a.double() - e).abs().sum() for a, e in zip(side, exact, strict=True)] for side in (got, want))
    return all(bool(a <= b) for a, b in zip(ours, eager, strict=True))


def left_over(report: Any, count: int) -> list[list[str]]:
    """What of each of `count` samples stays with ExecuTorch and why; told apart by the module it came from."""
    out: list[list[str]] = [[] for _ in range(count)]
    for name, why in report.remaining.items():
        found = re.match(r"calls\.(\d+)", report.modules[name])
        for k in [int(found[1])] if found else range(count):
            out[k].append(f"{name}: {why}")
    return out


# ---------------------------------------------------------------- OpInfo
def entries() -> dict[str, Any]:
    """Every OpInfo by its name."""
    return {op.formatted_name: op for op in op_db if op.name not in UNDEFINED | TRAINING}


def dtypes(op: Any) -> list[str]:
    return [name for name, dtype in DTYPES.items() if dtype in op.supported_dtypes("cpu")]


def by_value(fn: Callable[..., Any]) -> Callable[..., Any]:
    """With what stands at the places that it gives, instead of the places: equal values may come in any order."""

    def call(x: torch.Tensor, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        dim = kwargs.get("dim", next((a for a in args[1 if fn in (torch.topk, torch.kthvalue) else 0 :]), -1))
        out = pytree.tree_leaves(fn(x, *args, **kwargs))
        places = out[-1] if out[-1].dim() == x.dim() else out[-1].unsqueeze(dim)
        return [*out[:-1], x.gather(dim, places) if x.dim() else out[-1]]

    return call


def in_order(fn: Callable[..., Any]) -> Callable[..., Any]:
    """With borders that are in order at every size, or a sorter that brings them there."""

    def call(borders: torch.Tensor, *args: Any, sorter: torch.Tensor | None = None, **kwargs: Any) -> Any:
        if sorter is not None:
            return fn(borders, *args, sorter=borders.argsort(-1), **kwargs)
        return fn(borders.sort(-1).values, *args, **kwargs)

    return call


def samples(op: Any, dtype: str) -> list[Call]:
    """The samples of an OpInfo that have dense tensors and a tensor as result."""
    out = []
    torch.manual_seed(0)
    for s in op.sample_inputs("cpu", DTYPES[dtype], requires_grad=False):
        fn = by_value(op.op) if op.name in ANY_ORDER else in_order(op.op) if op.name == "searchsorted" else op.op
        call = Call(fn, (s.input, *s.args), s.kwargs)
        if op.name == "nn.functional.embedding_bag" and (s.kwargs.get("mode"), s.kwargs.get("include_last_offset")) == (
            "max", True):  # fmt: skip  # without a bag torch itself reads beyond its memory
            continue
        dense = all(x.layout == torch.strided and not x.is_quantized for x in call.tensors)
        results = call.eager(call.tensors) if call.tensors and dense else None
        if results and all(y.layout == torch.strided for y in results) and _certain(call):
            out.append(call)
    return out


def _certain(call: Call) -> bool:
    """Does it give the same every time? Dropout does not, where OpInfo may not set the seed for it."""
    first = call.eager(call.tensors) or []
    with mock.patch("torch.manual_seed"):
        for _ in range(8):  # few elements may fall the same way more than once
            torch.rand(1)
            for x, y in zip(first, call.eager(call.tensors) or [], strict=True):
                if not torch.equal(x.nan_to_num(), y.nan_to_num()):
                    return False
    return True


def pure(call: Call) -> bool:
    """Does it leave its inputs as they are? Those of training move running means or scale weights anew."""
    tensors = [x.clone() for x in call.tensors]
    with torch.no_grad():
        call(*tensors)
    return all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(tensors, call.tensors, strict=True))


def tally(verdicts: Sequence[Verdict]) -> Counter[str]:
    """Counts for a line of a table."""
    count = Counter(v.result for v in verdicts)
    count["samples"] = len(verdicts)
    count["whole"] = sum(v.delegated == "whole" for v in verdicts)
    count["could be dynamic"] = sum(v.wanted > 0 for v in verdicts)
    count["dynamic"] = sum(v.dynamic > 0 for v in verdicts)
    count["all dims dynamic"] = sum(0 < v.wanted == v.dynamic for v in verdicts)
    return count
