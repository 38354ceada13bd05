"""Matrix products, linear layers and attention."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from .elementwise import apply_rope, gelu
from .table import Array, JaxCall, iota, number, rule

ACTIVATIONS = {
    "relu": jax.nn.relu,
    "gelu": gelu,
    "gelu_tanh": lambda x: gelu(x, tanh=True),
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
}


@rule("matmul")
def _matmul(c: JaxCall) -> Array:
    return jnp.matmul(c.wide(c.fill(0, [-1], 0)), c.wide(c.fill(1, [-2], 0))).astype(c.dtype)


@rule("linear")
def _linear(c: JaxCall) -> Array:
    x, w = c.wide(c.fill(0, [-1], 0)), c.fill(1, [-1], 0).astype(c.dtype)
    y = lax.dot_general(x, c.wide(w), (((x.ndim - 1,), (1,)), ((), ())))
    if (bias := c.operand(2)) is not None:
        y = y + c.wide(bias)
    return (ACTIVATIONS[c.attr("activation")](y) if c.has("activation") else y).astype(c.dtype)


def _heads(x: Array, count: int) -> Array:
    """Repeat each head so that there are `count` heads."""
    if x.ndim < 3 or count == 1 or x.shape[-3] in (1, count):
        return x
    return jnp.repeat(x, count // x.shape[-3], axis=-3)


def attend(q: Array, k: Array, v: Array, scale: Array, visible: Array | None, bias: Array | None, safe: bool) -> Array:
    """softmax(scale * q @ k.T + bias) @ v over visible keys; a query without any gets 0, or NaN if not safe."""
    k, v = (_heads(x, q.shape[-3]) if q.ndim > 2 else x for x in (k, v))
    scores = jnp.matmul(q, jnp.swapaxes(k, -1, -2)) * scale
    scores = scores if bias is None else scores + bias
    scores = scores if visible is None else jnp.where(visible, scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf)
    weights = jnp.exp(scores - jnp.where(jnp.isneginf(top), 0, top) if safe else scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights / (jnp.where(jnp.isneginf(top), 1, total) if safe else total)
    return jnp.matmul(weights, v)


@rule("sdpa")
def _sdpa(c: JaxCall) -> Array:
    q, k = c.wide(c.fill(0, [-1], 0)), c.wide(c.fill(1, [-1], 0))
    v, mask = c.wide(c.fill(2, [-2], 0)), c.operand(3)
    width = c.size(0, -1)
    default = 1 / jnp.sqrt(number(jnp.maximum(width, 1), q.dtype))
    scale = number(c.attr("scale"), q.dtype) if c.has("scale") else default
    scores = (q.shape[-2], k.shape[-2])
    visible = None if c.sizes.exact(c.given[1][-2]) else iota(scores, 1) < c.size(1, -2)
    if c.attr("causal"):
        lower = iota(scores, 1) <= iota(scores, 0)
        visible = lower if visible is None else visible & lower
    bias = None
    if mask is not None and mask.dtype == jnp.bool_:
        hidden = c.attr("safe", True)  # safe: the mask adds -inf; else it replaces scores by -inf
        bias = jnp.where(mask, 0, -jnp.inf).astype(q.dtype) if hidden else None
        visible = visible if hidden else mask if visible is None else visible & mask
    elif mask is not None:
        bias = c.wide(mask)
    y = attend(q, k, v, scale, visible, bias, c.attr("safe", True)).astype(c.dtype)
    return y if c.sizes.exact(c.given[1][-2]) else jnp.where(c.size(1, -2) == 0, 0, y)  # no keys: the result is 0


@rule("cached_attention")
def _cached_attention(c: JaxCall) -> tuple[Array, Array, Array]:
    """The result and both updated caches, with the new rows at the position."""
    q, k, v, position, keys, values, *rope = c.ins
    q, k = (apply_rope(x, *rope) for x in (q, k)) if rope else (q, k)
    before, new, context = position.reshape(()), c.size(1, -2), keys.shape[-2]
    position_in_new = iota([context], 0) - before
    fresh = ((position_in_new >= 0) & (position_in_new < new))[:, None]

    def written(cache: Array, x: Array) -> Array:
        return jnp.where(fresh, jnp.take(x, position_in_new, axis=-2, mode="clip").astype(cache.dtype), cache)

    keys, values = written(keys, k), written(values, v)
    scores = (q.shape[-2], context)
    row_position = iota(scores, 0) + before
    visible = iota(scores, 1) <= row_position
    if c.has("window"):
        visible = visible & (iota(scores, 1) > row_position - c.attr("window"))
    scale = number(c.attr("scale"), jnp.float32)
    y = attend(c.wide(q), c.wide(keys), c.wide(values), scale, visible, None, True)
    return y.astype(c.dtype), keys, values
