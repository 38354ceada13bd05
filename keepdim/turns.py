"""One lowering at a time: it changes tables of torch and of ExecuTorch while it lasts."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from threading import RLock
from typing import ParamSpec, TypeVar

from .errors import fail

P = ParamSpec("P")
R = TypeVar("R")
_turn = RLock()
_half_done = False  # another thread was lowering when this process was forked


def in_turn(lowers: Callable[P, R]) -> Callable[P, R]:
    """Another thread that calls such a function waits until this one is done."""

    @functools.wraps(lowers)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if _half_done:
            fail("fork", "lowering", "another thread was lowering when this process was forked, and torch is in the "
                 "middle of it", "Start processes with spawn, or lower before you fork")  # fmt: skip
        with _turn:
            return lowers(*args, **kwargs)

    return run


def _look_after_fork() -> None:
    """The thread that holds the lock is not in this process: nobody will give it back."""
    global _half_done
    if _turn.acquire(blocking=False):
        _turn.release()
    else:
        _half_done = True


os.register_at_fork(after_in_child=_look_after_fork)
