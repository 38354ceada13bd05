"""A fixed sample of torch's OpInfo, several ops to a lowering, every dim dynamic that can be: right numbers at several
sizes, no fewer dynamic dims than before, and no row without one. `bench/conformance/suite.py --opinfo` runs all.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from keepdim.frontend import ops
from support import opinfo
from support.op_runs import UNREACHED as NO_CASE
from support.op_runs import views
from support.opinfo import Call, Verdict

PICKED = 2  # samples of each op and dtype, spread over what OpInfo has
# Further samples by number, of floats: they have overloads that the others do not.
ALSO = {
    "scatter": (24, 25),  # of numbers
    "all": (3,),  # over several dims
    "any": (3,),
    "argsort": (2,),  # stable
    "sort": (2,),
    "nn_functional_interpolate_nearest": (14,),  # 3d
    "nn_functional_interpolate_nearest-exact": (14,),
    "nn_functional_max_pool3d": (1,),  # without the places
    "nn_functional_batch_norm": (8,),  # by its own mean
}
# Of integers these are refused, or taken apart for every sample beside them.
FLOATS = {"nn_functional_avg_pool3d", "baddbmm"}
# Of the samples with a dim above 1, the share lowered with a dynamic one (others name sizes themselves): may not fall.
DYNAMIC = 0.976
GROUPS = {
    "arithmetic": "abs add div_no_rounding_mode mul neg sub rsub float_power addcmul addcdiv lerp",
    "quotients": "div_trunc_rounding div_floor_rounding floor_divide fmod remainder",
    "powers": "exp exp2 expm1 log log2 log10 log1p pow reciprocal rsqrt sqrt square",
    "trigonometry": "sin cos tan asin acos atan atan2 sinh cosh tanh asinh acosh atanh sigmoid erf erfc",
    "activations": """nn_functional_relu nn_functional_gelu nn_functional_relu6 nn_functional_softplus
        nn_functional_silu nn_functional_elu nn_functional_leaky_relu nn_functional_hardtanh nn_functional_hardswish
        nn_functional_softsign nn_functional_hardsigmoid nn_functional_logsigmoid nn_functional_mish
        nn_functional_prelu nn_functional_glu""",
    "rounding": "ceil floor round trunc sign clamp clamp_max clamp_min maximum minimum",
    "comparisons": "eq ne lt le gt ge isnan isinf isfinite where masked_fill",
    "logic": "logical_and logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor bitwise_not",
    "shifts": "bitwise_left_shift bitwise_right_shift",
    "casts": "float double long int half bool",
    "sums": "sum mean amax amin prod var std any all count_nonzero logsumexp var_mean std_mean max_reduction_no_dim "
    "min_reduction_no_dim",
    "places": "argmax argmin max_reduction_with_dim min_reduction_with_dim aminmax topk sort argsort",
    "scans": "cumsum cumprod",
    "softmaxes": "softmax nn_functional_softmin log_softmax",
    "norms": """nn_functional_layer_norm nn_functional_rms_norm nn_functional_normalize nn_functional_group_norm
        linalg_vector_norm nn_functional_batch_norm nn_functional_instance_norm""",
    "views": "reshape view flatten unflatten ravel unsqueeze expand broadcast_to",
    "moves": "permute transpose movedim t select slice flip roll diagonal tril triu",
    "parts": "cat stack hstack vstack chunk split split_with_sizes unbind narrow_copy",
    "products": "matmul mm bmm nn_functional_linear addmm baddbmm mv dot einsum",
    "made": "ones_like zeros_like full_like new_full new_ones new_zeros",
    "rows": "tile repeat",
    "indices": "gather index_select index_put scatter scatter_add take_along_dim __getitem__",
    "lookups": "nn_functional_embedding nn_functional_embedding_bag take masked_scatter _unsafe_masked_index",
    "writes": "index_add index_copy index_fill select_scatter slice_scatter",
    "reducing writes": "scatter_reduce_sum scatter_reduce_prod scatter_reduce_mean scatter_reduce_amin "
    "scatter_reduce_amax _unsafe_masked_index_put_accumulate",
    "distances": "cdist nn_functional_pdist nn_functional_pairwise_distance nn_functional_bilinear",
    "convolutions": "nn_functional_conv2d nn_functional_conv_transpose2d",
    "other convolutions": """nn_functional_conv1d nn_functional_conv3d nn_functional_conv_transpose1d
        nn_functional_conv_transpose3d""",
    "pools": """nn_functional_max_pool2d nn_functional_avg_pool1d nn_functional_avg_pool2d
        nn_functional_adaptive_avg_pool1d nn_functional_adaptive_avg_pool2d""",
    "other pools": """nn_functional_max_pool1d nn_functional_max_pool3d nn_functional_avg_pool3d
        nn_functional_adaptive_avg_pool3d nn_functional_adaptive_max_pool1d nn_functional_adaptive_max_pool2d
        nn_functional_adaptive_max_pool3d""",
    "resizing": """nn_functional_interpolate_nearest nn_functional_interpolate_nearest-exact
        nn_functional_interpolate_linear nn_functional_interpolate_bilinear nn_functional_interpolate_bicubic
        nn_functional_interpolate_trilinear""",
    "sampling": "nn_functional_grid_sample grid_sampler_2d grid_sampler_3d",
    "windows": "nn_functional_unfold unfold unfold_copy as_strided_copy",
    "padding": "nn_functional_pad_constant nn_functional_pad_reflect nn_functional_pad_replicate constant_pad_nd",
    "losses and lines": """nn_functional_cross_entropy nn_functional_multilabel_soft_margin_loss
        nn_functional_threshold heaviside linspace_tensor_overload logspace_tensor_overload""",
    "attention": "nn_functional_scaled_dot_product_attention torch_ops_aten__safe_softmax_default",
}
# Overloads with a row that none of these samples has, and why; beside those that no op case can have.
UNREACHED = {
    "no OpInfo calls it": "lstm.input gru.input rnn_tanh.input rnn_relu.input col2im.default",
    "OpInfo gives tensors where it takes a number": """bitwise_and.Scalar bitwise_or.Scalar bitwise_xor.Scalar
        fmod.Scalar __lshift__.Scalar __rshift__.Scalar""",
    "no tensor is among the inputs of its OpInfo": "arange.default arange.start ones.default zeros.default",
    "its result is what was in memory": "empty_like.default new_empty.default",
    "its OpInfo reads the mean and deviation as well, and leaves it to ExecuTorch": "native_layer_norm.default",
    "export has another overload of it, which is reached": """
        _adaptive_avg_pool3d.default _embedding_bag.default __lshift__.Tensor __rshift__.Tensor
        _unsafe_index.Tensor _unsafe_index_put.default reflection_pad1d.default reflection_pad2d.default
        reflection_pad3d.default replication_pad1d.default replication_pad2d.default replication_pad3d.default""",
}


# Beside an op that has to be taken apart, Edge dialect has another form of these; op cases reach them.
SOMETIMES = """
    chunk.default clamp_max.default clone.default contiguous.default detach_.default expand_as.default
    flatten.using_ints lift_fresh.default linalg_vector_norm.default movedim.int mT.default numpy_T.default
    reshape.default split.Tensor squeeze.default squeeze.dim t.default transpose.int type_as.default unbind.int
    unflatten.int"""


@functools.cache
def verdicts(group: str) -> list[tuple[str, Verdict]]:
    """Every picked sample of a group by name, with what became of it."""
    entries = opinfo.entries()
    picked: list[tuple[str, Call]] = []
    for name in GROUPS[group].split():
        for dtype in ["f32"] if name in FLOATS else opinfo.dtypes(entries[name]):
            calls = [c for c in opinfo.samples(entries[name], dtype) if opinfo.pure(c)]
            numbers = list(range(0, len(calls), max(len(calls) // PICKED, 1)))[:PICKED]
            numbers += ALSO.get(name, ()) if dtype == "f32" else ()
            picked += [(f"{name} {dtype} {i}", calls[i]) for i in numbers]
    return list(zip([n for n, _ in picked], opinfo.judge([c for _, c in picked]), strict=True))


@pytest.mark.parametrize("group", GROUPS)
def test_samples_are_right(group: str) -> None:
    """As eager at the sample's sizes, one above, and the lowest."""
    assert [(n, v.result, v.detail) for n, v in verdicts(group) if v.result != "right"] == []


def test_dims_stay_dynamic(record_property: Any) -> None:
    """The share of samples that are lowered with dynamic dims does not fall; printed with -s."""
    found: list[tuple[str, Any]] = [x for group in GROUPS for x in verdicts(group)]
    count = opinfo.tally([v for _, v in found])
    share = count["dynamic"] / count["could be dynamic"]
    print(f"\n{count['dynamic']} of {count['could be dynamic']} samples with dynamic dims ({share:.4f})")
    record_property("dynamic", share)
    static = [f"{n}: {v.static}" for n, v in found if v.wanted and not v.dynamic]
    assert share >= DYNAMIC, static


def test_every_overload_is_reached() -> None:
    """Each overload with a row was delegated for some sample, or is listed with the reason why none has it."""
    reached = {name for group in GROUPS for _, v in verdicts(group) for name in v.overloads}
    rows = views(str(target) for target in ops.RULES if target.namespace == "aten")
    none, anywhere = ({f"aten.{n}" for ns in why.values() for n in ns.split()} for why in (UNREACHED, NO_CASE))
    assert rows - views(reached) - anywhere - {f"aten.{n}" for n in SOMETIMES.split()} == none
