"""The cache of lowered models in `$XDG_CACHE_HOME/keepdim` (`~/.cache/keepdim`): a second start takes seconds.

A file's name is the model's name and a hash of its sources: the model's files, the settings, keepdim's code, and the
versions of torch, executorch and transformers. Files are written atomically, checked at load, and may be deleted at any
time.
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

from .errors import KeepdimError, fail
from .files import remove_leftovers, write_bytes
from .native import _native

log = logging.getLogger("keepdim")
SETTLED = 2_000_000_000  # ns after which another write would change a file's timestamps


class Saved(Protocol):
    """An object that can be cached."""

    def save(self, path: Path) -> None: ...


T = TypeVar("T", bound=Saved)


def cached_file(kind: str, model: str, files: Iterable[Path], settings: str) -> Path:
    """The cache path of a model that is lowered from these files."""
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
    name = re.sub(r"[^\w.-]+", "_", model)[:80]
    return folder() / f"{name}-{digest.hexdigest()[:32]}.pte"


def model_name(path: Path) -> str:
    """The name of the model in a file: the stem, without the hash of `cached_file`.

    >>> model_name(Path("minilm-0123456789abcdef0123456789abcdef.pte")), model_name(Path("my-net.pte"))
    ('minilm', 'my-net')
    """
    return re.sub(r"(?<=.)-[0-9a-f]{32}$", "", path.stem)


def content_hash(path: Path) -> str:
    """The sha256 of a file, cached until the file changes, since models may have gigabytes."""
    note = _Note("content", path)
    if (known := note.read()) is not None and re.fullmatch("[0-9a-f]{64}", known):
        return known
    found = _hash(path)
    note.write(found)
    return found


class _Note:
    """A cached fact about a file, valid until the file changes."""

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
    """The cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "keepdim"


def cached(path: Path, load: Callable[[Path, bool], T], lower: Callable[[], T]) -> T:
    """Load the file at `path`; if it is missing or invalid, run `lower` and save its result there.

    The second argument of `load` is whether to verify the weights: once after the file is written or changed.
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
