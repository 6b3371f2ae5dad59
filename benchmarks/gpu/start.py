"""Seconds from the start of a process to its first token, and its memory: `start.py PLAN [--runs 3] [--json FILE]`.

The process opens the plan and asks for two tokens after a prompt of eight. Memory is the proportional set size of it
and of all its children, at the end.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from common import save

CHILD = """
import sys
from toolkit.runtime.llm import LLM
llm = LLM(sys.argv[1])
first = llm.generate([list(range(3, 11))], llm.params(max_tokens=2, temperature=0.0, ignore_eos=True))
print(first[0].token_ids, flush=True)
sys.stdin.read()
"""


def tree(pid: int) -> list[int]:
    """A process and all below it."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(each for child in children for each in tree(int(child)))]


def proportional_memory(pid: int) -> int:
    """Bytes, over all processes."""
    texts = [Path(f"/proc/{each}/smaps_rollup").read_text() for each in tree(pid)]
    return sum(1024 * int(match[1]) for text in texts if (match := re.search(r"^Pss:\s+(\d+)", text, re.MULTILINE)))


def measure(plan: Path) -> dict[str, Any]:
    """One start."""
    began = time.perf_counter()
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(plan)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    line = child.stdout.readline()
    seconds = time.perf_counter() - began
    if not line:
        raise SystemExit("the process said nothing")
    memory = proportional_memory(child.pid)
    child.communicate("")
    return {"seconds": round(seconds, 3), "pss_mb": round(memory / 1e6, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    runs = [measure(options.plan) for _ in range(options.runs)]
    print({"plan": options.plan.name, "bar_s": 6.0, "bar_pss_mb": 700.0, "runs": runs})
    if options.json:
        save(options.json, "gpu_start", runs)


if __name__ == "__main__":
    main()
