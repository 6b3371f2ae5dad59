"""The object cache under failure and concurrency."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from toolkit.compiler import cache as caching
from toolkit.compiler.cache import cache_directory, cached, content_key, trim
from toolkit.runtime.errors import UserError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_folder_is_the_users_choice(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_directory() == folder
    monkeypatch.delenv("TOOLKIT_CACHE")
    assert cache_directory() == Path.home() / ".cache" / "toolkit"


def test_made_once_and_found_again() -> None:
    made: list[Path] = []

    def make(path: Path) -> None:
        made.append(path)
        path.write_bytes(b"object")

    key = content_key("source", "flags")
    first, second = cached(key, ".o", make), cached(key, ".o", make)
    assert first == second
    assert first.read_bytes() == b"object"
    assert len(made) == 1


def test_keys_depend_on_every_part_and_boundary() -> None:
    keys = {content_key(*parts) for parts in (("ab", "c"), ("a", "bc"), ("abc",), ("abc", ""), ("ab", "d"))}
    assert len(keys) == 5


def test_a_failed_build_leaves_nothing(folder: Path) -> None:
    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        cached(content_key("x"), ".o", fail)
    assert not [path for path in folder.rglob("*") if path.is_file()]

    def succeed(path: Path) -> None:
        path.write_bytes(b"whole")

    assert cached(content_key("x"), ".o", succeed).read_bytes() == b"whole"


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError, match=r"file/cache \(Not a directory\): set TOOLKIT_CACHE"):
        cached(content_key("x"), ".o", Path.touch)


def test_builders_that_race_all_get_a_complete_file() -> None:
    barrier = threading.Barrier(8)

    def build(number: int) -> bytes:
        def make(path: Path) -> None:
            path.write_bytes(b"x" * 100_000)

        barrier.wait(10)
        return cached(content_key(f"{number % 2}"), ".o", make).read_bytes()

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(build, range(8))) == {b"x" * 100_000}


def test_a_damaged_file_is_replaced() -> None:
    path = cached(content_key("x"), ".o", lambda path: path.write_bytes(b"damaged"))
    assert cached(content_key("x"), ".o", lambda path: path.write_bytes(b"whole"), again=True) == path
    assert path.read_bytes() == b"whole"


def fill(folder: Path, ages: list[float]) -> list[Path]:
    """Files of 100 bytes, used so many hours ago."""
    paths = [cached(content_key(str(age)), ".o", lambda path: path.write_bytes(b"x" * 100)) for age in ages]
    for path, age in zip(paths, ages, strict=True):
        used = time.time() - 3600 * age
        os.utime(path, (used, used))
    return paths


def test_what_was_used_longest_ago_goes_first(folder: Path) -> None:
    paths = fill(folder, [4, 9, 2, 7])
    trim(folder, 400)
    assert all(path.exists() for path in paths)
    trim(folder, 250)
    assert [path.exists() for path in paths] == [True, False, True, False]


def test_a_hit_is_a_use(folder: Path) -> None:
    old, older = fill(folder, [4, 9])
    assert cached(content_key("9"), ".o", Path.touch) == older
    trim(folder, 150)
    assert [old.exists(), older.exists()] == [False, True]


def test_what_a_running_compilation_may_need_stays(folder: Path) -> None:
    paths = fill(folder, [0.5, 9])
    trim(folder, 0)
    assert [path.exists() for path in paths] == [True, False]


def test_the_folder_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caching, "LIMIT", 250)
    old = fill(folder, [9, 8, 7])
    caching._trim_once.cache_clear()
    cached(content_key("new"), ".o", lambda path: path.write_bytes(b"x" * 100))
    assert [path.exists() for path in old] == [False, False, True]
