"""What happens to a shape contract: the shape cases of the tests through plain ExecuTorch (XNNPACK) and keepdim.

    python bench/conformance/contracts.py [case ...] [--csv bench/results/contracts.csv]

Cases run in worker processes, so that a crash is a result and does not end the run. Per flow: is it lowered, are the
ranges kept, are the numbers eager's at every good size, is every bad input refused.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import csv
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
import workers  # in this folder

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from support.contract_cases import CASES, Case  # noqa: E402

LIMIT = 120  # seconds of CPU a case
Call = Callable[..., list[Any]]


def stock(case: Case) -> tuple[Call, bool]:
    """Export, XNNPACK, .pte, ExecuTorch's Python runtime; and whether the ranges were kept."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower
    from executorch.runtime import Runtime

    args, kwargs = split(case.args)
    ep = torch.export.export(case.model(), args, kwargs, dynamic_shapes=case.shapes)
    ranges = {str(k): str(v) for k, v in ep.range_constraints.items()}
    edge = to_edge_transform_and_lower(ep, partitioner=[XnnpackPartitioner()])
    kept = {str(k): str(v) for k, v in edge.exported_program().range_constraints.items()} == ranges
    path = Path(tempfile.mkdtemp()) / "stock.pte"
    with path.open("wb") as f:
        edge.to_executorch().write_to_file(f)
    program = Runtime.get().load_program(path)
    method = program.load_method("forward")

    def call(*args: Any, **kwargs: Any) -> list[Any]:
        assert program is not None
        return list(method.execute([x for x in pytree.tree_leaves((args, kwargs)) if x is not None]))

    return call, kept


def ours(case: Case) -> tuple[Call, bool]:
    """keepdim.lower, saved and loaded again."""
    import keepdim

    args, kwargs = split(case.args)
    lowered = keepdim.lower(case.model(), args, kwargs, dynamic_shapes=case.shapes)
    path = Path(tempfile.mkdtemp()) / "ours.pte"
    lowered.save(path)
    module = keepdim.load(path)
    return lambda *a, **k: pytree.tree_leaves(module(*a, **k)), module.contract == lowered.contract


FLOWS: dict[str, Callable[[Case], tuple[Call, bool]]] = {"plain ExecuTorch": stock, "keepdim": ours}


def split(given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ((), given) if isinstance(given, dict) else (tuple(given), {})


def same(want: Any, got: list[Any]) -> bool:
    leaves = [x for x in pytree.tree_leaves(want) if x is not None]
    got = [x for x in got if x is not None]
    if len(leaves) != len(got):
        return False
    for a, b in zip(leaves, got, strict=True):
        if isinstance(a, torch.Tensor):
            if not isinstance(b, torch.Tensor) or a.shape != b.shape:
                return False
            if not torch.allclose(a.double(), b.double(), atol=1e-4, rtol=1e-4, equal_nan=True):  # XNNPACK's accuracy
                return False
        elif a != b:
            return False
    return True


def judge(name: str, flow: str) -> dict[str, int]:
    """One case through one flow, as counts."""
    case = CASES[name]()
    counts = dict.fromkeys(("lowered", "kept", "right", "good", "good_ok", "bad", "refused", "wrong"), 0)
    counts["good"], counts["bad"] = len(case.good), len(case.bad)
    try:
        call, kept = FLOWS[flow](case)
    except Exception:  # a flow that cannot lower a case: that is the result
        return counts
    counts["lowered"], counts["kept"] = 1, int(kept)
    eager = copy.deepcopy(case.model())
    for given in case.good:
        args, kwargs = split(given)
        want = eager(*copy.deepcopy(args), **copy.deepcopy(kwargs))
        with contextlib.suppress(Exception):  # refused in range, in whatever words: not ok
            counts["good_ok"] += same(want, call(*args, **kwargs))
    for given, _ in case.bad:
        args, kwargs = split(given)
        try:
            got = call(*args, **kwargs)
        except Exception:  # refused, in whatever words
            counts["refused"] += 1
            continue
        try:
            want = copy.deepcopy(case.model())(*args, **kwargs)
            counts["wrong"] += not same(want, got)
        except Exception:  # eager refuses what the flow answered
            counts["wrong"] += 1
    counts["right"] = int(counts["good_ok"] == counts["good"])
    return counts


def work(job: tuple[str, str], say: workers.Say) -> Iterator[dict[str, int]]:
    yield judge(*job)


def dead(job: tuple[str, str], said: Any, how: str) -> tuple[list[dict[str, int]], None]:
    """A crash or a hang gives no counts but the totals."""
    case = CASES[job[0]]()
    return [{"crashed": 1, "good": len(case.good), "bad": len(case.bad)}], None


QUESTIONS = (
    ("models lowered", "lowered", ""),
    ("ranges kept through lowering", "kept", ""),
    ("right at every size in range", "right", ""),
    ("calls in range that are right", "good_ok", "good"),
    ("calls out of contract refused", "refused", "bad"),
    ("calls out of contract with a wrong answer", "wrong", "bad"),
    ("crashes", "crashed", ""),
)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="all that keepdim lowers, unless named")
    parser.add_argument("--csv", type=Path, default=Path(__file__).parents[1] / "results" / "contracts.csv")
    args = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    import executorch.runtime  # noqa: F401  once, before forking

    import keepdim  # noqa: F401

    names = args.cases or [n for n, make in CASES.items() if not make().refused]
    totals: dict[str, dict[str, int]] = {flow: {} for flow in FLOWS}
    jobs = [(name, flow) for name in names for flow in FLOWS]
    found = {}
    for job, (counts,) in workers.run(jobs, work, dead, LIMIT, 2):
        found[job] = counts
        for key, n in counts.items():
            totals[job[1]][key] = totals[job[1]].get(key, 0) + n
    rows = [[*job, *(found[job].get(key, 0) for _, key, _ in QUESTIONS)] for job in jobs]
    with args.csv.open("w", newline="") as f:
        csv.writer(f).writerows([["case", "flow", *(key for _, key, _ in QUESTIONS)], *rows])
    print(f"| {len(names)} models | " + " | ".join(FLOWS) + " |\n|---|" + "---|" * len(FLOWS))
    for question, key, of in QUESTIONS:
        cells = [f"{t.get(key, 0)}" + (f" of {t.get(of, 0)}" if of else "") for t in totals.values()]
        print(f"| {question} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
