"""Checkpoint folders of transformers, read as data: no code from the folder, no files outside it, no hub access.

transformers may run Python files of a folder, asks on standard input for permission, and follows names of weight
files, base models and kernels in the folder's JSON files. All of that is checked or disabled here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..compat.lock import one_at_a_time
from ..compat.transformers import no_remote_code
from ..errors import describe_exception, fail, optional

NESTED = 20  # levels of a config, which may contain configs of parts of the model
# Keys of a config whose value transformers may load or run as code, and the values that are harmless.
KEYS: dict[str, tuple[object, ...]] = {
    "attn_implementation": (None, "eager", "sdpa"),
    "_attn_implementation": (None, "eager", "sdpa"),
    "_attn_implementation_internal": (None, "eager", "sdpa"),
    "experts_implementation": (None, "eager", "grouped_mm", "batched_mm"),
    "_experts_implementation": (None, "eager", "grouped_mm", "batched_mm"),
    "_experts_implementation_internal": (None, "eager", "grouped_mm", "batched_mm"),
    "quantization_config": (None,),
    "kernel_config": (None,),
    "fusion_config": (None,),
    "use_kernels": (None, False),
    "configuration_files": (None, []),
}


@one_at_a_time
def read_model(stage: str, kind: str, folder: Path) -> Any:
    """The model of a folder, in f32, by an Auto class of transformers."""
    check_folder(stage, folder)
    package, what = optional(stage, "transformers"), "language model" if kind == "AutoModelForCausalLM" else "model"
    try:
        auto = getattr(package, kind)  # imported here
        with no_remote_code():
            return auto.from_pretrained(
                folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False, weights_only=True
            )
    except Exception as e:  # transformers and safetensors raise many types
        _refuse_code(stage, folder, e)
        fail(stage, str(folder), f"cannot be read as a {what} ({_with_root_cause(e)})", cause=e)


def _with_root_cause(e: BaseException) -> str:
    """An exception in words. transformers says of a failed import only what it wanted to import: the first exception of
    the chain is added, such as that of another package."""
    root = e
    while (earlier := root.__cause__ or root.__context__) is not None:
        root = earlier
    said = describe_exception(e)
    return f"{said}; caused by {describe_exception(root)}" if isinstance(e, ImportError) and root is not e else said


@one_at_a_time
def read_tokenizer(stage: str, folder: Path, **more: object) -> object:
    """The tokenizer of a folder."""
    auto = optional(stage, "transformers").AutoTokenizer
    for path in sorted(folder.glob("*tokenizer_config.json")):
        for key, value in _entries(read_object(stage, path), NESTED):
            if key.endswith(("_file", "_files")):
                for name in value if isinstance(value, list) else [value]:
                    _check_name(stage, path, name, "file")
    try:
        with no_remote_code():
            return auto.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **more)
    except Exception as e:  # as above
        _refuse_code(stage, folder, e)
        fail(stage, str(folder), f"its tokenizer cannot be read ({describe_exception(e)})", cause=e)


_WITHOUT_CODE = (
    "Use a model that transformers itself has, or build this one in your program and pass it to keepdim.lower_llm or "
    "keepdim.lower"
)


def _refuse_code(stage: str, folder: Path, e: Exception) -> None:
    if "trust_remote_code" in str(e):  # transformers' remedy, which keepdim does not support
        fail(stage, str(folder), "needs Python code of the checkpoint (auto_map), which keepdim does not run",
             _WITHOUT_CODE, e)  # fmt: skip


def check_folder(stage: str, folder: Path) -> None:
    """Raise for a folder whose JSON files refer to anything outside it, before transformers follows them."""
    adapter = folder / "adapter_config.json"
    if adapter.exists():
        fail(stage, str(adapter), "the folder holds an adapter, whose base model is elsewhere",
             "Merge it into its model with PEFT's merge_and_unload, and save that")  # fmt: skip
    for path in sorted(folder.glob("*.index.json")):
        names = read_object(stage, path).get("weight_map")
        if not isinstance(names, dict):
            fail(stage, str(path), "has no weight_map", "Save the checkpoint again")
        for name in names.values():
            _check_name(stage, path, name)
    config = folder / "config.json"
    top = read_object(stage, config)
    for key, value in _entries(top, NESTED):
        if key == "auto_map" and value is not top.get("auto_map"):
            fail(stage, str(config), "a part of the model needs Python code of the checkpoint (auto_map), which "
                 "keepdim does not run", f"{_WITHOUT_CODE}")  # fmt: skip
        if key == "transformers_weights":
            _check_name(stage, config, value)
        elif key in KEYS and not any(value is v or value == v for v in KEYS[key]):
            fail(stage, str(config), f"its {key} is {value!r:.80}, which keepdim does not load",
                 _remedy(key))  # fmt: skip
        elif value is _TOO_DEEP:
            fail(stage, str(config), f"is nested deeper than {NESTED} levels", "Save the checkpoint again")


def _remedy(key: str) -> str:
    if key == "quantization_config":
        return "Take the checkpoint in f32, f16 or bf16; keepdim quantises it itself (quant=)"
    return f"Remove {key} from the file"


def _check_name(stage: str, path: Path, name: object, what: str = "weight file") -> None:
    """Raise if a name in a JSON file is not a plain file name in the folder."""
    plain = isinstance(name, str) and name not in ("", ".", "..") and not {"/", "\\", "\0", ":"} & {*name}
    if not plain:
        fail(stage, str(path), f"names the {what} {name!r:.80}, which is not a file name in its folder",
             "Put the file into the folder and name it there")  # fmt: skip


_TOO_DEEP = object()


def _entries(value: object, left: int) -> Iterator[tuple[str, object]]:
    """Keys and values of an object and of all nested ones."""
    if not left:
        yield "", _TOO_DEEP
        return
    pairs = value.items() if isinstance(value, dict) else ((("", v) for v in value) if isinstance(value, list) else ())
    for key, inner in pairs:
        yield key, inner
        if isinstance(inner, (dict, list)):
            yield from _entries(inner, left - 1)


def read_object(stage: str, path: Path) -> dict[str, object]:
    """A JSON file of a checkpoint."""
    try:
        found = json.loads(path.read_bytes())  # transformers writes Infinity, which strict readers refuse
    except (OSError, ValueError, RecursionError) as e:
        fail(stage, str(path), f"is not a JSON object ({describe_exception(e)})", "Save the checkpoint again", e)
    if not isinstance(found, dict):
        fail(stage, str(path), f"is not a JSON object ({type(found).__name__})", "Save the checkpoint again")
    return found


__all__ = ["check_folder", "read_model", "read_object", "read_tokenizer"]
