"""What an engine process takes at its peak is what the plan says, and no more than it may."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import numpy as np
from unit.runtime.engine_harness import make_request

from toolkit.runtime.grammar import of_regex
from toolkit.runtime.options import EngineOptions
from toolkit.runtime.process import ProcessEngine, spawn_engine
from toolkit.runtime.request import Finished, Stats


def peak(pid: int) -> int:
    """Most bytes that were ever resident: anonymous pages and those of files."""
    found = re.search(r"^VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.M)
    assert found is not None
    return int(found[1]) * 1024


def fill(plan: Path, bound: int, grammar: str = "") -> tuple[Stats, int]:
    """An engine's state and peak after its whole cache was used, with long prompts in whole chunks."""

    async def one(engine: ProcessEngine, name: str, prompt: list[int]) -> None:
        params: dict[str, Any] = {"temperature": 0.8, "top_k": 50, "repetition_penalty": 1.1, "prompt_logprobs": 2}
        params["grammar"] = grammar
        events = [event async for event in engine.generate(make_request(name, prompt, **params))]
        assert isinstance(events[-1], Finished)

    async def body() -> tuple[Stats, int]:
        engine = spawn_engine(plan, EngineOptions(memory=bound, threads=1, verify=False))
        stats = await engine.stats()
        pages, rng = sum(stats.kv_pages), np.random.default_rng(0)
        prompts = [rng.integers(5, 40000, 1000).tolist() for _ in range(pages * 16 // 1000 + 1)]
        await asyncio.gather(*(one(engine, str(index), prompt) for index, prompt in enumerate(prompts)))
        found = await engine.stats(), peak(engine.pid)
        await engine.close()
        return found

    return asyncio.run(body())


def test_the_peak_is_what_is_reported_and_within_the_bound(smollm2_plan: Path) -> None:
    stats, found = fill(smollm2_plan, 300 << 20)
    assert found <= 300 << 20
    assert stats.memory["interpreter"] < 60 << 20
    assert abs(sum(stats.memory.values()) - found) <= 0.03 * found, (stats.memory, found)


def test_grammars_stay_within_the_bound(smollm2_plan: Path) -> None:
    """They read the vocabulary, for which there is room."""
    _, found = fill(smollm2_plan, 260 << 20, of_regex("[a-z ]{3,8}"))
    assert found <= 260 << 20
