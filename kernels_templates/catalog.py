"""The kernel catalog: family -> template, legal parameters, typed arguments and weight layouts.

A *family* is a template; a *kernel* is a family with parameters. Lowering turns each fused op into kernels and binds
their arguments in the order given here; code generation renders, compiles and caches one object a kernel.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from ..runtime.plan import ArchName, Choice

ParamValue = int | str | float | bool
BOOLS = (False, True)
ANY: tuple[ParamValue, ...] = ()
"""Legal values of a parameter that may have any."""
POINTWISE_INPUTS = 8
"""Most inputs of a pointwise kernel."""


@dataclass(frozen=True)
class ArgSpec:
    """One argument of a kernel, in order.

    `ctype` is the C type. A parameter of the kernel that is False may remove an optional argument: see `when`.
    """

    name: str
    ctype: str
    role: Literal["in", "out", "weight", "cache", "input", "dim", "const", "scratch"]
    when: str = ""
    """Name of the boolean parameter that says whether the argument is there; "" is always."""


def dim_arg(name: str) -> ArgSpec:
    """A symbolic dimension's value in this step."""
    return ArgSpec(name, "int32_t", "dim")


def int_arg(name: str, when: str = "") -> ArgSpec:
    """A whole number known when the plan is made."""
    return ArgSpec(name, "int32_t", "const", when)


def float_arg(name: str, when: str = "") -> ArgSpec:
    """A number known when the plan is made."""
    return ArgSpec(name, "float", "const", when)


def input_arg(name: str, ctype: str = "const int32_t *") -> ArgSpec:
    """A step input."""
    return ArgSpec(name, ctype, "input")


CACHE_IN = ArgSpec("cache", "const uint8_t *", "cache")
"""A layer's K/V storage that is read."""
CACHE_OUT = ArgSpec("cache", "uint8_t *", "cache")
"""A layer's K/V storage that is written."""


@dataclass(frozen=True)
class Axis:
    """How many thread blocks a CUDA kernel has along one axis of its grid: the product of some of its arguments over
    `divisor`, rounded up; with `persistent` no more than the GPU has multiprocessors, each taking several.
    """

    factors: tuple[str, ...] = ()
    """Names of `dim` and `const` arguments; none is 1."""
    divisor: int = 1
    persistent: bool = False
    times: int = 1
    """And that many for each."""


@dataclass(frozen=True)
class Grid:
    """How a CUDA kernel is launched."""

    threads: int
    x: Axis
    y: Axis = Axis()
    z: Axis = Axis()
    shared: int = 0
    """Bytes of dynamic shared memory."""
    cluster: int = 1
    """Blocks along z that read each other's shared memory: all of z. More than one on sm90 only."""


@dataclass(frozen=True)
class Tiles:
    """A matrix argument that a kernel reads in tiles (see `TensorMap` in the plan)."""

    rows: str
    """Name of the argument that counts its rows. Empty with `width`."""
    columns: str
    box: int
    """Rows of a tile."""
    depth: int = 1
    block: tuple[int, int, int, int] | None = None
    bytes: int = 2
    """Of a number."""
    width: int = 0
    """Columns of a matrix that no argument counts: its rows are as many as memory has."""


@dataclass(frozen=True)
class Variant:
    """A family's other implementation, with the same parameters and arguments."""

    template: str
    grid: Callable[[Mapping[str, ParamValue]], Grid]
    tiles: Callable[[Mapping[str, ParamValue]], Mapping[str, Tiles]] = lambda params: {}
    """Arguments that it takes as tensor maps, by name."""


@dataclass(frozen=True)
class Family:
    """A kernel template.

    `params` maps a parameter to its legal values; an empty tuple allows any value of the default's kind (constants such
    as an expression or a head size that are rendered into the source).
    """

    name: str
    template: str
    """Path below `kernels_templates/`."""
    params: Mapping[str, tuple[ParamValue, ...]]
    args: tuple[ArgSpec, ...]
    ops: tuple[str, ...]
    """IR ops it implements, alone or with others."""
    doc: str
    layouts: tuple[str, ...] = ()
    """Weight layouts it reads."""
    batch_invariant: bool = False
    """Whether what it computes for a token or row is the same to the bit whatever else is in the call: the number of
    rows and threads, other sequences, and how a prompt is cut into chunks and pages."""
    grid: Callable[[Mapping[str, ParamValue]], Grid] | None = None
    """CUDA only: the launch of the kernel with these parameters."""
    hopper: Variant | None = None
    """CUDA only: what sm90 runs instead."""
    triton: bool = False
    """CUDA only: it is written in Triton, and its code made for the constants it is called with."""

    def variant(self, arch: ArchName) -> Variant:
        """CUDA only: what a GPU of this architecture runs."""
        assert self.grid is not None
        return self.hopper if self.hopper and arch == "sm90" else Variant(self.template, self.grid)


@dataclass(frozen=True)
class KernelSpec:
    """A family with parameters: what is compiled, cached and named in the plan.

    A kernel without a shape takes any and is C++. One with a shape is known to be called with these constant arguments,
    for which Triton's code is made, and TVM's may be: `choices` says where that is used.
    """

    family: str
    params: Mapping[str, ParamValue] = field(default_factory=dict)
    shape: Mapping[str, int] = field(default_factory=dict)
    choices: tuple[Choice, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "params", MappingProxyType(dict(sorted(self.params.items()))))
        object.__setattr__(self, "shape", MappingProxyType(dict(sorted(self.shape.items()))))

    def __hash__(self) -> int:
        return hash((self.family, tuple(self.params.items()), tuple(self.shape.items()), self.choices))

    @property
    def any_shape(self) -> KernelSpec:
        """The C++ kernel that takes any shape."""
        return KernelSpec(self.family, self.params)

    @property
    def symbol(self) -> str:
        """The C name: the family, readable parameters, a hash where one does not fit a name, and the shape."""
        parts = [self.family]
        for name, value in self.params.items():
            text = f"{int(value)}" if isinstance(value, bool) else f"{value}"
            if text and (not text.replace("_", "").isalnum() or len(text) > 16):
                text = hashlib.sha256(text.encode()).hexdigest()[:8]
            parts.append(f"{name[:3]}{text}")
        return "k_" + "_".join([*parts, *(f"{name}{size}" for name, size in self.shape.items())])
