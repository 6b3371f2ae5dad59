"""Sampling parameters as ROW records."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from unit.runtime.engine_harness import make_request

from toolkit.runtime.errors import UserError
from toolkit.runtime.request import Add
from toolkit.runtime.sampling import Sampling, make_sampling, scoring_rows

VOCABULARY = 100
HISTORY = np.arange(20, dtype=np.int32)


def sampling_of(request: Add) -> Sampling:
    return make_sampling(request, HISTORY, VOCABULARY)


def make(**params: Any) -> Sampling:
    return sampling_of(make_request("x", range(7), **params))


def test_record() -> None:
    sampling = make(
        temperature=0.5,
        top_p=0.75,
        top_k=7,
        min_p=0.25,
        repetition_penalty=1.5,
        frequency_penalty=0.5,
        presence_penalty=-1.0,
        seed=-1,
        logprobs=4,
        logit_bias={3: 1.5, 9: -2.0},
    )
    row = sampling.row[0]
    expected = {
        "sample": 1,
        "target": -1,
        "top_n": 4,
        "top_k": 7,
        "prompt_length": 7,
        "bias_count": 2,
        "temperature": 0.5,
        "top_p": 0.75,
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "frequency_penalty": 0.5,
        "presence_penalty": -1.0,
        "seed": 2**64 - 1,
        "history": HISTORY.ctypes.data,
        "bias_tokens": sampling.bias_tokens.ctypes.data,
        "bias_values": sampling.bias_values.ctypes.data,
        "mask": 0,
        "logprobs": 0,
    }
    assert {name: row[name] for name in expected} == expected
    assert sampling.bias_tokens.tolist() == [3, 9]
    assert sampling.bias_values.tolist() == [1.5, -2.0]


@pytest.mark.parametrize(("given", "expected"), [(-1, 0), (0, 0), (1, 1), (99, 99), (100, 0), (10**6, 0)])
def test_top_k_that_keeps_everything_is_off(given: int, expected: int) -> None:
    assert make(top_k=given).row["top_k"] == expected


def test_tiny_temperatures_are_greedy() -> None:
    assert make(temperature=1e-9).row["temperature"] == 0.0
    assert make(temperature=0.01).row["temperature"] == np.float32(0.01)


def test_alternatives_are_at_most_the_vocabulary() -> None:
    sampling = make_sampling(make_request("x", [1], logprobs=20, prompt_logprobs=20), HISTORY, 5)
    assert (sampling.row["top_n"][0], sampling.logprobs, sampling.prompt_logprobs) == (5, 5, 5)
    assert make_sampling(make_request("x", [1], prompt_logprobs=-1), HISTORY, 5).prompt_logprobs == -1


def test_stops_and_what_min_tokens_forbids() -> None:
    sampling = make(min_tokens=3, stop_token_ids=(8, 9), logit_bias={5: 1.0})
    assert sampling.stops == {1, 8, 9}
    assert sampling.bias_tokens.tolist() == [5, 1, 8, 9]
    assert sampling.bias_values.tolist() == [1.0, -np.inf, -np.inf, -np.inf]
    assert sampling.row["bias_count"] == 1
    assert make(ignore_eos=True, stop_token_ids=(8,)).stops == {8}
    assert len(make(stop_token_ids=(8,)).bias_tokens) == 0


def test_seeds() -> None:
    assert make(seed=5).row["seed"] == 5
    assert len({int(make().row["seed"][0]) for _ in range(20)}) == 20


@pytest.mark.parametrize(
    "params",
    [
        {"stop_token_ids": (100,)},
        {"stop_token_ids": (-1,)},
        {"logit_bias": {100: 0.0}},
        {"logit_bias": {1: float("inf")}},
        {"logit_bias": {1: float("nan")}},
    ],
)
def test_refusals(params: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        make(**params)


def test_scoring_rows_draw_nothing() -> None:
    rows = scoring_rows(range(3, 6))
    assert rows["token"].tolist() == [3, 4, 5]
    assert not rows["sample"].any()
    assert (rows["target"] == -1).all()
