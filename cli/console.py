"""Where reports are printed."""

from __future__ import annotations

import sys

from rich.console import Console

_PIPE_WIDTH = 150


def report_console() -> Console:
    """Standard output; as wide as tables need where it is no terminal."""
    return Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)
