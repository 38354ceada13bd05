"""Who decides about sizes: decisions of torch's ShapeEnv, ranges of programs, passes and hooks, as they happen.

An audit reports which code decided what. Nothing here changes what is decided.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import sympy
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.passes.infra.pass_base import PassBase
from torch.utils._sympy.value_ranges import ValueRanges

from .patch import patch, swapped, wrapped

RANGES = "_range_constraints"


@patch(
    of="torch",
    version="2.13.0",
    reason="an audit names the code that decides about a size, when it decides",
    upstream="a ShapeEnv calls back when it replaces a symbol, narrows its range or adds a guard",
)
def shape_decisions(note: Callable[[str, object, object], None]) -> Iterator[None]:
    """`note(kind, subject, value)` is called for what a ShapeEnv decides in this thread."""

    def replaced(original: Callable[..., object]) -> Callable[..., None]:
        def _set_replacement(env: ShapeEnv, a: sympy.Symbol, tgt: sympy.Expr, msg: str) -> None:
            before = env.replacements.get(a)
            original(env, a, tgt, msg)
            if (after := env.replacements.get(a)) != before:
                note("replaced", a, after)

        return _set_replacement

    def narrowed(original: Callable[..., object]) -> Callable[..., None]:
        def _update_var_to_range(env: ShapeEnv, symbol: sympy.Symbol, *args: object, **kwargs: object) -> None:
            before = env.var_to_range.get(symbol)
            original(env, symbol, *args, **kwargs)
            after = env.var_to_range[symbol]
            if before is not None and after != before:
                note("range", symbol, after)

        return _update_var_to_range

    def guarded(original: Callable[..., object]) -> Callable[..., None]:
        def _log_guard(env: ShapeEnv, prefix: str, g: object, forcing_spec: bool) -> None:
            if "suppressed" not in prefix:
                note("guard", g, None)
            original(env, prefix, g, forcing_spec)

        return _log_guard

    with (
        wrapped(ShapeEnv, "_set_replacement", replaced),
        wrapped(ShapeEnv, "_update_var_to_range", narrowed),
        wrapped(ShapeEnv, "_log_guard", guarded),
    ):
        yield


@patch(
    of="torch",
    version="2.13.0",
    reason="an audit names the code that changes the ranges of a program, which are a plain attribute",
    upstream="ExportedProgram calls back when its ranges are set",
)
def range_assignments(seen: Callable[[Mapping[sympy.Symbol, ValueRanges]], None]) -> Iterator[None]:
    """`seen(ranges)` is called when a program gets ranges in this thread, in its constructor or later."""
    here = threading.get_ident()

    def assign(ep: ExportedProgram, ranges: Mapping[sympy.Symbol, ValueRanges]) -> None:
        ep.__dict__[RANGES] = ranges
        if threading.get_ident() == here:
            seen(ranges)

    with swapped(ExportedProgram, RANGES, property(lambda ep: ep.__dict__[RANGES], assign)):
        yield


@patch(
    of="torch",
    version="2.13.0",
    reason="an audit compares a graph before and after every pass, whoever runs it",
    upstream="PassBase has hooks for all passes of a process",
)
def around_passes(wrap: Callable[[Callable[..., Any]], Callable[..., object]]) -> Iterator[None]:
    """The call of every pass is `wrap(call)` in this thread."""
    with wrapped(PassBase, "__call__", wrap):
        yield


@patch(
    of="executorch",
    version="1.5.1",
    reason="an audit takes a snapshot of the program after every hook of a partitioner",
    upstream="to_edge_transform_and_lower calls back around hooks of partitioners",
)
def around_hook(
    partitioner: type, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., object]]
) -> Iterator[None]:
    """A hook of a partitioner's class is `wrap(hook)` in this thread."""
    with wrapped(partitioner, name, wrap):
        yield
