"""Opening the device that a plan was compiled for."""

from __future__ import annotations

from pathlib import Path

from ..errors import UserError
from ..options import EngineOptions
from ..plan import Plan
from .base import Device


def open_device(directory: Path, plan: Plan, options: EngineOptions) -> Device:
    """Load weights and kernels of a plan; the device is ready to run steps.

    Raises UserError if this machine can't run it, saying what it lacks.
    """
    if plan.target == "cpu":
        from .cpu import CpuDevice

        return CpuDevice(directory, plan, options)
    raise UserError(f"this toolkit can't run plans for {plan.target!r}, only for 'cpu': compile with --target cpu")
