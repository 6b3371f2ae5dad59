"""Which kernel families have a TIR form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ...runtime.plan import IsaName
from ..catalog import KernelSpec
from . import linear, pointwise


@dataclass(frozen=True)
class TirFamily:
    """A family as TIR: whether it takes a kernel with a shape, and the script of one."""

    takes: Callable[[KernelSpec], bool]
    write: Callable[[KernelSpec, str, IsaName], str]


TIR_FAMILIES: Mapping[str, TirFamily] = {
    "linear": TirFamily(linear.takes, linear.write),
    "pointwise": TirFamily(pointwise.takes_pointwise, pointwise.write_pointwise),
    "quantize": TirFamily(pointwise.takes_quantize, pointwise.write_quantize),
}


def takes(kernel: KernelSpec) -> bool:
    """Whether TVM can make code for a kernel with its shape."""
    return kernel.family in TIR_FAMILIES and TIR_FAMILIES[kernel.family].takes(kernel)


def script(kernel: KernelSpec, name: str, isa: IsaName) -> str:
    """The TVMScript text of a kernel that `takes` allows, as a function of this name."""
    return TIR_FAMILIES[kernel.family].write(kernel, name, isa)
