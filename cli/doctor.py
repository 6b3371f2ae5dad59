"""`toolkit doctor`: check what this machine can compile and run."""

from __future__ import annotations

import os
import platform
import re
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import click
import msgspec

from .. import __version__
from ..runtime.device.machine import available_memory, cpu_flags, usable_cores
from ..runtime.env import describe_env
from ..runtime.errors import UserError
from .options import as_json

DISTRIBUTION = "plan-toolkit"


class Finding(msgspec.Struct, frozen=True):
    """One thing that was looked at. `problem` says what does not work because of it, "" if nothing."""

    topic: str
    name: str
    value: str
    problem: str = ""


@click.command("doctor")
@as_json
def command(as_json: bool) -> None:
    """Check what this machine can compile and run. Exits with 1 if it can't run plans.

    \b
    Examples:
      toolkit doctor
      toolkit doctor --json
    """
    findings = examine()
    if as_json:
        click.echo(msgspec.json.encode(findings))
    else:
        _print(findings)
    if any(finding.problem and finding.topic in ("python", "machine") for finding in findings):
        raise SystemExit(1)


def examine() -> list[Finding]:
    """Everything there is to say."""
    return [*_python(), *_machine(), *_gpus(), *_compilers(), *_packages(), *_settings()]


def _python() -> list[Finding]:
    current = sys.version_info[:2]
    problem = "" if (3, 11) <= current < (3, 14) else "toolkit needs Python 3.11 to 3.13"
    return [
        Finding("python", "toolkit", __version__),
        Finding("python", "python", platform.python_version(), problem),
        Finding("python", "executable", sys.executable),
    ]


def _machine() -> list[Finding]:
    supported = sys.platform == "linux" and platform.machine() == "x86_64"
    system = Finding("machine", "platform", platform.platform(), "" if supported else "plans run on Linux on x86-64")
    if sys.platform != "linux":
        return [system]
    return [system, *_processor(), *_memory()]


def _processor() -> list[Finding]:
    from ..compiler.codegen.cpu import ISA_LEVELS

    text = Path("/proc/cpuinfo").read_text()
    model = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    flags = cpu_flags()
    levels = [level.name for level in ISA_LEVELS if flags.issuperset(level.requires)]
    lacking = ", ".join(sorted(set(ISA_LEVELS[0].requires) - flags))
    problem = "" if levels else f"plans need {ISA_LEVELS[0].name}, and this processor lacks {lacking}"
    cpus, usable = os.cpu_count() or 1, usable_cores()
    return [
        Finding("machine", "processor", model[1] if model else "unknown"),
        Finding("machine", "instruction set", levels[-1] if levels else "older", problem),
        Finding("machine", "cores", f"{cpus} CPUs, {usable} kernel thread{'s' * (usable > 1)} by default"),
    ]


def _memory() -> list[Finding]:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return [Finding("machine", "memory", f"{available_memory() / 2**30:.1f} GiB available of {total / 2**30:.1f} GiB")]


def _gpus() -> list[Finding]:
    """GPUs that plans can run on. That there are none is no problem on a machine without them."""
    from ..runtime.device.cuda.driver import list_gpus

    try:
        return [Finding("gpu", f"GPU {index}", text) for index, text in enumerate(list_gpus())]
    except UserError as error:
        return [Finding("gpu", "GPU", f"none: {error}")]


def _compilers() -> list[Finding]:
    from ..compiler.cache import cache_directory
    from ..compiler.codegen.cpu import find_compiler

    folder = cache_directory()
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.exists() else 0
    cache = Finding("compiling", "kernel cache", f"{folder} ({size / 2**20:.1f} MiB)", _unwritable(folder))
    try:
        return [Finding("compiling", "C++ compiler", find_compiler().version), cache]
    except UserError as error:
        return [Finding("compiling", "C++ compiler", "none", str(error)), cache]


def _unwritable(folder: Path) -> str:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return "" if os.access(existing, os.W_OK) else f"{existing} can't be written: set TOOLKIT_CACHE to another folder"


def _packages() -> list[Finding]:
    """What the optional parts need, by extra."""
    findings = []
    for requirement in requires(DISTRIBUTION) or []:
        match = re.match(r"([\w.-]+)(.*?);.*extra == ['\"](compile|cuda)['\"]", requirement)
        if match:
            findings.append(_package(match[1], match[2].strip(), match[3]))
    return findings


def _package(name: str, wanted: str, extra: str) -> Finding:
    try:
        return Finding(f"[{extra}]", name, version(name))
    except PackageNotFoundError:
        hint = f"compiling needs {name}{wanted}: pip install '{DISTRIBUTION}[compile]'" if extra == "compile" else ""
        return Finding(f"[{extra}]", name, "not installed", hint)


def _settings() -> list[Finding]:
    return [Finding("environment", name, os.environ[name]) for name in describe_env() if os.environ.get(name)]


def _print(findings: list[Finding]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from .console import report_console

    table = Table(box=None, pad_edge=False, show_header=False)
    topic = ""
    for finding in findings:
        if finding.topic != topic:
            topic = finding.topic
            table.add_row("", f"[bold]{escape(topic)}[/]")
        table.add_row("[yellow]![/]" if finding.problem else "[green]✓[/]", f"  {finding.name}", escape(finding.value))
        if finding.problem:
            table.add_row("", "", f"[yellow]{escape(finding.problem)}[/]")
    report_console().print(table)
