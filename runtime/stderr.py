"""A standard error that never fails and never waits: a full disk or a reader that is stuck must not stop a server."""

from __future__ import annotations

import io
import os
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress

MAX_PENDING = 1 << 20
"""Bytes that may wait to be written; what comes then is dropped and counted."""
FLUSH_SECONDS = 1.0
"""How long the last lines may take at the end."""


@contextmanager
def patient_stderr(descriptor: int = 2) -> Iterator[None]:
    """Let `sys.stderr` be written by a thread while the block runs."""
    before, stream = sys.stderr, PatientStream(descriptor)
    sys.stderr = stream
    try:
        yield
    finally:
        sys.stderr = before
        stream.close()


class PatientStream(io.TextIOBase):
    """Takes text at once; a thread writes it, whole pieces in order, and lets go what can't be written."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._pieces: deque[bytes] = deque()
        self._pending = 0
        self._dropped = 0
        self._change = threading.Condition()
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="stderr", daemon=True)
        self._thread.start()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    def write(self, text: str) -> int:
        """Queue text; drop it if too much waits."""
        data = text.encode("utf-8", "backslashreplace")
        if not data:
            return 0
        with self._change:
            if self._pending + len(data) > MAX_PENDING:
                self._dropped += 1
                return len(text)
            if self._dropped:
                data = f"[{self._dropped} pieces of the log were dropped]\n".encode() + data
                self._dropped = 0
            self._pieces.append(data)
            self._pending += len(data)
            self._change.notify()
        return len(text)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def flush(self) -> None:
        """Nothing to do: the thread writes at once."""

    def close(self) -> None:
        """Write what waits, for a second at most, and end the thread."""
        with self._change:
            self._ending = True
            self._change.notify()
        self._thread.join(FLUSH_SECONDS)
        super().close()

    def _run(self) -> None:
        while True:
            with self._change:
                while not self._pieces and not self._ending:
                    self._change.wait()
                data = b"".join(self._pieces)
                self._pieces.clear()
            if not data:
                return
            with suppress(OSError):
                view = memoryview(data)
                while view:
                    view = view[os.write(self._descriptor, view) :]
            with self._change:
                self._pending -= len(data)
