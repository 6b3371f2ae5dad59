"""Plans that nobody closes: the threads that run their kernels end before the memory that these use goes away."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PREAMBLE = """
import asyncio, gc, sys, threading, time
from pathlib import Path
from toolkit.runtime.llm import LLM, AsyncLLM
from toolkit.runtime.request import SamplingParams

OPTIONS = {"memory": float(1 << 30), "threads": 3, "verify": False}
ENDLESS = SamplingParams(temperature=0.0, max_tokens=900, ignore_eos=True)
plan = Path(sys.argv[1])

def kernel_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith(("kernel", "engine"))]

async def first_token(llm):
    async for delta in llm.stream([1, 2, 3], ENDLESS):
        return llm

def started(llm):
    next(llm.stream([1, 2, 3], ENDLESS))
    return llm
"""
CASES = {
    "dropped": """
        for _ in range(3):
            llm = started(LLM(plan, **OPTIONS))
            assert len(kernel_threads()) == 2
            del llm
            gc.collect()
            assert not kernel_threads()
        """,
    "dropped by the collector": """
        llm = started(LLM(plan, **OPTIONS))
        llm.itself = llm
        del llm
        gc.collect()
        assert not kernel_threads()
        """,
    "open at exit": "llm = started(LLM(plan, **OPTIONS))",
    "running at exit": """
        llm = LLM(plan, **OPTIONS)
        threading.Thread(target=lambda: list(llm.stream([1, 2, 3], ENDLESS)), daemon=True).start()
        time.sleep(0.3)
        """,
    "asynchronous and dropped": """
        llm = asyncio.run(first_token(AsyncLLM(plan, **OPTIONS)))
        assert len(kernel_threads()) == 3
        del llm
        gc.collect()
        for thread in kernel_threads():
            thread.join(20)
            assert not thread.is_alive()
        """,
    "asynchronous and running at exit": "llm = asyncio.run(first_token(AsyncLLM(plan, **OPTIONS)))",
}


@pytest.mark.parametrize("case", CASES)
def test_nothing_crashes_hangs_or_complains(case: str, smollm2_plan: Path) -> None:
    program = PREAMBLE + textwrap.dedent(CASES[case])
    command = [sys.executable, "-c", program, str(smollm2_plan)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
