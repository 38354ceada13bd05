"""Decompositions of ops that neither an engine nor ExecuTorch's kernels have into ops that they have. Each is torch's
op as a Python function; a node is replaced by the graph that tracing it on the node's own sizes records. Changes of
torch's own decompositions are in `compat/tracing.py`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._ops import OpOverload
from torch.fx import GraphModule
from torch.fx import Node as FxNode
from torch.fx.experimental.proxy_tensor import make_fx

aten = torch.ops.aten


# ---------------------------------------------------------------- by rank
def _ranked(x: Tensor, dim: int, keep: bool, rank: Callable[[Tensor], object]) -> tuple[Tensor, Tensor]:
    """The value of a rank along a dim, and its index. NaN come last; `rank` is a function of the number of others."""
    if x.dim() == 0:
        return x.clone(), torch.zeros_like(x, dtype=torch.int64)
    values, places = torch.sort(x, stable=True, dim=dim)
    numbers = (values == values).sum(dim, keepdim=True)
    at = rank(numbers) + torch.zeros_like(numbers)
    out = values.gather(dim, at), places.gather(dim, at)
    return out if keep else (out[0].squeeze(dim), out[1].squeeze(dim))


def _median_along(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    n = x.size(dim) if x.dim() else 1
    return _ranked(x, dim, keepdim, lambda numbers: torch.where(numbers < n, numbers, (n - 1) // 2))


def _nanmedian_along(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return _ranked(x, dim, keepdim, lambda numbers: (numbers.clamp(min=1) - 1) // 2)


def _kthvalue(x: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return _ranked(x, dim, keepdim, lambda numbers: k - 1)


def _median(x: Tensor) -> Tensor:
    return _median_along(x.flatten(), 0)[0]


def _nanmedian(x: Tensor) -> Tensor:
    return _nanmedian_along(x.flatten(), 0)[0]


def _searchsorted(borders: Tensor, x: Tensor, *, out_int32: bool = False, right: bool = False, side: str | None = None,
                  sorter: Tensor | None = None) -> Tensor:  # fmt: skip
    """The number of boundaries below each value, by comparing with all of them; NaN is above all."""
    borders = borders if sorter is None else borders.gather(-1, sorter)
    borders = borders if borders.dim() == 1 else borders.unsqueeze(-2)
    x = x.unsqueeze(-1)
    above = borders > x if right or side == "right" else borders >= x
    return above.logical_not().sum(-1, dtype=torch.int32 if out_int32 else torch.int64)


def _bucketize(x: Tensor, boundaries: Tensor, *, out_int32: bool = False, right: bool = False) -> Tensor:
    return _searchsorted(boundaries, x, out_int32=out_int32, right=right)


# ---------------------------------------------------------------- elementwise
def _round(x: Tensor, *, decimals: int) -> Tensor:
    if decimals < 0:
        return (x / 10.0**-decimals).round() * 10.0**-decimals
    return (x * 10.0**decimals).round() / 10.0**decimals


def _but_nan(choose: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """The other one where one is NaN."""
    return lambda x, y: torch.where(x.isnan(), y, torch.where(y.isnan(), x, choose(x, y)))


def _hypot(x: Tensor, y: Tensor) -> Tensor:
    x, y = x.abs(), y.abs()
    large, small = torch.maximum(x, y), torch.minimum(x, y)
    part = torch.where(large == 0, 0.0, small / large)
    return torch.where(x.isinf() | y.isinf(), float("inf"), large * (1 + part * part).sqrt())


# ---------------------------------------------------------------- products
def _added(x: Tensor, product: Tensor, beta: float, alpha: float) -> Tensor:
    if not product.is_floating_point():
        beta, alpha = int(beta), int(alpha)
    product = product if alpha == 1 else product * alpha
    return product if beta == 0 else (x if beta == 1 else x * beta) + product


def _addmv(x: Tensor, mat: Tensor, vec: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return _added(x, mat.mv(vec), beta, alpha).expand(mat.size(0))


def _addbmm(x: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return _added(x, batch1.bmm(batch2).sum(0), beta, alpha)


DECOMPOSITIONS: dict[OpOverload, Callable[..., object]] = {
    aten.median.dim: _median_along,
    aten.median.default: _median,
    aten.nanmedian.dim: _nanmedian_along,
    aten.nanmedian.default: _nanmedian,
    aten.kthvalue.default: _kthvalue,
    aten.searchsorted.Tensor: _searchsorted,
    aten.bucketize.Tensor: _bucketize,
    aten.round.decimals: _round,
    aten.fmax.default: _but_nan(torch.maximum),
    aten.fmin.default: _but_nan(torch.minimum),
    aten.hypot.default: _hypot,
    aten.addmv.default: _addmv,
    aten.addbmm.default: _addbmm,
    aten.dist.default: lambda x, y, p=2: torch.linalg.vector_norm(x - y, p),
}


def decompose_ops(gm: GraphModule) -> None:
    """Replace every node that has a decomposition."""
    for n in list(gm.graph.nodes):
        if n.op == "call_function" and n.target in DECOMPOSITIONS:
            _replace(gm, n)


def _replace(gm: GraphModule, n: FxNode) -> None:
    leaves, spec = pytree.tree_flatten((n.args, n.kwargs))
    places = [i for i, a in enumerate(leaves) if isinstance(a, FxNode)]

    def call(*operands: object) -> object:
        given = list(leaves)
        for i, x in zip(places, operands, strict=True):
            given[i] = x
        args, kwargs = pytree.tree_unflatten(given, spec)
        return DECOMPOSITIONS[n.target](*args, **kwargs)

    values = [leaves[i].meta["val"] for i in places]
    with detect_fake_mode(values) or contextlib.nullcontext():
        traced = make_fx(call)(*values).graph
    inputs = traced.find_nodes(op="placeholder")
    copies = {m: leaves[i] for m, i in zip(inputs, places, strict=True)}
    with gm.graph.inserting_before(n):
        for m in traced.nodes:
            if m.op == "call_function":
                copies[m] = gm.graph.node_copy(m, copies.__getitem__)
                copies[m].meta = {**n.meta, **m.meta}
    results = traced.output_node().args[0]
    if isinstance(results, FxNode):
        n.replace_all_uses_with(copies[results])
    else:
        for part in list(n.users):
            part.replace_all_uses_with(copies[results[part.args[1]]])
            gm.graph.erase_node(part)
    gm.graph.erase_node(n)
