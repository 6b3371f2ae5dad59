import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.kernels_templates.packing import (
    Layout,
    layout_bytes,
    pack,
    panel_encodings,
    q8_pack,
    q8_row_bytes,
    q8_unpack,
    unpack,
)
from toolkit.runtime import encodings
from toolkit.runtime.encodings import EncodedArray, Encoding
from toolkit.runtime.errors import InternalError

FLOATS = (encodings.FLOAT32, encodings.FLOAT16, encodings.BFLOAT16)
AFFINE = tuple(
    Encoding("affine", bits, group, 0 if minimum or bits == 8 else 1 << (bits - 1), scale, minimum)
    for bits in (2, 3, 4, 5, 6, 8)
    for group in (16, 32, 64, 128)
    for scale in ("float16", "float32")
    for minimum in (False, True)
)
FLOAT8 = Encoding("affine", 8, 128, scale="float32", levels="e4m3")
GGUF = (
    encodings.Q2_K,
    encodings.Q3_K,
    encodings.IQ4_NL,
    encodings.IQ4_XS,
    Encoding("affine", 4, 16, levels="e2m1"),
    encodings.Q4_0,
    encodings.Q4_1,
    encodings.Q5_0,
    encodings.Q5_1,
    encodings.Q8_0,
    encodings.Q4_K,
    encodings.Q5_K,
    encodings.Q6_K,
)


