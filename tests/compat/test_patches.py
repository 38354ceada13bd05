"""Every patch of keepdim.compat is still needed, helps, is seen by its own thread alone, and is put back."""

from __future__ import annotations

import contextlib
import importlib
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from executorch.exir import tensor as exir_tensor
from executorch.exir import to_edge_transform_and_lower
from executorch.exir.backend.backend_details import BackendDetails
from executorch.exir.backend.partitioner import Partitioner, PartitionResult
from executorch.exir.program import _program
from executorch.runtime import Runtime
from faults import ATTENTION, FAULTS, Function, Keeps, applied, decoder, exported, nothing, size
from torch import _meta_registrations
from torch._decomp import decomposition_table
from torch._subclasses import fake_impls, fake_tensor
from torch.export import Dim, ExportedProgram, export
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.node import _side_effectful_functions
from torch.fx.passes.infra.pass_base import PassBase

import keepdim
import keepdim.llm
from keepdim.compat import executorch as compat_executorch
from keepdim.compat import exported_program, lock, patch, tracing
from keepdim.compat import transformers as compat_transformers
from keepdim.compat.tracing import LAYERS, SDPA, aten
from keepdim.fx.nodes import shape_env_of

TABLE = {e.name: e for e in patch.entries()}
PATCHES = [e for e in TABLE.values() if e.kind == "patch"]
each_patch = pytest.mark.parametrize("entry", PATCHES, ids=lambda e: e.name)


def library(entry: patch.Entry) -> None:
    """Skips what is about an optional library that is not installed."""
    if not entry.installed:
        pytest.skip(f"{entry.of} is not installed")


def state() -> dict[str, Any]:
    """Everything that patches touch."""
    owners = {
        **{op: op.py_kernels for op in (SDPA, aten.max_pool1d.default, aten.cdist.default, *LAYERS)},
        "decompositions": decomposition_table,
        "shape functions": fake_impls.op_implementations_dict,
        "fast shape functions": fake_impls.get_fast_op_impls(),
        **{m.__name__: vars(m) for m in (_meta_registrations, fake_tensor, exir_tensor, _program)},
        **{c.__name__: vars(c) for c in (ShapeEnv, ExportedProgram, PassBase, Keeps)},
        **{c.__qualname__: vars(c) for c in BackendDetails.__subclasses__()},
        **{m: vars(sys.modules[m]) for m in ("transformers.dynamic_module_utils", "gguf") if m in sys.modules},
    }
    if "transformers" in sys.modules:
        owners["attentions"] = vars(sys.modules["transformers"].AttentionInterface)["_global_mapping"]
    found = {f"{owner} {key}": value for owner, table in owners.items() for key, value in dict(table).items()}
    return {**found, "side effects": set(_side_effectful_functions)}


def ours(value: Any) -> bool:
    """A function of keepdim, whatever its name says."""
    return "/keepdim/" in getattr(getattr(value, "__code__", None), "co_filename", "")


@pytest.fixture(scope="module")
def used() -> None:
    """torch and ExecuTorch change tables of their own when a program is first lowered."""
    FAULTS["inner_branches"].shown(nothing)


@pytest.fixture
def unchanged(used: None) -> Iterator[None]:
    """The libraries are after a test what they were before."""
    for name in ("transformers.dynamic_module_utils", "gguf"):
        if importlib.util.find_spec(name.partition(".")[0]):
            importlib.import_module(name)
    before = state()
    yield
    after = state()
    same = {k for k, v in before.items() if after.get(k) is v or (k == "side effects" and after[k] == v)}
    assert set(before) - same - {k for k in before if k.endswith("__warningregistry__")} == set()
    assert not [k for k in set(after) - set(before) if ours(after[k])]  # torch fills some tables when it is first asked


