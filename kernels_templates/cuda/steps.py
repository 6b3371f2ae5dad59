"""CUDA kernels that belong to no op: the runtime launches them around a step, between steps, and to fill weights."""

from __future__ import annotations

from ..catalog import ArgSpec, Axis, Family, Grid, KernelSpec
from .basic import RANDOM_FILL, THREADS

_RING = (
    ArgSpec("ring", "uint8_t *", "out"),
    ArgSpec("slot_bytes", "int64_t", "const"),
    ArgSpec("depth", "int64_t", "const"),
    ArgSpec("state", "uint64_t *", "out"),
)

STEP_LOAD = Family(
    name="step_load",
    template="cuda/step_load.cu.j2",
    params={},
    args=(
        *_RING,
        *(ArgSpec("inputs", "uint4 *", "out"), ArgSpec("results", "const toolkit_result *", "in")),
        ArgSpec("blocks", "int32_t", "const"),
    ),
    ops=(),
    doc="The first launch of a step: its inputs from the ring, tokens that the step before drew put in place.",
    grid=lambda params: Grid(THREADS, Axis(("blocks",))),
)

STEP_FINISH = Family(
    name="step_finish",
    template="cuda/step_finish.cu.j2",
    params={},
    args=(
        *_RING,
        ArgSpec("done_offset", "int64_t", "const"),
        ArgSpec("rows", "const toolkit_row *", "input"),
        ArgSpec("results", "const toolkit_result *", "in"),
        *(ArgSpec("top_tokens", "const int32_t *", "in"), ArgSpec("top_logprobs", "const float *", "in")),
        ArgSpec("max_rows", "int64_t", "const"),
    ),
    ops=(),
    doc="The last launch of a step: its results to the ring, then its number, for which the host waits.",
    grid=lambda params: Grid(1024, Axis()),
)

COPY_PAGES = Family(
    name="copy_pages",
    template="cuda/copy_pages.cu.j2",
    params={},
    args=(
        ArgSpec("cache", "uint8_t *", "cache"),
        *(ArgSpec(name, "int64_t", "const") for name in ("layers", "pages", "page_bytes", "source", "destination")),
    ),
    ops=(),
    doc="Copies page `source` of a cache group to page `destination`, in each of its layers [pages, page_bytes].",
    grid=lambda params: Grid(THREADS, Axis(("layers",)), Axis(("page_bytes",), 16 * THREADS)),
)

FAMILIES: tuple[Family, ...] = (STEP_LOAD, STEP_FINISH, COPY_PAGES)


def runtime_kernels() -> tuple[KernelSpec, ...]:
    """Kernels that every CUDA module holds, whatever the model; the runtime finds them by their symbols."""
    return tuple(KernelSpec(family.name) for family in (*FAMILIES, RANDOM_FILL))
