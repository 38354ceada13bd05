"""Rewrites of Programs, each a named function Program → Program that keeps the contract and the numbers.

Owns the order of the passes and how many nodes each leaves, which `run` writes into the Program. Fusing is by what
the engine offers: a node that it does not take is not made. Takes and gives Programs. Never reads an FX graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace

from ..ir.program import Pass, Program
from .attention import fuse_sdpa, fuse_turns
from .clean import fold_scalars, merge_common, prune_branches, remove_casts, remove_noops, unflatten
from .fold import fold_constants
from .fuse import fuse_layer_norm, fuse_linear, fuse_rms_norm, fuse_rope, fuse_swiglu
from .graph import Takes, anything, drop_dead, renumber
from .merge import Stays, merge_linears, nothing
from .padding import skip_padding

__all__ = ["PASSES", "Lowered", "Stays", "drop_dead", "fold_constants", "merge_linears", "nothing", "renumber", "run"]


class Lowered(NamedTuple):
    """A Program and the tensors its const values name."""

    program: Program
    weights: dict[str, torch.Tensor]


Rewrite = Callable[[Program, Takes], Program]
PASSES: tuple[Rewrite, ...] = (
    prune_branches,
    fold_scalars,
    remove_casts,
    remove_noops,
    merge_common,
    unflatten,
    fuse_sdpa,
    fuse_layer_norm,
    fuse_rms_norm,  # behind it: of x - mean(x) it is the rest of a layer norm
    fuse_swiglu,
    fuse_rope,
    fuse_turns,
    fuse_linear,
    remove_noops,  # of the permutes that fusing adds
)


def run(
    program: Program, weights: Mapping[str, torch.Tensor], takes: Takes = anything, stays: Stays = nothing
) -> Lowered:
    """Constants folded, all passes in order, linear layers merged, padding skipped; the Program says what each did."""
    out = dict(weights)

    def with_weights(f: Callable[..., Any], *more: Any) -> Rewrite:
        def run(p: Program, _: Takes) -> Program:
            nonlocal out
            p, out = f(p, out, *more)
            return p

        run.__name__ = f.__name__
        return run

    p, done = program, list[Pass]()
    last = with_weights(merge_linears, stays), with_weights(skip_padding, takes)
    for f in (drop_dead, with_weights(fold_constants), *PASSES, *last):
        before = _count(p)
        p = f(p, takes)
        done.append(Pass(f.__name__, before, _count(p)))
    used = {v.key for v in p.values}
    return Lowered(replace(p, passes=tuple(done)), {k: w for k, w in out.items() if k in used})


def _count(p: Program) -> int:
    return sum(1 for _ in p.walk())
