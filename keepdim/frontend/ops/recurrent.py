"""Recurrent layers: the input projection of the gates as one product, then one scan node per layer and direction."""

from __future__ import annotations

from collections.abc import Sequence

from ...ir.program import NONE, Shape
from ...shapes.dim import Dim, decide
from .table import Args, Lower, Outs, Sink, Unsupported, aten, op


def _select(b: Sink, value: int, index: Dim) -> int:
    dtype, dims = b.shape(value)
    return b.emit("select", [value], Shape(dtype, dims[1:]), dim=Dim.const(0), index=index)


def _swap_batch_and_steps(b: Sink, value: int) -> int:
    """Swap the first two dims: [batch, step, ..] ↔ [step, batch, ..]."""
    dtype, (p, q, n) = b.shape(value)
    return b.emit("permute", [value], Shape(dtype, (q, p, n)), dims=tuple(map(Dim.const, (1, 0, 2))))


def _concatenated(b: Sink, values: Sequence[int], axis: int) -> int:
    dtype, dims = b.shape(values[0])
    if len(values) == 1:
        return values[0]
    whole = (*dims[:axis], dims[axis] * len(values), *dims[axis + 1 :])
    return b.emit("cat", values, Shape(dtype, whole), dim=Dim.const(axis))


def _stacked(b: Sink, values: Sequence[int]) -> int:
    dtype, dims = b.shape(values[0])
    one = Shape(dtype, (Dim.const(1), *dims))
    return _concatenated(b, [b.emit("reshape", [v], one) for v in values], 0)


def _direction(b: Sink, name: str, x: int, weights: Sequence[int], first: Sequence[int], reverse: bool) -> list[int]:
    """The states of all steps, the last state and, for an LSTM, the last cell."""
    w_ih, w_hh, b_ih, b_hh = weights
    dtype, (steps, batch, _) = b.shape(x)
    gates, size = b.shape(w_hh).dims
    if gates.value is None or b.shape(first[0]).dims[-1] != size:
        raise Unsupported("a projection of the states is not handled")
    ins = [x, w_ih] if b_ih == NONE else [x, w_ih, b_ih]
    rows = b.emit("linear", ins, Shape(dtype, (steps, batch, gates)))
    dims = (steps, batch, size) if len(first) == 1 else (Dim.const(2), steps, batch, size)
    more = {"reverse": True} if reverse else {}
    made = b.emit(name, [rows, w_hh, b_hh, *first], Shape(dtype, dims), **more)
    parts = [made] if len(first) == 1 else [_select(b, made, Dim.const(i)) for i in range(2)]
    last = Dim.const(0) if reverse else steps - 1
    return [parts[0], *(_select(b, p, last) for p in parts)]


def _layers(states: int) -> Lower:
    def lower(b: Sink, name: str, a: Args, out: list[Shape]) -> Outs:
        if a.plain("train") and a.number("dropout"):
            raise Unsupported("dropout is in training mode")
        a.ignore("dropout")
        x, first = a.tensor("input"), a.tensors("hx") if states == 2 else [a.tensor("hx")]
        params, biases, layers = a.tensors("params"), bool(a.plain("has_biases")), a.static("num_layers")
        directions, batch_first = 2 if a.plain("bidirectional") else 1, bool(a.plain("batch_first"))
        each = 4 if biases else 2
        if len(params) != layers * directions * each:
            raise Unsupported("a projection of the states is not handled")
        x = _swap_batch_and_steps(b, x) if batch_first else x
        if not decide(b.shape(x).dims[0], "ge", 1):
            raise Unsupported(f"a sequence of {b.shape(x).dims[0]} steps may be empty")
        lasts: list[list[int]] = [[] for _ in first]
        for layer in range(layers):
            made = []
            for direction in range(directions):
                i = layer * directions + direction
                layer_weights = [*params[i * each : (i + 1) * each], NONE, NONE][:4]
                start = [_select(b, h, Dim.const(i)) for h in first]
                states_of, *ends = _direction(b, name, x, layer_weights, start, reverse=direction == 1)
                made.append(states_of)
                for kept, end in zip(lasts, ends, strict=True):
                    kept.append(end)
            x = _concatenated(b, made, 2)
        return [_swap_batch_and_steps(b, x) if batch_first else x, *(_stacked(b, kept) for kept in lasts)]

    return lower


op("lstm_scan", aten.lstm.input, lower=_layers(2))
op("gru_scan", aten.gru.input, lower=_layers(1))
op("rnn_tanh_scan", aten.rnn_tanh.input, lower=_layers(1))
op("rnn_relu_scan", aten.rnn_relu.input, lower=_layers(1))
