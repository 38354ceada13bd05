"""Pages: what they say, and what they do in a real browser."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim as ExportDim

import keepdim
from keepdim.cli import commands as cli
from keepdim.errors import KeepdimError
from keepdim.profile import profile
from keepdim.report import page as report
from keepdim.shapes.contract import DimTable
from keepdim.shapes.dim import Dim, dmax, dmin
from support.browser import Browser, open_page


class Block(nn.Module):
    """A norm, three projections and a choice by size between two orders of a product."""

    def __init__(self, attend: Any):
        super().__init__()
        self.norm, self.q, self.k, self.v = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.attend = attend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.attend(self.q(h), self.k(h), self.v(h))


def left(q, k, v):
    return (q @ k.transpose(-1, -2)) @ v


def right(q, k, v):
    return q @ (k.transpose(-1, -2) @ v)


@pytest.fixture(scope="module")
def ranges(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, keepdim.Module]:
    """A model with a choice by size in each of two blocks."""
    axes, domain = {"s": "q.shape[1] == k.shape[1] == v.shape[1]"}, {"s": (1, 512)}
    attend = keepdim.dispatch(axes=axes, domain=domain, reference=left, name="attend").impl(left, upto=40).impl(right)
    model = nn.Sequential(Block(attend), Block(attend)).eval().requires_grad_(False)
    shapes = ({0: ExportDim("batch", min=1, max=8), 1: ExportDim("s", min=1, max=512)},)
    path = tmp_path_factory.mktemp("ranges") / "ranges.pte"
    module = keepdim.lower(model, (torch.randn(2, 17, 16),), dynamic_shapes=shapes)
    module.save(path)
    return path, module


class Split(nn.Module):
    """Something that the engine does not have, something that stays between calls, and a check."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.register_buffer("count", torch.zeros(1))
        self.count: torch.Tensor

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        torch._check(x.shape[0] + mask.shape[0] <= 20)
        self.count.add_(1)
        found = torch.nonzero(mask)
        return self.down(torch.relu(self.up(x))) + self.count, found * 2


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that ExecuTorch runs a part of."""
    shapes = ({0: ExportDim("n", min=2, max=16)}, {0: ExportDim("m", min=2, max=16)})
    path = tmp_path_factory.mktemp("split") / "split.pte"
    keepdim.lower(Split().eval().requires_grad_(False), (torch.randn(5, 4), torch.ones(7)), dynamic_shapes=shapes).save(
        path
    )
    return path


def page_of(path: Path) -> Path:
    """Its page, written by the command line."""
    page = path.with_suffix(".html")
    assert cli.main(["inspect", str(path), "--html", str(page)]) == 0
    return page


# ---------------------------------------------------------------- what a page says
def test_the_contract_in_sentences(split: Path) -> None:
    """Ranges, places, checks, and sizes that data decides."""
    text = report.file_data(split)["sentences"]
    assert "n may be any size from 2 to 16 (dim 0 of x)." in text
    assert "mask is f32[m]." in text
    assert any(s.startswith("A call is refused unless") and "20" in s for s in text)
    assert any(re.match(r"u\d+ is decided by data, from 0 to 16", s) for s in text)


def test_what_is_outside_has_its_reason(split: Path) -> None:
    """The file says by itself what ExecuTorch runs, on which shapes, and why."""
    data = report.file_data(split)
    (outside,) = (data["nodes"][i] for i in data["where"]["outside"])
    assert outside["op"] == "aten.nonzero.default"
    assert outside["why"] == "keepdim's engine has no such operation"
    assert [v["name"] for v in data["values"] if v["kind"] == "state"] == ["count"]
    assert "1 delegate on keepdim's ggml engine" in data["where"]["text"]


def test_modules_and_implementations_are_in_the_file(ranges: tuple[Path, keepdim.Module]) -> None:
    """Every operation knows its module, inside a branch its implementation too; branches say where they are taken."""
    nodes = report.file_data(ranges[0])["nodes"]
    assert {"0.norm", "1.q", "0.attend.attend:left", "0.attend.attend:right"} <= {n.get("path") for n in nodes}
    conds = [n for n in nodes if n["op"] == "cond"]
    assert [[r["text"] for r in n["regions"]] for n in conds] == [["s <= 40", "s >= 41"]] * 2
    assert all(n["path"] for n in nodes if n.get("inside"))


def test_nothing_in_a_model_ends_the_script(tmp_path: Path) -> None:
    """Names and reasons of a model are shown in the page as text, whatever they contain."""
    page = report._html("</script><script>alert(1)</script><!--", {})
    assert page.count("</script>") == 2 and "<!--" not in page.replace("<!doctype", "")


def test_a_page_is_one_file(ranges: tuple[Path, keepdim.Module]) -> None:
    """It contains no address of anything else."""
    text = page_of(ranges[0]).read_text()
    assert not re.findall(
        r"(?:src|href)=[\"']?(?!#)|@import|url\(", re.sub(r"<script[^>]*>.*?</script>", "", text, flags=re.S)
    )
    assert set(re.findall(r"https?://[\w./]+", text)) <= {"http://www.w3.org/2000/svg"}


# ---------------------------------------------------------------- in a browser
def test_dims_as_python(browser: Browser, ranges: tuple[Path, keepdim.Module]) -> None:
    """Every kind of row, negative numbers, and numbers beyond 2^53 give what Python gives."""
    draw = random.Random(0)
    names = ["a", "b", "c"]
    dims = [Dim.symbol(n, -50, 50) for n in names] + [Dim.const(k) for k in (-7, -1, 1, 2, 3, 2**50 + 1)]
    table, kept = DimTable(names), []
    while len(kept) < 400:
        x, y = draw.choice(dims), draw.choice(dims)
        make = draw.choice([
            lambda x, y: x + y, lambda x, y: x * y, lambda x, y: x - y, dmax, dmin,
            lambda x, y: x // dmax(y, 1), lambda x, y: x % dmax(y, 1), lambda x, y: x // -3, lambda x, y: x % -3,
        ])  # fmt: skip
        try:
            kept.append(make(x, y))
        except KeepdimError:  # it overflows
            continue
        if len(kept[-1].terms) < 6 and len(str(kept[-1])) < 60:
            dims.append(kept[-1])
    rows = [table.id(d) for d in kept]
    assert {kind for kind, _ in table.rows} == {"const", "sym", "add", "mul", "floordiv", "mod", "max", "min"}
    browser.open(page_of(ranges[0]))
    large = 0
    for _ in range(12):
        values = {n: draw.randint(-50, 50) for n in names}
        wanted: list[int | None] = []
        for d in kept:
            try:
                wanted.append(d.eval(values))
            except KeepdimError:
                wanted.append(None)
        got = browser.run(f"keepdim.evalRows({table.rows}, {list(values.values())}).map(String)")
        assert [int(got[r]) for r, w in zip(rows, wanted, strict=True) if w is not None] == [
            w for w in wanted if w is not None
        ]
        large += sum(1 for w in wanted if w is not None and abs(w) > 2**53)
    assert large


def test_sliders_change_shapes_and_branches(browser: Browser, ranges: tuple[Path, keepdim.Module]) -> None:
    """Moving a size changes every shape, memory, cost and what is lit, as the contract and the engine have it."""
    open_page(browser, page_of(ranges[0]))
    look = """(function () {
      const m = keepdim.model, by = (path) => m.nodes.filter((n) => (n.path || "").includes(path));
      return { x: m.shape(m.file.inputs[0], true), y: m.shape(m.file.results[0], true), flops: m.flops, peak: m.peak,
               left: by("attend:left").every((n) => m.lit[n.id]), right: by("attend:right").every((n) => m.lit[n.id]),
               text: document.getElementById("sizes").innerText }; })()"""

    def slide(name: str, value: int) -> Any:
        browser.run(f"""(function () {{
          const e = document.querySelector('input[aria-label="{name} as a number"]');
          e.value = {value}; e.dispatchEvent(new Event("change")); }})()""")
        return browser.run(look)

    slide("batch", 3)
    few, many = slide("s", 40), slide("s", 41)
    assert (few["x"], few["left"], few["right"]) == ("f32[3, 40, 16]", True, False)
    assert (many["y"], many["left"], many["right"]) == ("f32[3, 41, 16]", False, True)
    assert slide("s", 10_000)["x"] == "f32[3, 512, 16]"
    browser.run("""(function () {
      const e = document.querySelector('input[type=range][aria-label="s"]');
      e.value = e.max; e.dispatchEvent(new Event("input")); })()""")
    top = browser.run(look)
    assert top["x"] == "f32[3, 512, 16]" and top["flops"] > many["flops"] and "Allowed" in top["text"]


def test_memory_is_about_what_the_engine_takes(browser: Browser, ranges: tuple[Path, keepdim.Module]) -> None:
    """The page's working memory against the arena of a real run."""
    path, module = ranges
    open_page(browser, page_of(path))
    loaded = keepdim.load(path)
    loaded(torch.randn(8, 300, 16))
    (counters,) = loaded.counters()
    peak = browser.run('(keepdim.model.set("batch", 8), keepdim.model.set("s", 300), keepdim.model.peak)')
    assert 0.5 < peak / counters["arena_bytes"] < 2
    assert browser.run("keepdim.model.weights") == pytest.approx(counters["weight_bytes"])


