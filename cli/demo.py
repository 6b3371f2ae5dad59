"""`make demo`: compile a real model, serve the plan, ask it one question over HTTP, and stop the server.

python -m toolkit.cli.demo MODEL.gguf FOLDER
"""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

QUESTION = "What is the capital of France?"


def main(model: Path, folder: Path) -> int:
    """Run the demo; 0 if the answer came."""
    plan = folder / f"{model.stem}-plan"
    if not (plan / "plan.json").exists():
        _say(f"Compiling {model.name} for cpu (done once)")
        folder.mkdir(parents=True, exist_ok=True)
        _toolkit("compile", str(model), "--target", "cpu", "-o", str(plan))
    port = _free_port()
    _say(f"Starting the server on port {port}")
    started = time.perf_counter()
    server = subprocess.Popen([*_COMMAND, "serve", str(plan), "--port", str(port)], stdout=subprocess.DEVNULL)
    try:
        _wait_until_ready(port, server)
        print(f"ready after {time.perf_counter() - started:.2f} s")
        _ask(port)
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(30)
    _say("Next")
    print(
        f"  .venv/bin/toolkit chat {plan}            talk to it\n"
        f"  .venv/bin/toolkit inspect {plan}         see what the model became\n"
        f"  .venv/bin/toolkit serve {plan}           serve it to any OpenAI client\n"
        f"  .venv/bin/toolkit compile --help                        compile your own model"
    )
    return 0


_COMMAND = (sys.executable, "-m", "toolkit.cli.main")


def _toolkit(*args: str) -> None:
    done = subprocess.run([*_COMMAND, *args], check=False)
    if done.returncode:
        sys.exit(done.returncode)


def _say(text: str) -> None:
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n{text}", flush=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_until_ready(port: int, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if server.poll() is not None:
            sys.exit(f"the server ended with exit code {server.returncode}")
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/health")
            if connection.getresponse().status == http.client.OK:
                return
        except OSError:
            pass
        time.sleep(0.05)
    sys.exit("the server did not become ready within 60 s")


def _ask(port: int) -> None:
    """Print the answer as it arrives, then its speed."""
    _say(f"> {QUESTION}")
    begin = time.perf_counter()
    arrivals: list[float] = []
    for piece in _stream(port):
        arrivals.append(time.perf_counter())
        print(piece, end="", flush=True)
    first, total = arrivals[0] - begin, arrivals[-1] - arrivals[0]
    speed = (len(arrivals) - 1) / total if total else 0.0
    print(f"\n\n{len(arrivals)} tokens, {speed:.0f} tokens/s, first token after {first * 1000:.0f} ms")


def _stream(port: int) -> Iterator[str]:
    """The pieces of a streamed chat completion."""
    messages = [{"role": "system", "content": "Answer in one sentence."}, {"role": "user", "content": QUESTION}]
    body = {"messages": messages, "stream": True, "max_tokens": 64, "temperature": 0}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != http.client.OK:
        sys.exit(f"the server answered {response.status}: {response.read().decode()}")
    for line in response:
        data = line.decode().removeprefix("data:").strip()
        if data and data != "[DONE]":
            piece = json.loads(data)["choices"][0]["delta"].get("content")
            if piece:
                yield piece


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
