"""Fusion passes: norms, SwiGLU, rope, linear with bias and activation.

A pattern is fused only if the fused op is equal in real arithmetic and no other node reads the intermediate values.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..ir.program import NONE, Node, Program, Shape
from ..shapes.dim import Dim
from .clean import transposed
from .graph import FULL, Graph, Made, Supports, rewrite, supports_all


def pairs(n: Node) -> Iterator[tuple[int, int]]:
    """The two operands of a commutative node, in both orders."""
    if len(n.ins) == 2:
        yield n.ins[0], n.ins[1]
        yield n.ins[1], n.ins[0]


# ---------------------------------------------------------------- norms
def _squared(g: Graph, i: int) -> tuple[int, Node] | None:
    """(x, node) if the value is x * x."""
    n = g.by(i, "mul", "pow")
    if n is None:
        return None
    if n.op == "mul" and len(n.ins) == 2 and n.ins[0] == n.ins[1]:
        return n.ins[0], n
    power = g.with_number(n, "pow")
    return (power[0], n) if power is not None and power[1] == 2 else None


def _axes(g: Graph, mean: Node) -> int:
    """The number of trailing dims that a mean with keepdim reduces; 0 for any other mean."""
    dims, rank = [d.value for d in mean.attrs["dims"]], len(g.dims(mean.ins[0]))
    kept = len(g.dims(mean.outs[0])) == rank
    return len(dims) if kept and dims == list(range(rank - len(dims), rank)) else 0


def _root(g: Graph, i: int) -> int | None:
    """x if the value is sqrt(x)."""
    n = g.only(i, "sqrt", "pow")
    power = g.with_number(n, "pow")
    return n.ins[0] if n and n.op == "sqrt" else power[0] if power and power[1] == 0.5 else None


def _inverse_root(g: Graph, i: int) -> int | None:
    """x if the value is 1 / sqrt(x)."""
    n = g.only(i, "rsqrt", "pow", "reciprocal", "div")
    if n is None:
        return None
    if n.op == "rsqrt":
        return n.ins[0]
    if n.op == "reciprocal":
        return _root(g, n.ins[0])
    if n.op == "div":
        return _root(g, n.ins[1]) if len(n.ins) == 2 and g.number(n.ins[0]) == 1 else None
    power = g.with_number(n, "pow")
    if power is None:
        return None
    return power[0] if power[1] == -0.5 else _root(g, power[0]) if power[1] == -1 else None


def _scaled_by_root(g: Graph, n: Node) -> Iterator[tuple[int, int, float]]:
    """(x, v, eps) of x / sqrt(v + eps), in any of its spellings."""
    candidates = []
    if n.op == "mul":
        candidates = [(x, _inverse_root(g, y)) for x, y in pairs(n)]
    elif n.op == "div" and len(n.ins) == 2:
        candidates = [(n.ins[0], _root(g, n.ins[1]))]
    for x, v in candidates:
        sum_ = g.with_number(g.only(v, "add"), "add") if v is not None else None
        if sum_ is not None and g.dtype(x) in FULL and g.shape(x) == g.shape(n.outs[0]):
            yield x, *sum_


def _affine(g: Graph, n: Node, norm: str, bias: bool) -> Made:
    """Fuse a multiplication by a weight, or an addition of a bias, after a norm that has none."""
    for y, w in pairs(n) if n.op in ("mul", "add") else ():
        m = g.only(y, norm)
        if m is None or g.dtype(y) not in FULL:
            continue
        ins = [*m.ins, NONE, NONE][:3]
        operand = 1 if n.op == "mul" else 2
        if ins[operand] != NONE or ins[2] != NONE or (operand == 2 and not bias):
            continue
        axes = m.attrs["axes"].eval({})
        if g.shape(w) == Shape(g.dtype(y), g.dims(y)[-axes:]) and g.shape(n.outs[0]) == g.shape(y):
            ins[operand] = w
            return [Node(norm, tuple(ins if bias else ins[:2]), n.outs, m.attrs)]
    return None


def fuse_rms_norm(p: Program, supports: Supports = supports_all) -> Program:
    """x / sqrt(mean(x * x) + eps), optionally times a weight."""

    def rule(g: Graph, n: Node) -> Made:
        for x, v, eps in _scaled_by_root(g, n):
            mean = g.only(v, "mean")
            square = _squared(g, mean.ins[0]) if mean else None
            if mean and square and square[0] == x and g.within(mean.ins[0], [mean]) and (axes := _axes(g, mean)):
                return [Node("rms_norm", (x,), n.outs, {"eps": eps, "axes": Dim.const(axes)})]
        return _affine(g, n, "rms_norm", bias=False)

    return rewrite(p, rule, supports)


def fuse_layer_norm(p: Program, supports: Supports = supports_all) -> Program:
    """(x - mean(x)) / sqrt(var(x) + eps), optionally times a weight and plus a bias."""

    def rule(g: Graph, n: Node) -> Made:
        for c, v, eps in _scaled_by_root(g, n):
            centred = g.by(c, "sub")
            if centred is None or len(centred.ins) != 2:
                continue
            x, mean = centred.ins[0], g.by(centred.ins[1], "mean")
            if mean is None or mean.ins[0] != x or not g.within(centred.ins[1], [centred]):
                continue
            axes, inside = _axes(g, mean), _variance(g, v, x, c, mean)
            if axes and inside is not None and g.within(c, [n, *inside]):
                return [Node("layer_norm", (x, NONE, NONE), n.outs, {"eps": eps, "axes": Dim.const(axes)})]
        return _affine(g, n, "layer_norm", bias=True)

    return rewrite(p, rule, supports)


def _variance(g: Graph, v: int, x: int, c: int, mean: Node) -> list[Node] | None:
    """The nodes that read c = x - mean, if v is the variance of x over the dims of `mean`."""
    n = g.only(v, "mean", "var")
    if n is None or n.attrs["dims"] != mean.attrs["dims"] or g.dims(v) != g.dims(mean.outs[0]):
        return None
    if n.op == "var":
        return [] if n.ins[0] == x and n.attrs.get("correction") == 0 else None
    square = _squared(g, n.ins[0])
    return [square[1]] if square and square[0] == c and g.within(n.ins[0], [n]) else None


# ---------------------------------------------------------------- gates and positions
def fuse_swiglu(p: Program, supports: Supports = supports_all) -> Program:
    """g * sigmoid(g) as silu(g); silu(g) * up as swiglu(g, up)."""

    def rule(g: Graph, n: Node) -> Made:
        shape = g.shape(n.outs[0])
        if n.op != "mul" or shape.dtype not in FULL:
            return None
        for x, y in pairs(n):
            gate = g.only(x, "sigmoid", "silu")
            if gate is None or not g.shape(gate.ins[0]) == g.shape(y) == shape:
                continue
            if gate.op == "silu":
                return [Node("swiglu", (gate.ins[0], y), n.outs)]
            if gate.ins[0] == y:
                return [Node("silu", (y,), n.outs)]
        return None

    return rewrite(p, rule, supports)


def fuse_rope(p: Program, supports: Supports = supports_all) -> Program:
    """x * cos + rotated(x) * sin, where rotated(x) is the second half of x negated, then the first."""

    def rule(g: Graph, n: Node) -> Made:
        if n.op != "add" or g.dtype(n.outs[0]) not in FULL:
            return None
        for a, b in pairs(n):
            cos_term, sin_term = g.only(a, "mul"), g.only(b, "mul")
            if cos_term is None or sin_term is None:
                continue
            for rotated, sin in pairs(sin_term):
                x = _rotated(g, rotated)
                for y, cos in pairs(cos_term) if x is not None else ():
                    if y == x and g.shape(x) == g.shape(n.outs[0]) and _broadcasts(g, x, cos, sin):
                        return [Node("rope", (x, cos, sin), n.outs)]
        return None

    return rewrite(p, rule, supports)


def _broadcasts(g: Graph, x: int, *others: int) -> bool:
    """Whether the others provably broadcast to x: each size is 1 or equal to x's."""
    dims = g.dims(x)
    return all(
        g.dtype(i) == g.dtype(x)
        and len(g.dims(i)) <= len(dims)
        and all(d in (1, e) for d, e in zip(reversed(g.dims(i)), reversed(dims), strict=False))
        for i in others
    )


