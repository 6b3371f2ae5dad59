"""The documentation against the code: what pages name exists, and their tables are complete."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import click
import pytest
from unit.runtime.server.fakes import make_plan

from toolkit.cli.main import group
from toolkit.compiler.lower import RULES
from toolkit.kernels_templates.registry import FAMILIES
from toolkit.models.coverage import PROOFS, Architecture, architectures
from toolkit.runtime.env import describe_env
from toolkit.runtime.request import Stats
from toolkit.runtime.server.metrics import Metrics
from toolkit.runtime.server.openai import ChatRequest, CompletionRequest

ROOT = Path(__file__).parents[2]
FOLDERS = ("cli", "compiler", "kernels_templates", "models", "passes", "runtime", "tests", "benchmarks", "docs")
FILES = {
    *(path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")),
    *(path.name for path in ROOT.iterdir()),
}
DOCS = {path.relative_to(ROOT / "docs").as_posix(): path.read_text() for path in (ROOT / "docs").rglob("*.md")}
PAGES = DOCS | {"CONTRIBUTING.md": (ROOT / "CONTRIBUTING.md").read_text()}


def page(name: str) -> str:
    return PAGES[f"{name}.md"]


def find(file: str) -> list[Path]:
    """The files that a page may mean by a path or its end."""
    return [ROOT / path for path in FILES if path == file or path.endswith(f"/{file}")]


def first_cells(text: str) -> Iterator[str]:
    """Names in backticks in the first column of tables."""
    for line in text.splitlines():
        if line.startswith("| "):
            yield from re.findall(r"`([^`]+)`", line.split(" | ")[0])


@pytest.mark.parametrize("name", PAGES)
def test_files_that_pages_name_exist(name: str) -> None:
    named = re.findall(r"`([\w./-]+\.(?:py|j2|md|toml|yml))\b[^`]*`", PAGES[name])
    missing = [file for file in named if "NAME" not in file and not find(file)]
    assert not missing


@pytest.mark.parametrize("name", PAGES)
def test_functions_that_pages_name_exist(name: str) -> None:
    named = re.findall(r"`([\w./-]+\.(?:py|j2)): ([\w.]+)`", PAGES[name])
    missing = [
        f"{file}: {item}"
        for file, dotted in named
        for item in dotted.split(".")
        if not any(re.search(rf"\b{item}\b", path.read_text()) for path in find(file))
    ]
    assert not missing


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(PAGES.keys() - {"CONTRIBUTING.md"})


def test_tested_architectures() -> None:
    before, header, rest = page("models").partition("| model type | models |")
    table, end, after = (header + rest).partition("\n\n")
    wanted = "\n".join(map(row, [HEADER, ["---"] * len(HEADER), *map(cells, architectures())]))
    if os.environ.get("TOOLKIT_UPDATE_DOCS"):
        (ROOT / "docs/models.md").write_text(before + wanted + end + after)
    else:
        assert table == wanted, "TOOLKIT_UPDATE_DOCS=1 writes it anew"


HEADER = ["model type", "models", *PROOFS, "RoPE", "features"]


def cells(each: Architecture) -> list[str]:
    marks = ["✓" if proof in each.proved else "" for proof in PROOFS]
    return [f"`{each.model_type}`", each.names, *marks, ", ".join(each.rope), ", ".join(each.features)]


def row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def test_kernel_families() -> None:
    table = page("kernels").partition("| family |")[2].partition("\n\n")[0]
    assert set(first_cells(table)) == FAMILIES.keys()


def test_lowering_rules() -> None:
    table = page("lowering").partition("| op | becomes |")[2].partition("\n\n")[0]
    kinds = chain.from_iterable(line.split(" | ")[0].strip("| ").split(", ") for line in table.splitlines()[2:])
    assert set(kinds) == RULES.keys()


def test_code_of_the_weights_journey() -> None:
    blocks = re.findall(r"```cpp\n(.*?)```", page("journey-weight"), re.DOTALL)
    quoted = [line.partition("//")[0].strip() for block in blocks[1:] for line in block.splitlines()]
    templates = "\n".join(path.read_text() for path in (ROOT / "kernels_templates/cpu").glob("*.j2"))
    assert len(quoted) >= 5
    assert [line for line in quoted if line not in templates] == []


# --- the command line -------------------------------------------------------------------------------------------------


def commands(command: click.Command, name: str = "") -> Iterator[tuple[str, click.Command]]:
    if isinstance(command, click.Group):
        with click.Context(command) as context:
            for child in command.list_commands(context):
                found = command.get_command(context, child)
                assert found is not None
                yield from commands(found, f"{name} {child}".strip())
    else:
        yield name, command


COMMANDS = dict(commands(group))


def options(command: click.Command) -> set[str]:
    return {
        text
        for item in command.params
        if isinstance(item, click.Option)
        for text in (*item.opts, *item.secondary_opts)
        if text[1] == "-"
    }


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_documented(name: str) -> None:
    text = page("cli")
    section = text.partition(f"\n## {name.split(maxsplit=1)[0]}\n")[2].partition("\n## ")[0]
    shared = text.partition("\n## serve\n")[2].partition("\n## ")[0]
    sampling = text.partition("\n## generate\n")[2].partition("\n## ")[0] if name == "chat" else ""
    assert section, f"cli.md has no section on {name}"
    assert {option for option in options(COMMANDS[name]) if f"{option}" not in section + shared + sampling} == set()


def test_documented_options_exist() -> None:
    known = set().union(*(options(command) for command in COMMANDS.values())) | {"--help"}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", page("cli"))) <= known


def test_environment_variables() -> None:
    assert describe_env().keys() <= set(first_cells(page("cli")))


# --- the server -------------------------------------------------------------------------------------------------------


def test_routes() -> None:
    code = (ROOT / "runtime/server/app.py").read_text()
    names = {"{model:path}": "NAME", "{response}": "ID"}
    routes = {
        re.sub(r"{.*}", lambda part: names[part[0]], path)
        for path in re.findall(r'(?:post|get|action)\("(/[^"]+)"', code)
    }
    table = page("server").partition("## Routes")[2].partition("\n## ")[0]
    assert set(re.findall(r"`(?:GET|POST) (/[\w/.]+)`", table)) == routes


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_fields(kind: type[ChatRequest | CompletionRequest]) -> None:
    text = page("server").partition("## Fields")[2].partition("\n## ")[0]
    assert {field for field in kind.__struct_fields__ if f"`{field}`" not in text} == set()


def test_metrics() -> None:
    text = page("server").partition("## Metrics")[2].partition("\n## ")[0]
    stats = Stats(0, 0, 0, 0.0, 0, 0, 0, 0, 0, 0, 0.0)
    names = re.findall(r"^# TYPE toolkit:(\w+)", Metrics(make_plan(), "model").text(stats), re.MULTILINE)
    assert len(names) > 25
    assert {name for name in names if f"`{name}`" not in text} == set()
