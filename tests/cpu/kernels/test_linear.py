"""The families of `kernels_templates/cpu/linear.py` against float64 products of the decoded numbers."""

import numpy as np
import numpy.typing as npt
import pytest
from cpu.kernels.harness import Guarded, Kernel, aligned, assert_q8, isas, load_kernel, random_floats
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from toolkit.kernels_templates.catalog import KernelSpec, ParamValue
from toolkit.kernels_templates.expression import evaluate, parse
from toolkit.kernels_templates.packing import Layout, pack, q8_pack, q8_row_bytes, q8_unpack
from toolkit.runtime import encodings
from toolkit.runtime.encodings import EncodedArray, Encoding
from toolkit.runtime.plan import IsaName

Floats = npt.NDArray[np.float32]

GGUF = (
    encodings.Q4_0,
    encodings.Q4_1,
    encodings.Q5_0,
    encodings.Q5_1,
    encodings.Q8_0,
    encodings.Q4_K,
    encodings.Q5_K,
    encodings.Q6_K,
    encodings.Q2_K,
    encodings.Q3_K,
    encodings.IQ4_NL,
    encodings.IQ4_XS,
)
FLOATS = (encodings.FLOAT32, encodings.FLOAT16, encodings.BFLOAT16)
INT4_64 = Encoding("affine", bits=4, group=64, zero=8)
INT4_128 = Encoding("affine", bits=4, group=128, has_minimum=True)
AWQ = Encoding("affine", bits=4, group=128, scale="float32", has_minimum=True)
MXFP4 = Encoding("affine", bits=4, group=32, scale="float32", levels="e2m1")
OTHERS = (
    INT4_64,
    INT4_128,
    AWQ,
    MXFP4,
    Encoding("affine", bits=4, group=16, zero=8),
    Encoding("affine", bits=5, group=64, zero=16),
    Encoding("affine", bits=6, group=32, has_minimum=True),
    Encoding("affine", bits=8, group=16, scale="float32", has_minimum=True),
    Encoding("affine", bits=8, group=64),
    Encoding("affine", bits=8, group=128, has_minimum=True),
    Encoding("affine", bits=3, group=128, zero=4),
)
V4 = (encodings.BFLOAT16, encodings.Q4_1, encodings.Q6_K, encodings.Q8_0, encodings.Q2_K, encodings.IQ4_XS, INT4_128)
"""Each of v4's own code paths; all encodings would take long where v4 is emulated."""
TABLES = (encodings.Q4_1, encodings.Q5_0, encodings.Q8_0, INT4_64, INT4_128, OTHERS[7], MXFP4, *GGUF[5:])
CASES = [(encoding, isa) for isa in isas() for encoding in (V4 if isa == "x86-64-v4" else (*FLOATS, *GGUF, *OTHERS))]


def name(value: Encoding | str) -> str:
    """Of a test's parameter."""
    return value.name if isinstance(value, Encoding) else value


