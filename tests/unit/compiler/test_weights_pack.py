"""Weights from checkpoint to file: joined, encoded, packed and readable as safetensors."""

from __future__ import annotations

import hashlib
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from unit.compiler.memory_source import Memory

import toolkit.compiler.weights_pack as module
from toolkit.compiler.ir import Graph, Param, Value
from toolkit.compiler.lowered import Weight
from toolkit.compiler.lowering import weight_bytes
from toolkit.compiler.quantize import encode
from toolkit.compiler.shapes import TensorType
from toolkit.compiler.weights import Constant, Piece, Recipe
from toolkit.compiler.weights_pack import pack_weights, read_chunks, resolve_encodings
from toolkit.kernels_templates.packing import Layout, unpack
from toolkit.runtime.encodings import BFLOAT16, FLOAT16, FLOAT32, INT4, Q4_1, Q8_0, EncodedArray, Encoding
from toolkit.runtime.errors import UserError

RNG = np.random.default_rng(0)


def random(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def param(name: str, shape: tuple[int, ...], *pieces: Piece, encoding: Encoding | None = None) -> Param:
    return Param(Value(name, TensorType("float32", shape)), Recipe(pieces or (Piece(name),), encoding))


def resolved(item: Param, source: Memory) -> Param:
    return resolve_encodings(Graph((), (item,), (), ()), source).params[0]


def packed(source: Memory, folder: Path, layout: Layout, *items: Param) -> dict[str, EncodedArray]:
    """Pack, check the file, and unpack again."""
    weights = {item.value.name: Weight(resolved(item, source), layout) for item in items}
    made = pack_weights(weights, source, folder)
    (file,) = made.files
    data = (folder / file.file).read_bytes()
    assert file.bytes == len(data)
    assert file.sha256 == hashlib.sha256(data).hexdigest()
    tensors = load_file(folder / file.file)
    assert sorted(tensors) == sorted(made.entries)
    result = {}
    for name, entry in made.entries.items():
        assert entry.offset % 64 == entry.bytes % 64 == 0
        blob = np.frombuffer(data, np.uint8, entry.bytes, entry.offset)
        np.testing.assert_array_equal(blob, tensors[name])
        size = weight_bytes(weights[name])
        result[name] = unpack(layout, entry.encoding, entry.shape, blob[:size].copy())
    return result


@pytest.mark.parametrize("encoding", [FLOAT32, FLOAT16, BFLOAT16, Q4_1, Q8_0], ids=lambda encoding: encoding.name)
def test_kept_encodings_come_back_exactly(encoding: Encoding, tmp_path: Path) -> None:
    stored = encode(random(37, 64), encoding)
    found = packed(Memory.of(w=stored), tmp_path, "panel16", param("w", (37, 64)))["w"]
    assert found.encoding == encoding
    np.testing.assert_array_equal(found.decode(), stored.decode())


def test_8_bit_floats_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    stored = encode(random(37, 64), Encoding("affine", bits=8, group=64, scale="float32", levels="e4m3"))
    stored.data[20, 3] = -1
    with pytest.raises(UserError, match="tensor w holds NaN or infinity in row 20"):
        packed(Memory.of(w=stored), tmp_path, "operand16", param("w", (37, 64)))


def test_pieces_join_across_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 20 * 64 * 4)
    parts = {name: encode(random(rows, 64), Q8_0) for name, rows in (("q", 40), ("k", 9), ("v", 21))}
    source = Memory.of(**parts)
    item = param("qkv", (70, 64), *map(Piece, parts))
    chunks = [chunk.shape[0] for chunk in read_chunks(resolved(item, source), source)]
    assert sum(chunks) == 70
    assert len(chunks) > 2
    assert all(rows % 16 == 0 for rows in chunks[:-1])
    found = packed(source, tmp_path, "panel16", item)["qkv"]
    np.testing.assert_array_equal(found.decode(), np.concatenate([part.decode() for part in parts.values()]))


def test_transposed_and_partial_pieces(tmp_path: Path) -> None:
    wide = random(32, 48)
    source = Memory.of(w=EncodedArray(FLOAT32, wide))
    pieces = (Piece("w", transpose=True, start=5, stop=25), Piece("w", start=30, transpose=True))
    found = packed(source, tmp_path, "panel16", param("w", (38, 32), *pieces))["w"]
    np.testing.assert_array_equal(found.decode(), np.concatenate([wide.T[5:25], wide.T[30:]]))


def test_encodings_are_resolved() -> None:
    source = Memory.of(
        a=encode(random(4, 32), Q8_0), b=encode(random(4, 32), BFLOAT16), c=encode(random(4, 32), BFLOAT16)
    )
    for pieces, shape, expected in (
        ((Piece("a"),), (4, 32), Q8_0),
        ((Piece("a", transpose=True),), (32, 4), FLOAT32),
        ((Piece("b", transpose=True),), (32, 4), BFLOAT16),
        ((Piece("b"), Piece("c")), (8, 32), BFLOAT16),
        ((Piece("a"), Piece("c")), (8, 32), FLOAT32),
    ):
        assert resolved(param("x", shape, *pieces), source).recipe.encoding == expected
    assert resolved(param("x", (4, 32), Piece("a"), encoding=INT4), source).recipe.encoding == INT4


