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
import tempfile
import time
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Protocol, TypeVar

from . import _native
from .errors import KeepdimError, fail

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
    about = path.stat()
    state = (about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns)
    note = folder() / f"content-{hashlib.sha256(f'{path.resolve()} {state}'.encode()).hexdigest()[:32]}"
    if note.is_file() and re.fullmatch("[0-9a-f]{64}", known := note.read_text(errors="replace")):
        return known
    found = _hash(path)
    if time.time_ns() - max(about.st_mtime_ns, about.st_ctime_ns) > SETTLED:
        try:
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(found)
        except OSError as e:
            log.debug("the hash of %s is not remembered: %s", path, e)
    return found


def _hash(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def folder() -> Path:
    """Where everything that may be made again is kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "keepdim"


def cached(path: Path, load: Callable[[Path], T], lower: Callable[[], T]) -> T:
    """What `load` reads from the path; where nothing good is there, what `lower` makes, kept there."""
    if path.exists():
        try:
            return load(path)
        except KeepdimError as e:
            log.warning("the cached file is not used: %s", e)
    log.info("lowering the model, once; the file is kept in %s", path.parent)
    made = lower()
    try:
        _keep(made, path)
    except (KeepdimError, OSError) as e:
        log.warning("the lowered file is not kept: %s", e)
    return made


def _keep(made: Saved, path: Path) -> None:
    """Under its name only when it is whole, whoever else writes the same file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(prefix=path.stem, suffix=".part", dir=path.parent)
    os.close(handle)
    try:
        made.save(Path(part))
        os.replace(part, path)
    except BaseException:
        os.unlink(part)
        raise
