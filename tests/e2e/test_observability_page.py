"""What `docs/observability.md` says to paste, pasted."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

PAGE = (Path(__file__).parents[2] / "docs/observability.md").read_text()


def blocks(section: str, language: str) -> str:
    """The code of a section, joined."""
    text = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    found = re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
    assert found
    return "\n".join(found)


def test_the_scrape_configurations_are_yaml_and_alike() -> None:
    here = yaml.safe_load(blocks("Prometheus", "yaml"))
    there = yaml.safe_load(blocks("Grafana", "bash").partition("<<END\n")[2].partition("END\n")[0])
    assert here == there
    assert here["scrape_configs"][0]["static_configs"] == [{"targets": ["localhost:8000"]}]


@pytest.mark.skipif(os.system("command -v curl >/dev/null") != 0, reason="needs curl")
def test_logs_and_profiles(smollm2_plan: Path, tmp_path: Path) -> None:
    (tmp_path / "smol-plan").symlink_to(smollm2_plan)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    commands = blocks("Logs", "bash") + blocks("Profiles", "bash")
    python = shlex.quote(sys.executable)
    toolkit = f'toolkit() {{ exec {python} -m toolkit.cli.main "$@" --port {port} --memory 1GiB; }}\n'
    script = toolkit + commands.replace("localhost:8000", f"127.0.0.1:{port}").replace("python3 ", f"{python} ")
    path = os.pathsep.join(filter(None, sys.path))
    shell = subprocess.Popen(
        ["bash", "-e", "-c", script + "\nkill %1; wait"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = shell.communicate(timeout=120)
    finally:
        if shell.poll() is None:
            os.killpg(shell.pid, signal.SIGKILL)
    lines = said.splitlines()
    assert any(re.fullmatch(r"\d+\.\d+", line.rpartition("}")[2]) for line in lines), said
    names = {event["name"] for event in json.loads((tmp_path / "profile.json").read_text())["traceEvents"]}
    assert {"step", "schedule", "build", "run", "wait", "update"} <= names
    messages = [json.loads(line)["message"] for line in (tmp_path / "server.log").read_text().splitlines()]
    assert messages[0] == "serving"
    assert messages.count("request") == 4
