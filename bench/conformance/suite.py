"""Which ops of others' suites run, are right, and are delegated?

    python bench/conformance/suite.py [--only PATTERN] [--flow NAME ...]   ExecuTorch's operator suite through each flow
    python bench/conformance/suite.py --opinfo [--only PATTERN] [--shard 1/4]  torch's OpInfo samples through keepdim

The operator suite's cases (`executorch.backends.test.suite.operators`) go through five flows, each in a worker process:
keepdim (`keepdim.lower`, saved and loaded: what a user does), the same with every dim dynamic that can be, keepdim's
partitioner in ExecuTorch's stock flow, XNNPACK and portable (no delegate). A case passes within the suite's own
tolerance; it is right within a thousandth of that. Unlike the suite's runner, which skips what it believes ExecuTorch's
kernels cannot do and what has no delegate, everything is run: each worker may die. Several models share a lowering
where all of them pass in it; otherwise each has its own.
"""

from __future__ import annotations

import argparse
import csv
import functools
import importlib
import itertools
import os
import pkgutil
import re
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.utils._pytree as pytree
from executorch.backends.test.harness import Tester
from executorch.backends.test.suite.flows.portable import PORTABLE_TEST_FLOW
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge_transform_and_lower
from executorch.runtime import Runtime
from torch.export import decomp_utils, exported_program

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "tests")]
import workers  # noqa: E402

import keepdim  # noqa: E402
from keepdim.errors import KeepdimError  # noqa: E402
from keepdim.lowering.pipeline import report_on  # noqa: E402
from support import opinfo  # noqa: E402

OPERATORS = "executorch.backends.test.suite.operators"
LOOSE = {"atol": 1e-1, "rtol": 4e-2}  # the suite's own
TIGHT = {"atol": 1e-4, "rtol": 4e-5}
LIMIT = 120.0  # seconds a case, or a group of samples
RESULTS = Path(__file__).parents[1] / "results"


# ---------------------------------------------------------------- the cases
class Recorder:
    """Stands in for the suite's runner, and keeps the models and inputs it is given."""

    _flow = PORTABLE_TEST_FLOW  # cases ask it whether to quantise

    def __init__(self) -> None:
        self.given: list[opinfo.Call] = []

    def lower_and_run_model(self, model: torch.nn.Module, inputs: Any, generate_random_test_inputs: bool = True,
                            dynamic_shapes: Any = None) -> None:  # fmt: skip
        call = opinfo.Call(model.eval(), inputs, {})
        self.given.append(call)  # no operator case has dynamic_shapes: a separate flow makes every dim dynamic
        if generate_random_test_inputs:  # of the same shapes, dtypes and memory formats, as the suite makes them
            call.others += Tester(model, tuple(inputs)).generate_random_inputs()


def cases() -> dict[str, Callable[[Recorder], None]]:
    """Every case of the suite by name, those included that it skips (NaN and infinity, in-place activations)."""
    out: dict[str, Callable[[Recorder], None]] = {}
    package = importlib.import_module(OPERATORS)
    for info in pkgutil.iter_modules(package.__path__):
        with mock.patch("unittest.skip", lambda reason: lambda test: test):
            module = importlib.import_module(f"{OPERATORS}.{info.name}")
        for name, fn in vars(module).items():
            if name.startswith("test") and callable(fn):
                marks = [m for m in getattr(fn, "pytestmark", []) if m.name == "parametrize"]
                for values in itertools.product(*(m.args[1] for m in marks)):
                    given = {m.args[0]: v for m, v in zip(marks, values, strict=True)}
                    label = "".join(f"[{str(v).removeprefix('torch.')}]" for v in values)
                    out[name.removeprefix("test_") + label] = functools.partial(fn, **given)
    return out


def record(names: Sequence[str]) -> list[tuple[str, opinfo.Call]]:
    """The models of some cases with their inputs, by name, from a seed."""
    out = []
    for name in names:
        recorder = Recorder()
        torch.manual_seed(0)
        cases()[name](recorder)
        many = len(recorder.given) > 1
        out += [(name + f"#{i}" * many, call) for i, call in enumerate(recorder.given)]
    return out


