"""The file: cut, flipped, newer, missing or another's is a sentence; a good one maps its weights and runs."""

import json
import random
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.export import Dim

import keepdim
from keepdim import KeepdimError, _native
from keepdim.artifact import pte
from keepdim.cli.commands import main

BATCHES = (1, 3, 16)


def inputs(batch):
    """The same numbers on every machine."""
    return torch.arange(batch * 8, dtype=torch.float32).reshape(batch, 8) / 16 - 1


@pytest.fixture(scope="module")
def good(golden, request):
    """tests/golden/linear.pte: Linear(8, 4) for a batch of 1..16, with its outputs beside it."""
    path = golden / "linear.pte"
    if request.config.getoption("--regen-golden"):
        torch.manual_seed(0)
        model = nn.Linear(8, 4).eval()
        shapes = ({0: Dim("batch", min=1, max=16)},)
        keepdim.lower(model, (torch.randn(3, 8),), dynamic_shapes=shapes).save(path)
        with torch.no_grad():
            outputs = {b: model(inputs(b)).tolist() for b in BATCHES}
        (golden / "linear.json").write_text(json.dumps(outputs, indent=1) + "\n")
    return path


@pytest.fixture(scope="module")
def runs(good, golden):
    """A check that the golden file loads and gives its stored outputs."""
    outputs = json.loads((golden / "linear.json").read_text())

    def check():
        module = keepdim.load(good)
        for b in BATCHES:
            torch.testing.assert_close(module(inputs(b)), torch.tensor(outputs[str(b)]), rtol=0, atol=1e-5)
        return module

    return check


def refused(path, match=r"^\[load\] ", **how):
    with pytest.raises(KeepdimError, match=match) as e:
        pte.check(path, **how)
    with pytest.raises(KeepdimError, match=match):
        keepdim.load(path)
    return str(e.value)


# ---------------------------------------------------------------- the golden file
def test_golden_file_runs(runs, good):
    """A file of this version, kept as it was written; its contract is still enforced."""
    module = runs()
    assert str(module.contract).splitlines() == [
        "batch: 1..16 from input 0 'input' dim 0",
        "input: f32[batch, 8]",
        "-> linear: f32[batch, 4]",
    ]
    assert good.stat().st_size < 32 * 1024
    with pytest.raises(KeepdimError, match=r"^\[bind\] input 0 'input' dim 0: batch = 17 is out of range 1\.\.16\.$"):
        module(inputs(17))
    pte.check(good, weights=True)


def test_golden_program_is_what_lowering_writes(good):
    """The delegate's Program reads back and is accepted by C++ as it is stored in the file."""
    (delegate,) = pte.delegates(good)
    assert (delegate.method, delegate.backend) == ("forward", "KeepdimGgml")
    assert [n.op for n in delegate.program.nodes] == ["linear"]
    assert sorted(delegate.weight_bytes.values()) == [16, 128]
    _native.check("ggml", delegate.program.to_json())


# ---------------------------------------------------------------- damage
def test_truncated_files(good, runs, tmp_path):
    """200 lengths, both ends among them; the next good file runs in the same process."""
    data, path = good.read_bytes(), tmp_path / "cut.pte"
    lengths = [0, 1, 2, 8, 63, 64, *(len(data) - n for n in (1, 2, 7, 8, 9, 16, pte.FOOTER, pte.FOOTER + 1))]
    lengths += random.Random(0).sample(range(len(data)), 200 - len(lengths))
    for i, length in enumerate(lengths):
        path.write_bytes(data[:length])
        assert "truncated" in refused(path)
        if i % 20 == 0:
            runs()


def test_flipped_bits(good, runs, tmp_path):
    """200 bits outside the weights: header, flatbuffer, Program, padding, trailer."""
    data, path, rng = good.read_bytes(), tmp_path / "flipped.pte", random.Random(0)
    trailer = pte.check(good)
    weights = [range(w.offset, w.offset + w.size) for w in trailer.weights]
    outside = [i for i in range(len(data)) if not any(i in span for span in weights)]
    places = [0, 4, 8, trailer.size, len(data) - 1, len(data) - 9, len(data) - 17]
    places += rng.sample(outside, 200 - len(places))
    assert set(places) <= set(outside)
    for i, at in enumerate(places):
        changed = bytearray(data)
        changed[at] ^= 1 << rng.randrange(8)
        path.write_bytes(changed)
        refused(path)
        if i % 20 == 0:
            runs()


