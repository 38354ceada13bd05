"""One lowering at a time: it changes tables of torch and of ExecuTorch while it lasts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from threading import RLock
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
_turn = RLock()


def in_turn(lowers: Callable[P, R]) -> Callable[P, R]:
    """Another thread that calls such a function waits until this one is done."""

    @functools.wraps(lowers)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with _turn:
            return lowers(*args, **kwargs)

    return run
