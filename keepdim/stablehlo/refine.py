"""StableHLO texts and artifacts, and passes over them by name: dynamic programs become static ones.

Works on any StableHLO, not only keepdim's. The passes are StableHLO's, from jaxlib, with its pipeline
`remove-dynamism`, and those of `extra_passes.py`. A diagnostic error of a pass is an error here, even if the pass goes
on. Files are read and refined in the process of `worker.py`, because MLIR crashes on some modules.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import fail
from . import worker
from .extra_passes import EXTRA_PASSES
from .mlir import DYNAMIC, Scope, Type, bindings, inside, string_of, type_of

if TYPE_CHECKING:
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import func

BYTECODE = b"ML\xefR"
SEAL, UNSEALED = "keepdim.seal", b"keepdim-sha256:" + b"0" * 64  # checksum attribute of artifacts, and its initial text
ASSERTION = "shape_assertion"  # a custom call
REMOVE_DYNAMISM = ("refine-arguments", "refine-shapes", "canonicalize-dynamism")
# Function passes; the others are module passes.
OF_FUNCTIONS = {
    "stablehlo-canonicalize-dynamism", "stablehlo-check-shape-assertions", "stablehlo-complex-math-expander",
    "stablehlo-legalize-composite-to-call", "stablehlo-legalize-deprecated-ops", "stablehlo-legalize-quant-to-math",
    "stablehlo-legalize-qdq-to-quantized-op", "stablehlo-legalize-quantized-op-to-qdq",
    "chlo-legalize-to-stablehlo", "shape-legalize-to-stablehlo",
}  # fmt: skip
OF_MODULES = {
    "stablehlo-refine-arguments", "stablehlo-refine-shapes", "stablehlo-compatibility-expander",
    "stablehlo-convert-to-signless", "stablehlo-legalize-to-vhlo", "stablehlo-wrap-in-composite",
    "vhlo-legalize-to-stablehlo", "vhlo-to-version", "canonicalize", "cse", "sccp", "symbol-dce",
}  # fmt: skip
# Passes that do not introduce new kinds of operations.
KEEP_KINDS = {
    "stablehlo-refine-arguments", "stablehlo-refine-shapes", "stablehlo-canonicalize-dynamism",
    "stablehlo-check-shape-assertions", "canonicalize", "cse", "sccp", "symbol-dce",
}  # fmt: skip
DIVISIONS = ("stablehlo.divide", "stablehlo.remainder")
# Dynamic in their positions, not in their shapes.
STATIC_THOUGH_DYNAMIC = {"stablehlo.dynamic_slice", "stablehlo.dynamic_update_slice"}
BOUNDS = re.compile(r", #stablehlo\.bounds<[^>]*>")
ZERO = re.compile(r"dense<[^>]*(?<![\w.-])0(?![\w.])")


class Hlo:
    """A module of StableHLO.

    >>> hlo = Hlo.parse("func.func @main(%x: tensor<?xf32>) -> tensor<?xf32> { return %x : tensor<?xf32> }")
    >>> str(hlo.inputs[0]), hlo.static
    ('tensor<?xf32>', False)
    >>> [str(t) for t in hlo.run(["remove-dynamism"], ["tensor<16xf32>"]).results]
    ['tensor<16xf32>']
    """

    def __init__(self, read: Callable[[ir.Context], ir.Module], subject: str, scope: Scope | None = None):
        self.untrusted = ""  # the file it came from, if any: passes and the compiler then run in the worker
        self.scope = scope or Scope()
        self.context, self.reporting = self.scope.context, self.scope.reporting
        self._divides: bool | None = None  # whether `_refuse_zeros` has anything to check; None if unknown
        with self.reporting(subject):
            self.module = read(self.context)

    # -- making
    @staticmethod
    def parse(source: str | bytes, subject: str = "text") -> Hlo:
        """From trusted text, MLIR bytecode or a portable artifact; `read` is for untrusted ones."""
        if not isinstance(source, (str, bytes)):
            fail("refine", subject, f"is of type {type(source).__name__}, not text or bytes")
        from_bytes = isinstance(source, bytes) and source.startswith(BYTECODE)
        if isinstance(source, bytes) and not from_bytes:
            try:
                source = source.decode()
            except UnicodeDecodeError as e:
                fail("refine", subject, "is neither StableHLO text nor an artifact", cause=e)
        if from_bytes and (version := _version(source)) is not None:  # type: ignore[arg-type]
            return Hlo._artifact(source, version, subject)  # type: ignore[arg-type]
        if from_bytes:
            _check_seal(source, subject)  # type: ignore[arg-type]
        return Hlo.parse_printed(source, subject)

    @staticmethod
    def parse_printed(data: str | bytes, subject: str, scope: Scope | None = None) -> Hlo:
        """From the output of `bytecode` or `text`; `scope` is the other module's, or a new one."""

        def read(context: ir.Context) -> ir.Module:
            from jaxlib.mlir import ir

            return ir.Module.parse(data, context)

        return Hlo(read, subject, scope)

    @staticmethod
    def read(source: str | bytes, subject: str) -> Hlo:
        """From untrusted text, MLIR bytecode or a portable artifact."""
        bindings()  # or the sentence that jaxlib is not installed
        data = source.encode("utf-8", "surrogatepass") if isinstance(source, str) else source
        hlo = Hlo.parse_printed(worker.read(data, subject), subject)
        hlo.untrusted = subject
        return hlo

    @staticmethod
    def _artifact(data: bytes, version: tuple[int, ...], subject: str) -> Hlo:
        stablehlo = bindings()
        current = tuple(map(int, stablehlo.get_current_version().split(".")))
        if version > current:
            fail("refine", subject, f"is of StableHLO {_dotted(version)}, newer than this build reads "
                 f"({_dotted(current)})", "Upgrade jaxlib, or write the artifact for an older version")  # fmt: skip
        _check_seal(data, subject)
        hlo = Hlo(lambda context: stablehlo.deserialize_portable_artifact(context, data), subject)
        hlo.take_attribute(SEAL)
        return hlo

    def copy(self) -> Hlo:
        """A copy of the module in the same context."""
        from jaxlib.mlir import ir

        def clone(context: ir.Context) -> ir.Module:
            made = ir.Module.create(self.module.operation.location)
            for name, value in self.module.operation.attributes.items():
                made.operation.attributes[name] = value
            for op in self.module.body.operations:
                op.operation.clone(ip=ir.InsertionPoint(made.body))
            return made

        out = Hlo(clone, "copy", self.scope)
        out.untrusted, out._divides = self.untrusted, self._divides if self.untrusted else self._may_divide()
        return out

    @staticmethod
    def load(path: str | Path) -> Hlo:
        """From an untrusted file."""
        try:
            data = Path(path).read_bytes()
        except (OSError, ValueError) as e:  # a path with a NUL is a ValueError
            fail("refine", str(path), f"cannot be read ({getattr(e, 'strerror', None) or e})", cause=e)
        return Hlo.read(data, str(path))

    # -- reading
    @property
    def text(self) -> str:
        """The text of the module."""
        with self.reporting("text"):
            return str(self.module)

    def bytecode(self) -> bytes:
        """MLIR bytecode, readable by this version only."""
        data = io.BytesIO()
        self.module.operation.write_bytecode(data)
        return data.getvalue()

    def artifact(self) -> bytes:
        """A portable artifact of StableHLO, which later versions read. It contains a checksum, because MLIR crashes on
        some damaged artifacts."""
        stablehlo = bindings()
        self.set_attribute(SEAL, UNSEALED.decode())
        try:
            with self.reporting("artifact"):
                data = stablehlo.serialize_portable_artifact_str(self.text, stablehlo.get_current_version())
        finally:
            self.take_attribute(SEAL)
        return data.replace(UNSEALED, UNSEALED[:-64] + _hash(data))

    @property
    def entries(self) -> list[func.FuncOp]:
        """The entry functions: `main`, or all functions if there is no main."""
        functions = [op for op in self.module.body.operations if op.operation.name == "func.func"]
        return [f for f in functions if f.name.value == "main"] or functions

    @property
    def main(self) -> func.FuncOp:
        """The entry function: `main`, or the only one."""
        if len(found := self.entries) != 1:
            names = ", ".join(f.name.value for f in found)
            fail("refine", "module", f"has no function main (it has: {names})" if found else "has no function")
        return found[0]

    def name_main(self) -> None:
        """Rename the entry function to main, which XLA looks for."""
        from jaxlib.mlir import ir

        main = self.main
        with self.reporting("main"):
            main.attributes["sym_name"] = ir.StringAttr.get("main")
            main.attributes["sym_visibility"] = ir.StringAttr.get("public")

    @property
    def inputs(self) -> list[Type]:
        """Argument types of main."""
        return [type_of(t) for t in self.main.type.inputs]

    @property
    def results(self) -> list[Type]:
        """Result types of main."""
        return [type_of(t) for t in self.main.type.results]

    def operations(self) -> Iterator[ir.Operation]:
        """All operations, outer before inner."""
        return inside(self.module.operation)

    def counts(self) -> Counter[str]:
        """Operation name → count."""
        return Counter(op.name for op in self.operations())

    @property
    def static(self) -> bool:
        """Whether every size is known and no operation has dynamic shapes."""
        values = (r.type for op in self.operations() for r in op.results)
        blocks = (block for op in self.operations() for region in op.regions for block in region.blocks)
        given = (a.type for block in blocks for a in block.arguments)
        return not any(type_of(t).dynamic for t in (*given, *values)) and not [
            n for n in self.counts() if n.startswith("stablehlo.dynamic_") and n not in STATIC_THOUGH_DYNAMIC
        ]

    def calls(self) -> list[tuple[str, ir.Operation]]:
        """Custom calls, function calls and composites: the callee's name and the operation."""
        names = {"stablehlo.custom_call": "call_target_name", "func.call": "callee", "stablehlo.composite": "name"}
        return [(string_of(op.attributes[names[op.name]]), op) for op in self.operations() if op.name in names]

    def assertions(self) -> list[str]:
        """The messages of its shape assertions."""
        found = [op.attributes for name, op in self.calls() if name == ASSERTION]
        return [string_of(a["error_message"]) if "error_message" in a else "(no message)" for a in found]

    def take_attribute(self, name: str) -> str | None:
        """Remove a string attribute of the module and return it."""
        found = self.module.operation.attributes
        if name not in found:
            return None
        with self.reporting(name):
            text = string_of(found[name])
        if not isinstance(text, str):
            fail("refine", name, f"is not a text ({text})", "Remove the attribute from the module")
        del found[name]
        return text

    def set_attribute(self, name: str, text: str) -> None:
        """Set a string attribute of the module."""
        from jaxlib.mlir import ir

        with self.reporting(name):
            self.module.operation.attributes[name] = ir.StringAttr.get(text)

    def about(self) -> dict[str, Any]:
        """Summary: signatures, dynamic dims and their bounds, assertions, operation counts."""
        many = len(self.entries) > 1

        def types(of: Iterable[ir.Type]) -> list[Type]:
            return [type_of(t) for t in of]

        def dynamic(what: str, types: Sequence[Type]) -> list[str]:
            dims = [(i, d, b) for i, t in enumerate(types) for d, b in enumerate(t.bounds) if t.dims[d] == DYNAMIC]
            found = [f"{what} {i} (any rank)" for i, t in enumerate(types) if t.unranked]
            return found + [f"{what} {i} dim {d}" + (f" (at most {b})" if b != DYNAMIC else "") for i, d, b in dims]

        return {
            "functions": {
                f.name.value: {
                    "inputs": list(map(str, types(f.type.inputs))),
                    "results": list(map(str, types(f.type.results))),
                }
                for f in self.entries
            },
            "dynamic": [
                (f"{f.name.value} " if many else "") + where
                for f in self.entries
                for where in (*dynamic("argument", types(f.type.inputs)), *dynamic("result", types(f.type.results)))
            ],
            "assertions": self.assertions(),
            "operations": dict(self.counts().most_common()),
            "static": self.static,
        }

    # -- passes
    def run(self, passes: Sequence[str], types: Sequence[str] | None = None) -> Hlo:
        """Run these passes in order, in place; `types` are the argument types for refine-arguments."""
        for _ in self._run_in_worker(passes, types, each=False) if self.untrusted else self.each(passes, types):
            pass
        return self

    def _run_in_worker(self, passes: Sequence[str], types: Sequence[str] | None, each: bool) -> Iterator[str]:
        """Run passes in the worker; yields the name of each pass, or of the last, once this is its result."""
        for name, data in worker.refine(self.bytecode(), self.untrusted, passes, types, each):
            self.module = Hlo.parse_printed(data, self.untrusted, self.scope).module
            self._divides = None
            yield name

    def each(self, passes: Sequence[str], types: Sequence[str] | None = None) -> Iterator[str]:
        """As `run`; yields the name of each pass after it ran."""
        if self.untrusted:
            yield from self._run_in_worker(passes, types, each=True)
            return
        for what, given in (("passes", passes), ("types", types)):
            if isinstance(given, str):
                fail("refine", what, f"is a single str ({given!r})", "Give a list")
        names = [
            n
            for name in _joined(passes)
            for n in (REMOVE_DYNAMISM if _bare_name(name) == "remove-dynamism" else (name,))
        ]
        found = [_find(n) for n in names]
        if types is not None and "stablehlo-refine-arguments" not in [n for n, _ in found]:
            fail("refine", "types", "are for refine-arguments, which is not among the passes")
        for i, (name, options) in enumerate(found):
            if name == "stablehlo-refine-arguments":
                if options.startswith("{types="):
                    types, options = split(options[len("{types=") : -1]), ""
                if types is None:
                    fail("refine", name, "needs the types of all arguments", "Say --types 'tensor<16xf32>,...'")
                self._within_bounds(types)
                later = [n for n, _ in found[i + 1 :]]
                left = self._set_partial_types(types) if "stablehlo-refine-shapes" in later else types
                if left is None:
                    yield name
                    continue
                options = _types(left)
            if name not in EXTRA_PASSES and self._may_divide():
                self._refuse_zeros()
            with self.reporting(name):
                self._run(name, options)
            if name not in KEEP_KINDS:
                self._divides = None
            yield name

    def _may_divide(self) -> bool:
        """Whether it has integer divisions or replica groups."""
        if self._divides is None:
            self._divides = any(True for _ in self._risky())
        return self._divides

    def _risky(self) -> Iterator[ir.Operation]:
        for op in self.operations():
            if op.name in DIVISIONS:
                if "i" in type_of(op.results[0].type).element:
                    yield op
            elif "replica_groups" in op.attributes:
                yield op

    def _refuse_zeros(self) -> None:
        """Raise for what crashes a folding pass: integer division by a constant 0, empty replica groups."""
        for op in self._risky():
            if op.name in DIVISIONS:
                by = op.operands[1].owner
                if getattr(by, "name", "") == "stablehlo.constant" and ZERO.search(str(by.attributes["value"])):
                    fail("refine", op.name, "divides integers by the constant 0")
            elif "x0xi64" in str(op.attributes["replica_groups"]):
                fail("refine", op.name, "has empty replica_groups")

    def _run(self, name: str, options: str) -> None:
        from jaxlib.mlir.passmanager import PassManager

        if name in EXTRA_PASSES:
            EXTRA_PASSES[name](self)
            return
        inner = f"func.func({name}{options})" if name in OF_FUNCTIONS else name + options
        PassManager.parse(f"builtin.module({inner})", self.context).run(self.module.operation)

    def _within_bounds(self, types: Sequence[str]) -> None:
        """Raise for sizes over a bound, which refine-arguments accepts; then drop the bounds, since shapes are not
        refined through them. Other errors in the types are reported by the pass."""
        from jaxlib.mlir import ir

        if "#stablehlo.bounds" not in str(self.main.type):
            return
        have = self.inputs
        known = {t.text: t for t in have}
        given = [known.get(text) or self.type(text) for text in types]
        for i, (new, old) in enumerate(zip(given, have, strict=False)):
            for d, (n, bound, most) in enumerate(zip(new.dims, new.bounds, old.bounds, strict=False)):
                if most != DYNAMIC and max(n, bound) > most:
                    fail("refine", f"argument {i} dim {d}", f"{max(n, bound)} is over its bound {most}")
        if not any(t.dynamic for t in given):
            if "stablehlo.set_dimension_size" in self.counts():
                fail("refine", "module", "sets sizes up to bounds (set_dimension_size), which no pass makes static",
                     "Write the program without bounds")  # fmt: skip
            with self.reporting("bounds"):
                self.module = ir.Module.parse(BOUNDS.sub("", self.text), self.context)

    def _set_partial_types(self, types: Sequence[str]) -> list[str] | None:
        """The types left for refine-arguments, None if it need not run. A partially dynamic type is set here, since
        refine-shapes rejects the wrapper that the pass would insert. If one has bounds all are set here, because the
        pass splits its option at commas."""
        from jaxlib.mlir import ir

        main, left = self.main, list(types)
        if not any("?" in text for text in types):
            return left
        bounds = any("," in text for text in types)
        self.copy().run(["refine-arguments"], [BOUNDS.sub("", t) for t in types])  # reports errors in the types
        with self.reporting("stablehlo-refine-arguments"):
            for i, (text, arg) in enumerate(zip(types, main.entry_block.arguments, strict=True)):
                if (bounds or "?" in text) and (wanted := ir.Type.parse(text)) != arg.type:
                    arg.set_type(wanted)
                    left[i] = str(wanted)
            self.set_type()
        return None if bounds else left

    def set_type(self) -> None:
        """Update the type of main from its arguments and its return."""
        from jaxlib.mlir import ir

        main = self.main
        end = list(main.entry_block.operations)[-1]
        ins, outs = [a.type for a in main.entry_block.arguments], [v.type for v in end.operands]
        main.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(ins, outs))

    def type(self, text: str) -> Type:
        """A tensor type from its text."""
        from jaxlib.mlir import ir

        with self.reporting(f"type {text!r}"):
            return type_of(ir.Type.parse(text))


