"""Write the first inputs of the fuzzers: `python tests/mutants/seeds.py FOLDER`, one folder in it for each fuzzer.

What fuzzing adds to them is merged (tests/mutants/fuzz.py), so that the corpus in the repository stays small.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from mutants import checkpoints, pte, stablehlo
from support import mutated_programs


def _body(name: str) -> bytes:
    return pte._parts(name)[0]


def _starts(body: bytes) -> list[int]:
    """Where JSON begins in a file."""
    return [m.start() for m in re.finditer(rb'\{"version":', body)]


def write(folder: Path, inputs: list[bytes]) -> None:
    """Each under the name that libFuzzer gives it."""
    folder.mkdir(parents=True, exist_ok=True)
    for data in inputs:
        (folder / hashlib.sha1(data).hexdigest()).write_bytes(data)


if __name__ == "__main__":
    root = Path(sys.argv[1])
    programs = [*mutated_programs.lowered(), *map(mutated_programs.hand_made, mutated_programs.OPS)]
    write(root / "program", [json.dumps(p, separators=(",", ":")).encode() for p in programs])
    write(root / "pte", [pte._parts(name)[0] for name in pte.originals()])
    texts = [body[at:].split(b"\0")[0] for body in map(_body, pte.originals()) for at in _starts(body)]
    write(root / "signature", [*texts, *(json.dumps(p).encode() for p in programs[:12])])
    write(root / "stablehlo", [f[n] for f in stablehlo.originals().values() for n in f if n.endswith(".mlir")])
    write(root / "gguf", [data[: 16 << 10] for data in checkpoints.originals().values()])
