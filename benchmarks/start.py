"""Seconds from exec of `toolkit serve PLAN` to the first streamed token over HTTP: `start.py PLAN [--runs N]`.

The client asks for a completion from the first moment on, again and again until the port answers.
"""

from __future__ import annotations

import argparse
import http.client
import json
import signal
import socket
import subprocess
import sys
import time


def first_token(plan: str) -> float:
    """One start: seconds until the first data of a stream."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    body = json.dumps({"prompt": "Hello", "max_tokens": 2, "stream": True, "temperature": 0})
    begin = time.perf_counter()
    server = subprocess.Popen(
        [sys.executable, "-m", "toolkit.cli.main", "serve", plan, "--port", str(port)], stdout=subprocess.DEVNULL
    )
    try:
        while server.poll() is None and time.perf_counter() - begin < 60:
            try:
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
                connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
                response = connection.getresponse()
            except OSError:
                time.sleep(0.005)
                continue
            if response.status == http.client.OK and response.readline().startswith(b"data:"):
                return time.perf_counter() - begin
        raise SystemExit("the server did not answer")
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(30)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("plan")
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    first_token(args.plan)
    print(json.dumps({"seconds": [first_token(args.plan) for _ in range(args.runs)]}))
