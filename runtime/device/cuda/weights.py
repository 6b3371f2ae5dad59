"""Weights on the GPU: read by many threads through pinned buffers, or made at random where they lie."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import UserError
from ...load import verify_file
from ...plan import Plan
from ...random_weights import weight_key
from .driver import Gpu, Pinned, call
from .kernels import Function
from .program import Call, Program

READERS = 12
CHUNK = 4 << 20
"""Bytes of a buffer, of which a reader has two: one is filled while the other is sent. 96 MiB in all."""
_ALIGNMENT = 256


@dataclass(frozen=True)
class _Read:
    path: Path
    start: int
    bytes: int
    address: int


class Weights:
    """All weight files in one block of device memory."""

    def __init__(self, gpu: Gpu, plan: Plan) -> None:
        self._gpu, self._plan = gpu, plan
        self._offsets: dict[str, int] = {}
        self.bytes = 0
        for file in plan.weight_files:
            self._offsets[file.file] = self.bytes
            self.bytes += -(-file.bytes // _ALIGNMENT) * _ALIGNMENT
        self._base = gpu.allocate(self.bytes)

    def address(self, name: str) -> int:
        """Where a weight lies."""
        entry = self._plan.weights[name]
        return self._base + self._offsets[entry.file] + entry.offset

    def load(self, directory: Path, fill: Function, stream: Any, *, verify: bool) -> None:
        """Read or make all of them; hashes are checked while they are read. Raises UserError for a damaged file."""
        stored = [file for file in self._plan.weight_files if not file.random]
        reads = [
            _Read(directory / file.file, start, min(CHUNK, file.bytes - start), self._file(file.file) + start)
            for file in stored
            for start in range(0, file.bytes, CHUNK)
        ]
        for file in self._plan.weight_files:
            if file.random:
                self._make(file.file, fill, stream)
        readers = min(READERS, len(reads))
        if readers:
            staging = Pinned(self._gpu, 2 * CHUNK * readers)
            try:
                with ThreadPoolExecutor(readers + len(stored)) as pool:
                    jobs = [
                        pool.submit(self._read, reads[index::readers], staging.address + 2 * CHUNK * index)
                        for index in range(readers)
                    ]
                    if verify:
                        jobs += [pool.submit(verify_file, directory, file.file, file.sha256) for file in stored]
                    for job in jobs:
                        job.result()
            finally:
                staging.close()
        call(self._gpu.driver.cuStreamSynchronize, stream)

    def _file(self, name: str) -> int:
        return self._base + self._offsets[name]

    def _read(self, reads: Sequence[_Read], address: int) -> None:
        """What one reader does: chunks by turns through its two buffers."""
        driver = self._gpu.driver
        self._gpu.make_current()
        stream, sent = self._gpu.stream(), [self._gpu.event(), self._gpu.event()]
        buffers = [address, address + CHUNK]
        try:
            for index, read in enumerate(reads):
                turn = index % 2
                call(driver.cuEventSynchronize, sent[turn])
                _read_whole(read, memoryview((ctypes.c_uint8 * read.bytes).from_address(buffers[turn])).cast("B"))
                call(driver.cuMemcpyHtoDAsync, read.address, buffers[turn], read.bytes, stream)
                call(driver.cuEventRecord, sent[turn], stream)
        finally:
            call(driver.cuStreamSynchronize, stream)
            for event in sent:
                call(driver.cuEventDestroy, event)
            call(driver.cuStreamDestroy, stream)

    def _make(self, file: str, fill: Function, stream: Any) -> None:
        """Random weights, by the kernel that does what `runtime.random_weights` says."""
        plan, gpu = self._plan, self._gpu
        patterns = {name: (bytes.fromhex(each.keep), bytes.fromhex(each.value)) for name, each in plan.fills.items()}
        block = gpu.allocate(sum(len(keep) + len(value) for keep, value in patterns.values()))
        places: dict[str, tuple[int, int, int]] = {}
        used = block
        for name, (keep, value) in patterns.items():
            places[name] = used, used + len(keep), len(keep)
            gpu.upload(used, keep + value)
            used += len(keep) + len(value)
        calls = []
        for name, entry in plan.weights.items():
            if entry.file == file and entry.bytes:
                at_keep, at_value, period = places[entry.fill]
                key = weight_key(plan, name)
                args = (self.address(name), at_keep, at_value, entry.bytes, 0, period, key % 2**64, key >> 64)
                calls.append(Call(f"weight {name}", fill, args))
        Program(gpu, stream, calls).launch()
        call(gpu.driver.cuStreamSynchronize, stream)
        gpu.free(block)

    def close(self) -> None:
        """Free the memory."""
        self._gpu.free(self._base)


def _read_whole(read: _Read, view: memoryview) -> None:
    try:
        descriptor = os.open(read.path, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"can't read {read.path}: {error.strerror}") from None
    try:
        done = 0
        while done < read.bytes:
            count = os.preadv(descriptor, [view[done:]], read.start + done)
            if not count:
                raise UserError(f"{read.path.name} ended too early: the plan is damaged; compile it again")
            done += count
    finally:
        os.close(descriptor)
