"""Runtime options, for all modules of the process."""

from __future__ import annotations

from .errors import KeepdimError, fail
from .native import _native


def options() -> dict[str, int]:
    """The current options: threads, memory_limit and plan_limit.

    >>> import keepdim
    >>> sorted(keepdim.options())
    ['memory_limit', 'plan_limit', 'threads']
    """
    return _native.options()


def set_options(*, threads: int | None = None, memory_limit: int | None = None, plan_limit: int | None = None) -> None:
    """Set options for all modules of the process, effective from the next call.

    `threads`: number of compute threads; 0: as many as the process may run on. `memory_limit`: maximum bytes of one
    plan; 0: three quarters of the machine's memory. `plan_limit`: bytes of built plans that a delegate keeps.

    >>> import keepdim
    >>> before = keepdim.options()["threads"]
    >>> keepdim.set_options(threads=1)
    >>> keepdim.options()["threads"]
    1
    >>> keepdim.set_options(threads=before)
    """
    given = {"threads": threads, "memory_limit": memory_limit, "plan_limit": plan_limit}
    for name, value in given.items():
        bits = 32 if name == "threads" else 64
        fits = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2 ** (bits - 1)
        if value is not None and not fits:
            fail("options", name, f"{value!r:.80} is not an integer of {bits} bits", "Give an integer")
    try:
        _native.set_options(threads=threads, memory_limit=memory_limit, plan_limit=plan_limit)
    except _native.Error as e:
        raise KeepdimError(str(e)) from None


__all__ = ["options", "set_options"]
