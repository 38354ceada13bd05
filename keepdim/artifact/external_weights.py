"""Weights that stay in the file they came from and are mapped from there.

A lowered file then holds `Spans`: the name of that file, the hash of its content, and where each weight lies in it.
Nothing of the file's own format is read when it is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from ..cache import content_hash
from ..errors import fail

AGAIN = "Give the file it was lowered from, or lower the model again"


class Spans(msgspec.Struct, frozen=True):
    """Weights of a lowered file that lie in another one."""

    name: str  # of the file, without a folder
    size: int
    sha256: str  # of all its bytes
    spans: dict[str, tuple[int, int]]  # key of a weight → offset, bytes

    def find(self, path: Path, given: Path | None = None) -> Path:
        """The file for the lowered one at `path`: given, or beside it; of the size and content it had."""
        if Path(self.name).name != self.name or not all(self._inside(*s) for s in self.spans.values()):
            fail("load", str(path), f"its table of weights in {self.name!r} is not valid", "Lower the model again")
        file = given if given is not None else path.parent / self.name
        if not file.is_file():
            where = "which is not beside it" if given is None else f"and {str(file)!r} does not exist"
            fail("load", str(path), f"its weights lie in {self.name!r}, {where}",
                 "Put the file there, or say where it is with weights=")  # fmt: skip
        if (size := file.stat().st_size) != self.size:
            fail("load", str(file), f"has {size} bytes, and {path.name} was lowered from {self.size}", AGAIN)
        if content_hash(file) != self.sha256:
            fail("load", str(file), f"its content is not what {path.name} was lowered from", AGAIN)
        return file

    def _inside(self, offset: int, count: int) -> bool:
        return 0 <= offset and 0 <= count and offset + count <= self.size


class Source(NamedTuple):
    """A file that is being read, of which tensors are views."""

    path: Path
    data: torch.Tensor  # u8: all of it, mapped

    def span(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """Where a tensor lies in the file; None where it lies elsewhere, or not as the file has it."""
        if tensor.untyped_storage().data_ptr() != self.data.untyped_storage().data_ptr() or not tensor.is_contiguous():
            return None
        return tensor.data_ptr() - self.data.data_ptr(), tensor.nbytes

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is mapped."""
        return self.span(tensor) is not None

    def table(self, weights: Mapping[str, torch.Tensor]) -> Spans:
        """Those of the weights that lie in the file."""
        spans = {key: span for key, w in weights.items() if (span := self.span(w)) is not None}
        return Spans(self.path.name, len(self.data), content_hash(self.path), spans)


__all__ = ["Source", "Spans"]
