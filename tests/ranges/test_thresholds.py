"""Where the engine's kernels change: measured, kept per machine, used by every later start."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from keepdim import _native
from keepdim.cli.commands import main
from keepdim.ranges import thresholds
from keepdim.shapes.blocks import STORED

NAMES = sorted(_native.thresholds("ggml"))


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: Any) -> Any:
    """A cache folder of the test's own, and the engine as it was before."""
    before = _native.thresholds("ggml")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    thresholds.use.cache_clear()
    yield tmp_path
    thresholds.use.cache_clear()
    _native.set_thresholds("ggml", before)


def test_every_stored_dtype_has_a_split() -> None:
    types = {n.removeprefix("few_rows.") for n in NAMES if n.startswith("few_rows.")}
    assert types == {*STORED}


def test_bad_splits_are_refused() -> None:
    before = _native.thresholds("ggml")
    with pytest.raises(_native.Error, match="threshold 'x': unknown on ggml"):
        _native.set_thresholds("ggml", {"few_rows.q8_0": 3, "x": 1})
    with pytest.raises(_native.Error, match="threshold 'work_per_thread': -1 is negative"):
        _native.set_thresholds("ggml", {"work_per_thread": -1})
    assert _native.thresholds("ggml") == before


@pytest.mark.parametrize("name", NAMES)
def test_both_ways_give_the_same(name: str) -> None:
    """The two programs that a split is measured by, at one row and many: one function, computed in two ways."""
    t = thresholds.trial(name)
    w = torch.randn(t.n, t.k, generator=torch.Generator().manual_seed(0))
    layer = t.text is thresholds.LAYER
    weights = {"w": thresholds._bytes(w, t.dtype)} if layer else {}
    ways = [thresholds._Forced(t, name, at, weights, [] if layer else [w]) for at in (t.below, t.above)]
    for m in (1, 7, t.hi, 7):
        x = torch.randn(m, t.k, generator=torch.Generator().manual_seed(m))
        many, few = (torch.as_tensor(way(x)[0]) for way in ways)
        # few rows are rounded to 8 bits where the weight is quantised: sums of k products of about 1
        loose = {"atol": 0.05 * t.k**0.5, "rtol": 0} if "q" in t.dtype else {"atol": 1e-3, "rtol": 1e-4}
        torch.testing.assert_close(few, many, **loose)
    assert _native.thresholds("ggml")[name] not in (t.below, t.above)


def test_what_was_tuned_is_used_by_later_processes(own_cache: Path) -> None:
    """Also by one that was not there when it was measured; a broken file is a warning, not an end."""
    changed = {"few_rows.q8_0": 7, "work_per_thread": 12345}
    thresholds.stored_file().parent.mkdir(parents=True)
    thresholds.stored_file().write_text('{"few_rows.q8_0": 7, "work_per_thread": 12345}')
    code = (
        "import json; from keepdim import _native; from keepdim.ranges import thresholds; thresholds.use(); "
        "print(json.dumps(_native.thresholds('ggml')))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert {k: v for k, v in json.loads(found).items() if k in changed} == changed
    thresholds.use()
    assert _native.thresholds("ggml") | changed == _native.thresholds("ggml")


@pytest.mark.parametrize("text", ["", "[1]", '{"nonsense": 3}', '{"few_rows.q8_0": -2}', '{"few_rows.q8_0": "x"}'])
def test_a_broken_file_is_a_warning(own_cache: Path, caplog: Any, text: str) -> None:
    before = _native.thresholds("ggml")
    thresholds.stored_file().parent.mkdir(parents=True)
    thresholds.stored_file().write_text(text)
    thresholds.use()
    assert "are not used" in caplog.text and _native.thresholds("ggml") == before


def test_tune_measures_and_keeps(own_cache: Path, monkeypatch: Any, capsys: Any) -> None:
    """Two of the thresholds, with hardly any time: a value for each, or a sentence; what was found is kept and used."""
    some = {k: v for k, v in _native.thresholds("ggml").items() if k in ("few_rows.q8_0", "ggml_rows.rest")}
    now = _native.thresholds
    monkeypatch.setattr(thresholds._native, "thresholds", lambda engine: {k: now(engine)[k] for k in some})
    assert main(["tune", "--seconds", "0.05", "--times"]) == 0
    out = capsys.readouterr().out
    assert "few_rows.q8_0: " in out and "ggml_rows.rest: " in out
    assert thresholds.stored_file().is_file()
    assert main(["tune", "--seconds", "0.05", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["file"] == str(thresholds.stored_file()) and [t["name"] for t in found["thresholds"]] == list(some)
    assert all({"name", "before", "after", "why"} == {*t} for t in found["thresholds"])