def _types(types: Sequence[str]) -> str:
    """The option of refine-arguments, which splits at every comma."""
    for i, text in enumerate(types):
        if "," in text:
            fail("refine", f"argument {i}", f"{text} has commas, which refine-arguments takes for the next type",
                 "Give a type without bounds")  # fmt: skip
    return f"{{types={','.join(types)}}}"


def _hash(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest().encode()


def _check_seal(data: bytes, subject: str) -> None:
    """Raise if the checksum is wrong; artifacts of other tools have none."""
    for found in re.finditer(UNSEALED[:-64] + rb"(.{64})", data, re.S):
        if _hash(data.replace(found[0], UNSEALED)) != found[1]:
            fail("refine", subject, "is damaged: its checksum is wrong", "Write it again")


def _version(data: bytes) -> tuple[int, ...] | None:
    """The version of a portable artifact; None for other bytecode."""
    found = re.match(rb"ML\xefR.StableHLO_v(\d+)\.(\d+)\.(\d+)\0", data, re.S)
    return tuple(int(n) for n in found.groups()) if found else None


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


# ---------------------------------------------------------------- passes by name
def split(text: str) -> list[str]:
    """Split at commas outside brackets and quotes.

    >>> split("tensor<16xf32>, tensor<?x4xf32, #stablehlo.bounds<16, ?>>")
    ['tensor<16xf32>', 'tensor<?x4xf32, #stablehlo.bounds<16, ?>>']
    >>> split("refine-arguments='types=tensor<2xf32>,tensor<3xf32>', cse")
    ["refine-arguments='types=tensor<2xf32>,tensor<3xf32>'", 'cse']
    """
    parts, depth, quote = [""], 0, ""
    for c in text:
        depth += (c in "<{") - (c in ">}")
        quote = "" if c == quote else quote or (c if c in "'\"" else "")
        if c == "," and depth == 0 and not quote:
            parts.append("")
        else:
            parts[-1] += c
    return [p.strip() for p in parts if p.strip()]


def _bare_name(name: str) -> str:
    return name.strip().lstrip("-").removeprefix("stablehlo-")


def _joined(passes: Sequence[str]) -> list[str]:
    """Join types after a comma to the preceding pass with `=types=...`."""
    out: list[str] = []
    for name in passes:
        if out and "=types=" in out[-1] and name.startswith(("tensor<", "!")):
            out[-1] += f",{name}"
        else:
            out.append(name)
    return out


def _find(name: str) -> tuple[str, str]:
    """The full name of a pass, and its options in braces: `name{options}`, or `name=options` as tools spell it."""
    head, brace, rest = name.strip().lstrip("-").partition("{")
    if not brace and "=" in head:
        head, _, rest = head.partition("=")
        brace, rest = "{", rest.strip("'\"") + "}"
    known = OF_FUNCTIONS | OF_MODULES | EXTRA_PASSES.keys()
    for full in (head, f"stablehlo-{head}"):
        if full in known:
            return full, brace + rest
    shown = sorted(n.removeprefix("stablehlo-") for n in known)
    fail("refine", f"pass {head!r}", "is not known", f"There are: remove-dynamism, {', '.join(shown)}")
