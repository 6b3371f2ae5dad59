"""The two kinds of error: the user's fault and ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


def brief(error: object, limit: int = 300) -> str:
    """The text of a foreign error as part of a sentence: one line of printable characters, not too long."""
    text = " ".join("".join(char if char.isprintable() else " " for char in str(error)).split())
    text = text or type(error).__name__
    return text if len(text) <= limit else text[:limit].rstrip() + " ..."


def shown(value: object) -> str:
    """A value that a file gave, quoted and short."""
    return brief(repr(value), 80)


@contextmanager
def foreign_errors(refusal: str) -> Iterator[None]:
    """Turn whatever a library raises for input that it can't read into a UserError; `refusal` has a place `{}` for it.

    Panics of libraries in Rust are no `Exception`.
    """
    try:
        yield
    except (UserError, MemoryError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise UserError(refusal.format(f"{type(error).__name__}: {brief(error)}")) from None


class UserError(Exception):
    """Something the user gave can't be used: one sentence saying what was expected, what was found and what to do.

    The command line prints it without a traceback and exits with code 2; the server answers 4xx.
    """


class InternalError(Exception):
    """A broken invariant of ours, with the context needed to report it."""


class DeviceLost(InternalError):
    """The device can run nothing more in this process."""
