"""Safetensors: what the safetensors package writes is read back; damaged and incomplete checkpoints are refused."""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from toolkit.models.checkpoint import INDEX, Checkpoint, read_safetensors
from toolkit.runtime.encodings import BFLOAT16, FLOAT16, FLOAT32
from toolkit.runtime.errors import UserError

VALUES = torch.randn(6, 10, generator=torch.Generator().manual_seed(0))
TENSORS = {
    "model.a.weight": VALUES,
    "model.b.weight": VALUES.to(torch.bfloat16),
    "model.c.bias": VALUES[0].to(torch.float16),
    "model.d.weight": VALUES.to(torch.float64),
    "model.e.ids": torch.arange(5),
}


@pytest.fixture
def single(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    names = list(TENSORS)
    for number, part in enumerate((names[:2], names[2:]), 1):
        save_file({name: TENSORS[name] for name in part}, tmp_path / f"model-{number}-of-2.safetensors")
    index = {name: f"model-{1 if name in names[:2] else 2}-of-2.safetensors" for name in names}
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return tmp_path


@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_tensors_are_read_as_stored(layout: str, request: pytest.FixtureRequest) -> None:
    checkpoint = Checkpoint(request.getfixturevalue(layout), "model.")
    assert set(checkpoint) == set(TENSORS)
    assert {name: checkpoint[name].shape for name in checkpoint} == {n: tuple(t.shape) for n, t in TENSORS.items()}
    encodings = [checkpoint[name].encoding for name in list(TENSORS)[:4]]
    assert encodings == [FLOAT32, BFLOAT16, FLOAT16, FLOAT32]
    for name in list(TENSORS)[:4]:
        np.testing.assert_array_equal(checkpoint[name].read().decode(), TENSORS[name].float().numpy())


@given(start=st.integers(0, 8), stop=st.none() | st.integers(0, 8))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30)
def test_rows_are_those_of_the_whole(single: Path, start: int, stop: int | None) -> None:
    tensor = Checkpoint(single)["model.b.weight"]
    expected = TENSORS["model.b.weight"][start:stop].float().numpy()
    np.testing.assert_array_equal(tensor.read(start, stop).decode(), expected)


def test_a_bare_decoder_gets_its_prefix(tmp_path: Path) -> None:
    save_file({"h.0.weight": VALUES, "lm_head.weight": VALUES + 1}, tmp_path / "model.safetensors")
    assert set(Checkpoint(tmp_path, "transformer.")) == {"transformer.h.0.weight", "lm_head.weight"}


def test_the_main_encoding_is_that_of_most_values(single: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    save_file({"big": VALUES.to(torch.bfloat16), "small": VALUES[0]}, other / "model.safetensors")
    assert Checkpoint(single).main_encoding == FLOAT32
    assert Checkpoint(other).main_encoding == BFLOAT16


# --- what is refused --------------------------------------------------------------------------------------------------


def refused(directory: Path) -> str:
    begun = time.perf_counter()
    with pytest.raises(UserError) as error:
        Checkpoint(directory)
    assert time.perf_counter() - begun < 2.0
    assert "\n" not in str(error.value)
    return str(error.value)


def test_no_weights(tmp_path: Path) -> None:
    assert "has no safetensors weights; download them, or use --weights random" in refused(tmp_path)


def test_pickled_weights(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    assert "convert its .bin files to safetensors" in refused(tmp_path)


def test_several_files_without_an_index(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    assert f"2 safetensors files but no {INDEX}" in refused(sharded)


def test_missing_shard(sharded: Path) -> None:
    (sharded / "model-2-of-2.safetensors").unlink()
    assert "lacks 'model-2-of-2.safetensors'" in refused(sharded)


def test_shard_outside_the_directory(sharded: Path) -> None:
    (sharded / INDEX).write_text(json.dumps({"weight_map": {"a": "../model-1-of-2.safetensors"}}))
    assert "lacks '../model-1-of-2.safetensors'" in refused(sharded)


def test_shard_of_an_impossible_name(sharded: Path) -> None:
    (sharded / INDEX).write_text(json.dumps({"weight_map": {"a": "x" * 5000}}))
    assert "xxx ..., which" in refused(sharded)


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": 3}', "[" * 100_000])
def test_damaged_index(sharded: Path, content: str) -> None:
    (sharded / INDEX).write_text(content)
    assert f"{INDEX} is damaged" in refused(sharded)


def test_tensor_that_only_the_index_has(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["model.x"] = "model-1-of-2.safetensors"
    (sharded / INDEX).write_text(json.dumps(index))
    assert "has the tensor 'model.x'" in refused(sharded)


def test_missing_tensor_is_named(single: Path) -> None:
    with pytest.raises(UserError, match=r"lacks the tensor model\.z\.weight"):
        Checkpoint(single)["model.z.weight"]


def test_integers_are_no_weights(single: Path) -> None:
    with pytest.raises(UserError, match=r"model\.e\.ids in model\.safetensors is I64; weights must be F32"):
        Checkpoint(single)["model.e.ids"].read()


@pytest.mark.parametrize("keep", [0, 5, 8, 40, 0.9, 0.999])
def test_truncated(single: Path, keep: float) -> None:
    path = single / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(keep) if keep >= 1 else int(len(content) * keep)])
    assert "download it again" in refused(single)


@pytest.mark.parametrize("length", [2**64 - 1, 2**40, 99_999_999])
def test_huge_header_length(single: Path, length: int) -> None:
    path = single / "model.safetensors"
    path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])
    assert f"should be {length} bytes" in refused(single)


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16], **changes}


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[1, 2]",
        b'{"a": 1}',
        b'{"a": {"dtype": "F32"}}',
        b"[" * 200_000,
        json.dumps({"a": entry(shape=[2, 3])}).encode(),
        json.dumps({"a": entry(shape=[-2, -2])}).encode(),
        json.dumps({"a": entry(shape=[2**62, 2**62])}).encode(),
        json.dumps({"a": entry(dtype="F99")}).encode(),
        json.dumps({"a": entry(data_offsets=[16, 0])}).encode(),
        json.dumps({"a": entry(data_offsets=[-16, 0])}).encode(),
        json.dumps({"a": entry(data_offsets=[2**62, 2**62 + 16])}).encode(),
    ],
)
def test_damaged_header(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    assert "model.safetensors" in refused(tmp_path)


@settings(max_examples=200, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edits=st.lists(st.tuples(st.integers(0, 500), st.integers(0, 255)), min_size=1, max_size=4))
def test_any_damage_is_read_or_refused(single: Path, edits: list[tuple[int, int]]) -> None:
    content = bytearray((single / "model.safetensors").read_bytes())
    for position, value in edits:
        content[position % len(content)] = value
    path = single / "damaged.safetensors"
    path.write_bytes(content)
    try:
        file = read_safetensors(path)
    except UserError:
        return
    assert all(end <= len(content) for _, end in (item.data_offsets for item in file.entries.values()))
