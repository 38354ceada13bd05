"""docs/errors.md from the sources: every sentence that keepdim refuses something with, by its stage, and its remedy.

Python is read as a syntax tree, C++ as text. What a sentence takes from the call stands in it as {name}.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent

# Where in the life of a model a stage is, and what to do where a sentence names no remedy of its own.
STAGES = {
    "fork": "In a process that was forked while another thread was inside keepdim. Load the file there, or start "
    "processes with spawn.",
    "import": "`import keepdim`. The installation is not whole: install keepdim again, with the torch and "
    "executorch it names.",
    "capture": "Exporting the model, in `keepdim.lower`. The model, its example or its `dynamic_shapes` have to "
    "change.",
    "contract": "Reading the contract from an exported program. What cannot be written as a size of an input, or as a "
    "comparison of sizes, has to leave the model or get a range of its own.",
    "dims": "Arithmetic on sizes. A size has to be bounded, and a divisor of sizes at least 1: give the Dim a min "
    "and a max.",
    "lower": "Partitioning and lowering. The subject is a node, a dim or a partitioner; `prog.report` lists what "
    "was not taken.",
    "verify": "A program is checked before it is used, in Python and again in C++. A file that keepdim wrote "
    "passes; one that does not is damaged or was made by something else: lower the model again.",
    "save": "Writing a file: choose a folder that exists and can be written to.",
    "load": "Opening a file. It is of another version, cut off or changed on its way: copy it again, or lower the "
    "model again.",
    "bind": "A call whose inputs are not those of the contract. `print(prog.contract)` or `keepdim inspect` shows "
    "it; a wider range needs a new lowering.",
    "check": "A call that breaks a condition of the model: an equality, a guard of torch.export or its own "
    "`torch._check`.",
    "plan": "Planning memory for the sizes of a call, before anything is allocated.",
    "build": "Building a plan for the sizes of a call. Lowering checks all of it beforehand: on a file that passed "
    "`load` such a sentence is a fault of keepdim. Please report it.",
    "run": "Running a plan. An index or a divisor in the data is out of its range, memory is short, or ExecuTorch "
    "refused: mend the data of that call, or free memory. The next call works.",
    "options": "`keepdim.set_options`: give counts and bytes that are not negative, and names it knows.",
    "dispatch": "Declaring, calling or exporting a `keepdim.dispatch`. Change the declaration, or the range of the "
    "export, as the sentence says. [ranges.md](ranges.md)",
    "tune": "Measuring the implementations of a dispatch, or the splits of the engine: they have to agree with the "
    "reference first. [ranges.md](ranges.md)",
    "stablehlo": "Writing StableHLO. What is refused there may run in a `.pte`: use `keepdim.lower`, or change the "
    "model. [stablehlo.md](stablehlo.md)",
    "refine": "Running passes on StableHLO, or refining a program to sizes. Sizes have to be within the contract, "
    "types those of the text. [stablehlo.md](stablehlo.md)",
    "quantise": "Quantising weights: choose a type whose blocks fit the rows, or none. [llm.md](llm.md)",
    "generate": "Language models: texts, tokens and sampling. [llm.md](llm.md)",
    "text": "Reading the text form of a Program: it is what `keepdim inspect` prints.",
    "embed": "Sentence embeddings, `keepdim embed`: give a folder of an encoder, and texts as str.",
    "reference": "The oracle of the tests, which runs a Program with torch.",
    "audit": "`keepdim audit`. [audit.md](audit.md)",
    "report": "Pages of `--html`. [pages.md](pages.md)",
    "cli": "What was typed at the command line; `keepdim COMMAND --help` shows the forms.",
    "any stage": "An optional package is asked for where it is first needed; arithmetic on sizes is checked "
    "everywhere.",
}

INTRODUCTION = """\
Written by `pytest tests/test_docs.py --regen-golden` from the sources. Everything that keepdim refuses is a
`keepdim.KeepdimError` with one sentence: `[stage] subject: fact (values). remedy`; `error.stage` is the word in
brackets. In C++ the sentence goes to ExecuTorch's log, and the call gives an error code. The process lives, and the
next good call works. A word in braces is filled in; *or* parts forms of one sentence. Where a row has no remedy, that
of its stage holds, which stands above the table."""


class Sentence(NamedTuple):
    """One row; a stage, what comes before and after the colon, and what to do."""

    stage: str
    text: str
    remedy: str
    file: str


# ---------------------------------------------------------------- Python
def _label(e: ast.expr) -> str:
    """A word for what a sentence takes in."""
    match e:
        case ast.Name(id="e" | "why" | "said"):
            return "why"
        case ast.Name(id=name):
            return name.strip("_")
        case ast.Attribute(attr="__name__"):
            return "type"
        case ast.Attribute(attr=name):
            return name
        case ast.Call(func=ast.Attribute(attr="join"), args=[inner]):
            return _label(inner)
        case ast.Call(func=ast.Name(id="range_text")):
            return "range"
        case ast.Call(func=ast.Name(), args=[inner, *_]):
            return _label(inner)
        case ast.Call(func=ast.Attribute(value=inner)) | ast.Subscript(value=inner):
            return _label(inner)
        case ast.GeneratorExp(generators=[ast.comprehension(iter=inner), *_]):
            return _label(inner)
    return "…"


def _text(e: ast.expr | None, names: dict[str, list[ast.expr]]) -> str:
    """A string expression as a reader sees it."""
    match e:
        case None:
            return ""
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_text(p, names) for p in parts)
        case ast.FormattedValue(value=ast.IfExp() | ast.Constant() as inner):
            return _text(inner, names)
        case ast.FormattedValue(value=inner, conversion=c):
            return f"'{{{_label(inner)}}}'" if c == ord("r") else f"{{{_label(inner)}}}"
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _text(left, names) + _text(right, names)
        case ast.IfExp(body=a, orelse=b):
            forms = [t for t in (_text(a, names), _text(b, names)) if t]
            return " *or* ".join(forms)
        case ast.Name(id=name) if name in names:
            return " *or* ".join(dict.fromkeys(_text(v, {}) for v in names[name]))
    return f"{{{_label(e)}}}"


def _strings(body: ast.AST) -> dict[str, list[ast.expr]]:
    """Names that a function or module gives strings to."""
    found: dict[str, list[ast.expr]] = {}
    for n in ast.walk(body):
        if isinstance(n, ast.Assign) and isinstance(n.value, (ast.Constant, ast.JoinedStr, ast.BinOp, ast.IfExp)):
            for target in n.targets:
                if isinstance(target, ast.Name):
                    found.setdefault(target.id, []).append(n.value)
    return found


def _python(path: Path) -> Iterator[Sentence]:
    tree, file = ast.parse(path.read_text()), path.relative_to(ROOT).as_posix()
    constants = {k: v for k, v in _strings(ast.Module(tree.body, [])).items() if k.isupper()}
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    inner = {id(c): f for f in functions for c in ast.walk(f)}  # the innermost comes last and stays
    for n in sorted((n for n in ast.walk(tree) if isinstance(n, ast.Call)), key=lambda n: n.lineno):
        names = constants | (_strings(inner[id(n)]) if id(n) in inner else {})
        if isinstance(n.func, ast.Name) and n.func.id == "fail":
            stage, subject, *rest = n.args
            fact = "{why}" if isinstance(subject, ast.Starred) else _text(rest.pop(0), names)
            where = "{subject}" if isinstance(subject, ast.Starred) else _text(subject, names)
            word = stage.value if isinstance(stage, ast.Constant) else "any stage"
            yield Sentence(str(word), f"{where}: {fact}", _text(rest[0], names) if rest else "", file)
        elif isinstance(n.func, ast.Name) and n.func.id == "KeepdimError" and isinstance(n.args[0], ast.JoinedStr):
            yield _split(_text(n.args[0], names), file)
        elif isinstance(n.func, ast.Name) and n.func.id == "Unsupported":
            yield Sentence("", _text(n.args[0], names), "", file)


# ---------------------------------------------------------------- C++
OR = " *or* "
TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|//[^\n]*|[()\[\]{},;]|[\w:.>-]+|\S')
# What helpers put in front of a fact.
PREFIX = {
    "runtime/program.cpp": "[verify] ",
    "runtime/python.cpp": "[bind] input {i} '{name}': ",
    "runtime/backend.cpp": "[run] output {i} '{name}': ",
    "runtime/contract.cpp": "",
}


def _arguments(tokens: list[str], start: int) -> tuple[list[list[str]], int]:
    """The arguments of a call, from behind its parenthesis."""
    out: list[list[str]] = [[]]
    depth, i = 1, start
    while depth:
        t = tokens[i]
        depth += (t in "([{") - (t in ")]}") if len(t) == 1 else 0
        if depth == 1 and t == ",":
            out.append([])
        elif depth:
            out[-1].append(t)
        i += 1
    return out, i


def _joined(tokens: list[str]) -> str:
    """Literals and, between them, a word for what is added."""
    out, other, inside = "", [], []
    known = {"quote": "'{name}'", "end.stage": "[bind] ", "name_text": "input {i} '{name}'", "where": "{input} dim {d}"}
    known["name_of"] = known["name_text"]

    def flush() -> str:
        words = [w for w in other if re.match(r"[A-Za-z_]", w) and not w.startswith(("std::", "et::"))]
        text = next((known[w] for w in words if w in known), None)
        name = re.split(r"[.:>-]+", words[-1])[-1] if words else ""
        other.clear()
        return text if text is not None else f"{{{name}}}" if words else ""

    for before, t in zip(["", *tokens], tokens, strict=False):
        if t == "(":
            inside.append(re.match(r"[A-Za-z_]", before) is not None and before != "std::string")
        elif t == ")" and inside:
            inside.pop()
        if t.startswith('"') and not any(inside):  # one in a call is the call's
            out += flush() + t[1:-1].replace('\\"', '"')
        elif t == "?":  # a choice: not what decides it, but what it gives
            other.clear()
        elif t == ":":
            out += flush() + OR
        elif t != "+" or any(inside):
            other.append(t)
        else:
            out += flush()
    out += flush()
    return re.sub(rf"^{re.escape(OR)}|{re.escape(OR)}$", "", out)


def _cpp(path: Path) -> Iterator[Sentence]:
    file = path.relative_to(ROOT).as_posix()
    tokens = [t for t in TOKEN.findall(path.read_text()) if not t.startswith("//")]
    for i in range(1, len(tokens) - 1):
        word = re.split(r"[.>-]+", tokens[i])[-1]
        if word not in ("fail", "refuse", "report", "Error") or tokens[i + 1] != "(" or tokens[i - 1] == "void":
            continue
        args, _ = _arguments(tokens, i + 2)
        if not any(t.startswith('"') for a in args for t in a):
            continue
        if word in ("fail", "report", "Error") and args[0][0].startswith("Code::"):
            text = _joined(args[1])
            if text.endswith("{fact}") or text.startswith("[{"):
                continue  # a helper: its callers say the rest
        elif word == "fail":  # of a kernel: position, fact
            text = "[run] {op} '{name}': " + _joined(args[-1])
        elif file == "runtime/method.cpp":  # stage, subject, what, error
            text = f"[{_joined(args[0])}] {_joined(args[1])}: {_joined(args[2])} ({{error}})."
        elif file == "runtime/program.cpp":
            text = f"[verify] {_joined(args[0])}: {_joined(args[1])}"
        elif file == "runtime/backend.cpp" and len(args) == 1:
            continue  # what was given instead, behind "got"
        elif file in PREFIX:
            text = PREFIX[file] + _joined(args[-1])
        else:
            text = "[build] {op} '{name}': " + _joined(args[-1])
        yield _split(text, file)


def _split(text: str, file: str) -> Sentence:
    """A whole sentence, taken apart."""
    stage, rest = re.match(r"(?:\[(\w+)\] ?)?(.*)", text).groups()
    rest = re.sub(r"\.$", "", rest)
    fact, _, remedy = (rest, "", "") if OR in rest else rest.partition(". ")
    return Sentence(stage or "build", fact, remedy, file)


# ---------------------------------------------------------------- the page
def sentences() -> list[Sentence]:
    """Every sentence of the sources, each once."""
    found: dict[tuple[str, str, str], Sentence] = {}
    for path in sorted((ROOT / "keepdim").rglob("*.py")):
        for s in _python(path):
            found.setdefault(s[:3], s)
    for path in sorted((ROOT / "runtime").rglob("*.cpp")):
        for s in _cpp(path):
            found.setdefault(s[:3], s)
    return list(found.values())


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())


def page() -> str:
    """The text of docs/errors.md."""
    rows = sentences()
    lines = ["# Errors", "", INTRODUCTION, ""]
    for stage, about in STAGES.items():
        mine = [s for s in rows if s.stage == stage]
        if mine:
            head = f"## [{stage}]" if " " not in stage else "## In any stage"
            lines += [head, "", about, "", "| sentence | remedy | in |", "|---|---|---|"]
            lines += [f"| {_cell(s.text)} | {_cell(s.remedy)} | `{s.file}` |" for s in mine] + [""]
    lines += [
        *("## Why a node stays with ExecuTorch", ""),
        "No errors: reasons in the report of a lowering. ExecuTorch's kernels run these nodes, where it has one.",
        *("", "| reason | in |", "|---|---|"),
        *(f"| {_cell(s.text)} | `{s.file}` |" for s in rows if s.stage == ""),
    ]
    return "\n".join(lines) + "\n"