def test_recipes_quantize(tmp_path: Path) -> None:
    values = random(48, 64)
    source = Memory.of(w=EncodedArray(FLOAT32, values))
    found = packed(source, tmp_path, "panel16", param("w", (48, 64), encoding=INT4))["w"]
    np.testing.assert_array_equal(found.decode(), encode(values, INT4).decode())


def test_what_re_encoding_costs_is_told(tmp_path: Path) -> None:
    values = {"a": random(48, 64), "b": random(16, 64) ** 3, "same": random(4, 64)}
    kept = encode(values["same"], Q8_0)
    source = Memory.of(a=encode(values["a"], Q8_0), b=encode(values["b"], Q8_0), same=kept)
    items = [param("a", (48, 64), encoding=INT4), param("b", (16, 64), encoding=INT4), param("same", (4, 64))]
    weights = {item.value.name: Weight(resolved(item, source), "panel16") for item in items}
    (note,) = pack_weights(weights, source, tmp_path).notes
    before = {name: encode(values[name], Q8_0).decode() for name in "ab"}
    errors = {name: encode(before[name], INT4).decode() - before[name] for name in "ab"}
    worst = np.linalg.norm(errors["b"]) / np.linalg.norm(before["b"])
    both = [np.concatenate([part["a"], part["b"]]) for part in (errors, before)]
    overall = np.linalg.norm(both[0]) / np.linalg.norm(both[1])
    assert note == (f"A8G32 stored as a4g32: relative RMS error {overall:.2%} over 2 tensors, worst {worst:.2%} in b")


def test_vectors_and_constants(tmp_path: Path) -> None:
    table = random(10, 6)
    constant = Param(Value("t", TensorType("float32", table.shape)), Recipe(constant=Constant(table)))
    norm = encode(random(20), BFLOAT16)
    source = Memory.of(n=norm)
    found = packed(source, tmp_path, "rows", constant, param("n", (20,), encoding=FLOAT32))
    np.testing.assert_array_equal(found["t"].decode(), table)
    np.testing.assert_array_equal(found["n"].decode(), norm.decode())


def test_the_same_weights_give_the_same_bytes(tmp_path: Path) -> None:
    source = Memory.of(a=encode(random(33, 32), Q4_1), b=EncodedArray(FLOAT32, random(17, 32)))
    items = [param("b", (17, 32)), param("a", (33, 32))]
    hashes = set()
    for number, order in enumerate((items, items[::-1])):
        folder = tmp_path / str(number)
        folder.mkdir()
        weights = {item.value.name: Weight(resolved(item, source), "panel16") for item in order}
        hashes.add(pack_weights(weights, source, folder).files[0].sha256)
    assert len(hashes) == 1


def test_a_wrong_shape_names_the_tensor() -> None:
    source = Memory.of(w=EncodedArray(FLOAT32, random(4, 8)))
    with pytest.raises(UserError, match=r"expected shape \[4, 9\] for w, but the checkpoint has w \[4, 8\]"):
        resolved(param("w", (4, 9)), source)
    with pytest.raises(UserError, match="lacks v"):
        resolved(param("v", (4, 9)), source)
    with pytest.raises(UserError, match="scalar"):
        resolved(param("s", (1,)), Memory.of(s=EncodedArray(FLOAT32, np.array(1, np.float32))))


def test_numbers_that_do_not_fit_name_the_tensor() -> None:
    source = Memory.of(w=EncodedArray(FLOAT32, np.full((4, 32), 1e6, np.float32)))
    with pytest.raises(UserError, match="tensor w can't be stored as f16"):
        list(read_chunks(param("w", (4, 32), encoding=FLOAT16), source))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("encoding", [FLOAT32, FLOAT16, BFLOAT16, Q8_0, Q4_1], ids=lambda encoding: encoding.name)
def test_nan_and_infinity_name_the_tensor_and_row(encoding: Encoding, bad: float) -> None:
    stored = encode(random(48, 64), encoding)
    if encoding == BFLOAT16:
        stored.data[37, 5] = np.array(bad, np.float32).view(np.uint32) >> 16
    else:
        part = stored.data if stored.scale is None else stored.minimum if encoding.has_minimum else stored.scale
        assert part is not None
        part[37, 1] = bad
    for transpose, shape in ((False, (48, 64)), (True, (64, 48))):
        item = param("w", shape, Piece("w", transpose=transpose), encoding=FLOAT32)
        with pytest.raises(UserError, match="tensor w holds NaN or infinity in row 37"):
            list(read_chunks(item, Memory.of(w=stored)))


def test_memory_stays_near_a_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 1 << 20)
    data = np.broadcast_to(np.float32(0.5), (4096, 4096))  # 64 MiB, none of it held
    source = Memory.of(w=EncodedArray(FLOAT32, data))
    item = resolved(param("w", data.shape, encoding=Q8_0), source)
    tracemalloc.start()
    pack_weights({"w": Weight(item, "panel16")}, source, tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 24 << 20
