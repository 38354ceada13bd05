"""A fixed sample of torch's OpInfo, several ops to a lowering, every dim dynamic that can be: right numbers at several
sizes, and no fewer dynamic dims than before. `bench/suite.py --opinfo` runs all of them.
"""

from __future__ import annotations

import functools
from typing import Any

import opinfo
import pytest
from opinfo import Call, Verdict

PICKED = 2  # samples of each op and dtype, spread over what OpInfo has
DYNAMIC = 0.99  # of the samples that have a dim above 1, exported and lowered with a dynamic one: may not fall
GROUPS = {
    "arithmetic": "abs add div_no_rounding_mode mul neg sub rsub float_power",
    "powers": "exp log pow reciprocal rsqrt sqrt square",
    "trigonometry": "sin cos tanh sigmoid nn_functional_silu nn_functional_softsign",
    "activations": "nn_functional_relu nn_functional_gelu nn_functional_relu6 nn_functional_softplus",
    "clamps": "clamp clamp_max clamp_min maximum minimum max_binary min_binary",
    "casts": "float double long int half bool",
    "sums": "sum mean amax amin",
    "softmaxes": "softmax nn_functional_softmin log_softmax",
    "norms": "nn_functional_layer_norm nn_functional_rms_norm nn_functional_normalize",
    "views": "reshape view flatten unflatten ravel squeeze unsqueeze expand broadcast_to",
    "moves": "permute transpose movedim t swapaxes narrow select",
    "parts": "cat stack hstack vstack chunk split split_with_sizes unbind tensor_split",
    "products": "matmul mm bmm nn_functional_linear addmm baddbmm mv dot",
    "made": "ones_like zeros_like full_like new_full new_ones new_zeros",
    "rows": "nn_functional_embedding tile repeat",
}


@functools.cache
def verdicts(group: str) -> list[tuple[str, Verdict]]:
    """Every picked sample of a group by name, with what became of it."""
    entries = opinfo.entries()
    picked: list[tuple[str, Call]] = []
    for name in GROUPS[group].split():
        for dtype in opinfo.dtypes(entries[name]):
            picked += [(f"{name} {dtype} {i}", c) for i, c in spread(opinfo.samples(entries[name], dtype))]
    return list(zip([n for n, _ in picked], opinfo.judge([c for _, c in picked]), strict=True))


def spread(calls: list[Call]) -> list[tuple[int, Call]]:
    step = max(len(calls) // PICKED, 1)
    return [(i, calls[i]) for i in range(0, len(calls), step)][:PICKED]


@pytest.mark.parametrize("group", GROUPS)
def test_samples_are_right(group: str) -> None:
    """As eager at the sample's sizes, one above, and the lowest."""
    assert [(n, v.result, v.detail) for n, v in verdicts(group) if v.result != "right"] == []


def test_dims_stay_dynamic() -> None:
    """The share of samples that are lowered with dynamic dims does not fall."""
    found: list[tuple[str, Any]] = [x for group in GROUPS for x in verdicts(group)]
    count = opinfo.tally([v for _, v in found])
    static = [f"{n}: {v.static}" for n, v in found if v.wanted and not v.dynamic]
    assert count["dynamic"] / count["could be dynamic"] >= DYNAMIC, static
