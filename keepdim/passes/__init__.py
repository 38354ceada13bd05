"""Rewrites of Programs, each a named function Program → Program that keeps the contract and the numbers.

Owns the order of the passes; `run` records in the Program how many nodes each leaves. Fusion depends on the engine:
a node that it does not support is not created. Takes and returns Programs. Never reads an FX graph.

The files of the passes:

    clean.py      prune_branches, fold_scalars, remove_casts, remove_noops, merge_common, unflatten
    fold.py       fold_constants
    conv.py       fold_batch_norm, fuse_conv
    attention.py  fuse_sdpa, fuse_rope_into_attention
    fuse.py       fuse_layer_norm, fuse_rms_norm, fuse_swiglu, fuse_rope, fuse_linear
    merge.py      merge_linears
    padding.py    skip_padding, with the bounds of value_bounds.py
    precision.py  round_products
    integer_weights.py  store_integer_weights
    graph.py      drop_dead, renumber, and the tools of all passes
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace

from ..ir.program import Pass, Program
from .attention import fuse_rope_into_attention, fuse_sdpa
from .clean import fold_scalars, merge_common, prune_branches, remove_casts, remove_noops, unflatten
from .conv import fold_batch_norm, fuse_conv
from .fold import fold_constants
from .fuse import fuse_layer_norm, fuse_linear, fuse_rms_norm, fuse_rope, fuse_swiglu
from .graph import Supports, drop_dead, renumber, supports_all
from .integer_weights import store_integer_weights
from .merge import IsMapped, merge_linears, none_mapped
from .padding import skip_padding
from .precision import round_products

__all__ = [
    "PASSES",
    "IsMapped",
    "Lowered",
    "drop_dead",
    "fold_constants",
    "merge_linears",
    "none_mapped",
    "renumber",
    "run",
]


class Lowered(NamedTuple):
    """A Program and the weights of its const values, by key."""

    program: Program
    weights: dict[str, torch.Tensor]


Rewrite = Callable[[Program, Supports], Program]
PASSES: tuple[Rewrite, ...] = (
    prune_branches,
    fold_scalars,
    remove_casts,
    remove_noops,
    merge_common,
    unflatten,
    fuse_sdpa,
    fuse_layer_norm,
    fuse_rms_norm,  # after fuse_layer_norm, whose x - mean(x) would leave an rms norm
    fuse_swiglu,
    fuse_rope,
    fuse_rope_into_attention,
    fuse_linear,
    fuse_conv,
    remove_noops,  # permutes added by fusion
)


def run(
    program: Program,
    weights: Mapping[str, torch.Tensor],
    supports: Supports = supports_all,
    is_mapped: IsMapped = none_mapped,
    precision: str = "f32",
) -> Lowered:
    """Fold constants, run all passes in order, merge linear layers, skip padding, round products if `precision` says
    so; the Program records each pass."""
    out = dict(weights)

    def with_weights(f: Callable[..., Any], *more: object) -> Rewrite:
        def run(p: Program, _: Supports) -> Program:
            nonlocal out
            p, out = f(p, out, *more)
            return p

        run.__name__ = f.__name__
        return run

    p, done = program, list[Pass]()
    last = [with_weights(merge_linears, is_mapped), with_weights(skip_padding, supports)]
    if precision != "f32":
        last.append(with_weights(round_products, precision))
    first = [
        with_weights(fold_constants),
        *(with_weights(f, supports) for f in (fold_batch_norm, store_integer_weights)),
    ]
    for f in (drop_dead, *first, *PASSES, *last):
        before = _count(p)
        p = f(p, supports)
        done.append(Pass(f.__name__, before, _count(p)))
    used = {v.key for v in p.values}
    return Lowered(replace(p, passes=tuple(done)), {k: w for k, w in out.items() if k in used})


def _count(p: Program) -> int:
    return sum(1 for _ in p.walk())
