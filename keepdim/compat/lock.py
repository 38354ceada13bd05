"""The lock of lowering, which changes tables of torch and of ExecuTorch while it runs."""

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
_lowering = RLock()
_imports = RLock()  # of what is imported when it is first asked for
_half_done = False  # another thread was lowering when this process was forked


def one_at_a_time(lowers: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that lowers: another thread that calls one waits until this one is done."""

    @functools.wraps(lowers)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with lowering_lock():
            return lowers(*args, **kwargs)

    return run


@contextlib.contextmanager
def lowering_lock() -> Iterator[None]:
    """In this block no other thread lowers or patches another library; this thread may enter it again."""
    _refuse_half_done()
    with _lowering:
        yield


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """In this block modules are imported: Python's own import locks do not survive a fork."""
    _refuse_half_done()
    with _imports:
        yield


def _refuse_half_done() -> None:
    if _half_done:
        fail("fork", "lowering", "another thread was lowering when this process was forked, and torch is in the "
             "middle of it", "Start processes with spawn, or lower before you fork")  # fmt: skip


def _look_after_fork() -> None:
    """Find locks held by threads that do not exist in this process: they are never released."""
    global _half_done
    for lock in (_lowering, _imports):
        if lock.acquire(blocking=False):
            lock.release()
        else:
            _half_done = True


os.register_at_fork(after_in_child=_look_after_fork)
