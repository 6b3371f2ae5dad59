"""Sampling parameters as the step's ROW records, and the rules by which an output ends."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .errors import UserError
from .request import Add, SamplingParams
from .step import ROW, Float32, Int32

GREEDY_BELOW = 1e-5
"""Temperatures below it would overflow the logits; they are greedy."""


def scoring_rows(tokens: Sequence[int]) -> npt.NDArray[np.void]:
    """ROWs [R] of these tokens of a step, which draw nothing; `target`, `top_n` and `logprobs` ask for something."""
    rows = np.zeros(len(tokens), ROW)
    rows["token"] = tokens
    rows["target"] = -1
    rows["top_p"] = rows["repetition_penalty"] = 1.0
    return rows


@dataclass(frozen=True, slots=True, eq=False)
class Sampling:
    """How a request's tokens are drawn and when they end. The record points into the arrays, so they live here."""

    row: npt.NDArray[np.void]
    """A ROW [1], complete but for `token`, `index` and `history_length`; `bias_count` counts the user's biases."""
    bias_tokens: Int32
    """The user's biases, then those that forbid every stop before output index `min_tokens`."""
    bias_values: Float32
    min_tokens: int
    stops: frozenset[int]
    """Token ids that end the output."""
    logprobs: int | None
    prompt_logprobs: int | None


def make_sampling(command: Add, history: Int32, vocabulary: int) -> Sampling:
    """The sampling state of a request whose prompt and outputs are written to `history`.

    Raises UserError if a token id is outside the vocabulary or a bias is not finite.
    """
    params = command.params
    _check_ids("stop_token_ids", params.stop_token_ids, vocabulary)
    _check_ids("logit_bias", tuple(params.logit_bias), vocabulary)
    if not all(map(math.isfinite, params.logit_bias.values())):
        raise UserError("logit_bias values must be finite numbers")
    eos = () if params.ignore_eos else tuple(token for token in command.eos if 0 <= token < vocabulary)
    stops = frozenset((*eos, *params.stop_token_ids))
    forbidden = sorted(stops) if params.min_tokens else []
    tokens = np.array([*params.logit_bias, *forbidden], np.int32)
    values = np.array([*params.logit_bias.values(), *(-math.inf for _ in forbidden)], np.float32)
    row = _row(params, vocabulary)
    row["prompt_length"] = len(command.prompt)
    row["bias_count"] = len(params.logit_bias)
    row["history"] = history.ctypes.data
    row["bias_tokens"] = tokens.ctypes.data
    row["bias_values"] = values.ctypes.data
    return Sampling(
        row,
        tokens,
        values,
        params.min_tokens,
        stops,
        None if params.logprobs is None else min(params.logprobs, vocabulary),
        None if params.prompt_logprobs is None else min(params.prompt_logprobs, vocabulary),
    )


def _row(params: SamplingParams, vocabulary: int) -> npt.NDArray[np.void]:
    row = scoring_rows([0])
    row["sample"] = 1
    row["top_n"] = min(params.logprobs or 0, vocabulary)
    row["top_k"] = params.top_k if 0 < params.top_k < vocabulary else 0
    row["temperature"] = params.temperature if params.temperature >= GREEDY_BELOW else 0.0
    row["top_p"] = params.top_p
    row["min_p"] = params.min_p
    row["repetition_penalty"] = params.repetition_penalty
    row["frequency_penalty"] = params.frequency_penalty
    row["presence_penalty"] = params.presence_penalty
    row["seed"] = secrets.randbits(64) if params.seed is None else params.seed % 2**64
    return row


def _check_ids(name: str, ids: tuple[int, ...], vocabulary: int) -> None:
    for token in ids:
        if not 0 <= token < vocabulary:
            raise UserError(f"{name} must be token ids from 0 to {vocabulary - 1}, not {token}")
