"""The command line's entry: exit codes, messages, and what is imported."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType, SimpleNamespace

import click
import pytest

from toolkit.cli import main
from toolkit.runtime.debug import debug, debug_level
from toolkit.runtime.errors import InternalError, UserError


@pytest.fixture(autouse=True)
def fresh_level() -> None:
    debug_level.cache_clear()


def run_raising(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> int:
    """Exit code of a command that raises."""

    @click.command()
    def command() -> None:
        raise error

    def load(name: str, package: str) -> SimpleNamespace:
        return SimpleNamespace(command=command)

    monkeypatch.setattr(main, "import_module", load)
    return main.run(["doctor"])


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (
            UserError("expected a plan, found none: compile one"),
            2,
            "toolkit: expected a plan, found none: compile one\n",
        ),
        (InternalError("broken at launch 3"), 1, "toolkit: internal error, please report it: broken at launch 3\n"),
        (KeyboardInterrupt(), 130, "toolkit: stopped\n"),
    ],
)
def test_errors_become_exit_codes(
    error: BaseException, code: int, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_raising(error, monkeypatch) == code
    captured = capsys.readouterr()
    assert captured.err.lstrip() == text, "a line break ends the ^C of a terminal"
    assert captured.out == ""


def test_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["compil"]) == 2
    assert "compil" in capsys.readouterr().err
    assert main.run(["compile"]) == 2
    assert "MODEL" in capsys.readouterr().err


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in main.COMMANDS)
    assert "Examples:" in text


@pytest.mark.parametrize("name", main.COMMANDS)
def test_every_command_has_help_with_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([name, "--help"]) == 0
    assert "Examples:" in capsys.readouterr().out


def test_a_bad_debug_level_teaches(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TOOLKIT_DEBUG", "loud")
    assert main.run(["--help"]) == 2
    assert "TOOLKIT_DEBUG must be 0 to 4, found 'loud'" in capsys.readouterr().err


def test_debug_levels(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TOOLKIT_DEBUG", "2")
    for level in (1, 2, 3):
        debug(level, f"at {level}")
    assert capsys.readouterr().err == "[1] at 1\n[2] at 2\n"


@pytest.mark.parametrize("name", ["serve", "compile"])
def test_commands_do_not_load_torch_to_start(name: str) -> None:
    heavy = ("torch", "transformers", "triton", "onnx", "tvm", "gguf")
    code = (
        "import sys; from toolkit.cli.main import run; run([sys.argv[1], '--help']); "
        f"print([name for name in {heavy} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, name], capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr.strip() == "[]"


def test_help_of_all_imports_no_command() -> None:
    code = (
        "import sys; from toolkit.cli.main import COMMANDS, run; run(['--help']); "
        "print([m for m, _ in COMMANDS.values() if f'toolkit.cli.{m}' in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr.strip() == "[]"
    assert isinstance(main, ModuleType)