def random_weight(rng: np.random.Generator, encoding: Encoding, rows: int, columns: int) -> EncodedArray:
    values = rng.standard_normal((rows, columns), np.float32)
    if encoding.kind == "bfloat16":
        return EncodedArray(encoding, (values.view(np.uint32) >> 16).astype(np.uint16))
    if encoding.kind != "affine":
        return EncodedArray(encoding, values.astype(encoding.kind))
    codes = rng.integers(0, 1 << encoding.bits, (rows, columns), np.uint8)
    scales = rng.standard_normal((2, rows, columns // encoding.unit)).astype(encoding.scale)
    data = codes.view(np.int8) if encoding.bits == 8 else codes
    minimum = scales[1] if encoding.has_minimum else None
    if not encoding.block:
        return EncodedArray(encoding, data, scales[0], minimum)
    factors = rng.integers(-32, 64, (rows, columns // encoding.group), np.int8)
    return EncodedArray(
        encoding, data, scales[0], minimum, factors, None if minimum is None else abs(factors).view(np.uint8)
    )


def linear(
    encoding: Encoding,
    isa: IsaName = "x86-64-v3",
    *,
    bias: bool = False,
    epilogue: str = "",
    extras: str = "",
    gated: bool = False,
    q8: bool = False,
) -> Kernel:
    """The kernel; `extras` has a letter for each extra input."""
    params: dict[str, ParamValue] = {"encoding": encoding.name, "has_bias": bias, "epilogue": epilogue}
    kinds = {f"extra{i + 1}": extras[i : i + 1] for i in range(4)}
    return load_kernel(KernelSpec("linear", {**params, **kinds, "gated": gated, "float_out": True, "q8_out": q8}), isa)


def activations(encoding: Encoding, x: Floats) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.float64]]:
    """What the kernel reads for x, and the numbers that stands for."""
    if encoding.kind != "affine":
        return aligned(x), x.astype(np.float64)
    packed = aligned(q8_pack(x))
    return packed, q8_unpack(packed, x.shape[1]).astype(np.float64)


def product(kernel: Kernel, x: Floats, weight: EncodedArray, threads: int = 1) -> Floats:
    rows, columns = x.shape
    out = Guarded((rows, weight.shape[0]), np.float32)
    read, _ = activations(weight.encoding, x)
    kernel(read, aligned(pack("panel16", weight)), out.array, rows, weight.shape[0], columns, threads=threads)
    out.check()
    result: Floats = out.array
    return result


def tolerance(weight: EncodedArray, x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Of a float32 sum: relative to the magnitudes that were added."""
    size = np.abs(weight.decode().astype(np.float64))
    if weight.minimum is not None:
        minima = replace(weight, data=np.zeros_like(weight.data)).decode()
        size = size + 2 * np.abs(minima.astype(np.float64))
    result: npt.NDArray[np.float64] = 1e-6 * (np.abs(x) @ size.T) + 1e-6
    return result


@pytest.mark.parametrize(("encoding", "isa"), CASES, ids=name)
@pytest.mark.parametrize(
    ("rows", "outputs", "columns"), [(1, 80, 64), (1, 161, 2048), (3, 37, 128), (70, 19, 1152), (17, 5, 96)]
)
def test_linear_is_the_product(encoding: Encoding, isa: IsaName, rows: int, outputs: int, columns: int) -> None:
    columns = -(-columns // max(encoding.unit, 1)) * max(encoding.unit, 1)
    rng = np.random.default_rng(rows)
    x, weight = random_floats(rng, rows, columns), random_weight(rng, encoding, outputs, columns)
    _, exact_x = activations(encoding, x)
    expected = exact_x @ weight.decode().astype(np.float64).T
    got = product(linear(encoding, isa), x, weight, threads=3)
    assert (np.abs(got - expected) <= tolerance(weight, exact_x)).all()


@given(
    case=st.sampled_from(CASES),
    shape=st.tuples(st.integers(1, 33), st.integers(1, 70), st.integers(1, 5)),
    threads=st.integers(1, 4),
    seed=st.integers(0, 99),
)
@settings(max_examples=150, deadline=None)
def test_linear_of_any_shape(
    case: tuple[Encoding, IsaName], shape: tuple[int, int, int], threads: int, seed: int
) -> None:
    (encoding, isa), (rows, outputs, units) = case, shape
    rng = np.random.default_rng(seed)
    columns = units * max(encoding.unit, 32) if encoding.kind == "affine" else 17 * units
    x, weight = random_floats(rng, rows, columns), random_weight(rng, encoding, outputs, columns)
    _, exact_x = activations(encoding, x)
    expected = exact_x @ weight.decode().astype(np.float64).T
    got = product(linear(encoding, isa), x, weight, threads=threads)
    assert (np.abs(got - expected) <= tolerance(weight, exact_x)).all()


@pytest.mark.parametrize(("encoding", "isa"), [case for case in CASES if case[0].kind != "affine"], ids=name)
@pytest.mark.parametrize("columns", [1, 7, 33])
def test_float_weights_take_any_number_of_columns(encoding: Encoding, isa: IsaName, columns: int) -> None:
    rng = np.random.default_rng(columns)
    x, weight = random_floats(rng, 8, columns), random_weight(rng, encoding, 20, columns)
    expected = x.astype(np.float64) @ weight.decode().astype(np.float64).T
    assert np.allclose(product(linear(encoding, isa), x, weight), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("encoding", "isa"), CASES, ids=name)
def test_a_row_does_not_depend_on_other_rows_or_threads(encoding: Encoding, isa: IsaName) -> None:
    """Batched equals alone, bit for bit."""
    rng = np.random.default_rng(5)
    columns = max(1152, encoding.unit * 9)
    x, weight = random_floats(rng, 67, columns), random_weight(rng, encoding, 150, columns)
    kernel = linear(encoding, isa)
    whole = product(kernel, x, weight)
    for start, count, threads in [(0, 1, 1), (1, 1, 2), (2, 2, 3), (4, 3, 1), (7, 6, 2), (13, 8, 12), (21, 46, 2)]:
        part = product(kernel, x[start : start + count].copy(), weight, threads)
        assert np.array_equal(part, whole[start : start + count]), (start, count, threads)


@pytest.mark.parametrize(("encoding", "isa"), [case for case in CASES if case[0].kind == "affine"], ids=name)
@pytest.mark.parametrize("rows", [1, 2])
def test_largest_codes_do_not_overflow(encoding: Encoding, isa: IsaName, rows: int) -> None:
    columns = max(64, encoding.unit)
    x = np.ones((rows, columns), np.float32)
    x[:, 1::2] = 1 - 2 * (np.arange(rows, dtype=np.float32)[:, None] % 2)
    largest = 0 if encoding.levels else -128 if encoding.bits == 8 else 2**encoding.bits - 1
    codes = np.full((16, columns), largest, np.int8 if encoding.bits == 8 else np.uint8)
    one = np.ones((16, columns // encoding.unit), encoding.scale)
    most = np.full((16, columns // encoding.group), 127, np.int8)
    numbers = (one, one if encoding.has_minimum else None, most if encoding.block else None)
    weight = EncodedArray(encoding, codes, *numbers, most.view(np.uint8) if encoding.name.endswith("mk") else None)
    expected = x.astype(np.float64) @ weight.decode().astype(np.float64).T
    assert np.allclose(product(linear(encoding, isa), x, weight), expected, rtol=1e-6, atol=1e-3)


@pytest.mark.parametrize("encoding", [encodings.FLOAT32, encodings.Q4_0, encodings.Q6_K], ids=name)
@pytest.mark.parametrize("rows", [1, 5])
def test_nan_reaches_what_depends_on_it_and_nothing_else(encoding: Encoding, rows: int) -> None:
    rng = np.random.default_rng(2)
    x, weight = random_floats(rng, rows, 256), random_weight(rng, encoding, 40, 256)
    x[rows - 1, 77] = np.nan
    poisoned = weight.data if weight.scale is None else weight.scale
    poisoned[13, -1] = np.nan
    nan = np.isnan(product(linear(encoding), x, weight, threads=2))
    expected = np.zeros((rows, 40), bool)
    expected[rows - 1], expected[:, 13] = True, True
    assert np.array_equal(nan, expected)


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("rows", [1, 9])
def test_epilogue_sees_bias_and_extras(isa: IsaName, rows: int) -> None:
    rng, outputs = np.random.default_rng(3), 43
    x, weight = random_floats(rng, rows, 64), random_weight(rng, encodings.Q4_1, outputs, 64)
    bias, column = random_floats(rng, outputs), random_floats(rng, outputs)
    same, out = random_floats(rng, rows, outputs), Guarded((rows, outputs), np.float32)
    residual = random_floats(rng, rows, outputs)
    out.array[...] = residual
    epilogue = "(add (mul (silu in0) in1) (mul in2 (add in3 0.5)))"
    kernel = linear(encodings.Q4_1, isa, bias=True, epilogue=epilogue, extras="tnt")
    read, exact_x = activations(encodings.Q4_1, x)
    packed = aligned(pack("panel16", weight))
    kernel(read, packed, bias, same, column, out.array, out.array, rows, outputs, 64, threads=2)
    out.check()
    in0 = exact_x @ weight.decode().astype(np.float64).T + bias
    expected = evaluate(parse(epilogue), [in0, same, column, residual])
    assert np.allclose(out.array, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("encoding", [encodings.Q4_1, encodings.FLOAT32], ids=name)
@pytest.mark.parametrize(("rows", "threads"), [(1, 3), (9, 1), (70, 2)])
def test_halves_and_codes(encoding: Encoding, isa: IsaName, rows: int, threads: int) -> None:
    """A gated layer's result is made of both halves of its columns, and the codes are those of its floats."""
    rng, width = np.random.default_rng(rows), 96
    x, weight = random_floats(rng, rows, 64), random_weight(rng, encoding, 2 * width, 64)
    bias, residual = random_floats(rng, 2 * width), random_floats(rng, rows, width)
    out, q8 = Guarded((rows, width), np.float32), Guarded((rows, q8_row_bytes(width)), np.uint8)
    epilogue = "(add (mul (silu in0) in1) in2)"
    kernel = linear(encoding, isa, bias=True, epilogue=epilogue, extras="t", gated=True, q8=True)
    read, exact_x = activations(encoding, x)
    packed = aligned(pack("panel16", weight))
    kernel(read, packed, bias, residual, out.array, q8.array, rows, 2 * width, 64, threads=threads)
    out.check()
    q8.check()
    product = exact_x @ weight.decode().astype(np.float64).T + bias
    expected = evaluate(parse(epilogue), [product[:, :width], product[:, width:], residual])
    assert np.allclose(out.array, expected, rtol=1e-4, atol=1e-4)
    assert_q8(q8.array, out.array)


@pytest.mark.parametrize("isa", isas())
def test_quantize_equals_the_reference_whatever_the_threads(isa: IsaName) -> None:
    x = random_floats(np.random.default_rng(1), 5, 96)
    x[2, 32:64] = 0
    x[3] *= np.float32(1e20)
    out = Guarded((5, q8_row_bytes(96)), np.uint8)
    load_kernel(KernelSpec("quantize"), isa)(x, out.array, 5, 96, threads=4)
    out.check()
    used = 96 + 2 * 4 * 3
    assert np.array_equal(out.array[:, :used], q8_pack(x)[:, :used])


@pytest.mark.parametrize("isa", isas())
def test_quantize_keeps_nan_in_its_group(isa: IsaName) -> None:
    x = random_floats(np.random.default_rng(1), 1, 96)
    x[0, 40] = np.nan
    out = Guarded((1, q8_row_bytes(96)), np.uint8)
    load_kernel(KernelSpec("quantize"), isa)(x, out.array, 1, 96)
    scales_and_sums = out.array[0, 96 : 96 + 24].view(np.float32).reshape(2, 3)
    assert np.isnan(scales_and_sums).tolist() == [[False, True, False]] * 2


@pytest.mark.parametrize(
    ("encoding", "layout"),
    [(e, "rows") for e in FLOATS] + [(e, "panel16") for e in (*FLOATS, *TABLES)],
    ids=name,
)
def test_embedding_reads_rows(encoding: Encoding, layout: Layout) -> None:
    rng = np.random.default_rng(4)
    count, width, tokens = 37, 512 if encoding.kind == "affine" else 33, 23
    table = random_weight(rng, encoding, count, width)
    ids = aligned(rng.integers(0, count, tokens).astype(np.int32))
    ids[3], ids[11] = -1, count
    out = Guarded((tokens, width), np.float32)
    kernel = load_kernel(KernelSpec("embedding", {"encoding": encoding.name, "layout": layout}))
    kernel(aligned(pack(layout, table)), ids, out.array, tokens, count, width, 2.5, threads=5)
    out.check()
    expected = np.float32(2.5) * table.decode()[np.clip(ids, 0, count - 1)]
    expected[[3, 11]] = np.nan
    assert np.allclose(out.array, expected, rtol=1e-6, atol=1e-6, equal_nan=True)
