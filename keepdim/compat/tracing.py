"""Patches of torch.export: torch's own shape functions and decompositions that would fix a size at that of the example.

Decompositions that keepdim adds to a graph are in `capture/decompose.py`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any

import torch
from torch import _meta_registrations as torch_shapes
from torch._C import DispatchKey
from torch._decomp import decomposition_table
from torch._decomp.decompositions import slice_forward
from torch._dynamo.eval_frame import remove_from_cache
from torch._ops import OpOverload
from torch._subclasses import fake_impls, fake_tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from .patch import lasting, patch, wrapped

aten = torch.ops.aten
KEY = DispatchKey.CompositeImplicitAutograd
SDPA = aten.scaled_dot_product_attention.default
GRID = aten.affine_grid_generator.default
CHOSEN = aten.masked_select.default
LAYERS = (aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)


def _shapes(x: torch.Tensor, hx: torch.Tensor | Sequence[torch.Tensor],
            params: Sequence[torch.Tensor], has_biases: bool, num_layers: int, dropout: float, train: bool,
            bidirectional: bool, batch_first: bool) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """A recurrent layer's results without their values: the states of every step, then the last ones."""
    first = [hx] if isinstance(hx, torch.Tensor) else list(hx)
    size = first[0].size(-1) * (2 if bidirectional else 1)
    return (x.new_empty((x.size(0), x.size(1), size)), *(torch.empty_like(h) for h in first))


def _grid_sampler(mode: fake_tensor.FakeTensorMode, x: torch.Tensor, grid: torch.Tensor, *how: object) -> torch.Tensor:
    """torch computes a hundred ops and more for the shape of this one, each time that it is traced."""
    return x.new_empty((x.size(0), x.size(1), grid.size(1), grid.size(2)))


def _slice_copy(mode: fake_tensor.FakeTensorMode, x: torch.Tensor, *places: object, **named: object) -> torch.Tensor:
    """torch decides the ends of slice_copy for the example, and those of slice for every size; where they depend on
    data, it makes a new symbol."""
    sizes = [v for v in (*x.shape, *places, *named.values()) if isinstance(v, torch.SymInt)]
    form = slice_forward if any(map(free_unbacked_symbols, sizes)) else aten.slice.Tensor
    with mode:
        return x.new_empty(form(x, *places, **named).shape)


