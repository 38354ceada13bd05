"""Files are written whole or not at all, and what is loaded outlives its path."""

from __future__ import annotations

import importlib.util
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

import keepdim
from keepdim import KeepdimError, cache, files
from keepdim.artifact import pte
from keepdim.cli.commands import main
from keepdim.files import LEFT_OVER, atomic_path, atomic_write, path_of, write_bytes

N = {0: Dim("n", min=1, max=8)}
X = torch.arange(24.0).reshape(3, 8) / 16


def lowered(seed: int, width: int = 4) -> tuple[nn.Module, keepdim.Module]:
    """A model, and the same lowered."""
    torch.manual_seed(seed)
    model = nn.Linear(8, width).eval().requires_grad_(False)
    return model, keepdim.lower(model, (torch.randn(3, 8),), dynamic_shapes=(N,))


@pytest.fixture(scope="module")
def two() -> list[tuple[nn.Module, keepdim.Module]]:
    """Two models of the same contract and size."""
    return [lowered(0), lowered(1)]


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


# ---------------------------------------------------------------- writing
def test_a_file_is_replaced_when_it_is_whole(tmp_path: Path) -> None:
    """Until then the old one is there; after an error too, and nothing else."""
    path = tmp_path / "file"
    write_bytes(path, b"old")
    with atomic_write(path) as f:
        f.write(b"new, and longer")
        f.flush()
        assert path.read_bytes() == b"old"
        assert len(names(tmp_path)) == 2 and names(tmp_path)[1].endswith(".part")
    assert path.read_bytes() == b"new, and longer"
    for error in (ValueError, KeyboardInterrupt, KeepdimError):
        with pytest.raises(error), atomic_write(path) as f:
            f.write(b"half")
            raise error
    with pytest.raises(
        KeepdimError, match=r"^\[save\] .*file: cannot be written \(No space left on device\)\. Choose "
    ):
        with atomic_path(path):
            raise OSError(28, "No space left on device")
    assert path.read_bytes() == b"new, and longer" and names(tmp_path) == ["file"]


def test_permissions_and_links(tmp_path: Path) -> None:
    """A new file has those of the umask, an old one keeps its own; a link stays a link."""
    path, link = tmp_path / "file", tmp_path / "folder" / "link"
    before = os.umask(0o027)
    try:
        write_bytes(path, b"1")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    path.chmod(0o604)
    link.parent.mkdir()
    link.symlink_to("../file")
    write_bytes(link, b"2")
    assert link.is_symlink() and path.read_bytes() == b"2" and stat.S_IMODE(path.stat().st_mode) == 0o604
    assert names(link.parent) == ["link"] and names(tmp_path) == ["file", "folder"]
    dangling = tmp_path / "dangling"
    dangling.symlink_to("folder/target")
    write_bytes(dangling, b"3")
    assert dangling.is_symlink() and (tmp_path / "folder" / "target").read_bytes() == b"3"


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    """A pipe gets the bytes, a folder is a sentence."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_bytes(pipe, b"bytes")
    assert os.read(reader, 9) == b"bytes" and stat.S_ISFIFO(pipe.stat().st_mode)
    os.close(reader)
    for path, why in ((tmp_path, "Is a directory"), (tmp_path / "no" / "file", "No such file or directory")):
        with pytest.raises(KeepdimError, match=rf"^\[save\] .*: cannot be written \({why}\)\. Choose "):
            write_bytes(path, b"")
    assert names(tmp_path) == ["pipe"]


BAD_PATHS = ["a\0b", "\0", "\ud800", "a\udfff/b", 7, None, b"bytes", ["a"]]


@pytest.mark.parametrize("path", BAD_PATHS, ids=ascii)
def test_paths_that_no_file_has(path: Any, two: Any, tmp_path: Path) -> None:
    """NUL, half of a surrogate pair, another type: a sentence of whoever takes a path."""
    module, good = two[0][1], tmp_path / "m.pte"
    module.save(good)
    for use in (
        lambda: path_of("load", path),
        lambda: keepdim.load(path),
        lambda: keepdim.load(good, weights=7 if path is None else path),
        lambda: keepdim.LanguageModel.load(path),
        lambda: module.save(path),
    ):
        with pytest.raises(KeepdimError, match=r"^\[(load|save)\] "):
            use()
    assert names(tmp_path) == ["m.pte"]


@pytest.mark.parametrize("path", BAD_PATHS[:4], ids=ascii)
def test_bad_paths_on_the_command_line(path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every command, for what it reads and what it writes."""
    (tmp_path / "m.pte").write_bytes((Path(__file__).parents[1] / "golden" / "linear.pte").read_bytes())
    good, missing = str(tmp_path / "m.pte"), str(tmp_path / "none")
    for command in (
        ["run", path], ["run", good, "--input", f"input={path}.npy"], ["inspect", path], ["audit", f"{path}.pte"],
        ["run", good, "--input", "input=ones:2,8", "-o", path], ["inspect", good, "--html", path],
        ["audit", good, "--no-tries", "--html", path], ["refine", path], ["embed", "--file", path],
        ["generate", path, "--prompt", "a"], ["generate", f"{path}.pte", "--prompt", "a"],
        ["generate", f"{path}.gguf", "--prompt", "a"], ["embed", "--model", path, "a"],
        ["lower", f"{path}.py:make", "-o", missing], ["lower", "none.py:make", "-o", path],
        ["generate", good, "--weights", path, "--prompt", "a"],
    ):  # fmt: skip
        assert main(command) == 2, command
        err = capsys.readouterr().err
        assert err.startswith("["), (command, err)
        assert "Traceback" not in err


