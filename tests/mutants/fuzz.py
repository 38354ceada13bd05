"""Run the fuzzers for so many seconds in all, two at a time: `python tests/mutants/fuzz.py 300`, after they were built.

Each starts from tests/corpus and from what an earlier run found (build/fuzz/found). `--merge` puts what is new into
tests/corpus instead. A fault leaves its input in build/fuzz/faults, and the exit code 1.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILD, CORPUS = ROOT / "build" / "fuzz", ROOT / "tests" / "corpus"
LARGEST = 16 << 10  # bytes of an input
TARGETS = {
    "pte": 0.3,  # its part of the time
    "program": 0.25,
    "gguf": 0.1,
    "signature": 0.15,
    "stablehlo": 0.2,
}


def command(target: str) -> list[str]:
    """How a fuzzer is started: in C++ with libFuzzer, in Python with atheris, which is libFuzzer too."""
    if target in ("signature", "stablehlo"):
        return [sys.executable, str(ROOT / "tests" / "mutants" / "fuzz_text.py"), target]
    return [str(BUILD / f"fuzz_{target}")]


def run(target: str, *options: str) -> tuple[int, str]:
    """One run; its exit code and what it said."""
    environment = {**os.environ, "ASAN_OPTIONS": "allocator_may_return_null=1", "UBSAN_OPTIONS": "print_stacktrace=1"}
    done = subprocess.run(
        [*command(target), *options], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    return done.returncode, done.stdout.decode(errors="replace")


def fuzz(target: str, seconds: float) -> bool:
    """Whether nothing was found in so many seconds."""
    found, faults = BUILD / "found" / target, BUILD / "faults"
    found.mkdir(parents=True, exist_ok=True)
    faults.mkdir(parents=True, exist_ok=True)
    limits = [f"-max_total_time={max(1, int(seconds))}", f"-max_len={LARGEST}", "-timeout=10", "-rss_limit_mb=4000"]
    code, said = run(target, *limits, f"-artifact_prefix={faults}/{target}-", str(found), str(CORPUS / target))
    last = re.findall(r"^Done (\d+) runs in (\d+) second", said, re.M)
    coverage = re.findall(r"cov: (\d+)", said)
    if code or not last:
        print(f"{target}: exit code {code}\n{said[-6000:]}", flush=True)
        return False
    print(f"{target}: {last[-1][0]} runs in {last[-1][1]} s, {coverage[-1]} edges", flush=True)
    return True


def merge() -> None:
    """Add to the corpus what reaches more of the code, as small as it is found."""
    for target in TARGETS:
        options = ["-merge=1", f"-max_len={LARGEST}", f"-artifact_prefix={BUILD / 'faults'}/{target}-"]
        run(target, *options, str(CORPUS / target), str(BUILD / "found" / target))
        print(f"{target}: {len(list((CORPUS / target).iterdir()))} inputs", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--merge":
        merge()
        sys.exit()
    with ThreadPoolExecutor(2) as pool:
        parts = [pool.submit(fuzz, t, 2 * part * float(sys.argv[1])) for t, part in TARGETS.items()]
        sys.exit(0 if all([p.result() for p in parts]) else 1)
