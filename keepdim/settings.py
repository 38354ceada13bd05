"""Settings of the runtime, for all modules of the process."""

from __future__ import annotations

from . import _native
from .errors import KeepdimError, fail


def options() -> dict[str, int]:
    """The settings as they are: threads, memory_limit and plan_limit."""
    return _native.options()


def set_options(*, threads: int | None = None, memory_limit: int | None = None, plan_limit: int | None = None) -> None:
    """Change those that are given: threads that compute, bytes that all plans may take, plans that a delegate keeps."""
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