def in_thread(run: Callable[[], Any]) -> Any:
    """The result in another thread."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(run()))
    thread.start()
    thread.join()
    assert found, "the thread failed"
    return found[0]


def test_every_patch_has_a_fault() -> None:
    """A patch that is new needs a row in faults.py."""
    assert set(FAULTS) == {e.name for e in PATCHES}
    assert set(WRITES) == {e.name for e in TABLE.values() if e.kind == "write"}
    assert set(OTHERS) == {e.name for e in TABLE.values() if e.kind in ("lasting", "native")}


@each_patch
def test_the_fault_is_still_there(entry: patch.Entry, unchanged: None) -> None:
    """Where this fails, the library no longer needs the patch: remove it."""
    library(entry)
    assert FAULTS[entry.name].shown(nothing)


@each_patch
def test_the_patch_helps_and_is_put_back(entry: patch.Entry, unchanged: None) -> None:
    library(entry)
    assert not FAULTS[entry.name].shown(applied(entry.name))


@each_patch
def test_an_exception_puts_it_back(entry: patch.Entry, unchanged: None) -> None:
    library(entry)
    with pytest.raises(KeyboardInterrupt), FAULTS[entry.name].enter():
        raise KeyboardInterrupt
    with pytest.raises(ZeroDivisionError), FAULTS[entry.name].enter(), FAULTS[entry.name].enter():
        raise ZeroDivisionError


@each_patch
def test_another_thread_exports_as_always(entry: patch.Entry, unchanged: None) -> None:
    """In a thread beside, torch.export gives what it gives, and the library has its fault."""
    library(entry)
    fault = FAULTS[entry.name]

    def plain() -> str:
        ep = exported(lambda x: F.max_pool2d(F.gelu(x), 2), torch.randn(1, 2, 8, 8), n=(0, 0, 1, 64))
        return f"{ep.graph} {ep.range_constraints}"

    before = plain()
    with fault.enter():
        assert in_thread(plain) == before
        assert in_thread(fault.elsewhere or (lambda: fault.shown(nothing)))
    assert plain() == before


def test_patches_of_two_threads_take_turns(unchanged: None) -> None:
    """A second thread waits; nobody saves what the other one has set and puts that back."""
    seen: list[str] = []
    fault = FAULTS["cdist_by_differences"]

    def second() -> None:
        with fault.enter():
            seen.append("second")

    thread = threading.Thread(target=second)
    with fault.enter():
        thread.start()
        thread.join(0.2)
        seen.append("first")
    thread.join()
    assert seen == ["first", "second"]


@pytest.mark.parametrize("error", [None, ZeroDivisionError])
def test_a_decoder_is_as_it_was(error: type[Exception] | None, unchanged: None) -> None:
    """Its attention, its rope and its buffers, which patches of transformers set for one model."""
    pytest.importorskip("transformers")
    model = decoder()
    rope, layer = model.model.rotary_emb, model.model.layers[0].self_attn

    def facts() -> list[Any]:
        kept = {*vars(layer)["_non_persistent_buffers_set"]}
        attention = model.config._attn_implementation
        return [attention, rope.rope_type, id(rope.inv_freq), dict(layer.named_buffers()), kept]

    before = facts()
    with pytest.raises(error) if error else contextlib.nullcontext():
        with (
            compat_transformers.replace_attention(model, ATTENTION, lambda *_, **__: None),
            compat_transformers.fixed_ropes([rope]),
            compat_transformers.layer_buffers({layer: {"keys": torch.zeros(3)}}),
        ):
            assert all(now != then for now, then in zip(facts(), before, strict=True))
            if error:
                raise error
    assert facts() == before


def test_a_decoder_is_exported_under_the_lock() -> None:
    """Another thread that exports one waits, as one that lowers does."""
    pytest.importorskip("transformers")
    done = []
    thread = threading.Thread(target=lambda: done.append(keepdim.llm.export_llm(decoder(), 8)))
    with lock.lowering_lock():
        thread.start()
        thread.join(0.5)
        assert not done
    thread.join()
    assert [s.name for s in done[0].signature.contract.inputs] == ["tokens", "position", "rows"]


# ---------------------------------------------------------------- what is set in objects, and what is used
def sets_ranges() -> None:
    """Ranges cannot be set otherwise."""
    ep = exported(lambda x: x + 1, torch.randn(3), n=(0, 0, 1, 64))
    with pytest.raises((AttributeError, RuntimeError)):
        ep.range_constraints = {}
    env = shape_env_of(n.meta.get("val") for n in ep.graph.nodes)
    (symbol, known), other = next(iter(ep.range_constraints.items())), sympy.Symbol("other")
    narrow = type(known)(2, 8)
    exported_program.set_ranges(ep, {symbol: narrow, other: known}, env)
    assert ep.range_constraints == {symbol: narrow, other: known}
    assert env.var_to_range[symbol] == narrow and other not in env.var_to_range


def sets_inputs() -> None:
    """Nor the signature."""
    ep = export(torch.nn.Linear(3, 2), (torch.randn(1, 3),))
    with pytest.raises((AttributeError, RuntimeError)):
        ep.graph_signature = ep.graph_signature
    added = {"more": torch.zeros(1)}
    exported_program.set_inputs(ep, signature := ep.graph_signature, added=added, dropped=["bias"])
    assert set(ep.state_dict) == {"weight", "more"} and ep.graph_signature is signature


def sets_methods() -> None:
    """Constant methods are an argument of the constructor alone."""
    edge = to_edge_transform_and_lower(export(torch.nn.ReLU(), (torch.randn(3),)))
    assert vars(edge)["_config_methods"] is None
    compat_executorch.set_constant_methods(edge, {"version": 3})
    assert edge.config_methods == {"version"}


def writes_again() -> None:
    """The file is made with the manager, and does not follow its program."""
    from executorch.exir import ExecutorchBackendConfig

    config = ExecutorchBackendConfig()
    manager = to_edge_transform_and_lower(export(torch.nn.ReLU(), (torch.randn(3),))).to_executorch(config)
    before = manager.buffer
    manager.executorch_program.execution_plan[0].name = "other"
    assert manager.buffer == before
    compat_executorch.serialise_again(manager, config)
    assert manager.buffer != before and b"other" in manager.buffer


WRITES: dict[str, Callable[[], None]] = {
    "set_ranges": sets_ranges,
    "set_inputs": sets_inputs,
    "set_constant_methods": sets_methods,
    "serialise_again": writes_again,
}


@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_takes_effect(name: str, unchanged: None) -> None:
    """And there is no public way."""
    WRITES[name]()


IMPORT = """
import sys, keepdim
def finders():
    return [f for f in sys.meta_path if type(f).__module__ == "keepdim.compat.registration"]
