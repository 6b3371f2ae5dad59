"""SHA-256 of large files, remembered under what the file system says of them: a second compilation does not read a
checkpoint to learn that it is the one it knows.

As in git's index, a file is the one that was hashed while device, inode, size and the times of its last modification
and last change are those of then. Writing, replacing, moving or restoring it changes one of them, the last even where a
program sets the time of modification back. Only a file that had rested when its hashing began is remembered: one that
changes twice within a tick of the file system's clock looks the same after both.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from contextlib import suppress
from pathlib import Path

from ..runtime.errors import UserError
from .cache import cached, cached_path, content_key

SMALL = 16 << 20
"""Bytes below which hashing takes no longer than remembering."""
RESTED = 2.0
"""Seconds since a file's last change after which another is sure to get another time, on any file system."""
_SUFFIX = ".sha256"


def file_digest(path: Path, *, reuse: bool = True) -> str:
    """SHA-256 of a file in hexadecimal; with `reuse` as remembered, if it is."""
    with path.open("rb") as file:
        state = os.fstat(file.fileno())
        if state.st_size < SMALL:
            return hashlib.file_digest(file, "sha256").hexdigest()
        key, began = _key(state), time.time()
        found = _remembered(key) if reuse else None
        if found is not None:
            return found
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if _key(os.fstat(file.fileno())) == key and began - state.st_ctime > RESTED:
            with suppress(UserError):  # a cache that is only read
                cached(key, _SUFFIX, lambda made: made.write_text(digest), again=True)
        return digest


def _key(state: os.stat_result) -> str:
    parts = (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)
    return content_key("digest", *map(str, parts))


def _remembered(key: str) -> str | None:
    try:
        text = cached_path(key, _SUFFIX).read_text()
    except (OSError, ValueError):
        return None
    return text if re.fullmatch(r"[0-9a-f]{64}", text) else None
