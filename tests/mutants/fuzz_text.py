"""Coverage-guided fuzzing of what Python reads: `python tests/mutants/fuzz_text.py signature CORPUS [options]`.

`signature` is the JSON of a file: contracts, signatures, Programs, outlines. `stablehlo` is the text of a module.
Anything but a KeepdimError is a fault, and so is anything that a file makes Python import, open, start or execute.
"""

from __future__ import annotations

import inspect
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import atheris
import msgspec

import keepdim
from keepdim.artifact.outline import Outline
from keepdim.artifact.signature import Signature
from keepdim.ir.program import Program

EXECUTES = (
    "import",
    "exec",
    "compile",
    "open",
    "ctypes.dlopen",
    "os.system",
    "os.exec",
    "subprocess.Popen",
    "pickle.find_class",
)
armed = False


def _watch(event: str, args: tuple[object, ...]) -> None:
    if armed and event.startswith(EXECUTES):
        raise AssertionError(f"reading a file did: {event} {args!r:.200}")


def signature(data: bytes) -> None:
    """The JSON of a file, read as each thing that it may be."""
    global armed
    for read in (Signature.from_json, Outline.from_json, Program.from_json):
        text = data.decode("utf-8", "replace") if read is not Program.from_json else data
        armed = True
        try:
            read(text)  # type: ignore[arg-type]
        except keepdim.KeepdimError:
            continue
        finally:
            armed = False


def stablehlo(data: bytes) -> None:
    """The text of a module in a file, and its refinement at a size."""
    path = FOLDER / "m.mlir"
    path.write_bytes(data)
    try:
        program = keepdim.load_stablehlo(path)
        str(program.contract)
        if all(s.lo is None or s.lo <= 3 for s in program.inner.symbols):
            _ = program.refine(**{s.name: 3 for s in program.inner.symbols}).hlo.text
    except keepdim.KeepdimError:
        return


def _structs(kind: type) -> Iterator[type]:
    for below in kind.__subclasses__():
        if below.__module__.startswith("keepdim."):
            yield below
        yield from _structs(below)


def instrument() -> None:
    """Every function of keepdim that is there. (atheris does not look into the loader of an editable installation.)"""
    for name, module in list(sys.modules.items()):
        if not name.startswith("keepdim.") or name.startswith("keepdim._native"):
            continue
        holders = [module, *(v for v in vars(module).values() if inspect.isclass(v) and v.__module__ == name)]
        for holder in holders:
            for value in list(vars(holder).values()):
                function = getattr(value, "__func__", value)
                if inspect.isfunction(function) and function.__module__ == name:
                    atheris.instrument_func(function)


if __name__ == "__main__":
    target = {"signature": signature, "stablehlo": stablehlo}[sys.argv.pop(1)]
    FOLDER = Path(tempfile.mkdtemp(prefix="keepdim-fuzz-"))
    os.environ["XDG_CACHE_HOME"] = str(FOLDER)
    if target is stablehlo:
        import keepdim.stablehlo  # noqa: F401
    else:
        for known in (f for a in sys.argv[1:] if Path(a).is_dir() for f in sorted(Path(a).iterdir())):
            signature(known.read_bytes())  # what is imported at first use
        for kind in _structs(msgspec.Struct):
            msgspec.json.Decoder(kind)  # evaluates our own annotations
        sys.addaudithook(_watch)
    instrument()
    atheris.Setup(sys.argv, target)
    atheris.Fuzz()
