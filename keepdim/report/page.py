"""Pages: a file, a run or an audit as one self-contained HTML file.

This module gathers the data of a page, with all shapes as rows of one Dim table over the page's symbols; templates,
styles and scripts are in `assets/` and are inlined into the file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

from ..artifact import pte
from ..artifact.outline import OUTLINE_METHOD, Body, Outline, Step
from ..artifact.signature import Signature
from ..cache import model_name
from ..errors import fail
from ..ir import cost
from ..ir.program import NONE, Attr, Node, Program
from ..profile import Profile
from ..shapes.blocks import BLOCKS
from ..shapes.contract import DTYPE_BYTES, Constraint, Contract, DimTable, Spec, Symbol
from ..shapes.dim import Dim, range_text

Json = dict[str, Any]  # an object of the page's data

SCRIPTS = ("dims.js", "model.js", "layout.js", "draw.js", "sizes.js", "graph.js", "run.js", "audit.js", "page.js")
ENGINES = {"KeepdimGgml": "keepdim's ggml engine", "KeepdimMlx": "keepdim's MLX engine"}


# ---------------------------------------------------------------- pages
def file_page(path: Path, run: Profile | None = None) -> str:
    """The page of a .pte, optionally with the profile of a run."""
    return _html(model_name(path), {"file": file_data(path), "run": run})


def audit_page(audit: Json) -> str:
    """The page of an audit, from the output of `keepdim audit --json`."""
    model = Path(str(audit["model"]))
    return _html(model_name(model) if model.suffix in (".pte", ".pt2") else model.name, {"audit": audit})


def _html(title: str, data: Json) -> str:
    folder = files(__package__) / "assets"
    # "</" and "<!--" would end or change the script element; in JSON "<" can always be escaped.
    body = msgspec.json.encode({"title": title, **data}).decode().replace("<", "\\u003c")
    parts = {
        "style": (folder / "style.css").read_text(),
        "data": body,
        "script": "\n".join((folder / name).read_text() for name in SCRIPTS),
    }
    page = (folder / "page.html").read_text()
    for name, text in parts.items():
        head, tail = page.split(f"/*{name}*/")
        page = head + text + tail
    return page


# ---------------------------------------------------------------- the data of a file
def file_data(path: Path) -> Json:
    """The data of the page of a .pte."""
    signature = Signature.from_json(pte.contract_text(path))
    text = pte.contract_text(path, OUTLINE_METHOD) if pte.has_method(path, OUTLINE_METHOD) else None
    delegates = [d for d in pte.delegates(path) if d.method == "forward"]
    page = _Page(signature.contract, delegates)
    if text is not None:
        page.outline(Outline.from_json(text), len(signature.mutated))
    else:
        page.plain(pte.calls(path))
    return {
        "name": path.name,
        "bytes": path.stat().st_size,
        "sentences": contract_sentences(signature.contract),
        "where": page.where(),
        "tables": [str(t) for t in signature.tables],
        "mapped": None if signature.mapped is None else signature.mapped.name,
        "passes": [[(s.name, s.before, s.after) for s in d.program.passes] for d in delegates if d.program],
        **page.data(),
    }


def contract_sentences(c: Contract) -> list[str]:
    """The contract as sentences."""
    out = []
    for s in c.symbols:
        given = "value" if s.source.kind != "size" else "size"
        out.append(f"{s.name} may be any {given} {_span(s)} ({_source_text(c, s)}).")
    out += [f"{i.name} is {_noun(i)}." for i in c.inputs]
    out += [f"A call is refused unless {k}{_why(k)}." for k in c.constraints]
    out += [f"{s.name} is decided by data, {_span(s)} ({_source_text(c, s)})." for s in c.data]
    out += [f"The result {o.name} is {_noun(o)}." for o in c.outputs]
    out += [f"It always holds that {k}{_why(k)}." for k in c.ensures]
    return out


def _span(s: Symbol) -> str:
    if s.lo is not None and s.hi is not None:
        return f"from {s.lo} to {s.hi}"
    return f"in {range_text(s.lo, s.hi)}"


def _source_text(c: Contract, s: Symbol) -> str:
    spec = (c.outputs if s in c.data else c.inputs)[s.source.input]
    what = {"size": f"dim {s.source.index} of ", "int": "", "item": f"element {s.source.index} of "}[s.source.kind]
    return f"{what}{spec.name}" if s.source_dim == s.dim else f"{what}{spec.name} is {s.source_dim}"


def _noun(s: Spec) -> str:
    if s.dtype == "int":
        return f"the integer {s.dims[0]}"
    if s.dtype == "python":
        return "a constant of the model"
    return f"{s.dtype}[{', '.join(map(str, s.dims))}]"


def _reason(why: str) -> str:
    """Why something is not delegated, for readers of the page."""
    return "keepdim's engine has no such operation" if why.startswith("no lowering rule for ") else why


def _why(k: Constraint) -> str:
    return f" ({k.sentence})" if k.sentence else ""


class _Page:
    """Values, nodes and Dims of all delegates and of the steps between them, in one numbering."""

    def __init__(self, contract: Contract, delegates: Sequence[pte.Delegate]):
        self.contract, self.delegates = contract, delegates
        self.symbols: dict[str, Json] = {}
        for s in (*contract.symbols, *contract.data):
            data = s in contract.data
            self._symbol(s.name, s.lo, s.hi, _source_text(contract, s), "data" if data else s.source.kind)
        self.values: list[Json] = []
        self.nodes: list[Json] = []
        self.used: list[Dim] = []  # in order of first use; become rows of the table once all symbols are known
        self.ids: dict[Dim, int] = {}
        self.top: list[int] = []
        self.dims_of: dict[int, tuple[Dim, ...]] = {}
        self.inputs = [self.value(s.name, s.dtype, s.dims, "input") for s in contract.inputs]
        self.results: list[int] = []
        self.written: list[tuple[int, str]] = []  # values that ExecuTorch keeps for the next call, and their names

    # -- parts
    def _symbol(self, name: str, lo: int | None, hi: int | None, place: str, kind: str) -> Dim:
        self.symbols.setdefault(name, {"name": name, "lo": lo, "hi": hi, "place": place, "kind": kind})
        known = self.symbols[name]
        return Dim.symbol(name, known["lo"], known["hi"])

    def dim(self, d: Dim) -> int:
        """The id of a Dim on the page."""
        if d not in self.ids:
            self.ids[d] = len(self.used)
            self.used.append(d)
        return self.ids[d]

    def value(self, name: str, dtype: str, dims: Sequence[Dim], kind: str, key: str = "") -> int:
        block, width = BLOCKS.get(dtype, (1, DTYPE_BYTES.get(dtype, 0)))
        self.dims_of[len(self.values)] = tuple(dims)
        row = {"name": name, "dtype": dtype, "dims": [self.dim(d) for d in dims], "kind": kind}
        self.values.append(row | {"block": block, "width": width} | ({"key": key} if key else {}))
        return len(self.values) - 1

    def node(self, **row: object) -> int:
        self.nodes.append(row)
        return len(self.nodes) - 1

    # -- a method that is one delegate, or a file without an outline
    def plain(self, calls: Sequence[str]) -> None:
        """The delegates one after the other, each on the method's inputs if their number is the same."""
        for i, d in enumerate(self.delegates):
            same = d.program is not None and len(d.program.contract.inputs) == len(self.inputs)
            given = self.inputs if same else []
            self.top.append(self._delegate(i, d, given, []))
        for name, n in Counter(calls).items():
            out = self.value(name, "python", (), "temp")
            why = "the file does not say why it is not delegated"
            self.top.append(self.node(op=name, ins=[], outs=[out], why=why, text=f"{n} times" if n > 1 else ""))
        last = self.nodes[self.top[-1]] if len(self.delegates) == 1 and self.top else {}
        made = last.get("outs", [])
        for k, spec in enumerate(self.contract.outputs):
            self.results.append(made[k] if k < len(made) else self.value(spec.name, spec.dtype, spec.dims, "temp"))

    # -- a method with steps between delegates
    def outline(self, o: Outline, mutated: int) -> None:
        """The steps in order; data-dependent sizes get the contract's names if a result has them."""
        shapes = {s.name: s.dims for step in _walk(o.steps) for s in step.outs}
        if len(o.results) < len(self.contract.outputs):
            fail("load", "outline", f"has {len(o.results)} results, and the contract {len(self.contract.outputs)}",
                 "Lower the model again")  # fmt: skip
        results = o.results[len(o.results) - len(self.contract.outputs) :]
        rename: dict[str, Dim] = {}
        for name, spec in zip(results, self.contract.outputs, strict=True):
            for mine, known in zip(shapes.get(name, ()), spec.dims, strict=False):
                if mine.sym is not None and known.sym is not None and mine != known:
                    rename[mine.sym.name] = known
        for r in o.symbols:
            if r.name not in rename:
                rename[r.name] = self._symbol(r.name, r.lo, r.hi, "a size that data decides on the way", "data")
        scope = dict(zip(o.inputs, self.inputs, strict=False))
        scope |= {k.spec.name: self.value(k.name, k.spec.dtype, k.spec.dims, "state") for k in o.state}
        left = {d.hash: i for i, d in reversed(list(enumerate(self.delegates)))}
        self.top = [self._step(s, scope, rename, left) for s in o.steps]
        self.results = [scope[n] for n in results if n in scope]
        self.written = [(scope[k.written], k.name) for k in o.state if k.written in scope]

    def _step(self, s: Step, scope: dict[str, int], rename: Mapping[str, Dim], delegates: Mapping[str, int]) -> int:
        outs = [self.value(o.name, o.dtype, [d.substitute(rename) for d in o.dims], "temp") for o in s.outs]
        given = [scope.get(name, NONE) for name in s.ins]
        scope |= {o.name: i for o, i in zip(s.outs, outs, strict=True)}
        if s.delegate:
            i = delegates.get(s.delegate, NONE)
            d = self.delegates[i] if i != NONE else pte.Delegate("forward", s.op, None, {}, s.delegate)
            return self._delegate(i, d, given, outs)
        ins = [i for i in given if i != NONE]
        at = self.node(op=s.op, ins=ins, outs=outs, path=s.module, why=_reason(s.why))

        def region(b: Body) -> Json:
            inner = dict(scope)
            nodes = [self._step(t, inner, rename, delegates) for t in b.steps]
            return {"nodes": nodes, "results": [inner[r] for r in b.results if r in inner]}

        if s.bodies:
            texts = ("if true", "if false") if s.op == "cond" else ("",) * len(s.bodies)
            self.nodes[at]["regions"] = [region(b) | {"text": t} for b, t in zip(s.bodies, texts, strict=True)]
        return at

    # -- a delegate
    def _delegate(self, index: int, d: pte.Delegate, given: Sequence[int], outs: list[int]) -> int:
        engine = ENGINES.get(d.backend, d.backend)
        at = self.node(op="delegate", ins=[i for i in given if i != NONE], outs=outs, delegate=index, engine=engine)
        if d.program is not None:
            made = _Delegate(self, d.program, given).add(index)
            self.nodes[at] |= {"regions": [made], "outs": [i for i in made["results"] if i != NONE], "stands": outs}
            for old, new in zip(outs, made["results"], strict=False):
                if new != NONE:
                    self.values[old]["same"] = new
        return at

    # -- result
    def where(self) -> Json:
        """A summary of what runs where, and the nodes that are not delegated."""
        outside = [i for i, n in enumerate(self.nodes) if "why" in n]
        inside = sum(1 for n in self.nodes if n.get("inside"))
        engines = Counter(n["engine"] for n in self.nodes if n["op"] == "delegate")
        kept = f" but the writing of {', '.join(name for _, name in self.written)}" if self.written else ""
        parts = [f"{n} delegate{'s' * (n > 1)} on {engine}" for engine, n in engines.items()]
        if not outside and len(engines) == 1 and engines.total() == 1:
            text = f"All {inside} operations run in one delegate, on {next(iter(engines))}."
            text += f" Nothing is left outside{kept}."
        elif parts:
            text = f"{inside} operations run in {' and '.join(parts)}."
        else:
            text = "Nothing is delegated."
        return {"text": text, "outside": outside}

    def data(self) -> Json:
        """Symbols, the table, texts of the Dims, values, nodes."""
        requires = [(self.dim(k.lhs), k.cmp, self.dim(k.rhs), str(k)) for k in self.contract.constraints]
        table = DimTable(self.symbols)
        return {
            "symbols": list(self.symbols.values()),
            "rows": [table.id(d) for d in self.used],
            "texts": [str(d) for d in self.used],
            "dims": table.rows,
            "requires": requires,
            "values": self.values,
            "nodes": self.nodes,
            "top": self.top,
            "inputs": self.inputs,
            "results": self.results,
            "written": self.written,
            "outputs": [o.name for o in self.contract.outputs],
        }


