"""A checkpoint folder of a stranger: none of its code runs, nothing outside of it is read."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from keepdim import KeepdimError
from keepdim.models import checkpoint
from keepdim.models.checkpoint import check_folder, read_model, read_tokenizer
from keepdim.models.encoder import Encoder, Pooled
from keepdim.models.generate import open_model

transformers = pytest.importorskip("transformers")
EVIL = "import os\nos.system('touch {here}/PWNED')\nfrom transformers import PretrainedConfig\n"
EVIL += "class C(PretrainedConfig): model_type = 'evilmodel'\nclass M: pass\n"
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 1}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama in two shards, with a tokenizer."""
    from tokenizers import Tokenizer, models

    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, vocab_size=64, max_position_embeddings=32)
    transformers.LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="20KB")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


def change(folder: Path, name: str, **values: Any) -> None:
    """Set keys of a JSON file of the folder."""
    path = folder / name
    body = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(body | values))


def test_a_good_folder_is_read(good: Path) -> None:
    """With its shards and its tokenizer."""
    check_folder("generate", good)
    assert read_model("generate", "AutoModelForCausalLM", good).dtype == torch.float32
    assert read_tokenizer("generate", good).backend_tokenizer is not None


# ---------------------------------------------------------------- code
def evil(folder: Path) -> Path:
    """A folder whose model is code in it."""
    folder.mkdir(exist_ok=True)
    (folder / "evil.py").write_text(EVIL.format(here=folder))
    code = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M", "AutoModel": "evil.M"}
    change(folder, "config.json", model_type="evilmodel", auto_map=code)
    return folder


@pytest.mark.parametrize(
    "command", [["generate", "{f}", "--chat"], ["embed", "--model", "{f}", "a text"]], ids=["generate", "embed"]
)
def test_code_of_a_folder_does_not_run(command: list[str], tmp_path: Path) -> None:
    """Also where standard input says yes: nobody asks, and the next command could read that line."""
    folder = evil(tmp_path / "folder")
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, '
                                           '"unk_token": "a"}, "added_tokens": []}')  # fmt: skip
    script = f"{sys.executable} -m keepdim {' '.join(map(repr, command))}; echo code $?; cat"
    done = subprocess.run(
        ["bash", "-c", script.replace("{f}", str(folder))], input="y\ny\n", cwd=folder, capture_output=True, text=True,
        env={"PATH": "/usr/bin:/bin", "XDG_CACHE_HOME": str(tmp_path), "HF_MODULES_CACHE": str(tmp_path / "modules")},
    )  # fmt: skip
    assert "needs Python code of the checkpoint (auto_map), which keepdim does not run" in done.stderr, done.stderr
    assert done.stdout == "code 1\ny\ny\n"
    assert not list(tmp_path.rglob("PWNED"))
    assert "Traceback" not in done.stderr


def test_code_of_a_tokenizer_does_not_run(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that transformers knows, with a tokenizer of its own."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on standard input"))
    folder = shutil.copytree(good, tmp_path / "folder")
    (folder / "evil.py").write_text(EVIL.format(here=folder))
    change(folder, "tokenizer_config.json", tokenizer_class="Evil", auto_map={"AutoTokenizer": [None, "evil.C"]})
    change(folder, "config.json", model_type="evilmodel")
    with pytest.raises(KeepdimError, match=r"needs Python code of the checkpoint"):
        read_tokenizer("generate", folder)
    assert not (folder / "PWNED").exists()


