"""Reading a plan: what is wrong with it is said in one sentence before anything of it is used."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from errno import ENOENT, ENOTDIR
from pathlib import Path, PurePosixPath
from stat import S_ISREG

import msgspec

from .abi import ABI_HASH
from .decode import decode_json
from .errors import UserError, brief, shown
from .plan import MAJOR, MINOR, ArenaArg, Bucket, CacheArg, Launch, Plan, RandomFill, WeightArg

MAX_FILL = 1 << 16
"""Bytes of the longest pattern of a random weight."""


class _Header(msgspec.Struct):
    """The fields that every version of the format has."""

    format: str
    major: int
    minor: int


def read_plan(directory: Path | str) -> Plan:
    """The plan in a directory, checked: its format and version, that every file is there with its size, and that every
    reference points at something. The tuning file is hashed, other contents when they are loaded (`verify_file`).

    Raises UserError if it is no plan, or a truncated, edited, newer or foreign one.
    """
    root = Path(directory)
    path = root / "plan.json"
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        what = "has no plan.json" if root.is_dir() else "does not exist"
        raise UserError(
            f"expected a plan, but {root} {what}: make one with `toolkit compile MODEL -o {root}`"
        ) from None
    except OSError as error:
        raise UserError(f"can't read {path}: {error.strerror}") from None
    plan = _decode(data, path)
    problem = next(_problems(plan, root), None)
    if problem is not None:
        raise UserError(f"the plan {root} is damaged: {brief(problem)}; compile it again")
    if plan.tuning is not None:
        verify_file(root, plan.tuning.file, plan.tuning.sha256)
    return plan


def _decode(data: bytes, path: Path) -> Plan:
    try:
        header = decode_json(data, _Header)
    except ValueError as error:
        raise UserError(f"{path} is no plan, or a truncated one: {error}; compile it again") from None
    if header.format != "toolkit-plan":
        raise UserError(f"expected a toolkit-plan, but {path} has format {shown(header.format)}")
    if not MAJOR - 1 <= header.major <= MAJOR or (header.major == MAJOR and header.minor > MINOR):
        raise UserError(
            f"{path} has plan version {header.major}.{header.minor}, this toolkit reads up to {MAJOR}.{MINOR}: "
            "compile it again, or install the toolkit version that made it"
        )
    try:
        plan = decode_json(data, Plan)
    except ValueError as error:
        raise UserError(f"the plan {path} is damaged: {error}; compile it again") from None
    if plan.abi != ABI_HASH:
        raise UserError(
            f"{path} was built for device interface {plan.abi}, this toolkit has {ABI_HASH}: compile it again"
        )
    return plan


def _problems(plan: Plan, root: Path) -> Iterator[str]:
    """What is wrong with a plan that decodes, one sentence each."""
    if plan.digest not in ("", plan.content_digest):
        yield "plan.json was changed since it was compiled"
    yield from _file_problems(plan, root)
    yield from _weight_problems(plan)
    if not plan.buckets:
        yield "it has no buckets"
    for bucket in plan.buckets:
        yield from _bucket_problems(plan, bucket)
    for cache in plan.caches:
        if min(cache.page_tokens, cache.page_bytes, cache.heads, len(cache.layers)) < 1:
            yield f"a cache group of layers {cache.layers} has a size below 1"


def _file_problems(plan: Plan, root: Path) -> Iterator[str]:
    sizes: list[tuple[str, int | None]] = [(code.file, code.bytes) for code in plan.code]
    if plan.tuning is not None:
        sizes.append((plan.tuning.file, plan.tuning.bytes))
    sizes += [(weights.file, weights.bytes) for weights in plan.weight_files if not weights.random]
    sizes += [(name, None) for name in (plan.text.files if plan.text is not None else {})]
    for name, size in sizes:
        pure = PurePosixPath(name)
        if pure.is_absolute() or ".." in pure.parts or not name.isprintable():
            yield f"{shown(name)} is not a path inside the plan"
            continue
        try:
            found = (root / name).stat()
        except OSError as error:
            yield (
                f"{name} is missing" if error.errno in (ENOENT, ENOTDIR) else f"{name} can't be read: {error.strerror}"
            )
            continue
        if not S_ISREG(found.st_mode):
            yield f"{name} is no file"
        elif size is not None and found.st_size != size:
            yield f"{name} should have {size} bytes, it has {found.st_size}"


def _weight_problems(plan: Plan) -> Iterator[str]:
    sizes = {file.file: file.bytes for file in plan.weight_files}
    random = {file.file for file in plan.weight_files if file.random}
    if random and plan.model.random_weights is None:
        yield "its weights are random, but it has no seed"
    for name, fill in plan.fills.items():
        if not _is_fill(fill):
            yield f"the random fill {name} is no pair of hexadecimal patterns of one length"
    for name, weight in plan.weights.items():
        if weight.file in random and weight.fill not in plan.fills:
            yield f"weight {name} is random by the unknown fill {weight.fill!r}"
        if weight.file not in sizes:
            yield f"weight {name} is in an unlisted file {weight.file!r}"
        elif weight.offset < 0 or weight.offset % 64 or not 0 <= weight.bytes <= sizes[weight.file] - weight.offset:
            yield f"weight {name} does not lie inside {weight.file}"


def _is_fill(fill: RandomFill) -> bool:
    try:
        sizes = {len(bytes.fromhex(text)) for text in (fill.keep, fill.value)}
    except ValueError:
        return False
    return len(sizes) == 1 and 0 < sizes.pop() <= MAX_FILL


def _bucket_problems(plan: Plan, bucket: Bucket) -> Iterator[str]:
    if min(bucket.max_tokens, bucket.max_sequences, bucket.max_rows) < 1:
        yield f"bucket {bucket.name} has a limit below 1"
    for other in {other for others in bucket.alternatives.values() for other in others}:
        if other not in plan.kernels:
            yield f"bucket {bucket.name} has the unknown alternative {other!r}"
    for launch in bucket.launches:
        yield from _launch_problems(plan, launch)


def _launch_problems(plan: Plan, launch: Launch) -> Iterable[str]:
    if launch.kernel not in plan.kernels:
        yield f"a launch names the unknown kernel {launch.kernel!r}"
    for arg in launch.args:
        match arg:
            case ArenaArg(offset=offset, bytes=size) if offset < 0 or size < 0 or offset + size > plan.memory.arena:
                yield f"{launch.kernel} has an argument outside the arena"
            case WeightArg(name=name) if name not in plan.weights:
                yield f"{launch.kernel} reads the unknown weight {name!r}"
            case CacheArg(group=group, slot=slot) if not (
                0 <= group < len(plan.caches) and 0 <= slot < len(plan.caches[group].layers)
            ):
                yield f"{launch.kernel} reads a cache that is not there"


def verify_file(root: Path, file: str, sha256: str) -> None:
    """Raises UserError if the file's content is not what the plan was made with."""
    try:
        with open(root / file, "rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"can't read {root / file}: {error.strerror}") from None
    if found != sha256:
        raise UserError(f"the plan {root} is damaged: {file} was changed since it was compiled; compile it again")
