"""Chunks as the arrays of one step."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .kv.manager import KVManager
from .sampling import scoring_rows
from .sequence import Chunk, Sequence
from .step import ROW, Int32, StepBatch
from .token_rules import Words

Lanes = npt.NDArray[np.intp]
Records = npt.NDArray[np.void]


@dataclass
class _Decoding:
    """What stays from one decoding step to the next while its sequences do; arrays are shared, so never written to."""

    lanes: list[int]
    index: Lanes
    rows: Records
    """[S] of ROW; a step sets a copy's `history_length` and `index`."""
    early: bool
    """Whether a sequence has a least number of tokens."""
    changes: int = -1
    width: int = 0
    pages: list[Int32] = field(default_factory=list)
    """As they were after so many changes of the tables, up to that many pages a sequence."""


class BatchBuilder:
    """Makes step inputs. Each lane's ROW record is kept, so that a step only gathers them and sets what moved."""

    def __init__(self, kv: KVManager, lanes: int, vocabulary: int) -> None:
        self._kv = kv
        self._vocabulary = vocabulary
        self._owners: list[Sequence | None] = [None] * lanes
        self._records = np.zeros(lanes, ROW)
        self._min_tokens = np.zeros(lanes, np.int32)
        self._early_biases = np.zeros(lanes, np.int32)
        self._counting = np.arange(lanes + 1, dtype=np.int32)
        self._last: _Decoding | None = None

    def build(self, chunks: Seq[Chunk]) -> StepBatch:
        """The step that computes these chunks, in this order. Its arrays are new, so many steps may be in flight.

        A step has at least one row: if nothing is drawn or scored, one that asks for nothing. A token that the step
        before will draw is told by its row.
        """
        ends = [chunk.start for chunk in chunks if chunk.count == 1 == chunk.samples]
        batch = self._decode(chunks, np.array(ends, np.int32)) if len(ends) == len(chunks) else self._mix(chunks)
        batch.masks = self._masks(chunks, batch.rows)
        return batch

    def _masks(self, chunks: Seq[Chunk], rows: Records) -> Words | None:
        """The masks of rows that draw by rules, which are told where theirs is."""
        ruled, row = [], 0
        for chunk in chunks:
            row += chunk.scores + chunk.samples
            if chunk.samples and chunk.sequence.rules is not None:
                ruled.append((row - chunk.samples, chunk.samples, chunk.sequence, chunk.sequence.rules))
        if not ruled:
            return None
        masks = np.empty((sum(count for _, count, *_ in ruled), -(-self._vocabulary // 32)), np.uint32)
        address, stride, end = masks.ctypes.data, masks.strides[0], 0
        for row, count, sequence, rules in ruled:
            start, end = end, end + count
            guess = sequence.tokens[sequence.known : sequence.known + count - 1].tolist() if count > 1 else ()
            rules.write(masks[start:end], guess)
            if rules.ended:  # then `min_tokens` can't be kept
                rows["bias_count"][row] = sequence.sampling.row["bias_count"][0]
            rows["mask"][row : row + count] = range(address + start * stride, address + end * stride, stride)
        return masks

    def _mix(self, chunks: Seq[Chunk]) -> StepBatch:
        """A step of any chunks."""
        kv, size = self._kv, np.int32(self._kv.page_tokens)
        lanes = np.array(self._lanes(chunks))
        starts = np.array([chunk.start for chunk in chunks], np.int32)
        counts = np.array([chunk.count for chunk in chunks], np.int32)
        context = starts + counts
        seq_start = np.zeros(len(chunks) + 1, np.int32)
        np.cumsum(counts, out=seq_start[1:])
        total = int(seq_start[-1])
        tokens = np.concatenate([chunk.sequence.tokens[chunk.start : chunk.start + chunk.count] for chunk in chunks])
        self._refer(chunks, tokens, seq_start)
        lengths = np.array([chunk.sequence.rope_length for chunk in chunks], np.int32)
        if total == len(chunks):
            positions, owners = starts, lanes
        else:
            positions = np.arange(total, dtype=np.int32) + np.repeat(starts - seq_start[:-1], counts)
            owners, lengths = np.repeat(lanes, counts), np.repeat(lengths, counts)
        page, offset = np.divmod(positions, size)
        width = -(-int(context.max()) // kv.page_tokens)
        return StepBatch(
            tokens=tokens,
            positions=positions,
            lengths=np.maximum(lengths, positions + 1),
            seq_start=seq_start,
            context=context,
            rows=self._rows(chunks, lanes, seq_start, context),
            slots=[table[owners, page] * size + offset for table in kv.tables],
            pages=[table[:, :width].take(lanes, axis=0) for table in kv.tables],
        )

    def _decode(self, chunks: Seq[Chunk], positions: Int32) -> StepBatch:
        """A step in which each chunk is the last token of its sequence; most of it is as in the step before."""
        kv, size, count = self._kv, np.int32(self._kv.page_tokens), len(chunks)
        lanes, last = self._lanes(chunks), self._last
        page, offset = np.divmod(positions, size)
        width = int(page.max()) + 1
        if last is None or last.lanes != lanes:
            index = np.array(lanes)
            rows = self._records[index]
            rows["token"] = self._counting[:count]
            last = self._last = _Decoding(lanes, index, rows, bool(self._min_tokens[index].any()))
        if (last.changes, last.width) != (kv.changes, width):
            last.pages = [table[:, :width].take(last.index, axis=0) for table in kv.tables]
            last.changes, last.width = kv.changes, width
        tokens = []
        for row, chunk in enumerate(chunks):
            sequence = chunk.sequence
            tokens.append(sequence.last if chunk.start < sequence.known else -1 - sequence.row)
            sequence.row = row
        context = positions + 1
        rows = last.rows.copy()
        rows["history_length"] = context
        rows["index"] = outputs = context - rows["prompt_length"]
        if last.early:
            self._forbid_early_stops(rows, outputs, last.index)
        return StepBatch(
            tokens=np.array(tokens, np.int32),
            positions=positions,
            lengths=context,
            seq_start=self._counting[: count + 1],
            context=context,
            rows=rows,
            slots=[table[last.index, page] * size + offset for table in kv.tables],
            pages=last.pages,
        )

    def _forbid_early_stops(self, rows: Records, outputs: Int32, lanes: Lanes) -> None:
        early = outputs < self._min_tokens[lanes]
        if early.any():
            rows["bias_count"][early] = self._early_biases[lanes[early]]

    @staticmethod
    def _refer(chunks: Seq[Chunk], tokens: Int32, seq_start: Int32) -> None:
        """Put -1 - row where a chunk's last token is one that the step before will draw; note the rows of this step."""
        row = 0
        for index, chunk in enumerate(chunks):
            sequence = chunk.sequence
            if chunk.samples < 2 and chunk.start + chunk.count > sequence.known:
                tokens[seq_start[index + 1] - 1] = -1 - sequence.row
            row += chunk.scores + chunk.samples
            if chunk.samples:
                sequence.row = row - 1

    def _lanes(self, chunks: Seq[Chunk]) -> list[int]:
        """The chunks' lanes, with the records of their sequences in place."""
        lanes = [chunk.table.lane for chunk in chunks]
        for lane, chunk in zip(lanes, chunks, strict=True):
            if self._owners[lane] is not chunk.sequence:
                sampling = chunk.sequence.sampling
                self._owners[lane] = chunk.sequence
                self._last = None
                self._records[lane] = sampling.row[0]
                self._min_tokens[lane] = sampling.min_tokens
                self._early_biases[lane] = len(sampling.bias_tokens)
        return lanes

    def _rows(self, chunks: Seq[Chunk], lanes: Lanes, seq_start: Int32, context: Int32) -> Records:
        ends = seq_start[1:]
        counts = [chunk.samples for chunk in chunks]
        if min(counts) < 1 or max(counts) > 1:
            last = np.repeat(np.cumsum(counts), counts)
            back = last - np.arange(1, len(last) + 1)  # how far a row is from the last one of its chunk
            lanes = np.repeat(lanes, counts)
            context, ends = np.repeat(context, counts) - back, np.repeat(ends, counts) - back
        rows = self._records[lanes]
        rows["token"] = ends - 1
        rows["history_length"] = context
        rows["index"] = outputs = context - rows["prompt_length"]
        self._forbid_early_stops(rows, outputs, lanes)
        scores = [
            self._scores(chunk, first) for first, chunk in zip(seq_start.tolist(), chunks, strict=False) if chunk.scores
        ]
        if scores:
            rows = np.concatenate([rows, *scores])
            return rows[np.argsort(rows["token"], kind="stable")]
        return rows if len(rows) else scoring_rows([int(seq_start[-1]) - 1])

    def _scores(self, chunk: Chunk, first: int) -> Records:
        """Rows for the prompt scores of a chunk whose first token is number `first` of the step."""
        token = first + chunk.first_score - chunk.start
        rows = scoring_rows(range(token, token + chunk.scores))
        start = chunk.first_score + 1
        rows["target"] = chunk.sequence.tokens[start : start + chunk.scores]
        wanted = chunk.sequence.sampling.prompt_logprobs or 0
        if wanted < 0:
            table = chunk.vocabulary_logprobs = np.empty((chunk.scores, self._vocabulary), np.float32)
            rows["logprobs"] = table.ctypes.data + table.strides[0] * np.arange(chunk.scores)
        else:
            rows["top_n"] = wanted
        return rows
