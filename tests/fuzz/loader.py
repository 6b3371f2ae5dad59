"""What the fuzzer needs to know of a loader."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Files = dict[str, bytes]
"""Contents by path."""


@dataclass(frozen=True)
class Loader:
    """One kind of file. `load` reads a directory; whatever it raises but UserError is a fault."""

    name: str
    samples: Callable[[Path], list[Files]]
    """Valid contents, made with the help of a directory that does not exist yet."""
    load: Callable[[Path], None]
    damaged: tuple[str, ...]
    """The files that get damaged."""
