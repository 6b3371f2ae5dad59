"""The step contract: what one run of the model takes and returns, shared by every device.

A step runs the model once over `T` tokens packed from `S` sequences and yields results for `R` rows. Prefill, chunked
prefill, decode, mixed batches and prompt scoring are this one contract with other values. The numpy dtypes below are
the C structs of `kernels_templates/cpu/abi.h.j2`, field for field; `ABI_HASH` changes when either does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .abi import ABI_HASH, MAX_TOP, RESULT_FIELDS, ROW_FIELDS

__all__ = ["ABI_HASH", "MAX_TOP", "RESULT", "ROW", "Float32", "Int32", "StepBatch", "StepResult"]

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]

ROW = np.dtype(ROW_FIELDS)
"""One row that needs logits. Order of operations: mask and bias, penalties, temperature, top-k, top-p, min-p, draw.
Log-probabilities are those of the raw logits."""

RESULT = np.dtype(RESULT_FIELDS)
"""One row's result: the drawn token (or `target`), its rank (1 is the most likely), its raw log-probability; status is
0, or 1 if the logits were not finite, or 2 if the mask allowed nothing."""


@dataclass(slots=True)
class StepBatch:
    """Inputs of one step. Arrays are C-contiguous and stay untouched until the step's ticket is polled.

    `context[s]` counts the tokens of sequence s in the cache once this step's are written, so its first token here has
    position `context[s] - (seq_start[s + 1] - seq_start[s])`. Slot of a token is `page * page_tokens + offset`.
    Page 0 of every group is the trash page, which is never read.
    """

    tokens: Int32
    """[T] Or -1 - r: what the step before draws for its row r, and then the history of the token's own row lacks it."""
    positions: Int32
    """[T]"""
    lengths: Int32
    """[T] What RoPE goes by if its frequencies depend on the length of the sequence: that of the prompt, or after it
    the token's position plus 1. So keys in the cache are those of a prompt in one step and then decoding, whatever the
    chunks, and preempted or not."""
    seq_start: Int32
    """[S + 1]"""
    context: Int32
    """[S]"""
    rows: npt.NDArray[np.void]
    """[R] of ROW; `rows["token"]` ascends."""
    slots: list[Int32]
    """A cache group each: [T]."""
    pages: list[Int32]
    """A cache group each: [S, P], page ids in order of position. Pages freed behind a window are 0."""
    masks: npt.NDArray[np.uint32] | None = None
    """What the rows' `mask` point into, if any does."""


@dataclass(slots=True)
class StepResult:
    """Outputs of one step, by row."""

    rows: npt.NDArray[np.void]
    """[R] of RESULT."""
    top_tokens: Int32
    """[R, MAX_TOP]; the first `top_n` of a row are set."""
    top_logprobs: Float32
    """[R, MAX_TOP]"""
    seconds: float
    """Time in the kernels."""
