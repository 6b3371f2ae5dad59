"""The content-addressed cache of compiled objects: a file is named by the hash of all that decides its bytes."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from ..runtime.env import read_env


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


def cached(key: str, suffix: str, make: Callable[[Path], None]) -> Path:
    """The cached file for `key`; where there is none, `make` writes it to a private path and it is moved into place.

    Safe with other processes on the same folder: both may build, and either's file is complete.
    """
    path = cache_directory() / key[:2] / f"{key}{suffix}"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            built = Path(folder) / f"object{suffix}"
            make(built)
            os.replace(built, path)
    return path
