"""What users get wrong in arguments: bad strings, wrong types, numbers too large are a KeepdimError, never another."""

from __future__ import annotations

import copy
import json
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

import keepdim
from keepdim import KeepdimError, _native
from keepdim.artifact.signature import Signature
from keepdim.ir import quant
from keepdim.models.encoder import Encoder
from keepdim.models.generate import Sampling, Text, Writer, open_model
from keepdim.ranges import thresholds

N = {0: Dim("n", min=1, max=8)}
X = torch.randn(3, 8)
TEXTS = ["\ud800", "a\udfffb", "\udc80", "a\0b", "", "x" * 10**5]
OTHERS = [b"x", 7, 2**70, None, ["x"], {}, object(), float("nan")]


class Chosen(nn.Module):
    """Takes a text, which is a constant of the contract."""

    def forward(self, x: torch.Tensor, mode: str) -> torch.Tensor:
        return x * 2


class Named(nn.Module):
    """Takes arguments of any name."""

    def forward(self, **more: torch.Tensor) -> torch.Tensor:
        return next(iter(more.values())) * 2


def held(name: str) -> nn.Module:
    """A model whose layer has this name."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module(name, nn.Linear(8, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self._modules[name](x)  # type: ignore[misc]

    return Model().eval()


@pytest.fixture(scope="module")
def module() -> keepdim.Module:
    return keepdim.lower(nn.Linear(8, 4).eval(), (X,), dynamic_shapes=(N,))


@pytest.fixture(scope="module")
def chosen() -> keepdim.Module:
    return keepdim.lower(Chosen(), (X, "fast"), dynamic_shapes=(N, None))


@pytest.fixture(scope="module")
def decoder() -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, vocab_size=64, max_position_embeddings=32)
    return transformers.LlamaForCausalLM(config).eval()


def only_sentences(use: Callable[[Any], Any], values: list[Any]) -> None:
    """Each value is taken or is a KeepdimError."""
    for value in values:
        try:
            use(value)
        except KeepdimError as e:
            assert str(e).startswith("["), e


def test_files_and_names(module: keepdim.Module, tmp_path: Path) -> None:
    """Paths of everything that reads and writes, and names in the place of paths."""
    good = tmp_path / "m.pte"
    module.save(good)
    for use in (
        keepdim.load,
        lambda v: keepdim.load(good, v),
        lambda v: keepdim.load(good, verify=v),
        keepdim.LanguageModel.load,
        lambda v: module.save(str(tmp_path / v) if isinstance(v, str) else v),
        open_model,
        lambda v: open_model(good, weights=v),
        lambda v: open_model(good, engine=v),
        Encoder.load,
        lambda v: keepdim.audit(v) if isinstance(v, str) else None,
        lambda v: Text.from_json(v) if isinstance(v, str) else None,
    ):
        only_sentences(use, [*TEXTS, *OTHERS])


def test_names_of_engines_and_dtypes() -> None:
    """What is not known is said, whatever it is."""
    weight = torch.ones(2, 64)
    raw = torch.zeros(2, 68, dtype=torch.uint8)
    for value in [*TEXTS, *OTHERS]:
        for use in (
            lambda v: keepdim.lower(nn.Linear(8, 4), (X,), engine=v),
            lambda v: quant.quantise(weight, v),
            lambda v: quant.dequantise(quant.Quantised(v, (2, 64), raw)),
        ):
            with pytest.raises(KeepdimError, match=r"^\[(lower|quantise)\] "):
                use(value)


def test_arguments_of_a_call(module: keepdim.Module, chosen: keepdim.Module) -> None:
    """By name, too many, of another type, and as the constant of a contract."""
    for value in [*TEXTS, *OTHERS]:
        for use in (
            lambda v: module(v),
            lambda v: module(X, v),
            lambda v: module(**{v if isinstance(v, str) else "other": X}),
            lambda v: chosen(X, v),
            lambda v: chosen(v, "fast"),
        ):
            with pytest.raises(KeepdimError, match=r"^\[bind\] "):
                use(value)
    torch.testing.assert_close(chosen(X, "fast"), X * 2)


def test_names_inside_of_a_model() -> None:
    """Layers and arguments may have any name that Python takes; one that no file can hold is a sentence."""
    for use in (
        lambda v: keepdim.lower(held(v or "layer"), (X,), dynamic_shapes=(N,)),
        lambda v: keepdim.lower(Named(), (), {v: X}),
    ):
        only_sentences(use, TEXTS)


def test_settings_of_a_language_model(decoder: Any) -> None:
    """Of `lower_llm`, and of what it returns."""
    for setting, values in (
        ("cache", [*TEXTS, *OTHERS]), ("quant", [*TEXTS, *(v for v in OTHERS if v is not None)]),
        ("max_context", [*TEXTS, *(v for v in OTHERS if v is not None)]), ("engine", [*TEXTS, *OTHERS]),
        ("text", ["\ud800", *OTHERS]), ("weights", [*TEXTS, b"x", 7, ["x"], object()]),
    ):  # fmt: skip
        for value in values:
            with pytest.raises(KeepdimError, match=r"^\[lower\] "):
                keepdim.lower_llm(decoder, **{"max_context": 16} | {setting: value})
    model = keepdim.lower_llm(decoder, 16)
    for use in (model, lambda v: model([1], rows=[v]), model.rewind):
        for value in [*TEXTS, *OTHERS]:
            with pytest.raises(KeepdimError, match=r"^\[(generate|bind|run)\] "):
                use(value if value != 7 else 2**31)
    assert model([1, 2]).shape == (1, 64)


@pytest.mark.parametrize("setting", ["temperature", "top_k", "top_p", "min_p", "seed"])
def test_settings_of_sampling(setting: str) -> None:
    """A number where one is expected."""
    for value in [*TEXTS, b"x", None, ["x"], {}, object(), True]:
        with pytest.raises(KeepdimError, match=rf"^\[generate\] {setting}: .* is not (a number|an integer)\.$"):
            Sampling(**{setting: value})


@pytest.mark.parametrize("setting", ["threads", "memory_limit", "plan_limit"])
def test_options(setting: str) -> None:
    """Whole numbers that the runtime can have; nothing is changed by others."""
    before = keepdim.options()
    for value in [*TEXTS, *(v for v in OTHERS if v not in (None, 7)), True, -1, 2**63, -(2**63)]:
        with pytest.raises(KeepdimError, match=rf"^\[options\] .*{setting}"):
            keepdim.set_options(**{setting: value})
    assert keepdim.options() == before


class Adds(nn.Module):
    """Changes both of its inputs."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        y.add_(1)
        return x + y