def test_flipped_bit_in_a_weight(good, tmp_path, capsys):
    """Loading does not read all weights; `weights=True` and `inspect --verify` do, and name the weight."""
    for weight in pte.check(good).weights:
        changed, path = bytearray(good.read_bytes()), tmp_path / "weight.pte"
        changed[weight.offset + weight.size // 2] ^= 4
        path.write_bytes(changed)
        pte.check(path)
        with pytest.raises(KeepdimError, match=rf"^\[load\] weight '{weight.key}' of .* is corrupt"):
            pte.check(path, weights=True)
        assert main(["inspect", str(path)]) == 0
        assert main(["inspect", str(path), "--verify"]) == 1
        assert f"[load] weight '{weight.key}'" in capsys.readouterr().err
    assert main(["inspect", str(good), "--verify"]) == 0
    assert "every checksum holds" in capsys.readouterr().out


# ---------------------------------------------------------------- another version
def resealed(good, path, change):
    """A copy with some bytes changed and a new trailer, so that the checksum says nothing."""
    body = change(good.read_bytes()[: pte.check(good).size])
    path.write_bytes(body)
    pte.seal(path)
    pte.check(path, weights=True)
    return path


def bump(inside):
    """Raise the version of the JSON that has this key beside its contract."""

    def change(data):
        mark, at = b'{"version":1,"contract"', -1
        while (at := data.find(mark, at + 1)) >= 0:
            found, _ = json.JSONDecoder().raw_decode(data[at:].decode("latin-1"))
            if inside in found:
                return data[:at] + mark.replace(b"1", b"7") + data[at + len(mark) :]
        raise AssertionError(f"no JSON with {inside!r} in the file")

    return change


@pytest.mark.parametrize("inside", ["signature", "nodes"], ids=["contract", "program"])
def test_newer_version_is_refused(good, runs, tmp_path, inside):
    """The method's contract, or a delegate's Program, of a later format."""
    path = resealed(good, tmp_path / "newer.pte", bump(inside))
    with pytest.raises(KeepdimError) as e:
        keepdim.load(path)
    assert "format version 7 is newer than this build reads (1). Upgrade keepdim." in str(e.value)
    runs()


def test_invalid_contract_is_refused(good, runs, tmp_path):
    """A rule that only the runtime checks, broken in the method's own contract: our error, not the binding's."""
    path = resealed(good, tmp_path / "invalid.pte", lambda data: data.replace(b'"kind":"size"', b'"kind":"item"'))
    with pytest.raises(KeepdimError, match=r"\[verify\] symbol 'batch'"):
        keepdim.load(path)
    runs()


def test_newer_trailer_is_refused(good, tmp_path, monkeypatch):
    """The trailer has a version of its own."""
    path, trailer = tmp_path / "trailer.pte", pte.Trailer
    path.write_bytes(good.read_bytes()[: pte.check(good).size])
    with monkeypatch.context() as patch:
        patch.setattr(pte, "Trailer", lambda version, *rest: trailer(version + 1, *rest))
        pte.seal(path)
    assert "trailer version 2 is newer than this build reads (1). Upgrade keepdim." in refused(path)


def test_resealed_copy_is_as_good(good, tmp_path):
    """The helper of the tests above changes nothing else."""
    path = resealed(good, tmp_path / "same.pte", lambda data: data)
    assert path.read_bytes() == good.read_bytes()


# ---------------------------------------------------------------- not a file of ours
def test_what_is_no_file_of_ours(good, tmp_path, runs):
    """Missing, a folder, empty, text, and a plain .pte of ExecuTorch: a sentence each."""
    (tmp_path / "empty.pte").touch()
    (tmp_path / "text.pte").write_text("hello\n" * 100)
    (tmp_path / "plain.pte").write_bytes(good.read_bytes()[: pte.check(good).size])
    for name, fact in [
        ("missing.pte", "cannot be opened (No such file or directory)"),
        (".", "cannot be opened (Is a directory)"),
        ("empty.pte", "has no keepdim trailer at its end (0 bytes)"),
        ("text.pte", "has no keepdim trailer at its end (600 bytes)"),
        ("plain.pte", "has no keepdim trailer at its end"),
    ]:
        assert fact in refused(tmp_path / name)
    runs()


# ---------------------------------------------------------------- weights
def anonymous_bytes():
    """Memory of this process that is not a file's."""
    line = next(t for t in Path("/proc/self/status").read_text().splitlines() if t.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def test_weights_are_mapped_and_aligned(tmp_path):
    """A weight of 64 MiB costs no memory but the file's own pages, and lies at a multiple of 64; one of a product is
    packed once, and counted."""
    path, size = tmp_path / "large.pte", 4096
    x = torch.tensor([5, 4095])
    table = nn.Embedding(size, size).eval().requires_grad_(False)
    keepdim.lower(table, (x,), dynamic_shapes=({0: Dim("batch", min=1, max=4)},)).save(path)
    (weight,) = pte.check(path, weights=True).weights
    assert weight.size == size * size * 4 and weight.offset % 64 == 0
    before = anonymous_bytes()
    module = keepdim.load(path)
    result = module(x)
    assert anonymous_bytes() - before < weight.size // 4
    (counters,) = module.counters()
    assert (counters["weight_bytes"], counters["packed_bytes"]) == (weight.size, 0)
    assert torch.equal(result, table(x))
    linear = keepdim.lower(nn.Linear(64, 64, bias=False), (torch.randn(2, 64),))
    assert [(c["weight_bytes"], c["packed_bytes"]) for c in linear.counters()] == [(64 * 64 * 4, 64 * 64 * 4)]
