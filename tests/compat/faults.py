"""What each patch is there for: a few lines that show the fault of the other library, with and without the patch.

`FAULTS` has a row for every patch of keepdim.compat. `shown(patched)` runs what is at fault inside `patched(...)`,
which is the patch or does nothing, and says whether the fault shows.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.fx.experimental._config as fx_config
import torch.nn.functional as F
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from executorch.exir.backend.backend_details import BackendDetails, PreprocessResult
from executorch.exir.backend.partitioner import Partitioner, PartitionResult
from executorch.exir.delegate import executorch_call_delegate
from executorch.exir.program import _program
from executorch.exir.tensor import TensorSpec
from executorch.runtime import Runtime
from torch._decomp import decomposition_table
from torch.export import Dim, ExportedProgram, export
from torch.fx.passes.infra.pass_base import PassBase

from keepdim.compat import executorch, shape_env, tracing, transformers, watching

aten = torch.ops.aten
Patched = Callable[..., AbstractContextManager[Any]]


class Fault(NamedTuple):
    """How a patch is entered, and what shows the fault that it is for."""

    enter: Callable[[], AbstractContextManager[Any]]
    shown: Callable[[Patched], bool]
    elsewhere: Callable[[], bool] | None = None  # whether another thread sees the library as it is; None: by `shown`


class Function(torch.nn.Module):
    """A function as a model."""

    def __init__(self, fn: Callable[..., Any]):
        super().__init__()
        self.fn = fn

    def forward(self, *args: torch.Tensor) -> Any:
        return self.fn(*args)


def exported(fn: Callable[..., Any], *args: torch.Tensor, **sizes: tuple[int, int, int, int]) -> ExportedProgram:
    """Sizes are (input, dim, min, max) by name."""
    shapes: list[dict[int, Any]] = [{} for _ in args]
    for name, (i, dim, lo, hi) in sizes.items():
        shapes[i][dim] = Dim(name.rstrip("_"), min=lo, max=hi)
    with fx_config.patch(backed_size_oblivious=True), torch.no_grad():
        return export(Function(fn), args, dynamic_shapes=(tuple(shapes),), strict=False)


def refused(fn: Callable[..., Any], *args: torch.Tensor, **sizes: tuple[int, int, int, int]) -> Callable[..., bool]:
    """torch.export fixes or bounds a size that the model leaves open."""

    def shown(patched: Patched) -> bool:
        with patched():
            try:
                exported(fn, *args, **sizes)
            except torch._dynamo.exc.UserError as e:
                return "Constraints violated" in str(e)
        return False

    return shown


R = torch.randn


def lstm(x: torch.Tensor) -> torch.Tensor:
    """A layer as torch.export keeps it."""
    states, weights = [torch.zeros(1, 2, 8)] * 2, [torch.zeros(32, 4), torch.zeros(32, 8), *[torch.zeros(32)] * 2]
    return aten.lstm.input(x, states, weights, True, 1, 0.0, False, False, False)[0]


def attends(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """With a mask of one row."""
    return F.scaled_dot_product_attention(x, x, x, mask)


def selects_without_bound(patched: Patched) -> bool:
    """What is selected by a mask that is larger than the input is not bounded by the mask."""
    with patched():
        ep = exported(lambda x, mask: x.masked_select(mask), R(1), torch.ones(5, dtype=torch.bool), n=(1, 0, 2, 64))
    return max(int(r.upper) for r in ep.range_constraints.values()) > 64


def samples_by_tracing(patched: Patched) -> bool:
    """The shape of grid_sample is found with its decomposition."""
    op = aten.grid_sampler_2d.default
    theirs = mock.Mock(side_effect=decomposition_table[op])
    with patched(), mock.patch.dict(decomposition_table, {op: theirs}):
        grid = functools.partial(F.grid_sample, align_corners=False)
        exported(grid, R(1, 2, 5, 6), R(1, 3, 4, 2), n=(0, 2, 2, 64))
    return theirs.called


# ---------------------------------------------------------------- a ShapeEnv
def size() -> Any:
    """A symbolic size, in a ShapeEnv of its own."""
    ep = exported(lambda x: x + 1, R(3), n=(0, 0, 1, 64))
    return next(n.meta["val"].shape[0] for n in ep.graph.nodes if n.op == "placeholder")


def decides(patched: Patched) -> bool:
    """A question about a size is a decision, which later stages find."""
    n = size()
    env = n.node.shape_env
    before = len(env.guards)
    with patched(env):
        assert not n == 7  # as a pass may ask
    return len(env.guards) > before


# ---------------------------------------------------------------- ExecuTorch
def reads_columns(patched: Patched) -> bool:
    """ExecuTorch's kernel of nonzero writes other than what is planned for it, and the next one refuses it."""
    with patched():
        config = EdgeCompileConfig(_check_ir_validity=False)
        program = export(Function(lambda x: x.nonzero() + 0), (torch.ones(2, 3),))
        file = to_edge_transform_and_lower(program, compile_config=config).to_executorch().buffer
    x = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 1.0]])
    try:
        (found,) = Runtime.get().load_program(file).load_method("forward").execute((x,))
    except RuntimeError:
        return True
    return not torch.equal(found, x.nonzero())


