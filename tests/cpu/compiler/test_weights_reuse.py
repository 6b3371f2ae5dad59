"""Weights that an earlier compilation packed are taken over, and only they."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from toolkit.cli.driver import compile as compile_model
from toolkit.compiler import onnx_io, weights_pack
from toolkit.compiler.cache import cached_path
from toolkit.compiler.ir import Param, Value
from toolkit.compiler.lowered import Weight
from toolkit.compiler.shapes import TensorType
from toolkit.compiler.weights import Constant, Piece, Recipe
from toolkit.compiler.weights_reuse import remember_weights, reuse_weights, weights_key
from toolkit.runtime.encodings import FLOAT32, INT4
from toolkit.runtime.errors import UserError

from .test_compile import files_of, make_model

pytestmark = pytest.mark.usefixtures("native")


@pytest.fixture
def packings(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The directories for which weights were packed."""
    pack = weights_pack.pack_weights
    found: list[Path] = []

    def counted(weights: Any, source: Any, directory: Path, *rest: Any, **more: Any) -> Any:
        found.append(directory)
        return pack(weights, source, directory, *rest, **more)

    monkeypatch.setattr(weights_pack, "pack_weights", counted)
    return found


def digests(plan: Path) -> dict[str, str]:
    """SHA-256 of each file of a plan."""
    return {str(path.relative_to(plan)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files_of(plan)}


def save_model(folder: Path) -> None:
    """A model that no earlier run had."""
    model = make_model(folder, "llama", num_hidden_layers=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.from_numpy(np.random.default_rng().normal(0, 0.1, parameter.shape)))
    model.save_pretrained(folder)


def test_a_second_compilation_packs_nothing_and_gives_the_same_bytes(tmp_path: Path, packings: list[Path]) -> None:
    model, first = tmp_path / "model", tmp_path / "first"
    save_model(model)
    compile_model(model, output=first, quant="int8")
    assert len(packings) == 1
    compile_model(model, output=tmp_path / "second", quant="int8")
    assert len(packings) == 1
    for path in files_of(first):
        assert path.read_bytes() == (tmp_path / "second" / path.relative_to(first)).read_bytes()
    compile_model(model, output=tmp_path / "second", quant="int8", force=True)
    assert len(packings) == 1
    compile_model(model, output=tmp_path / "other", quant="int4")
    assert len(packings) == 2
    compile_model(model, output=tmp_path / "second", quant="int8", force=True, reuse=False)
    assert len(packings) == 3
    save_model(model)
    compile_model(model, output=tmp_path / "changed", quant="int8")
    assert len(packings) == 4


def test_only_a_plan_that_is_replaced_gives_its_file(tmp_path: Path, packings: list[Path]) -> None:
    model, plan, other = tmp_path / "model", tmp_path / "plan", tmp_path / "other"
    save_model(model)
    file, bytes_ = compile_model(model, output=plan) / weights_pack.FILE, digests(plan)
    first = file.stat()
    compile_model(model, output=plan, force=True)
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == (first.st_ino, first.st_mtime_ns)
    assert file.stat().st_nlink == 1
    compile_model(model, output=other)
    assert file.stat().st_nlink == 1
    assert digests(other) == digests(plan) == bytes_
    assert len(packings) == 1


def test_a_failure_leaves_the_plan_that_was_to_be_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plan = tmp_path / "model", tmp_path / "plan"
    save_model(model)
    compile_model(model, output=plan)
    before = digests(plan)
    monkeypatch.setattr(onnx_io, "write_onnx", Mock(side_effect=UserError("no")))
    with pytest.raises(UserError, match="no"):
        compile_model(model, output=plan, force=True)
    assert digests(plan) == before
    assert (plan / weights_pack.FILE).stat().st_nlink == 1
    assert set(tmp_path.iterdir()) == {model, plan}


def test_a_damaged_plan_is_mended_by_compiling_it_again(tmp_path: Path, packings: list[Path]) -> None:
    model, plan = tmp_path / "model", tmp_path / "plan"
    save_model(model)
    file = compile_model(model, output=plan) / weights_pack.FILE
    before, content = digests(plan), file.read_bytes()
    file.write_bytes(content[:-1] + b"x")
    compile_model(model, output=plan, force=True)
    assert digests(plan) == before
    assert len(packings) == 2


def test_what_is_not_there_any_more_is_packed_again(tmp_path: Path, packings: list[Path]) -> None:
    model = tmp_path / "model"
    save_model(model)
    plan = compile_model(model, output=tmp_path / "plan")
    damages: list[Callable[[Path], object]] = [
        lambda file: file.write_bytes(file.read_bytes()[:-1] + b"x"),
        lambda file: file.write_bytes(file.read_bytes()[:-64]),
        lambda file: file.unlink(),
    ]
    for number, damage in enumerate(damages, 2):
        damage(plan / weights_pack.FILE)
        compile_model(model, output=tmp_path / f"again{number}")
        assert len(packings) == number
        plan = compile_model(model, output=tmp_path / f"copy{number}")
        assert len(packings) == number


# --- keys -------------------------------------------------------------------------------------------------------------


def weight(name: str = "w", columns: int = 32, **recipe: Any) -> Weight:
    made = replace(Recipe((Piece("a"),), FLOAT32), **recipe)
    return Weight(Param(Value(name, TensorType("float32", (16, columns))), made), "panel16")


def test_all_that_decides_the_bytes_is_in_the_key() -> None:
    constant = np.ones((16, 32), np.float32)
    plain, files = weight(), {"model.safetensors": "1"}
    cases = [
        ({"w": plain}, files),
        ({"w": plain}, {"model.safetensors": "2"}),
        ({"w": plain}, {"other.safetensors": "1"}),
        ({"v": weight("v")}, files),
        ({"w": replace(plain, layout="rows")}, files),
        ({"w": weight(columns=64)}, files),
        ({"w": weight(encoding=INT4)}, files),
        ({"w": weight(pieces=(Piece("b"),))}, files),
        ({"w": weight(pieces=(Piece("a", start=1),))}, files),
        ({"w": weight(pieces=(), constant=Constant(constant))}, files),
        ({"w": weight(pieces=(), constant=Constant(2 * constant))}, files),
    ]
    keys = [weights_key(*case) for case in cases]
    assert len(set(keys)) == len(cases)
    assert keys == [weights_key(*case) for case in cases]


def test_a_damaged_entry_is_no_entry(tmp_path: Path) -> None:
    key = weights_key({"w": weight()}, {"x": str(np.random.default_rng().random())})
    assert reuse_weights(key, tmp_path, tmp_path) is None
    remember_weights(key, weights_pack.PackedWeights({}, ()), tmp_path)
    assert reuse_weights(key, tmp_path, tmp_path) is None
    cached_path(key, ".weights").write_bytes(b"{")
    assert reuse_weights(key, tmp_path, tmp_path) is None
