"""Step inputs and results: one layout for the host's ring of slots and for the device's block.

The host writes a step into a slot of mapped memory; the step's first kernel copies what is used of it to the device,
and its last copies the results back (`kernels_templates/cuda/step.cuh.j2`). With two slots the host writes the next
step, and reads the last one's results, while the GPU computes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import InternalError
from ...plan import Plan
from ...sampling import scoring_rows
from ...step import MAX_TOP, RESULT, ROW, Float32, Int32, StepBatch, StepResult

UNIT = 16
"""Bytes that sections are copied by."""
HEADER_WORDS = 256
DONE_BYTES = 64

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Section:
    """Where an input lies: bytes from the start of a slot or block."""

    offset: int
    bytes: int


class Layout:
    """Offsets of inputs by name and cache group, then of results."""

    def __init__(self, plan: Plan) -> None:
        """Raises InternalError if the header has no room for so many cache groups."""
        self.tokens = max(bucket.max_tokens for bucket in plan.buckets)
        self.sequences = max(bucket.max_sequences for bucket in plan.buckets)
        self.rows = max(bucket.max_rows for bucket in plan.buckets)
        self.groups = len(plan.caches)
        self.vocabulary = plan.model.vocab_size
        self.widths = [-(-plan.model.max_context // cache.page_tokens) for cache in plan.caches]
        self.sections: dict[tuple[str, int], Section] = {}
        self._end = HEADER_WORDS * 4
        for name in ("tokens", "positions", "lengths"):
            self._add(name, 4 * self.tokens)
        self._add("seq_start", 4 * (self.sequences + 1))
        self._add("context", 4 * self.sequences)
        self._add("rows", ROW.itemsize * self.rows)
        self._add("page_strides", 4 * self.groups)
        for group, width in enumerate(self.widths):
            self._add("slots", 4 * self.tokens, group)
            self._add("pages", 4 * self.sequences * width, group)
        if 2 + 2 * len(self.sections) > HEADER_WORDS:
            raise InternalError(f"{self.groups} cache groups are more than the header of a step has room for")
        self.done = self._end
        self.results = self.done + DONE_BYTES
        self.top_tokens = self.results + RESULT.itemsize * self.rows
        self.top_logprobs = self.top_tokens + 4 * MAX_TOP * self.rows
        self.bytes = -(-(self.top_logprobs + 4 * MAX_TOP * self.rows) // 256) * 256

    def _add(self, name: str, size: int, group: int = 0) -> None:
        size = -(-size // UNIT) * UNIT
        self.sections[name, group] = Section(self._end, size)
        self._end += size

    def offset(self, name: str, group: int = 0) -> int:
        """Of an input or result, by the name that launches have for it. Raises InternalError for an unknown one."""
        if name == "page_stride":
            return self.sections["page_strides", 0].offset + 4 * group
        if name in ("results", "top_tokens", "top_logprobs"):
            return int(getattr(self, name))
        if (name, group) not in self.sections:
            raise InternalError(f"a launch reads the unknown step input {name!r} of cache group {group}")
        return self.sections[name, group].offset

    def units(self, tokens: int, sequences: int, rows: int) -> int:
        """Most units that a step of this size uses."""
        words = (3 + self.groups) * tokens + 2 * sequences + 1 + sum(self.widths) * sequences + self.groups
        return (4 * words + ROW.itemsize * rows) // UNIT + len(self.sections)


class Extra:
    """What rows point to, beside a slot: memory that the GPU can read, grown as steps need it."""

    def __init__(self, allocate: Callable[[int], Any]) -> None:
        self._allocate = allocate
        self._memory: Any = None
        self._used = 0

    def reserve(self, size: int) -> None:
        """Make room for so many bytes; what was there is lost."""
        self._used = 0
        if self._memory is None or self._memory.bytes < size:
            self.close()
            self._memory = self._allocate(max(1 << 16, 1 << (size - 1).bit_length()))

    def place(self, size: int) -> int:
        """The address of the next so many bytes."""
        address = int(self._memory.address) + self._used
        self._used += -(-size // UNIT) * UNIT
        return address

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None


class Slot:
    """One step's inputs and results in memory that host and GPU share."""

    def __init__(self, layout: Layout, memory: Bytes, extra: Extra) -> None:
        self._layout, self._extra = layout, extra
        self._words = {
            key: memory[section.offset : section.offset + section.bytes].view(np.int32)
            for key, section in layout.sections.items()
        }
        rows = layout.sections["rows", 0]
        self._rows = memory[rows.offset : rows.offset + ROW.itemsize * layout.rows].view(ROW)
        header = memory[: 4 * HEADER_WORDS].view(np.int32)
        header[1] = len(layout.sections)
        self._counts = header[3 : 2 + 2 * len(layout.sections) : 2]
        header[2 : 2 + 2 * len(layout.sections) : 2] = [each.offset // UNIT for each in layout.sections.values()]
        self._header = header
        self._done = memoryview(memory[layout.done : layout.done + 16].data).cast("Q")
        count = layout.rows
        self._results = memory[layout.results : layout.results + RESULT.itemsize * count].view(RESULT)
        self._top_tokens = memory[layout.top_tokens :][: 4 * MAX_TOP * count].view(np.int32).reshape(count, MAX_TOP)
        tops = memory[layout.top_logprobs :][: 4 * MAX_TOP * count]
        self._top_logprobs: Float32 = tops.view(np.float32).reshape(count, MAX_TOP)
        self._padding = scoring_rows(range(layout.rows))
        self._returns: list[tuple[int, int, int]] = []
        self._R = 0

    def write(self, batch: StepBatch, padded: int = 0) -> None:
        """Write a step; with `padded`, a decode step up to so many sequences.

        Padding is tokens at position 0 of the trash page whose rows ask for nothing. Their sequences are empty, so that
        attention does nothing for them.
        """
        tokens, sequences, self._R = len(batch.tokens), len(batch.context), len(batch.rows)
        T, S, R = (padded, padded, padded) if padded else (tokens, sequences, self._R)
        words = self._words
        counts = [4 * T, 4 * T, 4 * T, 4 * (S + 1), 4 * S, ROW.itemsize * R, 4 * self._layout.groups]
        for name, values, filler in (
            ("tokens", batch.tokens, 0),
            ("positions", batch.positions, 0),
            ("lengths", batch.lengths, 1),
            ("context", batch.context, 1),
        ):
            view = words[name, 0]
            view[: len(values)] = values
            if padded > len(values):
                view[len(values) : padded] = filler
        starts = words["seq_start", 0]
        starts[: sequences + 1], starts[sequences + 1 : S + 1] = batch.seq_start, tokens
        for group, (slots, pages) in enumerate(zip(batch.slots, batch.pages, strict=True)):
            width = pages.shape[1]
            words["page_strides", 0][group] = width
            view, table = words["slots", group], words["pages", group]
            view[:tokens], table[: sequences * width] = slots, pages.ravel()
            view[tokens:T], table[sequences * width : S * width] = 0, 0
            counts += [4 * T, 4 * S * width]
        self._rows[: self._R] = batch.rows
        self._rows[self._R : R] = self._padding[self._R : R]
        self._header[0] = self._R
        self._counts[:] = [-(-count // UNIT) for count in counts]
        self._place_pointers(self._rows[: self._R])

    def _place_pointers(self, rows: npt.NDArray[np.void]) -> None:
        """Copy what rows point to, so that the GPU can read it and the host may go on changing it."""
        penalized = rows["repetition_penalty"] != 1
        penalized |= rows["frequency_penalty"] != 0
        penalized |= rows["presence_penalty"] != 0
        rows["history"][~penalized] = 0
        self._returns = []
        biased, masked, whole = rows["bias_count"] > 0, rows["mask"] != 0, rows["logprobs"] != 0
        needed = np.flatnonzero(penalized | biased | masked | whole).tolist()
        if not needed:
            return
        vocabulary = self._layout.vocabulary
        mask_bytes = -(-vocabulary // 32) * 4
        sizes = {
            "history": np.where(penalized, 4 * rows["history_length"], 0).tolist(),
            "bias_tokens": np.where(biased, 4 * rows["bias_count"], 0).tolist(),
            "bias_values": np.where(biased, 4 * rows["bias_count"], 0).tolist(),
            "mask": np.where(masked, mask_bytes, 0).tolist(),
            "logprobs": np.where(whole, 4 * vocabulary, 0).tolist(),
        }
        self._extra.reserve(sum(size + UNIT for each in sizes.values() for size in each))
        for field, each in sizes.items():
            for index in needed:
                if size := each[index]:
                    source, place = int(rows[field][index]), self._extra.place(size)
                    if field == "logprobs":
                        self._returns.append((source, place, size))
                    else:
                        ctypes.memmove(place, source, size)
                    rows[field][index] = place

    @property
    def finished(self) -> int:
        """Number of the last step whose results are here."""
        return int(self._done[0])

    def result(self) -> StepResult:
        """The results of the step that was written last; views that the next one overwrites."""
        for destination, source, size in self._returns:
            ctypes.memmove(destination, source, size)
        self._returns = []
        count = self._R
        tops: tuple[Int32, Float32] = self._top_tokens[:count], self._top_logprobs[:count]
        return StepResult(self._results[:count], *tops, self._done[1] * 1e-9)
