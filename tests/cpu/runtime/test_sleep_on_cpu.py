"""A sleeping plan gives its memory back to the system, and says the same when it is awake again."""

from __future__ import annotations

import gc
import re
from pathlib import Path

import pytest

from toolkit import LLM, SamplingParams
from toolkit.runtime.errors import UserError

PROMPTS = ["The capital of France is", "one two three four"]
PARAMS = SamplingParams(temperature=0.0, max_tokens=16, logprobs=2)


def resident() -> int:
    """Bytes of this process's own memory that are in RAM."""
    gc.collect()
    text = Path("/proc/self/smaps_rollup").read_text()
    return sum(int(size) for size in re.findall(r"^(?:Private_Dirty|Private_Clean): +(\d+) kB", text, re.M)) * 1024


def test_memory_falls_and_outputs_stay(smollm2_plan: Path) -> None:
    with LLM(smollm2_plan, memory="500MiB", threads=2) as llm:
        expected = [answer.outputs for answer in llm.generate(PROMPTS, PARAMS)]
        awake = resident()
        held = llm.stats().memory
        llm.sleep()
        asleep = resident()
        assert llm.is_sleeping
        assert awake - asleep > held["weights"]
        assert llm.stats().memory["weights"] == llm.stats().memory["kv"] == 0
        with pytest.raises(UserError, match="asleep"):
            llm.generate("x")
        llm.wake_up()
        assert not llm.is_sleeping
        found = [answer.outputs for answer in llm.generate(PROMPTS, PARAMS)]
        assert [(each.token_ids, each.logprobs) for (each,) in found] == [
            (each.token_ids, each.logprobs) for (each,) in expected
        ]
        assert abs(resident() - awake) < 0.05 * awake