def test_what_is_refused_at_these_sizes(browser: Browser, split: Path) -> None:
    """A check of the contract is shown as soon as it does not hold; sizes of data have their own slider."""
    open_page(browser, page_of(split))
    text = browser.run(
        '(keepdim.model.set("n", 16), keepdim.model.set("m", 16), keepdim.sizes.update(), document.body.innerText)'
    )
    assert "Refused at these sizes" in text and "decided by data" in text
    assert "stays with ExecuTorch: keepdim's engine has no such operation" in text


def test_search_finds_and_shows(browser: Browser, ranges: tuple[Path, keepdim.Module]) -> None:
    """By op, by module, by shape; Enter goes to what was found, and opens the groups around it."""
    open_page(browser, page_of(ranges[0]))
    shut = "function shut(i) { i.open = false; (i.children || []).forEach(shut); }"
    browser.run(f"keepdim.view.tree.root.children.forEach({shut})")
    found = browser.run("""(function () {
      const e = document.getElementById("search");
      e.value = "matmul right"; e.dispatchEvent(new Event("input"));
      e.dispatchEvent(new KeyboardEvent("keydown", { key: "Enter" }));
      return { hits: document.querySelectorAll("#hits button").length,
               details: document.getElementById("details").innerText,
               inside: keepdim.view.canvas.layout.boxes.includes(keepdim.view.canvas.selected) }; })()""")
    assert (
        found["hits"] == 4
        and found["inside"]
        and found["details"].startswith("×\nmatmul")
        and "attend:right" in found["details"]
    )
    assert (
        browser.run('(keepdim.view.find("no such thing"), document.getElementById("hits").innerText)')
        == "nothing found"
    )
    assert browser.run('(keepdim.view.find("f32[batch, 16, s]"), keepdim.view.matches.length)') == 4


