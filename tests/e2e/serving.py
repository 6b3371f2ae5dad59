"""Runs `toolkit serve` for tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass
class ServerProcess:
    """A running `toolkit serve`."""

    process: subprocess.Popen[str]
    url: str

    @property
    def engine(self) -> int:
        """The engine's process id."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task").glob("*/children")
        (child,) = [int(child) for path in children for child in path.read_text().split()]
        return child

    def stop(self) -> int:
        """Ask it to stop and return its exit code."""
        self.process.terminate()
        return self.wait()

    def wait(self, seconds: float = 60.0) -> int:
        """The exit code, once it has ended."""
        code = self.process.wait(seconds)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code


StartServer = Callable[..., ServerProcess]


def start_server(plan: Path, *options: str, **environment: str) -> ServerProcess:
    """Start a server on a free port and wait until it is ready."""
    path = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-m", "toolkit.cli.main"]
    return start_command(command, plan, *options, env=os.environ | {"PYTHONPATH": path} | environment)


def start_command(command: Sequence[str], plan: Path, *options: str, env: Mapping[str, str]) -> ServerProcess:
    """The same with the `toolkit` command and environment given."""
    arguments = ["serve", str(plan), "--port", "0", "--memory", "1GiB", *options]
    process = subprocess.Popen([*command, *arguments], stderr=subprocess.PIPE, text=True, env=env)
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if match := re.match(r"Serving .* at (\S+) after", line):
            return ServerProcess(process, match[1])
    raise AssertionError(f"the server ended with {process.wait()}: {''.join(said)}")
