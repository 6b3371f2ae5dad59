"""The GGUF container: what the gguf package writes is read back; damaged files are refused quickly, in a sentence."""

from __future__ import annotations

import struct
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from toolkit.models.gguf_file import read_gguf
from toolkit.runtime.errors import UserError

MATRIX = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_rope_freq_base(10000.5)
    writer.add_bool("llama.flag", True)
    writer.add_array("words", ["one", "zwei", "三"])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_tensor("matrix", MATRIX)
    writer.add_tensor("quantized", gguf.quants.quantize(MATRIX, gguf.GGMLQuantizationType.Q8_0), raw_dtype=Q8_0)
    writer.add_tensor("vector", MATRIX[0].astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


Q8_0 = gguf.GGMLQuantizationType.Q8_0


def test_metadata_and_tensors_are_read_back(written: bytes, tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    path.write_bytes(written)
    file = read_gguf(path)
    assert file.metadata["general.architecture"] == "llama"
    assert file.metadata["llama.block_count"] == 2
    assert file.metadata["llama.rope.freq_base"] == 10000.5
    assert file.metadata["llama.flag"] is True
    assert file.metadata["words"] == ["one", "zwei", "三"]
    assert file.metadata["numbers"].tolist() == [1, -2, 3]
    assert {name: tensor.shape for name, tensor in file.tensors.items()} == {
        "matrix": (3, 64),
        "quantized": (3, 64),
        "vector": (64,),
    }
    matrix = file.tensors["matrix"]
    np.testing.assert_array_equal(matrix.type.decode_rows(file.rows(matrix)).decode(), MATRIX)
    vector = file.tensors["vector"]
    np.testing.assert_array_equal(vector.type.decode_rows(file.rows(vector)).data[0], MATRIX[0].astype(np.float16))


def refused(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    begun = time.perf_counter()
    with pytest.raises(UserError) as error:
        read_gguf(path)
    assert time.perf_counter() - begun < 2.0
    message = str(error.value)
    assert path.name in message
    assert "\n" not in message
    return message


def test_empty_file(tmp_path: Path) -> None:
    assert "is empty" in refused(tmp_path / "a.gguf", b"")


def test_bad_magic(written: bytes, tmp_path: Path) -> None:
    assert "is not a GGUF file" in refused(tmp_path / "a.gguf", b"GGML" + written[4:])


def test_unknown_version(written: bytes, tmp_path: Path) -> None:
    assert "version 9" in refused(tmp_path / "a.gguf", written[:4] + struct.pack("<I", 9) + written[8:])


@pytest.mark.parametrize("position", [8, 16, 24], ids=["tensors", "pairs", "key length"])
@pytest.mark.parametrize("count", [2**63, 2**64 - 1, 10**9])
def test_huge_counts_are_refused_at_once(written: bytes, tmp_path: Path, position: int, count: int) -> None:
    content = written[:position] + struct.pack("<Q", count) + written[position + 8 :]
    assert "past the end" in refused(tmp_path / "a.gguf", content)


@pytest.mark.parametrize("keep", [3, 7, 20, 60, 200, 0.5, 0.99])
def test_truncated(written: bytes, tmp_path: Path, keep: float) -> None:
    size = int(keep) if keep >= 1 else int(len(written) * keep)
    assert "trunc" in refused(tmp_path / "a.gguf", written[:size])


def test_unknown_tensor_type_names_the_supported_ones(tmp_path: Path) -> None:
    writer: Any = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_tensor("odd", np.zeros((1, 8), np.int64))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UserError, match=r"tensor odd has GGUF type 27; supported are F32, .*Q4_K"):
        read_gguf(tmp_path / "a.gguf")


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        read_gguf(tmp_path / "none.gguf")


@settings(max_examples=200, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edits=st.lists(st.tuples(st.integers(0, 700), st.integers(0, 255)), min_size=1, max_size=4))
def test_any_damage_is_read_or_refused(written: bytes, tmp_path: Path, edits: list[tuple[int, int]]) -> None:
    content = bytearray(written)
    for position, value in edits:
        content[position % len(content)] = value
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    try:
        file = read_gguf(path)
    except UserError:
        return
    for tensor in file.tensors.values():
        assert file.rows(tensor).nbytes == tensor.nbytes
