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
    if plan.modules:
        from .cuda.device import CudaDevice

        return CudaDevice(directory, plan, options)
    if plan.libraries:
        from .cpu import CpuDevice

        return CpuDevice(directory, plan, options)
    raise UserError(f"the plan for {plan.target!r} holds no kernels: compile it again")
