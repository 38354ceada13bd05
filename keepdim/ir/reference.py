"""The reference interpreter: runs a Program with torch. The oracle for passes and engines; also folds constants.

An op is the torch function of its name, with the operands in order and the attributes as keywords, unless
`TORCH_FUNCTIONS` overrides it. Not optimised for speed; each result is checked against the Program's dims and dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Union

import torch
import torch.nn.functional as F

from ..errors import fail
from ..shapes.blocks import BLOCKS
from ..shapes.contract import DTYPE_OF, DTYPES
from ..shapes.dim import Dim
from . import torch_ops
from .program import NONE, Attr, Node, Program, Value
from .quant import Quantised, dequantise

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu6": F.relu6,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
}


Operand = Union[torch.Tensor, int, None]  # noqa: UP007  None if it is missing; mypy does not see torch
Number = bool | int | float | str | list[int]  # an attribute with concrete Dims


class ConcreteNode(NamedTuple):
    """One node with concrete operands (None if missing), attributes, and the expected dims and dtype."""

    ins: list[Any]
    attrs: dict[str, Any]  # a `Number` each
    dims: list[int]  # of the first result
    dtype: torch.dtype

    def operand(self, i: int) -> Any:
        """An operand, or None if it is missing."""
        return self.ins[i] if i < len(self.ins) else None


OpFunction = Callable[[ConcreteNode], torch.Tensor | Sequence[torch.Tensor]]
Function = Callable[..., torch.Tensor]  # of torch


# ---------------------------------------------------------------- ops that differ from torch's function of that name
def _reduce(f: Function, typed: bool = False) -> OpFunction:
    """Reduce over the attribute `dims`; keepdim by the result's rank. `typed`: f takes the result's dtype."""

    def call(c: ConcreteNode) -> torch.Tensor:
        more = {k: v for k, v in c.attrs.items() if k != "dims"} | ({"dtype": c.dtype} if typed else {})
        return f(c.ins[0], tuple(c.attrs["dims"]), keepdim=len(c.dims) == c.ins[0].dim(), **more)

    return call


def _with_tensor(f: Function) -> OpFunction:
    """For functions that only take tensors: a number becomes one."""
    return lambda c: f(*c.ins, *([torch.full((), c.attrs["other"], dtype=c.dtype)] if "other" in c.attrs else []))


def _divide(rounding: str) -> OpFunction:
    return lambda c: torch.div(c.ins[0], c.attrs.get("other", c.operand(1)), rounding_mode=rounding)


def _arange(c: ConcreteNode) -> torch.Tensor:
    wide = torch.float64 if c.dtype.is_floating_point else torch.int64
    return (torch.arange(c.dims[0], dtype=wide) * c.attrs["step"] + c.attrs["start"]).to(c.dtype)


def _slice(c: ConcreteNode) -> torch.Tensor:
    dim, start, step = (c.attrs[k] for k in ("dim", "start", "step"))
    return torch.ops.aten.slice(c.ins[0], dim, start, start + c.dims[dim] * step, step)


def _arg_reduction(f: Function) -> OpFunction:
    """argmax or argmin: the position in the flattened `dims`."""

    def call(c: ConcreteNode) -> torch.Tensor:
        x, dims = c.ins[0], c.attrs["dims"]
        x = x.byte() if x.dtype == torch.bool else x
        kept = [d for d in range(x.dim()) if d not in dims]
        return f(x.permute(*kept, *dims).flatten(len(kept)) if dims else x.unsqueeze(-1), -1).reshape(c.dims)

    return call


def _prod(c: ConcreteNode) -> torch.Tensor:
    x = c.ins[0]
    for d in c.attrs["dims"]:
        x = x.prod(d, keepdim=True, dtype=c.dtype)
    return x.reshape(c.dims)


def _argsort(c: ConcreteNode) -> torch.Tensor:
    dim = c.attrs["dim"]
    order = torch.argsort(c.ins[0], dim=dim, descending=c.attrs.get("descending", False), stable=True)
    return order.narrow(dim, 0, c.dims[dim]) if c.dims else order


def _indices(c: ConcreteNode, first: int) -> list[object]:
    """One index per dim, None if there is none."""
    given = dict(zip(c.attrs["dims"], c.ins[first:], strict=True))
    return [given.get(d) for d in range(c.ins[0].dim())]


def _index_put(accumulate: bool) -> OpFunction:
    return lambda c: torch.ops.aten.index_put(c.ins[0], _indices(c, 2), c.ins[1], accumulate)


def _scatter_reduce(c: ConcreteNode) -> torch.Tensor:
    x, index, src = c.ins
    return torch.scatter_reduce(x, c.attrs["dim"], index.long(), src, c.attrs["reduce"])


def _slice_scatter(c: ConcreteNode) -> torch.Tensor:
    dim, start, step = (c.attrs[k] for k in ("dim", "start", "step"))
    end = start + (c.ins[1].shape[dim] - 1) * step + 1
    return torch.slice_scatter(c.ins[0], c.ins[1], dim, start, end, step) if c.ins[1].shape[dim] else c.ins[0]


def _unfold(c: ConcreteNode) -> torch.Tensor:
    return c.ins[0].unfold(c.attrs["dim"], c.dims[-1], c.attrs["step"])


def _zero_unlisted(y: torch.Tensor, rows: torch.Tensor | None, heads: bool = False) -> torch.Tensor:
    """Zero all rows [..] of y [.., width], or [.., n] of y [.., heads, n, width], that are not listed."""
    if rows is None:
        return y
    lead = [*y.shape[:-3], 1, y.shape[-2]] if heads else y.shape[:-1]
    kept = torch.zeros(len(rows), dtype=torch.bool)
    kept[rows[rows >= 0]] = True
    return torch.where(kept.reshape(*lead, 1), y, 0)


def _linear(c: ConcreteNode) -> torch.Tensor:
    x, w = c.ins[0], c.ins[1]
    if "precision" in c.attrs:  # operands of the products are rounded, sums are not
        x, w = (t.to(DTYPE_OF[c.attrs["precision"]]).to(c.dtype) for t in (x, w))
    y = F.linear(x, w.to(c.dtype), c.operand(2))
    return _zero_unlisted(ACTIVATIONS[c.attrs["activation"]](y) if "activation" in c.attrs else y, c.operand(3))


def _norm(f: Function) -> OpFunction:
    def call(c: ConcreteNode) -> torch.Tensor:
        x, axes = c.ins[0], c.attrs["axes"]
        return f(x, x.shape[x.dim() - axes :], *c.ins[1:], eps=c.attrs["eps"])

    return call


def _cached_attention(c: ConcreteNode) -> torch.Tensor:
    """Operands: q, k, v, the position, both caches, and optionally cos and sin of rope."""
    q, k, v, position, keys, values, *rope = c.ins
    if rope:
        cos, sin = rope
        q, k = (x * cos + rotate_half(x) * sin for x in (q, k))
    return torch_ops.cached_attention(q, k, v, keys, values, position, **c.attrs)


def sdpa(c: ConcreteNode) -> torch.Tensor:
    """softmax(scale * q @ k.T + mask) @ v, scale 1 / sqrt(width) by default; heads of k and v repeat to those of q.

    As in torch, a fully masked query gets 0, and a bool mask adds -inf. `safe` false is attention written out by
    hand: such a query gets NaN, and a bool mask replaces the score by -inf.
    """
    wide = torch.float64 if c.dtype == torch.float64 else torch.float32
    q, k, v = (t.to(wide) for t in c.ins[:3])
    mask, safe = c.operand(3), c.attrs.get("safe", True)
    if q.dim() > 2 and k.dim() > 2 and 1 < k.shape[-3] < q.shape[-3]:
        k, v = (t.repeat_interleave(q.shape[-3] // k.shape[-3], -3) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * c.attrs.get("scale", max(q.size(-1), 1) ** -0.5)
    if c.attrs.get("causal"):
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    if mask is not None and mask.dtype == torch.bool:
        scores = torch.where(mask, scores, scores - torch.inf if safe else -torch.inf)
    elif mask is not None:
        scores = scores + mask
    p = torch.softmax(scores, -1)
    if safe:
        p = p.masked_fill((scores == -torch.inf).all(-1, keepdim=True), 0)
    return _zero_unlisted((p @ v).to(c.dtype), c.operand(4), heads=True)


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    """cat(-second half, first half)."""
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


# ---------------------------------------------------------------- windows
def _by_rank(name: str, rank: int) -> Function:
    return getattr(F, f"{name}{rank}d")


def _conv(c: ConcreteNode) -> torch.Tensor:
    x, w, rank = c.ins[0], c.ins[1], c.ins[0].dim() - 2
    stride, pad, dilation = (c.attrs[k] for k in ("stride", "padding", "dilation"))
    more = [0] * rank  # output_padding of a transposed one
    if c.attrs["transposed"]:
        for d in range(rank):
            least = (x.size(d + 2) - 1) * stride[d] - 2 * pad[d] + dilation[d] * (w.size(d + 2) - 1) + 1
            more[d] = c.dims[d + 2] - least
    rest = (c.attrs["transposed"], more, c.attrs["groups"])
    y = torch.ops.aten.convolution(x, w, c.operand(2), stride, pad, dilation, *rest)
    y = y if c.operand(3) is None else y + c.operand(3)
    return ACTIVATIONS[c.attrs["activation"]](y) if "activation" in c.attrs else y


def _window(c: ConcreteNode) -> tuple[int, dict[str, object]]:
    """The rank of a pool's window, and its arguments; ceil_mode by the result's size."""
    kernel, stride, pad = (list(c.attrs[k]) for k in ("kernel", "stride", "padding"))
    dilation, rank = list(c.attrs.get("dilation", [1] * len(kernel))), len(kernel)
    sizes = c.ins[0].shape[-rank:]
    down = [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, p, d, k, s in zip(sizes, pad, dilation, kernel, stride, strict=True)
    ]
    given = {"kernel_size": kernel, "stride": stride, "padding": pad, "ceil_mode": down != c.dims[-rank:]}
    return rank, given | ({"dilation": dilation} if "dilation" in c.attrs else {})


def _max_pool(indices: bool) -> OpFunction:
    def call(c: ConcreteNode) -> torch.Tensor:
        rank, given = _window(c)
        return _by_rank("max_pool", rank)(c.ins[0], **given, return_indices=True)[int(indices)]

    return call


def _avg_pool(c: ConcreteNode) -> torch.Tensor:
    rank, given = _window(c)
    divisor = {"divisor_override": c.attrs["divisor"]} if "divisor" in c.attrs else {}
    return _by_rank("avg_pool", rank)(c.ins[0], **given, count_include_pad=c.attrs["count_include_pad"], **divisor)


def _adaptive(name: str, indices: int | None = None) -> OpFunction:
    def call(c: ConcreteNode) -> torch.Tensor:
        rank = c.attrs["axes"]
        more = {} if indices is None else {"return_indices": True}
        y = _by_rank(name, rank)(c.ins[0], c.dims[-rank:], **more)
        return y if indices is None else y[indices]

    return call


def _pad(c: ConcreteNode) -> torch.Tensor:
    before = c.attrs["before"]
    first = len(c.dims) - len(before)
    pads: list[int] = []
    for d, b in reversed(list(enumerate(before, first))):
        pads += [b, c.dims[d] - c.ins[0].size(d) - b]
    value = {"value": c.attrs["value"]} if c.attrs["mode"] == "constant" else {}
    return F.pad(c.ins[0], pads, c.attrs["mode"], **value)


def _resize(name: str, c: ConcreteNode, *more: float | list[float] | None) -> torch.Tensor:
    """Resize by the scale factors if they are given, else to the result's size."""
    factors = [c.attrs[f"scale_{d}"] for d in range(len(c.dims) - 2) if f"scale_{d}" in c.attrs]
    f = getattr(torch.ops.aten, name).vec
    return f(c.ins[0], None if factors else c.dims[2:], *more, factors or None)