sys.meta_path.remove(finders()[0]) if sys.argv[1] == "without" else None
from executorch.extension.pybindings import _C
from executorch.runtime import Runtime
assert not finders() and "exec_module" not in vars(_C.__spec__.loader)
print("KeepdimGgml" in Runtime.get().backend_registry.registered_backend_names)
"""


def follows_executorch() -> None:
    """Without the finder ExecuTorch does not know our delegates; with it, it does, and import is as it was."""
    for how, known in (("without", "False"), ("with", "True")):
        run = subprocess.run([sys.executable, "-c", IMPORT, how], capture_output=True, text=True, timeout=280)
        assert run.stdout.split()[-1:] == [known], run.stderr[-2000:]


FORK = """
import os, signal, sys
import torch
if sys.argv[1] == "with":
    import keepdim
torch.set_num_threads(2)
numbers = torch.ones(4_000_000)
numbers.exp() + 1
if (child := os.fork()) == 0:
    signal.alarm(int(sys.argv[2]))
    numbers.exp() + 1
    os._exit(torch.get_num_threads())
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), torch.get_num_threads())
"""


def computes_after_a_fork() -> None:
    """Without it the forked process waits until the alarm ends it; with it, it has one thread, and the parent two."""
    for how, seconds, seen in (("without", 5, f"{-signal.SIGALRM} 2"), ("with", 200, "1 2")):
        run = subprocess.run(
            [sys.executable, "-c", FORK, how, str(seconds)], capture_output=True, text=True, timeout=280
        )
        assert run.stdout.strip() == seen, run.stderr[-2000:]


def forgets_conds() -> None:
    """An earlier cond fixes a size of a later one, but not where Dynamo has forgotten it."""

    def choose(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.shape[0] <= 8, torch.sin, torch.cos, (x,))

    def later_is_refused(forget: bool) -> bool:
        tracing.forget_conds()
        exported(choose, torch.randn(5, 4), a=(0, 0, 1, 16))
        if forget:
            tracing.forget_conds()
        try:
            exported(choose, torch.randn(5, 4), a=(0, 0, 1, 16), b=(0, 1, 1, 16))
        except torch._dynamo.exc.UserError as e:
            return "Constraints violated" in str(e)
        return False

    assert later_is_refused(forget=False) and not later_is_refused(forget=True)
    x = torch.randn(5, 4)
    torch.testing.assert_close(choose(x), x.sin())  # Dynamo compiles it again


def hears_why() -> None:
    """ExecuTorch's own error does not say why a kernel refused, keepdim's does. (test_platform.py: it is undone.)"""
    model = Function(lambda x, times: torch.repeat_interleave(x, times, 0, output_size=3) * 2)
    module = keepdim.lower(model, (torch.randn(2, 4), torch.tensor([1, 2])))
    bad, why = (torch.ones(2, 4), torch.tensor([-1, 4])), "repeats cannot be negative"
    with pytest.raises(keepdim.KeepdimError, match=why):
        module(*bad)
    method = Runtime.get().load_program(module.path).load_method("forward")
    with pytest.raises(RuntimeError) as plain:
        method.execute(bad)
    assert why not in str(plain.value)


OTHERS: dict[str, Callable[[], None]] = {
    "follow_executorch": follows_executorch,
    "forget_conds": forgets_conds,
    "one_thread_after_fork": computes_after_a_fork,
    "ExecutorchScope": hears_why,
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_a_block_is_needed_and_ends(name: str, unchanged: None) -> None:
    """Where this fails, the library no longer needs it, or it is not undone."""
    OTHERS[name]()


@pytest.mark.parametrize("entry", [e for e in TABLE.values() if e.kind == "use"], ids=lambda e: e.name)
def test_what_is_used_is_there(entry: patch.Entry) -> None:
    """By its dotted name."""
    library(entry)
    parts = entry.name.split(".")
    for i in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:i]))
        except ModuleNotFoundError:
            continue
        break
    for part in parts[i:]:
        owner = found() if isinstance(found, type) and not hasattr(found, part) else found  # set by its constructor
        found = getattr(owner, part)
    assert found is not None


# ---------------------------------------------------------------- the stock flow
class Fails(Partitioner):
    """Somebody's, who fails after ours."""

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        raise ZeroDivisionError


@pytest.mark.parametrize("other", [[], [Fails()]], ids=["alone", "before one that fails"])
def test_the_stock_flow_leaves_the_users_program_alone(other: list[Partitioner]) -> None:
    """Its ShapeEnv keeps its class and what it knows, and its graph is the same."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    ep = export(model, (torch.randn(3, 4),), dynamic_shapes=({0: Dim("n", min=1, max=8)},))
    env = shape_env_of(n.meta.get("val") for n in ep.graph.nodes)
    known = [str(ep.graph), dict(env.var_to_range), dict(env.replacements), len(env.guards), dict(ep.range_constraints)]
    try:
        edge = to_edge_transform_and_lower(ep, partitioner=[keepdim.GgmlPartitioner(), *other])
        edge.to_executorch()
        assert not other and [str(r) for r in edge.exported_program().range_constraints.values()] == ["VR[1, 8]"]
    except ZeroDivisionError:
        assert other
    assert type(env) is ShapeEnv
    assert known == [str(ep.graph), env.var_to_range, env.replacements, len(env.guards), ep.range_constraints]
    assert int(size()) == 3  # other ShapeEnvs decide as ever
