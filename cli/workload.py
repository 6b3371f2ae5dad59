"""What a step of some size asks of a machine: bytes to read and operations to do, launch by launch."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ..kernels_templates.catalog import ArgSpec, KernelSpec
from ..kernels_templates.registry import families
from ..kernels_templates.render import arguments
from ..runtime.errors import UserError
from ..runtime.plan import Arg, Bucket, CacheArg, CacheResource, ConstArg, DimArg, Launch, Plan, WeightArg

CONTEXT = 128


class StepSize(msgspec.Struct, frozen=True):
    """A step in which every sequence has as many new tokens, and is sampled once."""

    batch: int = 1
    """Sequences."""
    tokens: int = 1
    """New tokens of each."""
    context: int = 0
    """Tokens of each, new ones included; 0 is about `CONTEXT`, as far as the step and the plan allow."""

    @property
    def rows(self) -> int:
        """New tokens in all."""
        return self.batch * self.tokens

    def of(self, plan: Plan) -> StepSize:
        """The step with its context chosen. Raises UserError if the plan has none so long."""
        longest = plan.model.max_context
        context = self.context or max(self.tokens, min(CONTEXT, longest))
        if not self.tokens <= context <= longest:
            raise UserError(f"--context must be {self.tokens} to {longest}, not {context}")
        return StepSize(self.batch, self.tokens, context)

    def bucket(self, plan: Plan) -> Bucket:
        """The launch program that runs such a step. Raises UserError if the plan has none."""
        for bucket in plan.buckets:
            if bucket.fits(self.rows, self.batch, self.batch):
                return bucket
        largest = plan.buckets[-1]
        raise UserError(
            f"a step of this plan has at most {largest.max_tokens} tokens and {largest.max_sequences} sequences, not "
            f"{self.rows} and {self.batch}: lower --batch or --tokens"
        )


class Work(msgspec.Struct, frozen=True):
    """What a launch reads and computes."""

    bytes: int
    """Weights, activations and cache; results are not counted."""
    flops: int
    integer: bool = False
    """Whether operations are on 8-bit codes."""


def named_args(plan: Plan, launch: Launch) -> list[tuple[ArgSpec, Arg]]:
    """A launch's arguments with what the catalog says of each; nothing, if it has no such kernel any more."""
    kernel = plan.kernels[launch.kernel]
    family = families(plan.kind).get(kernel.family)
    if family is None or not family.params.keys() <= kernel.params.keys():
        return []
    specs = arguments(family, KernelSpec(kernel.family, kernel.params))
    return list(zip(specs, launch.args, strict=True)) if len(specs) == len(launch.args) else []


def work(plan: Plan, launch: Launch, size: StepSize) -> Work:
    """The launch's work in a step: weights count once, activations and operations for every row, and the cache for
    every token that attention looks at.
    """
    per_row = {"R": size.batch}.get(_dim(launch), size.rows)
    weights = sum(plan.weights[arg.name].bytes for arg in launch.args if isinstance(arg, WeightArg))
    resident = weights if weights <= launch.bytes else 0  # else rows are looked up
    attended = _attention(plan, launch, size)
    return Work(
        resident + (launch.bytes - resident) * per_row + attended.bytes,
        launch.flops * per_row + attended.flops,
        integer=plan.kernels[launch.kernel].family == "linear"
        and any(plan.weights[arg.name].encoding.kind == "affine" for arg in launch.args if isinstance(arg, WeightArg)),
    )


def _dim(launch: Launch) -> str:
    """The dimension that the launch grows with."""
    names = {arg.name for arg in launch.args if isinstance(arg, DimArg)}
    return "R" if "R" in names else "T"


def _attention(plan: Plan, launch: Launch, size: StepSize) -> Work:
    """Keys and values that the launch reads from a cache: two multiplications and additions a value and query head."""
    args = {spec.name: arg for spec, arg in named_args(plan, launch)}
    match plan.kernels[launch.kernel].family, args.get("cache"), args.get("heads"):
        case "attention" | "attention_decode" | "attention_prefill", CacheArg(group=group), ConstArg(value=heads):
            cache = plan.caches[group]
        case _:
            return Work(0, 0)
    seen = _visible(cache, range(size.context - size.tokens, size.context))
    read = min(size.context, cache.window + size.tokens - 1) if cache.window else size.context
    flops = 2 * size.batch * seen * int(heads) * (cache.key_dim + cache.value_dim)
    return Work(size.batch * read * cache.page_bytes // cache.page_tokens, flops)


def _visible(cache: CacheResource, positions: Iterable[int]) -> int:
    """Tokens that queries at these positions look at, in all."""
    return sum(min(position + 1, cache.window or position + 1) for position in positions)
