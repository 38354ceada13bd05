"""Upper bounds of the magnitude of values, for any model inputs: from the weights, op by op.

A value that is finite in exact arithmetic, with a margin, is finite in floating point, so 0 times it is 0 and not NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from ..ir.program import NONE, Node
from ..shapes.blocks import BLOCKS
from .graph import Graph

LARGEST = {"f64": 1e300, "f32": 1e38, "bf16": 1e38, "f16": 3e4}  # below the dtype's maximum, as a margin for rounding
BOUNDED_BY_INPUT = (
    "relu",
    "gelu",
    "silu",
    "tanh",
    "sigmoid",
    "neg",
    "abs",
    "erf",
)  # elementwise, |f(x)| <= max(|x|, 1)
TINY = 1e-30
SLACK = 1e6  # margin for rounding: the variance of nearly equal numbers can be computed as 0 while x - mean is not
VIEWS = ("reshape", "permute", "expand", "slice", "select")


class ValueBounds:
    """The largest possible magnitude of each value; infinite if unknown."""

    def __init__(self, g: Graph, weights: Mapping[str, torch.Tensor]):
        self._g, self._weights = g, weights
        self._known: dict[int, float] = {NONE: 0.0}

    def finite(self, i: int) -> bool:
        """Whether all elements are provably finite."""
        return self.of(i) < math.inf

    def of(self, i: int) -> float:
        """The bound of value i."""
        order = [i]
        while order:  # operands first; iterative, because programs are long
            at = order[-1]
            n = self._g.made.get(at)
            left = [k for k in n.ins if k not in self._known] if n is not None and at not in self._known else []
            order += left
            if left:
                continue
            if order.pop() not in self._known:
                found = self._leaf_bound(at) if n is None else self._node_bound(at, n)
                self._known[at] = found if found < LARGEST.get(self._g.dtype(at), math.inf) else math.inf
        return self._known[i]

    def _leaf_bound(self, i: int) -> float:
        v = self._g.values[i]
        w = self._tensor(i)
        if w is not None and w.numel():
            return _as_bound(w.abs().max() if w.is_floating_point() else w.double().abs().max())
        return _dtype_bound(v.dtype)

    def _tensor(self, i: int) -> torch.Tensor | None:
        v = self._g.values[i]
        return self._weights[v.key].detach() if v.kind == "const" and v.dtype not in BLOCKS else None

    def _node_bound(self, i: int, n: Node) -> float:
        rule, dtype = RULES.get(n.op), self._g.dtype(i)
        if dtype not in LARGEST or rule is None:
            return _dtype_bound(dtype)
        return rule(self, n) if all(x < math.inf for x in self.ins(n)) else math.inf

    # -- for the rules
    def ins(self, n: Node) -> list[float]:
        """The bound of each operand; 0 for a missing one."""
        return [self._known[k] for k in n.ins]

    def linear(self, n: Node) -> float:
        """Bounded by the largest absolute row sum of the weight."""
        w = self._tensor(n.ins[1])
        if w is None or not w.numel():
            return math.inf
        x, _, bias = (*self.ins(n), 0.0)[:3]
        return max(
            _as_bound(w.abs().sum(-1, dtype=torch.float64).max()) * x + bias, 1.0
        )  # at least 1, for a fused activation

    def norm(self, n: Node) -> float:
        """A row is scaled to a mean square of 1; its squares must be finite too."""
        size = self._size(n.ins[0], int(n.attrs["axes"].value))
        x, weight, bias = (*self.ins(n), 0.0, 0.0)[:3]
        scale = weight if len(n.ins) > 1 and n.ins[1] != NONE else 1.0
        fine = x * x * size < self._largest(n) and n.attrs["eps"] > TINY  # a row of zeros is divided by sqrt(eps)
        return SLACK * math.sqrt(size) * scale + bias if fine else math.inf

    def attention(self, n: Node) -> float:
        """A weighted mean of v, if the scores are finite and the mask is bool."""
        q, k, v = self.ins(n)[:3]
        scores = q * k * self._size(n.ins[0], 1) * max(1.0, abs(n.attrs.get("scale", 1.0)))
        adds = len(n.ins) > 3 and n.ins[3] != NONE and self._g.dtype(n.ins[3]) != "bool"
        return v if scores < self._largest(n) and not adds and n.attrs.get("safe", True) else math.inf

    def _largest(self, n: Node) -> float:
        return LARGEST[self._g.dtype(n.outs[0])]

    def _size(self, i: int, last: int) -> float:
        sizes = [math.inf if d.value is None else float(d.value) for d in self._g.dims(i)[-last:]]
        return math.prod(sizes)


def _dtype_bound(dtype: str) -> float:
    return math.inf if dtype in LARGEST or dtype in BLOCKS else 1.0 if dtype == "bool" else 2.0**63


def _as_bound(x: torch.Tensor) -> float:
    """As a float, with NaN as infinity."""
    y = float(x)
    return math.inf if math.isnan(y) else y


BoundRule = Callable[[ValueBounds, Node], float]


def _with_other(f: Callable[[float, float], float]) -> BoundRule:
    def bound(m: ValueBounds, n: Node) -> float:
        x, *y = m.ins(n)
        other = n.attrs.get("other")
        return f(x, y[0] if y else abs(other) if isinstance(other, float) else 2.0**63)

    return bound


RULES: dict[str, BoundRule] = {
    "add": _with_other(lambda x, y: x + y),
    "sub": _with_other(lambda x, y: x + y),
    "mul": _with_other(lambda x, y: x * y),
    "linear": ValueBounds.linear,
    "layer_norm": ValueBounds.norm,
    "rms_norm": ValueBounds.norm,
    "sdpa": ValueBounds.attention,
    **dict.fromkeys(BOUNDED_BY_INPUT, lambda m, n: max(m.ins(n)[0], 1.0)),
    **dict.fromkeys(("cast", "embedding", *VIEWS), lambda m, n: m.ins(n)[0]),
}
