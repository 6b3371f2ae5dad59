"""`TOOLKIT_DEBUG=1..4`: what each stage did, on stderr.

1 stages with their times and decisions, a line a second of engine steps; 2 also every pass, every engine step; 3 also
the launch program and the memory plan; 4 also graphs and kernel sources.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from .env import read_env


@cache
def debug_level() -> int:
    """The level asked for, 0 for silence. Raises UserError if the variable is no level."""
    return read_env().debug


def debug(level: int, text: str) -> None:
    """Print the text if the level was asked for."""
    if debug_level() >= level:
        print(f"[{level}] {text}", file=sys.stderr, flush=True)


@contextmanager
def debug_phase(what: str) -> Iterator[None]:
    """At level 1, tell how long the block took."""
    began = time.perf_counter()
    yield
    debug(1, f"{what}: {time.perf_counter() - began:.2f} s")
