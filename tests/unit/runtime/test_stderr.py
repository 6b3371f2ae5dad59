"""A standard error that can't be written: writers neither fail nor wait."""

from __future__ import annotations

import errno
import os
import sys
import time
import traceback

import pytest

from toolkit.runtime.stderr import MAX_PENDING, PatientStream, patient_stderr


def read_all(end: int) -> bytes:
    data = b""
    while piece := os.read(end, 1 << 16):
        data += piece
    return data


def test_what_is_written_arrives_in_order() -> None:
    end, begin = os.pipe()
    stream = PatientStream(begin)
    for index in range(100):
        print(index, "\udce9", file=stream)
    stream.close()
    os.close(begin)
    assert read_all(end).decode() == "".join(f"{index} \\udce9\n" for index in range(100))
    os.close(end)


def test_a_full_disk_is_no_error() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(OSError, match="No space") as caught:
        os.write(full, b"x")
    assert caught.value.errno == errno.ENOSPC
    before = sys.stderr
    with patient_stderr(full):
        print("lost", file=sys.stderr, flush=True)
        try:
            raise ValueError("told to nobody")
        except ValueError:
            traceback.print_exc()
    assert sys.stderr is before
    os.close(full)


def test_a_reader_that_is_stuck_holds_nobody_up() -> None:
    end, begin = os.pipe()
    stream = PatientStream(begin)
    line = "x" * 1023 + "\n"
    began = time.monotonic()
    for _ in range(2 * MAX_PENDING // len(line)):
        stream.write(line)
    assert time.monotonic() - began < 30
    assert stream._pending <= MAX_PENDING
    pending, read = stream._pending, 0
    while read < pending:
        read += len(os.read(end, 1 << 16))
    stream.write("there is room again\n")
    stream.close()
    os.close(begin)
    rest = read_all(end).decode()
    assert rest.endswith(" pieces of the log were dropped]\nthere is room again\n")
    os.close(end)