def random_array(encoding: Encoding, rows: int, columns: int, seed: int) -> EncodedArray:
    """All bit patterns occur, NaN included."""
    rng = np.random.default_rng(seed)
    if encoding.kind != "affine":
        width = 4 if encoding.kind == "float32" else 2
        raw = rng.integers(0, 256, (rows, columns * width), np.uint8)
        return EncodedArray(encoding, raw.view({"float32": "f4", "float16": "f2", "bfloat16": "u2"}[encoding.kind]))
    codes = rng.integers(0, 1 << encoding.bits, (rows, columns), np.uint8)
    scales = rng.standard_normal((2, rows, columns // encoding.unit)).astype(encoding.scale)
    factors = rng.integers(0, 256, (2, rows, columns // encoding.group), np.uint8)
    return EncodedArray(
        encoding,
        codes.view(np.int8) if encoding.bits == 8 else codes,
        scales[0],
        scales[1] if encoding.has_minimum else None,
        factors[0].view(np.int8) if encoding.block else None,
        factors[1] if encoding.block and encoding.has_minimum else None,
    )


def same(a: npt.NDArray[np.generic] | None, b: npt.NDArray[np.generic] | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def assert_equal(a: EncodedArray, b: EncodedArray) -> None:
    assert a.encoding == b.encoding
    assert same(a.data, b.data)
    assert same(a.scale, b.scale)
    assert same(a.minimum, b.minimum)
    assert same(a.factors, b.factors)
    assert same(a.minimum_factors, b.minimum_factors)


@given(
    st.sampled_from(FLOATS + AFFINE + GGUF),
    st.integers(1, 50),
    st.integers(1, 3),
    st.integers(0, 31),
    st.integers(0, 999),
)
def test_panel16_returns_what_it_was_given(encoding: Encoding, rows: int, wholes: int, odd: int, seed: int) -> None:
    columns = wholes * max(encoding.unit, 32) + (odd if encoding.kind != "affine" else 0)
    array = random_array(encoding, rows, columns, seed)
    data = pack("panel16", array)
    assert data.nbytes == layout_bytes("panel16", encoding, array.shape)
    assert_equal(unpack("panel16", encoding, array.shape, data), array)


@given(st.sampled_from((*AFFINE, *GGUF, FLOAT8)), st.integers(1, 50), st.integers(1, 3), st.integers(0, 999))
def test_operand16_returns_what_it_was_given(encoding: Encoding, rows: int, wholes: int, seed: int) -> None:
    array = random_array(encoding, rows, wholes * max(encoding.unit, 32), seed)
    data = pack("operand16", array)
    assert data.nbytes == layout_bytes("operand16", encoding, array.shape)
    assert_equal(unpack("operand16", encoding, array.shape, data), array)


def test_operand16_words_are_what_a_lane_multiplies() -> None:
    codes = np.tile(np.arange(32, dtype=np.int8), (16, 1))
    packed = pack("operand16", EncodedArray(encodings.INT8, codes, np.ones((16, 1), np.float16)))
    words = packed[-16 * 32 :].reshape(8, 16, 4)
    assert words[:, 3].tolist() == [[16 * h + k + 2 * t for k in (0, 1, 8, 9)] for h in (0, 1) for t in range(4)]


@given(st.sampled_from(FLOATS), st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(0, 999))
def test_rows_returns_what_it_was_given(encoding: Encoding, shape: list[int], seed: int) -> None:
    flat = random_array(encoding, 1, int(np.prod(shape)), seed)
    array = EncodedArray(encoding, flat.data.reshape(shape))
    data = pack("rows", array)
    assert data.nbytes == layout_bytes("rows", encoding, shape)
    assert data.tobytes() == array.data.tobytes()
    assert_equal(unpack("rows", encoding, shape, data), array)


@pytest.mark.parametrize("encoding", FLOATS + GGUF, ids=lambda e: e.name)
def test_chunks_join_to_the_whole(encoding: Encoding) -> None:
    array = random_array(encoding, 75, 256, 1)
    parts = [pack("panel16", array.rows(start, start + 32)) for start in range(0, 75, 32)]
    assert np.concatenate(parts).tobytes() == pack("panel16", array).tobytes()


def test_codes_are_stored_compactly() -> None:
    wide = (Encoding("affine", 4, 64, 8), Encoding("affine", 4, 128, has_minimum=True), Encoding("affine", 8, 128))
    bits = {e.name: layout_bytes("panel16", e, (1600, 512)) * 8 / (1600 * 512) for e in GGUF + wide}
    assert bits == {
        "a4g32": 4.5,
        "a4g32m": 5.0,
        "a5g32": 5.5,
        "a5g32m": 6.0,
        "a8g32": 8.5,
        "a2g16mk": 3.125,
        "a3g16k": 3.5625,
        "a4g32mk": 4.625,
        "a5g32mk": 5.625,
        "a6g16k": 6.5625,
        "iq4g32": 4.5,
        "iq4g32k": 4.3125,
        "e2m1g16": 5.0,
        "a4g64": 4.25,
        "a4g128m": 4.25,
        "a8g128": 8.125,
    }


def test_columns_of_a_word_are_neighbors() -> None:
    codes = np.arange(16 * 32, dtype=np.int64).reshape(16, 32) % 251
    array = EncodedArray(encodings.Q8_0, codes.astype(np.uint8).view(np.int8), np.ones((16, 1), np.float16))
    words = pack("panel16", array)[-16 * 32 :].reshape(8, 16, 4)
    assert (words[3, 5] == codes[5, 12:16]).all()


def test_names_tell_all_that_a_kernel_needs() -> None:
    assert {e.name for e in FLOATS + AFFINE + GGUF} <= set(panel_encodings())


@pytest.mark.parametrize(
    ("layout", "array"),
    [
        ("rows", random_array(encodings.Q4_0, 4, 32, 0)),
        ("panel16", EncodedArray(encodings.FLOAT32, np.ones(5, np.float32))),
        ("panel16", random_array(Encoding("affine", 4, 32, zero=7), 4, 32, 0)),
        ("panel16", random_array(Encoding("affine", 4, 16, zero=8), 4, 16, 0)),
        ("panel16", random_array(Encoding("affine", 7, 32, zero=64), 4, 32, 0)),
        ("panel16", random_array(Encoding("affine", 4, 128, zero=8), 4, 64, 0)),
    ],
)
def test_what_a_layout_cannot_hold_is_refused(layout: Layout, array: EncodedArray) -> None:
    with pytest.raises(InternalError, match="cannot hold"):
        pack(layout, array)


def test_wrong_number_of_bytes_is_refused() -> None:
    with pytest.raises(InternalError, match="has 64 bytes, found 60"):
        unpack("rows", encodings.FLOAT32, (4, 4), np.zeros(60, np.uint8))


@given(st.integers(1, 5), st.integers(1, 9), st.floats(1e-3, 1e6), st.integers(0, 999))
def test_q8_is_within_half_a_step(rows: int, groups: int, size: float, seed: int) -> None:
    x = (np.random.default_rng(seed).standard_normal((rows, groups * 32)) * size).astype(np.float32)
    packed = q8_pack(x)
    assert packed.shape == (rows, q8_row_bytes(groups * 32))
    assert packed.shape[1] % 64 == 0
    step = np.abs(x.reshape(rows, groups, 32)).max(axis=2).repeat(32, axis=1) / 127
    assert (np.abs(q8_unpack(packed, groups * 32) - x) <= step * 0.5001).all()


def test_q8_sums_are_those_of_the_codes() -> None:
    x = np.random.default_rng(3).standard_normal((4, 96)).astype(np.float32)
    packed = q8_pack(x)
    sums = packed[:, 96 + 12 : 96 + 24].copy().view(np.float32)
    assert np.allclose(sums, q8_unpack(packed, 96).reshape(4, 3, 32).sum(axis=2), rtol=1e-5, atol=1e-5)


def test_q8_of_zero_and_tiny_groups_is_zero_and_nan_stays() -> None:
    x = np.zeros((1, 96), np.float32)
    x[0, 32:64] = 1e-38
    x[0, 70] = np.nan
    values = q8_unpack(q8_pack(x), 96)
    assert (values[0, :64] == 0).all()
    assert np.isnan(values[0, 64:]).all()
