"""Are the sizes in a graph true? torch.export takes sizes for at least 2, and ExecuTorch's passes run every op again on
fake tensors, where some ops decide a size for the example. `disagreement` computes the graph's sizes at the ends of the
contract and compares them with what the graph says; `settle` propagates them again where they differ in an Edge graph,
and refuses what still does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

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


def settle(ep: ExportedProgram, contract: Contract, symbols: Mapping[str, Dim]) -> None:
    """Make the sizes in the graph's metadata those that its ops give, at every sampled size; refuse what cannot be."""
    if disagreement(ep, contract, symbols) is None:
        return
    propagate(ep)
    if (found := disagreement(ep, contract, symbols)) is not None:
        subject, fact = found
        fail("lower", subject, f"{fact}: ExecuTorch's passes decided it for the example",
             "Name the size in the model (x.shape[0] - 5 instead of -5), or narrow its range")  # fmt: skip


def samples(contract: Contract) -> Iterator[dict[str, int]]:
    """The lower ends, the upper ends, and something between, where the constraints hold."""
    for pick in ((1, 0), (0, 1), (1, 1), (3, 1)):
        values = {}
        for s in contract.symbols:
            lo = s.lo if s.lo is not None else 0
            hi = s.hi if s.hi is not None else lo + 16
            values[s.name] = (pick[0] * lo + pick[1] * hi) // sum(pick)
        if all(CMPS[c.cmp][1](c.lhs.eval(values), c.rhs.eval(values)) for c in contract.constraints):
            yield values


def disagreement(ep: ExportedProgram, contract: Contract, symbols: Mapping[str, Dim]) -> tuple[str, str] | None:
    """(subject, fact) of the first node whose size at some sample is not what its metadata says."""
    for values in samples(contract):
        if (found := disagreement_at(values, ep, symbols)) is not None:
            at = ", ".join(f"{k} = {v}" for k, v in values.items())
            return found[0], f"{found[1]} at {at}"
    return None


class _Unknown(Exception):
    """A node whose size cannot be computed here: it depends on data, or the sample breaks a rule of its own."""


def disagreement_at(
    values: Mapping[str, int], ep: ExportedProgram, symbols: Mapping[str, Dim]
) -> tuple[str, str] | None:
    """The same at one point: the graph is run on fake tensors of these sizes. A node that cannot be is taken at its
    word."""
    values = dict(values)

    def said(val: Any) -> Any:
        """What metadata says, as a fake tensor or a number."""
        if isinstance(val, torch.Tensor):
            return torch.empty([number(to_size(d, symbols)) for d in val.shape], dtype=val.dtype)
        return number(to_dim(val, symbols)) if isinstance(val, (int, torch.SymInt)) else val

    def number(dim: Dim) -> int:
        for name in dim.symbols() - values.keys():  # of data: some value in its range
            lo, hi = next(s for s in symbols.values() if s.symbols() == {name}).bounds
            values[name] = lo if lo is not None else hi if hi is not None else 0
        return dim.eval(values)

    env: dict[FxNode, Any] = {}
    with FakeTensorMode(allow_non_fake_inputs=True):
        for n in ep.graph.nodes:
            if n.op in ("output", "get_attr"):
                continue
            try:
                want = pytree.tree_map(said, n.meta.get("val"))
                env[n] = _call(n, env) if n.op == "call_function" else want
            except (_Unknown, KeepdimError):
                env[n] = _Unknown
                continue
            if (got := _shapes(env[n])) != (promised := _shapes(want)):
                return f"node '{n.name}'", f"has sizes {got} where the graph says {promised}"
    return None


def _call(n: FxNode, env: Mapping[FxNode, Any]) -> Any:
    args, kwargs = pytree.tree_map_only(FxNode, lambda a: env.get(a, _Unknown), (n.args, n.kwargs))
    if any(a is _Unknown for a in pytree.tree_leaves((args, kwargs))):
        raise _Unknown
    try:
        return n.target(*args, **kwargs)
    except Exception as e:  # whatever an op raises on a sample: it says nothing about the sizes
        raise _Unknown from e


def _shapes(value: Any) -> list[Any]:
    leaves = [v for v in pytree.tree_leaves(value) if isinstance(v, (torch.Tensor, int)) and not isinstance(v, bool)]
    return [list(v.shape) if isinstance(v, torch.Tensor) else v for v in leaves]


def propagate(ep: ExportedProgram) -> None:
    """Compute the symbolic sizes of every node again, copies of views as the views themselves, as export does."""
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
            except Exception:  # not ours to judge here: the graph's own word stays, and is compared again
                continue
            n.meta["val"] = pytree.tree_map_only(torch.Tensor, _fresh, val)


def _fresh(t: torch.Tensor) -> torch.Tensor:
    """As a result of its own, contiguous like those of all copies."""
    return torch.empty(t.shape, dtype=t.dtype)


def _view_of(target: Any) -> Any:
    inner = getattr(target, "_op", None)
    op = inner if isinstance(inner, OpOverload) else target
    if not isinstance(op, OpOverload) or not op._schema.name.endswith("_copy"):
        return target
    view = getattr(torch.ops.aten, op._schema.name.removeprefix("aten::").removesuffix("_copy"), None)
    return getattr(view, op._overloadname, target) if view is not None else target
