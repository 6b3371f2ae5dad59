"""Environment variables: every knob there is, typed, in one table."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import get_args

from .errors import UserError
from .plan import IsaName


@dataclass(frozen=True)
class Env:
    """What the environment says. A field `name` is the variable `TOOLKIT_NAME`; `doc` in its metadata explains it."""

    debug: int = field(default=0, metadata={"doc": "0 to 4: how much to say of what each stage did"})
    cache: Path | None = field(default=None, metadata={"doc": "folder for compiled kernels; default ~/.cache/toolkit"})
    isa: IsaName | None = field(
        default=None, metadata={"doc": "instruction set level to run plans at; default the best that the CPU has"}
    )


def read_env(environ: Mapping[str, str] | None = None) -> Env:
    """The knobs. Raises UserError naming the variable whose value can't be used."""
    environ = os.environ if environ is None else environ
    return Env(
        debug=_level("TOOLKIT_DEBUG", environ.get("TOOLKIT_DEBUG", "")),
        cache=Path(environ["TOOLKIT_CACHE"]) if environ.get("TOOLKIT_CACHE") else None,
        isa=_isa("TOOLKIT_ISA", environ.get("TOOLKIT_ISA", "")),
    )


def describe_env() -> dict[str, str]:
    """Every variable and what it is for."""
    return {f"TOOLKIT_{item.name.upper()}": item.metadata["doc"] for item in fields(Env)}


def _level(name: str, text: str) -> int:
    if text == "":
        return 0
    if text not in ("0", "1", "2", "3", "4"):
        raise UserError(f"{name} must be 0 to 4, found {text!r}")
    return int(text)


def _isa(name: str, text: str) -> IsaName | None:
    level = next((level for level in get_args(IsaName) if level == text), None)
    if text and level is None:
        raise UserError(f"{name} must be {' or '.join(get_args(IsaName))}, found {text!r}")
    return level