def _rotated(g: Graph, i: int) -> int | None:
    """The x of cat(-x[..., half:], x[..., :half], -1)."""
    cat = g.only(i, "cat")
    if cat is None or len(cat.ins) != 2 or cat.attrs["dim"] != len(g.dims(i)) - 1:
        return None
    neg, first = g.only(cat.ins[0], "neg", "mul"), g.only(cat.ins[1], "slice")
    if neg is None or first is None or (neg.op == "mul" and (g.with_number(neg, "mul") or (0, 0))[1] != -1):
        return None
    second = g.only(neg.ins[0], "slice")
    if second is None or second.ins != first.ins:
        return None
    x, last = first.ins[0], len(g.dims(i)) - 1
    half = g.dims(first.outs[0])[-1]
    starts = [(s.attrs["dim"], s.attrs["start"], s.attrs["step"]) for s in (first, second)]
    fits = starts == [(last, 0, 1), (last, half, 1)] and g.dims(x)[-1] == 2 * half == 2 * g.dims(second.outs[0])[-1]
    return x if fits else None


# ---------------------------------------------------------------- linear
def fuse_linear(p: Program, supports: Supports = supports_all) -> Program:
    """matmul with a matrix plus a vector → `linear` with bias; an activation after it becomes its attribute."""

    def rule(g: Graph, n: Node) -> Made:
        if n.op == "matmul":
            w = g.by(n.ins[1], "permute")
            return [Node("linear", (n.ins[0], w.ins[0], NONE), n.outs)] if w and len(g.dims(n.ins[1])) == 2 else None
        if n.op == "add":
            return _bias(g, n)
        name = activation_of(n)
        m = g.only(n.ins[0], "linear") if name else None
        if m is None or "activation" in m.attrs or g.shape(n.ins[0]) != g.shape(n.outs[0]):
            return None
        return [Node("linear", m.ins, n.outs, {**m.attrs, "activation": name})]

    return rewrite(p, rule, supports)


