"""All kernel families by name, for each kind of target."""

from __future__ import annotations

from collections.abc import Mapping

from ..runtime.plan import TargetKind
from .catalog import Family, KernelSpec
from .cpu import dense, linear
from .cuda import attention, basic, sample, steps
from .cuda import linear as cuda_linear
from .triton import families as triton

FAMILIES: dict[str, Family] = {family.name: family for family in (*dense.FAMILIES, *linear.FAMILIES)}
"""CPU kernels."""
CUDA_FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        *(*basic.FAMILIES, *attention.FAMILIES, *sample.FAMILIES),
        *(*cuda_linear.FAMILIES, *steps.FAMILIES, *triton.FAMILIES),
    )
}
"""CUDA kernels, in C++ and in Triton."""


def families(kind: TargetKind) -> Mapping[str, Family]:
    """The kernels of a kind of target."""
    return CUDA_FAMILIES if kind == "cuda" else FAMILIES


def is_triton(kernel: KernelSpec) -> bool:
    """Whether a GPU's kernel is written in Triton."""
    return CUDA_FAMILIES[kernel.family].triton
