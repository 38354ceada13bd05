"""The cost of a node of a Program, as Dims: operations, and bytes read and written.

An estimate for reports, the same for every engine: products count their multiply-adds (two operations each),
everything else counts one operation per element. A view costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

from ..errors import fail
from ..shapes.blocks import BLOCKS
from ..shapes.contract import DTYPE_BYTES
from ..shapes.dim import Dim
from .program import NONE, Node, Program, Value

VIEWS = {"reshape", "permute", "expand", "slice", "select", "diagonal", "unfold", "as_strided"}
GATHERS = {"embedding", "embedding_bag", "index", "index_select", "gather"}  # read a part of the first operand
REDUCES = {
    *("sum", "mean", "prod", "amax", "amin", "any", "all", "var", "argmax", "argmin", "avg_pool", "max_pool"),
    *("max_pool_index", "adaptive_avg_pool", "adaptive_max_pool", "adaptive_max_pool_index"),
}

Cost = Callable[[Node, list[Value], Value], Dim]  # from a node, its operands and its result


def numel(dims: Sequence[Dim]) -> Dim:
    """The number of elements."""
    return reduce(lambda a, b: a * b, dims, Dim.const(1))


def nbytes(v: Value) -> Dim:
    """The number of bytes; of a quantised weight, those of its blocks."""
    count = numel(v.dims)
    if v.dtype in BLOCKS:
        block, width = BLOCKS[v.dtype]
        return count * width // block
    return count * DTYPE_BYTES[v.dtype]


def _product(depth: int) -> Cost:
    """Cost of a result whose elements are sums over the last dim of an operand."""
    return lambda n, ins, out: 2 * numel(out.dims) * ins[depth].dims[-1]


def _conv(n: Node, ins: list[Value], out: Value) -> Dim:
    each = (
        ins[0] if n.attrs.get("transposed") else out
    )  # each of its elements is multiplied by all weights of a channel
    return 2 * numel(each.dims) * numel(ins[1].dims[1:])


def _attention(keys: int) -> Cost:
    def flops(n: Node, ins: list[Value], out: Value) -> Dim:
        return 2 * (numel(ins[0].dims) + numel(out.dims)) * ins[keys].dims[-2]

    return flops


def _scan(n: Node, ins: list[Value], out: Value) -> Dim:
    return 2 * numel(ins[0].dims) * ins[1].dims[-1]


FLOPS: dict[str, Cost] = {
    "linear": _product(1),
    "matmul": _product(0),
    "conv": _conv,
    "sdpa": _attention(1),
    "cached_attention": _attention(4),  # as if the cache were full
    **dict.fromkeys(("lstm_scan", "gru_scan", "rnn_tanh_scan", "rnn_relu_scan"), _scan),
}


def flops(p: Program, n: Node) -> Dim:
    """Operations of one node; a cond has 0, the nodes of its branches are counted separately.

    >>> from keepdim.ir.text import parse_program
    >>> p = parse_program('''keepdim program 1
    ... symbol s: 1..8 from x.size(0) = (1) * s + (0)
    ... input x: f32[s, 16]
    ... const w: f32[4, 16] @ w
    ... y: f32[s, 4] = linear(x, w)
    ... output y: f32[s, 4] = y''')
    >>> flops(p, p.nodes[0]), bytes_moved(p, p.nodes[0])
    (Dim('128*s'), Dim('80*s + 256'))
    """
    if n.op in VIEWS or n.regions or not n.outs:
        return Dim.const(0)
    ins = [p.value(i) for i in n.ins if i != NONE]
    out = p.value(n.outs[0])
    try:
        if n.op in FLOPS:
            return FLOPS[n.op](n, ins, out)
        return numel(ins[0].dims if n.op in REDUCES else out.dims)
    except (IndexError, KeyError, AttributeError, TypeError) as e:  # operands are checked by engines, at load
        fail("verify", f"node {n.op!r}", f"has other operands or attributes than the op takes ({len(ins)} operands)",
             "Lower the model again", e)  # fmt: skip


def bytes_moved(p: Program, n: Node) -> Dim:
    """Bytes that a node reads and writes."""
    if n.op in VIEWS or n.regions:
        return Dim.const(0)
    ins = [p.value(i) for i in dict.fromkeys(n.ins) if i != NONE]
    outs = [p.value(i) for i in n.outs]
    read = [*outs, *ins[1:]] if n.op in GATHERS else ins
    return sum(map(nbytes, [*read, *outs]), Dim.const(0))
