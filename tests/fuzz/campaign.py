"""Damaged inputs for every loader: `python -m fuzz.campaign [--count N] [--seed S] [--loader NAME] [--first I]`.

Each input must load or be refused in one sentence, within the limits of `worker.py`. Prints counts by loader, and for
each failure how to see it again.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from fuzz.worker import place

NAMES = ("safetensors", "gguf", "config", "tokenizer", "template", "plan")
SECONDS = 10
"""Processor time of one input."""


@dataclass(frozen=True)
class Campaign:
    """Inputs that follow from a seed; loaders take turns."""

    seed: int
    loaders: tuple[str, ...] = NAMES
    module: str = "fuzz.loaders"
    seconds: int = SECONDS

    def run(self, first: int, stop: int) -> Result:
        """Run inputs in worker processes; where one dies, the next goes on behind its input."""
        result, start = Result(self), first
        while start < stop:
            command = [sys.executable, "-m", "fuzz.worker", self.module, ",".join(self.loaders)]
            command += map(str, (self.seed, start, stop, self.seconds))
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
            pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            with subprocess.Popen(command, env=environment, **pipes) as worker:
                running, start = result.read(worker, start)
            if worker.returncode and running is not None:
                result.add(running, _death(worker.returncode))
                start = running + 1
        return result


@dataclass
class Result:
    """What became of the inputs."""

    campaign: Campaign
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By loader and kind: loaded, refused or failed."""
    failures: dict[tuple[str, int], str] = field(default_factory=dict)
    """By loader and the index of its input."""

    def read(self, worker: subprocess.Popen[str], start: int) -> tuple[int | None, int]:
        """Add what a worker says until it ends; the input that it was running then, and the next one."""
        assert worker.stdout is not None
        assert worker.stderr is not None
        running = None
        with ThreadPoolExecutor(1) as pool:
            errors = pool.submit(worker.stderr.read)
            for line in worker.stdout:
                word, number, *outcome = line.rstrip("\n").split(" ", 2)
                running = int(number) if word == "start" else None
                if outcome:
                    self.add(int(number), outcome[0])
                    start = int(number) + 1
            if worker.wait() and running is None:
                raise RuntimeError(f"a worker failed outside of any input:\n{errors.result()}")
        return running, start

    def add(self, number: int, outcome: str) -> None:
        loader, index = place(self.campaign.loaders, number)
        kind = outcome if outcome in ("loaded", "refused") else "failed"
        self.outcomes[loader, kind] += 1
        if kind == "failed":
            self.failures[loader, index] = outcome

    def merge(self, other: Result) -> None:
        self.outcomes += other.outcomes
        self.failures |= other.failures

    def lines(self) -> Iterator[str]:
        """The report."""
        for loader in self.campaign.loaders:
            counts = {kind: self.outcomes[loader, kind] for kind in ("loaded", "refused", "failed")}
            shown = ", ".join(f"{count} {kind}" for kind, count in counts.items())
            yield f"{loader:<12} {sum(counts.values()):>6} inputs: {shown}"
        for (loader, index), outcome in sorted(self.failures.items()):
            yield f"{loader} {index}: {outcome}"
            yield f"    again: make fuzz FUZZ='--seed {self.campaign.seed} --loader {loader} --first {index} --count 1'"
        yield f"seed {self.campaign.seed}: {self.outcomes.total()} inputs, {len(self.failures)} failures"


def _death(code: int) -> str:
    if code == -signal.SIGXCPU:
        return "hang: it ran into the time limit"
    return f"crash: the process ended with {signal.Signals(-code).name if code < 0 else f'code {code}'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20_000, help="inputs in all")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--loader", choices=NAMES, action="append", help="only this one; may be repeated")
    parser.add_argument("--first", type=int, default=0, help="the first input")
    parser.add_argument("--jobs", type=int, default=2, help="processes side by side")
    options = parser.parse_args()
    campaign = Campaign(options.seed, tuple(options.loader or NAMES))
    cuts = [options.first + options.count * job // options.jobs for job in range(options.jobs + 1)]
    whole = Result(campaign)
    with ThreadPoolExecutor(options.jobs) as pool:
        for result in pool.map(campaign.run, cuts, cuts[1:]):
            whole.merge(result)
    print(*whole.lines(), sep="\n")
    return bool(whole.failures)


if __name__ == "__main__":
    sys.exit(main())
