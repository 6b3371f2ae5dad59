"""The CUDA device: a plan's module, its weights and caches on one GPU, and steps queued ahead of their results."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...debug import debug, debug_phase
from ...errors import DeviceLost, InternalError
from ...options import EngineOptions
from ...plan import ArenaArg, Bucket, CacheArg, ConstArg, DimArg, InputArg, Launch, Plan, WeightArg
from ...step import StepBatch, StepResult
from ..base import Ticket, find_bucket
from ..check import check_step
from ..pages import mib, plan_pages
from .driver import DriverError, Gpu, Pinned, call, error_text
from .inputs import Extra, Layout, Slot
from .kernels import Function, Kernels, choose_module
from .program import Call, Program
from .tuned import read_tuned
from .weights import Weights

_LOAD_THREADS = 256
_MOST_LOAD_BLOCKS = 32
_CHECK_SECONDS = 0.005
"""How long the host waits for a step before it asks the driver whether all is well."""


@dataclass
class _Bucket:
    """A bucket that can run: a graph if it is for decoding, else launches."""

    bucket: Bucket
    program: Program
    graph: Any = None


class CudaDevice:
    """Runs a plan's steps on a GPU (see `device.base.Device`).

    Steps and page copies take effect on one stream in the order of the calls. A step's result is there when its last
    kernel has written its number into mapped memory, which the host reads without asking the driver.
    """

    queue_depth = 2

    def __init__(self, directory: Path, plan: Plan, options: EngineOptions, *, tuned: bool = True) -> None:
        """`tuned`: run the kernels that `toolkit tune` found to be fastest, if it has been run for such a GPU.

        Raises UserError if this machine has no GPU that the plan can run on, or too little memory.
        """
        self.plan = plan
        gpu = self._gpu = Gpu()
        module = choose_module(plan.modules, gpu.arch, gpu.name, gpu.shared_memory)
        self.isa: str = module.arch
        self.name, self.cuda_version = gpu.name, gpu.cuda_version
        self._winners = read_tuned(directory, plan, gpu.name) if tuned else {}
        self._directory, self._verify = directory, options.verify
        self._layout = Layout(plan)
        self.pages = plan_pages(plan, self._budget(options))
        self._stream = gpu.stream()
        with debug_phase(f"Kernels ({gpu.name}, {module.arch})"):
            self._kernels = Kernels(gpu, directory, module, verify=options.verify)
        self._failure = ""
        self._closed = False
        self.wake()
        held = ", ".join(f"{name} {mib(size)}" for name, size in self.memory().items())
        debug(1, f"Memory: {held}; {' + '.join(map(str, self.pages))} pages of K/V")

    def _budget(self, options: EngineOptions) -> int:
        """Bytes of GPU memory for what the plan says it needs."""
        allowed = options.memory if options.memory > 1 else options.memory * self._gpu.free_memory()
        return int(allowed) - max(0, self._layout.bytes - self.plan.memory.host)

    def wake(self) -> None:
        """Take memory, load the weights, and capture graphs; also what is done first (see `base.Device`)."""
        gpu, plan = self._gpu, self.plan
        gpu.make_current()
        with debug_phase(f"Weights ({mib(plan.memory.weights)})"):
            self._weights = Weights(gpu, plan)
            self._weights.load(
                self._directory, self._kernels.of_runtime("random_fill"), self._stream, verify=self._verify
            )
        self._open_memory()
        with debug_phase("Graphs"):
            self._buckets = {
                bucket.name: self._prepare(bucket, self._winners.get(bucket.name, {})) for bucket in plan.buckets
            }
        self._copies = [self._copy_program(group) for group in range(len(plan.caches))]
        call(gpu.driver.cuStreamSynchronize, self._stream)
        self._submitted = self._retired = 0
        self._rows = 0
        self._asleep = False

    def sleep(self) -> None:
        """See `base.Device`. Kernels stay loaded."""
        self._gpu.make_current()
        self._release()
        self._asleep = True

    def _release(self) -> None:
        """Wait for what is queued, and give back graphs and memory, but no kernels."""
        gpu, driver = self._gpu, self._gpu.driver
        call(driver.cuStreamSynchronize, self._stream)
        for ready in self._buckets.values():
            if ready.graph is not None:
                call(driver.cuGraphExecDestroy, ready.graph)
        self._buckets, self._copies = {}, []
        for address in (self._arena, self._inputs, self._state, *self._caches):
            gpu.free(address)
        self._weights.close()
        for extra in self._extras:
            extra.close()
        self._slots.clear()
        self._ring.close()

    def _open_memory(self) -> None:
        """The arena, the caches, the block of step inputs, and the ring that the host writes them to; all zero."""
        gpu, plan = self._gpu, self.plan
        self._sizes = [
            plan.memory.arena,
            self._layout.bytes,
            32,
            *(
                len(cache.layers) * pages * cache.page_bytes
                for cache, pages in zip(plan.caches, self.pages, strict=True)
            ),
        ]
        addresses = [gpu.allocate(size) for size in self._sizes]
        self._arena, self._inputs, self._state, *self._caches = addresses
        for address, size in zip(addresses[:3], self._sizes, strict=False):
            gpu.fill_zero(address, size)
        for cache, pages, address in zip(plan.caches, self.pages, self._caches, strict=True):
            for layer in range(len(cache.layers)):
                gpu.fill_zero(address + layer * pages * cache.page_bytes, cache.page_bytes)
        self._ring = Pinned(gpu, self.queue_depth * self._layout.bytes)
        self._extras = [Extra(lambda size: Pinned(gpu, size)) for _ in range(self.queue_depth)]
        self._ring.array.fill(0)
        parts = self._ring.array.reshape(self.queue_depth, -1)
        self._slots = [Slot(self._layout, memory, extra) for memory, extra in zip(parts, self._extras, strict=True)]

    # --- programs -----------------------------------------------------------------------------------------------------

    def substitute(self, bucket: str, kernels: Mapping[str, str]) -> None:
        """Have a launch program run other kernels in place of some of its own: `plan.Bucket.alternatives`."""
        before = self._buckets[bucket]
        call(self._gpu.driver.cuStreamSynchronize, self._stream)
        if before.graph is not None:
            call(self._gpu.driver.cuGraphExecDestroy, before.graph)
        self._buckets[bucket] = self._prepare(before.bucket, kernels)

    def kernels_in_use(self, bucket: str) -> set[str]:
        """Names of the kernels that a launch program runs."""
        return {each.function.name for each in self._buckets[bucket].program.calls}

    def _prepare(self, bucket: Bucket, substitutes: Mapping[str, str]) -> _Bucket:
        tokens, sequences, rows = bucket.max_tokens, bucket.max_sequences, bucket.max_rows
        blocks = -(-self._layout.units(tokens, sequences, rows) // _LOAD_THREADS)
        calls = [self._call(launch, substitutes.get(launch.kernel, launch.kernel)) for launch in bucket.launches]
        calls = [self._load(min(blocks, _MOST_LOAD_BLOCKS)), *calls, self._finish()]
        program = Program(self._gpu, self._stream, calls, (tokens, sequences, rows))
        return _Bucket(bucket, program, program.capture() if bucket.decode else None)

    def _load(self, blocks: int) -> Call:
        ring = (self._ring.address, self._layout.bytes, self.queue_depth, self._state)
        args = (*ring, self._inputs, self._inputs + self._layout.results, blocks)
        return Call("a step's inputs", self._kernels.of_runtime("step_load"), args)

    def _finish(self) -> Call:
        ring = (self._ring.address, self._layout.bytes, self.queue_depth, self._state, self._layout.done)
        names = ("rows", "results", "top_tokens", "top_logprobs")
        args = (*ring, *(self._inputs + self._layout.offset(name) for name in names), self._layout.rows)
        return Call("a step's results", self._kernels.of_runtime("step_finish"), args)

    def _copy_program(self, group: int) -> Program:
        cache = self.plan.caches[group]
        sizes = (len(cache.layers), self.pages[group], cache.page_bytes)
        copy = Call("a copy of a page", self._kernels.of_runtime("copy_pages"), (self._caches[group], *sizes, 0, 0))
        return Program(self._gpu, self._stream, [copy])

    def _call(self, launch: Launch, kernel: str) -> Call:
        function: Function = self._kernels[kernel]
        return Call(launch.op or launch.kernel, function, tuple(self._argument(arg) for arg in launch.args))

    def _argument(self, arg: Any) -> int | float | DimArg:
        match arg:
            case ArenaArg(offset=offset):
                return self._arena + offset
            case WeightArg(name=name):
                return self._weights.address(name)
            case CacheArg(group=group, slot=slot):
                return self._caches[group] + slot * self.pages[group] * self.plan.caches[group].page_bytes
            case InputArg(name=name, group=group):
                return self._inputs + self._layout.offset(name, group)
            case ConstArg(value=value):
                return value
            case DimArg():
                return arg
        raise InternalError(f"a launch has an argument of an unknown kind: {arg!r}")

    # --- steps --------------------------------------------------------------------------------------------------------

    def submit(self, batch: StepBatch) -> Ticket:
        """Queue a step. Raises InternalError if it exceeds every bucket, a page is out of range, or the GPU failed."""
        ready = self._write(batch)
        self._submitted += 1
        if ready.graph is None:
            ready.program.resize(len(batch.tokens), len(batch.context), len(batch.rows))
            ready.program.launch()
        elif status := self._gpu.driver.cuGraphLaunch(ready.graph, self._stream)[0]:
            raise self._failed(f"launching {ready.bucket.name} failed: {error_text(int(status))}")
        return Ticket(self._submitted)

    def _write(self, batch: StepBatch) -> _Bucket:
        """Write a step into its slot of the ring; the bucket that will run it."""
        if self._closed:
            raise InternalError("a step was submitted to a closed device")
        if self._asleep:
            raise InternalError("a step was submitted to a sleeping device")
        if self._failure:
            raise DeviceLost(f"the GPU failed in an earlier step, so the process must be restarted: {self._failure}")
        if self._submitted - self._retired >= self.queue_depth:
            raise InternalError(f"step {self._submitted + 1} was submitted before step {self._retired + 1} was polled")
        check_step(self.plan, self.pages, batch, previous_rows=self._rows)
        ready = self._buckets[find_bucket(self.plan, batch).name]
        self._gpu.make_current()
        self._slots[self._submitted % self.queue_depth].write(batch, ready.bucket.max_tokens if ready.graph else 0)
        self._rows = len(batch.rows)
        return ready

    def poll(self, ticket: Ticket) -> StepResult | None:
        """The result if the step has ended."""
        number = ticket.number
        if not self._submitted - self.queue_depth < number <= self._submitted:
            raise InternalError(f"step {number} was polled when step {self._submitted} had been submitted")
        slot = self._slots[(number - 1) % self.queue_depth]
        if slot.finished != number:
            return None
        self._retired = max(self._retired, number)
        return slot.result()

    def wait(self, ticket: Ticket) -> StepResult:
        """Look for the result until it is there. Raises InternalError if the step failed."""
        check = time.perf_counter() + _CHECK_SECONDS
        while (result := self.poll(ticket)) is None:
            time.sleep(0)  # other threads of the process may run
            if time.perf_counter() > check:
                self._check_running(ticket)
                check = time.perf_counter() + _CHECK_SECONDS
        return result

    def _check_running(self, ticket: Ticket) -> None:
        driver = self._gpu.driver
        self._gpu.make_current()
        status = int(driver.cuStreamQuery(self._stream)[0])
        if status == int(driver.CUresult.CUDA_ERROR_NOT_READY):
            return
        if status:
            raise self._failed(f"step {ticket.number} failed on the GPU: {error_text(status)}")
        if self._slots[(ticket.number - 1) % self.queue_depth].finished != ticket.number:
            raise self._failed(f"step {ticket.number} ended without a result")

    def _failed(self, text: str) -> DeviceLost:
        self._failure = text
        return DeviceLost(text)

    def copy_pages(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        """Queue copies of pages (source, destination) over all layers of a group."""
        self._gpu.make_current()
        program = self._copies[group]
        for source, destination in pairs:
            program.set_argument(0, 4, source)
            program.set_argument(0, 5, destination)
            program.launch()

    def profile(self, batch: StepBatch) -> tuple[Ticket, npt.NDArray[np.float64]]:
        """Run a step launch by launch, each after the one before has ended (see `base.Device`)."""
        ready = self._write(batch)
        self._submitted += 1
        if not ready.graph:
            ready.program.resize(len(batch.tokens), len(batch.context), len(batch.rows))
        times = ready.program.launch_timed()
        ticket = Ticket(self._submitted)
        self.wait(ticket)
        return ticket, np.repeat(times[1:-1, None], 2, axis=1)

    def replay(self, batch: StepBatch, count: int) -> float:
        """Seconds a step when its launches (of a decode step, its graph) run `count` times, back to back, on the same
        inputs."""
        ready = self._write(batch)
        if ready.graph is None:
            ready.program.resize(len(batch.tokens), len(batch.context), len(batch.rows))
        gpu, driver = self._gpu, self._gpu.driver
        for slot in range(1, self.queue_depth):
            following = self._slots[(self._submitted + slot) % self.queue_depth]
            following.write(batch, ready.bucket.max_tokens if ready.graph else 0)
        begin, end = gpu.event(timed=True), gpu.event(timed=True)
        call(driver.cuEventRecord, begin, self._stream)
        for _ in range(count):
            if ready.graph is None:
                ready.program.launch()
            else:
                call(driver.cuGraphLaunch, ready.graph, self._stream)
        call(driver.cuEventRecord, end, self._stream)
        call(driver.cuEventSynchronize, end)
        self._submitted += count
        self._retired = self._submitted
        seconds = float(call(driver.cuEventElapsedTime, begin, end)) * 1e-3 / count
        for event in (begin, end):
            call(driver.cuEventDestroy, event)
        return seconds

    def memory(self) -> dict[str, int]:
        """Bytes held, by kind; all but `host` on the GPU."""
        if self._asleep:
            return {"weights": 0, "arena": 0, "kv": 0, "host": 0}
        arena, inputs, state, *caches = self._sizes
        return {
            "weights": self._weights.bytes,
            "arena": arena + inputs + state,
            "kv": sum(caches),
            "host": self._ring.bytes,
        }

    def close(self) -> None:
        """Wait for what is queued, and give everything back."""
        if self._closed:
            return
        self._closed = True
        gpu, driver = self._gpu, self._gpu.driver
        gpu.make_current()
        try:
            if not self._asleep:
                self._release()
            self._kernels.close()
            call(driver.cuStreamDestroy, self._stream)
        except DriverError:  # after a failure nothing can be given back one by one
            pass
        gpu.close()
