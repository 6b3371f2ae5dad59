"""The sampler against numpy: greedy, every filter and penalty, log-probabilities, and input that must not hurt it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from cpu.kernels.harness import Guarded, aligned, isas, load_kernel
from cpu.kernels.sample_rows import (
    KINDS,
    check_alternatives,
    check_empty_masks,
    check_uniform_draws,
    is_clear,
    log_softmax,
    make_logits,
)
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from toolkit.kernels_templates.catalog import KernelSpec
from toolkit.kernels_templates.reference import SampleRow, kept_probabilities, philox, scores_of, uniform
from toolkit.runtime.plan import IsaName
from toolkit.runtime.step import MAX_TOP, RESULT, ROW

Floats = npt.NDArray[np.float32]
Array = npt.NDArray[Any]


@dataclass
class Sampled:
    results: Array
    top_tokens: Array
    top_logprobs: Floats
    logprobs: list[Floats]


def pack(rows: list[SampleRow], top_n: int, logprobs: list[Floats]) -> tuple[Array, list[Array]]:
    """The rows as ROW records, and the arrays that their pointers point at, each as short as it may be."""
    packed, alive = np.zeros(len(rows), ROW), []

    def point(record: Any, name: str, array: Array) -> None:
        alive.append(aligned(array))
        record[name] = alive[-1].ctypes.data

    for record, row in zip(packed, rows, strict=True):
        same = set(ROW.names or ()) & set(row.__dict__) - {"mask"}
        for name in same:
            record[name] = getattr(row, name)
        record["top_n"] = top_n
        point(record, "history", np.array([*row.prompt, *row.output], np.int32))
        record["prompt_length"], record["history_length"] = len(row.prompt), len(row.prompt) + len(row.output)
        point(record, "bias_tokens", np.array([token for token, _ in row.bias], np.int32))
        point(record, "bias_values", np.array([value for _, value in row.bias], np.float32))
        record["bias_count"] = len(row.bias)
        if row.mask is not None:
            bits = np.zeros(-(-len(row.mask) // 32) * 32, np.uint8)
            bits[: len(row.mask)] = row.mask
            point(record, "mask", np.packbits(bits, bitorder="little").view(np.uint32))
    for record, out in zip(packed, logprobs, strict=False):
        record["logprobs"] = out.ctypes.data
    return packed, alive


def run(
    logits: Floats,
    rows: list[SampleRow],
    isa: IsaName = "x86-64-v3",
    *,
    top_n: int = 0,
    full: bool = False,
    threads: int = 1,
) -> Sampled:
    count, size = logits.shape
    full_rows = [Guarded(size, np.float32) for _ in range(count if full else 0)]
    packed, alive = pack(rows, top_n, [out.array for out in full_rows])
    results, top_tokens = Guarded(count, RESULT), Guarded((count, MAX_TOP), np.int32)
    top_logprobs, scratch = Guarded((count, MAX_TOP), np.float32), Guarded((count, size), np.float32)
    outputs = (results, top_tokens, top_logprobs, scratch)
    before = logits.copy()
    load_kernel(KernelSpec("sample"), isa)(
        aligned(logits), packed, *(out.array for out in outputs), count, size, threads=threads
    )
    for out in (*outputs, *full_rows):
        out.check()
    alive.clear()  # what the rows point at had to live until here
    np.testing.assert_array_equal(logits, before)
    return Sampled(results.array, top_tokens.array, top_logprobs.array, [out.array for out in full_rows])


def test_philox_matches_the_published_vectors() -> None:
    assert philox((0, 0), (0, 0, 0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ones = 0xFFFFFFFF
    assert philox((ones, ones), (ones,) * 4) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert philox((0xA4093822, 0x299F31D0), pi) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 7, 1000, 5003])
def test_greedy_scoring_and_logprobs(size: int, kind: str, isa: IsaName) -> None:
    rng = np.random.default_rng(size)
    logits = make_logits(rng, 4, size, kind)
    want = log_softmax(logits)
    targets = [-1, 0, size - 1, size]  # row 0 is greedy; the last target is none
    rows = [SampleRow(sample=i == 0, target=target) for i, target in enumerate(targets)]
    got = run(logits, rows, isa, top_n=min(5, size), full=True, threads=3)
    assert (got.results["status"] == 0).all()
    assert got.results["token"].tolist() == [logits[0].argmax(), 0, size - 1, size]
    for i, token in enumerate([int(logits[0].argmax()), 0, size - 1]):
        assert got.results["rank"][i] == 1 + (logits[i] > logits[i, token]).sum()
        np.testing.assert_allclose(got.results["logprob"][i], want[i, token], rtol=1e-6, atol=2e-6)
    assert got.results["rank"][3] == 0
    assert np.isnan(got.results["logprob"][3])
    np.testing.assert_allclose(np.stack(got.logprobs), want, rtol=1e-6, atol=2e-6)
    best = np.argsort(-logits, axis=1, kind="stable")[:, : min(5, size)]
    np.testing.assert_array_equal(got.top_tokens[:, : best.shape[1]], best)
    np.testing.assert_allclose(
        got.top_logprobs[:, : best.shape[1]], np.take_along_axis(want, best, 1), rtol=1e-6, atol=2e-6
    )


SAMPLE_ROWS = st.builds(
    SampleRow,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 2, 40, 900, 10**6]),
    top_p=st.sampled_from([1.0, 0.0, 0.3, 0.9, 0.999]),
    min_p=st.sampled_from([0.0, 0.02, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    frequency_penalty=st.sampled_from([0.0, 0.4]),
    presence_penalty=st.sampled_from([0.0, 0.7, -0.5]),
    seed=st.integers(0, 2**64 - 1),
    index=st.integers(0, 2**33),
    prompt=st.lists(st.integers(-2, 400), max_size=30).map(tuple),
    output=st.lists(st.integers(-2, 400), max_size=30).map(tuple),
    bias=st.lists(st.tuples(st.integers(-2, 400), st.floats(-9, 9, width=32)), max_size=5).map(tuple),
)


@given(row=SAMPLE_ROWS, kind=st.sampled_from(KINDS), size=st.sampled_from([5, 300, 4099]), masked=st.booleans())
@settings(max_examples=150, deadline=None)
def test_draws_follow_the_distribution(row: SampleRow, kind: str, size: int, masked: bool) -> None:
    rng = np.random.default_rng(row.seed)
    logits = make_logits(rng, 1, size, kind)
    if masked:
        row = replace(row, mask=rng.random(size) < 0.4)
        assume(row.mask is not None and row.mask.any())
    result = run(logits, [row]).results[0]
    scores = scores_of(logits[0], row)
    token = int(result["token"])
    assert result["status"] == 0
    np.testing.assert_allclose(result["logprob"], log_softmax(logits)[0, token], rtol=1e-6, atol=2e-6)
    assert result["rank"] == 1 + (logits[0] > logits[0, token]).sum()
    if row.temperature == 0:
        assert scores[token] >= scores.max() - 1e-5
        return
    assume(is_clear(scores, row))
    cumulative = np.cumsum(kept_probabilities(scores, row))
    at = uniform(row.seed, row.index)
    assert (cumulative[token - 1] if token else 0.0) - 2e-5 <= at <= cumulative[token] + 2e-5


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("kind", KINDS)
def test_filters_on_a_real_vocabulary(kind: str, isa: IsaName) -> None:
    logits = make_logits(np.random.default_rng(5), 1, 49157, kind)
    plain = SampleRow(temperature=0.8, seed=9, index=3)
    few, many = replace(plain, top_k=50), replace(plain, top_k=3000)
    half, most, both = replace(plain, top_p=0.5), replace(plain, top_p=0.99), replace(plain, top_k=700, top_p=0.8)
    for row in (plain, few, many, half, most, both):
        token = int(run(logits, [row], isa).results["token"][0])
        cumulative = np.cumsum(kept_probabilities(scores_of(logits[0], row), row))
        at = uniform(9, 3)
        assert (cumulative[token - 1] if token else 0.0) - 1e-4 <= at <= cumulative[token] + 1e-4


def test_a_draw_depends_on_its_row_alone() -> None:
    rng = np.random.default_rng(2)
    logits = make_logits(rng, 6, 1500, "flat")
    rows = [SampleRow(temperature=1.0, top_p=0.9, seed=1, index=i, output=(1, 2, 3)) for i in range(6)]
    together = run(logits, rows, threads=4).results
    alone = [run(logits[i : i + 1], [row]).results[0] for i, row in enumerate(rows)]
    assert together.tolist() == [result.tolist() for result in alone]
    assert len(set(together["token"].tolist())) > 1


def test_every_token_of_a_uniform_row_can_be_drawn() -> None:
    check_uniform_draws(partial(run, threads=2))


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_are_reported(bad: float, isa: IsaName) -> None:
    logits = make_logits(np.random.default_rng(0), 3, 1234, "flat")
    logits[1, 777] = bad
    row = SampleRow(temperature=1.0, top_k=5)
    results = run(logits, [row] * 3, isa, top_n=3, full=True).results
    assert results["status"].tolist() == [0, 1, 0]
    assert results["token"][1] == -1


def test_a_mask_that_allows_nothing_is_reported() -> None:
    check_empty_masks(run)


def test_more_alternatives_than_tokens() -> None:
    check_alternatives(run)
