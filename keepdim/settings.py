"""Runtime options, for all modules of the process, and the names that a lowering is given: no heavy imports."""

from __future__ import annotations

from .errors import KeepdimError, fail
from .native import _native

ENGINES = ("ggml", "mlx")
PRECISIONS = ("f32", "bf16")  # of the products of linear layers


def check_engine(name: object) -> None:
    """Refuse what is not the name of an engine.

    >>> check_engine("ggml")
    >>> check_engine("abacus")
    Traceback (most recent call last):
    keepdim.errors.KeepdimError: [lower] engine 'abacus': is not known (known: ggml, mlx).
    """
    if name not in ENGINES:
        fail("lower", f"engine {name!r:.80}", f"is not known (known: {', '.join(ENGINES)})")


def check_precision(precision: object) -> None:
    """Refuse what is not one of PRECISIONS.

    >>> check_precision("bf16")
    >>> check_precision("fp8")
    Traceback (most recent call last):
    keepdim.errors.KeepdimError: [lower] precision 'fp8': is not known (known: f32, bf16).
    """
    if precision not in PRECISIONS:
        fail("lower", f"precision {precision!r:.80}", f"is not known (known: {', '.join(PRECISIONS)})")


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


__all__ = ["ENGINES", "PRECISIONS", "check_engine", "check_precision", "options", "set_options"]
