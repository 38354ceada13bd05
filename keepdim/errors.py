"""The one error of keepdim: a sentence that says where, what, with which values, and what to do."""

from __future__ import annotations

import importlib
import re
import textwrap
from typing import Any, NoReturn


class KeepdimError(RuntimeError):
    """Anything keepdim refuses, as `[stage] subject: fact (values). remedy`.

    >>> try:
    ...     fail("bind", "input 0 'x' dim 1", "seq_len = 257 is out of range 1..256")
    ... except KeepdimError as e:
    ...     print(e, "|", e.stage)
    [bind] input 0 'x' dim 1: seq_len = 257 is out of range 1..256. | bind
    """

    @property
    def stage(self) -> str:
        """The word in the brackets: where it was refused."""
        text = str(self)
        return text[1 : text.index("]")] if text.startswith("[") and "]" in text else ""


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # what a file wrote could steer a terminal


def sentence(stage: str, subject: str, fact: str, remedy: str = "") -> str:
    """Compose the one form of our messages.

    >>> sentence("lower", "dim 's'", "has no upper bound", "Give the Dim a max")
    "[lower] dim 's': has no upper bound. Give the Dim a max."
    """
    parts = [p.strip().removesuffix(".") for p in (fact, remedy)]
    text = f"[{stage}] {subject}: " + " ".join(p + "." for p in parts if p)
    return _CONTROL.sub(lambda c: f"\\x{ord(c[0]):02x}", text)


def fail(stage: str, subject: str, fact: str, remedy: str = "", cause: BaseException | None = None) -> NoReturn:
    """Raise the sentence as a KeepdimError."""
    raise KeepdimError(sentence(stage, subject, fact, remedy)) from cause


def sentence_of(e: BaseException) -> str:
    """An exception's text in one line; of a list, as torch.export gives of what it cannot keep, what is listed.

    >>> sentence_of(ValueError("Constraints violated (n)! See the log.\\n  - n is 3. Mark it otherwise.\\n  - m is 4."))
    'n is 3; m is 4'
    """
    text = str(e)
    listed = re.findall(r"^ +- (.+?)(?:\.(?= )|\.?$)", text, re.MULTILINE)
    return textwrap.shorten("; ".join(listed) or text, 300, placeholder=" …").rstrip(".")


def told(e: BaseException) -> str:
    """Which kind of exception, and its text if it has one.

    >>> told(KeyError("x")), told(AssertionError())
    ("KeyError: 'x'", 'AssertionError')
    """
    return ": ".join(filter(None, (type(e).__name__, sentence_of(e))))


def optional(stage: str, package: str, extra: str = "hf") -> Any:
    """A module of an optional dependency, or the sentence that says how to have it.

    >>> optional("embed", "json").dumps([1])
    '[1]'
    """
    try:
        return importlib.import_module(package)
    except ImportError as e:
        fail(stage, package, "is not installed", f"Install the extra: pip install 'keepdim[{extra}]'", e)
