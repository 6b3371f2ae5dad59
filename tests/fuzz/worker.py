"""Loads damaged inputs one after another, in a process of bounded memory and time.

`worker.py MODULE LOADERS SEED FIRST STOP SECONDS` runs inputs FIRST to STOP, which take turns with the loaders of a
module. It says `start NUMBER` before and `done NUMBER OUTCOME` after each, so that whoever reads it knows which input a
crash or a hang belongs to. An outcome is `loaded`, `refused` (a UserError of one line) or what went wrong.
"""

from __future__ import annotations

import os
import random
import re
import resource
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TextIO

from fuzz.loader import Files, Loader
from fuzz.mutate import damage

from toolkit.runtime.errors import UserError

MEMORY = 1 << 30
"""Bytes of address space that one input may add."""
_ALLOCATION = re.compile("MemoryError|[Cc]an(no|')t allocate|Unable to allocate")
_LONGEST = 2000
"""Characters of an error message."""


def place(loaders: tuple[str, ...], number: int) -> tuple[str, int]:
    """The loader of a campaign's input, and the index of the input among those of the loader."""
    return loaders[number % len(loaders)], number // len(loaders)


def work(loaders: Mapping[str, Loader], seed: int, numbers: range, seconds: int, report: TextIO) -> None:
    """Run inputs of a campaign."""
    with tempfile.TemporaryDirectory() as scratch:
        samples = {name: loader.samples(Path(scratch) / name) for name, loader in loaders.items()}
        for name, sound in samples.items():
            for files in sound:
                _load(loaders[name], files, Path(scratch))  # so that imports belong to no input
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for number in numbers:
            name, index = place(tuple(loaders), number)
            source = random.Random(f"{name}/{seed}/{index}")
            files = _damaged(loaders[name], source.choice(samples[name]), source)
            print("start", number, file=report, flush=True)
            _set_limits(seconds)
            print("done", number, _outcome(loaders[name], files, Path(scratch)), file=report, flush=True)


def _damaged(loader: Loader, files: Files, source: random.Random) -> Files:
    name = source.choice([name for name in sorted(files) if name in loader.damaged])
    return {**files, name: damage(files[name], source)}


def _load(loader: Loader, files: Files, scratch: Path) -> None:
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        for name, content in files.items():
            path = Path(folder) / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
        loader.load(Path(folder))


def _outcome(loader: Loader, files: Files, scratch: Path) -> str:
    try:
        _load(loader, files, scratch)
    except UserError as error:
        text = str(error)
        if _ALLOCATION.search(text):
            return f"huge allocation: {text:.200}"
        return "refused" if "\n" not in text and len(text) < _LONGEST else f"a message of bad form: {text!r:.200}"
    except BaseException as error:  # panics of Rust libraries are no Exception
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(str(error).split())
        return f"{type(error).__name__} at {Path(where.filename).name}:{where.lineno}: {text:.200}"
    return "loaded"


def _set_limits(seconds: int) -> None:
    """More memory fails to be allocated; the kernel ends a process that computes for longer."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + 1 + seconds, resource.RLIM_INFINITY))


if __name__ == "__main__":
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    os.environ |= {"TRANSFORMERS_VERBOSITY": "critical"}
    warnings.simplefilter("ignore")
    module, names, *values = sys.argv[1:]
    seed, first, stop, seconds = map(int, values)
    known: Mapping[str, Loader] = import_module(module).LOADERS
    with os.fdopen(os.dup(1), "w") as report, open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)  # libraries print
        work({name: known[name] for name in names.split(",")}, seed, range(first, stop), seconds, report)