# ---------------------------------------------------------------- the flows
Lowered = tuple[Callable[[list[Any]], list[Any]], Any]  # flat tensors → the last of its flat results; the report


def ours(model: torch.nn.Module, tensors: list[Any]) -> Lowered:
    """keepdim.lower, saved and loaded again."""
    lowered = keepdim.lower(model, (tensors,))
    path = Path(tempfile.mkdtemp()) / "ours.pte"
    lowered.save(path)
    module = keepdim.load(path)
    return lambda flat: pytree.tree_leaves(module(flat)), lowered.report


def stock(make: Callable[[], list[Any]], model: torch.nn.Module, tensors: list[Any]) -> Lowered:
    """ExecuTorch's own flow with some partitioner, and its Python runtime."""
    with torch.no_grad():
        program = torch.export.export(model, (tensors,))
    partitioner = make()
    edge = to_edge_transform_and_lower(program, partitioner=partitioner)
    report = report_on(edge.exported_program(), partitioner, [])
    path = Path(tempfile.mkdtemp()) / "stock.pte"
    with path.open("wb") as f:
        edge.to_executorch().write_to_file(f)
    loaded = Runtime.get().load_program(path)
    method = loaded.load_method("forward")

    def call(flat: list[Any]) -> list[Any]:
        assert loaded is not None  # which owns what the method reads
        return list(method.execute(flat))

    return call, report


DYNAMIC = "keepdim, dynamic"
FLOWS: dict[str, Callable[[torch.nn.Module, list[Any]], Lowered]] = {
    "keepdim": ours,
    "keepdim, stock flow": functools.partial(stock, lambda: [keepdim.GgmlPartitioner()]),
    "xnnpack": functools.partial(stock, lambda: [XnnpackPartitioner()]),
    "portable": functools.partial(stock, list),
}
ALL = ("keepdim", DYNAMIC, *list(FLOWS)[1:])


# ---------------------------------------------------------------- judging
Row = dict[str, Any]
FIELDS = ("case", "flow", "result", "right", "whole", "dynamic", "wanted", "detail")
NUMBERS = FIELDS[3:7]


def judge(calls: Sequence[opinfo.Call], flow: str) -> list[Row]:
    """Models through one flow, in one lowering if all of them pass in it, each alone otherwise.

    refused: it was not lowered. failed: it was, and does not do what eager does.
    """
    runs = [c.eager(c.tensors) is not None for c in calls]
    if not all(runs):
        rows = iter(judge([c for c, ok in zip(calls, runs, strict=True) if ok], flow) if any(runs) else [])
        return [next(rows) if ok else _result("skipped", detail="eager fails") for ok in runs]
    if flow == DYNAMIC:
        return [_row(v) for v in opinfo.judge(calls)]
    if len(calls) > 1:
        try:
            rows = _together(calls, flow)
            if all(r["result"] == "passed" for r in rows):
                return rows
        except Exception:  # whatever it is: each model says it itself
            pass
        return [row for call in calls for row in judge([call], flow)]
    try:
        return _together(calls, flow)
    except Exception as e:  # a flow that cannot lower a case: that is the result
        known = isinstance(e, KeepdimError) or flow != "keepdim"  # which promises a sentence
        return [_result("refused" if known else "failed", detail=words(e))]


def _result(result: str, right: bool = False, whole: bool = False, detail: str = "", **more: int) -> Row:
    return {
        "result": result,
        "right": int(right),
        "whole": int(whole),
        "dynamic": 0,
        "wanted": 0,
        "detail": detail,
        **more,
    }


def _row(v: opinfo.Verdict) -> Row:
    """With every dim dynamic that can be, at several sizes."""
    result = {"right": "passed", "wrong": "failed", "error": "failed"}.get(v.result, v.result)
    detail = v.detail or "; ".join([*v.reasons, *([v.static] if v.static else [])])
    return _result(result, result == "passed", v.delegated == "whole", detail, dynamic=v.dynamic, wanted=v.wanted)