def test_pressing_opens_closes_and_selects(browser: Browser, split: Path) -> None:
    """With a mouse, on the canvas itself."""
    open_page(browser, page_of(split))
    spot = """(function (kind) {
      const c = keepdim.view.canvas, b = c.layout.boxes.find((b) => b.kind === kind);
      const r = c.element.getBoundingClientRect();
      return [r.left + c.view.x + (b.x + b.w / 2) * c.view.k, r.top + c.view.y + (b.y + 12) * c.view.k, b.open]; })"""
    x, y, before = browser.run(f'{spot}("delegate")')
    for kind in ("mousePressed", "mouseReleased"):
        browser.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
    assert before and not browser.run(f'{spot}("delegate")')[2]
    x, y, _ = browser.run(f'{spot}("op")')
    for kind in ("mousePressed", "mouseReleased"):
        browser.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
    assert "Not delegated: keepdim's engine has no such operation" in browser.run(
        'document.getElementById("details").innerText'
    )


class OnData(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x - 1, (x,)).sin()


def test_a_choice_by_data(browser: Browser, tmp_path: Path) -> None:
    """Its branches have names, and what decides leads to it."""
    path = tmp_path / "choice.pte"
    keepdim.lower(OnData(), (torch.randn(7),), dynamic_shapes=({0: ExportDim("n", min=2, max=32)},)).save(path)
    open_page(browser, page_of(path))
    found = browser.run("""(() => { const [first, choice] = keepdim.view.tree.root.children.filter((c) => c.children);
      return [choice.children.map((c) => c.title), [...choice.reads].some((v) => first.makes.has(v))]; })()""")
    assert found == [["if true", "if false"], True]


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return x * self.count


def test_state_that_is_written(browser: Browser, tmp_path: Path) -> None:
    """By the name that the model gives it, where it is read and where it is kept for the next call."""
    path = tmp_path / "counts.pte"
    keepdim.lower(Counts(), (torch.randn(7),), dynamic_shapes=({0: ExportDim("n", min=2, max=32)},)).save(path)
    open_page(browser, page_of(path))
    found = browser.run("""(() => {
      const { children } = keepdim.view.tree.root, [delegate] = children.filter((c) => c.children);
      return children.filter((c) => c.kind === "state").map((c) => [c.title, c.written,
        [...c.reads].some((v) => delegate.makes.has(v)), [...c.makes].some((v) => delegate.reads.has(v))]); })()""")
    assert found == [["count", False, False, True], ["count", True, True, False]]
    assert "outside but the writing of count" in browser.run('document.getElementById("where").innerText')