def _nearest(c: ConcreteNode) -> torch.Tensor:
    return _resize(f"{'_upsample_nearest_exact' if c.attrs['exact'] else 'upsample_nearest'}{len(c.dims) - 2}d", c)


def _resample(c: ConcreteNode) -> torch.Tensor:
    names = {("linear", 3): "linear1d", ("linear", 4): "bilinear2d", ("linear", 5): "trilinear3d"}
    name = names.get((c.attrs["mode"], len(c.dims)), "bicubic2d")
    return _resize(f"upsample_{name}", c, c.attrs["align_corners"])


def _batch_norm(c: ConcreteNode) -> torch.Tensor:
    x, weight, bias, mean, var = (c.operand(i) for i in range(5))
    return torch.batch_norm(x, weight, bias, mean, var, False, 0.0, c.attrs["eps"], False)


def _fold(c: ConcreteNode) -> torch.Tensor:
    return F.fold(c.ins[0], c.dims[-2:], **{"kernel_size" if k == "kernel" else k: v for k, v in c.attrs.items()})


def _cdist(c: ConcreteNode) -> torch.Tensor:
    return torch.cdist(*c.ins, c.attrs["p"], compute_mode="donot_use_mm_for_euclid_dist")


def _embedding_bag(c: ConcreteNode) -> torch.Tensor:
    return F.embedding_bag(c.ins[1], c.ins[0], c.ins[2], per_sample_weights=c.operand(3), **c.attrs)


