"""The cost model of CUDA linear layers names kernels that exist and serve the sizes asked for."""

from __future__ import annotations

import pytest

from toolkit.compiler.codegen.cuda import SHARED_LIMITS
from toolkit.kernels_templates.cuda.choose import choose_linear, other_linear
from toolkit.kernels_templates.registry import CUDA_FAMILIES


@pytest.mark.parametrize("rows", [1, 8, 9, 32, 33, 64, 128, 200, 256, 512, 8192])
@pytest.mark.parametrize(("columns", "inner"), [(3072, 2048), (28672, 4096), (4096, 14336), (2048, 2048), (96, 64)])
@pytest.mark.parametrize(("real", "encoding"), [("float16", "f16"), ("bfloat16", "bf16")])
def test_tensor_cores_where_they_can(rows: int, columns: int, inner: int, real: str, encoding: str) -> None:
    name, params = choose_linear(rows, columns=columns, inner=inner, real=real, encoding=encoding, gated=True)
    assert name != "linear_exact"
    assert params["real"] == real
    for key, value in params.items():
        assert value in CUDA_FAMILIES[name].params[key]
    grid = CUDA_FAMILIES[name].variant("sm90").grid(params | {"gated": True})
    assert grid.shared <= SHARED_LIMITS["sm90"]
    assert name == "linear_tiled" or rows <= int(params["tile_rows"])


@pytest.mark.parametrize(
    ("inner", "real", "encoding"),
    [(64, "float32", "f32"), (64, "bfloat16", "f32"), (64, "float16", "bf16"), (60, "float16", "f16")],
)
def test_exact_for_the_rest(inner: int, real: str, encoding: str) -> None:
    expected = "linear_exact", {"real": real, "encoding": encoding}
    assert choose_linear(4, columns=64, inner=inner, real=real, encoding=encoding, gated=False) == expected


@pytest.mark.parametrize("rows", [1, 8, 9, 32, 33, 64, 128, 8192])
@pytest.mark.parametrize(("columns", "inner"), [(28672, 4096), (4096, 14336), (96, 64)])
@pytest.mark.parametrize("encoding", ["a4g32", "a4g128m", "a8g32", "a6g16k"])
def test_tensor_cores_for_quantized_weights(rows: int, columns: int, inner: int, encoding: str) -> None:
    name, params = choose_linear(rows, columns=columns, inner=inner, real="bfloat16", encoding=encoding, gated=True)
    for key, value in params.items():
        assert value in CUDA_FAMILIES[name].params[key]
    for arch, limit in SHARED_LIMITS.items():
        assert CUDA_FAMILIES[name].variant(arch).grid(params | {"gated": True}).shared <= limit
    assert name == "linear_tiled_quantized" or (name == "linear_skinny_quantized" and rows <= int(params["tile_rows"]))
    exact, _ = choose_linear(rows, columns=columns, inner=inner, real="float32", encoding=encoding, gated=True)
    assert exact == "linear_exact"


@pytest.mark.parametrize("rows", [1, 32, 33, 256, 8192])
@pytest.mark.parametrize("narrow", [False, True])
def test_activations_are_rounded_where_tensor_cores_multiply_8_bit_floats(rows: int, narrow: bool) -> None:
    sizes = {"columns": 4096, "inner": 14336, "real": "bfloat16", "encoding": "e4m3g128w", "gated": False}
    name, params = choose_linear(rows, narrow=narrow, **sizes)  # type: ignore[arg-type]
    assert (name == "linear_float8") == (narrow and rows > 32)
    for key, value in params.items():
        assert value in CUDA_FAMILIES[name].params[key]
    grid = CUDA_FAMILIES[name].variant("sm90").grid(params | {"gated": False})
    assert grid.shared <= SHARED_LIMITS["sm90"]


@pytest.mark.parametrize("rows", [1, 32, 33, 256, 8192])
@pytest.mark.parametrize(("columns", "inner"), [(28672, 4096), (4096, 14336), (96, 64)])
@pytest.mark.parametrize("encoding", ["bf16", "a4g128m"])
@pytest.mark.parametrize("gated", [False, True])
def test_alternatives_are_other_kernels_that_a_gpu_can_launch(
    rows: int, columns: int, inner: int, encoding: str, gated: bool
) -> None:
    chosen = choose_linear(rows, columns=columns, inner=inner, real="bfloat16", encoding=encoding, gated=gated)
    others = other_linear(rows, *chosen, columns=columns, inner=inner, gated=gated)
    assert others
    assert chosen not in others
    assert len({str(params) for _, params in others}) == len(others)
    for name, params in others:
        assert params.keys() == chosen[1].keys()
        for key, value in params.items():
            assert value in CUDA_FAMILIES[name].params[key]
        assert CUDA_FAMILIES[name].variant("sm90").grid(params | {"gated": gated}).shared <= SHARED_LIMITS["sm90"]
