"""The clock of races: runs the functions of a race's library on a team of threads."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np

from ..compiler.race import MAX_THREADS, Trial
from ..runtime.device.machine import usable_cores
from ..runtime.plan import Generator

RUN_SECONDS = 0.002
"""Of calls between two looks at the clock."""
TRIAL_SECONDS = 0.15
"""Spent on a trial, unless `LEAST_RUNS` of each generator take longer."""
LEAST_RUNS, MOST_RUNS = 5, 25


def measure(library: Path, trials: Sequence[Trial]) -> list[dict[Generator, float]]:
    """Seconds of a call by generator: the median of runs for which generators take turns; see `compiler.race`."""
    team = _Team(library, min(usable_cores(), MAX_THREADS))
    try:
        return [_measure(team, trial) for trial in trials]
    finally:
        team.close()


def _measure(team: _Team, trial: Trial) -> dict[Generator, float]:
    slowest = max(team.run(trial, function, 0, 4) for function in trial.functions.values()) / 4
    calls = max(1, int(RUN_SECONDS / slowest))
    seconds: dict[Generator, list[float]] = {name: [] for name in trial.functions}
    first, until = 0, time.perf_counter() + TRIAL_SECONDS
    for count in range(MOST_RUNS):
        if count >= LEAST_RUNS and time.perf_counter() > until:
            break
        for name, function in trial.functions.items():
            seconds[name].append(team.run(trial, function, first, calls) / calls)
            first = (first + calls) % len(trial.pointers)
    return {name: median(values) for name, values in seconds.items()}


class _Run(ctypes.Structure):
    """`run` of kernels_templates/cpu/race.cpp.j2."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("threads", "function", "args", "copies", "first", "calls")),
        *((name, ctypes.c_void_p) for name in ("pointers", "numbers")),
    )


class _Team:
    """The threads that run a library's functions; the caller is the first of them."""

    def __init__(self, library: Path, threads: int) -> None:
        self.threads = threads
        self._library = ctypes.CDLL(str(library))
        self._library.race_state_bytes.restype = ctypes.c_int64
        self._library.race_run.restype = ctypes.c_uint64
        self._library.race_run.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self._library.race_worker.argtypes = [ctypes.c_void_p, ctypes.c_int32]
        self._library.race_close.argtypes = [ctypes.c_void_p]
        memory = np.zeros(self._library.race_state_bytes() + 64, np.uint8)
        self._memory = memory[-memory.ctypes.data % 64 :]
        state = self._memory.ctypes.data
        self._workers = [
            threading.Thread(target=self._library.race_worker, args=(state, tid)) for tid in range(1, threads)
        ]
        for worker in self._workers:
            worker.start()

    def run(self, trial: Trial, function: int, first: int, calls: int) -> float:
        """Seconds of some calls, from call `first` on."""
        copies, args = trial.pointers.shape
        addresses = (trial.pointers.ctypes.data, trial.numbers.ctypes.data)
        run = _Run(self.threads, function, args, copies, first, calls, *addresses)
        nanoseconds: int = self._library.race_run(self._memory.ctypes.data, ctypes.byref(run))
        return nanoseconds * 1e-9

    def close(self) -> None:
        self._library.race_close(self._memory.ctypes.data)
        for worker in self._workers:
            worker.join()
