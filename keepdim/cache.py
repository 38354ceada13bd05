"""Lowered files of models, kept in `$XDG_CACHE_HOME/keepdim` (`~/.cache/keepdim`): a second start takes seconds.

A file's name is a hash of what it was made from: the model's files, the settings, keepdim's own code, the versions of
torch, executorch and transformers. It is written whole or not at all, checked when it is loaded, and may be deleted at
any time.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Protocol, TypeVar

from . import _native
from .errors import KeepdimError, fail
from .files import remove_leftovers, write_bytes

log = logging.getLogger("keepdim")
SETTLED = 2_000_000_000  # ns after which a second write would show in a file's times


class Saved(Protocol):
    """What can be kept."""

    def save(self, path: Path) -> None: ...


T = TypeVar("T", bound=Saved)


def cached_file(kind: str, files: Iterable[Path], settings: str) -> Path:
    """Where the lowered file of these files is kept."""
    digest = hashlib.sha256(settings.encode())
    for name in ("torch", "executorch", "transformers"):
        try:
            digest.update(f"{name} {version(name)}".encode())
        except PackageNotFoundError as e:
            fail(kind, name, "is not installed", "Install the extra: pip install 'keepdim[hf]'", e)
    code = [*Path(__file__).parent.rglob("*.py"), *Path(_native.__file__).parent.glob("*.so")]
    for path in sorted(set(code)):
        digest.update(f"{path.name} {_hash(path)}".encode())
    for path in sorted(set(files)):
        digest.update(f"{path.name} {content_hash(path)}".encode())
    return folder() / f"{kind}-{digest.hexdigest()[:32]}.pte"


def content_hash(path: Path) -> str:
    """The sha256 of a file; remembered until it is written to, since a model's may have gigabytes."""
    note = _Note("content", path)
    if (known := note.read()) is not None and re.fullmatch("[0-9a-f]{64}", known):
        return known
    found = _hash(path)
    note.write(found)
    return found


class _Note:
    """What is remembered about a file, until the file changes."""

    def __init__(self, kind: str, path: Path):
        about = path.stat()
        state = (about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns)
        self._path = folder() / f"{kind}-{hashlib.sha256(f'{path.resolve()} {state}'.encode()).hexdigest()[:32]}"
        self._changed = max(about.st_mtime_ns, about.st_ctime_ns)

    def read(self) -> str | None:
        return self._path.read_text(errors="replace") if self._path.is_file() else None

    def write(self, text: str) -> None:
        if time.time_ns() - self._changed <= SETTLED:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(self._path, text.encode(), "cache")
        except (OSError, KeepdimError) as e:
            log.debug("not remembered: %s", e)


def _hash(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def folder() -> Path:
    """Where everything that may be made again is kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "keepdim"


def cached(path: Path, load: Callable[[Path, bool], T], lower: Callable[[], T]) -> T:
    """What `load` reads from the path; where nothing good is there, what `lower` makes, kept there.

    `load` is told whether to check the weights too: once after the file was written, and again after it changed.
    """
    remove_leftovers(path.parent)
    if path.exists():
        try:
            note = _Note("verified", path)
            known = note.read() is not None
            made = load(path, not known)
            if not known:
                note.write("")
            return made
        except (KeepdimError, OSError) as e:
            log.warning("the cached file is not used: %s", e)
    log.info("lowering the model, once; the file is kept in %s", path.parent)
    made = lower()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        made.save(path)
    except (KeepdimError, OSError) as e:
        log.warning("the lowered file is not kept: %s", e)
    return made
