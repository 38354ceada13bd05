"""The arguments of every command: the parser, and checks that need no heavy imports.

Argument types only look at the text; `check` looks at the files, at the names defined in them, and at a prompt from
standard input. Names from the library are repeated here, because importing the library needs torch; a test compares
them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from .. import __version__
from ..errors import fail
from ..files import path_of
from ..shapes.blocks import STORED
from . import factory, inputs
from .completion import SHELLS

ENGINES = ("ggml", "mlx")
PRECISIONS = ("f32", "bf16")
PARTITIONERS = (*ENGINES, "xnnpack", "coreml", "vulkan")
CACHES = ("f32", "f16", "q8_0")
LANGUAGE_MODEL, ENCODER = "smollm2", "minilm"  # models that are known by name
VERDICTS = (
    *("frozen", "dropped", "narrowed", "widened"),
    *("wrong numbers", "accepted though outside", "crashed", "refused"),
)
STDIN = Path("-")
EXAMPLES = """examples:
  keepdim lower model.py:make -o model.pte            make() returns (model, args, dynamic_shapes)
  keepdim run model.pte --input x=randn:1,17,64       any shape in the contract; inputs by name
  keepdim run model.pte --input x=randn:1,17,64 --input x=randn:8,256,64 --profile --html run.html
                                                      two calls, profiled, as a page
  keepdim inspect model.pte                           the contract, then the program of each delegate
  keepdim inspect model.pte --html model.html         as a page: graph, shapes, memory and cost at any size
  keepdim audit model.py:make --partitioner xnnpack   which stage of a lowering loses a size
  keepdim refine m.mlir --types "tensor<16xf32>"      make StableHLO static
  keepdim embed "a text" "another"                    a JSON object per line: {"text": ..., "embedding": [...]}
  keepdim embed --file in.txt -o out.npy              one text per line, one row per text
  keepdim generate smollm2 --prompt "Who are you?"    the answer, token by token
  keepdim generate smollm2 --chat                     a dialogue, one message per line
  keepdim tune                                        measure this machine once, for every later process
  keepdim completion bash                             a completion script for the shell

