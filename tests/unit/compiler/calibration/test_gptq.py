"""GPTQ against rounding to nearest and against the algorithm as the paper states it, column by column."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.compiler.calibration.gptq import compensation, gptq
from toolkit.compiler.quantize import encode, fit, nearest
from toolkit.passes.quantization import parse_encoding
from toolkit.runtime.encodings import Encoding

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

ENCODINGS = [parse_encoding(name) for name in ("int4", "int4-asym", "int4-g64", "int4-g128-asym", "int5", "int8")]


def problem(seed: int, rows: int, columns: int, rank: int) -> tuple[Floats, Doubles]:
    """Random weights, and the Hessian of inputs whose channels are correlated and differ in size."""
    rng = np.random.default_rng(seed)
    mix = rng.standard_normal((rank, columns)) * rng.lognormal(0, 1, columns)
    x = rng.standard_normal((4 * columns, rank)) @ mix + 0.2 * rng.standard_normal((4 * columns, columns))
    return rng.standard_normal((rows, columns)).astype(np.float32), x.T @ x / len(x)


def product_error(values: Floats, exact: Floats, hessian: Doubles) -> float:
    difference = (values - exact).astype(np.float64)
    return float(np.einsum("nk,nk->", difference @ hessian, difference))


@settings(max_examples=20)
@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(16, 40),
    groups=st.integers(1, 3),
    rank=st.integers(32, 64),
    encoding=st.sampled_from(ENCODINGS),
)
def test_it_beats_rounding_to_nearest(seed: int, rows: int, groups: int, rank: int, encoding: Encoding) -> None:
    weights, hessian = problem(seed, rows, 128 * groups, rank)
    importance = hessian.diagonal().astype(np.float32)
    made = gptq(weights, compensation(hessian), encoding, importance)
    plain = encode(weights, encoding, importance)
    assert made.encoding == encoding
    assert made.data.dtype == plain.data.dtype
    assert product_error(made.decode(), weights, hessian) < product_error(plain.decode(), weights, hessian)


def test_without_correlation_it_is_rounding_to_nearest() -> None:
    weights = np.random.default_rng(0).standard_normal((7, 256)).astype(np.float32)
    importance = np.random.default_rng(1).uniform(0.5, 2, 256).astype(np.float32)
    for encoding in ENCODINGS:
        made = gptq(weights, compensation(np.diag(importance.astype(np.float64))), encoding, importance)
        np.testing.assert_array_equal(made.decode(), encode(weights, encoding, importance).decode())


def test_compensation_is_the_factor_of_the_inverse() -> None:
    for size in (1, 63, 200):
        _, hessian = problem(size, 1, size, 16)
        factor = compensation(hessian).astype(np.float64)
        damped = hessian + np.eye(size) * 0.01 * hessian.diagonal().mean()
        np.testing.assert_array_equal(factor, np.triu(factor))
        np.testing.assert_allclose(factor @ damped @ factor.T, np.eye(size), atol=1e-3)
    assert np.isfinite(compensation(np.zeros((8, 8)))).all()  # inputs that are always 0


@pytest.mark.parametrize("name", ["int4", "int4-asym", "int4-g64"])
def test_it_is_the_papers_update(name: str) -> None:
    """w -= (w_j - round(w_j)) / H⁻¹_jj * H⁻¹_j for one column after another, j leaving H⁻¹ by elimination."""
    encoding = parse_encoding(name)
    weights, hessian = problem(5, 6, 192, 24)
    importance = hessian.diagonal().astype(np.float32)
    left = weights.astype(np.float64)
    inverse = np.linalg.inv(hessian + np.eye(192) * 0.01 * hessian.diagonal().mean())
    expected = np.empty_like(left)
    for column in range(192):
        if column % encoding.group == 0:
            turn = slice(column, column + encoding.group)
            scale, minimum = fit(left[:, turn].astype(np.float32), encoding, importance[turn])
        code = nearest(left[:, column : column + 1].astype(np.float32), scale, minimum, encoding)[:, 0]
        low = 0.0 if minimum is None else minimum.astype(np.float64)
        expected[:, column] = (code - encoding.zero) * scale.astype(np.float64) + low
        error = (left[:, column] - expected[:, column]) / inverse[column, column]
        left -= np.outer(error, inverse[column])
        inverse -= np.outer(inverse[:, column], inverse[column]) / inverse[column, column]
    made = gptq(weights, compensation(hessian), encoding, importance).decode()
    # Ties fall either way in another order of sums: a few codes, and what follows from them, may differ.
    assert np.mean(np.abs(made - expected) < 1e-3) > 0.97
    ours, papers = (product_error(values.astype(np.float32), weights, hessian) for values in (made, expected))
    assert ours == pytest.approx(papers, rel=0.03)
