"""The command line: keepdim demo | lower | run | inspect | audit | refine | embed | generate | tune."""

from __future__ import annotations

import argparse
import io
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import torch

from ..artifact import pte
from ..artifact.signature import Signature
from ..auditing.result import BAD, LOST
from ..errors import KeepdimError, fail
from ..files import atomic_write, path_of, write_bytes
from ..models.encoder import Encoder
from ..models.generate import Sampling, Writer, open_model
from ..module import load, lower
from ..profile import profile
from ..progress import Progress
from ..ranges import thresholds as splits
from ..report import page as report
from ..stablehlo.refine import BYTECODE
from . import demo, factory, inputs

REPEATS = 3  # of a call that is profiled: the first builds its plan, the others use it
EXAMPLES = """examples:
  keepdim lower model.py:make -o model.pte       make() returns (model, args, dynamic_shapes)
  keepdim inspect model.pte                      the contract, then each delegate's program
  keepdim inspect model.pte --html model.html    the same as a page: graph, shapes, memory and cost at any size
  keepdim run model.pte --input x=randn:1,17,64  any shape in the contract, inputs by their names in it
  keepdim run model.pte --input x=randn:1,17,64 --input x=randn:8,256,64 --profile --html run.html   two calls, measured
  keepdim audit model.py:make --partitioner xnnpack   what became of its sizes, where and by whom
  keepdim refine m.mlir --types "tensor<16xf32>" --print-after-each   StableHLO, made static
  keepdim embed "a text" "another"               a line of JSON each: {"text": ..., "embedding": [...]}
  keepdim embed --file in.txt -o out.npy         a text a line, a row a text
  keepdim generate smollm2 --prompt "Who are you?"   the model's answer, as it is made
  keepdim generate smollm2 --chat                a dialogue, a line at a time
  keepdim tune                                   measure this machine once, for every later start
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; a KeepdimError becomes its sentence on standard error and exit code 1."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("keepdim: %(message)s"))
    logger = logging.getLogger("keepdim")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False  # ExecuTorch may have set up the root logger: the line would show twice
    for noisy in ("torchao", "torch.utils._pytree"):  # what exir's imports say about optional parts
        logging.getLogger(noisy).setLevel(logging.ERROR)
    try:
        args = _parser().parse_args(argv)
        return args.run(args)
    except KeepdimError as e:
        print(e, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130  # as a shell calls it
    except BrokenPipeError:  # the reader has seen enough; what is left in the buffer goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as e:  # a file that cannot be written
        print(f"[cli] {e.filename}: {e.strerror}.", file=sys.stderr)
        return 1
    finally:
        logger.removeHandler(handler)


def _path(given: str) -> Path:
    """An argument that is a path."""
    return path_of("cli", given)


def _name(given: str) -> str:
    """One in which a path may be."""
    path_of("cli", given)
    return given


def _parser() -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="keepdim", description="Lower a PyTorch model once; run it at every shape its contract allows.",
        epilog=EXAMPLES, formatter_class=formatter,
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"keepdim {version('keepdim')}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text, formatter_class=formatter)
        sub.set_defaults(run=run)
        return sub

    command("demo", _demo, "lower, save, load and run a small model at a dozen sizes")
    p = command("lower", _lower, "lower a model to a .pte")
    p.add_argument(
        "model", type=_name, metavar="FILE.py:FACTORY", help="the factory returns (model, args, dynamic_shapes)"
    )
    p.add_argument("-o", "--output", type=_path, required=True, help="the .pte to write")
    engine = "that runs it: ggml (the default) or mlx"
    p.add_argument("--engine", default="ggml", help=engine)
    p = command("run", _run, "run a .pte on inputs and print the results")
    p.add_argument("file", type=_path)
    forms = "randn:1,17,64 | zeros:SHAPE | ones:SHAPE | randint:HIGH:SHAPE | x.npy | x.pt | an integer"
    p.add_argument("--input", type=_name, action="append", default=[], metavar="NAME=VALUE", help=forms)
    p.add_argument("--seed", type=int, default=0, help="of randn and randint (default 0)")
    p.add_argument("-o", "--output", type=_path, help="save the results here as well (torch.save)")
    measured = "print what took how long; an input that is given again is another call, and each is made three times"
    p.add_argument("--profile", action="store_true", help=measured)
    p.add_argument("--html", type=_path, metavar="FILE", help="with --profile: write it as a page too")
    p = command("inspect", _inspect, "print the contract and the programs of a .pte, or what StableHLO has in it")
    p.add_argument("file", type=_path)
    p.add_argument("--json", action="store_true", help="as JSON")
    p.add_argument("--verify", action="store_true", help="check the weights against their checksums too")
    p.add_argument("--html", type=_path, metavar="FILE", help="write a page instead: contract, graph, sizes to try")
    p = command("audit", _audit, "follow a model's sizes through a lowering, say what was lost where, and try the file")
    p.add_argument("model", type=_name, metavar="FILE", help="FILE.py:FACTORY, an ExportedProgram (.pt2), or a .pte")
    who = "ggml (keepdim's own, the default), mlx (likewise), xnnpack, coreml, vulkan, module:Class, or FILE.py:Class"
    p.add_argument("--partitioner", type=_name, default="ggml", help=who)
    p.add_argument("--json", action="store_true", help="as JSON (docs/audit.md)")
    p.add_argument("--html", type=_path, metavar="FILE", help="write it as a page too: every size from stage to stage")
    p.add_argument("--no-tries", action="store_true", help="do not run the file")
    p.add_argument("--trust", action="store_true", help="a .pt2 is your own: torch runs code that such a file names")
    p.add_argument("--seconds", type=int, default=60, help="that a trial may take (default 60)")
    allowed = f"do not fail for it: {', '.join((*LOST, *BAD))}"
    p.add_argument("--allow", action="append", default=[], metavar="VERDICT", choices=(*LOST, *BAD), help=allowed)
    p.add_argument("-o", "--output", type=_path, help="keep the .pte that is audited")
    p = command("tune", _tune, "measure at which sizes kernels change on this machine, for every later start")
    p.add_argument("--seconds", type=float, default=2.0, help="to spend on each (default 2)")
    p.add_argument("--times", action="store_true", help="print what was measured")
    p = command("refine", _refine, "run passes over StableHLO text or an artifact, and print the result")
    p.add_argument("file", type=_path, help="a .mlir text, or an artifact")
    p.add_argument("--types", help="of all arguments: 'tensor<16xf32>,tensor<4xi64>'")
    p.add_argument("--sizes", nargs="+", metavar="NAME=N", help="instead of types and passes: sizes of the contract")
    chosen = "in order, with commas between them (default: remove-dynamism); an unknown name lists those there are"
    p.add_argument("--passes", default="remove-dynamism", help=chosen)
    p.add_argument("--print-after-each", action="store_true", help="print the program after each pass")
    pieces = "take the parts of a text between lines of // ----- one after the other; one that is refused ends none"
    p.add_argument("--split-input-file", action="store_true", help=pieces)
    p.add_argument("-o", "--output", type=_path, help="write it here: text if the name ends in .mlir, else an artifact")
    p = command("embed", _embed, "print or write the embeddings of texts, each a vector of length 1")
    p.add_argument("text", nargs="*", help="the texts")
    p.add_argument("--file", type=_path, help="take the texts from here, one a line (an empty line is a text too)")
    p.add_argument("-o", "--output", type=_path, help="write them here, f32 [texts, width] (.npy), and print nothing")
    p.add_argument(
        "--model", type=_name, default="minilm", help="minilm (all-MiniLM-L6-v2, the default) or a checkpoint folder"
    )
    cut = "cut longer texts after N tokens (default: where the model's own settings say, 256 for minilm; at most 512)"
    p.add_argument("--max-length", type=int, metavar="N", help=cut)
    p.add_argument("--engine", default="ggml", help=engine)
    p = command("generate", _generate, "let a language model answer; the text goes to standard output")
    p.add_argument(
        "model", type=_name, help="smollm2 (SmolLM2-135M-Instruct), a .gguf, a checkpoint folder, or a lowered .pte"
    )
    p.add_argument("--prompt", help="what it answers to")
    p.add_argument("--chat", action="store_true", help="a dialogue: a message a line from standard input")
    p.add_argument("--raw", action="store_true", help="continue the prompt instead of answering it")
    p.add_argument("--max-tokens", type=int, metavar="N", help="of an answer (default: to the end of the context)")
    p.add_argument("--max-context", type=int, metavar="N", help="of prompt and answers together (default 2048)")
    p.add_argument("--quant", help="quantise the weights of a checkpoint folder: q8_0, q4_0, q4_1, q4_k, ...")
    p.add_argument("--cache", help="dtype of keys and values: f32 (the default), f16 or q8_0")
    p.add_argument("--engine", help=engine)
    p.add_argument("--mapped", action="store_true", help="leave the weights in the .gguf and map them from there")
    p.add_argument("--weights", type=_path, metavar="GGUF", help="of a lowered .pte that maps them, if not beside it")
    p.add_argument("--temperature", type=float, default=0.0, help="0 (the default) takes the likeliest token")
    p.add_argument("--top-k", type=int, default=0, metavar="K", help="choose among the K likeliest")
    p.add_argument("--top-p", type=float, default=1.0, metavar="P", help="among the likeliest that are P together")
    p.add_argument(
        "--min-p", type=float, default=0.0, metavar="P", help="among those P times as likely as the likeliest"
    )
    p.add_argument("--seed", type=int, default=0, help="of the choice (default 0)")
    return parser


def _demo(args: argparse.Namespace) -> int:
    demo.run(sys.stdout)
    return 0


def _lower(args: argparse.Namespace) -> int:
    model, example, shapes = factory.made(args.model)
    _folders(args.output)
    module = lower(model, example, dynamic_shapes=shapes, engine=args.engine)
    module.save(args.output)
    print(module.contract)
    print(module.report)
    return 0


def _audit(args: argparse.Namespace) -> int:
    from ..auditing import audit

    if args.seconds < 1:
        fail("cli", f"--seconds {args.seconds}", "is no time for a trial")
    _folders(args.html, args.output)
    given: tuple[Any, ...] = (Path(args.model), (), None)
    if given[0].suffix not in (".pt2", ".pte"):
        given = factory.made(args.model)
    who = args.partitioner
    if ".py:" in who:
        who = factory.called(who)
    found = audit(given[0], given[1], dynamic_shapes=given[2], partitioner=who, tries=not args.no_tries,
                  seconds=args.seconds, output=args.output, name=args.model, trust=args.trust)  # fmt: skip
    if args.html is not None:
        write_bytes(args.html, report.audit_page(found.to_dict()).encode(), "cli")
    print(found.to_json() if args.json else found)
    return 1 if found.faults(args.allow) else 0


def _folders(*files: Path | None) -> None:
    """What takes long is not done for a file that cannot be written."""
    for file in files:
        if file is not None and not file.parent.is_dir():
            fail("cli", str(file), "its folder does not exist")


def _run(args: argparse.Namespace) -> int:
    torch.manual_seed(args.seed)
    _folders(args.html, args.output)
    module = load(args.file)
    if args.html is not None and not args.profile:
        fail("cli", "--html", "is the page of a profile", "Say --profile too")
    calls = inputs.calls(args.input)
    names = [s.name for s in module.contract.inputs]
    if unknown := set(calls[0]) - set(names):
        fail("cli", f"input {sorted(unknown)[0]!r}", f"is not an input of {args.file} (it has: {', '.join(names)})")
    known = module.signature.constants
    flats = [[inputs.value(s, c.get(s.name), known[i]) for i, s in enumerate(module.contract.inputs)] for c in calls]
    if args.profile:
        every, found = profile(module, [f for f in flats for _ in range(REPEATS)])
        print(found)
        if args.html is not None:
            write_bytes(args.html, report.file_page(args.file, found).encode(), "cli")
        results = every[-1]
    else:
        results = [module.run_flat(flat) for flat in flats][-1]
    for spec, value in zip(module.contract.outputs, results, strict=True):
        print(f"{spec.name}: {_show(value)}")
    if args.output is not None:
        with atomic_write(args.output, "cli") as file:
            torch.save(results, file)
    return 0


def _show(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    head = ", ".join(f"{v:.5g}" for v in value.reshape(-1)[:6].tolist())
    return f"{value.dtype} {list(value.shape)} [{head}{', ...' if value.numel() > 6 else ''}]"


def _refine(args: argparse.Namespace) -> int:
    from ..stablehlo.refine import Hlo, split

    def refined(hlo: Hlo) -> Hlo:
        for name in hlo.each(split(args.passes), None if args.types is None else split(args.types)):
            if args.print_after_each:
                print(f"// After {name}\n{hlo.text}")
        return hlo

    if args.split_input_file:
        return _refine_pieces(args, refined)
    hlo = refined(Hlo.load(args.file)) if args.sizes is None else _sized(args)
    if args.output is not None:
        write_bytes(args.output, hlo.text.encode() if args.output.suffix == ".mlir" else hlo.artifact(), "cli")
    elif not args.print_after_each:
        print(hlo.text)
    return 0


def _refine_pieces(args: argparse.Namespace, refined: Callable[[Any], Any]) -> int:
    """The pieces of a file, each by itself, as stablehlo-opt takes them."""
    from ..stablehlo.refine import Hlo

    try:
        pieces = re.split(r"^// -----.*$", args.file.read_text(), flags=re.MULTILINE)
    except (OSError, UnicodeDecodeError) as e:
        fail("refine", str(args.file), f"cannot be read as text ({e})", cause=e)
    failed = 0
    for i, piece in enumerate(pieces):
        try:
            hlo = refined(Hlo.read(piece, f"piece {i}"))
        except KeepdimError as e:
            failed = 1
            print(f"piece {i}: {e}", file=sys.stderr)
            continue
        if not args.print_after_each:
            print(("// -----\n" if i else "") + hlo.text)
    return failed


def _sized(args: argparse.Namespace) -> Any:
    """Refined by sizes of the contract."""
    from ..stablehlo import load_stablehlo

    sizes = dict(part.split("=", 1) if "=" in part else (part, "") for part in args.sizes)
    if bad := [k for k, v in sizes.items() if not v.isdecimal()]:
        fail("cli", f"--sizes {bad[0]}", f"{sizes[bad[0]]!r} is no size", "Say --sizes seq_len=16")
    return load_stablehlo(args.file).refine(**{k: int(v) for k, v in sizes.items()}).hlo


def _inspect_stablehlo(args: argparse.Namespace) -> int:
    from ..stablehlo.refine import Hlo

    if args.html is not None:
        fail("cli", "--html", f"shows .pte files, and {args.file} is StableHLO", "Leave it out, or say --json")
    hlo = Hlo.load(args.file)
    about = hlo.about()
    if args.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(about)).decode() + "\n")
        return 0
    for name, types in about["functions"].items():
        print(f"{name}({', '.join(types['inputs'])}) -> ({', '.join(types['results'])})")
    print("static" if about["static"] else f"dynamic: {', '.join(about['dynamic']) or 'inside'}")
    for sentence in about["assertions"]:
        print(f"asserts: {sentence}")
    for op, n in about["operations"].items():
        print(f"  {n} x {op}")
    return 0


def _starts_with(file: Path, head: bytes) -> bool:
    if not file.is_file():
        return False
    with file.open("rb") as f:
        return f.read(len(head)) == head


def _inspect(args: argparse.Namespace) -> int:
    if args.file.suffix in (".mlir", ".mlirbc") or _starts_with(args.file, BYTECODE):
        return _inspect_stablehlo(args)
    pte.check(args.file, weights=args.verify)
    signature = Signature.from_json(pte.contract_text(args.file))
    contract, mapped = signature.contract, signature.mapped
    if args.verify and mapped is not None:
        mapped.find(args.file)
    if args.html is not None:
        write_bytes(args.html, report.file_page(args.file).encode(), "cli")
        return 0
    found = list(pte.delegates(args.file))
    if args.json:
        body = {
            "contract": msgspec.Raw(contract.to_json()),
            "delegates": [_delegate_json(d) for d in found],
            "mapped": mapped,
            "tables": signature.tables,
        }
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(body)).decode() + "\n")
        return 0
    print(f"contract of {args.file}\n{contract}")
    for table in signature.tables:
        print(f"\ndispatch {table}")
    for i, d in enumerate(found):
        weights = sum(d.weight_bytes.values())
        print(f"\ndelegate {i}: {d.backend} ({len(d.weight_bytes)} weights, {weights / 2**20:.2f} MiB)")
        print(d.program if d.program is not None else "  (not keepdim's)")
        for key, n in d.weight_bytes.items():
            print(f"  weight {key}: {n} bytes")
    if mapped is not None:
        count = sum(n for _, n in mapped.spans.values())
        print(f"\nmapped from {mapped.name}: {len(mapped.spans)} weights, {count / 2**20:.2f} MiB")
    if args.verify:
        print("every checksum holds")
    return 0


def _delegate_json(d: pte.Delegate) -> dict[str, Any]:
    program = msgspec.Raw(d.program.to_json()) if d.program is not None else None
    return {"method": d.method, "backend": d.backend, "program": program, "weights": d.weight_bytes}


def _tune(args: argparse.Namespace) -> int:
    if not args.seconds > 0:
        fail("cli", f"--seconds {args.seconds}", "is no time to measure in")
    for t in splits.tune(1e3 * args.seconds):
        print(f"{t.name}: {t.after}" + (f" (was {t.before})" if t.after != t.before else "") + (t.why and f"  {t.why}"))
        if args.times and t.table is not None:
            print(t.table)
    print(f"kept in {splits.kept()}", file=sys.stderr)
    return 0


def _embed(args: argparse.Namespace) -> int:
    if bool(args.text) == (args.file is not None):
        fail("cli", "embed", "takes texts or --file, one of the two", 'Say keepdim embed "a text", or --file in.txt')
    if args.output is not None and args.output.suffix != ".npy":
        fail("cli", str(args.output), "is not a .npy file")
    count = len(args.text) if args.file is None else sum(1 for _ in _lines(args.file))  # all of it is read once: UTF-8?
    texts = args.text if args.file is None else _lines(args.file)
    encoder = Encoder.load(args.model, max_length=args.max_length, engine=args.engine)
    progress = Progress(count)
    if args.output is None:
        _print_embeddings(encoder, texts, progress)
    else:
        _write_embeddings(encoder, texts, progress, args.output, count)
    return 0


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8-sig") as f:
            for line in f:
                yield line.removesuffix("\n")
    except UnicodeDecodeError as e:
        fail("cli", str(path), f"is not UTF-8 text ({e.reason})", cause=e)


def _print_embeddings(encoder: Encoder, texts: Iterable[str], progress: Progress) -> None:
    waiting: list[str] = []  # texts whose embeddings have not come yet

    def kept() -> Iterator[str]:
        for text in texts:
            waiting.append(text)
            yield text

    for rows in encoder.stream(kept(), progress):
        for text, row in zip(waiting, rows.numpy(), strict=True):
            numbers = [float(str(v)) for v in row]  # the fewest digits that give the same f32
            sys.stdout.write(msgspec.json.encode({"text": text, "embedding": numbers}).decode() + "\n")
        waiting.clear()


def _write_embeddings(encoder: Encoder, texts: Iterable[str], progress: Progress, path: Path, count: int) -> None:
    """Rows as they come, under the file's own name only when all are there."""
    from numpy.lib import format as npy

    written, start = 0, time.monotonic()
    with atomic_write(path, "cli") as f:
        npy.write_array_header_1_0(f, {"descr": "<f4", "fortran_order": False, "shape": (count, encoder.width)})
        for rows in encoder.stream(texts, progress):
            f.write(rows.numpy().astype("<f4", copy=False).tobytes())
            written += len(rows)
        if written != count:
            fail("cli", str(path), f"is not written: the texts changed meanwhile ({count} before, {written} now)")
    took = time.monotonic() - start
    print(f"keepdim: {path}: f32 [{count}, {encoder.width}] in {took:.1f} s", file=sys.stderr)


