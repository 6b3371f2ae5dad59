"""The CUDA kernel families of the sampler: one measures rows of logits, the other draws."""

from __future__ import annotations

from ..catalog import ArgSpec, Axis, Family, Grid, dim_arg, int_arg
from .basic import REALS, real_arg

PART = 1024
"""Logits of a row that one warp measures."""


SAMPLE_MEASURE = Family(
    name="sample_measure",
    template="cuda/sample_measure.cu.j2",
    params={"real": REALS},
    args=(real_arg("logits"), ArgSpec("parts", "partial *", "out"), dim_arg("R"), int_arg("V")),
    ops=(),
    doc="What `sample` needs to know of each row of logits[R, V]: `parts` has `sample_parts` bytes a row.",
    grid=lambda params: Grid(256, Axis(("V",), 8 * PART), Axis(("R",))),
)

SAMPLE = Family(
    name="sample",
    template="cuda/sample.cu.j2",
    params={"real": REALS},
    args=(
        *(real_arg("logits"), ArgSpec("parts", "const partial *", "in")),
        *(ArgSpec("rows", "const toolkit_row *", "input"), ArgSpec("tokens", "const int32_t *", "input")),
        ArgSpec("results", "toolkit_result *", "input"),
        ArgSpec("top_tokens", "int32_t *", "input"),
        ArgSpec("top_logprobs", "float *", "input"),
        ArgSpec("scratch", "float *", "scratch"),
        *(dim_arg("R"), int_arg("V")),
    ),
    ops=(),
    doc="Draws a token from each row of logits[R, V], and reports log-probabilities; see ROW in runtime/step.py. The "
    "last token of the history of a row that samples is tokens[row.token]. `parts` is what `sample_measure` wrote; "
    "`scratch` has `sample_scratch` bytes a row.",
    grid=lambda params: Grid(512, Axis(("R",))),
)


def sample_parts(vocabulary: int) -> int:
    """Bytes of what is measured of a row."""
    return 16 * -(-vocabulary // PART)


def sample_scratch(vocabulary: int) -> int:
    """Bytes of scratch memory of a row: its scores."""
    return 4 * (-(-vocabulary // 4) * 4)


FAMILIES: tuple[Family, ...] = (SAMPLE_MEASURE, SAMPLE)
