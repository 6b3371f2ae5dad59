"""`toolkit tune`: find out on a GPU which of the kernels that a plan carries are fastest there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median

import click
import msgspec
from rich.console import Console
from rich.table import Table

from ..runtime.device.cuda.device import CudaDevice
from ..runtime.device.cuda.tuned import Tuned, TunedBucket, write_tuned
from ..runtime.errors import UserError
from ..runtime.load import read_plan
from ..runtime.options import EngineOptions
from ..runtime.plan import Bucket, Plan
from ..runtime.step import StepBatch
from .console import report_console
from .options import as_json, engine_options
from .profile import make_step
from .progress import Phases, TerminalPhases
from .workload import StepSize

ROUNDS = 3
"""Comparisons of two kernels; the median counts."""
SECONDS = 0.02
"""Of one measurement."""
GAIN = 0.003
"""A kernel replaces another if the step takes less time by this share or more: less is noise."""


@click.command("tune")
@click.argument("plan", type=click.Path(path_type=Path))
@click.option("--context", type=click.IntRange(1), default=640, show_default=True, help="Tokens of decoded sequences.")
@engine_options
@as_json
def command(*, plan: Path, context: int, options: EngineOptions, as_json: bool) -> None:
    """Measure on this machine's GPU which of PLAN's kernels are fastest, and keep the winners in the plan.

    The plan must carry kernels to choose from (`toolkit compile --alternatives`). Steps of every size are run whole,
    with one kernel replaced, alternating with the step as it was. Whoever loads the plan on a GPU of the same name runs
    the winners.

    \b
    Examples:
      toolkit compile MODEL --target sm90 --alternatives 3 -o plan/
      toolkit tune plan/
    """
    console = Console(stderr=True)
    with TerminalPhases(console) if console.is_terminal and not as_json else Phases() as phases:
        tuned = tune(plan, context, options, phases)
    path = write_tuned(plan, tuned)
    if as_json:
        click.echo(msgspec.json.encode(tuned))
    else:
        _print(tuned, path)


def tune(directory: Path, context: int, options: EngineOptions, phases: Phases) -> Tuned:
    """The winners of each bucket. Raises UserError if there is nothing to choose from, or no GPU."""
    plan = read_plan(directory)
    buckets = [bucket for bucket in plan.buckets if bucket.alternatives]
    if not buckets:
        raise UserError(
            f"the plan {directory} carries no kernels to choose from: compile it for a GPU with --alternatives 3"
        )
    with phases.phase("Load"):
        device = CudaDevice(directory, plan, options, tuned=False)
    try:
        with phases.phase("Tune"):
            found = []
            for done, bucket in enumerate(buckets):
                phases.advance(bucket.name, done, len(buckets))
                found.append(_Tuner(device, bucket, step_size(plan, bucket, context)).run())
        return Tuned("toolkit-tuned", plan.content_digest, device.name, device.cuda_version, tuple(found))
    finally:
        device.close()


def step_size(plan: Plan, bucket: Bucket, context: int) -> StepSize:
    """The largest step of a bucket: decoding, or prompts as long as they may be."""
    longest = plan.model.max_context
    if bucket.decode:
        return StepSize(bucket.max_sequences, 1, min(context, longest))
    tokens = min(bucket.max_tokens, longest)
    return StepSize(min(bucket.max_tokens // tokens, bucket.max_sequences), tokens, tokens)


class _Tuner:
    """Replaces the kernels of one launch program one by one, as long as that makes its step faster."""

    def __init__(self, device: CudaDevice, bucket: Bucket, size: StepSize) -> None:
        self._device, self._bucket, self._size = device, bucket, size
        self._step: StepBatch = make_step(device, size)
        self._kernels: dict[str, str] = {}

    def run(self) -> TunedBucket:
        self._count = max(1, int(SECONDS / self._time({}, count=1)))
        for kernel, other in self._candidates():
            trial = self._kernels | {kernel: other}
            if self._ratio(self._kernels, trial) < 1 - GAIN:
                self._kernels = trial
        before, after = self._pairs({}, self._kernels)
        size = (self._size.batch, self._size.tokens, self._size.context)
        self._device.substitute(self._bucket.name, {})
        return TunedBucket(
            *(self._bucket.name, self._kernels, size), *(round(median(each) * 1e3, 4) for each in (before, after))
        )

    def _candidates(self) -> Iterator[tuple[str, str]]:
        for kernel, others in self._bucket.alternatives.items():
            for other in others:
                yield kernel, other

    def _ratio(self, now: Mapping[str, str], trial: Mapping[str, str]) -> float:
        """Time with `trial` over the time as it is now: the two take turns, so that clocks change for both."""
        return median(after / before for before, after in zip(*self._pairs(now, trial), strict=True))

    def _pairs(self, now: Mapping[str, str], trial: Mapping[str, str]) -> tuple[list[float], list[float]]:
        pairs = [(self._time(now), self._time(trial)) for _ in range(ROUNDS)]
        return [before for before, _ in pairs], [after for _, after in pairs]

    def _time(self, kernels: Mapping[str, str], count: int = 0) -> float:
        self._device.substitute(self._bucket.name, kernels)
        self._device.replay(self._step, 1)  # loads what is new
        return self._device.replay(self._step, count or self._count)


def _print(tuned: Tuned, path: Path) -> None:
    console = report_console()
    console.print(f"[bold]{tuned.gpu}[/], driver for CUDA {tuned.cuda}: kernels that are faster than the plan's own")
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("steps", "sequences × tokens", "ms before", "ms after", "gain", "replaced"):
        table.add_column(column, justify="left" if column == "steps" else "right")
    for each in tuned.buckets:
        batch, tokens, _ = each.step
        gain = f"{1 - each.after / each.before:.1%}" if each.kernels else "-"
        table.add_row(
            *(each.bucket, f"{batch} × {tokens}", f"{each.before:.3f}", f"{each.after:.3f}", gain),
            str(len(each.kernels)),
        )
    console.print(table)
    console.print(f"written to {path}")