def orders_no_empty_result(patched: Patched) -> bool:
    """A tensor that is empty at the example's sizes has no order of dims."""
    ep = exported(lambda x: x[:, 3:] + 1, R(2, 3), n=(0, 1, 3, 8))
    val = next(n.meta["val"] for n in ep.graph.nodes if n.target is aten.add.Tensor)
    with patched():
        try:
            TensorSpec.from_tensor(val)
        except RuntimeError as e:
            return "0 in strides" in str(e)
    return False


class Keeps(Partitioner):
    """Wants silu whole."""

    def ops_to_not_decompose(self, ep: ExportedProgram) -> Any:
        return [aten.silu.default], lambda n: True

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        return PartitionResult(exported_program, {})


def decomposes_inner_branches(patched: Patched) -> bool:
    """An op that a partitioner keeps is taken apart in the branch of a branch."""

    def inner(x: torch.Tensor) -> Any:
        return torch.cond(x.max() > 1, lambda x: F.silu(x) + 1, lambda x: x * 2, (x,))

    ep = export(Function(lambda x: torch.cond(x.sum() > 0, inner, lambda x: x * 3, (x,))), (R(3),))
    with patched():
        config = EdgeCompileConfig(_check_ir_validity=False)
        manager = _program._gen_edge_manager_for_partitioners({"forward": [Keeps()]}, {"forward": ep}, config, None)
    bodies = [m for m in manager.exported_program().graph_module.modules() if isinstance(m, torch.fx.GraphModule)]
    return not any("silu" in str(n.target) for m in bodies for n in m.graph.nodes)


def removes_calls(patched: Patched) -> bool:
    """A delegate's call without results is dead code."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(executorch_call_delegate, (x,))
    graph.output(x)
    with patched():
        return bool(graph.eliminate_dead_code())


# ---------------------------------------------------------------- watching
heard: list[Any] = []


def unheard(act: Callable[[], Any]) -> Callable[[Patched], bool]:
    """No callback is called."""

    def shown(patched: Patched) -> bool:
        heard.clear()
        with patched():
            act()
        return not heard

    return shown


class Backend(BackendDetails):
    """Somebody's backend."""

    @staticmethod
    def preprocess(edge_program: Any, compile_specs: Any) -> PreprocessResult:
        return PreprocessResult(b"")


class Pass(PassBase):
    """Somebody's pass."""

    def call(self, graph_module: Any) -> None:
        return None


@contextlib.contextmanager
def around(*_: Any) -> Iterator[None]:
    """Hears that something begins."""
    heard.append(_)
    yield


