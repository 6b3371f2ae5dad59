"""Remembered hashes are of the file that is there, whatever was done to it since."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toolkit.compiler import digests
from toolkit.compiler.cache import cache_directory
from toolkit.compiler.digests import file_digest

SIZE = 1 << 10
TICK = 0.02
"""Seconds after which any file system's clock here has moved."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(digests, "SMALL", SIZE)
    monkeypatch.setattr(digests, "RESTED", TICK)


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were read to be hashed."""
    digest, found = hashlib.file_digest, list[Path]()

    def counted(file: Any, name: str) -> Any:
        found.append(Path(file.name))
        return digest(file, name)

    monkeypatch.setattr(hashlib, "file_digest", counted)
    return found


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A file whose hash is worth remembering, and may be."""
    path = tmp_path / "large"
    path.write_bytes(os.urandom(SIZE))
    time.sleep(2 * TICK)
    return path


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_file_at_rest_is_hashed_once(large: Path, hashed: list[Path]) -> None:
    assert file_digest(large) == file_digest(large) == sha256(large)
    assert hashed == [large]
    assert file_digest(large, reuse=False) == sha256(large)
    assert hashed == [large] * 2


def in_place(path: Path) -> None:
    """Write other bytes of the same number, and set the time of modification back."""
    before = path.stat()
    path.write_bytes(os.urandom(before.st_size))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def restored(path: Path) -> None:
    """Put another file of the same size and times in its place, as archives and `cp -p` do."""
    other, before = path.with_name("other"), path.stat()
    other.write_bytes(os.urandom(before.st_size))
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(path)


def one_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[7] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "change",
    [in_place, restored, one_byte, lambda path: path.write_bytes(b""), lambda path: os.truncate(path, 2 * SIZE)],
    ids=["in place", "restored", "one byte", "emptied", "grown"],
)
def test_whatever_changes_a_file_is_seen(large: Path, change: Callable[[Path], object]) -> None:
    before = file_digest(large)
    change(large)
    assert file_digest(large) == sha256(large) != before


def test_a_file_that_just_changed_is_not_remembered(
    large: Path, hashed: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "RESTED", 3600.0)
    assert file_digest(large) == file_digest(large) == sha256(large)
    assert len(hashed) == 2


def test_a_file_that_changes_while_it_is_hashed_is_not_remembered(
    large: Path, hashed: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = hashlib.file_digest

    def meanwhile(file: Any, name: str) -> Any:
        found = digest(file, name)
        large.write_bytes(os.urandom(SIZE))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(hashlib, "file_digest", meanwhile)
        file_digest(large)
    assert file_digest(large) == sha256(large)
    assert len(hashed) == 2


def test_small_files_are_not_remembered(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"x" * (SIZE - 1))
    time.sleep(2 * TICK)
    assert file_digest(tmp_path / "small") == sha256(tmp_path / "small")
    assert not cache_directory().exists()


@pytest.mark.parametrize("damage", [b"", b"0" * 63, b"\xff" * 64])
def test_a_damaged_entry_is_no_entry(large: Path, damage: bytes) -> None:
    file_digest(large)
    (entry,) = cache_directory().rglob("*.sha256")
    entry.write_bytes(damage)
    assert file_digest(large) == sha256(large)
    assert entry.read_text() == sha256(large)


def test_a_cache_that_cannot_be_written_costs_hashing_alone(large: Path, hashed: list[Path]) -> None:
    cache_directory().write_bytes(b"a file where the folder should be")
    assert file_digest(large) == file_digest(large) == sha256(large)
    assert len(hashed) == 2
