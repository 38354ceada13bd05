"""Where in somebody's code something happened: the frame that asked, and the line of the user's model behind it."""

from __future__ import annotations

import inspect
import linecache
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import torch

_HERE = str(Path(__file__).parent)
_STDLIB = sysconfig.get_path("stdlib")
_TRACE = re.compile(r'File "(.+?)", line (\d+), in \S+\n\s*(.*)')


class Place(msgspec.Struct, frozen=True):
    """A function and a line of it, and the line of the model that it was working on, where torch recorded one."""

    function: str
    file: str
    line: int
    code: str = ""
    user_line: str = ""

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"


def short(file: str) -> str:
    """A path from its package on, or from the working folder on, or as it is."""
    head, found, tail = file.rpartition("/site-packages/")
    return tail if found else file.removeprefix(f"{Path.cwd()}/")


def of_function(function: Any) -> Place:
    """Where a function or a method begins, below what decorates it."""
    function = inspect.unwrap(function)
    cells = [c.cell_contents for c in getattr(function, "__closure__", None) or ()]
    if (
        getattr(function, "__name__", "") == "wrapper"
        and (inner := next(filter(inspect.isfunction, cells), None)) is not None
    ):
        return of_function(inner)  # exir's own decorators do not say what they wrap
    if (code := getattr(function, "__code__", None)) is None:
        return Place(str(function), "", 0)
    return Place(code.co_qualname, short(code.co_filename), code.co_firstlineno)


def of_caller(tracing: bool, inside: str = "") -> Place:
    """The innermost frame that is not torch's own, `inside` a pass; while a model is traced, with the line of it."""
    frames = list(_frames())
    theirs = next((f for f in frames if not _torch(f)), frames[0])
    line = _line_of_node(frames)
    if not line and tracing and (user := next((f for f in frames if _users(f)), None)) is not None:
        line = _shown(user.f_code.co_filename, user.f_lineno)
    name = theirs.f_code.co_qualname
    name = name if not inside or name.startswith(inside) else f"{name} in {inside}"
    return Place(name, short(theirs.f_code.co_filename), *_statement(theirs), line)


def of_error(e: BaseException) -> Place | None:
    """The same of an error that was raised."""
    theirs = [f for f, _ in traceback.walk_tb(e.__traceback__) if _nameable(f) and not _torch(f)]
    if not theirs:
        return None
    return Place(theirs[-1].f_code.co_qualname, short(theirs[-1].f_code.co_filename), *_statement(theirs[-1]))


def user_line(trace: str | None) -> str:
    """The last line of a model in a stack trace that torch keeps."""
    found = [m for m in _TRACE.findall(trace or "") if "/site-packages/" not in m[0]]
    return f"{short(found[-1][0])}:{found[-1][1]}: {found[-1][2].strip()}" if found else ""


def of_guard(guard: Any) -> Place | None:
    """Where torch.export came to rely on something."""
    at = guard.sloc.framework_loc
    if at is None or isinstance(at, str):
        return None
    mine = "/site-packages/" not in at.filename
    line = _shown(at.filename, at.lineno) if mine else ""
    return Place(at.name, short(at.filename), at.lineno, (at.line or "").strip(), line)


def _frames() -> Iterator[FrameType]:
    """From the innermost outwards."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if _nameable(frame):
            yield frame
        frame = frame.f_back


def _nameable(frame: FrameType) -> bool:
    """Not of this package, nor of the standard library."""
    file = frame.f_code.co_filename
    return not file.startswith((_HERE, "<")) and ("site-packages" in file or not file.startswith(_STDLIB))


def _torch(frame: FrameType) -> bool:
    return short(frame.f_code.co_filename).startswith(("torch/", "sympy/"))


def _users(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return "/site-packages/" not in file and not file.startswith(str(Path(_HERE).parent))


def _statement(frame: FrameType) -> tuple[int, str]:
    """Line and text of what a frame does: of a call over several lines, the one that hands ranges over."""
    positions = list(frame.f_code.co_positions())[max(frame.f_lasti, 0) // 2]
    first, last = positions[0] or frame.f_lineno, positions[1] or frame.f_lineno
    lines = {n: linecache.getline(frame.f_code.co_filename, n).strip() for n in range(first, last + 1)}
    n = next((n for n, text in lines.items() if "range_constraints" in text), first)
    text = lines.get(n, "")
    return n, text + linecache.getline(frame.f_code.co_filename, n + 1).strip() if text.endswith("(") else text


def _line_of_node(frames: list[FrameType]) -> str:
    """The model's line of the node that was being worked on: the innermost one that some frame holds."""
    for frame in frames:
        held = [*frame.f_locals.values(), getattr(frame.f_locals.get("self"), "node", None)]
        for value in held:
            if isinstance(value, torch.fx.Node) and (line := user_line(value.meta.get("stack_trace"))):
                return line
    return ""


def _shown(file: str, line: int) -> str:
    return f"{short(file)}:{line}: {linecache.getline(file, line).strip()}"
