"""Quantised weights and states: rows of ggml's blocks, converted by ggml."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..errors import fail
from ..native import _native
from ..shapes.blocks import BLOCKS, STORED
from ..shapes.contract import DTYPE_OF, DTYPES, dtype_name

FLOAT16S = {name: dtype for dtype, name in DTYPES.items() if name in ("f16", "bf16")}
BYTES = "q8_0"  # dtype of a state with a u8 buffer: torch has no block dtypes, so a row is stored as its bytes


class Quantised(NamedTuple):
    """A weight [..., k] as its bytes.

    >>> q = quantise(torch.ones(2, 64), "q8_0")
    >>> q.raw.shape, torch.allclose(dequantise(q), torch.ones(2, 64), atol=1e-3)
    (torch.Size([2, 68]), True)
    """

    dtype: str  # one of STORED
    dims: tuple[int, ...]
    raw: torch.Tensor  # u8 [rows, bytes of a row]

    def check(self, subject: str) -> Quantised:
        """Raise if the bytes do not match the dims; returns self."""
        if self.dtype not in STORED:
            fail("quantise", subject, f"dtype {self.dtype!r} is not one of {', '.join(STORED)}")
        block, size = BLOCKS.get(self.dtype, (1, 2))
        rows = 1
        for d in self.dims[:-1]:
            rows *= d
        if not self.dims or self.dims[-1] % block:
            fail(
                "quantise",
                subject,
                f"its rows in {list(self.dims)} are not a multiple of {block} elements, as {self.dtype} needs",
            )
        expected = (rows, self.dims[-1] // block * size)
        if self.raw.dtype != torch.uint8 or tuple(self.raw.shape) != expected:
            have = f"{DTYPES.get(self.raw.dtype, self.raw.dtype)}{list(self.raw.shape)}"
            fail("quantise", subject, f"its bytes are {have}, expected u8{list(expected)}")
        return self

    def stored(self) -> torch.Tensor:
        """The tensor that is stored in a file: the bytes, or a tensor of 16-bit floats."""
        return self.raw.view(FLOAT16S[self.dtype]).reshape(self.dims) if self.dtype in FLOAT16S else self.raw


def fits(dims: tuple[int, ...], dtype: str) -> bool:
    """Whether the last dim is a multiple of the block size."""
    return bool(dims) and dims[-1] % BLOCKS.get(dtype, (1, 2))[0] == 0


def quantise(tensor: torch.Tensor, dtype: str) -> Quantised:
    """Quantise with ggml; the last dim is a row."""
    dims = tuple(tensor.shape)
    if dtype not in STORED:
        fail("quantise", f"dtype {dtype!r}", f"is not one of {', '.join(STORED)}")
    if not fits(dims, dtype):
        fail(
            "quantise",
            f"tensor {list(dims)}",
            f"its rows are not a multiple of {BLOCKS[dtype][0]} elements, as {dtype} needs",
        )
    if dtype in FLOAT16S:
        rows = tensor.detach().to(FLOAT16S[dtype]).contiguous().reshape(-1, dims[-1])
        return Quantised(dtype, dims, rows.view(torch.uint8))
    rows = tensor.detach().to(torch.float32).contiguous().reshape(-1, dims[-1])
    return Quantised(dtype, dims, torch.from_numpy(_native.quantise(rows.numpy(), dtype)))


def dequantise(q: Quantised) -> torch.Tensor:
    """Convert to f32."""
    q.check("weight")
    if q.dtype in FLOAT16S:
        return q.stored().float()
    return torch.from_numpy(_native.dequantise(q.raw.contiguous().numpy(), q.dtype)).reshape(q.dims)


def new_state(dims: tuple[int, ...], dtype: str) -> torch.Tensor:
    """A buffer of zeros for a state of f32, f16, bf16 or q8_0.

    >>> new_state((1, 2, 8, 64), "q8_0").shape
    torch.Size([1, 2, 8, 68])
    """
    if dtype != BYTES:
        return torch.zeros(dims, dtype=DTYPE_OF[dtype])
    block, size = BLOCKS[dtype]
    if not fits(dims, dtype):
        fail("lower", f"state {list(dims)}", f"its rows are not a multiple of {block} elements, as {dtype} needs")
    return torch.zeros(*dims[:-1], dims[-1] // block * size, dtype=torch.uint8)


def state_shape(buffer: torch.Tensor) -> tuple[str, tuple[int, ...]]:
    """Dtype and dims of the state that a buffer holds."""
    dims = tuple(buffer.shape)
    block, size = BLOCKS[BYTES]
    if buffer.dtype != torch.uint8 or not dims or dims[-1] % size:
        return dtype_name(buffer.dtype, "a state"), dims
    return BYTES, (*dims[:-1], dims[-1] // size * block)
