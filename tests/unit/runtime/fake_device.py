"""A device whose model is a hash: every next token depends on all token ids that can be read through the page tables.

Two layers, as attention would have them. The first stores a hash of token and position in the page slot; the second
stores a hash of what the token could see of the first, so a page that belongs to another prefix changes the output even
if its tokens are the same. Reads of the trash page or of a slot that was never written, and writes to a page that
another sequence of the step reads, are failures.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from toolkit.runtime.device.base import Ticket
from toolkit.runtime.errors import InternalError
from toolkit.runtime.plan import Bucket, CacheResource, MemoryPlan, Model, Plan, Report, RopeChanges
from toolkit.runtime.step import ABI_HASH, MAX_TOP, RESULT, ROW, Float32, Int32, StepBatch, StepResult

Hashes = npt.NDArray[np.uint64]
EOS = 1
NAN_TOKEN = 2
"""A row that can see this token has logits that are not finite. The model itself hardly ever says it."""


def fake_plan(
    *,
    windows: Sequence[int] = (0,),
    page_tokens: int = 4,
    vocabulary: int = 64,
    max_context: int = 64,
    max_tokens: int = 32,
    max_sequences: int = 8,
    max_rows: int = 16,
    rope_changes: RopeChanges | None = None,
) -> Plan:
    """A plan for `FakeDevice`, a cache group for each window."""
    return Plan(
        format="toolkit-plan",
        major=1,
        minor=0,
        abi=ABI_HASH,
        model=Model(
            *("fake", "hash", vocabulary, 8, len(windows), max_context, "float32", "none"), rope_changes=rope_changes
        ),
        target="cpu",
        max_batch=max_sequences,
        buckets=(Bucket("step", max_tokens, max_sequences, max_rows, (), ()),),
        kernels={},
        libraries=(),
        weights={},
        weight_files=(),
        caches=tuple(
            CacheResource("kv", (layer,), page_tokens, 64, 1, 8, 8, "float32", "fake", window)
            for layer, window in enumerate(windows)
        ),
        memory=MemoryPlan(0, 0, 0),
        text=None,
        eos_token_ids=(EOS,),
        bos_token_id=None,
        report=Report(0, 0, ()),
    )


class FakeDevice:
    """See the module."""

    isa = "none"
    queue_depth = 1

    def __init__(self, plan: Plan, pages: int) -> None:
        """`pages` is those of each group, without the trash page."""
        self.plan = plan
        self.pages = (pages + 1,) * len(plan.caches)
        self.batches: list[StepBatch] = []
        self.fail_submit: Exception | None = None
        self.fail_wait: Exception | None = None
        self.closed = self.asleep = False
        slots = (pages + 1) * max((cache.page_tokens for cache in plan.caches), default=0)
        self._stores = [np.zeros((2, slots), np.uint64) for _ in plan.caches]
        self._logits = _logits(plan.model.vocab_size)
        self._result: StepResult | None = None

    # --- the device interface -----------------------------------------------------------------------------------------

    def submit(self, batch: StepBatch) -> Ticket:
        if self.fail_submit is not None:
            error, self.fail_submit = self.fail_submit, None
            raise error
        assert not self.asleep
        self._check(batch)
        self.batches.append(batch)
        self._result = self._run(batch)
        return Ticket(len(self.batches))

    def poll(self, ticket: Ticket) -> StepResult | None:
        return self.wait(ticket)

    def wait(self, ticket: Ticket) -> StepResult:
        if self.fail_wait is not None:
            error, self.fail_wait = self.fail_wait, None
            raise error
        assert ticket.number == len(self.batches)
        assert self._result is not None
        return self._result

    def copy_pages(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        size = self.plan.caches[group].page_tokens
        pages = self._stores[group].reshape(2, -1, size)
        for source, destination in pairs:
            assert source != 0
            assert destination != 0
            pages[:, destination] = pages[:, source]

    def profile(self, batch: StepBatch) -> tuple[Ticket, npt.NDArray[np.float64]]:
        return FakeDevice.submit(self, batch), np.zeros((0, 2))

    def memory(self) -> dict[str, int]:
        return {"kv": sum(store.nbytes for store in self._stores)}

    def sleep(self) -> None:
        self.asleep = True
        for store in self._stores:
            store.fill(0)

    def wake(self) -> None:
        assert self.asleep
        self.asleep = False

    def close(self) -> None:
        self.closed = True

    # --- the model ----------------------------------------------------------------------------------------------------

    def _check(self, batch: StepBatch) -> None:
        bucket = self.plan.buckets[0]
        total, sequences, rows = len(batch.tokens), len(batch.context), len(batch.rows)
        sizes_fit = total <= bucket.max_tokens and sequences <= bucket.max_sequences and 1 <= rows <= bucket.max_rows
        if not sizes_fit:
            raise InternalError(f"no bucket fits {total} tokens, {sequences} sequences, {rows} rows")
        arrays = [
            batch.tokens,
            batch.positions,
            batch.lengths,
            batch.seq_start,
            batch.context,
            *batch.slots,
            *batch.pages,
        ]
        assert all(array.dtype == np.int32 and array.flags.c_contiguous for array in arrays)
        assert batch.rows.dtype == ROW
        assert batch.rows.flags.c_contiguous
        assert batch.seq_start.tolist() == sorted(set(batch.seq_start.tolist()))
        assert batch.seq_start[0] == 0
        assert batch.seq_start[-1] == total
        assert np.all(np.diff(batch.rows["token"]) > 0)
        starts = batch.context - np.diff(batch.seq_start)
        expected = [range(start, end) for start, end in zip(starts, batch.context, strict=True)]
        assert batch.positions.tolist() == [position for part in expected for position in part]
        assert len(batch.lengths) == total
        assert np.all(batch.lengths > batch.positions)
        for cache, slots, pages in zip(self.plan.caches, batch.slots, batch.pages, strict=True):
            self._check_writes(batch, slots // cache.page_tokens, pages)

    def _check_writes(self, batch: StepBatch, written: Int32, pages: Int32) -> None:
        assert written.min() > 0, "a token was written to the trash page"
        for index, row in enumerate(pages):
            mine = set(written[batch.seq_start[index] : batch.seq_start[index + 1]].tolist())
            assert mine <= set(row.tolist())
            others = set(np.delete(pages, index, axis=0).ravel().tolist())
            assert not mine & others, "a page was written that another sequence reads"

    def _run(self, batch: StepBatch) -> StepResult:
        positions = batch.positions.astype(np.uint64)
        hidden = mix(batch.tokens.astype(np.uint64) * np.uint64(1_000_003) + positions + np.uint64(1))
        if changes := self.plan.model.rope_changes:
            classes = np.clip(batch.lengths, changes.first, changes.last) - changes.first
            hidden = np.where(classes > 0, mix(hidden + classes.astype(np.uint64)), hidden)
        for layer in range(2):
            for store, slots in zip(self._stores, batch.slots, strict=True):
                store[layer, slots] = hidden
            hidden = mix(hidden + self._attend(batch, layer))
        poisoned = self._sees(batch, NAN_TOKEN)
        return self._sample(batch, hidden, poisoned)

    def _attend(self, batch: StepBatch, layer: int) -> Hashes:
        """For each token the sum of what it can see, over all groups."""
        total = np.zeros(len(batch.tokens), np.uint64)
        for index, values, first, last, window in self._visible(batch, layer):
            assert values.all(), "a slot was read that was never written"
            sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(mix(values))])
            ends = np.arange(last[0], last[1]) + 1 - first
            begins = np.maximum(0, ends - window) if window else np.zeros_like(ends)
            part = slice(batch.seq_start[index], batch.seq_start[index + 1])
            total[part] = total[part] * np.uint64(31) + sums[ends] - sums[begins]
        return total

    def _visible(self, batch: StepBatch, layer: int) -> list[tuple[int, Hashes, int, tuple[int, int], int]]:
        parts = []
        for cache, store, pages in zip(self.plan.caches, self._stores, batch.pages, strict=True):
            size, window = cache.page_tokens, cache.window
            for index, end in enumerate(batch.context.tolist()):
                start = end - int(batch.seq_start[index + 1] - batch.seq_start[index])
                first = max(0, start - window + 1) if window else 0
                positions = np.arange(first, end)
                ids = pages[index, positions // size]
                assert ids.all(), "the trash page was read"
                parts.append((index, store[layer, ids * size + positions % size], first, (start, end), window))
        return parts

    def _sees(self, batch: StepBatch, token: int) -> npt.NDArray[np.bool_]:
        seen = np.zeros(len(batch.tokens), np.bool_)
        for index, values, first, last, _ in self._visible(batch, 0):
            positions = np.arange(first, last[1], dtype=np.uint64)
            marks = values == mix(np.uint64(token) * np.uint64(1_000_003) + positions + np.uint64(1))
            part = slice(batch.seq_start[index], batch.seq_start[index + 1])
            seen[part] |= np.logical_or.accumulate(marks)[last[0] - first :]
        return seen

    # --- the sampler --------------------------------------------------------------------------------------------------

    def _sample(self, batch: StepBatch, hidden: Hashes, poisoned: npt.NDArray[np.bool_]) -> StepResult:
        rows = batch.rows
        results = np.full(len(rows), -1, RESULT)
        top_tokens = np.full((len(rows), MAX_TOP), -1, np.int32)
        top_logprobs = np.full((len(rows), MAX_TOP), np.nan, np.float32)
        for index, row in enumerate(rows):
            at = int(row["token"])
            logits = self._logits[int(hidden[at]) % len(self._logits)]
            logprobs = (logits - np.log(np.sum(np.exp(logits.astype(np.float64))))).astype(np.float32)
            order = np.argsort(-logprobs, kind="stable")
            token, status = int(row["target"]), 0
            if row["sample"]:
                history = _array(row["history"], row["history_length"], np.int32)
                assert history[-1] == batch.tokens[at]
                token, status = draw(row, logits, history)
            if poisoned[at]:
                status = 1
            shown = logprobs[token] if token >= 0 else 0.0
            results[index] = (token, int(np.sum(logprobs > shown)) + 1, shown, status)
            count = int(row["top_n"])
            top_tokens[index, :count], top_logprobs[index, :count] = order[:count], logprobs[order[:count]]
            if row["logprobs"]:
                _array(row["logprobs"], len(logprobs), np.float32)[:] = logprobs
        return StepResult(results, top_tokens, top_logprobs, 0.0)


@functools.cache
def _logits(vocabulary: int) -> Float32:
    rows = np.random.default_rng(7).standard_normal((1009, vocabulary)).astype(np.float32) * 3
    rows[:, NAN_TOKEN] = -50.0
    return rows


def draw(row: Any, logits: Float32, history: npt.NDArray[Any]) -> tuple[int, int]:
    """A token by the rules of `step.ROW`, and the row's status."""
    scores = logits.astype(np.float64).copy()
    tokens = _array(row["bias_tokens"], row["bias_count"], np.int32)
    scores[tokens] += _array(row["bias_values"], row["bias_count"], np.float32)
    if row["mask"]:
        words = _array(row["mask"], -(-len(scores) // 32), np.uint32)
        scores[np.unpackbits(words.view(np.uint8), bitorder="little")[: len(scores)] == 0] = -np.inf
    if not np.isfinite(scores).any():
        return -1, 2
    seen, output = np.unique(history), history[row["prompt_length"] :]
    penalty = float(row["repetition_penalty"])
    scores[seen] = np.where(scores[seen] > 0, scores[seen] / penalty, scores[seen] * penalty)
    counts = np.bincount(output, minlength=len(scores))
    scores -= counts * float(row["frequency_penalty"]) + (counts > 0) * float(row["presence_penalty"])
    if row["temperature"] == 0:
        return int(np.argmax(scores)), 0
    scores /= float(row["temperature"])
    if row["top_k"]:
        scores[scores < np.sort(scores)[-int(row["top_k"])]] = -np.inf
    chances = np.exp(scores - scores.max())
    order = np.argsort(-chances, kind="stable")
    before = np.cumsum(chances[order] / chances.sum()) - chances[order] / chances.sum()
    chances[order[before >= float(row["top_p"])]] = 0.0
    chances[chances < float(row["min_p"]) * chances.max()] = 0.0
    random = np.random.Generator(np.random.Philox(key=np.array([row["seed"], row["index"]], np.uint64))).random()
    return int(np.searchsorted(np.cumsum(chances / chances.sum()), random, side="right")), 0


def _array(address: Any, count: Any, dtype: Any) -> npt.NDArray[Any]:
    """The array of `count` elements at an address."""
    size = int(count) * np.dtype(dtype).itemsize
    if size == 0:
        return np.zeros(0, dtype)
    return np.frombuffer((ctypes.c_char * size).from_address(int(address)), dtype)


def mix(values: Any) -> Hashes:
    """A bijective hash of 64-bit words (splitmix64)."""
    with np.errstate(over="ignore"):
        mixed = np.asarray(values, np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        result: Hashes = mixed ^ (mixed >> np.uint64(31))
        return result
