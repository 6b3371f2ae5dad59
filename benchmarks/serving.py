"""What serving over HTTP costs: `serving.py PLAN [--peer GGUF] [--runs N] [--json FILE]`.

Prints a table of figures with their bars. CPU times are the kernel's own account and so hold on a busy machine; the
others are medians of runs. The client of this script counts events and parses nothing, so that it takes little of the
cores that it shares with the server. With --peer, llama-cpp-python's server is measured in turn with ours; it answers
one request at a time, so it gets 8 where ours gets 64. It runs in the environment of `run.py: peer_python`;
$TOOLKIT_PEER_PATH names a folder with what its server needs besides.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from run import Figure, machine, peer_python, report, say

STREAMS = 64
PROMPT, TOKENS = 32, 96
LONG_PROMPT, ANSWER = 256, 64
PORT = 8431
"""Of the peer; ours takes a free one."""


class Stream:
    """What one streamed answer looked like from outside. Times in seconds."""

    def __init__(self) -> None:
        self.sent = time.perf_counter()
        self.first = 0.0
        self.last = 0.0
        self.events = 0


async def stream(port: int, body: dict[str, Any]) -> Stream:
    """POST a completion and count the events that come back."""
    data = json.dumps(body | {"stream": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    result = Stream()
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    status = await reader.readline()
    if b" 200 " not in status:
        raise SystemExit(f"the server answered {status!r}: {(await reader.read())!r}")
    while piece := await reader.read(1 << 16):
        found = piece.count(b"data: {")
        if found and not result.events:
            result.first = time.perf_counter()
        result.events += found
        result.last = time.perf_counter()
    writer.close()
    return result


async def get_seconds(port: int, path: str) -> float:
    """How long a GET takes."""
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    await reader.read()
    writer.close()
    return time.perf_counter() - began


def prompt(length: int, generator: random.Random) -> list[int]:
    """Random token ids, so that no prefix is cached."""
    return [generator.randrange(100, 40000) for _ in range(length)]


def body(length: int, tokens: int, generator: random.Random, **more: Any) -> dict[str, Any]:
    """A completion of exactly so many tokens."""
    return {"prompt": prompt(length, generator), "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


@contextmanager
def server(command: list[str], ready: str, **environment: str) -> Iterator[tuple[int, int]]:
    """A running server: its process id and port."""
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | environment)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if match := re.search(ready, line):
                yield process.pid, int(match[1])
                return
        raise SystemExit(f"the server did not start: {' '.join(command)}")
    finally:
        process.terminate()
        process.communicate()


def our_server(plan: Path, *options: str) -> Any:
    command = [sys.executable, "-m", "toolkit.cli.main", "serve", str(plan), "--port", "0", "--log-level", "warning"]
    return server([*command, "--max-queued-requests", "0", *options], r"Serving .* at http://.*:(\d+)")


def peer_server(model: Path) -> Any:
    command = [peer_python(), "-m", "llama_cpp.server", "--model", str(model), "--port", str(PORT), "--n_ctx", "2048"]
    options = ["--interrupt_requests", "false", "--n_threads", "2", "--n_threads_batch", "2"]
    path = os.environ.get("TOOLKIT_PEER_PATH", "")
    return server([*command, *options], r"Uvicorn running on http://.*:(\d+)", PYTHONPATH=path)


# --- what is measured -------------------------------------------------------------------------------------------------


async def together(port: int, bodies: list[dict[str, Any]]) -> float:
    """Tokens a second of requests sent at once, prompts included."""
    results = await asyncio.gather(*(stream(port, each) for each in bodies))
    tokens = sum(each["max_tokens"] for each in bodies)
    return tokens / (max(each.last for each in results) - min(each.sent for each in results))


async def overhead(pid: int, port: int, streams: int, tokens: int) -> float:
    """Microseconds of the API process's CPU a streamed token."""
    generator = random.Random(streams)
    await stream(port, body(PROMPT, 4, generator))
    began = cpu_seconds(pid)
    await asyncio.gather(*(stream(port, body(PROMPT, tokens, generator)) for _ in range(streams)))
    return (cpu_seconds(pid) - began) / (streams * tokens) * 1e6


def offline(plan: Path) -> float:
    """The same load as `together` on the engine in this process, without text."""
    from toolkit import LLM
    from toolkit.runtime.request import SamplingParams

    generator = random.Random(1)
    prompts = [prompt(PROMPT, generator) for _ in range(STREAMS)]
    with LLM(plan) as llm:
        params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
        llm.generate(prompts[:1], params)
        began = time.perf_counter()
        llm.generate([prompt(PROMPT, generator) for _ in range(STREAMS)], params)
        return STREAMS * TOKENS / (time.perf_counter() - began)


