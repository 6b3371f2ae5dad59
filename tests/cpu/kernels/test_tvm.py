"""TVM's kernels against the C++ kernels of the same name: the same bits, from objects that need no TVM to run.

The C++ kernels are compared with float64 references in `test_linear.py` and `test_dense.py`.
"""

from __future__ import annotations

import subprocess
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from cpu.kernels.harness import Guarded, aligned, load_kernel, load_tvm_kernel, native_isas, random_floats
from cpu.kernels.test_linear import name, random_weight

from toolkit.compiler.codegen.tvm import compile_tvm_object
from toolkit.compiler.race import rounds_alike
from toolkit.kernels_templates.catalog import POINTWISE_INPUTS, KernelSpec
from toolkit.kernels_templates.expression import OPERATORS, evaluate, parse
from toolkit.kernels_templates.packing import pack, q8_pack, q8_row_bytes
from toolkit.kernels_templates.tvm import expression
from toolkit.kernels_templates.tvm.families import takes
from toolkit.runtime import encodings
from toolkit.runtime.encodings import Encoding
from toolkit.runtime.plan import IsaName

Arrays = list[npt.NDArray[Any]]

ENCODINGS = (
    encodings.Q4_0,
    encodings.Q4_1,
    encodings.Q8_0,
    Encoding("affine", bits=8, group=64, scale="float32", has_minimum=True),
)
ISAS = native_isas()


def linear(encoding: Encoding, outputs: int, columns: int, **params: Any) -> KernelSpec:
    extras = dict.fromkeys((f"extra{i}" for i in range(1, 5)), "")
    usual: dict[str, Any] = {"has_bias": False, "epilogue": "", **extras}
    forms = {"gated": False, "float_out": True, "q8_out": False}
    return KernelSpec("linear", {"encoding": encoding.name, **usual, **forms, **params}, {"N": outputs, "K": columns})


def pointwise(text: str, kinds: str, width: int) -> KernelSpec:
    inputs = {f"in{i}": kinds[i : i + 1] for i in range(POINTWISE_INPUTS)}
    return KernelSpec("pointwise", {"expr": text, **inputs}, {"W": width})


def outputs_of(kernel: KernelSpec, isa: IsaName, inputs: Arrays, outputs: dict[str, Any], numbers: list[int]) -> None:
    """Check that both generators' code fills the same outputs with the same bits, whatever the number of threads."""
    found = []
    for code in (load_kernel(kernel.any_shape, isa), load_tvm_kernel(kernel, isa)):
        for threads in (1, 3):
            made = [Guarded(shape, kind) for shape, kind in outputs.values()]
            code(*inputs, *(each.array for each in made), *numbers, threads=threads)
            for each in made:
                each.check()
            found.append([each.array for each in made])
    for other in found[1:]:
        for expected, got in zip(found[0], other, strict=True):
            numbers_alike = np.array_equal(expected, got, equal_nan=expected.dtype.kind == "f")
            assert numbers_alike


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("encoding", ENCODINGS, ids=name)
def test_linear_gives_the_same_bits(encoding: Encoding, isa: IsaName) -> None:
    """Rows around the sizes of blocks; panels that are no multiple of the streams; columns of several pieces."""
    outputs, columns = 18 * 16, 4160
    kernel = linear(encoding, outputs, columns)
    rng = np.random.default_rng(0)
    weight = aligned(pack("panel16", random_weight(rng, encoding, outputs, columns)))
    for rows in (1, 2, 3, 7, 8, 17):
        x = aligned(q8_pack(random_floats(rng, rows, columns)))
        outputs_of(kernel, isa, [x, weight], {"out": ((rows, outputs), np.float32)}, [rows, outputs, columns])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("gated", [False, True])
def test_linear_finishes_as_the_templates_do(gated: bool, isa: IsaName) -> None:
    """Bias, extras of both kinds, a gate, and results as floats and codes."""
    outputs, columns, result = 192, 96, 96 if gated else 192
    text = "(add (mul (silu in0) in1) in2)" if gated else "(add (mul (silu in0) in1) (maximum in2 -0.5))"
    extras = {"extra1": "t", "extra2": "" if gated else "n"}
    kernel = linear(encodings.Q4_1, outputs, columns, has_bias=True, epilogue=text, gated=gated, q8_out=True, **extras)
    rng = np.random.default_rng(1)
    weight = aligned(pack("panel16", random_weight(rng, encodings.Q4_1, outputs, columns)))
    for rows in (1, 5, 8):
        x = aligned(q8_pack(random_floats(rng, rows, columns)))
        inputs = [x, weight, random_floats(rng, outputs), random_floats(rng, rows, result)]
        inputs += [] if gated else [random_floats(rng, result)]
        made = {"out": ((rows, result), np.float32), "q8": ((rows, q8_row_bytes(result)), np.uint8)}
        outputs_of(kernel, isa, inputs, made, [rows, outputs, columns])