def test_three_thousand_operations(browser: Browser, tmp_path: Path) -> None:
    """A large graph opens folded, and can be unfolded whole."""
    page = tmp_path / "large.html"
    page.write_text(report._html("large", {"file": large(300), "run": None}))
    open_page(browser, page)
    assert browser.run("keepdim.view.canvas.layout.boxes.length") < 120
    seen = browser.run("""(function () {
      (function open(i) { i.open = true; (i.children || []).forEach(open); })(keepdim.view.tree.root);
      const c = keepdim.view.canvas; c.layout.update(); c.fit(); c.paint(); c.zoom(20); c.paint();
      return c.layout.boxes.length; })()""")
    assert seen > 3000 and not browser.errors()


def large(blocks: int) -> dict[str, Any]:
    """The data of a page with ten operations a block, each block a module."""
    from keepdim.artifact import pte
    from keepdim.ir.text import parse_program

    lines, last = [], "x"
    for i in range(blocks):
        steps = [("a", "rms_norm", last, " {eps=1e-05}"), ("b", "linear", f"a{i}, w", ""), ("c", "silu", f"b{i}", "")]
        steps += [("d", "mul", f"b{i}, c{i}", ""), ("e", "add", f"d{i}, {last}", "")]
        steps += [(name, "relu", f"{before}{i}", "") for before, name in zip("efghi", "fghij", strict=True)]
        lines += [f"{n}{i}: f32[batch, s, 64] = {op}({ins}){attrs}" for n, op, ins, attrs in steps]
        last = f"j{i}"
    modules = [
        f"module blocks.{i}.{'mlp' if i % 7 else 'gate'}: {', '.join(f'{n}{i}' for n in 'abcdefghij')}"
        for i in range(blocks)
    ]
    head = ["symbol batch: 1..8 from x.size(0) = (1) * batch + (0)", "symbol s: 1..2048 from x.size(1) = (1) * s + (0)"]
    head += ["input x: f32[batch, s, 64]", "const w: f32[64, 64] @ w"]
    program = parse_program(
        "\n".join(["keepdim program 1", *modules, *head, *lines, f"output y: f32[batch, s, 64] = {last}"])
    )
    page = report._Page(program.contract, [pte.Delegate("forward", "KeepdimGgml", program, {}, "")])
    page.plain([])
    sentences = report.contract_sentences(program.contract)
    about = {
        "name": "large",
        "bytes": 0,
        "sentences": sentences,
        "where": page.where(),
        "tables": [],
        "mapped": None,
        "passes": [],
    }
    return about | page.data()


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("phone", [False, True])
def test_it_fits_a_laptop_and_a_phone(browser: Browser, split: Path, phone: bool, dark: bool) -> None:
    """Nothing is wider than the window; the theme is the user's, and can be turned."""
    browser.size(*((390, 844) if phone else (1280, 800)), dark=dark, phone=phone)
    open_page(browser, page_of(split))
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    theme = browser.run("document.documentElement.dataset.theme")
    assert theme == ("dark" if dark else "light")
    browser.run('document.getElementById("theme").click()')
    assert browser.run("document.documentElement.dataset.theme") != theme
    assert not browser.errors()


# ---------------------------------------------------------------- a run
def test_a_profile_has_every_operation(ranges: tuple[Path, keepdim.Module]) -> None:
    """Each operation that computes is there once a call, in order; a plan is built once for a size."""
    module = keepdim.load(ranges[0])
    x, y = torch.randn(2, 17, 16), torch.randn(3, 300, 16)
    results, found = profile(module, [[x], [x], [y], [x]])
    assert torch.equal(results[1][0], module(x)) and torch.equal(results[2][0], module(y))
    assert [(c.built, c.reused) for c in found.calls] == [(1, 0), (0, 1), (1, 0), (0, 1)]
    assert [c.build_ns > 0 for c in found.calls] == [True, False, True, False]
    assert [c.sizes for c in found.calls[1:3]] == [{"batch": 2, "s": 17}, {"batch": 3, "s": 300}]
    for c in found.calls:
        assert [e.op for e in c.events].count("linear") == 2 and {e.delegate for e in c.events} == {0}
        starts = [e.start for e in c.events]
        assert starts == sorted(starts) and sum(e.ns for e in c.events) <= c.ns
    values = [{e.value for e in c.events} for c in found.calls]
    assert values[0] == values[1] != values[2]  # the other branch
    assert found.calls[2].memory["arena_bytes"] > found.calls[0].memory["arena_bytes"] > 0


