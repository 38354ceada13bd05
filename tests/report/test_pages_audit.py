"""The page of an audit, from the JSON that docs/guide/audit.md describes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from keepdim.cli import commands as cli
from keepdim.report import page as report
from support.browser import Browser


def state(text: str, verdict: str = "kept") -> dict[str, str]:
    return {"text": text, "verdict": verdict}


def item(kind: str, subject: str, where: str, states: list[Any], **more: Any) -> dict[str, Any]:
    """Kept, unless `more` says otherwise."""
    kept = {"verdict": "kept", "lost": False, "lost_at": None, "changes": [], "meaning": ""}
    return {"kind": kind, "subject": subject, "where": where, "states": states} | kept | more


def sample(clean: bool) -> dict[str, Any]:
    """Three stages that keep everything, or lose a size and a guard."""
    hook = {"function": "Some.partition", "file": "some/partitioner.py", "line": 7, "code": "int(x.shape[0])"}
    by = hook | {"stage": "Some.partition", "user_line": "model.py:12: y = x.chunk(3) # </script>"}
    stages = [
        {"name": "export", "kind": "export", "hook": None},
        {"name": "Some.partition", "kind": "hook", "hook": hook},
        {"name": ".pte", "kind": "pte", "hook": None},
    ]
    trials = [
        {
            "sizes": {"n": 1, "s": 1},
            "point": "lower ends",
            "inside": True,
            "verdict": "right",
            "ok": True,
            "detail": "",
        },
        {
            "sizes": {"n": 9, "s": 1},
            "point": "above n",
            "inside": False,
            "verdict": "refused",
            "ok": True,
            "detail": "",
        },
    ]
    body = {"version": 1, "model": "folder/model.py:make", "partitioner": "Some", "stages": stages, "notes": []}
    size = item("symbol", "s", "input 0 'x' dim 1", [state("1..256"), state("s7: 1..256", "renamed"), state("1..256")])
    if clean:
        return body | {"clean": True, "items": [size], "trials": trials}
    frozen = item(
        "symbol", "n", "input 0 'x' dim 0", [state("1..8"), state("3", "frozen"), state("3", "frozen")],
        verdict="frozen", lost=True, lost_at=by, meaning="every other n fails",
        changes=[{"stage": "Some.partition", "verdict": "frozen", "before": "1..8", "after": "3", "by": by}],
    )  # fmt: skip
    dropped = item(
        "guard", "n + s <= 300", "", [state("n + s <= 300"), None, state("-", "dropped")],
        verdict="dropped", lost=True, meaning="sizes that break it are not refused",
        changes=[{"stage": ".pte", "verdict": "dropped", "before": "n + s <= 300", "after": "-", "by": None}],
    )  # fmt: skip
    wrong = {
        "sizes": {"n": 8},
        "point": "upper end of n",
        "inside": True,
        "verdict": "crashed",
        "ok": False,
        "detail": "9",
    }
    notes = ["delegate 1 is not known by name"]
    return body | {"clean": False, "items": [frozen, size, dropped], "trials": [*trials, wrong], "notes": notes}


def opened(browser: Browser, folder: Path, clean: bool) -> str:
    """The text of the page, which has loaded without errors or requests."""
    page = folder / "audit.html"
    page.write_text(report.audit_page(sample(clean)))
    assert browser.open(page) < 2
    assert browser.errors() == [] and browser.requests() == []
    return browser.run("document.body.innerText")


def test_a_clean_audit(browser: Browser, tmp_path: Path) -> None:
    """Green from end to end."""
    text = opened(browser, tmp_path, clean=True)
    assert "Nothing is lost" in text and "What broke" not in text and "model.py:make" in text
    assert browser.run('document.querySelectorAll(".map .broken").length') == 0
    assert browser.run('document.querySelectorAll(".map .dot.renamed").length') == 1


@pytest.mark.parametrize("phone", [False, True])
def test_what_broke_is_red(browser: Browser, tmp_path: Path, phone: bool) -> None:
    """Where, by what, in which line of the model; on the way of each size, and in words."""
    browser.size(*((390, 844) if phone else (1400, 860)), phone=phone)
    text = opened(browser, tmp_path, clean=False)
    assert (
        "2 of 3 things that the model says about its sizes are lost on the way, and 1 of 3 trial calls went wrong."
        in text
    )
    for words in (
        "every other n fails",
        "Some.partition",
        "some/partitioner.py:7",
        "int(x.shape[0])",
        "model.py:12:",
        "crashed",
    ):
        assert words in text
    assert "delegate 1 is not known by name" in text
    broken = browser.run("""[...document.querySelectorAll(".map .item")].map((g) =>
      [...g.querySelectorAll(".dot")].map((d) => d.classList[1]))""")
    assert broken == [["fine", "broken", "broken"], ["fine", "renamed", "fine"], ["fine", "unseen", "broken"]]
    assert browser.run('document.querySelectorAll(".map .cross").length') == 2
    assert browser.run("document.title") == "model.py:make · keepdim"


@pytest.mark.parametrize("width", [390, 1400])
def test_nothing_scrolls_sideways(browser: Browser, tmp_path: Path, width: int) -> None:
    """Neither the page nor its map: many stages and items, long names, paths and sentences."""
    audit = sample(False)
    path = "/home/somebody/projects/" + "transformer/" * 9 + "attention.py"
    audit["model"], audit["stages"] = (
        f"{path}:make",
        [audit["stages"][0], *[audit["stages"][1]] * 8, audit["stages"][2]],
    )
    for i in audit["items"]:
        i["states"] = [*i["states"][:1], *i["states"][1:2] * 8, *i["states"][2:]]
        i["where"] = f"input 0 {'hidden_states_' * 5} dim 1"
    audit["items"] *= 5
    audit["items"][0]["subject"] = "attention_mask_length*" * 6
    audit["trials"][0] |= {"detail": f"{path}:12", "sizes": {"attention_mask_length" * 2: 1}}
    (tmp_path / "a.html").write_text(report.audit_page(audit))
    browser.size(width, 844, phone=width == 390)
    browser.open(tmp_path / "a.html")
    assert browser.run("[document.documentElement.scrollWidth, innerWidth]") == [width, width]
    assert browser.run('((m) => m.scrollWidth - m.clientWidth)(document.querySelector(".map"))') == 0
    boxes = '[...document.querySelectorAll(".map text")].map((t) => t.getBoundingClientRect())'
    assert browser.run(f"{boxes}.filter((b) => b.left < 0 || b.right > innerWidth).length") == 0


def test_one_that_fails_is_told(browser: Browser, tmp_path: Path) -> None:
    """Why there is no file; a trial of which nothing is known is not called outside."""
    (tmp_path / "a.html").write_text(
        report.audit_page(sample(True) | {"clean": False, "trials": [], "failure": "[audit] ExecuTorch: no <thanks>."})
    )
    browser.open(tmp_path / "a.html")
    text = browser.run("document.body.innerText")
    assert "It cannot be lowered" in text and "[audit] ExecuTorch: no <thanks>." in text and "lost" not in text
    unknown = sample(True)["trials"][0] | {"inside": None, "verdict": "ran"}
    for trials, words in (([unknown], "nothing says whether it is meant to run"), ([], "no call was tried")):
        (tmp_path / "a.html").write_text(report.audit_page(sample(True) | {"trials": trials}))
        browser.open(tmp_path / "a.html")
        text = browser.run("document.body.innerText")
        assert words in text and "outside the contract" not in text and browser.errors() == []


FACTORY = """
import torch
from torch.export import Dim

class Net(torch.nn.Module):
    def forward(self, x):
        a, b = x.chunk(2)
        return torch.relu(x), a

def make():
    return Net(), (torch.randn(6, 4),), ({0: 2 * Dim("half", min=1, max=8)},)
"""


def test_an_audit_writes_its_page(browser: Browser, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a real audit finds is on the page."""
    (tmp_path / "net.py").write_text(FACTORY)
    page = tmp_path / "audit.html"
    command = ["audit", f"{tmp_path / 'net.py'}:make", "--partitioner", "xnnpack", "--no-tries", "--html", str(page)]
    assert cli.main(command) == 1
    assert "frozen" in capsys.readouterr().out
    browser.open(page)
    assert browser.errors() == [] and "Something is lost" in browser.run("document.body.innerText")
    assert browser.run('document.querySelectorAll(".map .cross").length') > 0
