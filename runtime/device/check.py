"""What a device refuses before it runs a step: its kernels trust their inputs."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import InternalError
from ..plan import Plan
from ..step import StepBatch


def check_step(plan: Plan, pages: Sequence[int], batch: StepBatch, *, previous_rows: int = 0) -> None:
    """Raises InternalError if a step could make kernels read or write where they must not.

    `pages` counts those of each cache group; tokens may refer to the rows of the step before, if it has any.
    """
    tokens = len(batch.tokens)
    if (
        tokens == 0
        or batch.seq_start[0] != 0
        or batch.seq_start[-1] != tokens
        or len(batch.positions) != tokens
        or len(batch.lengths) != tokens
    ):
        raise InternalError(f"a step's sequences do not cover its {tokens} tokens")
    if batch.tokens.min() < -previous_rows or batch.tokens.max() >= plan.model.vocab_size:
        raise InternalError("a step has a token outside the vocabulary")
    for cache, slots, table, limit in zip(plan.caches, batch.slots, batch.pages, pages, strict=True):
        if len(slots) != tokens or slots.min() < 0 or slots.max() >= limit * cache.page_tokens:
            raise InternalError("a step writes a page that does not exist")
        if table.min() < 0 or table.max() >= limit or int(batch.context.max()) > table.shape[1] * cache.page_tokens:
            raise InternalError("a step reads a page that does not exist")
