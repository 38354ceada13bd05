"""Recurrent layers: a scan over the first dim; the input projection of the gates is given."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from .table import Array, JaxCall, iota, rule

sigmoid = jax.nn.sigmoid
ScanStep = Callable[[Array, Array, list[Array]], list[Array]]


def scan(step: ScanStep) -> Callable[[JaxCall], Array]:
    """A scan, from the end if `reverse`; steps in the padding leave the state unchanged."""

    def call(c: JaxCall) -> Array:
        gates, w, bias = c.wide(c.ins[0]), c.wide(c.ins[1]), c.operand(2)
        steps = c.size(0, 0)

        def one(state: list[Array], given: tuple[Array, Array]) -> tuple[list[Array], list[Array]]:
            t, x = given
            h = state[0] @ w.T + (0 if bias is None else c.wide(bias))
            new = [jnp.where(t < steps, a, b) for a, b in zip(step(x, h, state), state, strict=True)]
            return new, new

        first = [c.wide(s) for s in c.ins[3:] if s is not None]
        steps_index = iota([gates.shape[0]], 0)
        made = lax.scan(one, first, (steps_index, gates), reverse=bool(c.attr("reverse", False)))[1]
        return (jnp.stack(made) if len(made) > 1 else made[0]).astype(c.dtype)

    return call


def _lstm(x: Array, h: Array, state: list[Array]) -> list[Array]:
    i, f, g, o = jnp.split(x + h, 4, -1)
    cell = sigmoid(f) * state[1] + sigmoid(i) * jnp.tanh(g)
    return [sigmoid(o) * jnp.tanh(cell), cell]


def _gru(x: Array, h: Array, state: list[Array]) -> list[Array]:
    (xr, xz, xn), (hr, hz, hn) = jnp.split(x, 3, -1), jnp.split(h, 3, -1)
    z, n = sigmoid(xz + hz), jnp.tanh(xn + sigmoid(xr + hr) * hn)
    return [(1 - z) * n + z * state[0]]


rule("lstm_scan")(scan(_lstm))
rule("gru_scan")(scan(_gru))
rule("rnn_tanh_scan")(scan(lambda x, h, state: [jnp.tanh(x + h)]))
rule("rnn_relu_scan")(scan(lambda x, h, state: [jax.nn.relu(x + h)]))
