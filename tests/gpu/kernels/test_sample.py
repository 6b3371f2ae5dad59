"""The CUDA sampler against numpy: greedy, every filter and penalty, log-probabilities, and harmful input."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from cpu.kernels.sample_rows import (
    KINDS,
    check_alternatives,
    check_empty_masks,
    check_uniform_draws,
    is_clear,
    log_softmax,
    make_logits,
)
from gpu.kernels.harness import Buffer, run
from gpu.kernels.numbers import store, value

from toolkit.kernels_templates.cuda.sample import sample_parts, sample_scratch
from toolkit.kernels_templates.reference import SampleRow, kept_probabilities, scores_of, uniform
from toolkit.runtime.step import MAX_TOP, RESULT, ROW

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]
REALS = ("float32", "float16", "bfloat16")


@dataclass
class Sampled:
    logits: Floats
    """As the kernel reads them."""
    results: Array
    top_tokens: Array
    top_logprobs: Floats
    logprobs: list[Floats]


def sample(logits: Floats, rows: list[SampleRow], real: str = "float32", top_n: int = 0, full: bool = False) -> Sampled:
    """Draw a token from each row. The last token of a history is known to `tokens` alone, as while a step is queued."""
    count, size = logits.shape
    stored = store(logits, real)
    packed, alive = np.zeros(count, ROW), []
    tokens = np.full(count + 5, -7, np.int32)

    def point(record: Any, name: str, array: Array) -> Buffer:
        alive.append(Buffer(array))
        record[name] = alive[-1].address
        return alive[-1]

    full_rows = []
    for index, (record, row) in enumerate(zip(packed, rows, strict=True)):
        for name in set(ROW.names or ()) & set(row.__dict__) - {"mask"}:
            record[name] = getattr(row, name)
        record["top_n"], record["token"] = top_n, index + 3
        history = [*row.prompt, *row.output]
        if history and row.sample:
            tokens[index + 3], history[-1] = history[-1], 2**30
        point(record, "history", np.array(history, np.int32))
        record["prompt_length"], record["history_length"] = len(row.prompt), len(history)
        point(record, "bias_tokens", np.array([token for token, _ in row.bias], np.int32))
        point(record, "bias_values", np.array([value for _, value in row.bias], np.float32))
        record["bias_count"] = len(row.bias)
        if row.mask is not None:
            bits = np.zeros(-(-len(row.mask) // 32) * 32, np.uint8)
            bits[: len(row.mask)] = row.mask
            point(record, "mask", np.packbits(bits, bitorder="little").view(np.uint32))
        if full:
            full_rows.append(point(record, "logprobs", np.full(size, np.nan, np.float32)))
    parts = np.empty((count, sample_parts(size)), np.uint8)
    parts = run("sample_measure", {"real": real}, logits=stored, parts=parts, R=count, V=size)["parts"]
    found = run(
        "sample",
        {"real": real},
        logits=stored,
        parts=parts,
        rows=packed.view(np.uint8),
        tokens=tokens,
        results=np.full((count, RESULT.itemsize), 0xFF, np.uint8),
        top_tokens=np.full((count, MAX_TOP), -9, np.int32),
        top_logprobs=np.full((count, MAX_TOP), np.nan, np.float32),
        scratch=np.full((count, sample_scratch(size)), 0xFF, np.uint8),
        R=count,
        V=size,
    )
    logprobs = [buffer.read() for buffer in full_rows]
    read = value(stored, real).astype(np.float32)
    return Sampled(read, found["results"].view(RESULT)[:, 0], found["top_tokens"], found["top_logprobs"], logprobs)


@pytest.mark.parametrize("real", REALS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 7, 5003, 49152, 128256])
def test_greedy_scoring_and_logprobs(size: int, kind: str, real: str) -> None:
    if kind == "far" and real == "float16":
        pytest.skip("1e30 is no float16")
    logits = make_logits(np.random.default_rng(size), 4, size, kind)
    targets = [-1, 0, size - 1, size]  # row 0 is greedy; the last target is none
    rows = [SampleRow(sample=i == 0, target=target) for i, target in enumerate(targets)]
    got = sample(logits, rows, real, top_n=min(5, size), full=True)
    want = log_softmax(got.logits)
    best = [int(got.logits[0].argmax()), 0, size - 1]
    assert (got.results["status"] == 0).all()
    assert got.results["token"].tolist() == [*best, size]
    for i, token in enumerate(best):
        assert got.results["rank"][i] == 1 + (got.logits[i] > got.logits[i, token]).sum()
        np.testing.assert_allclose(got.results["logprob"][i], want[i, token], rtol=2e-6, atol=4e-6)
    assert got.results["rank"][3] == 0
    assert np.isnan(got.results["logprob"][3])
    np.testing.assert_allclose(np.stack(got.logprobs), want, rtol=2e-6, atol=4e-6)
    order = np.argsort(-got.logits, axis=1, kind="stable")[:, : min(5, size)]
    np.testing.assert_array_equal(got.top_tokens[:, : order.shape[1]], order)
    np.testing.assert_allclose(
        got.top_logprobs[:, : order.shape[1]], np.take_along_axis(want, order, 1), rtol=2e-6, atol=4e-6
    )


def make_row(rng: np.random.Generator) -> SampleRow:
    def one(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    def tokens() -> tuple[int, ...]:
        return tuple(rng.integers(-2, 400, rng.integers(0, 30)).tolist())

    return SampleRow(
        temperature=one(0.0, 0.3, 1.0, 1.7),
        top_k=one(0, 0, 1, 2, 40, 900, 10**6),
        top_p=one(1.0, 1.0, 0.0, 0.3, 0.9, 0.999),
        min_p=one(0.0, 0.0, 0.02, 1.0),
        repetition_penalty=one(1.0, 1.0, 1.3, 0.8),
        frequency_penalty=one(0.0, 0.0, 0.4),
        presence_penalty=one(0.0, 0.0, 0.7, -0.5),
        seed=int(rng.integers(0, 2**63)) * 2,
        index=int(rng.integers(0, 2**33)),
        prompt=tokens(),
        output=tokens(),
        bias=tuple(
            (int(t), float(np.float32(v))) for t, v in zip(rng.integers(-2, 400, 4), rng.normal(0, 4, 4), strict=True)
        )
        if rng.random() < 0.3
        else (),
    )


@pytest.mark.parametrize("real", REALS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [5, 300, 4099, 49152])
def test_draws_follow_the_distribution(size: int, kind: str, real: str) -> None:
    if kind == "far" and real == "float16":
        pytest.skip("1e30 is no float16")
    rng = np.random.default_rng([size, *kind.encode()])
    rows = [make_row(rng) for _ in range(120 if size < 10000 else 24)]
    masks = [rng.random(size) < 0.4 if rng.random() < 0.3 else None for _ in rows]
    rows = [
        replace(row, mask=mask if mask is not None and mask.any() else None)
        for row, mask in zip(rows, masks, strict=True)
    ]
    got = sample(make_logits(rng, len(rows), size, kind), rows, real)
    want, checked = log_softmax(got.logits), 0
    for i, row in enumerate(rows):
        result, scores = got.results[i], scores_of(got.logits[i], row)
        token = int(result["token"])
        assert result["status"] == 0
        np.testing.assert_allclose(result["logprob"], want[i, token], rtol=2e-6, atol=4e-6)
        assert result["rank"] == 1 + (got.logits[i] > got.logits[i, token]).sum()
        if row.temperature == 0:
            assert scores[token] >= scores.max() - 1e-5
        elif is_clear(scores, row):
            cumulative = np.cumsum(kept_probabilities(scores, row))
            at, checked = uniform(row.seed, row.index), checked + 1
            assert (cumulative[token - 1] if token else 0.0) - 2e-5 <= at <= cumulative[token] + 2e-5
    assert checked > len(rows) // 4


@pytest.mark.parametrize("real", REALS)
@pytest.mark.parametrize("kind", KINDS)
def test_filters_on_a_real_vocabulary(kind: str, real: str) -> None:
    if kind == "far" and real == "float16":
        pytest.skip("1e30 is no float16")
    plain = SampleRow(temperature=0.8, seed=9, index=3)
    changes: list[dict[str, Any]] = [{}, {"top_k": 50}, {"top_k": 3000}, {"top_p": 0.5}, {"top_p": 0.99}]
    rows = [replace(plain, **change) for change in [*changes, {"top_k": 700, "top_p": 0.8}]]
    logits = np.repeat(make_logits(np.random.default_rng(5), 1, 128256, kind), len(rows), axis=0)
    got = sample(logits, rows, real)
    for i, row in enumerate(rows):
        token = int(got.results["token"][i])
        cumulative = np.cumsum(kept_probabilities(scores_of(got.logits[i], row), row))
        assert (cumulative[token - 1] if token else 0.0) - 1e-4 <= uniform(9, 3) <= cumulative[token] + 1e-4


def test_a_draw_depends_on_its_row_alone() -> None:
    logits = make_logits(np.random.default_rng(2), 6, 15000, "flat")
    rows = [SampleRow(temperature=1.0, top_p=0.9, seed=1, index=i, output=(1, 2, 3)) for i in range(6)]
    together = sample(logits, rows).results
    alone = [sample(logits[i : i + 1], [row]).results[0] for i, row in enumerate(rows)]
    assert together.tolist() == [result.tolist() for result in alone]
    assert len(set(together["token"].tolist())) > 1


def test_every_token_of_a_uniform_row_can_be_drawn() -> None:
    check_uniform_draws(sample)


@pytest.mark.parametrize("real", REALS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_are_reported(bad: float, real: str) -> None:
    logits = make_logits(np.random.default_rng(0), 3, 12340, "flat")
    logits[1, 777] = bad
    row = SampleRow(temperature=1.0, top_k=5)
    results = sample(logits, [row] * 3, real, top_n=3, full=True).results
    assert results["status"].tolist() == [0, 1, 0]
    assert results["token"][1] == -1


def test_a_mask_that_allows_nothing_is_reported() -> None:
    check_empty_masks(sample)


def test_more_alternatives_than_tokens() -> None:
    check_alternatives(sample)
