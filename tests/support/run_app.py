"""Run keepdim_call over real files: `PYTHONPATH=tests python -m support.run_app build/tsan/keepdim_call
4 20`, 4 threads, 20 calls each.

The files are those of the mutation runs: delegates, branches, loops, integers, and kernels of ExecuTorch. All threads
have to get the first result. For the sanitizers, which see the runtime through the entry that an app uses.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

from mutants import pte
from support import apps

SETS = {
    "linear": [[torch.randn(n, 8)] for n in (2, 3, 16, 3, 17)],
    "conv": [[torch.randn(1, 3, n, 8)] for n in (4, 7, 32, 7)],
    "branches": [[torch.randn(n, 8)] for n in (2, 8, 9, 16)],
    "loop": [[torch.randn(n, 8)] for n in (2, 5, 16)],
    "integers": [[torch.ones(4), 3], [torch.ones(16), 9], [torch.ones(3), 3]],
    "kernels": [[torch.randn(n, 8)] for n in (2, 5, 16)],
}


def main(program: str, threads: int, calls: int) -> None:
    """Call every file; fail with the output of the first that goes wrong."""
    apps.program = lambda: Path(program)  # type: ignore[assignment]
    with tempfile.TemporaryDirectory() as folder:
        for name, data in pte.originals().items():
            path = Path(folder) / f"{name}.pte"
            path.write_bytes(data)
            at_once = () if name == "integers" else (threads, calls)  # it changes its input, so no two calls are alike
            found = apps.call(path, SETS[name], Path(folder), *at_once)
            ran = sum(not isinstance(f, str) for f in found)
            print(
                f"{name}: {ran} of {len(found)} sets of inputs ran (threads and calls of each: {at_once})", flush=True
            )
            assert ran >= 2


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
