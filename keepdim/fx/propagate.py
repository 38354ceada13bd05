"""Checks that the sizes in a graph's metadata are correct. torch.export assumes sizes of at least 2, and ExecuTorch's
passes rerun every op on fake tensors, where some ops specialise a size to the example. `disagreement` computes the
graph's sizes at the ends of the contract and compares them with the metadata; `propagate_shapes` recomputes the
metadata of an Edge graph where they differ, and raises for what still differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.fx.experimental._config as fx_config
import torch.utils._pytree as pytree
from torch._guards import detect_fake_mode
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.fx import Node as FxNode

from ..errors import KeepdimError, fail
from ..shapes.contract import Contract
from ..shapes.dim import CMPS, Dim
from .symbols import to_dim, to_size


def propagate_shapes(ep: ExportedProgram, contract: Contract, symbols: Mapping[str, Dim]) -> None:
    """Recompute the graph's metadata if it is wrong at a sampled size; raise if it remains wrong."""
    if disagreement(ep, contract, symbols) is None:
        return
    propagate(ep)
    if (found := disagreement(ep, contract, symbols)) is not None:
        subject, fact = found
        fail("lower", subject, f"{fact}: ExecuTorch's passes decided it for the example",
             "Name the size in the model (x.shape[0] - 5 instead of -5), or narrow its range")  # fmt: skip


def samples(contract: Contract) -> Iterator[dict[str, int]]:
    """The lower ends, the upper ends, and points between, if they satisfy the constraints."""
    for pick in ((1, 0), (0, 1), (1, 1), (3, 1)):
        values = {}
        for s in contract.symbols:
            lo = s.lo if s.lo is not None else 0
            hi = s.hi if s.hi is not None else lo + 16
            values[s.name] = (pick[0] * lo + pick[1] * hi) // sum(pick)
        if all(CMPS[c.cmp][1](c.lhs.eval(values), c.rhs.eval(values)) for c in contract.constraints):
            yield values


def disagreement(ep: ExportedProgram, contract: Contract, symbols: Mapping[str, Dim]) -> tuple[str, str] | None:
    """(subject, fact) of the first node whose computed size differs from its metadata at a sample."""
    for values in samples(contract):
        if (found := disagreement_at(values, ep, symbols)) is not None:
            at = ", ".join(f"{k} = {v}" for k, v in values.items())
            return found[0], f"{found[1]} at {at}"
    return None


class _Unknown(Exception):
    """A node whose size cannot be computed: it depends on data, or the op rejects the sample."""


def disagreement_at(
    values: Mapping[str, int], ep: ExportedProgram, symbols: Mapping[str, Dim]
) -> tuple[str, str] | None:
    """`disagreement` at one point: runs the graph on fake tensors of these sizes. Nodes that cannot run keep their
    metadata."""
    values = dict(values)

    def from_metadata(val: object) -> object:
        """A metadata value as a fake tensor or a number."""
        if isinstance(val, torch.Tensor):
            return torch.empty([number(to_size(d, symbols)) for d in val.shape], dtype=val.dtype)
        return number(to_dim(val, symbols)) if isinstance(val, (int, torch.SymInt)) else val

    def number(dim: Dim) -> int:
        for name in dim.symbols() - values.keys():  # data-dependent: any value in its range
            lo, hi = next(s for s in symbols.values() if s.symbols() == {name}).bounds
            values[name] = lo if lo is not None else hi if hi is not None else 0
        return dim.eval(values)

    env: dict[FxNode, object] = {}
    with FakeTensorMode(allow_non_fake_inputs=True):
        for n in ep.graph.nodes:
            if n.op in ("output", "get_attr"):
                continue
            try:
                want = pytree.tree_map(from_metadata, n.meta.get("val"))
                env[n] = _call(n, env) if n.op == "call_function" else want
            except (_Unknown, KeepdimError):
                env[n] = _Unknown
                continue
            if (got := _shapes(env[n])) != (expected := _shapes(want)):
                return f"node '{n.name}'", f"has sizes {got} where the graph says {expected}"
    return None


def _call(n: FxNode, env: Mapping[FxNode, object]) -> object:
    args, kwargs = pytree.tree_map_only(FxNode, lambda a: env.get(a, _Unknown), (n.args, n.kwargs))
    if any(a is _Unknown for a in pytree.tree_leaves((args, kwargs))):
        raise _Unknown
    try:
        return n.target(*args, **kwargs)
    except Exception as e:  # an op that rejects the sample tells nothing about sizes
        raise _Unknown from e


def _shapes(value: object) -> list[list[int] | int]:
    leaves = [v for v in pytree.tree_leaves(value) if isinstance(v, (torch.Tensor, int)) and not isinstance(v, bool)]
    return [list(v.shape) if isinstance(v, torch.Tensor) else v for v in leaves]


def propagate(ep: ExportedProgram) -> None:
    """Recompute the symbolic sizes of every node; view copies as views, as export does."""
    mode = detect_fake_mode([n.meta.get("val") for n in ep.graph.nodes])
    if mode is None:
        return
    with mode, fx_config.patch(backed_size_oblivious=True):
        for n in ep.graph.nodes:
            if n.op != "call_function" or n.meta.get("val") is None:
                continue
            args, kwargs = pytree.tree_map_only(FxNode, lambda a: a.meta.get("val"), (n.args, n.kwargs))
            try:
                val = _view_of(n.target)(*args, **kwargs)
            except Exception:  # keep the metadata, which is compared again
                continue
            n.meta["val"] = pytree.tree_map_only(torch.Tensor, _fresh, val)


def _fresh(t: torch.Tensor) -> torch.Tensor:
    """A fresh contiguous tensor of the same shape."""
    return torch.empty(t.shape, dtype=t.dtype)


def _view_of(target: Callable[..., object]) -> Callable[..., object]:
    inner = getattr(target, "_op", None)
    op = inner if isinstance(inner, OpOverload) else target
    if not isinstance(op, OpOverload) or not op._schema.name.endswith("_copy"):
        return target
    view = getattr(torch.ops.aten, op._schema.name.removeprefix("aten::").removesuffix("_copy"), None)
    return getattr(view, op._overloadname, target) if view is not None else target
