"""Every op of the engine as StableHLO: the cases of frontend/test_op_cases.py, dynamic and bounded, against eager.

One an op, and those with a branch of their own in a rule; with `--all-cases` all of them, which takes half an hour.
"""

from __future__ import annotations

import copy
import re

import pytest
import torch.utils._pytree as pytree

import keepdim
from cases import CASES, Case
from keepdim import _native
from support.op_runs import Together, fault, groups, inputs, shapes

pytest.importorskip("jax", reason="needs the extra keepdim[stablehlo]")
from keepdim.stablehlo import RULES  # noqa: E402
from keepdim.stablehlo.table import rule  # noqa: E402

# Op of the engine → why it has no lowering rule.
WITHOUT = {"flatnonzero": "lists rows to compute, and XLA computes all of them"}
OF_DATA = {"count", "item", "nonzero", "unique", "unique_count", "unique_counts", "unique_inverse"}
GROUP = 12  # cases exported together
OWN = {
    "argsort-sort, empty rows", "conv-1d long kernel", "embedding_bag-last before the end",
    "embedding_bag-max nan", "expand-repeat to nothing", "gather-empty", "grid_sample-affine corners 2d",
    "grid_sample-bilinear border nan in the grid", "grid_sample-nearest reflection nan in the grid", "index_add-bool",
    "pow-nan", "rope-half is a symbol", "sdpa-by hand, no keys", "slice-f16", "slice-i8",
}  # fmt: skip
CACHED_IN_BLOCKS = re.compile("cached_attention-.*q[48]_0")  # which is refused


def taken(c: Case) -> bool:
    """Not those that no engine takes whole."""
    return not c.remaining and not CACHED_IN_BLOCKS.match(c.name)


def chosen(every: bool) -> list[list[Case]]:
    """The cases, in groups: all of them as they are lowered together elsewhere."""
    if every:
        return [mine for g in groups() if (mine := [c for c in g if taken(c)])]
    first = {c.op: c for c in reversed(CASES)}
    found = [c for c in CASES if (c is first[c.op] or c.name in OWN) and taken(c)]
    return [found[i : i + GROUP] for i in range(0, len(found), GROUP)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "group" in metafunc.fixturenames:
        cases = chosen(metafunc.config.getoption("--all-cases"))
        metafunc.parametrize("group", cases, ids=[g[0].name for g in cases])


def test_the_cases_of_their_own_are_there() -> None:
    """By their names."""
    assert OWN <= {c.name for c in CASES}


def test_every_op_of_the_engine_has_a_row() -> None:
    """Or is in the list with its reason; further rows are of data."""
    assert set(_native.engines()["ggml"]) == (set(RULES) - OF_DATA) | set(WITHOUT)


def test_a_second_row_is_refused() -> None:
    """Where it is declared."""
    with pytest.raises(ValueError, match="two rules for add"):
        rule("add")(lambda c: c.ins[0])


@pytest.mark.parametrize("bounds", [False, True], ids=["dynamic", "bounded"])
def test_ops(group: list[Case], bounds: bool) -> None:
    """At every size in order where one compilation serves all, at an untraced one where each size is compiled."""
    model = copy.deepcopy(Together(group)).eval().requires_grad_(False)
    for name, buffer in model.named_buffers():
        if name.endswith((".keys", ".values")):  # as other tests leave them
            buffer.zero_()
    eager = copy.deepcopy(model)  # it keeps states of its own
    program = keepdim.to_stablehlo(model, (inputs(group, 0, traced=True),), dynamic_shapes=shapes(group), bounds=bounds)
    program.executables.disk = 0
    wrong, states = [], program.new_states()
    for step in range(max(len(c.steps()) for c in group)) if bounds else (1,):
        tensors = inputs(group, step)
        results = program(tensors, *states)
        results, states = (results[0], results[1:]) if states else (results, [])
        for c, got, want in zip(group, results, eager(tensors), strict=True):
            pairs = zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True)
            sizes = c.steps()[step % len(c.steps())]
            wrong += [f"{c.name} {sizes}: {why}" for g, w in pairs if (why := fault(g, w, c.near))]
    assert wrong == []
    assert program.executables.compiled == 1
