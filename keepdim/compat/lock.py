"""One lowering at a time: it changes tables of torch and of ExecuTorch while it lasts."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from threading import RLock
from typing import ParamSpec, TypeVar

from ..errors import fail

P = ParamSpec("P")
R = TypeVar("R")
_turn = RLock()
_imports = RLock()  # of what is imported when it is first asked for
_half_done = False  # another thread was lowering when this process was forked


def in_turn(lowers: Callable[P, R]) -> Callable[P, R]:
    """Another thread that calls such a function waits until this one is done."""

    @functools.wraps(lowers)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        _refuse_half_done()
        with _turn:
            return lowers(*args, **kwargs)

    return run


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """While it lasts, modules are imported: Python's own locks of imports do not survive a fork."""
    _refuse_half_done()
    with _imports:
        yield


def _refuse_half_done() -> None:
    if _half_done:
        fail("fork", "lowering", "another thread was lowering when this process was forked, and torch is in the "
             "middle of it", "Start processes with spawn, or lower before you fork")  # fmt: skip


def _look_after_fork() -> None:
    """A thread that holds a lock is not in this process: nobody will give it back."""
    global _half_done
    for lock in (_turn, _imports):
        if lock.acquire(blocking=False):
            lock.release()
        else:
            _half_done = True


os.register_at_fork(after_in_child=_look_after_fork)
