"""Whose kernels a plan gets: `--generator` and `--tuning` of `toolkit compile`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from ..compiler.lowering import GpuGenerator
from ..compiler.program import Program
from ..kernels_templates.catalog import KernelSpec
from ..runtime.env import read_env
from ..runtime.errors import UserError
from ..runtime.plan import IsaName, TargetKind
from ..runtime.tuning import MAJOR, MINOR, Tuning, read_tuning

Kind = Literal["cpp", "tvm", "cuda", "triton", "race"]
KINDS: Mapping[TargetKind, tuple[Kind, ...]] = {"cpu": ("cpp", "tvm", "race"), "cuda": ("cuda", "triton", "race")}
"""By kind of target, its own choice first."""
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Tuned:
    """A program whose kernels are chosen, the races behind them, and what there is to say about it."""

    program: Program
    tuning: Tuning | None = None
    notes: tuple[str, ...] = ()
    again: Generators | None = None
    """Chooses from the same races, without running them again."""


@dataclass(frozen=True)
class Generators:
    """The user's choice, checked: `tuning` holds the results to use in a race's place, on a CPU. On GPUs lowering takes
    the kernels, and `toolkit tune` races them."""

    kind: Kind
    tuning: Tuning | None = None
    gpu: GpuGenerator = "cuda"
    """Of lowering for a GPU."""

    @staticmethod
    def parse(kind: str | None, tuning: str | Path | None, target: TargetKind = "cpu") -> Generators:
        """A tuning file implies a race. Raises UserError for a generator that the kind of target lacks, for one that is
        not installed, and for a file that can't be used."""
        chosen = next((each for each in KINDS[target] if each == kind), None)
        if chosen is None and kind is not None:
            *others, last = KINDS[target]
            raise UserError(f"unknown generator {kind!r} for {target} plans: expected {', '.join(others)} or {last}")
        if tuning is not None and chosen not in (None, "race"):
            raise UserError(f"--tuning holds the results of a race, but --generator is {kind}: leave one out")
        if tuning is not None:
            return Generators("race", read_tuning(tuning))
        if target == "cpu" or chosen not in ("triton", "race"):
            return Generators(chosen or KINDS[target][0])
        from ..compiler.codegen.triton import compiler_version

        compiler_version()
        return Generators(chosen, gpu=chosen)

    @property
    def races_here(self) -> bool:
        """Whether kernels are timed while compiling."""
        return self.kind == "race" and self.gpu == "cuda" and self.tuning is None

    def choose(
        self,
        programs: Sequence[Program],
        isas: tuple[IsaName, ...],
        progress: Progress | None = None,
        *,
        deterministic: bool = False,
    ) -> Tuned:
        """The first program with its kernels chosen: for `race` by timing them here, unless a tuning file says. A GPU's
        are as lowering chose them.

        In a `deterministic` program a kernel is one generator's code for any number of rows.
        """
        from ..compiler.generators import all_tvm, candidates, stays_cpp, stays_cuda, with_choices
        from ..compiler.race import choices_of, one_for_all_rows, used_races

        program = programs[0]
        if self.gpu != "cuda":
            return Tuned(program, notes=(stays_cuda(programs),))
        if self.kind in ("cpp", "cuda"):
            return Tuned(program)
        kernels = candidates(program.lowered)
        if self.kind == "tvm":
            return Tuned(with_choices(program, all_tvm(kernels, isas)), notes=(stays_cpp(program.lowered),))
        measured = self.tuning or _race(kernels, progress)
        races = one_for_all_rows(measured.races) if deterministic else measured.races
        choices, notes = choices_of(races, kernels, isas)
        used = msgspec.structs.replace(measured, races=used_races(races, kernels))
        return Tuned(with_choices(program, choices), used, notes, Generators(self.kind, measured))


def _race(kernels: Sequence[KernelSpec], progress: Progress | None) -> Tuning:
    """Races at every level that this machine runs."""
    from ..compiler.codegen.cpu import ISA_LEVELS, find_compiler
    from ..compiler.codegen.tvm import tvm_version
    from ..compiler.race import run_races
    from ..runtime.device.machine import cpu_flags, cpu_model, usable_cores
    from .measure import measure

    runnable: list[IsaName] = [
        level.name
        for level in ISA_LEVELS
        if cpu_flags().issuperset(level.requires) and read_env().isa in (None, level.name)
    ]
    versions = {"c++": find_compiler().version, "tvm": tvm_version()}
    races = run_races(kernels, runnable, measure, progress)
    return Tuning("toolkit-tuning", MAJOR, MINOR, cpu_model(), usable_cores(), versions, races)