def hears(original: Callable[..., Any]) -> Callable[..., Any]:
    """Hears a call."""

    def call(*args: Any) -> Any:
        heard.append(args)
        return original(*args)

    return call


# ---------------------------------------------------------------- transformers
def runs_code(patched: Patched) -> bool:
    """Python of a folder runs for a model inside a model, although trust_remote_code is False."""
    package = __import__("transformers")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "code.py").write_text(f"open({str(folder / 'ran')!r}, 'w').close()\nclass M: pass\n")
        part = {"model_type": "trocr", "auto_map": {"AutoModel": "code.M"}, "_name_or_path": name}
        small = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 64}
        config = {"model_type": "gemma3", "text_config": small, "vision_config": part}
        (folder / "config.json").write_text(json.dumps(config))
        with patched(), mock.patch.object(builtins, "input", lambda *_: "y"), contextlib.suppress(Exception):
            made = package.AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
            package.AutoModelForCausalLM.from_config(made, trust_remote_code=False)
        return (folder / "ran").exists()


def code_loads() -> bool:
    """transformers finds a class in a file, as it is asked to."""
    module = __import__("transformers.dynamic_module_utils", fromlist=["_"])
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "code.py"
        path.write_text("class Thing: pass\n")
        return module.get_class_in_module("Thing", path).__name__ == "Thing"


def reads_one_by_one(patched: Patched) -> bool:
    """gguf's reader makes arrays for each element of a list."""
    gguf = __import__("gguf")
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "list.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_token_list([f"token {i}" for i in range(500)])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        one = gguf.GGUFReader._get
        with patched(), mock.patch.object(gguf.GGUFReader.__mro__[-2], "_get", autospec=True, side_effect=one) as reads:
            reader = gguf.GGUFReader(path)
            assert reader.fields["tokenizer.ggml.tokens"].contents()[499] == "token 499"
        return reads.call_count > 500


ATTENTION = "keepdim_test"


def decoder() -> Any:
    """A small model whose rope changes with the length of the sequence."""
    package = __import__("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 8}
    rope = {"rope_theta": 10000.0, "rope_type": "dynamic", "factor": 2.0}
    config = package.LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=8, rope_parameters=rope)
    return package.LlamaForCausalLM(config).eval()


def keeps_attention(patched: Patched) -> bool:
    """transformers goes on knowing an attention that one model was given."""
    interface = __import__("transformers").AttentionInterface
    try:
        with patched():
            if ATTENTION not in interface():
                interface.register(ATTENTION, lambda *_, **__: None)
        with contextlib.suppress(KeyError):
            del interface()[ATTENTION]
        return ATTENTION in interface()
    finally:
        vars(interface)["_global_mapping"].pop(ATTENTION, None)


def changes_frequencies(patched: Patched) -> bool:
    """A long sequence changes the frequencies that a rotary embedding has."""
    rope = decoder().model.rotary_emb
    with patched([rope]):
        rope(torch.zeros(1, 40, 16), torch.arange(40)[None])
        return not torch.equal(rope.inv_freq, rope.original_inv_freq)


def keeps_no_keys(patched: Patched) -> bool:
    """A layer has no buffer that is as long as a context."""
    layer = decoder().model.layers[0].self_attn
    with patched({layer: {"keys": torch.zeros(1, 2, 24, 8)}}):
        return not [b for b in layer.buffers() if 24 in b.shape]


def shared() -> bool:
    """Other threads see this patch too, and get the same from it."""
    return True


