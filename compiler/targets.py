"""What plans are compiled for: a target's instruction sets, cache formats and limits, and the names users give."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ..runtime.errors import UserError
from ..runtime.plan import IsaName, KvDType
from .shapes import Bounds

FloatDType = Literal["float32", "float16", "bfloat16"]


@dataclass(frozen=True)
class Target:
    """A kind of machine that plans run on."""

    name: str
    isas: tuple[IsaName, ...]
    """Instruction set levels that get a library each; the machine picks the last one that it has."""
    page_tokens: int = 16
    """Tokens in a page of the K/V cache."""
    max_tokens: int = 512
    """Most tokens of a step."""
    min_rows: int = 64
    """A step yields at least this many rows of logits if asked, so that prompts can be scored."""
    default_batch: int = 64
    default_context: int = 8192

    def kv_dtype(self, dtype: FloatDType, *, quantized: bool) -> KvDType:
        """How K/V caches are stored unless the user says: exactly for float32 models that are not quantized, else in
        half the bytes."""
        return "float32" if dtype == "float32" and not quantized else "float16"

    def bounds(self, model_context: int, max_batch: int | None = None, max_context: int | None = None) -> Bounds:
        """The bounds of the symbolic dimensions. Raises UserError if the choices are out of range.

        `model_context` is the longest sequence the model was made for; the other two are the user's choices.
        """
        batch = self.default_batch if max_batch is None else max_batch
        context = min(model_context, self.default_context) if max_context is None else max_context
        if batch < 1:
            raise UserError(f"--max-batch must be at least 1, found {batch}")
        if not 1 <= context <= model_context:
            raise UserError(
                f"--max-context must be 1 to {model_context}, the most this model was made for, found {context}"
            )
        return Bounds(
            max_tokens=max(self.max_tokens, batch),
            max_sequences=batch,
            max_rows=max(batch, self.min_rows),
            max_context=context,
        )


def parse_kv_dtype(text: str) -> KvDType | None:
    """The `--kv-cache-dtype` that the user chose, or None for `auto`. Raises UserError for anything else."""
    found = next((dtype for dtype in get_args(KvDType) if dtype == text), None)
    if found is None and text != "auto":
        raise UserError(f"--kv-cache-dtype must be auto, {', '.join(get_args(KvDType))}, found {text!r}")
    return found


CPU = Target("cpu", isas=("x86-64-v3", "x86-64-v4"))
TARGETS = {target.name: target for target in (CPU,)}
PLANNED = ("sm80", "sm86", "sm89", "sm90", "aarch64")
"""Names that will be targets; asking for one says so."""


def parse_targets(text: str) -> tuple[Target, ...]:
    """The targets of a comma-separated list, without repeats. Raises UserError for a name that is not built."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise UserError(f"--target needs a target name, found {text!r}: give one of {', '.join(TARGETS)}")
    return tuple(_target(name) for name in names)


def _target(name: str) -> Target:
    if name in TARGETS:
        return TARGETS[name]
    if name in PLANNED:
        raise UserError(f"target {name} is known but not built yet: use {', '.join(TARGETS)}")
    if name in ("x86-64-v3", "x86-64-v4"):
        raise UserError(f"target {name} is part of `cpu`, which holds code for x86-64-v3 and v4: use cpu")
    raise UserError(f"unknown target {name!r}: expected {', '.join(TARGETS)} (later also {', '.join(PLANNED)})")