def _masked_select(theirs: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """torch bounds the result by the elements of x, which may be fewer than those of the mask."""

    def run(mode: object, func: object, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return theirs(mode, func, *torch.broadcast_tensors(x, mask))

    return run


def _pooled(n: int | torch.SymInt, kernel: int, before: int, after: int, stride: int, dilation: int,
            ceil: bool) -> int | torch.SymInt:  # fmt: skip
    """The size of a pool's result. With ceil_mode the last window must begin inside the input: torch checks that for
    the example, here it is the smaller of two sizes."""
    room = n + before + after - dilation * (kernel - 1) - 1
    if not ceil:
        return room // stride + 1
    return torch.sym_min((room + stride - 1) // stride, (n + before - 1) // stride) + 1


def _undecomposed(steps: Callable[..., object]) -> Callable[..., object]:
    """A recurrent layer over a symbolic length as one op: torch only traces it step by step."""

    def run(x: torch.Tensor, *args: Any) -> object:
        known = isinstance(x.size(1 if args[-1] else 0), int)
        # In a proxy mode the layer is being decomposed: then its steps are needed, even if that fixes the length.
        return steps(x, *args) if known or get_proxy_mode() is not None else _shapes(x, *args)

    return run


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
               *args: object, **kwargs: object) -> torch.Tensor:  # fmt: skip
    """Attention with its mask expanded: torch's decomposition asks whether there is one query."""
    mask = attn_mask
    if mask is not None and mask.dim() > 1 and isinstance(mask.size(-2), int) and mask.size(-2) == 1:
        mask = mask.expand(*mask.shape[:-2], query.size(-2), mask.size(-1))
    return SDPA._op_dk(KEY, query, key, value, mask, *args, **kwargs)


def _max_pool1d(x: torch.Tensor, kernel: int | Sequence[int], stride: int | Sequence[int] = (),
                padding: int | Sequence[int] = 0, dilation: int | Sequence[int] = 1,
                ceil: bool = False) -> torch.Tensor:  # fmt: skip
    """max_pool1d as max_pool2d: torch's decomposition reads the sizes as numbers."""

    def two(v: int | Sequence[int], first: int) -> list[int]:
        v = [v] if isinstance(v, int) else list(v)
        return [first, *v] if v else []

    wide = aten.max_pool2d.default(x.unsqueeze(-2), two(kernel, 1), two(stride, 1), two(padding, 0), two(dilation, 1),
                                   ceil)  # fmt: skip
    return wide.squeeze(-2)


def _cdist(x: torch.Tensor, y: torch.Tensor, p: float = 2.0, compute_mode: int | None = None) -> torch.Tensor:
    """cdist by differences at every size: torch uses matrix products from 26 points on."""
    return aten._cdist_forward.default(x, y, p, 2)


def _affine_grid(theta: torch.Tensor, size: Sequence[int | torch.SymInt], align_corners: bool) -> torch.Tensor:
    """The centres of pixels, or their edges, from -1 to 1, times theta: torch reads the sizes as numbers."""

    def line(n: int | torch.SymInt) -> torch.Tensor:
        steps = 2 * torch.arange(n, dtype=theta.dtype, device=theta.device) - (n - 1)
        return steps / (torch.sym_max(n - 1, 1) if align_corners else n)

    axes = torch.meshgrid(*(line(n) for n in size[2:]), indexing="ij")
    places = torch.stack([*reversed(axes), torch.ones_like(axes[0])], -1)  # [.., x y 1]
    grid = places.flatten(0, -2) @ theta.transpose(1, 2)
    return grid.view(size[0], *size[2:], grid.size(-1))


@lasting(
    of="torch",
    version="2.13.0",
    reason="outside Dynamo, torch.cond is compiled by it: what it still has of an earlier cond is tried first, and "
    "asks symbolic sizes whether they are the numbers of that one, which specialises them",
    upstream="torch.cond outside Dynamo is not compiled, or what is kept is not compared with symbols",
)
def forget_conds() -> None:
    """Dynamo forgets what it compiled of torch.cond. Nothing is restored: it compiles the next cond again."""
    for code in torch.cond.__code__.co_consts:
        if isinstance(code, CodeType):
            remove_from_cache(code)


# ---------------------------------------------------------------- patches
def _kernel(op: OpOverload, kernel: Callable[..., object]) -> contextlib.ExitStack:
    """Another decomposition of an op that torch decomposes in C++ or in Python. Ops cache what they found."""
    stack = contextlib.ExitStack()
    stack.callback(op._dispatch_cache.clear)
    stack.enter_context(wrapped(op.py_kernels, KEY, lambda theirs: kernel, functools.partial(op._op_dk, KEY)))
    op._dispatch_cache.clear()
    return stack


def _shape_functions(ours: Mapping[OpOverload, Callable[..., object]]) -> contextlib.AbstractContextManager[None]:
    """Shape functions that torch asks first, where a size is a symbol, for ops that have none there."""
    return wrapped(fake_tensor, "get_fast_op_impls", lambda theirs: lambda: {**theirs(), **ours})


@patch(
    of="torch",
    version="2.13.0",
    reason="attention asks whether there is one query for a mask with one row, which specialises the number of queries",
    upstream="scaled_dot_product_attention broadcasts its mask without asking for sizes",
)
def attention_masks() -> Iterator[None]:
    """A mask with one row is expanded to all queries."""
    with _kernel(SDPA, _attention):
        yield


@patch(
    of="torch",
    version="2.13.0",
    reason="max_pool1d reads its sizes as numbers, which specialises them",
    upstream="max_pool1d is decomposed with symbolic sizes",
)
def max_pool1d_as_2d() -> Iterator[None]:
    """max_pool1d is max_pool2d."""
    with _kernel(aten.max_pool1d.default, _max_pool1d):
        yield


@patch(
    of="torch",
    version="2.13.0",
    reason="cdist chooses between products and differences by the number of points, which bounds that number",
    upstream="cdist leaves the choice to its kernel",
)
def cdist_by_differences() -> Iterator[None]:
    """cdist computes differences at every size."""
    with _kernel(aten.cdist.default, _cdist):
        yield


@patch(
    of="torch",
    version="2.13.0",
    reason="a recurrent layer is traced step by step, which specialises its length",
    upstream="lstm, gru and rnn have shape functions, and stay one op in an exported program",
)
def recurrent_layers() -> Iterator[None]:
    """A recurrent layer over a length that is a symbol stays one op."""
    with contextlib.ExitStack() as stack:
        for layer in LAYERS:
            stack.enter_context(_kernel(layer, _undecomposed(layer.py_kernels[KEY])))
        shapes = {layer: lambda mode, *args, **kwargs: _shapes(*args, **kwargs) for layer in LAYERS}
        stack.enter_context(_shape_functions(shapes))
        yield


@patch(
    of="torch",
    version="2.13.0",
    reason="a pool with ceil_mode asks whether its last window begins inside the input, which bounds the input",
    upstream="pooling_output_shape_pad_lr takes the smaller of two sizes where they are symbols",
)
def ceil_mode_pool_sizes() -> Iterator[None]:
    """The size of a pool's result is an expression."""
    with wrapped(torch_shapes, "pooling_output_shape_pad_lr", lambda theirs: _pooled):
        yield


@patch(
    of="torch",
    version="2.13.0",
    reason="affine_grid_generator reads its sizes as numbers, which specialises them",
    upstream="its decomposition takes symbolic sizes",
)
def affine_grids() -> Iterator[None]:
    """The grid is computed from sizes that are symbols."""
    with wrapped(decomposition_table, GRID, lambda theirs: _affine_grid):
        yield


@patch(
    of="torch",
    version="2.13.0",
    reason="the result of masked_select is bounded by the elements of its input, which may be fewer than the mask's",
    upstream="its shape function bounds the result by the broadcast shape",
)
def masked_selections() -> Iterator[None]:
    """As many elements as the input and the mask have together, at most."""
    with wrapped(fake_impls.op_implementations_dict, CHOSEN, _masked_select):
        yield


@patch(
    of="torch",
    version="2.13.0",
    reason="slice_copy decides its ends for the example where slice keeps them for every size",
    upstream="slice_copy has the shape function of slice",
)
def copied_slices() -> Iterator[None]:
    """A copied slice has the shape of the slice."""
    with _shape_functions({aten.slice_copy.Tensor: _slice_copy}):
        yield


@patch(
    of="torch",
    version="2.13.0",
    reason="the shape of grid_sampler_2d is found by tracing more than a hundred ops",
    upstream="grid_sampler_2d has a shape function",
)
def grid_samples() -> Iterator[None]:
    """The shape of a sampled grid is that of the grid."""
    with _shape_functions({aten.grid_sampler_2d.default: _grid_sampler}):
        yield


@contextlib.contextmanager
def symbolic_sizes() -> Iterator[None]:
    """In this block, tracing keeps the sizes of these ops symbolic."""
    forget_conds()
    with contextlib.ExitStack() as stack:
        for made in (attention_masks, max_pool1d_as_2d, cdist_by_differences, recurrent_layers,
                     ceil_mode_pool_sizes, affine_grids, masked_selections, copied_slices, grid_samples):  # fmt: skip
            stack.enter_context(made())
        yield
