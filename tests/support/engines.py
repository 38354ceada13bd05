"""The engines that are installed, which tests run on by the parameter `engine`, and the names of their backends."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import keepdim
from keepdim.lowering.pipeline import ENGINES as KNOWN


def _installed(name: str) -> bool:
    library = Path(keepdim._native.__file__).parent / f"libkeepdim_{name}.so"
    return name == "ggml" or (library.exists() and importlib.util.find_spec(name) is not None)


ENGINES = [name for name in KNOWN if _installed(name)]
BACKENDS = {name: partitioner.backend.__name__ for name, partitioner in KNOWN.items()}