# ---------------------------------------------------------------- recurrent layers
def _scan(step: Function) -> OpFunction:
    """A scan over the first dim, from its end if `reverse`; the input projection of the gates is given."""

    def call(c: ConcreteNode) -> torch.Tensor:
        gates, w, bias = c.ins[0], c.ins[1], c.operand(2)
        state = [s for s in c.ins[3:] if s is not None]
        out = torch.empty(c.dims, dtype=c.dtype)
        order = range(gates.size(0))
        for t in reversed(order) if c.attrs.get("reverse") else order:
            state = step(gates[t], F.linear(state[0], w, bias), state)
            for k, s in enumerate(state):
                (out[k] if len(state) > 1 else out)[t] = s
        return out

    return call


def _lstm(x: torch.Tensor, h: torch.Tensor, state: list[torch.Tensor]) -> list[torch.Tensor]:
    i, f, g, o = (x + h).chunk(4, -1)
    cell = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return [o.sigmoid() * cell.tanh(), cell]


def _gru(x: torch.Tensor, h: torch.Tensor, state: list[torch.Tensor]) -> list[torch.Tensor]:
    (xr, xz, xn), (hr, hz, hn) = x.chunk(3, -1), h.chunk(3, -1)
    z, n = (xz + hz).sigmoid(), (xn + (xr + hr).sigmoid() * hn).tanh()
    return [(1 - z) * n + z * state[0]]


