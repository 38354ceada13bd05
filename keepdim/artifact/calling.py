"""The calling convention of a lowered program: arguments to flat inputs, outputs to the model's return structure.

The sizes are bound to symbols and checked in C++ (`runtime/core/contract.cpp`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.utils._pytree as pytree

from ..errors import KeepdimError, describe_exception, fail
from ..native import _native
from .signature import Signature


class CallProtocol:
    """Calls of one method: flatten, check against the contract, pack; unflatten the outputs."""

    def __init__(self, signature: Signature):
        self.signature, self.contract = signature, signature.contract
        self._count = len(self.contract.inputs)
        self._checker: _native.Contract | None = None
        self._flat_call = signature.in_spec == pytree.tree_structure((tuple(range(self._count)), {}))
        self._one_output = signature.out_spec == pytree.tree_structure(0)
        # Integers that are passed as tensors, and constant arguments, need packing.
        self._packs = any(t.kind for t in signature.transports) or any(
            s.dtype == "python" for s in self.contract.inputs
        )

    @property
    def checker(self) -> _native.Contract:
        """The contract in C++, which checks calls and results."""
        if self._checker is None:  # not a cached_property: its lock, if another thread holds it, stays locked in a fork
            self._checker = _native.Contract(self.contract.to_json())
        return self._checker

    def flatten(self, args: tuple[object, ...], kwargs: dict[str, object]) -> Sequence[object]:
        """The arguments in the contract's order."""
        if self._flat_call and len(args) == self._count and not kwargs:
            return args
        return self.signature.flatten(args, kwargs)

    def inputs(self, flat: Sequence[object]) -> list[object]:
        """The method's inputs, checked against the contract: dense tensors on the CPU."""
        try:
            inputs = self.checker.inputs(flat)
        except _native.Error as e:
            raise KeepdimError(str(e)) from None
        except RuntimeError as e:  # raised by torch
            self.refuse_memory(flat, e)
        return self.signature.pack(flat) if self._packs else inputs

    def refuse_memory(self, flat: Sequence[object], e: RuntimeError) -> None:
        """Raise the error for a tensor without accessible memory."""
        for i, (spec, x) in enumerate(zip(self.contract.inputs, flat, strict=False)):
            if isinstance(x, torch.Tensor) and not is_dense(x):
                fail("bind", f"input {i} {spec.name!r}", f"is {layout_text(x)}", "Give a dense tensor on the CPU", e)
        fail("bind", "call", f"torch gives no memory for an input or a result ({describe_exception(e)})",
             "Call outside of torch.vmap, torch.func and FakeTensorMode, with plain tensors", e)  # fmt: skip

    def result(self, outputs: list[object]) -> object:
        """The outputs in the structure that the model returns."""
        return outputs[0] if self._one_output else self.signature.unflatten(outputs)


def is_dense(x: torch.Tensor) -> bool:
    """Whether it is a dense tensor on the CPU."""
    return x.layout == torch.strided and x.device.type == "cpu"


def layout_text(x: torch.Tensor) -> str:
    """`torch.sparse_coo on cpu`"""
    return f"{x.layout} on {x.device}"
