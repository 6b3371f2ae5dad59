"""Tuning files are read whole or refused in one sentence, and a plan knows its own."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.runtime.sample_plan import write_sample_plan

from toolkit.runtime.errors import UserError
from toolkit.runtime.load import read_plan
from toolkit.runtime.plan import TuningFile
from toolkit.runtime.tuning import MAJOR, MINOR, Race, Tuning, encode_tuning, read_tuning

RACE = Race("k_linear", {"N": 64, "K": 32}, "x86-64-v4", 8, {"cpp": 2e-6, "tvm": 1.5e-6}, "tvm")
TUNING = Tuning("toolkit-tuning", MAJOR, MINOR, "Some CPU", 2, {"c++": "g++ 12", "tvm": "0.27"}, (RACE,))


def test_reads_what_was_written(tmp_path: Path) -> None:
    (tmp_path / "tuning.json").write_bytes(encode_tuning(TUNING))
    assert read_tuning(tmp_path / "tuning.json") == TUNING


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "toolkit-plan"}, "no tuning file"),
        ({"major": MAJOR + 1}, "this toolkit reads up to"),
        ({"minor": MINOR + 1}, "this toolkit reads up to"),
        ({"surprise": 1}, "no tuning file, or a damaged one"),
        ({"races": [msgspec.to_builtins(RACE) | {"seconds": {"cpp": 1.0}}]}, "no time for tvm"),
        ({"races": [msgspec.to_builtins(RACE) | {"chosen": "fortran"}]}, "no tuning file, or a damaged one"),
    ],
)
def test_refuses_edited_files(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    (tmp_path / "tuning.json").write_bytes(msgspec.json.encode(msgspec.to_builtins(TUNING) | changes))
    with pytest.raises(UserError, match=message):
        read_tuning(tmp_path / "tuning.json")
    with pytest.raises(UserError, match="can't read the tuning file"):
        read_tuning(tmp_path / "elsewhere.json")


@given(st.data())
def test_any_damage_is_a_user_error(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    content = bytearray(encode_tuning(TUNING))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("damaged") / "tuning.json"
    path.write_bytes(bytes(content[: data.draw(st.integers(0, len(content)))]))
    try:
        assert isinstance(read_tuning(path), Tuning)
    except UserError as error:
        assert "\n" not in str(error)


def test_a_plan_checks_its_tuning_file(tmp_path: Path) -> None:
    plan, content = write_sample_plan(tmp_path / "plan"), encode_tuning(TUNING)
    (tmp_path / "plan/tuning.json").write_bytes(content)
    record = TuningFile("tuning.json", len(content), hashlib.sha256(content).hexdigest())
    plan = msgspec.structs.replace(plan, tuning=record)
    (tmp_path / "plan/plan.json").write_bytes(msgspec.json.encode(plan))
    assert read_plan(tmp_path / "plan") == plan
    (tmp_path / "plan/tuning.json").write_bytes(content.replace(b"Some", b"Sane"))
    with pytest.raises(UserError, match=r"tuning\.json was changed"):
        read_plan(tmp_path / "plan")
    (tmp_path / "plan/tuning.json").unlink()
    with pytest.raises(UserError, match=r"tuning\.json is missing"):
        read_plan(tmp_path / "plan")
