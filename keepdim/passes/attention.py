"""Fuses attention that is written out, by hand or by torch's decompositions, into the op `sdpa`.

`sdpa(q, k, v, mask)` is softmax(scale * q @ k.T + mask) @ v. For a query with no visible key torch's attention gives 0;
written out it gives NaN, which the attribute `safe` = false keeps.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..ir.program import NONE, Node, Program
from ..shapes.dim import Dim
from .clean import transposed
from .fuse import pairs
from .graph import FULL, Graph, Made, Supports, rewrite, supports_all

INF = float("inf")


@dataclass
class Scores:
    """The scale and mask between the first product and the softmax."""

    product: Node
    scale: float
    mask: int = NONE
    hides: bool = False  # the mask is true where scores become -inf, not where they are kept


def fuse_sdpa(p: Program, supports: Supports = supports_all) -> Program:
    """matmul, scale, mask, softmax, matmul → sdpa; the scale may be on q or k, heads of k and v may be repeated."""

    def rule(g: Graph, n: Node) -> Made:
        weights = _softmax(g, n.ins[0]) if n.op == "matmul" else None
        if weights is None:
            return None
        scores, safe = weights
        found = _scores(g, scores)
        if found is None:
            return None
        q, by_q = _unscaled(g, found.product.ins[0])
        k_t, by_k = _unscaled(g, found.product.ins[1])
        nodes, k, by_transposed = _untransposed(g, k_t)
        k, v = _heads(g, k), _heads(g, n.ins[1])
        mask = found.mask
        if safe and mask != NONE and g.dtype(mask) == "bool":
            return None
        if not _fits(g, q, k, v, n.outs[0]) or (mask != NONE and not _broadcasts(g, mask, scores)):
            return None
        if found.hides:
            inverse = g.temp(f"{g.values[mask].name}.not", g.shape(mask))
            nodes.append(Node("eq", (mask,), (inverse,), {"other": Dim.const(0)}))
            mask = inverse
        attrs = {"scale": found.scale * by_q * by_k * by_transposed} | ({} if safe else {"safe": False})
        return [*nodes, Node("sdpa", (q, k, v) if mask == NONE else (q, k, v, mask), n.outs, attrs)]

    return rewrite(p, rule, supports)


def _softmax(g: Graph, i: int) -> tuple[int, bool] | None:
    """(scores, safe) if the value is a softmax over the last dim; safe: rows of only -inf give 0."""
    n = g.only(i, "softmax", "where")
    if n is None:
        return None
    safe = n.op == "where"
    soft = g.only(n.ins[2], "softmax") if safe else n
    if soft is None or soft.attrs["dim"] != len(g.dims(i)) - 1 or g.dtype(i) not in FULL:
        return None
    scores = soft.ins[0]
    if not safe:
        return (scores, False) if g.within(scores, [soft]) else None
    test = _all_hidden(g, n.ins[0])
    zero = g.number(n.ins[1])
    fits = test is not None and test.ins[0] == scores and g.within(scores, [soft, test]) and zero == 0
    return (scores, True) if fits else None


def _all_hidden(g: Graph, i: int) -> Node | None:
    """The comparison in not(any(not(scores == -inf), -1)), or in all(scores == -inf, -1)."""
    n, each = g.only(i, "all", "amin"), None
    if n is None and (some := _not(g, i)) is not None:
        n = g.only(some, "any", "amax")
        each = _not(g, n.ins[0]) if n else None
    elif n is not None:
        each = n.ins[0]
    test = g.only(each, "eq") if each is not None else None
    if n is None or test is None:
        return None
    last = Dim.const(len(g.dims(n.ins[0])) - 1)
    over = n.attrs.get("dims", n.attrs.get("dim"))
    kept = len(g.dims(n.outs[0])) == len(g.dims(n.ins[0]))
    return test if over in (last, (last,)) and kept and _second(g, test) == -INF else None


def _not(g: Graph, i: int) -> int | None:
    """x if the value is its negation: logical_not(x), or x == 0 of a bool."""
    n = g.only(i, "logical_not", "eq")
    if n is None or (n.op == "eq" and (g.dtype(n.ins[0]) != "bool" or _second(g, n) != 0)):
        return None
    return n.ins[0]


def _second(g: Graph, n: Node) -> float | Dim | None:
    """The constant that a comparison compares with."""
    return n.attrs.get("other") if len(n.ins) == 1 else g.number(n.ins[1])


def _scores(g: Graph, i: int) -> Scores | None:
    """From the softmax back to the product: at most one mask, and the scale inside it."""
    found = Scores(Node("", (), ()), 1.0)
    while True:
        n = g.by(i, "matmul", "mul", "div", "add", "where")
        if n is None:
            return None
        if n.op == "matmul":
            found.product = n
            return found
        inner = _masked(g, n, found) if n.op in ("add", "where") else _scaled(g, n, found)
        if inner is None or not g.within(inner, [n]):
            return None
        i = inner


def _masked(g: Graph, n: Node, found: Scores) -> int | None:
    """The scores before the mask, which is added or fills -inf. None for a second mask or a scale after the mask."""
    if found.mask != NONE or found.scale != 1:
        return None
    if n.op == "add":
        for x, mask in pairs(n):
            if _leads_to_product(g, x) and g.shape(x) == g.shape(n.outs[0]):
                found.mask = mask
                return x
        return None
    condition, a, b = n.ins
    for x, fill, hides in ((a, b, False), (b, a, True)):
        if g.number(fill) == -INF and g.shape(x) == g.shape(n.outs[0]):
            found.mask, found.hides = condition, hides
            return x
    return None


def _leads_to_product(g: Graph, i: int) -> bool:
    while (n := g.by(i, "mul", "div")) is not None and (inner := g.with_number(n, "mul", "div")) is not None:
        i = inner[0]
    return g.by(i, "matmul") is not None


def _scaled(g: Graph, n: Node, found: Scores) -> int | None:
    inner = g.with_number(n, "mul", "div")
    if inner is None or (n.op == "div" and inner[1] == 0):
        return None
    found.scale *= inner[1] if n.op == "mul" else 1 / inner[1]
    return inner[0]


def _unscaled(g: Graph, i: int) -> tuple[int, float]:
    """The value before multiplications by constants, and their product."""
    scale = 1.0
    while (inner := g.with_number(g.by(i, "mul", "div"), "mul", "div")) is not None:
        n = g.made[i]
        if n.op == "div" and inner[1] == 0:
            break
        scale *= inner[1] if n.op == "mul" else 1 / inner[1]
        i = inner[0]
    return i, scale


def _untransposed(g: Graph, i: int) -> tuple[list[Node], int, float]:
    """(new nodes, k, scale) so that the value is k with its last two dims transposed, times the scale."""
    rank = len(g.dims(i))
    order = (*range(rank - 2), rank - 1, rank - 2)
    n = g.by(i, "permute")
    if n is not None and tuple(d.value for d in n.attrs["dims"]) == order:
        return [], *_unscaled(g, n.ins[0])
    k = g.temp(f"{g.values[i].name}.t", transposed(g.shape(i)))
    return [Node("permute", (i,), (k,), {"dims": tuple(map(Dim.const, order))})], k, 1.0


def _heads(g: Graph, i: int) -> int:
    """The value before its heads were repeated: [.., h, n, e] → [.., h, r, n, e] → [.., h * r, n, e]."""
    merge = g.by(i, "reshape")
    repeat = g.by(merge.ins[0], "expand") if merge else None
    split = g.by(repeat.ins[0], "reshape") if repeat else None
    if merge is None or repeat is None or split is None:
        return i
    x = split.ins[0]
    dims, wide, out = g.dims(x), g.dims(repeat.outs[0]), g.dims(i)
    at = len(dims) - 2
    one = (*dims[:at], Dim.const(1), *dims[at:])
    if at < 1 or g.dims(split.outs[0]) != one or wide != (*one[:at], wide[at], *one[at + 1 :]) or len(wide) != len(one):
        return i
    return x if out == (*dims[: at - 1], dims[at - 1] * wide[at], *dims[at:]) else i


def _fits(g: Graph, q: int, k: int, v: int, out: int) -> bool:
    """[.., n, e], [.., m, e], [.., m, f] → [.., n, f]: equal leading dims; the kv heads may divide the heads."""
    a, b, c = g.dims(q), g.dims(k), g.dims(v)
    if not (len(a) == len(b) == len(c) >= 2 and g.dtype(q) == g.dtype(k) == g.dtype(v) == g.dtype(out)):
        return False
    heads, kv = a[-3:-2], b[-3:-2]
    divides = heads == kv or (bool(kv) and _divides(kv[0], heads[0]))
    same = a[:-3] == b[:-3] == c[:-3] and kv == c[-3:-2] and a[-1] == b[-1] and b[-2] == c[-2]
    return divides and same and g.dims(out) == (*a[:-1], c[-1])


def _divides(kv: Dim, heads: Dim) -> bool:
    return (kv.bounds[0] or 0) > 0 and (heads % kv).value == 0


def _broadcasts(g: Graph, mask: int, scores: int) -> bool:
    """Whether the mask is bool or of the scores' dtype, and its sizes provably broadcast to theirs."""
    have, want = g.dims(mask), g.dims(scores)
    sizes = zip(reversed(have), reversed(want), strict=False)
    return g.dtype(mask) in ("bool", g.dtype(scores)) and len(have) <= len(want) and all(d in (1, e) for d, e in sizes)


def fuse_rope_into_attention(p: Program, supports: Supports = supports_all) -> Program:
    """rope of queries and keys, then cached attention → one node, which applies rope as it reads them."""

    def rule(g: Graph, n: Node) -> Made:
        if n.op != "cached_attention" or len(n.ins) != 6:
            return None
        q, k = (g.only(i, "rope") for i in n.ins[:2])
        if q is None or k is None or q.ins[1:] != k.ins[1:]:
            return None
        wanted = (*(1,) * (len(g.dims(q.ins[1])) - 2), *g.dims(q.ins[0])[2:])  # cos and sin are shared by all heads
        if any(g.dims(i) != wanted for i in q.ins[1:]):
            return None
        return [Node(n.op, (q.ins[0], k.ins[0], *n.ins[2:], *q.ins[1:]), n.outs, n.attrs)]

    return rewrite(p, rule, supports)
