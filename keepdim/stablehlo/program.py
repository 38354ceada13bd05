"""A StableHLO program with its contract: refine it, run it, save it (by `file`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from operator import index
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np
import torch
import torch.utils._pytree as pytree
from msgspec.structs import replace

from ..artifact.calling import CallProtocol, is_dense, layout_text
from ..artifact.signature import Signature
from ..errors import fail
from ..shapes.contract import DTYPE_OF, Constraint, Contract, DimSource, Spec, Symbol, solve
from ..shapes.dim import Dim, decide, range_text
from . import bounded
from .mlir import Type
from .refine import ASSERTION, Hlo
from .xla import Executables, upload

ELEMENTS = {
    "f32": "f32", "f16": "f16", "bf16": "bf16", "f64": "f64", "i8": "i8", "u8": "ui8", "i16": "i16", "i32": "i32",
    "i64": "i64", "bool": "i1",
}  # fmt: skip
STATES = "Pass what new_states() or the previous call returned"
PART = ("refine-arguments", "refine-shapes", "canonicalize-dynamism")
FULL = (*PART, "check-shape-assertions", "cse")
# For modules with calls: refine-shapes supports neither XLA's custom calls nor composites.
BY_XLA = ("refine-arguments", "refine-polymorphic-shapes")


class Argument(msgspec.Struct, frozen=True):
    """An argument or a result of main, in order.

    Arguments are inputs, sizes (of a bounded program), states and weights; results are outputs, counts (data-dependent
    sizes) and states.
    """

    kind: str
    name: str  # the key of a weight or a state
    dtype: str


class StableHLOProgram:
    """A program in StableHLO: call it like the model, or make it static with `refine`.

    A state (such as a KV cache) is an argument after the inputs and a result after the outputs: pass it, and the
    updated one is returned.
    """

    def __init__(self, hlo: Hlo, signature: Signature, contract: Contract, arguments: Sequence[Argument],
                 results: Sequence[Argument], weights: Mapping[str, torch.Tensor], bounded: bool = False):  # fmt: skip
        self.hlo, self.signature, self.weights, self.bounded = hlo, signature, dict(weights), bounded
        self.inner = contract  # over main's tensors, where integers are tensors too
        self.contract = signature.contract
        self.arguments, self.results = list(arguments), list(results)
        self.notes: list[str] = []  # of capture, and of graphs that were refused; not in a file
        self.executables = Executables()
        self._uploaded: list[object] | None = None
        self._protocol = CallProtocol(signature)

    # -- computed on demand
    @cached_property
    def types(self) -> list[Type]:
        """Argument types of main."""
        return self.hlo.inputs

    @cached_property
    def _state_types(self) -> list[Type]:
        return [t for a, t in zip(self.arguments, self.types, strict=True) if a.kind == "state"]

    @cached_property
    def _calls(self) -> bool:
        """Whether it calls anything but assertions."""
        return any(name != ASSERTION for name, _ in self.hlo.calls())

    # -- reading
    @property
    def text(self) -> str:
        """The StableHLO text; of a bounded program, with `#stablehlo.bounds` in its signature."""
        return bounded.text(self) if self.bounded else self.hlo.text

    @property
    def states(self) -> list[Argument]:
        """The states, in their order after the inputs."""
        return [a for a in self.arguments if a.kind == "state"]

    def __repr__(self) -> str:
        form = "bounded" if self.bounded else "static" if self.hlo.static else "dynamic"
        return f"keepdim.StableHLOProgram ({form})\n{self.contract}"

    # -- refining
    def refine(self, **sizes: object) -> StableHLOProgram:
        """A program for these sizes: `refine(seq_len=16)` by symbols, or `refine(x=(1, 16, 64))` by inputs' shapes.

        Symbols that are not given stay dynamic. Sizes outside the contract are refused before any pass runs.
        """
        if self.bounded:
            fail("refine", "program", "is bounded: one program is for all sizes", "Refine the one without bounds")
        values = self._symbols(sizes)
        names = {s.name for s in self.inner.symbols}
        types = [self._argument_type(i, values) for i in range(len(self.arguments))]
        passes = BY_XLA if self._calls else FULL
        copy = self.hlo.copy().run(passes if values.keys() == names else PART, types)
        known = {k: Dim.const(v) for k, v in values.items()}
        signature = self.signature._replace(contract=_substituted(self.signature.contract, known))
        return StableHLOProgram(copy, signature, _substituted(self.inner, known), self.arguments, self.results,
                                self.weights)  # fmt: skip

    def _argument_type(self, i: int, values: Mapping[str, int]) -> str:
        if self.arguments[i].kind != "input":
            return self.types[i].text
        dims = [d.substitute({k: Dim.const(v) for k, v in values.items()}) for d in self.inner.inputs[i].dims]
        sizes = ["?" if d.value is None else str(d.value) for d in dims]
        return f"tensor<{'x'.join([*sizes, ELEMENTS[self.arguments[i].dtype]])}>"

    def _symbols(self, given: Mapping[str, object]) -> dict[str, int]:
        """Values of symbols, by name or from the shapes of inputs; raises if the contract does not allow them."""
        symbols = {s.name: s for s in self.inner.symbols}
        inputs = {s.name: i for i, s in enumerate(self.inner.inputs)}
        values: dict[str, int] = {}
        shapes: dict[int, list[int]] = {}
        for name, size in given.items():
            size_or_shape = _as_ints(size)
            if name in inputs and isinstance(size_or_shape, list):
                shapes[inputs[name]] = size_or_shape
            elif name in symbols and isinstance(size_or_shape, int):
                values[name] = size_or_shape
            else:
                known = [f"{n}=..." for n in symbols] + [f"{n}=(...)" for n in inputs]
                fact = f"`{size!r}` is not an integer or a shape of this program"
                if name not in symbols and name not in inputs:
                    fact = "is not a symbol or an input of this program"
                fail("refine", f"size {name!r}", fact, f"Give {', '.join(known)}")
        for i, shape in shapes.items():
            spec = self.inner.inputs[i]
            if len(shape) != len(spec.dims):
                fail("refine", f"input {i} {spec.name!r}", f"expected rank {len(spec.dims)} ({spec}), got {shape}")
        self._solve(values, shapes)
        self._check_sizes(values, shapes)
        return values

    def _solve(self, values: dict[str, int], shapes: Mapping[int, list[int]]) -> None:
        """Solve symbols from the given shapes."""
        sources = [DimSource("size", i, d, dim) for i in shapes for d, dim in enumerate(self.inner.inputs[i].dims)]
        found, rest = solve(sources, values.keys())
        for p in rest:
            spec, open_ones = self.inner.inputs[p.input], sorted(p.dim.symbols() - values.keys())
            fail("refine", f"input {p.input} {spec.name!r} dim {p.index}",
                 f"does not determine {' and '.join(open_ones)} of {p.dim}", f"Give {open_ones[0]}=...")  # fmt: skip
        for s in found:
            values[s.name] = s.solve(shapes[s.source.input][s.source.index], lambda d: d.eval(values))

    def _check_sizes(self, values: Mapping[str, int], shapes: Mapping[int, list[int]]) -> None:
        known = {k: Dim.const(v) for k, v in values.items()}
        for i, shape in shapes.items():
            spec = self.inner.inputs[i]
            for d, (n, dim) in enumerate(zip(shape, spec.dims, strict=True)):
                if dim.eval(values) != n:
                    want = f"{dim} = {dim.eval(values)}" if dim.value is None else f"{dim}"
                    fail("refine", f"input {i} {spec.name!r} dim {d}", f"expected {want}, got {n}")
        for s in self.inner.symbols:
            size = values.get(s.name)
            if size is not None and (size < (s.lo or 0) or (s.hi is not None and size > s.hi)):
                fail("refine", self.inner.where(s), f"{s.name} = {size} is out of range {range_text(s.lo, s.hi)}")
        for c in self.inner.constraints:
            if decide(c.lhs.substitute(known), c.cmp, c.rhs.substitute(known)) is False:
                at = ", ".join(f"{k} = {v}" for k, v in values.items())
                fail("refine", f"constraint {c}", f"does not hold at {at}")

    # -- running
    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Run on XLA's CPU client. Takes torch, numpy or jax arrays, then states; returns torch tensors."""
        flat, states = self._given(args, kwargs)
        inputs, values = self._bind(flat)
        key = None if self.bounded else tuple([tuple(x.shape) for x in inputs])
        given = bounded.pad(self, inputs) if self.bounded else inputs
        run = self.executables.get(key, lambda: self._compiled(values, (*given, *states)))
        return self._result(run([*map(upload, (*given, *states)), *self._weights()]), values)

    def interpret(self, *args: object, **kwargs: object) -> Any:
        """Run on StableHLO's reference interpreter: slow, and the definition of the operations."""
        from .interpret import interpret_tensors

        flat, states = self._given(args, kwargs)
        inputs, values = self._bind(flat)
        given = bounded.pad(self, inputs) if self.bounded else inputs
        weights = [self.weights[a.name] for a in self.arguments if a.kind == "const"]
        return self._result(interpret_tensors(self._static(values), [*given, *states, *weights]), values)

    def _given(self, args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[list[object], list[torch.Tensor]]:
        """The contract's inputs in order, and the states."""
        count = len(args) - len(self.states)
        if count < 0:
            fact = f"has {len(args)} arguments, and {len(self.states)} states have to follow the model's own"
            fail("bind", "call", fact, STATES)
        states = [tensor(x) for x in args[count:]]
        self._check_states(states)
        return list(self._protocol.flatten(*pytree.tree_map(tensor, (args[:count], kwargs)))), states

    def _bind(self, flat: Sequence[object]) -> tuple[list[torch.Tensor], dict[str, int]]:
        """The tensors that main takes, checked against the contract, and the symbols' values."""
        inputs = self._protocol.inputs(flat)
        return inputs, self.inner.bind(inputs)

    def _check_states(self, states: Sequence[Any]) -> None:
        for a, x, t in zip(self.states, states, self._state_types, strict=True):
            given = isinstance(x, torch.Tensor)
            if not given or tuple(x.shape) != t.dims or x.dtype != DTYPE_OF[a.dtype] or not is_dense(x):
                have = f"{x.dtype} {list(x.shape)}, {layout_text(x)}" if given else type(x).__name__
                fail("bind", f"state {a.name!r}", f"expected {a.dtype} {list(t.dims)}, got {have}", STATES)

    def new_states(self) -> list[torch.Tensor]:
        """Initial states: zeros."""
        return [
            torch.zeros(t.dims, dtype=DTYPE_OF[a.dtype]) for a, t in zip(self.states, self._state_types, strict=True)
        ]

    def _weights(self) -> list[object]:
        """The weights on the device, uploaded once."""
        if self._uploaded is None:
            self._uploaded = [upload(self.weights[a.name]) for a in self.arguments if a.kind == "const"]
        return self._uploaded

    def _static(self, values: Mapping[str, int]) -> Hlo:
        """The static module for a call."""
        return self.hlo if self.bounded or self.hlo.static else self.refine(**values).hlo

    def _compiled(self, values: Mapping[str, int], given: Sequence[torch.Tensor]) -> Hlo:
        """The static module, after checking the arguments: XLA does not compare sizes with those of its buffers."""
        hlo = self._static(values)
        weights = [self.weights[a.name] for a in self.arguments if a.kind == "const"]
        for i, (a, x, t) in enumerate(zip(self.arguments, (*given, *weights), hlo.inputs, strict=True)):
            if tuple(x.shape) != t.dims or x.dtype != DTYPE_OF[a.dtype]:
                fail("run", f"argument {i} {a.name!r}", f"is {x.dtype} {list(x.shape)}, and the module takes {t}")
        return hlo

    def _result(self, outs: Sequence[torch.Tensor], values: dict[str, int]) -> object:
        """Outputs, sliced to their sizes, in the model's structure; states after them."""
        counts = {a.name: int(y) for a, y in zip(self.results, outs, strict=True) if a.kind == "count"}
        padded = self.bounded or bool(counts)
        shown = [
            int(y) if spec.dtype == "int" else _slice_to(y, spec.dims, values | counts) if padded else y
            for spec, y in zip(self.inner.outputs, outs, strict=False)
        ]
        result = self._protocol.result(shown)
        changed = outs[len(outs) - len(self.states) :] if self.states else ()
        return (result, *changed) if self.states else result

    # -- files
    def save(self, path: str | Path, inside: bool = False) -> None:
        """Write a portable artifact that any StableHLO tool reads; weights go to `path + '.npz'`, or `inside`."""
        from .file import save

        save(self, path, inside)


def _as_ints(size: Any) -> object:
    """An integer as an int, a sequence of them as a list of ints; None for anything else."""
    if isinstance(size, (tuple, list)):
        sizes = [_as_ints(n) for n in size]
        return sizes if all(isinstance(n, int) for n in sizes) else None
    try:
        return None if isinstance(size, bool) else index(size)
    except TypeError:
        return None


def _substituted(c: Contract, known: Mapping[str, Dim]) -> Contract:
    """The contract with these symbols replaced."""

    def spec(s: Spec) -> Spec:
        return replace(s, dims=tuple(d.substitute(known) for d in s.dims))

    def limits(given: Sequence[Constraint]) -> tuple[Constraint, ...]:
        made = [replace(k, lhs=k.lhs.substitute(known), rhs=k.rhs.substitute(known)) for k in given]
        return tuple(k for k in made if decide(k.lhs, k.cmp, k.rhs) is not True)

    def left(symbols: Sequence[Symbol]) -> tuple[Symbol, ...]:
        return tuple(
            replace(s, source=replace(s.source, mul=s.source.mul.substitute(known), add=s.source.add.substitute(known)))
            for s in symbols
            if s.name not in known
        )

    return Contract(left(c.symbols), tuple(map(spec, c.inputs)), limits(c.constraints), tuple(map(spec, c.outputs)),
                    left(c.data), limits(c.ensures))  # fmt: skip


def _slice_to(y: torch.Tensor, dims: Sequence[Dim], values: Mapping[str, int]) -> torch.Tensor:
    """Slice to the sizes; a size with an unknown symbol is kept."""
    sizes = [n if d.symbols() - values.keys() else d.eval(values) for n, d in zip(y.shape, dims, strict=True)]
    return y if list(y.shape) == sizes else y[tuple(slice(0, n) for n in sizes)].contiguous()


def tensor(x: object) -> object:
    """An array of numpy or jax as a tensor of the same memory; anything else as it is."""
    if isinstance(x, np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(x)) if x.flags.writeable else torch.from_numpy(x.copy())
    return torch.from_dlpack(x) if isinstance(x, jax.Array) else x