TORCH_FUNCTIONS: dict[str, OpFunction] = {
    "adaptive_avg_pool": _adaptive("adaptive_avg_pool"),
    "adaptive_max_pool": _adaptive("adaptive_max_pool", 0),
    "adaptive_max_pool_index": _adaptive("adaptive_max_pool", 1),
    "all": _reduce(torch.all),
    "amax": _reduce(torch.amax),
    "amin": _reduce(torch.amin),
    "any": _reduce(torch.any),
    "arange": _arange,
    "argmax": _arg_reduction(torch.argmax),
    "argmin": _arg_reduction(torch.argmin),
    "argsort": _argsort,
    "as_strided": lambda c: torch.as_strided(c.ins[0].contiguous(), c.dims, c.attrs["strides"], c.attrs["offset"]),
    "atan2": _with_tensor(torch.atan2),
    "avg_pool": _avg_pool,
    "batch_norm": _batch_norm,
    "cached_attention": _cached_attention,
    "cast": lambda c: c.ins[0].to(c.dtype),
    "cat": lambda c: torch.cat(c.ins, c.attrs["dim"]),
    "cdist": _cdist,
    "conv": _conv,
    "diagonal": lambda c: torch.diagonal(c.ins[0], c.attrs["offset"], *c.attrs["dims"]),
    "div_floor": _divide("floor"),
    "div_trunc": _divide("trunc"),
    "embedding": lambda c: F.embedding(c.ins[1], c.ins[0]).to(c.dtype),
    "embedding_bag": _embedding_bag,
    "expand": lambda c: c.ins[0].expand(c.dims),
    "flatnonzero": lambda c: torch.nonzero_static(c.ins[0].flatten(), size=c.dims[0])[:, 0],
    "fold": _fold,
    "full": lambda c: torch.full(c.dims, c.attrs["value"], dtype=c.dtype),
    "gather": lambda c: torch.gather(c.ins[0], c.attrs["dim"], c.ins[1].long()),
    "grid_sample": lambda c: F.grid_sample(*c.ins, **c.attrs),
    "group_norm": lambda c: F.group_norm(c.ins[0], c.attrs["groups"], c.operand(1), c.operand(2), c.attrs["eps"]),
    "gru_scan": _scan(_gru),
    "index": lambda c: torch.ops.aten.index(c.ins[0], _indices(c, 1)),
    "index_add": _index_put(accumulate=True),
    "index_put": _index_put(accumulate=False),
    "index_select": lambda c: torch.index_select(c.ins[0], c.attrs["dim"], c.ins[1]),
    "layer_norm": _norm(F.layer_norm),
    "linear": _linear,
    "lstm_scan": _scan(_lstm),
    "max_pool": _max_pool(indices=False),
    "max_pool_index": _max_pool(indices=True),
    "maximum": _with_tensor(torch.maximum),
    "mean": _reduce(torch.mean, typed=True),
    "minimum": _with_tensor(torch.minimum),
    "nearest": _nearest,
    "pad": _pad,
    "prod": _prod,
    "resample": _resample,
    "reshape": lambda c: c.ins[0].reshape(c.dims),
    "rms_norm": _norm(F.rms_norm),
    "rnn_relu_scan": _scan(lambda x, h, state: [(x + h).relu()]),
    "rnn_tanh_scan": _scan(lambda x, h, state: [(x + h).tanh()]),
    "rope": lambda c: c.ins[0] * c.ins[1] + rotate_half(c.ins[0]) * c.ins[2],
    "scatter": lambda c: torch.scatter(c.ins[0], c.attrs["dim"], c.ins[1].long(), c.ins[2]),
    "scatter_reduce": _scatter_reduce,
    "sdpa": sdpa,
    "slice": _slice,
    "slice_scatter": _slice_scatter,
    "sum": _reduce(torch.sum, typed=True),
    "swiglu": lambda c: F.silu(c.ins[0]) * c.ins[1],
    "unfold": _unfold,
    "var": _reduce(torch.var),
}


