"""The CPU device: the plan's library, its weights in memory, and a team of threads."""

from __future__ import annotations

import _ctypes
import ctypes
import mmap
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..debug import debug, debug_phase
from ..drafts import index_bytes
from ..env import read_env
from ..errors import InternalError, UserError
from ..load import verify_file
from ..options import EngineOptions
from ..plan import IsaName, Library, Plan
from ..random_weights import fill_random
from ..step import ABI_HASH, MAX_TOP, RESULT, StepBatch, StepResult
from .base import Ticket, find_bucket
from .check import check_step
from .machine import available_memory, cpu_flags, resident_bytes, usable_cores
from .pages import mib, plan_pages

Bytes = npt.NDArray[np.uint8]
_GROWTH = 16 << 20
"""Bytes by which a process grows that serves requests."""
_GRAMMAR_BYTES = 1100
"""And for each token of the vocabulary once there is a grammar."""
_READ = 16 << 20
"""Bytes a weight reader takes at once."""


class _Step(ctypes.Structure):
    """`toolkit_step` of kernels_templates/cpu/abi.h.j2."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("T", "S", "R", "groups")),
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("tokens", "positions", "lengths", "seq_start", "context", "rows", "slots", "pages", "page_stride"),
                *("results", "top_tokens", "top_logprobs", "profile"),
            )
        ),
    )


class _Model(ctypes.Structure):
    """`toolkit_model` of kernels_templates/cpu/abi.h.j2."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("arena", "weights", "caches", "layer_stride")),
        ("threads", ctypes.c_int32),
    )


