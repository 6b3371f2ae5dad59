"""What runtime and compiled kernels must agree on; apart from `step`, so that reading a plan does not load numpy."""

from __future__ import annotations

import hashlib

MAX_TOP = 20
"""Most alternatives a row can report. The whole vocabulary is asked for by `logprobs` instead."""

ROW_FIELDS = [
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
"""Fields of `step.ROW`."""

RESULT_FIELDS = [("token", "<i4"), ("rank", "<i4"), ("logprob", "<f4"), ("status", "<i4")]
"""Fields of `step.RESULT`."""

ABI_HASH = hashlib.sha256(repr((ROW_FIELDS, RESULT_FIELDS, MAX_TOP, "step-3")).encode()).hexdigest()[:16]
