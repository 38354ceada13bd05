"""How large the elements of values can be, whatever a model's inputs are: from the weights on, op by op.

What is finite in exact arithmetic with room to spare is finite in floating point, so 0 times it is 0 and not NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from ..ir.program import NONE, Node
from ..shapes.contract import BLOCKS
from .graph import Graph

LARGEST = {"f64": 1e300, "f32": 1e38, "bf16": 1e38, "f16": 3e4}  # below the dtypes' own: sums round
NARROWS = ("relu", "gelu", "silu", "tanh", "sigmoid", "neg", "abs", "erf")  # |f(x)| <= max(|x|, 1), each element
TINY = 1e-30
SLACK = 1e6  # rounding: of nearly equal numbers the variance can come out as 0, and what is left of them is not
VIEWS = ("reshape", "permute", "expand", "slice", "select")


class Magnitudes:
    """The largest magnitude of each value; infinite where nothing is known."""

    def __init__(self, g: Graph, weights: Mapping[str, torch.Tensor]):
        self._g, self._weights = g, weights
        self._known: dict[int, float] = {NONE: 0.0}

    def finite(self, i: int) -> bool:
        """Whether no element is an infinity or a NaN."""
        return self.of(i) < math.inf

    def of(self, i: int) -> float:
        """The bound of value i."""
        order = [i]
        while order:  # operands first, without recursion: programs are long
            at = order[-1]
            n = self._g.made.get(at)
            left = [k for k in n.ins if k not in self._known] if n is not None and at not in self._known else []
            order += left
            if left:
                continue
            if order.pop() not in self._known:
                found = self._weight(at) if n is None else self._made(at, n)
                self._known[at] = found if found < LARGEST.get(self._g.dtype(at), math.inf) else math.inf
        return self._known[i]

    def _weight(self, i: int) -> float:
        v = self._g.values[i]
        w = self._tensor(i)
        if w is not None and w.numel():
            return _number(w.abs().max() if w.is_floating_point() else w.double().abs().max())
        return _by_dtype(v.dtype)

    def _tensor(self, i: int) -> torch.Tensor | None:
        v = self._g.values[i]
        return self._weights[v.key].detach() if v.kind == "const" and v.dtype not in BLOCKS else None

    def _made(self, i: int, n: Node) -> float:
        rule, dtype = RULES.get(n.op), self._g.dtype(i)
        if dtype not in LARGEST or rule is None:
            return _by_dtype(dtype)
        return rule(self, n) if all(x < math.inf for x in self.ins(n)) else math.inf

    # -- for the rules
    def ins(self, n: Node) -> list[float]:
        """Of each operand; 0 where it is missing."""
        return [self._known[k] for k in n.ins]

    def linear(self, n: Node) -> float:
        """The row of the weight with the largest sum of magnitudes decides."""
        w = self._tensor(n.ins[1])
        if w is None or not w.numel():
            return math.inf
        x, _, bias = (*self.ins(n), 0.0)[:3]
        return max(_number(w.abs().sum(-1, dtype=torch.float64).max()) * x + bias, 1.0)  # 1: an activation's

    def norm(self, n: Node) -> float:
        """A row is scaled to a mean square of 1; its squares have to be finite too."""
        size = self._size(n.ins[0], int(n.attrs["axes"].value))
        x, weight, bias = (*self.ins(n), 0.0, 0.0)[:3]
        scale = weight if len(n.ins) > 1 and n.ins[1] != NONE else 1.0
        fine = x * x * size < self._largest(n) and n.attrs["eps"] > TINY  # a row of zeros is divided by its root
        return SLACK * math.sqrt(size) * scale + bias if fine else math.inf

    def attention(self, n: Node) -> float:
        """A mean of the values, where the scores are finite, and a mask only hides."""
        q, k, v = self.ins(n)[:3]
        scores = q * k * self._size(n.ins[0], 1) * max(1.0, abs(n.attrs.get("scale", 1.0)))
        adds = len(n.ins) > 3 and n.ins[3] != NONE and self._g.dtype(n.ins[3]) != "bool"
        return v if scores < self._largest(n) and not adds and n.attrs.get("safe", True) else math.inf

    def _largest(self, n: Node) -> float:
        return LARGEST[self._g.dtype(n.outs[0])]

    def _size(self, i: int, last: int) -> float:
        sizes = [math.inf if d.value is None else float(d.value) for d in self._g.dims(i)[-last:]]
        return math.prod(sizes)


def _by_dtype(dtype: str) -> float:
    return math.inf if dtype in LARGEST or dtype in BLOCKS else 1.0 if dtype == "bool" else 2.0**63


def _number(x: torch.Tensor) -> float:
    """A NaN is larger than any."""
    y = float(x)
    return math.inf if math.isnan(y) else y


Rule = Callable[[Magnitudes, Node], float]


def _with_other(f: Callable[[float, float], float]) -> Rule:
    def bound(m: Magnitudes, n: Node) -> float:
        x, *y = m.ins(n)
        other = n.attrs.get("other")
        return f(x, y[0] if y else abs(other) if isinstance(other, float) else 2.0**63)

    return bound


RULES: dict[str, Rule] = {
    "add": _with_other(lambda x, y: x + y),
    "sub": _with_other(lambda x, y: x + y),
    "mul": _with_other(lambda x, y: x * y),
    "linear": Magnitudes.linear,
    "layer_norm": Magnitudes.norm,
    "rms_norm": Magnitudes.norm,
    "sdpa": Magnitudes.attention,
    **dict.fromkeys(NARROWS, lambda m, n: max(m.ins(n)[0], 1.0)),
    **dict.fromkeys(("cast", "embedding", *VIEWS), lambda m, n: m.ins(n)[0]),
}
