"""A ShapeEnv that decides no size while a program is lowered."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator

import sympy
import torch
import torch.fx.experimental._config as fx_config
import torch.utils._pytree as pytree
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.fx import Node as FxNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv, ShapeGuard

from .patch import patch, use
from .tracing import symbolic_sizes

VALUES = ("val", "example_value", "tensor_meta")  # of node.meta: what has sizes


class OpenShapeEnv(ShapeEnv):
    """A ShapeEnv in which a question about a size is answered for the example, but decides nothing.

    ExecuTorch's own checks ask `if size == ...`, which would specialise the size for every later stage. Asserts over
    data still count: from them the ranges of `.item()` symbols are read when a graph is traced again.
    """

    def evaluate_expr(self, *args: object, **kwargs: object) -> object:
        with self.suppress_guards():
            return super().evaluate_expr(*args, **kwargs)


@contextlib.contextmanager
def _as(env: ShapeEnv | None, cls: type[ShapeEnv]) -> Iterator[None]:
    """Set the class of a ShapeEnv to `cls` while the block runs."""
    before = type(env)
    if env is None or before not in (ShapeEnv, OpenShapeEnv):
        yield
        return
    env.__class__ = cls
    try:
        yield
    finally:
        env.__class__ = before


@patch(
    of="torch",
    version="2.13.0",
    reason="passes of ExecuTorch ask `if size == ...`, which specialises the size for every later stage",
    upstream="a ShapeEnv can be told to answer for the example without deciding, for as long as a block runs",
)
def answers_without_deciding(env: ShapeEnv | None) -> Iterator[None]:
    """The ShapeEnv of a program answers for the example, and decides nothing."""
    with _as(env, OpenShapeEnv):
        yield


class Decisions:
    """What a ShapeEnv decided in a block, known when the block is over."""

    guards: list[ShapeGuard]
    replaced: dict[sympy.Symbol, sympy.Expr]  # symbol → what it was replaced by


@patch(
    of="torch",
    version="2.13.0",
    reason="a third-party partitioner or backend that fixes a size is reported by name, and must not fix it",
    upstream="a ShapeEnv can record decisions and undo them",
)
def recorded_decisions(env: ShapeEnv | None) -> Iterator[Decisions]:
    """Record the decisions of the block, and undo them at its end."""
    made = Decisions()
    if env is None:
        made.guards, made.replaced = [], {}
        yield made
        return
    guards, replaced, ranges = len(env.guards), dict(env.replacements), dict(env.var_to_range)
    with _as(env, ShapeEnv):
        try:
            yield made
        finally:
            made.guards = env.guards[guards:]
            made.replaced = {s: e for s, e in env.replacements.items() if s not in replaced}
            del env.guards[guards:]
            for s in made.replaced:
                del env.replacements[s]
            env.var_to_range.update(ranges)


@contextlib.contextmanager
def open_sizes(env: ShapeEnv | None) -> Iterator[None]:
    """No stage decides a size; nor whether one is 1, when it traces the program again."""
    with answers_without_deciding(env), fx_config.patch(backed_size_oblivious=True), symbolic_sizes():
        yield


# ---------------------------------------------------------------- a copy of a program
use(
    "torch.fx.experimental.symbolic_shapes.ShapeEnv.__dict__",
    of="torch",
    version="2.13.0",
    reason="ExecuTorch's flow calls a partitioner's hooks and does not report its end: so that nothing is decided "
    "until then, the hooks return a copy of the program with a copy of its ShapeEnv",
    upstream="an ExportedProgram can be copied together with its ShapeEnv",
)


def opened(ep: ExportedProgram) -> ExportedProgram:
    """A copy of a program with a copy of its ShapeEnv, which decides no size. The given program is not changed.

    >>> from torch.export import Dim, export
    >>> ep = export(torch.nn.Linear(4, 2), (torch.randn(3, 4),), dynamic_shapes=({0: Dim("n", max=8)},))
    >>> sizes = [next(n for n in p.graph.nodes if n.name == "input").meta["val"].shape[0] for p in (ep, opened(ep))]
    >>> [type(s.node.shape_env).__name__ for s in sizes], str(sizes[0]) == str(sizes[1])
    (['ShapeEnv', 'OpenShapeEnv'], True)
    """
    nodes = _nodes(ep.graph_module)
    mode = detect_fake_mode([v for n in nodes for k in VALUES for v in pytree.tree_leaves(n.meta.get(k))])
    if mode is None or type(mode.shape_env) is not ShapeEnv:
        return ep
    gm, move = copy.deepcopy(ep.graph_module), _Move(mode)
    for old, new in zip(nodes, _nodes(gm), strict=True):
        new.name = old.name  # a copy renames what Python has a word for, such as `input`
        new.meta.update({k: pytree.tree_map(move.value, new.meta[k]) for k in VALUES if k in new.meta})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's, of the way it copies its own trees
        return ep._update(gm, copy.deepcopy(ep.graph_signature))


def _nodes(gm: GraphModule) -> list[FxNode]:
    return [n for g in gm.modules() if isinstance(g, GraphModule) for n in g.graph.nodes]


class _Move:
    """Sizes and tensors without data, from one FakeTensorMode to another that has a copy of its ShapeEnv."""

    def __init__(self, mode: FakeTensorMode):
        self.old, self.env = mode.shape_env, OpenShapeEnv.__new__(OpenShapeEnv)
        for name, value in vars(mode.shape_env).items():
            self.env.__dict__[name] = copy.copy(value) if isinstance(value, (dict, list, set)) else value
        self.env.fake_tensor_cache = {}  # its keys hold sizes of the other one
        self.mode = FakeTensorMode(
            shape_env=self.env,
            allow_fallback_kernels=mode.allow_fallback_kernels,
            allow_non_fake_inputs=mode.allow_non_fake_inputs,
            static_shapes=mode.static_shapes,
            export=mode.fake_tensor_converter.export,
        )
        self.done: dict[int, object] = {}
        self.storages: dict[int, torch.UntypedStorage] = {}

    def value(self, x: object) -> object:
        """The same with the other ShapeEnv; what has no sizes stays as it is."""
        if not isinstance(x, (FakeTensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
            return x
        if id(x) not in self.done:
            self.done[id(x)] = self._tensor(x) if isinstance(x, FakeTensor) else self._size(x)
        return self.done[id(x)]

    def _size(
        self, x: int | torch.SymInt | torch.SymFloat | torch.SymBool
    ) -> int | torch.SymInt | torch.SymFloat | torch.SymBool:
        if isinstance(x, int) or getattr(x.node, "shape_env", None) is not self.old:
            return x  # a constant
        return type(x)(x.node.with_shape_env(self.env))

    def _tensor(self, x: FakeTensor) -> FakeTensor:
        """Tensors that share memory still do: run_decompositions looks at that."""
        held = x.untyped_storage()
        if held._cdata not in self.storages:
            data = torch.empty(self._size(held.nbytes()), dtype=torch.uint8, device="meta")
            self.storages[held._cdata] = data.untyped_storage()
        shape, strides = map(self._size, x.shape), map(self._size, x.stride())
        with torch.no_grad():
            meta = torch.empty(0, dtype=x.dtype, device="meta")
            meta.set_(self.storages[held._cdata], self._size(x.storage_offset()), tuple(shape), tuple(strides))
        made = FakeTensor(self.mode, meta.requires_grad_(x.requires_grad), x.fake_device)
        return torch.nn.Parameter(made, x.requires_grad) if isinstance(x, torch.nn.Parameter) else made
