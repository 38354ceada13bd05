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
# Of the samples with a dim above 1, the share lowered with a dynamic one (others name sizes themselves): may not fall.
DYNAMIC = 0.97
GROUPS = {
    "arithmetic": "abs add div_no_rounding_mode mul neg sub rsub float_power addcmul addcdiv lerp",
    "quotients": "div_trunc_rounding div_floor_rounding floor_divide fmod remainder",
    "powers": "exp exp2 expm1 log log2 log10 log1p pow reciprocal rsqrt sqrt square",
    "trigonometry": "sin cos tan asin acos atan atan2 sinh cosh tanh asinh acosh atanh sigmoid erf",
    "activations": """nn_functional_relu nn_functional_gelu nn_functional_relu6 nn_functional_softplus
        nn_functional_silu nn_functional_elu nn_functional_leaky_relu nn_functional_hardtanh nn_functional_hardswish
        nn_functional_softsign nn_functional_hardsigmoid nn_functional_logsigmoid nn_functional_mish
        nn_functional_prelu nn_functional_glu""",
    "rounding": "ceil floor round trunc sign clamp clamp_max clamp_min maximum minimum",
    "comparisons": "eq ne lt le gt ge isnan isinf isfinite where masked_fill",
    "logic": "logical_and logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor bitwise_not",
    "casts": "float double long int half bool",
    "sums": "sum mean amax amin prod var std any all count_nonzero logsumexp",
    "places": "argmax argmin max_reduction_with_dim min_reduction_with_dim aminmax topk sort argsort",
    "scans": "cumsum cumprod",
    "softmaxes": "softmax nn_functional_softmin log_softmax",
    "norms": """nn_functional_layer_norm nn_functional_rms_norm nn_functional_normalize nn_functional_group_norm
        linalg_vector_norm""",
    "views": "reshape view flatten unflatten ravel unsqueeze expand broadcast_to",
    "moves": "permute transpose movedim t select slice flip roll diagonal tril triu",
    "parts": "cat stack hstack vstack chunk split split_with_sizes unbind",
    "products": "matmul mm bmm nn_functional_linear addmm baddbmm mv dot einsum",
    "made": "ones_like zeros_like full_like new_full new_ones new_zeros",
    "rows": "tile repeat",
    "indices": "gather index_select index_put scatter scatter_add take_along_dim __getitem__",
    "convolutions": "nn_functional_conv2d nn_functional_conv_transpose2d",
    "pools": """nn_functional_max_pool2d nn_functional_avg_pool1d nn_functional_avg_pool2d
        nn_functional_adaptive_avg_pool1d nn_functional_adaptive_avg_pool2d""",
    "padding": "nn_functional_pad_constant nn_functional_pad_reflect nn_functional_pad_replicate",
    "attention": "nn_functional_scaled_dot_product_attention",
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