FAULTS: dict[str, Fault] = {
    "attention_masks": Fault(
        tracing.attention_masks,
        refused(attends, R(1, 2, 5, 8), torch.zeros(1, 1, 1, 5), n=(0, 2, 1, 64), n_=(1, 3, 1, 64)),
    ),
    "max_pool1d_as_2d": Fault(
        tracing.max_pool1d_as_2d, refused(lambda x: F.max_pool1d(x, 3, 2), R(1, 2, 9), n=(0, 2, 4, 64))
    ),
    "cdist_by_differences": Fault(
        tracing.cdist_by_differences, refused(lambda x: torch.cdist(x, x), R(5, 3), n=(0, 0, 1, 64))
    ),
    "recurrent_layers": Fault(tracing.recurrent_layers, refused(lstm, R(5, 2, 4), n=(0, 0, 1, 64))),
    "ceil_mode_pool_sizes": Fault(
        tracing.ceil_mode_pool_sizes,
        refused(lambda x: F.avg_pool2d(x, (1, 3), (1, 2), ceil_mode=True), R(1, 2, 1, 9), n=(0, 3, 4, 64)),
    ),
    "affine_grids": Fault(
        tracing.affine_grids,
        refused(
            lambda t, x: F.affine_grid(t, x.shape, align_corners=False), R(2, 2, 3), R(2, 3, 5, 6), n=(1, 2, 2, 64)
        ),
    ),
    "masked_selections": Fault(tracing.masked_selections, selects_without_bound),
    "copied_slices": Fault(
        tracing.copied_slices, refused(lambda x: torch.slice_copy(x, 0, 0, 5), R(9), n=(0, 0, 1, 64))
    ),
    "grid_samples": Fault(tracing.grid_samples, samples_by_tracing),
    "answers_without_deciding": Fault(lambda: shape_env.answers_without_deciding(size().node.shape_env), decides),
    "recorded_decisions": Fault(lambda: shape_env.recorded_decisions(size().node.shape_env), decides),
    "row_major_nonzero": Fault(executorch.row_major_nonzero, reads_columns),
    "dim_order_of_empty_results": Fault(executorch.dim_order_of_empty_results, orders_no_empty_result),
    "inner_branches": Fault(executorch.inner_branches, decomposes_inner_branches),
    "delegate_calls_kept": Fault(executorch.delegate_calls_kept, removes_calls, shared),
    "around_preprocess": Fault(
        lambda: executorch.around_preprocess(around), unheard(lambda: Backend.preprocess(None, []))
    ),
    "shape_decisions": Fault(
        lambda: watching.shape_decisions(lambda *what: heard.append(what)), unheard(lambda: bool(size() == 7))
    ),
    "range_assignments": Fault(lambda: watching.range_assignments(heard.append), unheard(size)),
    "around_passes": Fault(lambda: watching.around_passes(hears), unheard(lambda: Pass()(torch.nn.Identity()))),
    "around_hook": Fault(
        lambda: watching.around_hook(Keeps, "partition", hears), unheard(lambda: Keeps().partition(None))
    ),
    "no_remote_code": Fault(transformers.no_remote_code, runs_code, code_loads),
    "fast_gguf_lists": Fault(transformers.fast_gguf_lists, reads_one_by_one, shared),
    "replace_attention": Fault(
        lambda: transformers.replace_attention(decoder(), ATTENTION, lambda *_, **__: None), keeps_attention, shared
    ),
    "fixed_ropes": Fault(lambda: transformers.fixed_ropes([decoder().model.rotary_emb]), changes_frequencies),
    "layer_buffers": Fault(lambda: transformers.layer_buffers({decoder(): {"keys": R(2)}}), keeps_no_keys),
}
OBJECTS: dict[str, Patched] = {  # of one ShapeEnv or model each
    "answers_without_deciding": shape_env.answers_without_deciding,
    "recorded_decisions": shape_env.recorded_decisions,
    "fixed_ropes": transformers.fixed_ropes,
    "layer_buffers": transformers.layer_buffers,
}


def applied(name: str) -> Patched:
    """The patch, for `shown`."""
    return OBJECTS.get(name) or (lambda *_: FAULTS[name].enter())


def nothing(*_: Any) -> AbstractContextManager[Any]:
    """The same without the patch."""
    return nullcontext()


__all__ = ["ATTENTION", "FAULTS", "Function", "Keeps", "applied", "decoder", "exported", "nothing", "size"]
