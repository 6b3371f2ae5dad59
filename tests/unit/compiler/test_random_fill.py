"""Random weights that are made at load: reproducible whatever the threads, and of the promised distribution."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.runtime.sample_plan import sample_plan

from toolkit.compiler.ir import Param, Value
from toolkit.compiler.lowered import Weight
from toolkit.compiler.shapes import TensorType
from toolkit.compiler.weights import Constant, Piece, Recipe
from toolkit.compiler.weights_pack import PackedWeights, pack_weights
from toolkit.kernels_templates.packing import Layout, layout_bytes, panel_encodings, unpack
from toolkit.models.random_weights import RandomSource
from toolkit.runtime import encodings
from toolkit.runtime.encodings import BFLOAT16, FLOAT16, FLOAT32, EncodedArray, Encoding
from toolkit.runtime.plan import Plan
from toolkit.runtime.random_weights import fill_random

NOTHING = RandomSource({}, FLOAT32)
NAMED = {value.name: value for value in vars(encodings).values() if isinstance(value, Encoding)}
KNOWN = [value for name, value in NAMED.items() if name in panel_encodings() and not value.levels]
FLOAT8 = Encoding("affine", 8, 128, scale="float32", levels="e4m3")


def weight(name: str, shape: tuple[int, ...], encoding: Encoding, layout: Layout = "panel16") -> Weight:
    return Weight(Param(Value(name, TensorType("float32", shape)), Recipe((Piece(name),), encoding)), layout)


def filled(packed: PackedWeights, seed: int = 0, threads: int = 2) -> dict[str, EncodedArray]:
    """The weights as a device makes them."""
    sample = sample_plan(b"", b"", b"")
    plan = msgspec.structs.replace(
        sample,
        model=msgspec.structs.replace(sample.model, random_weights=seed),
        weights=dict(packed.entries),
        weight_files=packed.files,
        fills=dict(packed.fills),
    )
    (file,) = (file for file in plan.weight_files if file.random)
    memory = np.zeros(file.bytes, np.uint8)
    with ThreadPoolExecutor(threads) as pool:
        fill_random(plan, file.file, memory, pool)
    return dict(_arrays(plan, memory))


def _arrays(plan: Plan, memory: np.ndarray) -> Iterator[tuple[str, EncodedArray]]:
    for name, entry in plan.weights.items():
        assert entry.layout in ("rows", "panel16")
        layout: Layout = "rows" if entry.layout == "rows" else "panel16"
        size = layout_bytes(layout, entry.encoding, entry.shape)
        yield name, unpack(layout, entry.encoding, entry.shape, memory[entry.offset : entry.offset + size].copy())


@pytest.mark.parametrize("encoding", [*KNOWN, FLOAT8], ids=lambda encoding: encoding.name)
def test_values_are_around_zero(encoding: Encoding, tmp_path: Path) -> None:
    packed = pack_weights({"w": weight("w", (200, 512), encoding)}, NOTHING, tmp_path, random=True)
    values = filled(packed)["w"].decode()
    assert abs(values.mean()) < 5e-4
    assert values.std() == pytest.approx(0.02, rel=0.1)
    if not encoding.levels:
        assert len(np.unique(values[:16, :256])) >= min(200, 1 << (encoding.bits or 16) - 1)
    assert abs(np.corrcoef(values[:-1].ravel(), values[1:].ravel())[0, 1]) < 0.02


def test_norm_weights_are_near_one(tmp_path: Path) -> None:
    weights = {name: weight(name, (640,), FLOAT32, "rows") for name in ("norm.weight", "x.bias")}
    made = filled(pack_weights(weights, NOTHING, tmp_path, random=True))
    norm = made["norm.weight"].decode()
    assert 1 <= norm.min() < norm.max() < 1.0625
    assert np.abs(made["x.bias"].decode()).max() < 0.04


@settings(max_examples=15)
@given(
    rows=st.integers(1, 70),
    columns=st.integers(1, 20),
    encoding=st.sampled_from([FLOAT16, BFLOAT16, *KNOWN[3:]]),
    threads=st.integers(1, 4),
)
def test_numbers_depend_on_name_and_seed_alone(
    rows: int, columns: int, encoding: Encoding, threads: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("plan")
    shape = (rows, columns * max(encoding.unit, 32))
    alone = {"b": weight("b", shape, encoding)}
    both = {"a": weight("a", (16, 256), encoding), **alone}
    one = filled(pack_weights(alone, NOTHING, folder, random=True), seed=5)["b"]
    two = filled(pack_weights(both, NOTHING, folder, random=True), seed=5, threads=threads)["b"]
    np.testing.assert_array_equal(one.data, two.data)
    other = filled(pack_weights(alone, NOTHING, folder, random=True), seed=6)["b"]
    assert (other.data != one.data).any()


def test_the_bytes_are_philox(tmp_path: Path) -> None:
    """Written out in integers, so that other devices can make the same."""
    shape = (3, 1 << 19)  # more than one piece
    packed = pack_weights({"norm": weight("norm", shape, FLOAT32, "rows")}, NOTHING, tmp_path, random=True)
    found = filled(packed, seed=9)["norm"].data.reshape(-1).view(np.uint32)
    key = hashlib.sha256(b"9/norm").digest()[:16]
    for block in (0, 1, 150_001):
        words = np.array(philox(block + 1, key), np.uint64).view(np.uint32)
        np.testing.assert_array_equal(found[8 * block : 8 * block + 8], words & 0x80FFFFFF | 0x3C000000)


def philox(counter: int, key: bytes) -> list[int]:
    """Philox4x64-10 as Salmon et al. (2011) define it."""
    mask = (1 << 64) - 1
    x = [counter, 0, 0, 0]
    k = [int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little")]
    for _ in range(10):
        first, second = x[0] * 0xD2E7470EE14C6C93, x[2] * 0xCA5A826395121157
        x = [second >> 64 ^ x[1] ^ k[0], second & mask, first >> 64 ^ x[3] ^ k[1], first & mask]
        k = [k[0] + 0x9E3779B97F4A7C15 & mask, k[1] + 0xBB67AE8584CAA73B & mask]
    return x


def test_constants_are_stored(tmp_path: Path) -> None:
    table = np.arange(12, dtype=np.float32).reshape(3, 4)
    constant = weight("cos", (3, 4), FLOAT32, "rows")
    constant = replace(constant, param=Param(constant.param.value, Recipe(encoding=FLOAT32, constant=Constant(table))))
    packed = pack_weights({"cos": constant, "w": weight("w", (16, 32), FLOAT16)}, NOTHING, tmp_path, random=True)
    assert [(file.file, file.random) for file in packed.files] == [("weights.safetensors", False), ("random", True)]
    entry = packed.entries["cos"]
    data = (tmp_path / entry.file).read_bytes()[entry.offset : entry.offset + table.nbytes]
    np.testing.assert_array_equal(np.frombuffer(data, np.float32), table.ravel())
