"""The tuning file of a plan: what each race between generators of a kernel measured, and which one it chose.

    plan/tuning.json

Races are run when a plan is compiled with `--generator race`. `--tuning FILE` reuses their results, so that the same
model, options and tuning file give the same bytes on any machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from .decode import decode_json
from .errors import UserError
from .plan import Generator, IsaName

TUNING = "tuning.json"
MAJOR, MINOR = 1, 0


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of the records: immutable, and strict about what it reads."""


class Race(_Record, frozen=True):
    """One kernel at one shape, number of rows and ISA level, in the code of each generator that has it."""

    kernel: str
    """Symbol of the C++ kernel, which names its family and parameters."""
    shape: dict[str, int]
    """Arguments that are known when the plan is compiled, e.g. N and K."""
    isa: IsaName
    rows: int
    """Rows of the timed call. Calls of up to as many rows use what it chose; those of more than any race, the last."""
    seconds: dict[Generator, float]
    """Median time of a call, all threads together, with weights that are in no cache."""
    chosen: Generator


class Tuning(_Record, frozen=True):
    """All races of a plan, and where they were run."""

    format: Literal["toolkit-tuning"]
    major: int
    minor: int
    cpu: str
    """Model name of the CPU."""
    threads: int
    versions: dict[str, str]
    """Versions of the compilers: c++, tvm."""
    races: tuple[Race, ...]


def encode_tuning(tuning: Tuning) -> bytes:
    """The bytes of the file: readable, with sorted keys."""
    return msgspec.json.format(msgspec.json.encode(tuning, order="sorted"), indent=1) + b"\n"


def read_tuning(path: Path | str) -> Tuning:
    """The races in a tuning file. Raises UserError if there is none, or a damaged or newer one."""
    try:
        tuning = decode_json(Path(path).read_bytes(), Tuning)
    except OSError as error:
        raise UserError(f"can't read the tuning file {path}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path} is no tuning file, or a damaged one: {error}; run the races again") from None
    if tuning.major != MAJOR or tuning.minor > MINOR:
        raise UserError(
            f"{path} has tuning version {tuning.major}.{tuning.minor}, this toolkit reads up to {MAJOR}.{MINOR}: "
            "run the races again"
        )
    for race in tuning.races:
        if race.chosen not in race.seconds:
            raise UserError(f"{path} is damaged: {race.kernel} has no time for {race.chosen}, which it chose")
    return tuning
