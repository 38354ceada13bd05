"""6,000 mutated Programs: each is refused with a sentence or runs. Never a crash, a hang or another exception."""

import json
import subprocess
import sys

from support import mutated_programs
from support.mutated_programs import COUNT, OPS


def test_mutated_programs(engine, tmp_path, programs):
    """Every mutant is refused or runs, in a process that ends well; every op of the engine is among the seeds."""
    from keepdim import _native

    current = tmp_path / "current.json"
    command = [
        sys.executable,
        mutated_programs.__file__,
        engine,
        str(current),
        str((engine == "ggml" and programs) or ""),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    last = current.read_text() if current.exists() else "no program yet"
    assert done.returncode == 0, f"exit code {done.returncode} at\n{last}\n{done.stderr[-3000:]}"
    counts = json.loads(done.stdout.splitlines()[-1])
    assert set(counts.pop("ops")) >= set(_native.engines()["ggml"])  # every engine has the same
    assert counts.pop("healthy") == counts.pop("seeds") >= 9 + len(OPS)
    assert sum(counts.values()) == COUNT
    assert counts["refused"] > COUNT // 3 and counts["refused at run"] > COUNT // 20 and counts["ran"] > COUNT // 10, (
        counts
    )