class _Delegate:
    """One delegate's Program on the page: its symbols as expressions of the page's, from the shapes of its inputs."""

    def __init__(self, page: _Page, p: Program, given: Sequence[int]):
        self.page, self.p = page, p
        self.known: dict[str, Dim] = {}
        for s in p.contract.symbols:
            self.known[s.name] = self._bound(s, given)
        self.seen: dict[Dim, Dim] = {}
        self.paths = {name: m.path for m in p.modules for name in m.values}
        first = len(p.contract.inputs)
        self.ids = {NONE: NONE}
        for i, spec in enumerate(p.contract.inputs):
            here = given[i] if i < len(given) and given[i] != NONE else None
            self.ids[i] = here if here is not None else page.value(spec.name, spec.dtype, self.dims(spec.dims), "input")
        for i, v in enumerate(p.values, first):
            self.ids[i] = page.value(v.name, v.dtype, self.dims(v.dims), v.kind, v.key)

    def _bound(self, s: Symbol, given: Sequence[int]) -> Dim:
        src = s.source
        at = given[src.input] if src.input < len(given) else NONE
        if src.kind == "size" and at != NONE and src.index < len(self.page.dims_of[at]):
            return s.solve(self.page.dims_of[at][src.index], lambda d: d.substitute(self.known))
        return self.page._symbol(s.name, s.lo, s.hi, f"of {self.p.contract.inputs[src.input].name}", "data")

    def dims(self, dims: Iterable[Dim]) -> list[Dim]:
        return [self.dim(d) for d in dims]

    def dim(self, d: Dim) -> Dim:
        if d not in self.seen:
            self.seen[d] = d.substitute(self.known)
        return self.seen[d]

    def path(self, name: str) -> str:
        """The module path of a value; one made by a pass has the name of another with a suffix."""
        return self.paths.get(name) or self.paths.get(name.rpartition(".")[0], "")

    def add(self, index: int) -> Json:
        results = [self.ids[r] for r in self.p.results]
        return {"nodes": [self._node(n, index) for n in self.p.nodes], "results": results}

    def _node(self, n: Node, index: int) -> int:
        attrs = {k: v for k, v in n.attrs.items() if k != "when"}
        row: Json = {
            "op": n.op,
            "ins": [self.ids[i] for i in n.ins if i != NONE],
            "outs": [self.ids[i] for i in n.outs],
            "path": self.path(self.p.value(n.outs[0]).name) if n.outs else "",
            "text": "; ".join(f"{k} = {self._text(v)}" for k, v in sorted(attrs.items())),
            "flops": self.page.dim(self.dim(cost.flops(self.p, n))),
            "moved": self.page.dim(self.dim(cost.bytes_moved(self.p, n))),
            "view": n.op in cost.VIEWS,
            "inside": True,
            "in": index,
        }
        at = self.page.node(**row)
        if n.regions:
            when = n.attrs.get("when")
            regions = [
                {"nodes": [self._node(m, index) for m in r.nodes], "results": [self.ids[i] for i in r.results]}
                for r in n.regions
            ]
            texts = _conditions(self.dim(when)) if isinstance(when, Dim) else ("true", "false")
            self.page.nodes[at]["regions"] = [r | {"text": t} for r, t in zip(regions, texts, strict=True)]
            if isinstance(when, Dim):
                self.page.nodes[at]["when"] = self.page.dim(self.dim(when))
        return at

    def _text(self, v: Attr) -> str:
        if isinstance(v, Dim):
            return str(self.dim(v))
        return f"[{', '.join(str(self.dim(d)) for d in v)}]" if isinstance(v, tuple) else str(v)


def _conditions(when: Dim) -> tuple[str, str]:
    """The conditions `when` >= 0 and `when` < 0, with a single symbol on the left.

    >>> s = Dim.symbol("s", 1, 2048)
    >>> _conditions(110 - s), _conditions(2 * s - 7), _conditions(s * s - 4)
    (('s <= 110', 's >= 111'), ('s >= 4', 's <= 3'), ('s*s - 4 >= 0', 's*s - 4 < 0'))
    """
    names = when.symbols()
    form = when.linear_in(next(iter(names))) if len(names) == 1 else None
    mul, add = (form[0].value, form[1].value) if form is not None else (None, None)
    if mul is None or add is None:
        return f"{when} >= 0", f"{when} < 0"
    (name,) = names
    if mul > 0:
        least = -(add // mul)
        return f"{name} >= {least}", f"{name} <= {least - 1}"
    most = add // -mul
    return f"{name} <= {most}", f"{name} >= {most + 1}"


def _walk(steps: Iterable[Step]) -> Iterable[Step]:
    for s in steps:
        yield s
        for b in s.bodies:
            yield from _walk(b.steps)


__all__ = ["audit_page", "contract_sentences", "file_data", "file_page"]
