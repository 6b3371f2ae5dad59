"""Plans are read whole or refused in one sentence."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from unit.runtime.sample_plan import write_sample_plan

from toolkit.compiler.emit import write_plan
from toolkit.runtime.errors import UserError
from toolkit.runtime.load import read_plan, verify_file
from toolkit.runtime.plan import MAJOR, Plan


def _edit(directory: Path, **changes: Any) -> None:
    path = directory / "plan.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_reads_what_was_written(tmp_path: Path) -> None:
    plan = write_sample_plan(tmp_path / "plan")
    assert read_plan(tmp_path / "plan") == plan
    (tmp_path / "plan").rename(tmp_path / "moved")
    assert read_plan(tmp_path / "moved") == plan


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"major": MAJOR + 1}, "compile it again, or install"),
        ({"minor": 99}, "compile it again, or install"),
        ({"format": "onnx"}, "expected a toolkit-plan"),
        ({"abi": "0123"}, "device interface 0123"),
        ({"surprise": 1}, "damaged"),
        ({"target": 7}, "damaged"),
        ({"buckets": []}, "no buckets"),
        ({"kernels": {}}, "unknown kernel 'k'"),
        ({"weights": {}}, "unknown weight 'w'"),
        ({"caches": []}, "cache that is not there"),
        ({"memory": {"arena": 64, "weights": 64, "host": 0}}, "outside the arena"),
        ({"weight_files": []}, "unlisted file"),
    ],
)
def test_refuses_edited_plans(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write_sample_plan(tmp_path / "plan")
    _edit(tmp_path / "plan", **changes)
    with pytest.raises(UserError, match=message):
        read_plan(tmp_path / "plan")


RANDOM = {"file": "weights.safetensors", "bytes": 64, "sha256": "", "random": True}
ENTRY = {"file": "weights.safetensors", "offset": 0, "bytes": 64, "shape": [4, 4], "layout": "rows", "fill": "f"}


@pytest.mark.parametrize(
    ("fills", "message"),
    [
        ({}, "unknown fill 'f'"),
        ({"f": {"keep": "ff", "value": "0000"}}, "one length"),
        ({"f": {"keep": "xx", "value": "00"}}, "one length"),
        ({"f": {"keep": "", "value": ""}}, "one length"),
        ({"f": {"keep": "ff", "value": "00"}}, "no seed"),
    ],
)
def test_refuses_random_weights_that_cant_be_made(tmp_path: Path, fills: dict[str, Any], message: str) -> None:
    write_sample_plan(tmp_path / "plan")
    weights = {"w": {**ENTRY, "encoding": {"kind": "float32"}}}
    model = json.loads((tmp_path / "plan" / "plan.json").read_text())["model"]
    seeded = model if message == "no seed" else model | {"random_weights": 1}
    _edit(tmp_path / "plan", weight_files=[RANDOM], weights=weights, fills=fills, model=seeded)
    with pytest.raises(UserError, match=message):
        read_plan(tmp_path / "plan")


def test_a_changed_number_is_noticed(tmp_path: Path) -> None:
    plan = write_sample_plan(tmp_path / "plan")
    write_plan(plan, tmp_path / "plan")
    path = tmp_path / "plan/plan.json"
    text = path.read_text()
    assert read_plan(tmp_path / "plan").digest == plan.content_digest
    path.write_text(json.dumps(json.loads(text)))  # the same plan in other words
    read_plan(tmp_path / "plan")
    numbers = list(re.finditer(r"(?<=: )\d+(?=,\n)", text))
    assert len(numbers) > 20
    for match in numbers:
        path.write_text(f"{text[: match.start()]}{int(match[0]) + 1}{text[match.end() :]}")
        with pytest.raises(UserError, match=r"plan.json was changed|has plan version|damaged"):
            read_plan(tmp_path / "plan")


def test_a_plan_may_consist_of_links_and_is_only_read(tmp_path: Path) -> None:
    plan = write_sample_plan(tmp_path / "stored")
    (tmp_path / "plan/kernels").mkdir(parents=True)
    for file in (path for path in (tmp_path / "stored").rglob("*") if path.is_file()):
        (tmp_path / "plan" / file.relative_to(tmp_path / "stored")).symlink_to(file)
    (tmp_path / "link").symlink_to(tmp_path / "plan")
    before = {path: path.lstat() for path in tmp_path.rglob("*")}
    assert read_plan(tmp_path / "link") == plan
    assert {path: path.lstat() for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("place", ["a directory", "a dangling link", "a link to itself"])
def test_refuses_what_is_no_file(tmp_path: Path, place: str) -> None:
    write_sample_plan(tmp_path / "plan")
    file = tmp_path / "plan/weights.safetensors"
    file.unlink()
    if place == "a directory":
        file.mkdir()
    else:
        file.symlink_to(file if place == "a link to itself" else tmp_path / "nothing")
    with pytest.raises(UserError, match=r"weights.safetensors (is missing|is no file|can't be read: Too many levels)"):
        read_plan(tmp_path / "plan")
    with pytest.raises(UserError, match="can't read"):
        verify_file(tmp_path / "plan", file.name, "")


@pytest.mark.parametrize("file", ["kernels/cpu.so", "weights.safetensors", "tokenizer.json"])
def test_refuses_missing_files(tmp_path: Path, file: str) -> None:
    write_sample_plan(tmp_path / "plan")
    (tmp_path / "plan" / file).unlink()
    with pytest.raises(UserError, match=f"{file} is missing"):
        read_plan(tmp_path / "plan")


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "kernels/../../x", "a\nb"])
def test_refuses_paths_outside(tmp_path: Path, name: str) -> None:
    write_sample_plan(tmp_path / "plan")
    data = json.loads((tmp_path / "plan/plan.json").read_text())
    data["libraries"][0]["file"] = name
    _edit(tmp_path / "plan", **data)
    with pytest.raises(UserError, match="not a path inside the plan"):
        read_plan(tmp_path / "plan")


def test_refuses_truncated_weights_and_edited_contents(tmp_path: Path) -> None:
    plan = write_sample_plan(tmp_path / "plan")
    path = tmp_path / "plan/weights.safetensors"
    path.write_bytes(b"\1" + path.read_bytes()[1:])
    with pytest.raises(UserError, match=r"weights.safetensors was changed"):
        verify_file(tmp_path / "plan", path.name, plan.weight_files[0].sha256)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match="should have 64 bytes, it has 63"):
        read_plan(tmp_path / "plan")


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.mkdir(), lambda path: path.write_text("x")])
def test_refuses_what_is_no_plan(tmp_path: Path, make: Any) -> None:
    make(tmp_path / "plan")
    with pytest.raises(UserError):
        read_plan(tmp_path / "plan")


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_damage_is_a_user_error(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Bytes of plan.json are cut, changed or inserted at random: it reads, or it is refused in a line, nothing else."""
    directory = tmp_path_factory.mktemp("damaged") / "plan"
    write_sample_plan(directory)
    content = bytearray((directory / "plan.json").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, max(0, len(content) - 1)))
        kind = data.draw(st.sampled_from(["change", "cut", "insert"]))
        if kind == "cut":
            del content[place : place + data.draw(st.integers(1, 40))]
        elif kind == "insert":
            content[place:place] = data.draw(st.binary(min_size=1, max_size=8))
        elif content:
            content[place] = data.draw(st.integers(0, 255))
    (directory / "plan.json").write_bytes(bytes(content))
    try:
        assert isinstance(read_plan(directory), Plan)
    except UserError as error:
        assert "\n" not in str(error)
