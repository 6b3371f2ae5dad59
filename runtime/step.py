"""The step contract: what one run of the model takes and returns, shared by every device.

A step runs the model once over `T` tokens packed from `S` sequences and yields results for `R` rows. Prefill, chunked
prefill, decode, mixed batches and prompt scoring are this one contract with other values. The numpy dtypes below are
the C structs of `kernels_templates/cpu/abi.h.j2`, field for field; `ABI_HASH` changes when either does.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]

MAX_TOP = 20
"""Most alternatives a row can report. The whole vocabulary is asked for by `logprobs` instead."""

ROW = np.dtype(
    [
        ("token", "<i4"),  # index of the row's token in [0, T)
        ("sample", "<i4"),  # 1: draw a token; 0: only score `target`
        ("target", "<i4"),  # token whose log-probability is wanted when not sampling, or -1
        ("top_n", "<i4"),  # alternatives wanted, 0 to MAX_TOP
        ("top_k", "<i4"),  # 0: off
        ("prompt_length", "<i4"),  # tokens of `history` that are prompt
        ("history_length", "<i4"),  # prompt and output tokens so far
        ("bias_count", "<i4"),
        ("temperature", "<f4"),  # 0: greedy
        ("top_p", "<f4"),  # 1: off
        ("min_p", "<f4"),  # 0: off
        ("repetition_penalty", "<f4"),  # 1: off; over prompt and output
        ("frequency_penalty", "<f4"),  # 0: off; over output
        ("presence_penalty", "<f4"),  # 0: off; over output
        ("seed", "<u8"),
        ("index", "<u8"),  # output index: with the seed it fixes the random number, whatever the batch
        ("history", "<u8"),  # const int32_t *, or 0
        ("bias_tokens", "<u8"),  # const int32_t *
        ("bias_values", "<u8"),  # const float *, added to the logits
        ("mask", "<u8"),  # const uint32_t *, a bit a token, 1 allowed; or 0
        ("logprobs", "<u8"),  # float *, gets log_softmax of the whole row; or 0
    ]
)
"""One row that needs logits. Order of operations: mask and bias, penalties, temperature, top-k, top-p, min-p, draw.
Log-probabilities are those of the raw logits."""

RESULT = np.dtype([("token", "<i4"), ("rank", "<i4"), ("logprob", "<f4"), ("status", "<i4")])
"""One row's result: the drawn token (or `target`), its rank (1 is the most likely), its raw log-probability; status is
0, or 1 if the logits were not finite, or 2 if the mask allowed nothing."""

ABI_HASH = hashlib.sha256(repr((ROW.descr, RESULT.descr, MAX_TOP, "step-1")).encode()).hexdigest()[:16]


@dataclass(slots=True)
class StepBatch:
    """Inputs of one step. Arrays are C-contiguous and stay untouched until the step's ticket is polled.

    `context[s]` counts the tokens of sequence s in the cache once this step's are written, so its first token here has
    position `context[s] - (seq_start[s + 1] - seq_start[s])`. Slot of a token is `page * page_tokens + offset`.
    Page 0 of every group is the trash page, which is never read.
    """

    tokens: Int32
    """[T]"""
    positions: Int32
    """[T]"""
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