def _together(calls: Sequence[opinfo.Call], flow: str) -> list[Row]:
    """Lower once, run on every set of inputs, compare each model with eager."""
    run, report = FLOWS[flow](opinfo.Together(calls).eval(), [x for c in calls for x in c.tensors])
    remaining = opinfo.left_over(report, len(calls))
    rows = [_result("passed", True, bool(report.delegates) and not r, "; ".join(r)) for r in remaining]
    for step in range(max(1 + len(c.others) for c in calls)):
        given = [[c.tensors, *c.others][step % (1 + len(c.others))] for c in calls]
        wants = [c.eager(x) or [] for c, x in zip(calls, given, strict=True)]
        try:
            got = run([x.clone() for xs in given for x in xs])
        except Exception as e:  # it was lowered and does not run
            return [_result("failed", detail=words(e)) for _ in calls]
        got = got[len(got) - sum(map(len, wants)) :]  # changed inputs may come before the results
        for row, want in zip(rows, wants, strict=True):
            mine, got = got[: len(want)], got[len(want) :]
            if why := unlike(mine, want, LOOSE):
                row |= _result("failed", detail=why)
            elif unlike(mine, want, TIGHT):
                row["right"] = 0
    return rows


def unlike(got: list[Any], want: list[Any], tolerance: dict[str, float]) -> str:
    """What is different; empty if nothing is."""
    if len(got) != len(want):
        return f"{len(got)} results instead of {len(want)}"
    for g, w in zip(got, want, strict=True):
        if not isinstance(w, torch.Tensor):
            if g != w:
                return f"{g} instead of {w}"
        elif g.shape != w.shape or g.dtype != w.dtype:
            return f"{g.dtype} {list(g.shape)} instead of {w.dtype} {list(w.shape)}"
        elif not torch.allclose(g.double(), w.double(), equal_nan=True, **tolerance):
            return f"values off by {(g.double() - w.double()).abs().max():.2g}"
    return ""


def words(e: BaseException) -> str:
    return f"{'' if isinstance(e, KeepdimError) else type(e).__name__ + ': '}{' '.join(str(e).split())[:400]}"


# ---------------------------------------------------------------- the operator suite
class Job(NamedTuple):
    """Cases through a flow, or samples of an OpInfo in a dtype, from the `first` on, so many in a lowering."""

    what: tuple[str, ...]
    how: str
    first: int
    size: int


def dead(job: Job, said: Any, how: str, row: Callable[[str, str], Any]) -> tuple[list[Any], Job | None]:
    """After a death: a group is run again one by one, and so is what follows it; one alone is the culprit."""
    if said is None:
        return [row(job.what[0], how)], None
    first, labels = said
    if len(labels) > 1:
        return [], job._replace(first=first, size=1)
    return [row(labels[0], how)], job._replace(first=first + 1, size=1)


def run_cases(job: Job, say: workers.Say) -> Iterator[Row]:
    models = record(job.what)
    for i in range(job.first, len(models), job.size):
        labels, calls = zip(*models[i : i + job.size], strict=True)
        say((i, labels))
        for label, row in zip(labels, judge(calls, job.how), strict=True):
            yield {"case": label, "flow": job.how} | row


def dead_cases(job: Job, said: Any, how: str) -> tuple[list[Row], Job | None]:
    return dead(job, said, how, lambda label, result: {"case": label, "flow": job.how} | _result(result))


