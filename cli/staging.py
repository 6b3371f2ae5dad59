"""Writing a directory as a whole or not at all."""

from __future__ import annotations

import errno
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..compiler.emit import PLAN
from ..runtime.errors import UserError

_FULL = (errno.ENOSPC, errno.EDQUOT)


def check_output(output: Path, *, force: bool) -> None:
    """Raises UserError if the directory can't become a plan: it exists, and is no plan or `force` was not given."""
    if not output.exists():
        return
    if not force:
        raise UserError(f"{output} exists already: give --force to replace it, or another -o")
    if not output.is_dir() or (any(output.iterdir()) and not (output / PLAN).exists()):
        raise UserError(f"--force replaces plans only, and {output} is none: give another -o")


@contextmanager
def staged(output: Path, *, force: bool) -> Iterator[Path]:
    """A directory to write into, beside `output`, that becomes `output` at the end and vanishes on any failure.

    Raises UserError where `check_output` does, or if there is no place or no permission to write.
    """
    check_output(output, force=force)
    output = output.resolve()
    folder = output.parent / f".{output.name}.{secrets.token_hex(4)}"
    try:
        folder.mkdir(parents=True)
        yield folder
        _move(folder, output, force=force)
    except OSError as error:
        if error.errno in _FULL:
            raise UserError(f"no space left while writing {output}: free some, or give another -o") from None
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
            raise UserError(f"can't write {output} ({error.strerror}): give another -o") from None
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _move(folder: Path, output: Path, *, force: bool) -> None:
    check_output(output, force=force)  # it may have been made meanwhile
    if output.exists():
        old = folder.with_name(f"{folder.name}.old")
        output.rename(old)
        folder.rename(output)
        shutil.rmtree(old)
    else:
        folder.rename(output)