def _bias(g: Graph, n: Node) -> Made:
    for y, b in pairs(n):
        m = g.only(y, "linear", "matmul")
        if m is None or g.dtype(y) not in FULL or g.shape(y) != g.shape(n.outs[0]):
            continue
        if g.shape(b) != Shape(g.dtype(y), g.dims(y)[-1:]):
            continue
        if m.op == "linear" and "activation" not in m.attrs and (len(m.ins) < 3 or m.ins[2] == NONE):
            return [Node("linear", (*m.ins[:2], b), n.outs)]
        if m.op == "matmul" and len(g.dims(m.ins[1])) == 2:
            w = g.temp(f"{g.values[m.ins[1]].name}.t", transposed(g.shape(m.ins[1])))
            transpose = Node("permute", (m.ins[1],), (w,), {"dims": (Dim.const(1), Dim.const(0))})
            return [transpose, Node("linear", (m.ins[0], w, b), n.outs)]
    return None


def activation_of(n: Node) -> str:
    """The name of an activation as an attribute; empty if the node is not one."""
    if n.op == "gelu":
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(n.attrs.get("approximate", "none"), "")
    if n.op == "clamp":
        return "relu6" if (n.attrs.get("min"), n.attrs.get("max")) in ((0, 6), (Dim.const(0), Dim.const(6))) else ""
    return n.op if n.op in ("relu", "silu", "tanh", "sigmoid", "hardswish", "hardsigmoid") else ""
