"""The `inspect` command."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from ...runtime.errors import UserError
from ...runtime.load import read_plan
from ...runtime.plan import Plan
from ...runtime.tuning import read_tuning
from ..options import as_json, step_size
from ..profile import Profile, read_profile
from ..roofline import machine_of
from ..units import size as size_text
from ..workload import StepSize
from .examine import Inspection, examine

BESIDE = Path("PLAN.html")
"""Stands for `--html` without a file: the plan's name in the current directory."""


@click.command("inspect")
@click.argument("plan", type=click.Path(path_type=Path))
@click.option("--launches", "every_launch", is_flag=True, help="Show every launch instead of sums over layers.")
@click.option(
    "--html",
    type=click.Path(path_type=Path),
    is_flag=False,
    flag_value=BESIDE,
    metavar="[FILE]",
    help="Write one self-contained page instead, into FILE.  [default: PLAN.html]",
)
@click.option("--diff", "other", type=click.Path(path_type=Path), help="Show what differs in this plan instead.")
@click.option(
    "--profile",
    "profile_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Times of a step that `bench kernels --json` measured, to set beside the roofline.",
)
@step_size
@as_json
def command(
    *,
    plan: Path,
    every_launch: bool,
    html: Path | None,
    other: Path | None,
    profile_file: Path | None,
    size: StepSize,
    as_json: bool,
) -> int:
    """Show what is in PLAN: the model, what the passes did, each launch of a step against this machine's roofline,
    memory, kernels, weights and caches.

    With --diff the exit code is 0 if the plans are the same and 1 if they differ.

    \b
    Examples:
      toolkit inspect smol-plan
      toolkit inspect smol-plan --launches --batch 8 --context 4096
      toolkit inspect smol-plan --html
      toolkit bench kernels smol-plan --json > step.json; toolkit inspect smol-plan --profile step.json --html
      toolkit inspect smol-plan --diff smol-int8-plan
      toolkit inspect smol-plan --json | jq .seconds
    """
    if sum((html is not None, other is not None, every_launch, as_json)) > 1 and not (other is not None and as_json):
        raise UserError(
            "--html, --diff, --launches and --json are different reports: give one (--diff may have --json)"
        )
    found = read_plan(plan)
    if other is not None:
        from .diff import compare, print_changes

        changes = compare(found, read_plan(other), machine_of(found)[0], size)
        if as_json:
            click.echo(msgspec.json.encode(changes))
        else:
            print_changes(plan, other, changes)
        return int(bool(changes))
    profile = _profile(plan, found, profile_file, size)
    inspection = _examine(plan, found, profile, size)
    if html is not None:
        from .page import render_page

        _write(Path(f"{plan.resolve().name}.html") if html == BESIDE else html, render_page(found, inspection, profile))
    elif as_json:
        click.echo(msgspec.json.encode(inspection))
    else:
        from .text import print_inspection

        print_inspection(found, inspection, every_launch)
    return 0


def _profile(directory: Path, plan: Plan, file: Path | None, size: StepSize) -> Profile | None:
    if file is None:
        return None
    profile = read_profile(file, directory, plan)
    if len(profile.launches) != len(profile.size.bucket(plan).launches):
        raise UserError(f"{file} was edited: it has no time for every launch; measure again")
    if size not in (StepSize(), profile.size):
        raise UserError(
            f"{file} is of a step of --batch {profile.size.batch} --tokens {profile.size.tokens} --context "
            f"{profile.size.context}: leave these options out, or measure another step"
        )
    return profile


def _examine(directory: Path, plan: Plan, profile: Profile | None, size: StepSize) -> Inspection:
    tuning = read_tuning(directory / plan.tuning.file) if plan.tuning is not None else None
    if profile is None:
        return examine(plan, machine_of(plan)[0], size, tuning=tuning)
    return examine(plan, profile.machine, profile.size, profile=profile, tuning=tuning)


def _write(path: Path, page: str) -> None:
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(f"can't write {path}: {error.strerror}; name another file after --html") from None
    click.echo(f"{path}: {size_text(path.stat().st_size)}, open it in a browser")