def torch_function(op: str) -> OpFunction | None:
    """The torch function of an op; None if neither the table nor torch has one."""
    if op in TORCH_FUNCTIONS:
        return TORCH_FUNCTIONS[op]
    f = (getattr(torch, op, None) or getattr(F, op, None)) if hasattr(torch.ops.aten, op) else None
    return (lambda c: _by_name(f, c)) if callable(f) else None


def _by_name(f: Function, c: ConcreteNode) -> torch.Tensor:
    attrs = dict(c.attrs)
    other = [attrs.pop("other")] if "other" in attrs else []
    return f(*c.ins, *other, **attrs)


# ---------------------------------------------------------------- running
def apply(node: Node, outs: Sequence[Value], ins: Sequence[Operand], symbols: Mapping[str, int]) -> list[torch.Tensor]:
    """The results of one node, checked against the dims and dtypes of its values."""
    function = torch_function(node.op)
    if function is None or node.regions:
        fail("reference", f"op {node.op!r}", "has no torch function", "Add one to TORCH_FUNCTIONS")
    expected = [([d.eval(symbols) for d in v.dims], DTYPE_OF[v.dtype]) for v in outs]
    attrs = {k: _concrete(v, symbols) for k, v in node.attrs.items()}
    with torch.no_grad():
        made = function(ConcreteNode(list(ins), attrs, *expected[0]))
    made = list(made) if isinstance(made, (tuple, list)) else [made]
    for v, t, (dims, dtype) in zip(outs, made, expected, strict=True):
        if list(t.shape) != dims or t.dtype != dtype:
            have = f"{DTYPES.get(t.dtype, t.dtype)}{list(t.shape)}"
            fail("reference", f"{node.op} {v.name!r}", f"result is {have}, declared as {v.dtype}{dims}")
    return made


def _concrete(v: Attr, symbols: Mapping[str, int]) -> Number:
    if isinstance(v, tuple):
        return [d.eval(symbols) for d in v]
    return v.eval(symbols) if isinstance(v, Dim) else v


def bind(program: Program, inputs: Sequence[torch.Tensor | int]) -> dict[str, int]:
    """The symbols' values, read from the inputs by the contract."""
    out = program.contract.bind(inputs)
    for spec, x in zip(program.contract.inputs, inputs, strict=True):
        have = list(x.shape) if isinstance(x, torch.Tensor) else [int(x)]
        if have != [d.eval(out) for d in spec.dims]:
            fail("reference", f"input {spec.name!r}", f"is {have}, expected {spec}")
    return out


def _weight(v: Value, data: torch.Tensor) -> torch.Tensor:
    """A weight, dequantised if it is stored in blocks; a state is returned as is."""
    if v.dtype not in BLOCKS or v.kind == "state":
        return data
    return dequantise(Quantised(v.dtype, tuple(d.eval({}) for d in v.dims), data))


def run(
    program: Program, weights: Mapping[str, torch.Tensor], inputs: Sequence[torch.Tensor | int]
) -> list[torch.Tensor | int]:
    """The program's outputs; tensors and integers as in the contract."""
    symbols = bind(program, inputs)
    values: dict[int, Operand] = {NONE: None, **dict(enumerate(inputs))}
    for i, v in enumerate(program.values, len(inputs)):
        if v.kind != "temp" and v.key not in weights:
            fail("reference", f"{v.kind} {v.name!r}", f"there is no weight {v.key!r}")
        if v.kind != "temp":
            values[i] = _weight(v, weights[v.key])

    def compute(nodes: Iterable[Node]) -> None:
        for n in nodes:
            if n.op == "cond":
                taken = n.regions[0 if n.attrs["when"].eval(symbols) >= 0 else 1]
                compute(taken.nodes)
                made = [values[i] for i in taken.results]
            else:
                made = apply(n, [program.value(i) for i in n.outs], [values[i] for i in n.ins], symbols)
            values.update(zip(n.outs, made, strict=True))

    compute(program.nodes)
    specs = zip(program.results, program.contract.outputs, strict=True)
    return [spec.dims[0].eval(symbols) if r == NONE else values[r] for r, spec in specs]
