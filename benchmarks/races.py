"""Races of a model's kernels on this machine: C++ and TVM, by shape and rows, and who won.

    races.py MODEL [--quant NAME] [--json FILE]

Compiles with `--generator race` and prints the plan's tuning file as a table in Markdown. MODEL may also be a tuning
file that is there already.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import msgspec
from run import WORK, machine

from toolkit import compile as compile_model
from toolkit.runtime.tuning import TUNING, Race, read_tuning


def table(races: Sequence[Race]) -> Iterator[str]:
    """Lines of the table of a level: a kernel and shape a row, a number of rows a column."""
    columns = sorted({race.rows for race in races})
    yield "| kernel | shape | " + " | ".join(f"{rows} row{'s'[: rows > 1]}" for rows in columns) + " |"
    yield "|---" * (2 + len(columns)) + "|"
    for (kernel, shape), group in groupby(races, lambda race: (race.kernel, race.shape)):
        sizes = ", ".join(f"{name} {size}" for name, size in sorted(shape.items()))
        cells = [cell(race) for race in sorted(group, key=lambda race: race.rows)]
        yield f"| `{kernel}` | {sizes} | {' | '.join(cells)} |"


def cell(race: Race) -> str:
    """Microseconds in C++ and in TVM's code, the chosen one in bold."""
    times = {name: f"{race.seconds[name] * 1e6:.1f}" for name in ("cpp", "tvm")}
    return " / ".join(f"**{time}**" if name == race.chosen else time for name, time in times.items())


def main() -> None:
    """Race, print the table and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--quant", default="keep")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    path = args.model
    if path.suffix != ".json":
        WORK.mkdir(exist_ok=True)
        path = compile_model(path, output=WORK / "raced", quant=args.quant, generator="race", force=True) / TUNING
    tuning = read_tuning(path)
    print(f"{tuning.cpu}, {tuning.threads} threads; {', '.join(map(' '.join, tuning.versions.items()))}\n")
    for isa in sorted({race.isa for race in tuning.races}):
        races = [race for race in tuning.races if race.isa == isa]
        print(f"{isa}, microseconds in C++ / TVM:\n", *table(races), sep="\n")
        print(f"\nTVM won {sum(race.chosen == 'tvm' for race in races)} of {len(races)} races.\n")
    if args.json:
        args.json.write_text(json.dumps({**machine(), "tuning": msgspec.to_builtins(tuning)}, indent=1) + "\n")


if __name__ == "__main__":
    main()
