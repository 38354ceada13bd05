"""Matrix products, linear layers and attention."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from .elementwise import gelu, turn
from .table import Array, Call, iota, number, row

ACTIVATIONS = {
    "relu": jax.nn.relu,
    "gelu": gelu,
    "gelu_tanh": lambda x: gelu(x, tanh=True),
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
}


@row("matmul")
def _matmul(c: Call) -> Array:
    return jnp.matmul(c.wide(c.fill(0, [-1], 0)), c.wide(c.fill(1, [-2], 0))).astype(c.dtype)


@row("linear")
def _linear(c: Call) -> Array:
    x, w = c.wide(c.fill(0, [-1], 0)), c.fill(1, [-1], 0).astype(c.dtype)
    y = lax.dot_general(x, c.wide(w), (((x.ndim - 1,), (1,)), ((), ())))
    if (bias := c.operand(2)) is not None:
        y = y + c.wide(bias)
    return (ACTIVATIONS[c.attr("activation")](y) if c.has("activation") else y).astype(c.dtype)


def _heads(x: Array, count: int) -> Array:
    """Each head as often as it takes to have `count`."""
    if x.ndim < 3 or count == 1 or x.shape[-3] in (1, count):
        return x
    return jnp.repeat(x, count // x.shape[-3], axis=-3)


def attend(q: Array, k: Array, v: Array, scale: Array, seen: Array | None, bias: Array | None, safe: bool) -> Array:
    """softmax(scale * q @ k.T + bias) @ v over what is seen; a query that sees nothing gets 0, or NaN if not safe."""
    k, v = (_heads(x, q.shape[-3]) if q.ndim > 2 else x for x in (k, v))
    scores = jnp.matmul(q, jnp.swapaxes(k, -1, -2)) * scale
    scores = scores if bias is None else scores + bias
    scores = scores if seen is None else jnp.where(seen, scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf)
    weights = jnp.exp(scores - jnp.where(jnp.isneginf(top), 0, top) if safe else scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights / (jnp.where(jnp.isneginf(top), 1, total) if safe else total)
    return jnp.matmul(weights, v)


@row("sdpa")
def _sdpa(c: Call) -> Array:
    q, k = c.wide(c.fill(0, [-1], 0)), c.wide(c.fill(1, [-1], 0))
    v, mask = c.wide(c.fill(2, [-2], 0)), c.operand(3)
    width = c.size(0, -1)
    default = 1 / jnp.sqrt(number(jnp.maximum(width, 1), q.dtype))
    scale = number(c.attr("scale"), q.dtype) if c.has("scale") else default
    scores = (q.shape[-2], k.shape[-2])
    seen = None if c.sizes.exact(c.given[1][-2]) else iota(scores, 1) < c.size(1, -2)
    if c.attr("causal"):
        lower = iota(scores, 1) <= iota(scores, 0)
        seen = lower if seen is None else seen & lower
    bias = None
    if mask is not None and mask.dtype == jnp.bool_:
        hidden = c.attr("safe", True)  # a bool mask adds -inf, or puts it where it is written by hand
        bias = jnp.where(mask, 0, -jnp.inf).astype(q.dtype) if hidden else None
        seen = seen if hidden else mask if seen is None else seen & mask
    elif mask is not None:
        bias = c.wide(mask)
    y = attend(q, k, v, scale, seen, bias, c.attr("safe", True)).astype(c.dtype)
    return y if c.sizes.exact(c.given[1][-2]) else jnp.where(c.size(1, -2) == 0, 0, y)  # a sum over no keys


@row("cached_attention")
def _cached_attention(c: Call) -> tuple[Array, Array, Array]:
    """The result, and both caches as they are after it: new rows from the position on."""
    q, k, v, position, keys, values, *rope = c.ins
    q, k = (turn(x, *rope) for x in (q, k)) if rope else (q, k)
    before, new, context = position.reshape(()), c.size(1, -2), keys.shape[-2]
    place = iota([context], 0) - before
    fresh = ((place >= 0) & (place < new))[:, None]

    def written(cache: Array, x: Array) -> Array:
        return jnp.where(fresh, jnp.take(x, place, axis=-2, mode="clip").astype(cache.dtype), cache)

    keys, values = written(keys, k), written(values, v)
    scores = (q.shape[-2], context)
    own = iota(scores, 0) + before
    seen = iota(scores, 1) <= own
    if c.has("window"):
        seen = seen & (iota(scores, 1) > own - c.attr("window"))
    scale = number(c.attr("scale"), jnp.float32)
    y = attend(c.wide(q), c.wide(keys), c.wide(values), scale, seen, None, True)
    return y.astype(c.dtype), keys, values