@pytest.mark.parametrize("isa", ISAS)
def test_quantize_gives_the_same_bits(isa: IsaName) -> None:
    x = random_floats(np.random.default_rng(1), 5, 96)
    x[2, 32:64] = 0
    x[3] *= np.float32(1e20)
    made = {"q8": ((5, q8_row_bytes(96)), np.uint8)}
    outputs_of(KernelSpec("quantize", {}, {"K": 96}), isa, [x], made, [5, 96])


@pytest.mark.parametrize("isa", ISAS)
def test_quantize_keeps_nan_in_its_group(isa: IsaName) -> None:
    x = random_floats(np.random.default_rng(1), 1, 96)
    x[0, 40], x[0, 70] = np.nan, np.inf
    out = Guarded((1, q8_row_bytes(96)), np.uint8)
    load_tvm_kernel(KernelSpec("quantize", {}, {"K": 96}), isa)(x, out.array, 1, 96)
    scales, sums = out.array[0, 96:120].view(np.float32).reshape(2, 3)
    assert np.isfinite(scales).tolist() == np.isfinite(sums).tolist() == [True, False, False]


def every_operator() -> str:
    """A sum of every operator that has a TIR form, each of in0 and constants."""
    terms = [
        f"({operator} {' '.join(['in0', '0.75', '2.5'][:count])})"
        for operator, count in OPERATORS.items()
        if operator in expression.OPERATORS
    ]
    return f"(add (mul in1 in2) {nested(terms)})"


def nested(terms: list[str]) -> str:
    """Maxima and sums, so that each term reaches some results."""
    return terms[0] if len(terms) == 1 else f"(add {terms[0]} {nested(terms[1:])})"


@pytest.mark.parametrize("isa", ISAS)
def test_operators_give_the_same_bits(isa: IsaName) -> None:
    rng, rows, width = np.random.default_rng(2), 3, 272
    kernel = pointwise(every_operator(), "tn1s", width)
    inputs = [
        random_floats(rng, rows, width, scale=4),
        random_floats(rng, width),
        random_floats(rng, rows),
        random_floats(rng, 1),
    ]
    inputs[0][0, :6] = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40]
    outputs_of(kernel, isa, inputs, {"out": ((rows, width), np.float32)}, [rows, width])
    out = Guarded((rows, width), np.float32)
    load_tvm_kernel(kernel, isa)(*inputs, out.array, rows, width)
    x = inputs[0][1:].astype(np.float64)
    with np.errstate(invalid="ignore"):  # roots of negative numbers
        expected = evaluate(parse(every_operator()), [x, inputs[1], inputs[2][1:, None], inputs[3]])
    assert np.allclose(out.array[1:], expected, rtol=1e-4, atol=1e-4, equal_nan=True)


def test_what_has_no_tir_form_is_left_to_cpp() -> None:
    assert takes(linear(encodings.Q4_0, 32, 64))
    assert not takes(linear(encodings.Q4_0, 40, 64))
    assert not takes(linear(encodings.Q4_0, 48, 64, q8_out=True))
    assert not takes(linear(encodings.Q4_0, 48, 64, gated=True))
    assert not takes(linear(encodings.BFLOAT16, 32, 64))
    assert not takes(linear(encodings.Q6_K, 32, 64))
    assert not takes(linear(encodings.Q4_0, 1 << 20, 1 << 13))  # offsets beyond 32 bits
    assert takes(pointwise("(exp in0)", "t", 64))
    assert not takes(pointwise("(exp in0)", "t", 65))
    assert not takes(pointwise("(pow in0 in0)", "t", 64))
    assert not takes(KernelSpec("norm", {}, {"W": 64}))


def test_sums_of_two_products_may_round_differently() -> None:
    assert rounds_alike(pointwise("(add (mul in0 in1) in2)", "ttt", 64))
    assert not rounds_alike(pointwise("(exp (sub (mul in0 in1) (mul in2 in2)))", "ttt", 64))
    assert not rounds_alike(linear(encodings.Q4_0, 32, 64, epilogue="(add (mul in0 0.5) (mul in1 in1))"))


@pytest.mark.parametrize("isa", ISAS)
def test_objects_need_libc_alone(isa: IsaName) -> None:
    for kernel in (linear(encodings.Q4_1, 192, 96), KernelSpec("quantize", {}, {"K": 96})):
        listing = subprocess.run(
            ["nm", "-u", str(compile_tvm_object(kernel, isa))], capture_output=True, text=True, check=True
        ).stdout
        assert set(listing.split()) <= {"U", "w", "memset", "memcpy"}
