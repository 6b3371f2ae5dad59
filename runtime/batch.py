"""Chunks as the arrays of one step."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt

from .kv.manager import KVManager
from .sampling import scoring_row
from .sequence import Chunk, Sequence
from .step import ROW, Int32, StepBatch

Records = npt.NDArray[np.void]


class BatchBuilder:
    """Makes step inputs. Each lane's ROW record is kept, so that a step only gathers them and sets what moved."""

    def __init__(self, kv: KVManager, lanes: int, vocabulary: int) -> None:
        self._kv = kv
        self._vocabulary = vocabulary
        self._owners: list[Sequence | None] = [None] * lanes
        self._records = np.zeros(lanes + 1, ROW)
        self._scoring = lanes
        self._records[self._scoring :] = scoring_row()

    def build(self, chunks: Seq[Chunk]) -> StepBatch:
        """The step that computes these chunks, in this order. Its arrays are new, so many steps may be in flight.

        A step has at least one row: if nothing is drawn or scored, one that asks for nothing.
        """
        kv = self._kv
        tables = [chunk.sequence.table for chunk in chunks if chunk.sequence.table is not None]
        lanes = np.array([table.lane for table in tables])
        starts = np.array([chunk.start for chunk in chunks], np.int32)
        counts = np.array([chunk.count for chunk in chunks], np.int32)
        seq_start = np.zeros(len(chunks) + 1, np.int32)
        np.cumsum(counts, out=seq_start[1:])
        total = int(seq_start[-1])
        tokens = np.concatenate([chunk.sequence.tokens[chunk.start : chunk.start + chunk.count] for chunk in chunks])
        if total == len(chunks):
            positions, owners = starts, lanes
        else:
            positions = np.arange(total, dtype=np.int32)
            positions += np.repeat(starts - seq_start[:-1], counts)
            owners = np.repeat(lanes, counts)
        page, offset = np.divmod(positions, np.int32(kv.page_tokens))
        width = max(table.room for table in tables) // kv.page_tokens
        return StepBatch(
            tokens=tokens,
            positions=positions,
            seq_start=seq_start,
            context=starts + counts,
            rows=self._rows(chunks, seq_start),
            slots=[table[owners, page] * np.int32(kv.page_tokens) + offset for table in kv.tables],
            pages=[table[lanes, :width] for table in kv.tables],
        )

    def _rows(self, chunks: Seq[Chunk], seq_start: Int32) -> Records:
        lanes: list[int] = []
        tokens: list[int] = []
        lengths: list[int] = []
        outputs: list[int] = []
        biases: list[int] = []
        scoring: list[tuple[int, Chunk]] = []
        for chunk, first in zip(chunks, seq_start.tolist(), strict=False):
            sequence = chunk.sequence
            if chunk.scores:
                scoring.append((len(lanes), chunk))
                start = first + chunk.first_score - chunk.start
                lanes += [self._scoring] * chunk.scores
                tokens += range(start, start + chunk.scores)
                for column in (lengths, outputs, biases):
                    column.extend([0] * chunk.scores)
            if chunk.samples:
                count = sequence.outputs
                lanes.append(self._lane(sequence))
                tokens.append(first + chunk.count - 1)
                lengths.append(sequence.length)
                outputs.append(count)
                biases.append(sequence.sampling.bias_count(count))
        if not lanes:
            return self._idle_row(int(seq_start[-1]) - 1)
        rows = self._records[lanes]
        rows["token"] = tokens
        rows["history_length"] = lengths
        rows["index"] = outputs
        rows["bias_count"] = biases
        for first, chunk in scoring:
            self._score(rows[first : first + chunk.scores], chunk)
        return rows

    def _lane(self, sequence: Sequence) -> int:
        """The sequence's lane, with its record in place."""
        assert sequence.table is not None
        lane = sequence.table.lane
        if self._owners[lane] is not sequence:
            self._owners[lane] = sequence
            self._records[lane] = sequence.sampling.row[0]
        return lane

    def _idle_row(self, token: int) -> Records:
        rows = self._records[self._scoring :].copy()
        rows["token"] = token
        return rows

    def _score(self, rows: Records, chunk: Chunk) -> None:
        start = chunk.first_score + 1
        rows["target"] = chunk.sequence.tokens[start : start + chunk.scores]
        wanted = chunk.sequence.sampling.prompt_logprobs or 0
        if wanted < 0:
            chunk.vocabulary_logprobs = np.empty((chunk.scores, self._vocabulary), np.float32)
            row_bytes = chunk.vocabulary_logprobs.strides[0]
            rows["logprobs"] = chunk.vocabulary_logprobs.ctypes.data + row_bytes * np.arange(chunk.scores)
        else:
            rows["top_n"] = wanted
