"""Every shape case: nothing lost on the way, the contract as written, eager's results in order, bad inputs refused, and
the good ones again."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from contracts import CASES, CONTRACTS, Case

import keepdim
from keepdim import KeepdimError


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


@pytest.mark.parametrize("name", CASES)
def test_contract(name: str, engine: str, tmp_path: Path) -> None:
    """Lowered once, called at every size of the case."""
    torch.manual_seed(0)
    c = CASES[name]()
    model = c.model()
    if c.refused:
        with pytest.raises(KeepdimError) as e:
            lower(c, model, engine)
        assert c.refused in str(e.value) and str(e.value).endswith(".")
        return
    eager = copy.deepcopy(model)
    module = audited(c, model, engine, tmp_path / "m.pte")
    assert str(module.contract) == CONTRACTS[name]
    assert c.good
    for inputs in c.good:
        compare(call(module, inputs), call(eager, inputs))
    for inputs, sentence in c.bad:
        with pytest.raises(KeepdimError) as e:
            call(module, inputs)
        assert sentence in str(e.value)
        assert str(e.value).startswith("[")
    for inputs in c.good:
        compare(call(module, inputs), call(eager, inputs))


def test_every_contract_belongs_to_a_case() -> None:
    """No expectation is left over, and the table is as large as it was."""
    assert set(CONTRACTS) == {name for name, f in CASES.items() if not f().refused}
    assert len(CASES) >= 60