def _generate(args: argparse.Namespace) -> int:
    if (args.prompt is None) != args.chat:
        fail("cli", "generate", "takes --prompt or --chat, one of the two", 'Say --prompt "Who are you?"')
    if args.max_tokens is not None and args.max_tokens < 1:
        fail("cli", "--max-tokens", f"{args.max_tokens} is less than 1")
    if args.chat and args.raw:
        fail("cli", "--raw", "continues a text, and --chat is a dialogue", "Leave one out")
    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.min_p, args.seed)
    model = open_model(args.model, max_context=args.max_context, quant=args.quant, cache=args.cache,
                       engine=args.engine, mapped=args.mapped, weights=args.weights)  # fmt: skip
    writer = Writer.of(model, sampling)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # where a terminal has not the letter

    def show(pieces: Iterator[str]) -> None:
        for piece in pieces:
            sys.stdout.write(piece)
            sys.stdout.flush()
        sys.stdout.write("\n")
        sys.stdout.flush()
        print(f"keepdim: {writer.figures}", file=sys.stderr)

    if args.prompt is not None:
        raw = args.raw or not writer.text.template
        show(writer.complete(args.prompt, args.max_tokens) if raw else writer.chat(args.prompt, args.max_tokens))
        return 0
    failed = 0
    while True:
        if sys.stdin.isatty():
            sys.stderr.write("> ")
            sys.stderr.flush()
        if not (line := sys.stdin.readline()):
            return failed
        if line.strip():
            try:
                show(writer.chat(line.rstrip("\n"), args.max_tokens))
            except KeepdimError as e:  # of this message alone; the dialogue goes on
                failed = 1
                print(e, file=sys.stderr)
