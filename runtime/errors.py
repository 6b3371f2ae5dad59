"""The two kinds of error: the user's fault and ours."""

from __future__ import annotations


class UserError(Exception):
    """Something the user gave can't be used: one sentence saying what was expected, what was found and what to do.

    The command line prints it without a traceback and exits with code 2; the server answers 4xx.
    """


class InternalError(Exception):
    """A broken invariant of ours, with the context needed to report it."""
