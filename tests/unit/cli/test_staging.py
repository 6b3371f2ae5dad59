"""Writing a plan's directory as a whole or not at all."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from toolkit.cli.staging import check_output, staged
from toolkit.runtime.errors import UserError


def write(output: Path, text: str, *, force: bool = False) -> None:
    with staged(output, force=force) as folder:
        (folder / "plan.json").write_text(text)


def fail(output: Path, error: BaseException, *, force: bool = False) -> None:
    """Raise when half is written."""
    with staged(output, force=force) as folder:
        (folder / "plan.json").write_text("half")
        raise error


def test_the_directory_appears_at_the_end(tmp_path: Path) -> None:
    output = tmp_path / "deep" / "plan"
    with staged(output, force=False) as folder:
        assert folder.parent == output.parent
        (folder / "plan.json").write_text("1")
        assert not output.exists()
    assert [path.name for path in output.parent.iterdir()] == ["plan"]
    assert (output / "plan.json").read_text() == "1"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("x"), UserError("x")])
def test_a_failure_leaves_nothing(error: BaseException, tmp_path: Path) -> None:
    with pytest.raises(type(error)):
        fail(tmp_path / "plan", error)
    assert not list(tmp_path.iterdir())


def test_a_failure_keeps_the_old_plan(tmp_path: Path) -> None:
    write(tmp_path / "plan", "old")
    with pytest.raises(RuntimeError):
        fail(tmp_path / "plan", RuntimeError(), force=True)
    assert (tmp_path / "plan" / "plan.json").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


def test_force_replaces_a_plan(tmp_path: Path) -> None:
    write(tmp_path / "plan", "old")
    with pytest.raises(UserError, match="exists already: give --force"):
        write(tmp_path / "plan", "new")
    write(tmp_path / "plan", "new", force=True)
    assert (tmp_path / "plan" / "plan.json").read_text() == "new"
    assert len(list(tmp_path.iterdir())) == 1


def test_force_replaces_nothing_but_plans(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "diary.txt").write_text("dear")
    for force in (False, True):
        with pytest.raises(UserError):
            write(tmp_path / "home", "x", force=force)
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="replaces plans only"):
        check_output(tmp_path / "file", force=True)
    assert (tmp_path / "home" / "diary.txt").read_text() == "dear"


def test_a_full_disk_is_said_plainly(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no space left while writing"):
        fail(tmp_path / "plan", OSError(errno.ENOSPC, "No space left on device"))
    assert not list(tmp_path.iterdir())


def test_a_place_that_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="can't write"):
        write(tmp_path / "file" / "plan", "x")


def test_other_os_errors_pass(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), staged(tmp_path / "plan", force=False) as folder:
        (folder / "missing").read_text()
