"""A contract case lowered, called and compared with eager."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree

import keepdim
from support.contract_cases import Case


def split(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments."""
    return ((), inputs) if isinstance(inputs, dict) else (inputs, {})


def call(f: Any, inputs: Any) -> Any:
    args, kwargs = copy.deepcopy(split(inputs))
    return f(*args, **kwargs)


def lower(c: Case, model: torch.nn.Module, engine: str) -> keepdim.Module:
    args, kwargs = split(c.args)
    return keepdim.lower(model, args, kwargs, dynamic_shapes=c.shapes, engine=engine)


def audited(c: Case, model: torch.nn.Module, engine: str, path: Path) -> keepdim.Module:
    """The same with every stage watched: nothing that the model says about its sizes is lost."""
    args, kwargs = split(c.args)
    keepdim.audit(model, args, kwargs, dynamic_shapes=c.shapes, partitioner=engine, tries=False, output=path).check()
    return keepdim.load(path)


def compare(got: Any, want: Any) -> None:
    """The same structure, types, shapes and numbers."""
    assert pytree.tree_structure(got) == pytree.tree_structure(want)
    for g, w in zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True):
        if isinstance(w, torch.Tensor):
            exact = {} if w.dtype.is_floating_point else {"rtol": 0, "atol": 0}
            torch.testing.assert_close(g, w, equal_nan=True, **exact)
        else:
            assert type(g) is type(w) and g == w
