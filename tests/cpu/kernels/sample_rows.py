"""Logits of several characters, and when a sampler's choice is clear."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from toolkit.kernels_templates.reference import SampleRow, kept_probabilities
from toolkit.runtime.step import MAX_TOP

Floats = npt.NDArray[np.float32]


def log_softmax(logits: Floats) -> npt.NDArray[np.float64]:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    result: npt.NDArray[np.float64] = wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    return result


def make_logits(rng: np.random.Generator, count: int, size: int, kind: str) -> Floats:
    """Rows of several characters: `peaked` like a trained model's, `flat`, with many `ties`, with a `far` outlier."""
    x = rng.standard_normal((count, size)) * (3.0 if kind == "peaked" else 0.7)
    if kind == "peaked":
        x[:, rng.integers(0, size, 3)] += 15
    if kind == "ties":
        x = np.round(x * 2) / 2
    if kind == "far":
        x[:, rng.integers(0, size, 2)] = (-1e30, 60)
    result: Floats = x.astype(np.float32)
    return result


KINDS = ("peaked", "flat", "ties", "far")


def check_uniform_draws(sample: Callable[[Floats, list[SampleRow]], Any]) -> None:
    """Every token of a uniform row can be drawn. `sample` gives the results of rows, here and below."""
    rows = [SampleRow(temperature=1.0, seed=3, index=i) for i in range(400)]
    drawn = sample(np.zeros((400, 10), np.float32), rows).results["token"]
    counts = np.bincount(drawn, minlength=10)
    assert counts.min() > 15
    assert counts.max() < 70


def check_empty_masks(sample: Callable[[Floats, list[SampleRow]], Any]) -> None:
    """A mask that allows nothing is reported."""
    logits = make_logits(np.random.default_rng(0), 2, 100, "flat")
    rows = [SampleRow(mask=np.zeros(100, bool), temperature=t) for t in (0.0, 1.0)]
    results = sample(logits, rows).results
    assert results["status"].tolist() == [2, 2]
    assert results["token"].tolist() == [-1, -1]


def check_alternatives(sample: Callable[..., Any]) -> None:
    """More alternatives than tokens; `sample` takes their number."""
    logits = make_logits(np.random.default_rng(0), 1, 3, "flat")
    got = sample(logits, [SampleRow()], top_n=MAX_TOP + 5)
    assert got.top_tokens[0, :3].tolist() == np.argsort(-logits[0]).tolist()
    assert (got.top_tokens[0, 3:] == -1).all()
    assert (got.top_logprobs[0, 3:] == -np.inf).all()


def is_clear(scores: npt.NDArray[np.float64], row: SampleRow) -> bool:
    """Whether a change of rounding cannot change which tokens are kept."""
    order = np.sort(np.maximum(scores, -1e30))[::-1]
    gap = order[row.top_k - 1] - order[row.top_k] if 0 < row.top_k < len(order) else np.inf
    adjusted = bool(row.bias) or row.repetition_penalty != 1 or row.frequency_penalty != 0 or row.presence_penalty != 0
    low, high = replace(row, min_p=row.min_p * (1 + 1e-5)), replace(row, min_p=row.min_p * (1 - 1e-5))
    if row.top_p < 1:
        low, high = replace(low, top_p=row.top_p - 1e-5), replace(high, top_p=row.top_p + 1e-5)
    kept = [kept_probabilities(scores, nearby) > 0 for nearby in (low, high)]
    return bool((kept[0] == kept[1]).all()) and (gap > 1e-5 or not adjusted)
