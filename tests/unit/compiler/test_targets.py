"""Names and bounds of targets."""

from __future__ import annotations

import pytest

from toolkit.compiler.shapes import Bounds
from toolkit.compiler.targets import CPU, cuda_target, parse_kv_dtype, parse_target
from toolkit.runtime.errors import UserError


def test_known_targets() -> None:
    assert parse_target("cpu") == CPU
    assert parse_target(" cpu, cpu ") == CPU


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("aarch64", "known but not built yet"),
        ("cpu,sm90", "for CPUs or for GPUs, found cpu, sm90"),
        ("x86-64-v4", "part of `cpu`"),
        ("tpu", r"unknown target 'tpu': expected cpu, .*sm80"),
        ("", "needs a target name"),
        (",", "needs a target name"),
    ],
)
def test_other_names_teach(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_target(text)


def test_bounds() -> None:
    assert CPU.bounds(131072) == Bounds(max_tokens=512, max_sequences=64, max_rows=64, max_context=8192)
    assert CPU.bounds(2048, max_batch=3, max_context=100) == Bounds(512, 3, 64, 100)
    assert CPU.bounds(2048, max_batch=1000) == Bounds(1000, 1000, 1000, 2048)


@pytest.mark.parametrize(
    ("batch", "sizes"),
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (48, [1, 2, 4, 8, 16, 32, 48]),
        (256, [1, 2, 4, 8, 16, 32, 64, 128, 192, 256]),
        (600, [1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512, 600]),
    ],
)
def test_decode_programs_of_gpus(batch: int, sizes: list[int]) -> None:
    target = cuda_target(["sm90"])
    found = [limits for limits in target.buckets(target.bounds(1 << 17, batch)) if limits.decode]
    assert [limits.bounds.max_tokens for limits in found] == sizes
    assert [limits.bounds.max_sequences for limits in found] == sizes


@pytest.mark.parametrize(("batch", "context"), [(0, None), (-1, None), (None, 0), (None, 2049)])
def test_bounds_out_of_range(batch: int | None, context: int | None) -> None:
    with pytest.raises(UserError, match="--max-"):
        CPU.bounds(2048, batch, context)


def test_kv_dtype() -> None:
    assert CPU.kv_dtype("float32", quantized=False) == "float32"
    assert CPU.kv_dtype("float32", quantized=True) == "float16"
    assert CPU.kv_dtype("bfloat16", quantized=False) == "float16"


def test_the_users_kv_dtype() -> None:
    gpu = cuda_target(["sm90"])
    assert parse_kv_dtype("auto", CPU) is None
    assert parse_kv_dtype("int8", CPU) == "int8"
    assert parse_kv_dtype("fp8", gpu) == "fp8"
    with pytest.raises(UserError, match=r"for cpu must be auto, float32, float16, bfloat16, int8, found 'fp8'"):
        parse_kv_dtype("fp8", CPU)
    with pytest.raises(UserError, match=r"for sm90 must be auto, .*, fp8, found 'int4'"):
        parse_kv_dtype("int4", gpu)