def operators(only: str, flows: Sequence[str], path: Path, count: int, size: int) -> None:
    """Run, and put the rows into the table; rows of other cases and flows stay in it."""
    names = list(cases())
    picked = [n for n in names if re.search(only, n)]
    jobs = [Job(tuple(picked[i : i + size]), flow, 0, size) for i in range(0, len(picked), size) for flow in flows]
    again = {(name, job.how) for job in jobs for name in job.what}
    rows: list[Row] = []
    if path.exists():
        with path.open(newline="") as f:
            kept = [{k: int(v) if k in NUMBERS else v for k, v in r.items()} for r in csv.DictReader(f)]
        rows = [r for r in kept if (r["case"].split("#")[0], r["flow"]) not in again]
    order = {n: i for i, n in enumerate(names)}
    for _, more in workers.run(jobs, run_cases, dead_cases, LIMIT, count):
        rows = sorted(rows + more, key=lambda r: (order[r["case"].split("#")[0]], r["case"], ALL.index(r["flow"])))
        with path.open("w", newline="") as f:  # after each job: what was run before an interrupt is kept
            table = csv.DictWriter(f, FIELDS)
            table.writeheader()
            table.writerows(rows)
    show_operators([r for r in rows if re.search(only, r["case"].split("#")[0])])


def show_operators(rows: list[Row]) -> None:
    """The summary, then what needs work."""
    flows = [f for f in ALL if any(r["flow"] == f for r in rows)]
    by = {flow: {r["case"]: r for r in rows if r["flow"] == flow} for flow in flows}
    print(f"| {len({r['case'] for r in rows})} models of the operator suite | " + " | ".join(flows) + " |")
    print("|---|" + "---|" * len(flows))
    for what, test in QUESTIONS:
        print(f"| {what} | " + " | ".join(str(sum(map(test, by[f].values()))) for f in flows) + " |")
    peers = [f for f in flows if not f.startswith("keepdim")]
    for flow in [f for f in flows if f.startswith("keepdim")]:
        lost = [c for c, r in by[flow].items() if r["result"] != "passed" and any(_passes(by[p].get(c)) for p in peers)]
        print(f"\npassed by {' or '.join(peers)} and not by {flow}: {len(lost)}")
        for c in lost:
            print(f"  {c}: {by[flow][c]['result']}: {by[flow][c]['detail']}")
        part = [r for r in by[flow].values() if r["result"] == "passed" and not r["whole"]]
        print(f"\nnot fully delegated by {flow}: {len(part)}")
        why: dict[str, list[str]] = {}
        for r in part:
            why.setdefault(plain(r["detail"]), []).append(r["case"])
        for reason, names in why.items():
            print(f"  {len(names)} x {reason}: {' '.join(names)}")


def _passes(row: Row | None) -> bool:
    return row is not None and row["result"] == "passed"


QUESTIONS: tuple[tuple[str, Callable[[Row], bool]], ...] = (
    ("passed", _passes),
    ("passed and right", lambda r: _passes(r) and bool(r["right"])),
    ("passed, right and fully delegated", lambda r: _passes(r) and bool(r["right"] and r["whole"])),
    ("with a dynamic dim", lambda r: _passes(r) and bool(r["dynamic"])),
    ("failed: lowered, but wrong or not run", lambda r: r["result"] == "failed"),
    ("refused at lowering", lambda r: r["result"] == "refused"),
    ("crashed", lambda r: r["result"] == "crashed"),
    ("hung", lambda r: r["result"] == "hung"),
    ("skipped: not run by eager", lambda r: r["result"] == "skipped"),
)


# ---------------------------------------------------------------- OpInfo
COUNTS = ("samples", "right", "refused", "wrong", "error", "crashed", "hung", "whole", "could be dynamic", "dynamic",
          "all dims dynamic")  # fmt: skip


def run_samples(job: Job, say: workers.Say) -> Iterator[opinfo.Verdict]:
    calls = opinfo.samples(opinfo.entries()[job.what[0]], job.how)
    for i in range(job.first, len(calls), job.size):
        group = calls[i : i + job.size]
        say((i, [f"sample {i + k}" for k in range(len(group))]))
        yield from opinfo.judge(group)


def dead_samples(job: Job, said: Any, how: str) -> tuple[list[opinfo.Verdict], Job | None]:
    return dead(job, said, how, lambda label, result: opinfo.Verdict(result, label))


