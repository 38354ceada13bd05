"""Kernels for the ops whose own ones in torch fix a size at the example's number while a model is traced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from types import CodeType
from typing import Any

import torch
from torch import _meta_registrations as torch_shapes
from torch._C import DispatchKey
from torch._decomp import decomposition_table
from torch._decomp.decompositions import slice_forward
from torch._dynamo.eval_frame import remove_from_cache
from torch._subclasses import fake_impls
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

aten = torch.ops.aten
KEY = DispatchKey.CompositeImplicitAutograd
SDPA = aten.scaled_dot_product_attention.default
GRID = aten.affine_grid_generator.default
LAYERS = (aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)


def _shapes(x: torch.Tensor, hx: Any, params: Any, has_biases: bool, num_layers: int, dropout: float, train: bool,
            bidirectional: bool, batch_first: bool) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """A recurrent layer's results without their values: the states of every step, then the last ones."""
    first = [hx] if isinstance(hx, torch.Tensor) else list(hx)
    size = first[0].size(-1) * (2 if bidirectional else 1)
    return (x.new_empty((x.size(0), x.size(1), size)), *(torch.empty_like(h) for h in first))


def _grid_sampler(mode: Any, x: torch.Tensor, grid: torch.Tensor, *how: Any) -> torch.Tensor:
    """torch computes a hundred ops and more for the shape of this one, each time that it is traced."""
    return x.new_empty((x.size(0), x.size(1), grid.size(1), grid.size(2)))


def _slice_copy(mode: Any, x: torch.Tensor, *places: Any, **named: Any) -> torch.Tensor:
    """torch takes the ends of a copied slice for the example, and those of a slice for every size; where data decides
    them, it makes up a size."""
    sizes = [v for v in (*x.shape, *places, *named.values()) if isinstance(v, torch.SymInt)]
    form = slice_forward if any(map(free_unbacked_symbols, sizes)) else aten.slice.Tensor
    with mode:
        return x.new_empty(form(x, *places, **named).shape)


def _masked_select(mode: Any, func: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """torch bounds the result by the elements of x, which may be fewer than those of the mask."""
    return fake_impls.masked_select(mode, func, *torch.broadcast_tensors(x, mask))


def _pooled(n: Any, kernel: Any, before: Any, after: Any, stride: Any, dilation: Any, ceil: bool) -> Any:
    """The size of a pool's result. Rounded up it may not begin behind the input: torch asks that of the example, here
    it is the smaller of two sizes."""
    room = n + before + after - dilation * (kernel - 1) - 1
    if not ceil:
        return room // stride + 1
    return torch.sym_min((room + stride - 1) // stride, (n + before - 1) // stride) + 1


def _whole(steps: Any) -> Any:
    """A recurrent layer kept whole over a length that is a symbol: torch has only its steps, one by one."""

    def run(x: torch.Tensor, *args: Any) -> Any:
        known = isinstance(x.size(1 if args[-1] else 0), int)
        # A layer that is taken apart is recorded: then its steps are wanted, whatever becomes of the length.
        return steps(x, *args) if known or get_proxy_mode() is not None else _shapes(x, *args)

    return run


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
               *args: Any, **kwargs: Any) -> Any:  # fmt: skip
    """Attention with its mask as large as it is used: torch's own form asks whether there is one query."""
    mask = attn_mask
    if mask is not None and mask.dim() > 1 and isinstance(mask.size(-2), int) and mask.size(-2) == 1:
        mask = mask.expand(*mask.shape[:-2], query.size(-2), mask.size(-1))
    return SDPA._op_dk(KEY, query, key, value, mask, *args, **kwargs)


def _max_pool1d(x: Any, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil: bool = False) -> Any:
    """max_pool1d as max_pool2d: torch's own form reads the sizes as numbers."""

    def two(v: Any, first: int) -> list[int]:
        v = [v] if isinstance(v, int) else list(v)
        return [first, *v] if v else []

    wide = aten.max_pool2d.default(x.unsqueeze(-2), two(kernel, 1), two(stride, 1), two(padding, 0), two(dilation, 1),
                                   ceil)  # fmt: skip
    return wide.squeeze(-2)


def _cdist(x: torch.Tensor, y: torch.Tensor, p: float = 2.0, compute_mode: int | None = None) -> Any:
    """Distances by differences at every size: torch's own form takes products from 26 points on."""
    return aten._cdist_forward.default(x, y, p, 2)


def _affine_grid(theta: torch.Tensor, size: Any, align_corners: bool) -> torch.Tensor:
    """The centres of pixels, or their edges, from -1 to 1, times theta: torch's own form reads the sizes as numbers."""

    def line(n: Any) -> torch.Tensor:
        steps = 2 * torch.arange(n, dtype=theta.dtype, device=theta.device) - (n - 1)
        return steps / (torch.sym_max(n - 1, 1) if align_corners else n)

    axes = torch.meshgrid(*(line(n) for n in size[2:]), indexing="ij")
    places = torch.stack([*reversed(axes), torch.ones_like(axes[0])], -1)  # [.., x y 1]
    grid = places.flatten(0, -2) @ theta.transpose(1, 2)
    return grid.view(size[0], *size[2:], grid.size(-1))


def forget_conds() -> None:
    """Outside Dynamo, torch.cond is compiled by it. What Dynamo still has of an earlier cond is tried first, and asks
    symbolic sizes whether they are the numbers of that one, which fixes them."""
    for code in torch.cond.__code__.co_consts:
        if isinstance(code, CodeType):
            remove_from_cache(code)


# What has a shape function of ours: asked for shapes only, and only where a size is a symbol.
SHAPES: dict[Any, Any] = {
    **{layer: lambda mode, *args, **kwargs: _shapes(*args, **kwargs) for layer in LAYERS},
    aten.grid_sampler_2d.default: _grid_sampler,
    aten.slice_copy.Tensor: _slice_copy,
}
CHOSEN = aten.masked_select.default


@contextlib.contextmanager
def _with(table: Any, entries: Mapping[Any, Any]) -> Iterator[None]:
    """A table of torch's with other entries."""
    before = {key: table.get(key) for key in entries}
    table.update(entries)
    try:
        yield
    finally:
        for key, entry in before.items():
            if entry is None:
                del table[key]
            else:
                table[key] = entry


@contextlib.contextmanager
def symbolic_sizes() -> Iterator[None]:
    """While it lasts, tracing keeps the sizes of these ops symbolic."""
    forget_conds()
    ours = {SDPA: _attention, aten.max_pool1d.default: _max_pool1d, aten.cdist.default: _cdist}
    ours |= {layer: _whole(layer.py_kernels[KEY]) for layer in LAYERS}
    with contextlib.ExitStack() as stack:
        for op, kernel in ours.items():
            stack.callback(op._dispatch_cache.clear)  # before and after
            op._dispatch_cache.clear()
            stack.enter_context(_with(op.py_kernels, {KEY: kernel}))
        stack.enter_context(_with(vars(torch_shapes), {"pooling_output_shape_pad_lr": _pooled}))
        stack.enter_context(_with(decomposition_table, {GRID: _affine_grid}))
        stack.enter_context(_with(fake_impls.op_implementations_dict, {CHOSEN: _masked_select}))
        stack.enter_context(_with(fake_impls.get_fast_op_impls(), SHAPES))
        yield
