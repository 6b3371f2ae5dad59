"""Loaders with the faults that the fuzzer is there to find, each on some of its inputs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from fuzz.loader import Files, Loader

from toolkit.runtime.errors import UserError

CONTENT = b"0123456789" * 4


def _samples(folder: Path) -> list[Files]:
    return [{"file": CONTENT}]


def _loader(name: str, fault: Callable[[], object]) -> Loader:
    def load(folder: Path) -> None:
        content = (folder / "file").read_bytes()
        if len(content) < len(CONTENT):
            raise UserError("too short")
        if content != CONTENT and len(content) == len(CONTENT):
            fault()

    return Loader(name, _samples, load, ("file",))


def _hang() -> None:
    while True:
        pass


def _refuse_at_length() -> None:
    raise UserError("no\nno")


_ALL = (
    _loader("good", lambda: None),
    _loader("crash", os.abort),
    _loader("hang", _hang),
    _loader("huge", lambda: bytearray(4 << 30)),
    _loader("wrong", lambda: int("x")),
    _loader("lines", _refuse_at_length),
)
LOADERS = {loader.name: loader for loader in _ALL}
