"""Packed weights of earlier compilations: where the same ones were written before, they are copied and not made anew.

The cache of compiled objects remembers, under a hash of all that decides the bytes, what was written and where. A copy
is hashed on its way, so a plan that was changed, moved or deleted since costs no more than packing again.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np

from ..runtime.errors import UserError
from ..runtime.plan import WeightEntry, WeightFile
from . import weights_pack
from .cache import cached, cached_path, content_key, package_digest
from .lowered import Weight
from .weights import TensorSource
from .weights_pack import FILE, PackedWeights

_BLOCK = 16 << 20
_SUFFIX = ".weights"


class _Written(msgspec.Struct, frozen=True):
    """What was packed before, and the directory of its plan."""

    place: str
    entries: dict[str, WeightEntry]
    files: tuple[WeightFile, ...]
    notes: tuple[str, ...]


def packed_weights(
    weights: Mapping[str, Weight],
    source: TensorSource,
    directory: Path,
    plan: Path,
    *,
    checkpoint: Mapping[str, str] | None,
    progress: Callable[[str, int, int], None] | None = None,
    random: bool = False,
) -> PackedWeights:
    """As `pack_weights`, for a plan that will be at `plan`; `checkpoint` has the SHA-256 of each of its files if they
    decide the weights, as they do not after calibration. Random weights are not stored, and so not copied.
    """
    if checkpoint is None or random:
        return weights_pack.pack_weights(weights, source, directory, progress, random=random)
    key = weights_key(weights, checkpoint)
    found = reuse_weights(key, directory, progress)
    packed = weights_pack.pack_weights(weights, source, directory, progress) if found is None else found
    remember_weights(key, packed, plan)
    return packed


def weights_key(weights: Mapping[str, Weight], checkpoint: Mapping[str, str]) -> str:
    """A hash of all that decides the packed bytes: how each weight is made, the SHA-256 of each file of the checkpoint,
    and the code of this package.
    """
    recipes = []
    for name, weight in sorted(weights.items()):
        recipe = weight.param.recipe
        constant = "" if recipe.constant is None else recipe.constant.digest
        made = f"{recipe.encoding!r} {recipe.pieces!r} {constant}"
        recipes.append(f"{name} {weight.layout} {weight.param.value.type} {made}")
    files = [f"{name} {sha}" for name, sha in sorted(checkpoint.items())]
    return content_key("weights", package_digest(), np.__version__, *files, "", *recipes)


def reuse_weights(
    key: str, directory: Path, progress: Callable[[str, int, int], None] | None = None
) -> PackedWeights | None:
    """Copy the weights of this key into `directory`, or None where they are not to be had any more."""
    try:
        before = msgspec.json.decode(cached_path(key, _SUFFIX).read_bytes(), type=_Written)
        (file,) = before.files
        with (Path(before.place) / FILE).open("rb") as source, (directory / FILE).open("wb") as target:
            with ThreadPoolExecutor(1) as thread:
                digest = thread.submit(hashlib.file_digest, source, "sha256")
                _copy(source.fileno(), target.fileno(), progress)
            if digest.result().hexdigest() != file.sha256:
                return None
    except (OSError, ValueError):  # deleted, or the cache's entry is damaged
        return None
    return PackedWeights(before.entries, before.files, before.notes)


def _copy(source: int, target: int, progress: Callable[[str, int, int], None] | None) -> None:
    """Copy a whole file within the kernel."""
    size, done = os.fstat(source).st_size, 0
    while count := os.sendfile(target, source, done, _BLOCK):
        done += count
        if progress is not None:
            progress(FILE, done, size)


def remember_weights(key: str, packed: PackedWeights, plan: Path) -> None:
    """Note that the plan's directory holds these weights."""
    written = _Written(str(plan.resolve()), dict(packed.entries), packed.files, packed.notes)
    with suppress(UserError):  # a cache that is only read
        cached(key, _SUFFIX, lambda path: path.write_bytes(msgspec.json.encode(written)), again=True)
