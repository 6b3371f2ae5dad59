"""`toolkit run-batch` on a real model, killed and continued."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def start(plan: Path, source: Path, output: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "toolkit.cli.main", "run-batch", "-i", str(source), "-o", str(output)]
    command += ["-m", str(plan), "--memory", "1GiB", "--concurrency", "4"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def request(index: int, **fields: Any) -> str:
    messages = [{"role": "user", "content": f"What is {index} plus one?"}]
    body = {"messages": messages, "max_tokens": 40, "min_tokens": 40, **fields}
    return json.dumps({"custom_id": str(index), "method": "POST", "url": "/v1/chat/completions", "body": body}) + "\n"


def test_a_killed_run_is_continued(smollm2_plan: Path, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(map(request, range(24))) + request(24, store=True))
    first = start(smollm2_plan, source, output)
    while not output.exists() or output.read_bytes().count(b"\n") < 4:
        assert first.poll() is None
        time.sleep(0.002)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    before = output.read_bytes()
    before = before[: before.rfind(b"\n") + 1]
    done = before.count(b"\n")
    assert 4 <= done < 24
    second = start(smollm2_plan, source, output)
    said = second.communicate()[1]
    assert second.returncode == 2, "one request is refused"
    assert f"{24 - done} answered, 1 refused, 0 failed, {done} done before" in said
    assert output.read_bytes().startswith(before)
    answers = {line["custom_id"]: line["response"] for line in map(json.loads, output.read_text().splitlines())}
    assert answers.keys() == set(map(str, range(25)))
    assert answers.pop("24")["body"]["error"]["param"] == "store"
    assert {answer["body"]["usage"]["completion_tokens"] for answer in answers.values()} == {40}
    third = start(smollm2_plan, source, output)
    assert "25 done before" in third.communicate()[1]
    assert third.returncode == 0
