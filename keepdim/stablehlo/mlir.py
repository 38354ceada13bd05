"""MLIR through jaxlib: its bindings, types of values, and contexts that collect diagnostics."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from threading import RLock
from typing import TYPE_CHECKING, Any

from ..errors import fail, optional

if TYPE_CHECKING:
    from jaxlib.mlir import ir

EXTRA = "stablehlo"  # pip extra with jax and jaxlib
DYNAMIC = -1  # an unknown size


@cache
def bindings() -> Any:
    """jaxlib's bindings, with StableHLO's passes registered."""
    optional("refine", "jaxlib", EXTRA)
    from jaxlib.mlir.dialects import stablehlo

    stablehlo.register_stablehlo_passes()
    return stablehlo


@dataclass(frozen=True)
class Type:
    """A tensor type of a signature."""

    text: str
    element: str
    dims: tuple[int, ...]  # DYNAMIC for `?`
    bounds: tuple[int, ...]  # DYNAMIC for no bound

    @property
    def unranked(self) -> bool:
        """Whether its rank is unknown."""
        return self.text.startswith("tensor<*")

    @property
    def dynamic(self) -> bool:
        """Whether a size is unknown."""
        return DYNAMIC in self.dims or self.unranked

    def __str__(self) -> str:
        return self.text


@cache
def _context_type() -> tuple[Any, object]:
    """A context type without dialects, and a registry of jax's dialects; made without importing jax."""
    bindings()
    from jaxlib.mlir import ir
    from jaxlib.mlir._mlir_libs import _jax_mlir_ext

    class Context(ir.Context):
        def __init__(self) -> None:  # ir.Context's loads every dialect
            super(ir.Context, self).__init__()

    registry = ir.DialectRegistry()
    _jax_mlir_ext.register_dialects(registry)
    return Context, registry


def _new_context() -> ir.Context:
    """A context as jax makes it, but without threads, which would not survive a fork."""
    make, registry = _context_type()
    from jaxlib.mlir.dialects import chlo, mhlo, mpmd, sdy

    context = make()
    context.append_dialect_registry(registry)
    context.load_all_available_dialects()
    context.enable_multithreading(False)
    sdy.register_dialect(context)
    mpmd.register_dialect(context)
    mhlo.register_mhlo_dialect(context)
    chlo.register_dialect(context)
    bindings().register_dialect(context)
    return context


class Scope:
    """An MLIR context that modules share, and its diagnostics. One thread at a time."""

    def __init__(self) -> None:
        self._errors: list[str] = []
        self._lock = RLock()
        self.context = _new_context()
        self.context.emit_error_diagnostics = True
        self.context.attach_diagnostic_handler(_collector(self._errors))

    @contextmanager
    def reporting(self, subject: str) -> Iterator[None]:
        """Enter the context; diagnostics and exceptions of MLIR become a KeepdimError."""
        with self._lock, self.context:
            yield from self._reported(subject)

    def _reported(self, subject: str) -> Iterator[None]:
        self._errors.clear()
        cause = None
        try:
            yield
        except Exception as e:  # MLIR's exceptions; the reason is in the diagnostics
            if type(e).__module__.startswith("keepdim"):
                raise
            cause = e
        if cause is not None or self._errors:
            why = "; ".join(dict.fromkeys(" ".join(m.split()) for m in self._errors)) or str(cause)
            fail("refine", subject, why, cause=cause)


def _collector(errors: list[str]) -> Callable[[ir.Diagnostic], bool]:
    """A diagnostic handler that collects errors. It holds no reference to the context, which would leak."""

    def diagnose(found: ir.Diagnostic) -> bool:
        if str(found.severity).endswith("ERROR"):
            where = re.search(r":(\d+):(\d+)$", str(found.location).removesuffix(")").replace('"', ""))
            line = f" (line {where[1]})" if where and where[1] != "0" else ""
            errors.append(found.message + line)
        return True

    return diagnose


def inside(op: ir.Operation) -> Iterator[ir.Operation]:
    """Every operation in the regions of one, outer before inner."""
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner.operation
                yield from inside(inner.operation)


def string_of(attribute: ir.Attribute) -> str:
    """The text of a string attribute."""
    return attribute.value


def type_of(t: ir.Type) -> Type:
    """A ranked tensor; anything else has no dims."""
    from jaxlib.mlir import ir

    if not isinstance(t, ir.RankedTensorType):
        return Type(str(t), str(t), (), ())
    dims = tuple(DYNAMIC if t.is_dynamic_dim(d) else t.get_dim_size(d) for d in range(t.rank))
    given = re.search(r"#stablehlo\.bounds<([^>]*)>", str(t.encoding) if t.encoding is not None else "")
    bounds = [DYNAMIC if b.strip() == "?" else int(b) for b in given[1].split(",")] if given else [DYNAMIC] * t.rank
    return Type(str(t), str(t.element_type), dims, tuple(bounds))
