"""`TOOLKIT_DEBUG=1..4`: what each stage did, on stderr.

1 stages with their times and decisions; 2 also every pass, every engine step; 3 also the launch program and the memory
plan; 4 also graphs and kernel sources.
"""

from __future__ import annotations

import os
import sys
from functools import cache

from .errors import UserError


@cache
def debug_level() -> int:
    """The level asked for, 0 for silence. Raises UserError if the variable is no level."""
    text = os.environ.get("TOOLKIT_DEBUG") or "0"
    if text not in ("0", "1", "2", "3", "4"):
        raise UserError(f"TOOLKIT_DEBUG must be 0 to 4, found {text!r}")
    return int(text)


def debug(level: int, text: str) -> None:
    """Print the text if the level was asked for."""
    if debug_level() >= level:
        print(f"[{level}] {text}", file=sys.stderr, flush=True)
