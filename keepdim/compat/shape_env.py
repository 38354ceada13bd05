"""A ShapeEnv that decides no size while a program is lowered."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.fx.experimental._config as fx_config
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from .tracing import symbolic_sizes


class OpenShapeEnv(ShapeEnv):
    """A ShapeEnv in which a question about a size is answered for the example, but decides nothing.

    ExecuTorch's own checks ask `if size == ...`, which would specialise the size for every later stage. Asserts over
    data still count: from them the ranges of `.item()` symbols are read when a graph is traced again.
    """

    def evaluate_expr(self, *args: Any, **kwargs: Any) -> Any:
        with self.suppress_guards():
            return super().evaluate_expr(*args, **kwargs)


def keep_open(env: ShapeEnv | None) -> None:
    """Make the ShapeEnv of a program that is about to be lowered an open one."""
    if type(env) is ShapeEnv:
        env.__class__ = OpenShapeEnv


@contextlib.contextmanager
def open_sizes(env: Any) -> Iterator[None]:
    """No stage decides a size; nor whether one is 1, when it traces the program again."""
    keep_open(env)
    try:
        with fx_config.patch(backed_size_oblivious=True), symbolic_sizes():
            yield
    finally:
        if env is not None:
            env.__class__ = ShapeEnv
