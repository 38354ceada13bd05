"""Paths, atomic file writes and temporary folders.

Data is written to a temporary file in the same folder (its name ends in `.part`), flushed to disk, and then renamed to
the target. A full disk, an error or a kill leaves the old file unchanged; a process that has the old file open or
mapped keeps its content.
"""

from __future__ import annotations

import contextlib
import glob
import os
import secrets
import shutil
import stat
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from .errors import fail

LONGEST, LONGEST_NAME = 4096, 255  # bytes of a path and of a name in it, on Linux and macOS
CHUNK = 1 << 20  # bytes per copy
FOLDER = "keepdim-"  # prefix, followed by the process id
LEFT_OVER = 24 * 3600  # seconds after which a temporary file is considered abandoned


def path_of(stage: str, given: object) -> Path:
    """A path from the user; raises if no file can have that name.

    >>> path_of("load", "model.pte").name
    'model.pte'
    """
    if not isinstance(given, (str, Path)):
        fail(stage, f"{given!r:.80}", "is not a path", "Give a str or a pathlib.Path")
    try:
        raw = os.fsencode(given)
    except UnicodeEncodeError as e:
        fail(stage, f"{str(given)!r:.80}", f"is not a path ({e.reason} at {e.start})", "Correct the path", e)
    if b"\0" in raw:
        fail(stage, f"{str(given)!r:.80}", "has a NUL character in it, which no path has", "Correct the path")
    if len(raw) >= LONGEST or any(len(name) > LONGEST_NAME for name in raw.split(b"/")):
        fail(stage, f"{str(given)!r:.80}", f"is longer than a path may be ({len(raw)} bytes)", "Correct the path")
    return Path(given)


def search_path() -> list[str]:
    """sys.path for child processes: without relative entries such as the current folder."""
    return [p for p in sys.path if os.path.isabs(p)]


@contextlib.contextmanager
def atomic_path(path: str | Path, stage: str = "save") -> Iterator[Path]:
    """A temporary file that replaces `path` when the block succeeds.

    Symlinks are followed; an existing file keeps its permissions. Raises a KeepdimError if it cannot be written.
    """
    given = path_of(stage, path)
    part: Path | None = None
    try:
        target = Path(os.path.realpath(given))
        before = target.stat() if target.exists() else None
        if before is not None and not stat.S_ISREG(before.st_mode):
            yield target  # a device or a pipe is written directly; opening a folder fails
            return
        remove_leftovers(target.parent, f"{glob.escape(target.name[:40])}.{'[0-9a-f]' * 12}.part")
        part = target.with_name(f"{target.name[:40]}.{secrets.token_hex(6)}.part")
        handle = os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        try:
            if before is not None:
                os.fchmod(handle, stat.S_IMODE(before.st_mode))
            yield part
            os.fsync(handle)
        finally:
            os.close(handle)
        os.replace(part, target)
        part = None
        _sync_folder(target.parent)
    except OSError as e:
        fail(stage, str(path), f"cannot be written ({e.strerror or e})",
             "Choose a folder that exists, may be written to and has room", e)  # fmt: skip
    finally:
        if part is not None:
            part.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_write(path: str | Path, stage: str = "save") -> Iterator[IO[bytes]]:
    """As `atomic_path`, but yields an open file."""
    with atomic_path(path, stage) as part, part.open("wb") as file:
        yield file


def write_bytes(path: str | Path, data: bytes, stage: str = "save") -> None:
    """Write a whole file atomically."""
    with atomic_write(path, stage) as file:
        file.write(data)


def copy_open(handle: int, file: IO[bytes]) -> None:
    """Copy the content of an open file, even if its path was replaced or deleted."""
    at = 0
    while chunk := os.pread(handle, CHUNK, at):
        file.write(chunk)
        at += len(chunk)


def remove_leftovers(folder: Path, pattern: str = "**/*.part") -> None:
    """Delete temporary files of processes that were killed."""
    oldest = time.time() - LEFT_OVER
    for part in folder.glob(pattern):
        with contextlib.suppress(OSError):  # another process may have removed it
            if part.stat().st_mtime < oldest:
                part.unlink()


# ---------------------------------------------------------------- folders of a process
def new_folder() -> Path:
    """A temporary folder of this process; removes folders left by killed processes."""
    shared = Path(tempfile.gettempdir())
    oldest = time.time() - LEFT_OVER
    for old in shared.glob(f"{FOLDER}*-*"):
        owner = old.name.removeprefix(FOLDER).partition("-")[0]
        with contextlib.suppress(OSError):
            about = old.lstat()
            mine = owner.isdigit() and about.st_uid == os.getuid() and about.st_mtime < oldest
            if mine and not _is_running(int(owner)):
                shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{FOLDER}{os.getpid()}-"))


def remove_with(owner: object, folder: Path) -> None:
    """Remove the folder when the object is garbage-collected; not in a forked process."""
    weakref.finalize(owner, _remove_of, os.getpid(), folder)


def _remove_of(pid: int, folder: Path) -> None:
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _sync_folder(folder: Path) -> None:
    """Sync the folder, so that the rename survives a power failure."""
    with contextlib.suppress(OSError):  # not readable or not supported: the file itself is written
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


__all__ = [
    "atomic_path",
    "atomic_write",
    "copy_open",
    "new_folder",
    "path_of",
    "remove_leftovers",
    "remove_with",
    "search_path",
    "write_bytes",
]
