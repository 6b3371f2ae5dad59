"""What `toolkit tune` found: the fastest kernels of a plan on one kind of GPU, in a file of the plan.

    plan/tuned/NVIDIA-H200.json

The file names kernels, not times to compare with: which of two is faster does not depend on the clocks of a run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from ...decode import decode_json
from ...errors import UserError
from ...plan import Plan


class TunedBucket(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One launch program."""

    bucket: str
    kernels: dict[str, str]
    """By kernel of the plan's launches, the one that replaces it."""
    step: tuple[int, int, int]
    """What was timed: sequences, new tokens of each, tokens of each."""
    before: float
    """Milliseconds of the step with the plan's own kernels, in the run that found this."""
    after: float
    """Milliseconds with these."""


class Tuned(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The winners of all launch programs."""

    format: Literal["toolkit-tuned"]
    digest: str
    """`content_digest` of the plan."""
    gpu: str
    cuda: str
    """The newest CUDA that its driver knows."""
    buckets: tuple[TunedBucket, ...]


def tuned_file(directory: Path, gpu: str) -> Path:
    """Where the winners for a GPU of this name are."""
    return directory / "tuned" / f"{re.sub(r'[^A-Za-z0-9]+', '-', gpu).strip('-')}.json"


def write_tuned(directory: Path, tuned: Tuned) -> Path:
    """Write the winners into the plan; the file. Raises UserError if it can't be written."""
    path = tuned_file(directory, tuned.gpu)
    try:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(tuned, order="sorted"), indent=1) + b"\n")
    except OSError as error:
        raise UserError(f"can't write {path}: {error.strerror}") from None
    return path


def read_tuned(directory: Path, plan: Plan, gpu: str) -> Mapping[str, Mapping[str, str]]:
    """By bucket, the kernels that replace others on a GPU of this name; nothing if it was not tuned for.

    Raises UserError if the file is damaged or of another plan.
    """
    path = tuned_file(directory, gpu)
    advice = f"run `toolkit tune {directory}` again, or delete it"
    try:
        tuned = decode_json(path.read_bytes(), Tuned)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UserError(f"can't read {path}: {error.strerror}; {advice}") from None
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}; {advice}") from None
    if tuned.digest != plan.content_digest:
        raise UserError(f"{path} was measured with another plan than {directory}: {advice}")
    buckets = {bucket.name: bucket for bucket in plan.buckets}
    for each in tuned.buckets:
        known = buckets[each.bucket].alternatives if each.bucket in buckets else {}
        for kernel, other in each.kernels.items():
            if other not in known.get(kernel, ()):
                raise UserError(f"{path} is damaged: {other} is no alternative to {kernel} in {each.bucket}; {advice}")
    return {each.bucket: each.kernels for each in tuned.buckets}