# ---------------------------------------------------------------- modules
def run(script: str, folder: Path, **more: Any) -> subprocess.CompletedProcess[str]:
    head = "import keepdim, torch, os, resource, sys\nX = torch.arange(24.0).reshape(3, 8) / 16\n"
    return subprocess.run([sys.executable, "-c", head + script], cwd=folder, capture_output=True, text=True, **more)


def test_saving_over_a_loaded_file(two: Any, tmp_path: Path) -> None:
    """The loaded one goes on as it was, in this process and when it is saved again; the path has the new one."""
    (first, one), (second, other) = two
    one.save(tmp_path / "m.pte")
    other.save(tmp_path / "other.pte")
    torch.save((first(X), second(X)), tmp_path / "want.pt")
    script = """
a, b = torch.load("want.pt")
one, other = keepdim.load("m.pte"), keepdim.load("other.pte")
torch.testing.assert_close(one(X), a)
other.save("m.pte")
for n in (3, 1, 8, 2):
    torch.testing.assert_close(one(X)[:n], a[:n])
    one(torch.randn(n, 8))
torch.testing.assert_close(keepdim.load("m.pte")(X), b)
one.save("again.pte")
os.unlink("m.pte")
one.save("again.pte")
one.save("m.pte")
for name in ("again.pte", "m.pte"):
    torch.testing.assert_close(keepdim.load(name, verify=True)(X), a)
one.save("m.pte")
torch.testing.assert_close(one(X), a)
"""
    done = run(script, tmp_path)
    assert done.returncode == 0, done.stderr
    assert names(tmp_path) == ["again.pte", "m.pte", "other.pte", "want.pt"]


