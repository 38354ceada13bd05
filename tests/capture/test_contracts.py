"""Every shape case: nothing lost on the way, the contract as written, eager's results in order, bad inputs refused, and
the good ones again."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from keepdim import KeepdimError
from support.contract_cases import CASES, CONTRACTS
from support.contract_runs import audited, call, compare, lower


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
