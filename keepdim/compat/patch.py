"""The table of what we change in other libraries, and the functions that change and restore it."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import threading
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, ParamSpec, TypeVar

from .lock import lowering_lock

P = ParamSpec("P")
T = TypeVar("T")
ABSENT: object = object()


class Entry(NamedTuple):
    """What keepdim does with the internals of a library.

    A `patch` changes the library while a block runs. A `write` sets a private attribute of one object that keepdim was
    given. A `lasting` change is not tied to a block: its docstring says when it ends, or why nothing is restored. A
    `native` one is made by our C++ code. A `use` reads or calls something private.
    """

    name: str
    kind: str  # patch | write | lasting | native | use
    of: str  # the library, by the name that it is installed under
    version: str  # that it was written for
    reason: str
    upstream: str  # what the library would have to change, so that this can be removed
    where: str  # the module of keepdim, or the file

    @property
    def installed(self) -> str:
        """The version of the library in this environment; empty where it is missing."""
        import importlib.metadata  # here, since `import keepdim` needs this module and not that one

        try:
            return importlib.metadata.version(self.of).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            return ""


TABLE: dict[str, Entry] = {}


def modules() -> list[str]:
    """The modules of this package, by their full names."""
    import pkgutil

    package = importlib.import_module(__name__.rpartition(".")[0])
    return [f"{package.__name__}.{module.name}" for module in pkgutil.iter_modules(package.__path__)]


def entries() -> list[Entry]:
    """The whole table: of every module of this package."""
    for name in modules():
        importlib.import_module(name)
    return sorted(TABLE.values(), key=lambda e: (e.kind, e.of, e.where, e.name))


def _declare(kind: str, name: str, where: str, of: str, version: str, reason: str, upstream: str) -> None:
    entry = Entry(name, kind, of, version, reason, upstream, where)
    assert TABLE.get(name, entry) == entry, f"{name} is declared twice"  # equal: a module that failed is imported again
    TABLE[name] = entry


def patch(
    *, of: str, version: str, reason: str, upstream: str
) -> Callable[[Callable[P, Iterator[T]]], Callable[P, AbstractContextManager[T]]]:
    """Declare a generator function as a patch: a context manager under the lock of all patches.

    >>> import math
    >>> @patch(of="torch", version="2.13.0", reason="an example", upstream="nothing")
    ... def rounded_pi():
    ...     with swapped(math, "pi", 3):
    ...         yield
    >>> with rounded_pi():
    ...     print(math.pi)
    3
    >>> round(math.pi, 2), TABLE.pop("rounded_pi").kind
    (3.14, 'patch')
    """

    def declare(body: Callable[P, Iterator[T]]) -> Callable[P, AbstractContextManager[T]]:
        make = contextlib.contextmanager(body)

        @functools.wraps(body)
        @contextlib.contextmanager
        def applied(*args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
            with lowering_lock(), make(*args, **kwargs) as given:
                yield given

        _declare("patch", body.__name__, body.__module__, of, version, reason, upstream)
        return applied

    return declare


def write(*, of: str, version: str, reason: str, upstream: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Declare a function that sets private attributes of an object."""
    return _function("write", of, version, reason, upstream)


def lasting(*, of: str, version: str, reason: str, upstream: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Declare a function whose change of a library is not tied to a block."""
    return _function("lasting", of, version, reason, upstream)


def _function(
    kind: str, of: str, version: str, reason: str, upstream: str
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    def declare(body: Callable[P, T]) -> Callable[P, T]:
        _declare(kind, body.__name__, body.__module__, of, version, reason, upstream)
        return body

    return declare


def native(name: str, *, where: str, of: str, version: str, reason: str, upstream: str) -> None:
    """Declare a change that the C++ file `where` makes, by the name of what makes it."""
    _declare("native", name, where, of, version, reason, upstream)


def use(name: str, *, of: str, version: str, reason: str, upstream: str) -> None:
    """Declare that something private is read or called, by its dotted name."""
    _declare("use", name, sys._getframe(1).f_globals["__name__"], of, version, reason, upstream)


@contextlib.contextmanager
def swapped(owner: Any, name: object, new: object) -> Iterator[None]:
    """Replace an entry of a table, or an attribute of a module or class, while the block runs."""
    table = isinstance(owner, MutableMapping)
    before = (owner if table else vars(owner)).get(name, ABSENT)
    _set(owner, name, new, table)
    try:
        yield
    finally:
        _set(owner, name, before, table)


def _set(owner: Any, name: Any, value: object, table: bool) -> None:
    if table and value is ABSENT:
        del owner[name]
    elif table:
        owner[name] = value
    elif value is ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


@contextlib.contextmanager
def wrapped(owner: Any, name: Any, wrap: Callable[[Any], Callable[..., object]], theirs: Any = None) -> Iterator[None]:
    """A function of a module, class or table becomes `wrap(function)` while the block runs, in this thread alone.

    `theirs` is what other threads call where the table has no function yet.
    """
    table = isinstance(owner, MutableMapping)
    held = (owner if table else vars(owner)).get(name, theirs)
    theirs = held if table else getattr(owner, name)
    ours, here = wrap(theirs), {threading.get_ident()}

    @functools.wraps(theirs)
    def call(*args: object, **kwargs: object) -> object:
        return (ours if threading.get_ident() in here else theirs)(*args, **kwargs)

    with swapped(owner, name, staticmethod(call) if isinstance(held, staticmethod) else call):
        try:
            yield
        finally:
            here.clear()  # another reference to the function may remain
