"""Logits of several characters, and when a sampler's choice is clear."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from toolkit.kernels_templates.reference import SampleRow, kept_probabilities

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
