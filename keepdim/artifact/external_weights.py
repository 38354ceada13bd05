"""Weights that stay in their original file and are mapped from there.

A lowered file then stores `Spans`: the name of that file, the hash of its content, and the offset of each weight. Its
format is not parsed at load.
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
    """Weights of a lowered file that are stored in another one."""

    name: str  # of the file, without a folder
    size: int
    sha256: str  # of all its bytes
    spans: dict[str, tuple[int, int]]  # key of a weight → offset, bytes

    def find(self, path: Path, given: Path | None = None) -> Path:
        """The weight file of the lowered file at `path`: `given`, or in its folder; size and hash are checked."""
        if Path(self.name).name != self.name or not all(self._inside(*s) for s in self.spans.values()):
            fail("load", str(path), f"its table of weights in {self.name!r} is not valid", "Lower the model again")
        file = given if given is not None else path.parent / self.name
        if not file.is_file():
            where = "which is not in the same folder" if given is None else f"and {str(file)!r} does not exist"
            fail("load", str(path), f"its weights are in {self.name!r}, {where}",
                 "Put the file there, or say where it is with weights=")  # fmt: skip
        if (size := file.stat().st_size) != self.size:
            fail("load", str(file), f"has {size} bytes, and {path.name} was lowered from {self.size}", AGAIN)
        if content_hash(file) != self.sha256:
            fail("load", str(file), f"its content is not what {path.name} was lowered from", AGAIN)
        return file

    def _inside(self, offset: int, count: int) -> bool:
        return 0 <= offset and 0 <= count and offset + count <= self.size


class MappedFile(NamedTuple):
    """A mapped file that tensors are views of."""

    path: Path
    data: torch.Tensor  # u8: all of it, mapped

    def span(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """(offset, bytes) of a tensor in the file; None if it is not a contiguous view of it."""
        if tensor.untyped_storage().data_ptr() != self.data.untyped_storage().data_ptr() or not tensor.is_contiguous():
            return None
        return tensor.data_ptr() - self.data.data_ptr(), tensor.nbytes

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is mapped."""
        return self.span(tensor) is not None

    def table(self, weights: Mapping[str, torch.Tensor]) -> Spans:
        """The spans of the weights that are in the file."""
        spans = {key: span for key, w in weights.items() if (span := self.span(w)) is not None}
        return Spans(self.path.name, len(self.data), content_hash(self.path), spans)


__all__ = ["MappedFile", "Spans"]
