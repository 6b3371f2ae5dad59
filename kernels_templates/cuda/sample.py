"""The CUDA kernel family of the sampler."""

from __future__ import annotations

from collections.abc import Mapping

from ..catalog import ArgSpec, Axis, Family, Grid, ParamValue, dim_arg, int_arg
from .basic import REALS, real_arg

PART = 8192
"""Logits of a row that one block measures."""


def _grid(params: Mapping[str, ParamValue]) -> Grid:
    return Grid(512, Axis(("V",), PART), Axis(("R",)))


SAMPLE = Family(
    name="sample",
    template="cuda/sample.cu.j2",
    params={"real": REALS},
    args=(
        *(real_arg("logits"), ArgSpec("rows", "const toolkit_row *", "input")),
        ArgSpec("tokens", "const int32_t *", "input"),
        ArgSpec("results", "toolkit_result *", "input"),
        ArgSpec("top_tokens", "int32_t *", "input"),
        ArgSpec("top_logprobs", "float *", "input"),
        ArgSpec("scratch", "float *", "scratch"),
        *(dim_arg("R"), int_arg("V")),
    ),
    ops=(),
    doc="Draws a token from each row of logits[R, V], and reports log-probabilities; see ROW in runtime/step.py. The "
    "last token of the history of a row that samples is tokens[row.token]. `scratch` has `sample_scratch` bytes a row. "
    "R is at most 65536.",
    grid=_grid,
)


def sample_scratch(vocabulary: int) -> int:
    """Bytes of scratch memory of a row: its scores, and 16 bytes for each block."""
    return 4 * (-(-vocabulary // 4) * 4) + 16 * -(-vocabulary // PART)


FAMILIES: tuple[Family, ...] = (SAMPLE,)