def all_samples(only: str, shard: str, path: Path, count: int, size: int) -> None:
    """Run the OpInfos that are not in the table yet, and put them into it."""
    part, of = map(int, shard.split("/"))
    entries = opinfo.entries()
    jobs = [Job((n,), d, 0, size) for n in entries if re.search(only, n) for d in opinfo.dtypes(entries[n])]
    done, total = set(), Counter[str]()
    if path.exists():
        with path.open(newline="") as f:
            for row in csv.DictReader(f):
                done.add((row["op"], row["dtype"]))
                total += Counter({k: int(row[k]) for k in COUNTS})
    jobs = [j for j in jobs[part - 1 :: of] if (j.what[0], j.how) not in done]
    texts = {key: Counter[str]() for key in ("refused", "static", "remaining")}  # of this run
    with path.open("a", newline="") as f:
        table = csv.writer(f)
        if not done:
            table.writerow(["op", "dtype", *COUNTS, "detail"])
        for job, verdicts in workers.run(jobs, run_samples, dead_samples, LIMIT, count):
            bad = [f"{v.result}: {v.detail}" for v in verdicts if v.result not in ("right", "refused")]
            for line in bad:
                print(f"{job.what[0]} {job.how}: {line}", flush=True)
            texts["refused"].update(plain(v.detail) for v in verdicts if v.result == "refused")
            texts["static"].update(plain(v.static) for v in verdicts if v.static)
            texts["remaining"].update(plain(r) for v in verdicts for r in v.reasons)
            other = [v.detail or v.static or " ".join(v.reasons) for v in verdicts]
            tally = opinfo.tally(verdicts)
            table.writerow([job.what[0], job.how, *(tally[k] for k in COUNTS), ([*bad, *filter(None, other), ""])[0]])
            f.flush()
            total += tally
    show_samples(total, texts)


def plain(text: str) -> str:
    """A reason without the numbers that tell one sample from another."""
    text = re.sub(r"(default|tensor|scalar)(_\d+)+: ", r"\1: ", re.sub(r"'[^']*'", "…", text))
    return re.sub(r"\b(s|u)?\d+\b", "N", text)[:200]


def show_samples(total: Counter[str], texts: dict[str, Counter[str]]) -> None:
    of = max(total["samples"], 1)
    print(f"| {total['samples']} OpInfo samples | | |\n|---|---|---|")
    for key in COUNTS[1:]:
        base = total["could be dynamic"] if "dynamic" in key and key != "could be dynamic" else of
        print(f"| {key} | {total[key]} | {100 * total[key] / max(base, 1):.1f} % |")
    for key, count in texts.items():
        print(f"\n{key}:")
        for text, n in count.most_common(40):
            print(f"  {n} x {text}")


def _quick() -> None:
    """List torch's composite ops once, not several times a lowering; and import what the workers need."""
    listed = functools.cache(decomp_utils._collect_all_valid_cia_ops)
    for module in (decomp_utils, exported_program):
        module._collect_all_valid_cia_ops = listed
    keepdim.lower(torch.nn.ReLU(), (torch.ones(2),))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases or OpInfos whose name matches this pattern")
    parser.add_argument("--flow", action="append", choices=ALL, help="these flows instead of all")
    parser.add_argument("--opinfo", action="store_true", help="torch's OpInfo samples instead of the operator suite")
    parser.add_argument("--shard", default="1/1", help="the i-th of n parts of the OpInfos; finished ones are kept")
    parser.add_argument("--group", type=int, default=8, help="models lowered together where that works")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)  # in the workers too: they are as many as there are cores
    _quick()
    if args.opinfo:
        all_samples(args.only, args.shard, args.csv or RESULTS / "opinfo.csv", args.workers, args.group)
    else:
        operators(args.only, args.flow or ALL, args.csv or RESULTS / "suite.csv", args.workers, args.group)


if __name__ == "__main__":
    main()
