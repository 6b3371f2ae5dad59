"""Ending with the process that started this one."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the parent's thread that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    check_parent(parent)


def check_parent(parent: int) -> None:
    """End this process if its parent is gone."""
    if os.getppid() != parent:
        os._exit(1)