def test_kernels_outside_are_in_a_profile(split: Path) -> None:
    """What ExecuTorch runs itself takes time too."""
    _, found = profile(keepdim.load(split), [[torch.randn(3, 4), torch.ones(5)]])
    outside = [e.op for e in found.calls[0].events if e.delegate < 0]
    assert outside[0].startswith("nonzero") and "(ExecuTorch)" in str(found)


def test_nothing_is_traced_that_is_not_asked_for(ranges: tuple[Path, keepdim.Module]) -> None:
    """A call that fails while it is profiled leaves the next one as it was."""
    module = keepdim.load(ranges[0])
    with pytest.raises(KeepdimError, match="out of range"):
        profile(module, [[torch.randn(2, 513, 16)]])
    events: list[Any] = []
    module.run_flat([torch.randn(2, 5, 16)], events)
    count = len(events)
    module(torch.randn(2, 5, 16))
    assert len(events) == count > 5


def test_the_page_of_a_run(browser: Browser, ranges: tuple[Path, keepdim.Module], capsys: Any) -> None:
    """Calls, plans, memory, time by kind, by module and by operation; from there to the graph."""
    page = ranges[0].with_name("run.html")
    inputs = ["--input", "input=randn:2,17,16", "--input", "input=randn:3,300,16"]
    assert cli.main(["run", str(ranges[0]), *inputs, "--profile", "--html", str(page)]) == 0
    out = capsys.readouterr().out
    assert "1 built in" in out and "1 reused" in out and re.search(r"^linear +2 +\d", out, re.M)
    open_page(browser, page)
    text = browser.run('document.getElementById("run").innerText')
    assert text.count("plan built") == 2 and text.count("plan reused") == 4 and "batch = 3, s = 300" in text
    assert "matmul" in text and "Memory over time" in text
    for by, word in (("by module", "0.norm"), ("each", "layer_norm_1")):
        click = f'[...document.querySelectorAll("#run button")].find((b) => b.textContent === "{by}").click()'
        assert word in browser.run(f'({click}, document.querySelector("#run .ops").innerText)')
    one = browser.run(
        '(document.querySelectorAll("#run .call")[3].click(), document.querySelector("#run .ops").innerText)'
    )
    assert "2×" not in one
    shown = browser.run("""(document.querySelector("#run .ops button").click(),
      [document.getElementById("run").hidden, document.getElementById("details").innerText])""")
    assert shown[0] and "of the time that was measured" in shown[1]
    assert browser.run("[...keepdim.view.canvas.heat.values()].reduce((a, b) => a + b)") == pytest.approx(1)


def test_html_without_profile(ranges: tuple[Path, keepdim.Module], capsys: Any) -> None:
    """One sentence."""
    assert cli.main(["run", str(ranges[0]), "--input", "input=randn:2,17,16", "--html", "x.html"]) == 2
    assert "[cli] --html: shows a profile, and nothing is profiled. Add --profile." in capsys.readouterr().err


def test_inputs_that_do_not_pair(split: Path, capsys: Any) -> None:
    """An input of every call is given once, or once a call."""
    three = [a for i in (2, 3, 4) for a in ("--input", f"x=randn:{i},4")]
    two = [a for i in (2, 3) for a in ("--input", f"mask=ones:{i}")]
    assert cli.main(["run", str(split), *three, *two]) == 2
    assert "[cli] input 'mask': is given 2 times, another one 3 times." in capsys.readouterr().err


ETDUMP = """
import sys, torch, keepdim
from executorch.extension.pybindings.portable_lib import _load_for_executorch
m = _load_for_executorch(sys.argv[1], enable_etdump=True)
for n in (17, 300):
    m.run_method("forward", [torch.randn(2, n, 16)])
m.write_etdump_result_to_file(sys.argv[2])
from executorch.devtools import Inspector
for block in Inspector(etdump_path=sys.argv[2]).event_blocks:
    for e in block.events:
        if e.is_delegated_op:
            print("delegated:", e.name)
"""


def test_executorch_shows_our_operations(ranges: tuple[Path, keepdim.Module], tmp_path: Path) -> None:
    """Its own loader writes an ETDump, and its Inspector reads every operation of the delegate from it."""
    command = [sys.executable, "-c", ETDUMP, str(ranges[0]), str(tmp_path / "run.etdp")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    names = [line.split()[1:3] for line in done.stdout.splitlines() if line.startswith("delegated: ")]
    for wanted in (
        ["keepdim", "build"],
        ["layer_norm", "layer_norm"],
        ["linear", "linear.merged"],
        ["matmul", "matmul.1"],
    ):
        assert wanted in names, done.stdout
