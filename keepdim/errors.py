"""keepdim's error type: a sentence with the stage, the subject, the fact with its values, and the remedy.

The sentences themselves are where they are raised; docs/reference/errors.md lists them with their files. Those about
the sizes and dtypes of a call are in runtime/core/contract.cpp.
"""

from __future__ import annotations

import importlib
import re
import textwrap
from typing import Any, NoReturn


class KeepdimError(RuntimeError):
    """Every error of keepdim, in the form `[stage] subject: fact (values). remedy`.

    >>> try:
    ...     fail("bind", "input 0 'x' dim 1", "seq_len = 257 is out of range 1..256")
    ... except KeepdimError as e:
    ...     print(e, "|", e.stage)
    [bind] input 0 'x' dim 1: seq_len = 257 is out of range 1..256. | bind
    """

    @property
    def stage(self) -> str:
        """The word in the brackets: the stage that failed."""
        text = str(self)
        return text[1 : text.index("]")] if text.startswith("[") and "]" in text else ""


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # text from a file could contain terminal control codes


def sentence(stage: str, subject: str, fact: str, remedy: str = "") -> str:
    """Compose an error message.

    >>> sentence("lower", "dim 's'", "has no upper bound", "Give the Dim a max")
    "[lower] dim 's': has no upper bound. Give the Dim a max."
    """
    parts = [p.strip().removesuffix(".") for p in (fact, remedy)]
    text = f"[{stage}] {subject}: " + " ".join(p + "." for p in parts if p)
    return _CONTROL.sub(lambda c: f"\\x{ord(c[0]):02x}", text)


def fail(stage: str, subject: str, fact: str, remedy: str = "", cause: BaseException | None = None) -> NoReturn:
    """Raise a KeepdimError with this message."""
    raise KeepdimError(sentence(stage, subject, fact, remedy)) from cause


_DEBUGGING = re.compile(r"\s*For more information[^.\n]*(?:see:|run with TORCH_LOGS).*")  # torch's way to see more


def sentence_of(e: BaseException) -> str:
    """An exception's text in one line; for a list, as in torch.export's constraint violations, the listed items.

    >>> sentence_of(ValueError("Constraints violated (n)! See the log.\\n  - n is 3. Mark it otherwise.\\n  - m is 4."))
    'n is 3; m is 4'
    """
    text = _DEBUGGING.sub("", str(e))
    listed = re.findall(r"^ +- (.+?)(?:\.(?= )|\.?$)", text, re.MULTILINE)
    return textwrap.shorten("; ".join(listed) or text, 300, placeholder=" …").rstrip(".")


def describe_exception(e: BaseException) -> str:
    """The type of an exception, and its text if it has one.

    >>> describe_exception(KeyError("x")), describe_exception(AssertionError())
    ("KeyError: 'x'", 'AssertionError')
    """
    return ": ".join(filter(None, (type(e).__name__, sentence_of(e))))


def optional(stage: str, package: str, extra: str = "hf") -> Any:
    """Import an optional dependency; if it is missing, the error says how to install it.

    >>> optional("embed", "json").dumps([1])
    '[1]'
    """
    try:
        return importlib.import_module(package)
    except ImportError as e:
        fail(stage, package, "is not installed", f"Install the extra: pip install 'keepdim[{extra}]'", e)
