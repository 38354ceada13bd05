"""keepdim's custom torch ops, for exported graphs. Their torch implementation is their reference.

An op that mutates a buffer of the model makes that buffer the delegate's state: it is initialised to zeros, persists
between calls, and is never copied.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .quant import BYTES, Quantised, dequantise, quantise, state_shape

LIBRARY = torch.library.Library("keepdim", "DEF")
LIBRARY.define(
    "cached_attention(Tensor query, Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
    "Tensor position, float scale, int window=0) -> Tensor"
)


def cached_attention(
    query: torch.Tensor,  # [batch, heads, new, width]
    key: torch.Tensor,  # [batch, kv heads, new, width]
    value: torch.Tensor,
    key_cache: torch.Tensor,  # [batch, kv heads, context, width], as `quant.new_state` makes it
    value_cache: torch.Tensor,
    position: torch.Tensor,  # i64 [1]: number of filled rows of the caches
    scale: float,
    window: int = 0,  # number of rows a query attends to, including its own; 0: all
) -> torch.Tensor:
    """Append the new keys and values to the caches; each query attends to the rows up to its own (causal).

    >>> import torch, keepdim.ir.torch_ops as ops
    >>> cache = torch.zeros(2, 1, 1, 8, 4)
    >>> x = torch.randn(1, 1, 3, 4)
    >>> y = ops.cached_attention(x, x, x, *cache, torch.tensor([0]), 0.5)
    >>> torch.allclose(y[:, :, 0], x[:, :, 0]), int(cache.count_nonzero())
    (True, 24)
    """
    op = torch.ops.keepdim.cached_attention.default
    return op(query, key, value, key_cache, value_cache, position, scale, window)


@torch.library.impl(LIBRARY, "cached_attention", "CPU")
def _cached_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor,
    position: torch.Tensor, scale: float, window: int = 0,
) -> torch.Tensor:  # fmt: skip
    before, new = int(position), query.shape[2]
    filled = before + new
    if before < 0 or filled > key_cache.shape[2]:
        raise IndexError(f"rows {before}..{filled} do not fit a cache of {key_cache.shape[2]}")
    for cache, x in ((key_cache, key), (value_cache, value)):
        cache[:, :, before:filled] = _stored(x, cache)
    seen = torch.ones(new, filled, dtype=torch.bool).tril(before)
    if window:
        seen = seen.triu(before + 1 - window)
    return F.scaled_dot_product_attention(
        query,
        _read(key_cache[:, :, :filled]).to(query.dtype),
        _read(value_cache[:, :, :filled]).to(query.dtype),
        attn_mask=seen,
        scale=scale,
        enable_gqa=True,
    )


def _stored(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """Rows as they are stored in a cache."""
    dtype, _ = state_shape(cache)
    return quantise(x, dtype).raw.reshape(*x.shape[:-1], -1) if dtype == BYTES else x


def _read(cache: torch.Tensor) -> torch.Tensor:
    dtype, dims = state_shape(cache)
    return dequantise(Quantised(dtype, dims, cache.reshape(-1, cache.shape[-1]))) if dtype == BYTES else cache


@torch.library.register_fake("keepdim::cached_attention", lib=LIBRARY)
def _shape_of_cached_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor,
    position: torch.Tensor, scale: float, window: int = 0,
) -> torch.Tensor:  # fmt: skip
    return query.new_empty(*query.shape[:3], value.shape[3])


LIBRARY.define("stand_in(Tensor[] inputs, SymInt[] size, ScalarType dtype) -> Tensor")


@torch.library.register_fake("keepdim::stand_in", lib=LIBRARY)
def _shape_of_stand_in(inputs: list[torch.Tensor], size: list[int], dtype: torch.dtype) -> torch.Tensor:
    return inputs[0].new_empty(size, dtype=dtype)
