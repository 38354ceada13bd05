"""keepdim::load and keepdim::check_file: a program without Python gets the numbers and sentences that Python gets."""

from __future__ import annotations

import copy
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree

import keepdim
from keepdim import KeepdimError
from keepdim.artifact.signature import CONTRACT_METHOD
from mutants import pte
from support import apps
from support.contract_cases import CASES
from support.contract_runs import lower, split

# What a flat list of inputs cannot say: (case, part of the sentence) → why.
STRUCTURE = "a C++ program passes a flat list of inputs: there is no structure to compare"
ABSENT = {
    ("keywords", "structure"): STRUCTURE,
    ("nested", "structure"): STRUCTURE,
    ("list_of_tensors", "structure"): STRUCTURE,
    ("constants_as_arguments", "is the constant 'one'"): "a text is passed as none",
}


def flat(module: keepdim.Module, inputs: Any) -> list[Any]:
    """The inputs in the order of the contract; a text is a constant, which C++ programs leave out."""
    args, kwargs = split(copy.deepcopy(inputs))
    return [None if isinstance(x, str) else x for x in module.signature.flatten(args, kwargs)]


LOWERED = [name for name, make in CASES.items() if not make().refused]


@pytest.mark.parametrize("name", LOWERED)
def test_contract(name: str, tmp_path: Path) -> None:
    """Good inputs give Python's numbers to the bit; bad ones its sentence, and the next good call works."""
    torch.manual_seed(0)
    c = CASES[name]()
    module = lower(c, c.model(), "ggml")
    sets, wanted = [], []
    for inputs in [*c.good, *(bad for bad, _ in c.bad), *c.good[:1]]:
        args, kwargs = split(copy.deepcopy(inputs))
        try:
            given = flat(module, inputs)
        except KeepdimError as e:
            assert any(n == name and part in str(e) for n, part in ABSENT), e
            continue
        try:
            want: Any = pytree.tree_leaves(module(*args, **kwargs))
        except KeepdimError as e:
            want = str(e)
            if any(n == name and part in want for n, part in ABSENT):
                continue
        sets.append(given)
        wanted.append(want)
    found = apps.call(module.path, sets, tmp_path)
    assert len(found) == len(wanted) >= len(c.good)
    for got, want in zip(found, wanted, strict=True):
        if isinstance(want, str):
            assert isinstance(got, str) and same_sentence(got, want), (got, want)
            continue
        assert not isinstance(got, str), got
        tensors = [w for w in want if w is not None]
        assert len(got) == len(want) or len(got) == len(tensors)
        for g, w in zip([g for g in got if g is not None], tensors, strict=True):
            same = (
                torch.equal(g, w) or torch.allclose(g, w, rtol=0, atol=0, equal_nan=True)
                if isinstance(w, torch.Tensor)
                else g == w
            )
            assert same, (name, g, w)


def same_sentence(ours: str, pythons: str) -> bool:
    """What was wrong and where. Values that are no tensors have other names in Python."""
    where, _, fact = pythons.partition(": ")
    if fact.startswith("is the constant"):
        return ours.startswith(f"{where}: is the constant")
    return ours == pythons or (", got" in ours and ours.split(", got")[0] == pythons.split(", got")[0])


def test_a_bad_file(golden: Path, tmp_path: Path) -> None:
    """Refused before anything of it is used, in Python's sentence."""
    data, path = bytearray((golden / "linear.pte").read_bytes()), tmp_path / "m.pte"
    data[100] ^= 1
    for body in (bytes(data), bytes(data[:1000]), b""):
        path.write_bytes(body)
        with pytest.raises(KeepdimError) as e:
            keepdim.load(path)
        done = subprocess.run([apps.program(), path, path, tmp_path / "r"], capture_output=True, text=True)
        assert done.returncode == 1 and str(e.value) in done.stderr
    done = subprocess.run([apps.program(), tmp_path / "none.pte", path, path], capture_output=True, text=True)
    assert done.returncode == 1 and "none.pte: cannot be opened (No such file or directory)." in done.stderr


def test_a_forged_signature(tmp_path: Path) -> None:
    """Inputs that are said to be changed have to be tensors, each once: refused when the file is loaded."""
    path = tmp_path / "m.pte"
    for name, inputs in (("integers", [1]), ("linear", [0, 0])):

        def change(program: Any, inputs: list[int] = inputs) -> None:
            plan = next(p for p in program.execution_plan if p.name == CONTRACT_METHOD)
            text = plan.values[plan.outputs[0]].val
            body = json.loads(text.string_val)
            body["signature"]["mutated"] = inputs
            text.string_val = json.dumps(body)

        path.write_bytes(pte.forged(name, change))
        done = subprocess.run([apps.program(), path, path, tmp_path / "r"], capture_output=True, text=True)
        assert done.returncode == 1 and "'mutated' names an input twice, or one that is not a tensor" in done.stderr


def test_threads(golden: Path, tmp_path: Path) -> None:
    """Four threads, each with a module of its own and all with one: every result is right."""
    sets = [[torch.randn(n, 8)] for n in (1, 3, 16, 17)]
    found = apps.call(golden / "linear.pte", sets, tmp_path, 4, 50)
    assert [isinstance(f, str) for f in found] == [False, False, False, True]
