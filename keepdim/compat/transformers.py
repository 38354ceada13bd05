"""What we change in transformers while it reads a folder or a decoder is exported, and in gguf while transformers reads
a file with it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from ..errors import optional
from .patch import patch, swapped, wrapped


@patch(
    of="transformers",
    version="5.22.2",
    reason="trust_remote_code=False does not reach the models inside a model: their Python code is run, or the user is "
    "asked on standard input",
    upstream="from_pretrained hands trust_remote_code to every config and model that it makes",
)
def no_remote_code() -> Iterator[None]:
    """transformers neither runs Python of a folder in this thread, nor asks on standard input whether to."""
    module = optional("load", "transformers.dynamic_module_utils")

    def refused(run: Callable[..., object]) -> Callable[..., object]:
        def get_class_in_module(*args: object, **kwargs: object) -> object:
            raise ValueError("trust_remote_code is False")

        return get_class_in_module

    with wrapped(module, "get_class_in_module", refused), swapped(module, "TIME_OUT_REMOTE_CODE", 0):
        yield


@functools.cache
def fast_reader() -> Any:
    """The reader of gguf with lists read at once: its own makes several arrays for each element, one by one."""
    package = optional("load", "gguf")
    kinds, slow = package.GGUFValueType, package.GGUFReader

    class FastGgufReader(slow):  # type: ignore[misc, valid-type]
        def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[np.ndarray], list[int], list[int]]:
            if raw_type != kinds.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            kind, count = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
            start, n = orig_offs + 12, int(count[0])
            types = [kinds.ARRAY, kinds(int(kind[0]))] if n else [kinds.ARRAY]
            if (number := self.gguf_scalar_to_np.get(kinds(int(kind[0])))) is not None:
                values = self._get(start, number, n)
                parts = list(np.asarray(values).reshape(n, 1))
                return 12 + values.nbytes, [kind, count, *parts], list(range(2, n + 2)), types
            raw, at, parts = np.asarray(self.data), start, []
            for _ in range(n):
                length = raw[at : at + 8].view(np.uint64)
                end = at + 8 + int(length[0])
                parts += [length, raw[at + 8 : end]]
                at = end
            return at - orig_offs, [kind, count, *parts], list(range(3, 2 * n + 3, 2)), types

    return FastGgufReader


@patch(
    of="gguf",
    version="0.19.0",
    reason="transformers reads the head of a file with gguf's reader, which takes seconds for the list of tokens",
    upstream="GGUFReader reads an array of numbers or strings at once",
)
def fast_gguf_lists() -> Iterator[None]:
    """The reader of gguf is the fast one, for whoever imports it."""
    with swapped(optional("load", "gguf"), "GGUFReader", fast_reader()):
        yield


# ---------------------------------------------------------------- a decoder while it is exported
@patch(
    of="transformers",
    version="5.22.2",
    reason="a model finds its attention by name in a table of the process, and what is registered there stays, with "
    "the model that it belongs to",
    upstream="a model takes a function as its attention, or AttentionInterface can forget a name",
)
def replace_attention(model: Any, name: str, attend: Callable[..., object]) -> Iterator[None]:
    """The attention of all layers of a model is `attend`, which transformers knows as `name` until the block ends."""
    table = optional("lower", "transformers").AttentionInterface._global_mapping
    before = model.config._attn_implementation
    with swapped(table, name, attend):
        try:
            model.set_attn_implementation(name)
            yield
        finally:
            model.set_attn_implementation(before)


@patch(
    of="transformers",
    version="5.22.2",
    reason="rope of the kinds dynamic and longrope computes its frequencies anew from the positions of a call, and the "
    "keys in a cache were rotated with those of earlier calls",
    upstream="a rotary embedding can be told to keep the frequencies of a short sequence",
)
def fixed_ropes(ropes: Iterable[torch.nn.Module]) -> Iterator[None]:
    """These rotary embeddings keep the frequencies of a short sequence."""
    with contextlib.ExitStack() as stack:
        for rope in ropes:
            stack.callback(_set_rope, rope, rope.rope_type, rope.inv_freq)
            _set_rope(rope, "default", rope.original_inv_freq)
        yield


def _set_rope(rope: torch.nn.Module, kind: str, frequencies: torch.Tensor) -> None:
    rope.rope_type, rope.inv_freq = kind, frequencies


@patch(
    of="transformers",
    version="5.22.2",
    reason="keys and values of earlier calls are an argument of a model, and not state of its layers, which "
    "torch.export could carry",
    upstream="layers can hold their keys and values as buffers",
)
def layer_buffers(buffers: Mapping[torch.nn.Module, Mapping[str, torch.Tensor]]) -> Iterator[None]:
    """Layers have these buffers as well, which are not saved with the model."""
    with contextlib.ExitStack() as stack:
        for layer, named in buffers.items():
            for name, data in named.items():
                layer.register_buffer(name, data, persistent=False)
                stack.callback(delattr, layer, name)
        yield
