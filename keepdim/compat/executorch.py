"""What we change in ExecuTorch's flow, and what we set in its managers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from typing import TYPE_CHECKING

import torch
from executorch.exir import tensor as exir_tensor
from executorch.exir.backend.backend_details import BackendDetails
from executorch.exir.backend.compile_spec_schema import CompileSpec
from executorch.exir.delegate import executorch_call_delegate
from executorch.exir.program import _program
from torch._ops import OpOverload
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.fx import Node as FxNode
from torch.fx.node import _side_effectful_functions

from .patch import native, patch, wrapped, write

if TYPE_CHECKING:
    from executorch.exir import EdgeProgramManager, ExecutorchBackendConfig, ExecutorchProgramManager

nonzero = torch.ops.aten.nonzero.default


@patch(
    of="torch",
    version="2.13.0",
    reason="torch gives the result of nonzero column-major strides, and ExecuTorch's kernel writes row-major: planned "
    "as column-major, the result is read wrongly",
    upstream="ExecuTorch's kernel writes in the dim order of its out tensor, or its passes make the result row-major",
)
def row_major_nonzero() -> Iterator[None]:
    """The result of nonzero is laid out as ExecuTorch's kernel writes it."""

    def by_rows(by_columns: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def shape_of(mode: FakeTensorMode, func: OpOverload, x: torch.Tensor) -> torch.Tensor:
            return x.new_empty(by_columns(mode, func, x).shape, dtype=torch.int64)

        return shape_of

    with wrapped(fake_impls.op_implementations_dict, nonzero, by_rows):
        yield


@patch(
    of="executorch",
    version="1.5.1",
    reason="a result that is empty at the example's sizes has strides of 0, from which no dim order can be computed",
    upstream="dim_order_from_stride takes strides of 0 where a size is a symbol",
)
def dim_order_of_empty_results() -> Iterator[None]:
    """The dim order is computed from the upper bounds of strides."""

    def by_bounds(order: Callable[[Sequence[int]], object]) -> Callable[[Sequence[int | torch.SymInt]], object]:
        def found(strides: Sequence[int | torch.SymInt]) -> object:
            nodes = [s.node if isinstance(s, torch.SymInt) else None for s in strides]
            if any(n is not None and n.has_hint() and n.hint == 0 for n in nodes):
                pairs = zip(nodes, strides, strict=True)
                strides = [int(n.shape_env.bound_sympy(n.expr).upper) if n else s for n, s in pairs]
            return order(strides)

        return found

    with wrapped(exir_tensor, "dim_order_from_stride", by_bounds):
        yield


@contextlib.contextmanager
def as_kernels_write() -> Iterator[None]:
    """Tensors are laid out as ExecuTorch's kernels write them."""
    with row_major_nonzero(), dim_order_of_empty_results():
        yield


@patch(
    of="executorch",
    version="1.5.1",
    reason="ops that a partitioner asks not to decompose are kept in branches, but decomposed in nested branches",
    upstream="get_control_flow_submodules, or its callers, recurse into the submodules that it finds",
)
def inner_branches() -> Iterator[None]:
    """ExecuTorch's flow finds branches at every depth."""

    def at_every_depth(
        outer: Callable[[GraphModule], list[tuple[str, GraphModule, FxNode]]],
    ) -> Callable[[GraphModule], list[tuple[str, GraphModule, FxNode]]]:
        def all_of(gm: GraphModule) -> list[tuple[str, GraphModule, FxNode]]:
            found = outer(gm)
            return found + [inner for _, body, _ in found for inner in all_of(body)]

        return all_of

    with wrapped(_program, "get_control_flow_submodules", at_every_depth):
        yield


@patch(
    of="torch",
    version="2.13.0",
    reason="a delegate's call without results, which checks the contract, is removed as dead code",
    upstream="ExecuTorch declares executorch_call_delegate as an op with side effects",
)
def delegate_calls_kept() -> Iterator[None]:
    """No pass removes a delegate's call because it has no results."""
    new = executorch_call_delegate not in _side_effectful_functions
    _side_effectful_functions.add(executorch_call_delegate)
    try:
        yield
    finally:
        if new:
            _side_effectful_functions.discard(executorch_call_delegate)


@patch(
    of="executorch",
    version="1.5.1",
    reason="watching a flow needs the begin and end of each backend's preprocess, which ExecuTorch does not report",
    upstream="to_backend takes a callback around preprocess",
)
def around_preprocess(
    around: Callable[[type[BackendDetails], ExportedProgram], AbstractContextManager[None]],
) -> Iterator[None]:
    """Every backend's preprocess runs inside `around(backend, program)`."""

    def watched(cls: type[BackendDetails]) -> Callable[[Callable[..., object]], Callable[..., object]]:
        def wrap(original: Callable[..., object]) -> Callable[..., object]:
            @wraps(original)
            def preprocess(program: ExportedProgram, specs: list[CompileSpec]) -> object:
                with around(cls, program):
                    return original(program, specs)

            return preprocess

        return wrap

    with contextlib.ExitStack() as stack:
        for cls in BackendDetails.__subclasses__():
            if "preprocess" in vars(cls):
                stack.enter_context(wrapped(cls, "preprocess", watched(cls)))
        yield


@write(
    of="executorch",
    version="1.5.1",
    reason="the signature of a method is known after it was lowered, and constant methods are given before",
    upstream="EdgeProgramManager takes constant methods until to_executorch",
)
def set_constant_methods(manager: EdgeProgramManager, methods: Mapping[str, object]) -> None:
    """Constant methods of an EdgeProgramManager, instead of those that it has."""
    manager._config_methods = methods


@write(
    of="executorch",
    version="1.5.1",
    reason="ExecutorchProgramManager serialises its program when it is created: later changes are not in the file",
    upstream="ExecutorchProgramManager serialises on demand, or to_executorch takes a pass over the emitted program",
)
def serialise_again(manager: ExecutorchProgramManager, config: ExecutorchBackendConfig) -> None:
    """Serialise the current emitted program of an ExecutorchProgramManager again."""
    manager._pte_data, manager._tensor_data = _program.serialize_for_executorch(
        manager._emitter_output, config, manager._data_serializer, manager._named_data
    )
    manager._buffer = None  # the cached bytes of the file


native(
    "ExecutorchScope",
    where="runtime/executorch/platform.cpp",
    of="executorch",
    version="1.5.1",
    reason="why a kernel refuses its operands is in ExecuTorch's log alone, and a check that fails ends the process: "
    "while a thread is inside a method, its log and abort are intercepted",
    upstream="Method::execute returns the message with the error, and a failed check is an error and not an abort",
)
