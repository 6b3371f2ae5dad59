"""Packed weights of earlier compilations: where the same ones were written before, they are taken over, not made anew.

The cache of compiled objects remembers, under a hash of all that decides the bytes, what was written and where. Of the
plan that the new one replaces, the file itself is taken; another plan's is copied, so that no two plans share one.
Either is hashed again, so a plan that was changed, moved or deleted since costs no more than packing again.
"""

from __future__ import annotations

import errno
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
    reuse: bool = True,
) -> PackedWeights:
    """As `pack_weights`, for a plan that will be at `plan`; `checkpoint` has the SHA-256 of each of its files if they
    decide the weights, as they do not after calibration. Random weights are not stored, and so not reused; others are
    packed in any case without `reuse`.
    """
    if checkpoint is None or random:
        return weights_pack.pack_weights(weights, source, directory, progress, random=random)
    key = weights_key(weights, checkpoint)
    found = reuse_weights(key, directory, plan, progress) if reuse else None
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
    key: str, directory: Path, plan: Path, progress: Callable[[str, int, int], None] | None = None
) -> PackedWeights | None:
    """The weights of this key in `directory`, which becomes `plan`; None where they are not to be had any more."""
    target = directory / FILE
    try:
        before = msgspec.json.decode(cached_path(key, _SUFFIX).read_bytes(), type=_Written)
        (file,) = before.files
        place = Path(before.place)
        with (place / FILE).open("rb") as source, ThreadPoolExecutor(1) as thread:
            digest = thread.submit(hashlib.file_digest, source, "sha256")
            if not (place == plan.resolve() and _linked(place / FILE, target)):
                _copy(source.fileno(), target, progress)
            if digest.result().hexdigest() == file.sha256:
                return PackedWeights(before.entries, before.files, before.notes)
    except (OSError, ValueError):  # deleted, or the cache's entry is damaged
        pass
    target.unlink(missing_ok=True)  # it may be the file of the plan that is still there
    return None


def _linked(source: Path, target: Path) -> bool:
    """Give the file a second name. The first goes with its plan when the new one takes that one's place."""
    try:
        os.link(source, target)
    except OSError:  # a file system without
        return False
    return True


def _copy(source: int, target: Path, progress: Callable[[str, int, int], None] | None) -> None:
    """Copy a whole file within the kernel, which shares its blocks where the file system can."""
    size, done = os.fstat(source).st_size, 0
    with target.open("wb") as out:
        while count := _copy_block(source, done, out.fileno()):
            done += count
            if progress is not None:
                progress(FILE, done, size)


def _copy_block(source: int, at: int, target: int) -> int:
    try:
        return os.copy_file_range(source, target, _BLOCK, at)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        return os.sendfile(target, source, at, _BLOCK)  # between file systems


def remember_weights(key: str, packed: PackedWeights, plan: Path) -> None:
    """Note that the plan's directory holds these weights."""
    written = _Written(str(plan.resolve()), dict(packed.entries), packed.files, packed.notes)
    with suppress(UserError):  # a cache that is only read
        cached(key, _SUFFIX, lambda path: path.write_bytes(msgspec.json.encode(written)), again=True)
