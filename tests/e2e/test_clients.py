"""The pages on clients, run as they are pasted: every block of a page against one server.

A client is installed in `$TOOLKIT_TEST_CLIENTS/NAME`, which `make clients` makes, or beside the tests.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from e2e.serving import ServerProcess

PAGES = Path(__file__).parents[2] / "docs/clients"
REQUIREMENTS = Path(__file__).parents[1] / "clients/requirements"
INSTALLED = ("openai", "anthropic")
"""Clients that are installed with the tests."""
SAYS = {"lm-eval": r"\|exact_match\|↑\s*\|\s*[\d.]+", "guidellm": r"concurrent@4 \|"}
"""What a page prints; the others ask for the capital of France."""
DEMO = re.compile(r"(pip install|toolkit) ")
SECONDS = 240


def environment(name: str) -> Path:
    """The interpreter that has a client."""
    if name in INSTALLED:
        assert find_spec(name)
        return Path(sys.executable)
    python = Path(os.environ.get("TOOLKIT_TEST_CLIENTS", ".clients")) / name / "bin/python"
    if not python.exists():
        pytest.skip(f"{name} is not installed; `make clients` does that")
    return python.absolute()


def blocks(name: str, url: str) -> list[tuple[str, str]]:
    """The blocks of a page with their language, but for what installs and serves."""
    text = (PAGES / f"{name}.md").read_text().replace("http://127.0.0.1:8000", url)
    found = []
    for language, code in re.findall(r"```(bash|python)\n(.*?)```", text, re.DOTALL):
        kept = "\n".join(line for line in code.splitlines() if not DEMO.match(line))
        found += [(language, kept)] * bool(kept)
    return found


def test_every_client_has_its_requirements() -> None:
    pages = {path.stem for path in PAGES.glob("*.md")}
    assert pages == {path.stem for path in REQUIREMENTS.glob("*.txt")} | set(INSTALLED)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", sorted(path.stem for path in PAGES.glob("*.md")))
def test_the_page_works_when_pasted(name: str, server: ServerProcess, smollm2_plan: Path, tmp_path: Path) -> None:
    python = environment(name)
    (tmp_path / "smol-plan").symlink_to(smollm2_plan)
    variables = {"PATH": f"{python.parent}:{os.environ['PATH']}", "HOME": str(tmp_path), "COLUMNS": "160"}
    said = ""
    for language, code in blocks(name, server.url):
        command = [str(python), "-"] if language == "python" else ["bash", "-e"]
        done = subprocess.run(
            command,
            input=code,
            cwd=tmp_path,
            env=variables,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert done.returncode == 0, f"{code}\n{done.stderr[-3000:]}"
        assert done.stdout.strip()
        said += done.stdout
    assert re.search(SAYS.get(name, "Paris"), said)
