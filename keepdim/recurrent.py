"""Keeps recurrent layers whole in an exported graph. torch has only their steps one by one as shapes, and so would fix
the length of the sequence at the example's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._C import DispatchKey
from torch._subclasses.fake_impls import register_fast_op_impl
from torch.fx.experimental.proxy_tensor import get_proxy_mode

aten = torch.ops.aten
LAYERS = (aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)


def _shapes(x: torch.Tensor, hx: Any, params: Any, has_biases: bool, num_layers: int, dropout: float, train: bool,
            bidirectional: bool, batch_first: bool) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Results without their values: the states of every step, then the last ones."""
    first = [hx] if isinstance(hx, torch.Tensor) else list(hx)
    size = first[0].size(-1) * (2 if bidirectional else 1)
    return (x.new_empty((x.size(0), x.size(1), size)), *(torch.empty_like(h) for h in first))


for _layer in LAYERS:  # asked for shapes only, and only where a size is a symbol

    @register_fast_op_impl(_layer)
    def _fake(mode: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        return _shapes(*args, **kwargs)


@contextlib.contextmanager
def whole_layers() -> Iterator[None]:
    """While it lasts, tracing a recurrent layer over a length that is a symbol asks for shapes only."""
    key = DispatchKey.CompositeImplicitAutograd
    saved = {layer: layer.py_kernels[key] for layer in LAYERS}

    def traced(steps: Any) -> Any:
        def run(x: torch.Tensor, *args: Any) -> Any:
            known = isinstance(x.size(1 if args[-1] else 0), int)
            # A layer that is taken apart is recorded: then its steps are wanted, whatever becomes of the length.
            return steps(x, *args) if known or get_proxy_mode() is not None else _shapes(x, *args)

        return run

    def install(kernels: Any) -> None:
        for layer, kernel in kernels.items():
            layer.py_kernels[key] = kernel
            layer._dispatch_cache.clear()

    install({layer: traced(kernel) for layer, kernel in saved.items()})
    try:
        yield
    finally:
        install(saved)
