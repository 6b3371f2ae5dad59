"""The content-addressed cache of compiled objects: a file is named by the hash of all that decides its bytes."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

from ..runtime.env import read_env
from ..runtime.errors import UserError

LIMIT = 2 << 30
"""Bytes that are kept of files that nobody has used for `REST`."""
FOLDERS = tuple(Path(__file__).parents[1] / name for name in ("models", "compiler", "kernels_templates", "runtime"))
"""Of this package: what capture, the text form of graphs and packed weights are made of."""
REST = 3600.0
"""Seconds without use before a file may go: a running compilation finds what it has made."""


def cache_directory() -> Path:
    """`$TOOLKIT_CACHE`, or `toolkit` in the user's cache folder."""
    return read_env().cache or Path.home() / ".cache" / "toolkit"


def content_key(*parts: str) -> str:
    """SHA-256 over the parts, each with its length, so that moving a boundary changes the key."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def cached(key: str, suffix: str, make: Callable[[Path], object], *, again: bool = False) -> Path:
    """The cached file for `key`; where there is none, `make` writes it to a private path and it is moved into place.

    `again` replaces one that is damaged. Safe with other processes on the same folder: both may build, and either's
    file is complete. Raises UserError if the folder can't be written.
    """
    path = cached_path(key, suffix)
    if path.exists() and not again:
        with suppress(OSError):  # a cache that is only read
            os.utime(path)
        return path
    with _private_folder(path.parent) as folder:
        built = Path(folder) / f"object{suffix}"
        make(built)
        os.replace(built, path)
    _trim_once(cache_directory())
    return path


def cached_path(key: str, suffix: str) -> Path:
    """Where the file for `key` is, or would be."""
    return cache_directory() / key[:2] / f"{key}{suffix}"


def package_digest() -> str:
    """A hash of the sources of this package from which graphs and weights are made."""
    digest = hashlib.sha256()
    for folder in FOLDERS:
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{path.relative_to(folder.parent)} ".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _private_folder(parent: Path) -> tempfile.TemporaryDirectory[str]:
    """A folder of our own, on the same file system as `parent`. Raises UserError if nothing can be written there."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(dir=parent)
    except OSError as error:
        raise UserError(
            f"can't write the cache of compiled kernels in {cache_directory()} ({error.strerror}): "
            "set TOOLKIT_CACHE to a folder that can be written"
        ) from None


def trim(folder: Path, limit: int) -> None:
    """Remove what was used longest ago, until `limit` bytes are left or the rest is in use."""
    found = []
    for place, _, names in os.walk(folder):  # passes over what others remove meanwhile
        for name in names:
            path = Path(place, name)
            with suppress(FileNotFoundError):
                found.append((path.stat().st_mtime, path.stat().st_size, path))
    excess = sum(size for _, size, _ in found) - limit
    for used, size, path in sorted(found):
        if excess <= 0 or used > time.time() - REST:
            return
        path.unlink(missing_ok=True)
        excess -= size


@cache
def _trim_once(folder: Path) -> None:
    """Once a process is enough: it adds little."""
    trim(folder, LIMIT)
