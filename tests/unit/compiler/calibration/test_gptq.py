"""GPTQ against rounding to nearest and against the algorithm as the paper states it, column by column."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.compiler.calibration.gptq import SHRINKAGE, compensation, gptq
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


def shrunk(hessian: Doubles, share: float) -> Doubles:
    """Correlations count less by a share, and the diagonal more by 1% of its mean."""
    diagonal = np.diag(hessian.diagonal())
    damping = np.eye(len(hessian)) * 0.01 * hessian.diagonal().mean()
    result: Doubles = hessian * (1 - share) + diagonal * share + damping
    return result


def test_compensation_is_the_factor_of_the_inverse() -> None:
    for size, share in ((1, 0.3), (63, 0.0), (200, 0.5)):
        _, hessian = problem(size, 1, size, 16)
        made = compensation(hessian, share)
        factor = made.spread.astype(np.float64)
        np.testing.assert_array_equal(factor, np.triu(factor))
        np.testing.assert_array_equal(np.sort(made.order), np.arange(size))
        assert (np.diff(hessian.diagonal()[made.order]) <= 0).all()
        ordered = shrunk(hessian, share)[np.ix_(made.order, made.order)]
        np.testing.assert_allclose(factor @ ordered @ factor.T, np.eye(size), atol=1e-3)
    assert np.isfinite(compensation(np.zeros((8, 8))).spread).all()  # inputs that are always 0


@pytest.mark.parametrize("name", ["int4", "int4-asym", "int4-g64", "int8"])
def test_it_is_the_papers_update(name: str) -> None:
    """w -= (w_j - round(w_j)) / H⁻¹_jj * H⁻¹_j for one column after another, j leaving H⁻¹ by elimination."""
    encoding = parse_encoding(name)
    weights, hessian = problem(5, 6, 192, 24)
    importance = hessian.diagonal().astype(np.float32)
    scale, minimum = fit(weights.reshape(6, -1, encoding.group), encoding, importance.reshape(-1, encoding.group))
    left = weights.astype(np.float64)
    inverse = np.linalg.inv(shrunk(hessian, SHRINKAGE))
    expected = np.empty_like(left)
    for column in np.argsort(-hessian.diagonal()):
        at = column // encoding.group
        lows = None if minimum is None else minimum[:, at]
        code = nearest(left[:, column : column + 1].astype(np.float32), scale[:, at], lows, encoding)[:, 0]
        low = 0.0 if lows is None else lows.astype(np.float64)
        expected[:, column] = (code - encoding.zero) * scale[:, at].astype(np.float64) + low
        error = (left[:, column] - expected[:, column]) / inverse[column, column]
        left -= np.outer(error, inverse[column])
        inverse -= np.outer(inverse[:, column], inverse[column]) / inverse[column, column]
    made = gptq(weights, compensation(hessian), encoding, importance).decode()
    # Ties fall either way in another order of sums: a few codes, and what follows from them, may differ.
    assert np.mean(np.abs(made - expected) < 1e-3) > 0.97
    ours, papers = (product_error(values.astype(np.float32), weights, hessian) for values in (made, expected))
    assert ours == pytest.approx(papers, rel=0.03)


def test_shrinking_helps_where_the_text_was_another() -> None:
    """A Hessian of few inputs, and the error on others of their kind."""
    encoding, errors = parse_encoding("int4"), np.zeros(2)
    for seed in range(4):
        rng = np.random.default_rng(seed)
        mix = rng.standard_normal((192, 128))
        seen, others = rng.standard_normal((160, 192)) @ mix, rng.standard_normal((4000, 192)) @ mix
        weights, hessian = rng.standard_normal((24, 128)).astype(np.float32), seen.T @ seen / len(seen)
        importance = hessian.diagonal().astype(np.float32)
        for index, how in enumerate((compensation(hessian), compensation(hessian, 0.0))):
            made = gptq(weights, how, encoding, importance).decode()
            errors[index] += product_error(made, weights, others.T @ others / len(others))
    assert errors[0] < 0.97 * errors[1]