def test_a_known_model_with_code_beside_it(good: Path, tmp_path: Path) -> None:
    """Many folders have both: transformers' own class is taken."""
    folder = shutil.copytree(good, tmp_path / "folder")
    (folder / "evil.py").write_text(EVIL.format(here=folder))
    change(folder, "config.json", auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"})
    assert type(read_model("generate", "AutoModelForCausalLM", folder)).__name__ == "LlamaForCausalLM"
    assert not (folder / "PWNED").exists()


# ---------------------------------------------------------------- paths and kernels
@pytest.mark.parametrize(
    "name", ["../other.safetensors", "/etc/passwd", "sub/model.safetensors", "..", "", "a\\b", "a\0b", 7, None, ["x"]]
)
def test_a_shard_outside_of_the_folder(name: Any, good: Path, tmp_path: Path) -> None:
    """The index of shards names files of its folder."""
    folder = shutil.copytree(good, tmp_path / "folder")
    change(folder, "model.safetensors.index.json", weight_map={"lm_head.weight": name})
    with pytest.raises(KeepdimError, match=r"\[generate\] .*index\.json: names the weight file .* not a file name"):
        read_model("generate", "AutoModelForCausalLM", folder)


@pytest.mark.parametrize(
    ("values", "fact"),
    [
        ({"attn_implementation": "someone/kernel"}, "its attn_implementation is 'someone/kernel', which keepdim does"),
        ({"_attn_implementation": "flash_attention_2"}, "Remove _attn_implementation from the file"),
        ({"text_config": {"attn_implementation": "someone/kernel"}}, "its attn_implementation is"),
        ({"layers": [{"attn_implementation": {"": "someone/kernel"}}]}, "its attn_implementation is"),
        ({"experts_implementation": "someone/kernel"}, "its experts_implementation is"),
        ({"use_kernels": True}, "its use_kernels is True"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "keepdim quantises it itself"),
        ({"fusion_config": {"x": 1}}, "its fusion_config is"),
        ({"transformers_weights": "../x.safetensors"}, "names the weight file '../x.safetensors'"),
        ({"a": json.loads("[" * 30 + "]" * 30)}, "is nested deeper than 20 levels"),
    ],
)
def test_a_config_that_names_code_or_files(values: dict[str, Any], fact: str, good: Path, tmp_path: Path) -> None:
    """Kernels of the hub, quantisation, files elsewhere: refused in both commands, before transformers reads."""
    folder = shutil.copytree(good, tmp_path / "folder")
    change(folder, "config.json", **values)
    for read in (lambda: open_model(folder), lambda: Pooled.from_folder(folder)):
        with pytest.raises(KeepdimError, match=r"^\[(generate|embed)\] .*config\.json: ") as e:
            read()
        assert fact in str(e.value)


def test_code_of_a_part_of_a_model_does_not_run(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers makes the models inside a model without trust_remote_code, and would ask on standard input."""
    module = importlib.import_module("transformers.dynamic_module_utils")
    before = module.get_class_in_module, module.TIME_OUT_REMOTE_CODE
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    folder = tmp_path / "folder"
    shutil.copytree(good, folder)
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass M: pass\n")
    part = {"model_type": "trocr", "auto_map": {"AutoModel": "evil.M"}, "_name_or_path": str(folder)}
    small = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 64}
    (folder / "config.json").write_text(
        json.dumps({"model_type": "gemma3", "text_config": small, "vision_config": part})
    )
    with pytest.raises(KeepdimError, match=r"a part of the model needs Python code of the checkpoint \(auto_map\)"):
        read_model("generate", "AutoModelForCausalLM", folder)
    monkeypatch.setattr(checkpoint, "check_folder", lambda *_: None)
    with pytest.raises(KeepdimError):  # transformers itself does not get to it either
        read_model("generate", "AutoModelForCausalLM", folder)
    assert not (tmp_path / "ran").exists()
    assert (module.get_class_in_module, module.TIME_OUT_REMOTE_CODE) == before


def test_a_tokenizer_outside_of_the_folder(good: Path, tmp_path: Path) -> None:
    """A file that the folder names is one of its own."""
    folder = tmp_path / "folder"
    shutil.copytree(good, folder)
    path = folder / "tokenizer_config.json"
    for key, value in (("fast_tokenizer_files", ["../tokenizer.4.0.0.json"]), ("vocab_file", "/etc/passwd")):
        path.write_text(json.dumps(json.loads((good / path.name).read_text()) | {key: value}))
        with pytest.raises(KeepdimError, match="which is not a file name in its folder"):
            read_tokenizer("generate", folder)


def test_an_adapter_is_refused(good: Path, tmp_path: Path) -> None:
    """PEFT would take the base model from anywhere."""
    folder = shutil.copytree(good, tmp_path / "folder")
    change(folder, "adapter_config.json", base_model_name_or_path="/somewhere/else")
    with pytest.raises(KeepdimError, match=r"adapter_config\.json: the folder holds an adapter.*merge_and_unload"):
        open_model(folder)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 10**5, '{"a": 1' + "0" * 5000 + "}", "\xff"])
def test_a_config_that_is_not_json(text: str, good: Path, tmp_path: Path) -> None:
    """A sentence, not transformers' or Python's own error."""
    folder = shutil.copytree(good, tmp_path / "folder")
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    for read in (lambda: open_model(folder), lambda: Encoder.load(folder)):
        with pytest.raises(KeepdimError, match=r"config\.json: is not a JSON object"):
            read()


def test_the_cause_of_a_failed_import(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers imports its parts when they are asked for, and does not say which package failed."""

    class Package:
        def __getattr__(self, name: str) -> object:
            try:
                raise RuntimeError("operator torchvision::nms does not exist")
            except RuntimeError as e:
                raise ModuleNotFoundError(f"Could not import module '{name}'") from e

    monkeypatch.setattr(checkpoint, "optional", lambda stage, package: Package())
    said = "module 'AutoModel'; caused by RuntimeError: operator torchvision::nms does not exist"
    with pytest.raises(KeepdimError, match=said):
        read_model("embed", "AutoModel", good)


def test_weights_that_are_a_pickle_of_code(good: Path, tmp_path: Path) -> None:
    """A .bin file is read as tensors alone."""

    class Evil:
        def __reduce__(self) -> Any:
            return open, (str(tmp_path / "PWNED"), "w")

    folder = shutil.copytree(good, tmp_path / "folder")
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    torch.save({"lm_head.weight": Evil()}, folder / "pytorch_model.bin")
    with pytest.raises(KeepdimError, match="cannot be read as a language model"):
        read_model("generate", "AutoModelForCausalLM", folder)
    assert not (tmp_path / "PWNED").exists()


@pytest.mark.parametrize("value", ["many", -1, True, [1], float("nan")])
def test_a_length_that_is_no_number(value: Any, good: Path, tmp_path: Path) -> None:
    """`embed` reads lengths itself."""
    folder = shutil.copytree(good, tmp_path / "folder")
    change(folder, "config.json", max_position_embeddings=value)
    with pytest.raises(KeepdimError, match=r"config\.json: its max_position_embeddings is .*, not a number of tokens"):
        Encoder.load(folder)
