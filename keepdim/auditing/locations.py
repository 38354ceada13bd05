"""Source locations of decisions: the frame that made one, and the line of the user's model that it was working on."""

from __future__ import annotations

import inspect
import linecache
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import msgspec
import torch
from torch.fx.experimental.symbolic_shapes import ShapeGuard

from ..compat import watching

_HERE = str(Path(__file__).parent)
_WATCHING = str(Path(watching.__file__).parent)
_STDLIB = sysconfig.get_path("stdlib")
_TRACE = re.compile(r'File "(.+?)", line (\d+), in \S+\n\s*(.*)')


class CodeLocation(msgspec.Struct, frozen=True):
    """A function and a line in it, and the line of the model being processed, where torch recorded one."""

    function: str
    file: str
    line: int
    code: str = ""
    user_line: str = ""

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"


def short(file: str) -> str:
    """A path relative to site-packages or to the working folder, or as it is."""
    head, found, tail = file.rpartition("/site-packages/")
    return tail if found else file.removeprefix(f"{Path.cwd()}/")


def of_function(function: Callable[..., object]) -> CodeLocation:
    """Where a function or a method is defined, without its decorators."""
    function = inspect.unwrap(function)
    cells = [c.cell_contents for c in getattr(function, "__closure__", None) or ()]
    if (
        getattr(function, "__name__", "") == "wrapper"
        and (inner := next(filter(inspect.isfunction, cells), None)) is not None
    ):
        return of_function(inner)  # exir's decorators do not set __wrapped__
    if (code := getattr(function, "__code__", None)) is None:
        return CodeLocation(str(function), "", 0)
    return CodeLocation(code.co_qualname, short(code.co_filename), code.co_firstlineno)


def of_caller(tracing: bool, inside: str = "") -> CodeLocation:
    """The innermost frame outside torch, `inside` a pass; during tracing, with the model's line."""
    frames = list(_frames())
    outside = next((f for f in frames if not _in_torch(f)), frames[0])
    line = _line_of_node(frames)
    if not line and tracing and (user := next((f for f in frames if _in_user_code(f)), None)) is not None:
        line = _source_line(user.f_code.co_filename, user.f_lineno)
    name = outside.f_code.co_qualname
    name = name if not inside or name.startswith(inside) else f"{name} in {inside}"
    return CodeLocation(name, short(outside.f_code.co_filename), *_statement(outside), line)


def of_error(e: BaseException) -> CodeLocation | None:
    """The innermost frame outside torch in an error's traceback."""
    outside = [f for f, _ in traceback.walk_tb(e.__traceback__) if _nameable(f) and not _in_torch(f)]
    if not outside:
        return None
    return CodeLocation(outside[-1].f_code.co_qualname, short(outside[-1].f_code.co_filename), *_statement(outside[-1]))


def user_line(trace: str | None) -> str:
    """The last line of the user's model in a stack trace recorded by torch."""
    found = [m for m in _TRACE.findall(trace or "") if "/site-packages/" not in m[0]]
    return f"{short(found[-1][0])}:{found[-1][1]}: {found[-1][2].strip()}" if found else ""


def of_guard(guard: ShapeGuard) -> CodeLocation | None:
    """Where torch.export added a guard."""
    at = guard.sloc.framework_loc
    if at is None or isinstance(at, str):
        return None
    in_model = "/site-packages/" not in at.filename
    line = _source_line(at.filename, at.lineno) if in_model else ""
    return CodeLocation(at.name, short(at.filename), at.lineno, (at.line or "").strip(), line)


def _frames() -> Iterator[FrameType]:
    """Frames from the innermost outwards."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if _nameable(frame):
            yield frame
        frame = frame.f_back


def _nameable(frame: FrameType) -> bool:
    """Whether a frame is neither part of the recorder nor of the standard library."""
    file = frame.f_code.co_filename
    return not file.startswith((_HERE, _WATCHING, "<")) and ("site-packages" in file or not file.startswith(_STDLIB))


def _in_torch(frame: FrameType) -> bool:
    return short(frame.f_code.co_filename).startswith(("torch/", "sympy/"))


def _in_user_code(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return "/site-packages/" not in file and not file.startswith(str(Path(_HERE).parent))


def _statement(frame: FrameType) -> tuple[int, str]:
    """Line and text of the statement that a frame runs; of a multi-line call, the line that passes the ranges."""
    positions = list(frame.f_code.co_positions())[max(frame.f_lasti, 0) // 2]
    first, last = positions[0] or frame.f_lineno, positions[1] or frame.f_lineno
    lines = {n: linecache.getline(frame.f_code.co_filename, n).strip() for n in range(first, last + 1)}
    n = next((n for n, text in lines.items() if "range_constraints" in text), first)
    text = lines.get(n, "")
    return n, text + linecache.getline(frame.f_code.co_filename, n + 1).strip() if text.endswith("(") else text


def _line_of_node(frames: list[FrameType]) -> str:
    """The model's line for the FX node being processed: the innermost node in the locals of a frame."""
    for frame in frames:
        held = [*frame.f_locals.values(), getattr(frame.f_locals.get("self"), "node", None)]
        for value in held:
            if isinstance(value, torch.fx.Node) and (line := user_line(value.meta.get("stack_trace"))):
                return line
    return ""


def _source_line(file: str, line: int) -> str:
    return f"{short(file)}:{line}: {linecache.getline(file, line).strip()}"