def test_inputs_that_cannot_be_changed() -> None:
    """A call that changes its inputs changes all of them or none."""
    module = keepdim.lower(Adds(), (torch.zeros(3, 4), torch.zeros(3, 4)), dynamic_shapes=(N, N))
    with torch.inference_mode():
        inference = torch.zeros(3, 4)
    for bad in (torch.zeros(1, 4).expand(3, 4), torch.zeros(3, 4, requires_grad=True), inference):
        x = torch.zeros(3, 4)
        with pytest.raises(KeepdimError, match=r"^\[bind\] input 1 'y': is changed by the call, and "):
            module(x, bad)
        assert not x.any()
    x, y = torch.zeros(3, 4), torch.zeros(3, 4)
    assert (module(x, y) == 2).all() and x.all() and y.all()


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_calls_inside_of_modes_of_torch(module: keepdim.Module) -> None:
    """Another default device changes nothing; where tensors have no memory, the call is refused."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    want = module(X)
    with torch.device("meta"):
        assert torch.equal(module(X), want)
    with pytest.raises(KeepdimError, match="torch gives no memory for it here"), FakeTensorMode():
        module(X)
    with pytest.raises(KeepdimError, match=r"^\[bind\] "), FakeTensorMode(allow_non_fake_inputs=True):
        module(torch.empty(3, 8))
    for transform, x in ((torch.vmap(module), torch.randn(2, 3, 8)), (torch.func.grad(lambda x: module(x).sum()), X)):
        with pytest.raises(KeepdimError, match=r"^\[bind\] call: torch gives no memory"):
            transform(x)
    assert torch.equal(module(X), want)


def test_arguments_of_the_wrong_type(decoder: Any, module: keepdim.Module, tmp_path: Path) -> None:
    """Of everything that is public."""
    linear, model = nn.Linear(8, 4).eval(), keepdim.lower_llm(decoder, 16)
    calls: list[Callable[[], Any]] = [
        lambda: keepdim.lower(linear, (X,), dynamic_shapes=5),
        lambda: keepdim.lower(linear, (X,), dynamic_shapes=({0: N[0]}, {0: N[0]}, [[]])),
        lambda: keepdim.lower(linear, (X,), dynamic_shapes=((),) * 2),
        lambda: keepdim.lower(linear, (X,), partitioner=5),  # type: ignore[arg-type]
        lambda: keepdim.lower(linear, (X,), partitioner=keepdim.GgmlPartitioner),  # type: ignore[arg-type]
        lambda: keepdim.audit(linear, 5),  # type: ignore[arg-type]
        lambda: keepdim.load_stablehlo(5),  # type: ignore[arg-type]
        lambda: keepdim.Module(5),  # type: ignore[arg-type]
        lambda: keepdim.load(module.path, verify="no"),  # type: ignore[arg-type]
        lambda: keepdim.LanguageModel(5),  # type: ignore[arg-type]
        lambda: Writer.of(5),  # type: ignore[arg-type]
        lambda: Text.from_json(5),  # type: ignore[arg-type]
        lambda: model.rewind(True),
        lambda: keepdim.set_options(threads=2**40),
    ]
    for call in calls:
        with pytest.raises(KeepdimError, match=r"^\[\w+\] .*: "):
            call()
    sparse = torch.tensor([1, 2]).to_sparse()
    assert torch.equal(model(sparse), keepdim.LanguageModel.load(model.module.path)([1, 2]))


# ---------------------------------------------------------------- copies
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps, lambda m: pickle.dumps([m], 0)])
def test_what_is_loaded_is_not_copied(copied: Any, module: keepdim.Module, decoder: Any) -> None:
    """Neither a module nor a model; both work as before."""
    for what in (module, keepdim.lower_llm(decoder, 16)):
        with pytest.raises(
            KeepdimError, match=r"^\[save\] .* cannot be copied or pickled.* Write it with save\(path\)"
        ):
            copied(what)
    assert module(X).shape == (3, 4)


# ---------------------------------------------------------------- the file of thresholds
@pytest.mark.parametrize(
    "content",
    [
        {"work_per_thread": 2**70}, {"work_per_thread": -(2**70)}, {"work_per_thread": -1}, {"work_per_thread": "9"},
        {"work_per_thread": 1.5}, {"work_per_thread": None}, {"work_per_thread": [1]}, {"unknown": 1}, {"\ud800": 1},
        [], 7, None, "x",
    ],
    ids=ascii,
)  # fmt: skip
def test_thresholds_of_a_file(content: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """What is not good is not used, and said; a module loads all the same."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    thresholds.stored_file().parent.mkdir(parents=True)
    thresholds.stored_file().write_text(json.dumps(content))
    before = _native.thresholds("ggml")
    thresholds.use.cache_clear()
    with caplog.at_level(logging.WARNING, "keepdim"):
        keepdim.load(Path(__file__).parents[1] / "golden" / "linear.pte")
    thresholds.use.cache_clear()
    assert "are not used" in caplog.text and _native.thresholds("ggml") == before


def test_text_of_a_signature() -> None:
    """What is not a JSON at all."""
    for text in TEXTS:
        with pytest.raises(KeepdimError):
            Signature.from_json(text)