class CpuDevice:
    """Runs a plan's steps on this machine's cores (see `device.base.Device`).

    What is dropped without being closed, or is still open when the interpreter exits, is closed then.
    """

    queue_depth = 1

    def __init__(self, directory: Path, plan: Plan, options: EngineOptions) -> None:
        """Raises UserError if the CPU lacks what the plan needs or the memory does not suffice."""
        self.plan = plan
        self.threads = options.threads or usable_cores()
        self._directory, self._verify, self._asleep = directory, options.verify, False
        self._interpreter = resident_bytes()
        budget, own = _budget(plan, options, self._interpreter)
        library = choose_library(plan.libraries, cpu_flags(), read_env().isa)
        with debug_phase(f"Kernels ({library.isa}, {self.threads} threads)"):
            if options.verify:
                verify_file(directory, library.file, library.sha256)
            self._library = _open_library(directory / library.file)
        self._state = _allocate(self._library.toolkit_state_bytes())
        self._workers: list[threading.Thread] = []
        self._running = threading.Lock()
        self._stop = weakref.finalize(self, _stop, self._library, self._state, self._workers, self._running)
        self.isa: str = library.isa
        self.pages = plan_pages(plan, budget, own)
        with debug_phase(f"Weights ({mib(plan.memory.weights)})"):
            self._weights = {file.file: _allocate(file.bytes) for file in plan.weight_files}
            _load_weights(directory, plan, self._weights, options.verify)
        self._arena = _allocate(plan.memory.arena)
        self._caches = [
            _allocate(len(cache.layers) * pages * cache.page_bytes)
            for cache, pages in zip(plan.caches, self.pages, strict=True)
        ]
        self._open()
        self._tickets = 0
        held = ", ".join(f"{name} {mib(size)}" for name, size in self.memory().items())
        debug(1, f"Memory: {held}; {' + '.join(map(str, self.pages))} pages of K/V")

    def _open(self) -> None:
        plan = self.plan
        pointers = np.zeros(max(1, len(plan.weights)), np.uint64)
        for index, (_, weight) in enumerate(sorted(plan.weights.items())):
            pointers[index] = self._weights[weight.file].ctypes.data + weight.offset
        strides = [pages * cache.page_bytes for cache, pages in zip(plan.caches, self.pages, strict=True)]
        self._tables = (
            pointers,
            np.array([cache.ctypes.data for cache in self._caches], np.uint64),
            np.array(strides, np.int64),
        )
        groups = len(plan.caches)
        self._group_pointers = np.zeros((2, groups), np.uint64)
        self._page_stride = np.zeros(groups, np.int32)
        rows = max(bucket.max_rows for bucket in plan.buckets)
        self._results = np.zeros(rows, RESULT)
        self._top_tokens = np.zeros((rows, MAX_TOP), np.int32)
        self._top_logprobs = np.zeros((rows, MAX_TOP), np.float32)
        model = _Model(self._arena.ctypes.data, *(table.ctypes.data for table in self._tables), self.threads)
        self._library.toolkit_open(self._state.ctypes.data, ctypes.byref(model))
        self._step = _Step(
            groups=groups,
            slots=self._group_pointers[0].ctypes.data,
            pages=self._group_pointers[1].ctypes.data,
            page_stride=self._page_stride.ctypes.data,
            results=self._results.ctypes.data,
            top_tokens=self._top_tokens.ctypes.data,
            top_logprobs=self._top_logprobs.ctypes.data,
        )
        self._step_reference = ctypes.byref(self._step)
        for tid in range(1, self.threads):
            work = (self._state.ctypes.data, tid)
            worker = threading.Thread(target=self._library.toolkit_worker, args=work, daemon=True, name=f"kernel-{tid}")
            worker.start()
            self._workers.append(worker)

    def submit(self, batch: StepBatch) -> Ticket:
        """Run a step. Raises InternalError if the batch exceeds every bucket or a page is out of range."""
        return self._run(batch, None)

    def _run(self, batch: StepBatch, profile: npt.NDArray[np.uint64] | None) -> Ticket:
        if not self._state.size:
            raise InternalError("a step was submitted to a closed device")
        if self._asleep:
            raise InternalError("a step was submitted to a sleeping device")
        check_step(self.plan, self.pages, batch)
        step, rows = self._step, len(batch.rows)
        step.T, step.S, step.R = len(batch.tokens), len(batch.context), rows
        step.tokens = batch.tokens.ctypes.data
        step.positions = batch.positions.ctypes.data
        step.lengths = batch.lengths.ctypes.data
        step.seq_start = batch.seq_start.ctypes.data
        step.context = batch.context.ctypes.data
        step.rows = batch.rows.ctypes.data
        step.profile = None if profile is None else profile.ctypes.data
        for group, (slots, pages) in enumerate(zip(batch.slots, batch.pages, strict=True)):
            self._group_pointers[0, group] = slots.ctypes.data
            self._group_pointers[1, group] = pages.ctypes.data
            self._page_stride[group] = pages.shape[1]
        with self._running:
            before = time.perf_counter()
            status = self._library.toolkit_run(self._state.ctypes.data, self._step_reference)
            seconds = time.perf_counter() - before
        if status:
            raise InternalError(f"no bucket fits a step of {step.T} tokens, {step.S} sequences and {rows} rows")
        self._tickets += 1
        self._result = StepResult(self._results[:rows], self._top_tokens[:rows], self._top_logprobs[:rows], seconds)
        return Ticket(self._tickets)

    def poll(self, ticket: Ticket) -> StepResult:
        """The step's result: on CPU `submit` returns when it is there."""
        if ticket.number != self._tickets:
            raise InternalError(f"step {ticket.number} was polled after step {self._tickets} was submitted")
        return self._result

    wait = poll

    def copy_pages(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages (source, destination) over all layers of a group."""
        cache = self.plan.caches[group]
        pages = self._caches[group].reshape(len(cache.layers), self.pages[group], cache.page_bytes)
        for source, destination in pairs:
            pages[:, destination] = pages[:, source]

    def profile(self, batch: StepBatch) -> tuple[Ticket, npt.NDArray[np.float64]]:
        """Run a step with a barrier and clocks around every launch of the bucket that it fits (see `base.Device`)."""
        bucket = find_bucket(self.plan, batch)
        times = np.zeros((len(bucket.launches), 1 + self.threads), np.uint64)
        return self._run(batch, times), times.astype(np.float64) * 1e-9

    def memory(self) -> dict[str, int]:
        """Bytes held, by kind; `interpreter` is what the process held before."""
        own = {"host": self._host_bytes, "interpreter": self._interpreter}
        if self._asleep:
            return {"weights": 0, "arena": 0, "kv": 0, **own}
        return {
            "weights": sum(array.nbytes for array in self._weights.values()),
            "arena": self._arena.nbytes,
            "kv": sum(cache.nbytes for cache in self._caches),
            **own,
        }

    @property
    def _host_bytes(self) -> int:
        return self._top_tokens.nbytes + self._top_logprobs.nbytes + self._results.nbytes

    def sleep(self) -> None:
        """See `base.Device`. Addresses stay, so that the kernels need not be told."""
        self._asleep = True
        for block in (self._arena, *self._weights.values(), *self._caches):
            _drop(block)

    def wake(self) -> None:
        """See `base.Device`."""
        _load_weights(self._directory, self.plan, self._weights, self._verify)
        self._asleep = False

    def close(self) -> None:
        """Stop the threads and release the memory."""
        self._stop()
        self._state = self._arena = np.zeros(0, np.uint8)
        self._weights, self._caches = {}, []


def _stop(library: ctypes.CDLL, state: Bytes, workers: Sequence[threading.Thread], running: threading.Lock) -> None:
    """Stop the threads, once the step that is running is done, and unload the library.

    `running` is never released: a thread that goes on while the interpreter exits waits for it until that is done.
    """
    running.acquire()
    library.toolkit_close(state.ctypes.data)
    for worker in workers:
        worker.join()
    # Else the linker would take a library that replaces this one at its path for the same.
    _ctypes.dlclose(library._handle)


def choose_library(libraries: Sequence[Library], flags: frozenset[str], wanted: IsaName | None = None) -> Library:
    """The library of the wanted level, or else the last one that a CPU with these flags can run.

    Raises UserError naming what the CPU or the plan lacks.
    """
    offered = [library for library in libraries if wanted in (None, library.isa)]
    if not offered:
        held = ", ".join(library.isa for library in libraries)
        raise UserError(f"TOOLKIT_ISA asks for {wanted}, but this plan holds code for {held}: unset it")
    usable = [library for library in offered if flags.issuperset(library.requires)]
    if usable:
        return usable[-1]
    missing = ", ".join(sorted(set(offered[0].requires) - flags))
    if wanted is not None:
        raise UserError(f"TOOLKIT_ISA asks for {wanted}, but this CPU lacks {missing}: unset it")
    raise UserError(f"this plan needs an {offered[0].isa} CPU, but this one lacks {missing}")


def _budget(plan: Plan, options: EngineOptions, interpreter: int) -> tuple[int, int]:
    """Bytes that may be used, and those of them that the process itself has or will have."""
    grammars = plan.model.vocab_size * _GRAMMAR_BYTES if plan.text is not None else 0
    own = _GROWTH + grammars + index_bytes(plan, options) if options.whole_process else 0
    if options.memory <= 1:
        return int(options.memory * available_memory()), own
    return int(options.memory), own + (interpreter if options.whole_process else 0)


def _allocate(size: int) -> Bytes:
    """Zeroed, page-aligned memory that costs nothing until it is touched, in huge pages where the kernel has them."""
    if size == 0:
        return np.zeros(0, np.uint8)
    region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0))
    if size >= 4 << 20 and hasattr(mmap, "MADV_HUGEPAGE"):
        region.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(region, np.uint8)


def _drop(block: Bytes) -> None:
    """Give memory of `_allocate` back to the system; it reads as zeros when it is touched again."""
    if block.size:
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(block.ctypes.data), ctypes.c_size_t(block.size), ctypes.c_int(mmap.MADV_DONTNEED)
        )


def _open_library(path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise UserError(
            f"can't load the plan's kernels: {error}; if they are on a file system mounted noexec, copy the plan to "
            "another, else compile it again"
        ) from None
    library.toolkit_abi.restype = ctypes.c_char_p
    library.toolkit_state_bytes.restype = ctypes.c_int64
    library.toolkit_open.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.toolkit_worker.argtypes = [ctypes.c_void_p, ctypes.c_int32]
    library.toolkit_run.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.toolkit_close.argtypes = [ctypes.c_void_p]
    abi = library.toolkit_abi().decode()
    if abi != ABI_HASH:
        raise UserError(f"{path.name} was built for device interface {abi}, this toolkit has {ABI_HASH}: compile again")
    return library


def _load_weights(directory: Path, plan: Plan, blocks: Mapping[str, Bytes], verify: bool) -> None:
    """Fill a block of memory for each weight file; reading and hashing go on side by side."""
    hashes = {file.file: file.sha256 for file in plan.weight_files if not file.random}
    stored = {name: block for name, block in blocks.items() if name in hashes}
    with ThreadPoolExecutor(4) as pool:
        for name in blocks.keys() - hashes.keys():
            fill_random(plan, name, blocks[name], pool)
        reads = [
            pool.submit(_read, directory / file, block, start)
            for file, block in stored.items()
            for start in range(0, block.size, _READ)
        ]
        checks = [pool.submit(verify_file, directory, *each) for each in hashes.items() if verify]
        for job in (*reads, *checks):
            job.result()


def _read(path: Path, block: Bytes, start: int) -> None:
    with open(path, "rb", buffering=0) as stream:
        stream.seek(start)
        view = memoryview(block.data)[start : start + _READ]
        while view:
            count = stream.readinto(view)
            if not count:
                raise UserError(f"{path.name} ended too early: the plan is damaged; compile it again")
            view = view[count:]