async def first_token(port: int, requests: int) -> tuple[float, float]:
    """Seconds to the first token: the median of requests alone, and the 99th percentile at half of full load.

    Full load is as many requests a second as eight clients get answered who ask again at once.
    """
    generator = random.Random(2)

    async def one() -> Stream:
        return await stream(port, body(LONG_PROMPT, ANSWER, generator))

    alone = [await one() for _ in range(8)]
    began = time.perf_counter()

    async def client() -> None:
        for _ in range(4):
            await one()

    await asyncio.gather(*(client() for _ in range(8)))
    rate = 32 / (time.perf_counter() - began) / 2
    tasks = []
    for _ in range(requests):
        tasks.append(asyncio.create_task(one()))
        await asyncio.sleep(generator.expovariate(rate))
    loaded = sorted(each.first - each.sent for each in await asyncio.gather(*tasks))
    return statistics.median(each.first - each.sent for each in alone), loaded[int(len(loaded) * 0.99)]


SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "minItems": TOKENS,
}
"""No answer of `TOKENS` tokens is complete, so that all are as long as without it."""


async def structured(port: int) -> tuple[float, float]:
    """Tokens a second of eight streams, free and under a grammar; medians of four turns each."""
    generator = random.Random(3)
    form = {"type": "json_schema", "json_schema": {"name": "people", "schema": SCHEMA}}

    async def turn(more: dict[str, Any]) -> float:
        return await together(port, [body(PROMPT, TOKENS, generator) | more for _ in range(8)])

    bound = {"response_format": form, "ignore_eos": False}
    await turn(bound)
    pairs = [(await turn({}), await turn(bound)) for _ in range(4)]
    free, kept = (statistics.median(each) for each in zip(*pairs, strict=True))
    return free, kept


async def health(port: int) -> float:
    """The slowest of /health, in milliseconds, while 64 streams run."""
    generator = random.Random(4)
    load = asyncio.gather(*(stream(port, body(PROMPT, TOKENS, generator)) for _ in range(STREAMS)))
    await asyncio.sleep(0.5)
    slowest = 0.0
    while not load.done():
        slowest = max(slowest, await get_seconds(port, "/health"))
        await asyncio.sleep(0.05)
    await load
    return slowest * 1000


def measure(plan: Path, peer: Path | None, runs: int) -> list[Figure]:
    """All figures."""
    found: dict[str, list[float]] = {}

    def note(**values: float) -> None:
        for name, value in values.items():
            found.setdefault(name, []).append(value)
            say(f"  {name}: {value:.4g}")

    for turn in range(runs):
        say(f"run {turn + 1} of {runs}, load {os.getloadavg()[0]:.1f}")
        note(offline=offline(plan))
        with our_server(plan) as (pid, port):
            generator = random.Random(5)
            asyncio.run(stream(port, body(PROMPT, 8, generator)))
            note(together=asyncio.run(together(port, [body(PROMPT, TOKENS, generator) for _ in range(STREAMS)])))
            note(overhead=asyncio.run(overhead(pid, port, STREAMS, TOKENS)))
            note(overhead_alone=asyncio.run(overhead(pid, port, 1, 800)))
            note(health=asyncio.run(health(port)))
            free, bound = asyncio.run(structured(port))
            note(structured=bound / free)
            unloaded, loaded = asyncio.run(first_token(port, 60))
            note(unloaded=unloaded, loaded=loaded)
            note(alone=asyncio.run(together(port, [body(PROMPT, 128, generator)])))
        if peer is not None:
            with peer_server(peer) as (_, port):
                generator = random.Random(5)
                plain = [{"prompt": "Once upon a time", "max_tokens": 128, "temperature": 0} for _ in range(8)]
                asyncio.run(together(port, plain[:1]))
                note(peer_alone=asyncio.run(together(port, plain[:1])))
                note(peer_together=asyncio.run(together(port, plain)))
    middle = {name: statistics.median(values) for name, values in found.items()}
    share, slower = middle["together"] / middle["offline"], middle["loaded"] / middle["unloaded"]
    figures = [
        Figure("HTTP: CPU a token, 64 streams", f"{middle['overhead']:.0f} us", "", middle["overhead"], 60, False),
        Figure(
            "HTTP: CPU a token, 1 stream", f"{middle['overhead_alone']:.0f} us", "", middle["overhead_alone"], 60, False
        ),
        Figure("64 streams against the offline engine", f"{middle['together']:.0f} tok/s", "", share, 0.85, True),
        Figure("first token p99 at half load / p50 alone", f"{middle['loaded'] * 1e3:.0f} ms", "", slower, 2, False),
        Figure("structured output, share of throughput", "", "", middle["structured"], 0.95, True),
        Figure("/health under full load, slowest", f"{middle['health']:.1f} ms", "", middle["health"], 50, False),
    ]
    if peer is not None:
        for what, name in (("1 stream over HTTP", "alone"), ("8 and 64 streams over HTTP", "together")):
            ours, theirs = middle[name], middle[f"peer_{name}"]
            figures.append(Figure(what, f"{ours:.0f} tok/s", f"{theirs:.0f} tok/s", ours / theirs, 1.0, True))
    return figures


def main() -> int:
    """Print the table; 1 if a bar was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--peer", type=Path, help="the model as GGUF, for llama-cpp-python's server")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = machine()
    return report(found, measure(args.plan, args.peer, args.runs), args.json)


if __name__ == "__main__":
    sys.exit(main())