exit codes: 0, 1 if the command failed or an audit found a loss, 2 if its arguments are wrong
"""


class Parser(argparse.ArgumentParser):
    """Raises a KeepdimError for a wrong argument."""

    def error(self, message: str) -> NoReturn:
        fail("cli", self.prog, message, f"Run {self.prog} --help")


def parser() -> Parser:
    """The parser of the command line.

    >>> parser().parse_args(["run", "m.pte", "--input", "x=randn:1,17"]).file.name
    'm.pte'
    """
    text = "Lower a PyTorch model once; run it at every shape its contract allows."
    top = Parser(
        prog="keepdim", description=text, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    top.add_argument("--version", action="version", version=f"keepdim {__version__}")
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND", dest="command")
    for name, (add, text) in COMMANDS.items():
        add(commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + "."))
    return top


def check(args: argparse.Namespace) -> None:
    """Raise for contradictory arguments, and for files that do not exist or cannot be written."""
    if (checked := CHECKS.get(args.command)) is not None:
        checked(args)


# ---------------------------------------------------------------- argument types
def _path(text: str) -> Path:
    return path_of("cli", text)


def _name(text: str) -> str:
    """A name that may contain a path."""
    path_of("cli", text)
    return text


def _number(kind: type[int] | type[float], fits: Callable[[float], bool], wanted: str) -> Callable[[str], int | float]:
    def read(text: str) -> int | float:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}") from None
        if not fits(value):
            raise argparse.ArgumentTypeError(f"{text} is not {wanted}")
        return value

    return read


_count = _number(int, lambda n: n >= 1, "an integer of at least 1")
_length = _number(int, lambda n: n >= 3, "an integer of at least 3")  # a text has at least its begin and end tokens
_count_or_none = _number(int, lambda n: n >= 0, "an integer of at least 0")
_seed = _number(int, lambda n: -(2**63) <= n < 2**63, "an integer of 64 bits")
_seconds = _number(float, lambda s: 0 < s < float("inf"), "a time above 0")
_factor = _number(float, lambda x: 0 <= x < float("inf"), "a number of at least 0")
_share = _number(float, lambda p: 0 <= p <= 1, "a number from 0 to 1")
_part = _number(float, lambda p: 0 < p <= 1, "a number above 0 and at most 1")


def _size(text: str) -> tuple[str, int]:
    name, _, number = text.partition("=")
    if not name or not (number.isascii() and number.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=N, such as seq_len=16")
    return name, int(number)


def _partitioner(text: str) -> str:
    if ":" not in text and text not in PARTITIONERS:
        known = ", ".join(PARTITIONERS)
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {known}, and not module:Class or FILE.py:Class")
    return _name(text)


# ---------------------------------------------------------------- the arguments of each command
def _html(p: argparse.ArgumentParser, text: str) -> None:
    p.add_argument("--html", type=_path, metavar="FILE", help=text)


def _json(p: argparse.ArgumentParser, text: str = "print JSON") -> None:
    p.add_argument("--json", action="store_true", help=text)


def _engine(p: argparse.ArgumentParser, default: str | None = "ggml") -> None:
    p.add_argument("--engine", choices=ENGINES, default=default, help="the engine that runs the model (default: ggml)")


def _precision(p: argparse.ArgumentParser, default: str | None = "f32") -> None:
    products = "of the products of linear layers: bf16 is faster and less exact (default: f32)"
    p.add_argument("--precision", choices=PRECISIONS, default=default, help=products)


def _add_demo(p: argparse.ArgumentParser) -> None:
    _json(p, "print the calls and the contract as JSON")


def _add_lower(p: argparse.ArgumentParser) -> None:
    made = "a Python file and a function in it that returns (model, args, dynamic_shapes)"
    p.add_argument("model", type=_name, metavar="FILE.py:FACTORY", help=made)
    p.add_argument("-o", "--output", type=_path, required=True, metavar="FILE", help="the .pte to write")
    _engine(p)
    _precision(p)
    _json(p, "print the contract and the report as JSON")


def _add_run(p: argparse.ArgumentParser) -> None:
    p.add_argument("file", type=_path, help="the .pte to run")
    p.add_argument("--input", type=inputs.parse, action="append", default=[], metavar="NAME=VALUE", help=inputs.FORMS)
    p.add_argument("--seed", type=_seed, default=0, help="seed of randn and randint (default: 0)")
    p.add_argument("-o", "--output", type=_path, metavar="FILE", help="also save the outputs here (torch.save)")
    measured = "print the time of each call and operation; an input given N times makes N calls, each run three times"
    p.add_argument("--profile", action="store_true", help=measured)
    _html(p, "with --profile: also write a page")
    _json(p, "print the outputs (and the profile) as JSON")


def _add_inspect(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "file", type=_path, help="a .pte, or StableHLO (.mlir, .mlirbc); - reads StableHLO from standard input"
    )
    p.add_argument("--verify", action="store_true", help="also check the checksums of the weights")
    form = p.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--html", type=_path, metavar="FILE", help="write a page instead: contract, graph, sizes to try")


def _add_audit(p: argparse.ArgumentParser) -> None:
    p.add_argument("model", type=_name, metavar="FILE", help="FILE.py:FACTORY, an ExportedProgram (.pt2), or a .pte")
    who = f"{', '.join(PARTITIONERS)}, module:Class, or FILE.py:Class (default: ggml)"
    p.add_argument("--partitioner", type=_partitioner, default="ggml", metavar="NAME", help=who)
    _json(p, "print JSON (docs/guide/audit.md)")
    _html(p, "also write a page: every size from stage to stage")
    p.add_argument("--no-tries", action="store_true", help="do not run the file")
    p.add_argument("--trust", action="store_true", help="you trust the .pt2: torch runs code that such a file names")
    p.add_argument("--seconds", type=_count, default=60, help="time limit of one trial (default: 60)")
    allowed = f"do not fail for this verdict: {', '.join(VERDICTS)}"
    p.add_argument("--allow", action="append", default=[], metavar="VERDICT", choices=VERDICTS, help=allowed)
    p.add_argument("-o", "--output", type=_path, metavar="FILE", help="keep the audited .pte here")


def _add_tune(p: argparse.ArgumentParser) -> None:
    p.add_argument("--seconds", type=_seconds, default=2.0, help="time to spend on each threshold (default: 2)")
    p.add_argument("--times", action="store_true", help="also print the measured times")
    _json(p)


def _add_refine(p: argparse.ArgumentParser) -> None:
    p.add_argument("file", type=_path, help="StableHLO text or an artifact; - reads standard input")
    p.add_argument("--types", help="the types of all arguments: 'tensor<16xf32>,tensor<4xi64>'")
    sizes = "refine to these sizes of the contract, instead of --types and --passes"
    p.add_argument("--sizes", type=_size, nargs="+", metavar="NAME=N", help=sizes)
    chosen = "passes in order, separated by commas (default: remove-dynamism); an unknown name lists all passes"
    p.add_argument("--passes", help=chosen)
    p.add_argument("--print-after-each", action="store_true", help="print the program after each pass")
    pieces = "process each part between lines of // ----- by itself; continues after a failed part"
    p.add_argument("--split-input-file", action="store_true", help=pieces)
    written = "write the result here: text if the name ends in .mlir, an artifact otherwise"
    p.add_argument("-o", "--output", type=_path, metavar="FILE", help=written)
    _json(p, "print the program, what it has, and the time of each pass as JSON")


def _add_embed(p: argparse.ArgumentParser) -> None:
    p.add_argument("text", nargs="*", help="the texts to embed; - reads them from standard input, one per line")
    p.add_argument("--file", type=_path, help="read the texts from this file, one per line; - reads standard input")
    written = "write the embeddings here instead: f32 [texts, width], .npy"
    p.add_argument("-o", "--output", type=_path, metavar="FILE", help=written)
    known = "minilm (all-MiniLM-L6-v2, the default) or a checkpoint folder"
    p.add_argument("--model", type=_name, default=ENCODER, help=known)
    cut = "truncate texts to N tokens (default: the model's own limit, 256 for minilm; at most 512)"
    p.add_argument("--max-length", type=_length, metavar="N", help=cut)
    _engine(p)


def _add_generate(p: argparse.ArgumentParser) -> None:
    known = "smollm2 (SmolLM2-135M-Instruct), a .gguf, a checkpoint folder, or a lowered .pte"
    p.add_argument("model", type=_name, help=known)
    given = p.add_mutually_exclusive_group(required=True)
    given.add_argument("--prompt", help="the prompt; - reads it from standard input")
    given.add_argument("--chat", action="store_true", help="a dialogue: one message per line of standard input")
    p.add_argument("--raw", action="store_true", help="continue the prompt, without the chat template")
    p.add_argument("--max-tokens", type=_count, metavar="N", help="length limit of an answer (default: the context)")
    context = "tokens of prompt and answers together (default: 2048)"
    p.add_argument("--max-context", type=_count, metavar="N", help=context)
    p.add_argument("--quant", choices=STORED, help="quantise the weights of a checkpoint folder")
    p.add_argument("--cache", choices=CACHES, help="dtype of the key/value cache (default: f32)")
    _engine(p, None)
    _precision(p, None)
    p.add_argument("--mapped", action="store_true", help="map the weights from the .gguf instead of copying them")
    beside = "the .gguf from which a lowered .pte maps its weights, if it is not next to it"
    p.add_argument("--weights", type=_path, metavar="GGUF", help=beside)
    greedy = "sampling temperature; 0 (the default) takes the most likely token"
    p.add_argument("--temperature", type=_factor, default=0.0, help=greedy)
    top_k = "sample from the K most likely tokens (default: 0, all)"
    p.add_argument("--top-k", type=_count_or_none, default=0, metavar="K", help=top_k)
    nucleus = "nucleus sampling: the smallest set of tokens with total probability P (default: 1)"
    p.add_argument("--top-p", type=_part, default=1.0, metavar="P", help=nucleus)
    min_p = "drop tokens less likely than P times the most likely one (default: 0)"
    p.add_argument("--min-p", type=_share, default=0.0, metavar="P", help=min_p)
    p.add_argument("--seed", type=_seed, default=0, help="seed of the sampling (default: 0)")
    _json(p, "print the answer, its tokens and seconds as JSON; with --chat a line for each answer")


def _add_completion(p: argparse.ArgumentParser) -> None:
    p.add_argument("shell", choices=SHELLS, help="the shell that reads the script")


COMMANDS: dict[str, tuple[Callable[[argparse.ArgumentParser], None], str]] = {
    "demo": (_add_demo, "lower, save, load and run a small model at a dozen sizes"),
    "lower": (_add_lower, "lower a model to a .pte"),
    "run": (_add_run, "run a .pte and print its outputs"),
    "inspect": (_add_inspect, "print the contract and the programs of a .pte, or the functions of StableHLO"),
    "audit": (
        _add_audit,
        "find the stage of a lowering that loses a size, and test the file at the ends of its ranges",
    ),
    "tune": (_add_tune, "measure at which sizes to switch kernels on this machine, for every later process"),
    "refine": (_add_refine, "run passes over StableHLO and print the result"),
    "embed": (_add_embed, "compute embeddings of texts, normalised to length 1"),
    "generate": (_add_generate, "generate text with a language model"),
    "completion": (_add_completion, "print a completion script for a shell"),
}


# ---------------------------------------------------------------- checks of files and combinations
def _exists(path: Path, what: str = "") -> None:
    if not path.exists():
        fail("cli", str(path), "does not exist", "Correct the path")
    if path.is_dir():
        fail("cli", str(path), f"is a folder, expected {what or 'a file'}", "Name a file")


def _can_be_written(*files: Path | None) -> None:
    """Raise for an unwritable output before the work starts."""
    for file in files:
        if file is not None and not file.parent.is_dir():
            fail("cli", str(file), "its folder does not exist", "Create the folder, or choose another path")
        if file is not None and file.is_dir():
            fail("cli", str(file), "is a folder, expected a file to write", "Name a file")


def _check_lower(args: argparse.Namespace) -> None:
    factory.check(args.model)
    _can_be_written(args.output)


def _check_run(args: argparse.Namespace) -> None:
    if args.html is not None and not args.profile:
        fail("cli", "--html", "shows a profile, and nothing is profiled", "Add --profile")
    _exists(args.file, "a .pte")
    inputs.check(args.input)
    _can_be_written(args.html, args.output)


def _check_inspect(args: argparse.Namespace) -> None:
    if args.file != STDIN:
        _exists(args.file, "a .pte")
    elif args.html is not None:
        fail("cli", "--html", "shows .pte files, and StableHLO is read from standard input", "Use --json instead")
    _can_be_written(args.html)


def _check_audit(args: argparse.Namespace) -> None:
    if Path(args.model).suffix in (".pt2", ".pte"):
        _exists(Path(args.model))
    else:
        factory.check(args.model)
    if ".py:" in args.partitioner:
        factory.check(args.partitioner)
    elif ":" in args.partitioner:
        _check_module(args.partitioner)
    _can_be_written(args.html, args.output)


def _check_module(text: str) -> None:
    """Raise unless the text is `module:Class`, the module is installed and its file defines the class, as far as that
    is known without running it."""
    module, _, name = text.rpartition(":")
    if not all(part.isidentifier() for part in (*module.split("."), name)):
        fail("cli", f"--partitioner {text}", "is not module:Class", "Write it as package.module:Class")
    file = factory.file_of_module(module)
    if file is None:
        fail("cli", f"--partitioner {text}", f"there is no module {module}", "Install it, or correct the name")
    try:
        defined = file.suffix != ".py" or factory.may_define(file.read_bytes(), str(file), name)
    except (OSError, SyntaxError, ValueError):  # its import says more
        return
    if not defined:
        fail("cli", f"--partitioner {text}", f"there is no class {name} in {file}", "Correct the name")


def _check_refine(args: argparse.Namespace) -> None:
    if args.json and args.split_input_file:
        fail("cli", "--json", "cannot be used with --split-input-file", "Leave one of them out")
    if args.sizes is not None:
        for flag in ("types", "passes", "print_after_each", "split_input_file"):
            if getattr(args, flag):
                fail("cli", f"--{flag.replace('_', '-')}", "cannot be used with --sizes", "Leave one of them out")
        if args.file == STDIN:
            fail("cli", "--sizes", "needs an artifact that keepdim saved, and standard input is read", "Name a file")
    if args.split_input_file and args.output is not None:
        fail("cli", "--output", "cannot be used with --split-input-file", "Redirect the output: > FILE")
    if args.file != STDIN:
        _exists(args.file, "StableHLO")
    _can_be_written(args.output)
    named = {*map(_pass_name, args.passes.split(","))} if args.passes is not None else NEED_TYPES
    if args.types is None and args.sizes is None and NEED_TYPES & named:
        fail("cli", "--types", "is missing: the types of all arguments", "Add --types 'tensor<16xf32>,...'")


NEED_TYPES = {"remove-dynamism", "refine-arguments"}  # unless the pass has them as an option


def _pass_name(text: str) -> str:
    return text.strip().lstrip("-").removeprefix("stablehlo-")


def _check_embed(args: argparse.Namespace) -> None:
    if args.text == [str(STDIN)] and args.file is None:
        args.text, args.file = [], STDIN
    if bool(args.text) == (args.file is not None):
        fail("cli", "embed", "takes texts or --file, one of the two",
             'Write keepdim embed "a text", or keepdim embed --file in.txt')  # fmt: skip
    if args.output is not None and args.output.suffix != ".npy":
        fail("cli", str(args.output), "is not a .npy file", "Choose a name that ends in .npy")
    if args.file not in (None, STDIN):
        _exists(args.file, "a text file")
    if args.model != ENCODER and not (Path(args.model) / "config.json").is_file():
        fail("cli", f"model {args.model!r}", "is neither a known name nor a folder with config.json",
             f"Known: {ENCODER}")  # fmt: skip
    _can_be_written(args.output)


def _check_generate(args: argparse.Namespace) -> None:
    if args.chat and args.raw:
        fail("cli", "--raw", "cannot be used with --chat", "Leave one of them out")
    model = Path(args.model)
    if model.suffix == ".pte":
        for flag in ("max_context", "quant", "cache", "engine", "precision", "mapped"):
            if getattr(args, flag):
                fail("cli", f"--{flag.replace('_', '-')}", f"{model} is already lowered", "Leave it out")
    elif args.weights is not None:
        fail("cli", "--weights", "belongs to a lowered .pte", "Leave it out")
    if model.suffix in (".pte", ".gguf"):
        _exists(model)
    elif args.model != LANGUAGE_MODEL and not (model / "config.json").is_file():
        fail("cli", f"model {args.model!r}", "is neither a known name, a .gguf, a .pte nor a checkpoint folder",
             f"Known: {LANGUAGE_MODEL}")  # fmt: skip
    if args.weights is not None:
        _exists(args.weights, "a .gguf")
    if args.prompt is not None:
        args.prompt = _prompt(args.prompt)


def _prompt(text: str) -> str:
    """The prompt, from standard input for `-`; raises if it is empty."""
    given, subject = text, "--prompt"
    if text == "-":
        subject = "standard input"
        try:
            given = sys.stdin.read().removesuffix("\n")
        except UnicodeDecodeError as e:
            fail("cli", subject, f"is not UTF-8 text ({e.reason})", "Convert it to UTF-8", e)
    if not given.strip():
        fail("cli", subject, "has no prompt", "Give a text: --prompt TEXT, or - and a text on standard input")
    return given


CHECKS: dict[str, Callable[[argparse.Namespace], None]] = {
    "lower": _check_lower,
    "run": _check_run,
    "inspect": _check_inspect,
    "audit": _check_audit,
    "refine": _check_refine,
    "embed": _check_embed,
    "generate": _check_generate,
}

__all__ = ["Parser", "check", "parser"]