def test_a_full_disk_leaves_the_old_file(two: Any, tmp_path: Path) -> None:
    """Of a module, of StableHLO with its weights, of the command line: a sentence each, and no temporary file."""
    for name in ("m.pte", "other.pte"):
        two[0][1].save(tmp_path / name)
    saves = ['module.save("m.pte")']
    if importlib.util.find_spec("jaxlib") is not None:
        keepdim.to_stablehlo(two[0][0], (X,), dynamic_shapes=(N,)).save(tmp_path / "m.stablehlo")
        saves.append('program.save("m.stablehlo")')
    before = {name: (tmp_path / name).read_bytes() for name in names(tmp_path)}
    script = f"""
from keepdim.cli.commands import main
module = keepdim.load("other.pte")
program = keepdim.load_stablehlo("m.stablehlo") if os.path.exists("m.stablehlo") else None
resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))
for use in {saves!r}:
    try:
        exec(use)
        sys.exit("was written")
    except keepdim.KeepdimError as e:
        print(e)
assert main(["run", "other.pte", "--input", "input=ones:2,8", "-o", "m.pte"]) == 1
assert main(["inspect", "other.pte", "--html", "m.pte"]) == 1
torch.testing.assert_close(module(X), module(X))
"""
    done = run(script, tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stdout.startswith("[save] m.pte: cannot be written (File too large). Choose a folder that")
    assert {name: (tmp_path / name).read_bytes() for name in names(tmp_path)} == before


def test_a_kill_leaves_the_old_file(tmp_path: Path) -> None:
    """And a temporary one, which the cache removes after a day."""
    write_bytes(tmp_path / "m.pte", b"old")
    script = """
from keepdim.files import atomic_write
with atomic_write("m.pte") as f:
    f.write(b"x" * 2**20)
    f.flush()
    os.kill(os.getpid(), 9)
"""
    assert run(script, tmp_path).returncode == -signal.SIGKILL
    assert (tmp_path / "m.pte").read_bytes() == b"old"
    (left,) = tmp_path.glob("*.part")
    assert left.stat().st_size == 2**20


# ---------------------------------------------------------------- the cache
def test_leftovers_of_the_cache_are_removed(two: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a day, when the cache is used; one that is being written stays."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "keepdim"
    (folder / "xla").mkdir(parents=True)
    old, older, new = folder / "a.part", folder / "xla" / "b.part", folder / "c.part"
    for path in (old, older, new):
        path.write_bytes(b"half")
    for path in (old, older):
        os.utime(path, (time.time() - LEFT_OVER - 9,) * 2)
    cache.cached(folder / "m.pte", lambda path, verify: keepdim.load(path), lambda: two[0][1])
    assert names(folder) == ["c.part", "m.pte", "xla"] and not names(folder / "xla")


def damage(path: Path) -> None:
    """One bit of a weight, in place."""
    weight = pte.check(path).weights[0]
    data = bytearray(path.read_bytes())
    data[weight.offset + 1] ^= 4
    path.write_bytes(data)


def test_leftovers_beside_a_file_are_removed(tmp_path: Path) -> None:
    """Of a process that was killed while it wrote the same file; not those of today, nor other files."""
    old, new, other = (tmp_path / f"m.pte.{name}.part" for name in ("0123456789ab", "ba9876543210", "mine"))
    for path in (old, new, other):
        path.write_bytes(b"x")
    for path in (old, other):
        os.utime(path, (0, 0))
    files.write_bytes(tmp_path / "m.pte", b"y")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["m.pte", new.name, other.name])


def test_folders_of_killed_processes_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those of living ones, nor of today, nor what has another name."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead = subprocess.Popen(["true"])
    dead.wait()
    names = {f"keepdim-{dead.pid}-old": True, f"keepdim-{dead.pid}-new": False, f"keepdim-{os.getpid()}-old": True,
             "keepdim-word-old": True}  # fmt: skip
    for name, old in names.items():
        (tmp_path / name).mkdir()
        if old:
            os.utime(tmp_path / name, (0, 0))
    made = files.new_folder()
    assert made.name.startswith(f"keepdim-{os.getpid()}-")
    assert {p.name for p in tmp_path.iterdir()} == {*names, made.name} - {f"keepdim-{dead.pid}-old"}


def test_a_folder_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is written all the same."""
    opened = os.open

    def refuse(path: Any, flags: int, *more: Any) -> int:
        if Path(path) == tmp_path:
            raise PermissionError(13, "Permission denied")
        return opened(path, flags, *more)

    monkeypatch.setattr(os, "open", refuse)
    files.write_bytes(tmp_path / "m.bin", b"x")
    assert (tmp_path / "m.bin").read_bytes() == b"x"


def test_weights_are_checked_when_asked(two: Any, tmp_path: Path) -> None:
    """`verify=True` reads them all; a module without it does not, and a language model hands it on."""
    path = tmp_path / "m.pte"
    two[0][1].save(path)
    keepdim.load(path, verify=True)
    damage(path)
    keepdim.load(path)
    for load in (keepdim.load, keepdim.LanguageModel.load):
        with pytest.raises(KeepdimError, match=r"^\[load\] weight '.*' of .*m\.pte: is corrupt"):
            load(path, verify=True)


def test_a_cached_file_is_verified_once(two: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """After it was written, and again after a change: a flipped weight is lowered again, not used."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cache, "SETTLED", 0)
    path, seen = tmp_path / "keepdim" / "m.pte", []

    def load(path: Path, verify: bool) -> keepdim.Module:
        seen.append(verify)
        return keepdim.load(path, verify=verify)

    def lower() -> keepdim.Module:
        seen.append("lowered")
        return two[0][1]

    def use() -> list[Any]:
        seen.clear()
        torch.testing.assert_close(cache.cached(path, load, lower)(X), two[0][0](X))
        return list(seen)

    assert [use() for _ in range(3)] == [["lowered"], [True], [False]]
    damage(path)
    assert use() == [True, "lowered"] and "is corrupt" in caplog.text
    assert [use() for _ in range(2)] == [[True], [False]]
    os.utime(path)
    assert [use() for _ in range(2)] == [[True], [False]]


def test_nothing_is_written_in_place() -> None:
    """Every file of the package that a user may have is written by `files.py`."""
    allowed = {"files.py", "pte.py", "pipeline.py", "tries.py", "child.py"}  # temporary files of their own
    writes = ("write_text(", "write_bytes(", '"wb"', '"ab"', '("w"', "copyfile", "mkstemp", "os.replace")
    package = Path(keepdim.__file__).parent
    found = [
        f"{path.name}:{i}: {line.strip()}"
        for path in sorted(package.rglob("*.py"))
        for i, line in enumerate(path.read_text().splitlines(), 1)
        if path.name not in allowed and any(w in line for w in writes) and not line.strip().startswith("write_bytes(")
    ]
    assert not found
