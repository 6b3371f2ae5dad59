"""Runs a compiled plan step by step, with a page table of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from toolkit.runtime.device.base import Device
from toolkit.runtime.device.open import open_device
from toolkit.runtime.load import read_plan
from toolkit.runtime.options import EngineOptions
from toolkit.runtime.step import ROW, StepBatch

Array = npt.NDArray[Any]


class PlanRunner:
    """A plan and the sequences it has seen so far."""

    def __init__(self, directory: Path, threads: int = 2) -> None:
        self.plan = read_plan(directory)
        self.device = self._open(directory, threads)
        self._context: dict[str, int] = {}
        self._pages: dict[str, list[list[int]]] = {}
        self._next = [1] * len(self.plan.caches)

    def _open(self, directory: Path, threads: int) -> Device:
        return open_device(directory, self.plan, EngineOptions(memory=2 << 30, threads=threads))

    def step(
        self, chunks: Sequence[tuple[str, Sequence[int]]], prompts: Mapping[str, int] | None = None
    ) -> list[Array]:
        """Run one step over (sequence, its next tokens) and return log-probabilities [n, V] of each chunk.

        `prompts` are lengths of prompts of which only a part is computed.
        """
        lengths = [len(tokens) for _, tokens in chunks]
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        total = int(starts[-1])
        positions, slots = np.zeros(total, np.int32), [np.zeros(total, np.int32) for _ in self.plan.caches]
        for (name, tokens), start in zip(chunks, starts, strict=False):
            before = self._context.get(name, 0)
            self._context[name] = before + len(tokens)
            positions[start : start + len(tokens)] = np.arange(before, before + len(tokens))
            self._grow(name)
            for group, cache in enumerate(self.plan.caches):
                for index in range(len(tokens)):
                    page, offset = divmod(before + index, cache.page_tokens)
                    slots[group][start + index] = self._pages[name][group][page] * cache.page_tokens + offset
        whole = [max(self._context[name], (prompts or {}).get(name, 0)) for name, _ in chunks]
        rows = np.zeros(total, ROW)
        found = np.full((total, self.plan.model.vocab_size), np.nan, np.float32)  # poisoned: NaN never passes
        rows["token"], rows["target"] = np.arange(total), -1
        for name, off in (("top_p", 1.0), ("repetition_penalty", 1.0)):
            rows[name] = off
        rows["logprobs"] = found.ctypes.data + np.arange(total, dtype=np.uint64) * np.uint64(found.strides[0])
        batch = StepBatch(
            tokens=np.array([token for _, tokens in chunks for token in tokens], np.int32),
            positions=positions,
            lengths=np.repeat(whole, lengths).astype(np.int32),
            seq_start=starts,
            context=np.array([self._context[name] for name, _ in chunks], np.int32),
            rows=rows,
            slots=slots,
            pages=[self._table(chunks, group) for group in range(len(self.plan.caches))],
        )
        self.device.wait(self.device.submit(batch))
        return np.split(found, starts[1:-1])

    def _grow(self, name: str) -> None:
        """Pages for all tokens of a sequence; ids are spread so that no order is taken for granted."""
        tables = self._pages.setdefault(name, [[] for _ in self.plan.caches])
        for group, cache in enumerate(self.plan.caches):
            while len(tables[group]) * cache.page_tokens < self._context[name]:
                tables[group].append(self._next[group])
                self._next[group] += 1

    def _table(self, chunks: Sequence[tuple[str, Sequence[int]]], group: int) -> npt.NDArray[np.int32]:
        width = max(len(self._pages[name][group]) for name, _ in chunks)
        table = np.zeros((len(chunks), width), np.int32)
        for row, (name, _) in enumerate(chunks):
            pages = self._pages[name][group]
            table[row, : len(pages)] = pages
        return table

    def close(self) -> None:
        self.device.close()
