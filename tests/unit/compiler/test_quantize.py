"""Number conversion against torch's roundings and against brute force."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from toolkit.compiler.quantize import encode, to_bfloat16
from toolkit.runtime.encodings import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    INT4,
    INT8,
    Q4_1,
    Q4_K,
    Q5_0,
    Q5_1,
    Q6_K,
    EncodedArray,
    Encoding,
    e4m3_values,
)

WIDE = tuple(
    Encoding("affine", bits=bits, group=group, zero=8 if bits == 4 and not minimum else 0, has_minimum=minimum)
    for bits in (4, 8)
    for group in (64, 128)
    for minimum in (False, True)
)
AFFINE = (INT4, INT8, Q4_1, Q4_K, Q5_0, Q5_1, Q6_K, *WIDE)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=64))
def test_bfloat16_rounds_as_torch_does(values: list[float]) -> None:
    array = np.array(values, np.float32)
    expected = torch.from_numpy(array).bfloat16().view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(to_bfloat16(array), expected)


def test_floats_are_kept_or_rounded_to_nearest() -> None:
    x = np.random.default_rng(0).standard_normal((5, 7)).astype(np.float32)
    np.testing.assert_array_equal(encode(x, FLOAT32).decode(), x)
    np.testing.assert_array_equal(encode(x, FLOAT16).data, torch.from_numpy(x).half().numpy())
    assert encode(x, BFLOAT16).data.dtype == np.uint16


def test_what_float16_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="65504"):
        encode(np.array([[1.0, 70000.0]], np.float32), FLOAT16)
    with pytest.raises(ValueError, match="multiple of the group"):
        encode(np.ones((2, 33), np.float32), INT8)


@pytest.mark.parametrize("encoding", AFFINE, ids=lambda encoding: encoding.name)
def test_affine_shapes_and_ranges(encoding: Encoding) -> None:
    x = np.random.default_rng(1).standard_normal((3, 4, 256)).astype(np.float32)
    made = encode(x, encoding)
    low, high = (-128, 127) if encoding.bits == 8 else (0, 2**encoding.bits - 1)
    assert made.encoding == encoding
    assert made.data.dtype == (np.int8 if encoding.bits == 8 else np.uint8)
    assert made.data.shape == x.shape
    assert made.data.min() >= low
    assert made.data.max() <= high
    assert made.scale is not None
    assert made.scale.shape == (3, 4, 256 // encoding.group)
    assert made.scale.dtype == encoding.scale
    assert (made.minimum is not None) == encoding.has_minimum


@pytest.mark.parametrize("encoding", AFFINE, ids=lambda encoding: encoding.name)
def test_the_choice_of_range_beats_plain_rounding(encoding: Encoding) -> None:
    """No worse than rounding over the whole range, the usual rule."""
    x = np.random.default_rng(2).standard_normal((64, 256)).astype(np.float32)
    groups = x.reshape(-1, encoding.group)
    steps = 2**encoding.bits - 1
    span = groups.max(1) - groups.min(1) if encoding.has_minimum else 2 * np.abs(groups).max(1)
    step = (span / steps)[:, None]
    plain = np.rint(groups / step) * step
    assert mean_square(encode(x, encoding).decode(), x) <= 1.05 * mean_square(plain.reshape(x.shape), x)


def test_minima_serve_groups_that_are_not_centered() -> None:
    """With a minimum, the error is that of rounding to steps of the group's range, wherever that lies."""
    x = np.random.default_rng(8).uniform(3.0, 4.0, (8, 256)).astype(np.float32)
    for encoding in AFFINE:
        if encoding.has_minimum:
            step = 1.0 / (2**encoding.bits - 1)
            assert mean_square(encode(x, encoding).decode(), x) <= 1.4 * step**2 / 12


def test_important_columns_are_closer() -> None:
    rng = np.random.default_rng(9)
    x = rng.standard_normal((64, 256)).astype(np.float32)
    importance = rng.choice(np.array([0.01, 10.0], np.float32), 256)
    for encoding in (INT4, Q4_1):
        plain, weighed = (np.square(encode(x, encoding, w).decode() - x) for w in (None, importance))
        assert (weighed @ importance).sum() < 0.9 * (plain @ importance).sum()


def mean_square(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.square(a - b).mean())


@pytest.mark.parametrize("encoding", AFFINE, ids=lambda encoding: encoding.name)
def test_what_an_encoding_holds_exactly_comes_back(encoding: Encoding) -> None:
    """Encoding the decoded values again reproduces them, up to float16 scales."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((16, 256)).astype(np.float32)
    once = encode(x, encoding).decode()
    twice = encode(once, encoding).decode()
    assert mean_square(twice, once) <= 0.05 * mean_square(once, x)


def test_zeros_and_constants() -> None:
    for encoding in AFFINE:
        zeros = encode(np.zeros((2, 256), np.float32), encoding)
        np.testing.assert_array_equal(zeros.decode(), 0.0)
        constant = encode(np.full((1, 256), -0.75, np.float32), encoding).decode()
        np.testing.assert_allclose(constant, -0.75, rtol=2e-3)


def test_codes_are_the_nearest_for_their_scale() -> None:
    x = np.random.default_rng(4).standard_normal((8, 64)).astype(np.float32)
    made = encode(x, INT8)
    assert made.scale is not None
    for shift in (-1, 1):
        codes = np.clip(made.data.astype(np.int16) + shift, -128, 127).astype(np.int8)
        moved = EncodedArray(INT8, codes, made.scale).decode()
        assert (np.abs(moved - x) >= np.abs(made.decode() - x) - 1e-6).all()


def test_8_bit_floats_are_the_nearest_with_ties_to_even() -> None:
    encoding = Encoding("affine", 8, 32, scale="float32", levels="e4m3")
    values = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
    values *= np.exp2(np.random.default_rng(1).integers(-12, 3, values.shape)).astype(np.float32)
    made = encode(values, encoding)
    assert made.scale is not None
    scaled = values.reshape(64, -1, 32) / made.scale.astype(np.float32)[..., None]
    expected = torch.from_numpy(scaled).to(torch.float8_e4m3fn).view(torch.int8).numpy().reshape(values.shape)
    different = made.data != expected  # a product by the reciprocal may be on the other side of a tie
    assert different.mean() < 1e-3
    assert np.abs(made.decode() - values).max() <= np.abs(values).max() / 16
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(e4m3_values(), numbers)
