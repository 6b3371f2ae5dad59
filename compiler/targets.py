"""What plans are compiled for: a target's instruction sets, cache formats and limits, and the names users give."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from ..kernels_templates.packing import Layout
from ..runtime.encodings import Encoding
from ..runtime.errors import UserError
from ..runtime.plan import ArchName, IsaName, KvDType, TargetKind
from .shapes import Bounds

FloatDType = Literal["float32", "float16", "bfloat16"]


TOKEN_BUCKETS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Tokens of a GPU's launch programs for steps other than decoding."""


@dataclass(frozen=True)
class BucketLimits:
    """Which steps a launch program serves: see `plan.Bucket`."""

    name: str
    bounds: Bounds
    decode: bool = False


@dataclass(frozen=True)
class Target:
    """A kind of machine that plans run on."""

    name: str
    isas: tuple[IsaName, ...] = ()
    """Instruction set levels that get a library each; the machine picks the last one that it has."""
    archs: tuple[ArchName, ...] = ()
    """GPU architectures that get a module each."""
    kv_layout: str = "kv-head-major"
    page_tokens: int = 16
    """Tokens in a page of the K/V cache."""
    max_tokens: int = 512
    """Most tokens of a step."""
    min_rows: int = 64
    """A step yields at least this many rows of logits if asked, so that prompts can be scored."""
    default_batch: int = 64
    default_context: int = 8192

    @property
    def kind(self) -> TargetKind:
        """What runs the plans."""
        return "cuda" if self.archs else "cpu"

    def matrix_layout(self, encoding: Encoding | None) -> Layout:
        """Of the weights of linear layers and embeddings: GPUs read floats as they are."""
        if self.kind == "cpu":
            return "panel16"
        return "operand16" if encoding is not None and encoding.kind == "affine" else "rows"

    @property
    def quantized_dtype(self) -> FloatDType:
        """What a model computes in whose file has integer weights and says no more: on GPUs what tensor cores take."""
        return "bfloat16" if self.kind == "cuda" else "float32"

    def real(self, dtype: FloatDType) -> FloatDType:
        """The numbers of activations in a plan for a model of this dtype."""
        return dtype if self.kind == "cuda" else "float32"

    def kv_dtype(self, dtype: FloatDType, *, quantized: bool) -> KvDType:
        """How K/V caches are stored unless the user says: as activations are on a GPU; on CPU exactly for float32
        models that are not quantized, else in half the bytes."""
        if self.kind == "cuda":
            return dtype
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

    def buckets(self, bounds: Bounds) -> tuple[BucketLimits, ...]:
        """The launch programs of a plan with these bounds, in the order in which a step looks for one that fits.

        CPU code takes any step. On a GPU steps of one token a sequence have programs of their own, which are replayed
        whole; others run in the program for the next larger number of tokens.
        """
        if self.kind == "cpu":
            return (BucketLimits("step", bounds),)
        batch = bounds.max_sequences
        decode = [*_decode_sizes(batch), batch]
        tokens = [size for size in TOKEN_BUCKETS if size < bounds.max_tokens] + [bounds.max_tokens]
        return (
            *(BucketLimits(f"decode[{size}]", _within(bounds, size), decode=True) for size in decode),
            *(BucketLimits(f"tokens[{size}]", _within(bounds, size)) for size in tokens),
        )


def _decode_sizes(batch: int) -> Iterator[int]:
    """Sequences of decode steps below `batch`: powers of two, and where steps cost more and more, halves."""
    size = 1
    while size < batch:
        yield size
        floor = 1 << (size.bit_length() - 1)
        size += floor if floor < 128 else floor // 2


def _within(bounds: Bounds, tokens: int) -> Bounds:
    """The bounds of steps of at most so many tokens."""
    sequences, rows = min(tokens, bounds.max_sequences), min(tokens, bounds.max_rows)
    return replace(bounds, max_tokens=tokens, max_sequences=sequences, max_rows=rows)


def parse_kv_dtype(text: str, target: Target) -> KvDType | None:
    """The `--kv-cache-dtype` that the user chose, or None for `auto`. Raises UserError for what the target lacks."""
    known = [dtype for dtype in get_args(KvDType) if dtype != "fp8" or target.kind == "cuda"]
    found = next((dtype for dtype in known if dtype == text), None)
    if found is None and text != "auto":
        raise UserError(f"--kv-cache-dtype for {target.name} must be auto, {', '.join(known)}, found {text!r}")
    return found


CPU = Target("cpu", isas=("x86-64-v3", "x86-64-v4"))
ARCHS: tuple[ArchName, ...] = get_args(ArchName)
"""GPU architectures in order of their compute capability."""
PLANNED = ("aarch64",)
"""Names that will be targets; asking for one says so."""


def cuda_target(archs: Sequence[ArchName]) -> Target:
    """The target of plans for GPUs of these architectures."""
    ordered = tuple(arch for arch in ARCHS if arch in archs)
    return Target(
        ",".join(ordered),
        archs=ordered,
        kv_layout="kv-rows",
        page_tokens=64,
        max_tokens=8192,
        min_rows=256,
        default_batch=256,
    )


def parse_target(text: str) -> Target:
    """The target of a name, or of several GPU architectures, separated by commas, that one plan serves.

    Raises UserError for a name that is not built, and for a mixture of CPU and GPUs.
    """
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise UserError(f"--target needs a target name, found {text!r}: give {_KNOWN}")
    for name in names:
        if name not in (CPU.name, *ARCHS):
            raise UserError(_unknown(name))
    archs = [arch for arch in ARCHS if arch in names]
    if not archs:
        return CPU
    if CPU.name in names:
        raise UserError(f"a plan is for CPUs or for GPUs, found {', '.join(names)}: compile once for each")
    return cuda_target(archs)


_KNOWN = f"{CPU.name}, or one or more of {', '.join(ARCHS)}"


def _unknown(name: str) -> str:
    if name in PLANNED:
        return f"target {name} is known but not built yet: use {_KNOWN}"
    if name in CPU.isas:
        return f"target {name} is part of `cpu`, which holds code for {' and '.join(CPU.isas)}: use cpu"
    return f"unknown target {name!r}: expected {_KNOWN} (later also {', '.join(PLANNED)})"
