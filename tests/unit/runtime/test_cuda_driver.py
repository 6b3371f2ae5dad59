"""What a machine that can't run CUDA plans is told; and the layout of a step's inputs, which needs no GPU."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from gpu.runtime.tiny_plan import buckets
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.runtime.sample_plan import sample_plan

from toolkit.runtime.device.cuda import driver as cuda
from toolkit.runtime.device.cuda.inputs import DONE_BYTES, HEADER_WORDS, UNIT, Extra, Layout, Slot
from toolkit.runtime.device.cuda.kernels import choose_module
from toolkit.runtime.errors import UserError
from toolkit.runtime.plan import Bucket, CudaKernel, CudaModule, GridAxis, Plan
from toolkit.runtime.sampling import scoring_rows
from toolkit.runtime.step import RESULT, ROW, StepBatch


def fake_driver(*, status: int = 0, version: int = 13_000) -> Any:
    """As much of the bindings as starting needs."""
    return SimpleNamespace(
        cuInit=lambda flags: (status,),
        cuDriverGetVersion=lambda: (0, version),
        cuGetErrorName=lambda code: (0, b"CUDA_ERROR_X"),
        cuGetErrorString=lambda code: (0, b"what it means"),
        CUresult=Results,
    )


class Results(int):
    CUDA_ERROR_NO_DEVICE = 100


def test_without_a_driver() -> None:
    def missing(flags: int) -> None:
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    with pytest.raises(UserError, match="no NVIDIA driver: install one, or compile with --target cpu"):
        cuda.initialize(SimpleNamespace(cuInit=missing))


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"status": 100}, "the driver finds none: check CUDA_VISIBLE_DEVICES"),
        ({"status": 999}, "does not start: CUDA_ERROR_X what it means"),
        ({"version": 12_040}, "for CUDA 13.0, this machine's is for CUDA 12.4: install driver 580"),
    ],
)
def test_a_driver_that_is_no_use(monkeypatch: pytest.MonkeyPatch, state: dict[str, int], words: str) -> None:
    driver = fake_driver(**state)
    monkeypatch.setattr(cuda, "bindings", lambda: driver)
    with pytest.raises(UserError, match=words):
        cuda.initialize(driver)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(UserError, match=r"pip install 'plan-toolkit\[cuda\]'"):
        cuda.bindings()


def test_a_failed_call_names_the_function_and_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "bindings", fake_driver)

    def cuDoThings(number: int) -> tuple[int, int, int]:
        return 3 - number, 8, 9

    assert cuda.call(cuDoThings, 3) == [8, 9]
    with pytest.raises(cuda.DriverError, match="cuDoThings failed: CUDA_ERROR_X what it means"):
        cuda.call(cuDoThings, 1)


KERNEL = CudaKernel(0, 0, "k", 32, (GridAxis(), GridAxis(), GridAxis()), shared=90_000, static_shared=10_000)


@pytest.mark.parametrize(
    ("arch", "shared", "file"),
    [
        ("sm80", 166_912, "sm80"),
        ("sm86", 101_376, "sm86"),
        ("sm87", 166_912, "sm86"),  # the newest machine code of its generation
        ("sm89", 101_376, "sm86"),
        ("sm90", 232_448, "sm90"),
        ("sm100", 232_448, "sm86-ptx"),  # sm90's own instructions are no newer GPU's
        ("sm120", 101_376, "sm86-ptx"),
    ],
)
def test_the_module_that_suits_a_gpu_best(arch: str, shared: int, file: str) -> None:
    modules = [CudaModule(each, each, 0, "", {"k": KERNEL}) for each in ("sm80", "sm86", "sm90")]
    modules.insert(0, CudaModule("sm86", "sm86-ptx", 0, "", {"k": KERNEL}, "ptx"))
    assert choose_module(modules, arch, "GPU X", shared).file == file


@pytest.mark.parametrize(
    ("arch", "shared", "advice"),
    [("sm75", 65_536, "use sm80"), ("sm86", 99_999, "--target sm86"), ("sm100", 232_448, "--target sm89")],
)
def test_a_gpu_that_no_module_suits(arch: str, shared: int, advice: str) -> None:
    modules = [CudaModule(each, "", 0, "", {"k": KERNEL}) for each in ("sm80", "sm90")]
    with pytest.raises(UserError, match=rf"for sm80 and sm90, but this machine's GPU X is {arch}: .*{advice}"):
        choose_module(modules, arch, "GPU X", shared)


# --- step inputs ------------------------------------------------------------------------------------------------------

BUCKETS = (Bucket("decode[4]", 4, 4, 4, (), (), decode=True), Bucket("tokens[32]", 32, 6, 9, (), ()))


def input_plan(groups: int = 2) -> Plan:
    plan = sample_plan(b"", b"", b"")
    return msgspec.structs.replace(plan, buckets=BUCKETS, caches=plan.caches * groups)


@dataclass
class Memory:
    """What `Pinned` is on a GPU."""

    bytes: int
    array: Any = field(init=False)
    closed: bool = False

    def __post_init__(self) -> None:
        self.array = np.zeros(self.bytes, np.uint8)
        self.address = self.array.ctypes.data

    def close(self) -> None:
        self.closed = True


def make_slot(plan: Plan) -> tuple[Layout, Any, Slot]:
    layout = Layout(plan)
    memory = np.full(layout.bytes, 77, np.uint8)
    return layout, memory, Slot(layout, memory, Extra(Memory))


@pytest.mark.parametrize("groups", [0, 1, 5])
def test_sections_and_results_lie_apart(groups: int) -> None:
    plan = input_plan(groups)
    layout = Layout(plan)
    ends = HEADER_WORDS * 4
    for section in layout.sections.values():
        assert section.offset >= ends
        assert section.offset % UNIT == section.bytes % UNIT == 0
        ends = section.offset + section.bytes
    assert layout.done >= ends
    assert layout.results == layout.done + DONE_BYTES
    assert layout.offset("top_logprobs") + 4 * 20 * 9 <= layout.bytes
    assert layout.offset("top_tokens") == layout.results + 9 * RESULT.itemsize
    for group in range(groups):
        assert layout.offset("page_stride", group) == layout.offset("page_stride") + 4 * group


def random_batch(plan: Plan, counts: list[int], width: int, seed: int) -> StepBatch:
    rng = np.random.default_rng(seed)
    tokens, groups = sum(counts), len(plan.caches)
    seq_start = np.array([0, *np.cumsum(counts)], np.int32)

    def numbers(*shape: int) -> Any:
        return rng.integers(1, 8, shape, dtype=np.int32)

    return StepBatch(
        *(numbers(tokens), numbers(tokens), numbers(tokens)),
        *(seq_start, numbers(len(counts)), scoring_rows((seq_start[1:] - 1).tolist())),
        *([numbers(tokens) for _ in range(groups)], [numbers(len(counts), width) for _ in range(groups)]),
    )


@settings(deadline=None, max_examples=30)
@given(
    steps=st.lists(
        st.tuples(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(1, 32), st.booleans()), min_size=1
    )
)
def test_a_written_step_can_be_read_back(steps: list[tuple[list[int], int, bool]]) -> None:
    """By the header alone, as the kernel does, whatever was in the slot before; padding asks for nothing."""
    plan = input_plan()
    layout, memory, slot = make_slot(plan)
    names = list(layout.sections)
    for seed, (sizes, width, decode) in enumerate(steps):
        counts = [1] * min(4, len(sizes)) if decode else sizes
        batch, padded = random_batch(plan, counts, width, seed), 4 if decode else 0
        slot.write(batch, padded)
        header = memory.view(np.int32)
        assert header[0] == len(counts)
        found = {}
        for index, key in enumerate(names[: header[1]]):
            offset, units = header[2 + 2 * index : 4 + 2 * index].tolist()
            assert units * UNIT <= layout.sections[key].bytes
            found[key] = memory[offset * UNIT :][: units * UNIT].view(np.int32)
        tokens, sequences = len(batch.tokens), len(counts)
        total = padded or tokens
        for name, expected, filler in (
            ("tokens", batch.tokens, 0),
            ("positions", batch.positions, 0),
            ("lengths", batch.lengths, 1),
            ("context", batch.context, 1),
        ):
            size = max(padded, len(expected))
            assert found[name, 0][:size].tolist() == expected.tolist() + [filler] * (size - len(expected))
        ends = batch.seq_start.tolist() + [tokens] * (padded - sequences)
        assert found["seq_start", 0][: len(ends)].tolist() == ends
        rows = found["rows", 0][: len(ends[1:]) * ROW.itemsize // 4].view(ROW)
        assert rows["token"].tolist() == (list(range(padded)) or [end - 1 for end in ends[1:]])
        assert not rows["sample"].any()
        assert set(rows["target"].tolist()) == {-1}
        for group in range(2):
            assert found["page_strides", 0][group] == width
            assert found["slots", group][:total].tolist() == batch.slots[group].tolist() + [0] * (total - tokens)
            table = found["pages", group][: max(padded, sequences) * width].reshape(-1, width)
            assert table[:sequences].tolist() == batch.pages[group].tolist()
            assert not table[sequences:].any()


def test_what_rows_point_to_is_copied_and_scores_come_back() -> None:
    plan = input_plan()
    layout, memory, slot = make_slot(plan)
    batch = random_batch(plan, [1, 1, 1], 1, 0)
    history, values = np.arange(100, 105, dtype=np.int32), np.array([0.5, 2.0], np.float32)
    mask, whole = np.arange(8, dtype=np.uint32), np.zeros(plan.model.vocab_size, np.float32)
    batch.rows["history"], batch.rows["history_length"] = history.ctypes.data, 5
    batch.rows["frequency_penalty"][1] = 0.5
    batch.rows["bias_count"][2] = 2
    batch.rows["bias_tokens"], batch.rows["bias_values"] = history.ctypes.data, values.ctypes.data
    batch.rows["mask"][0], batch.rows["logprobs"][1] = mask.ctypes.data, whole.ctypes.data
    slot.write(batch)
    at = layout.sections["rows", 0].offset
    rows = memory[at : at + 3 * ROW.itemsize].view(ROW)
    history += 1000

    def read(address: Any, count: int, dtype: Any) -> Any:
        size = count * np.dtype(dtype).itemsize
        return np.frombuffer(ctypes.string_at(int(address), size), dtype)

    assert rows["history"][[0, 2]].tolist() == [0, 0], "not read without a penalty"
    assert read(rows["history"][1], 5, np.int32).tolist() == [100, 101, 102, 103, 104]
    assert read(rows["bias_tokens"][2], 2, np.int32).tolist() == [100, 101]
    assert read(rows["bias_values"][2], 2, np.float32).tolist() == [0.5, 2.0]
    assert read(rows["mask"][0], 8, np.uint32).tolist() == list(range(8))
    ctypes.memset(int(rows["logprobs"][1]), 0x3F, whole.nbytes)
    assert not whole.any()
    slot.result()
    assert set(whole.view(np.uint32).tolist()) == {0x3F3F3F3F}


def test_memory_for_what_rows_point_to_grows_and_is_kept() -> None:
    made: list[Memory] = []

    def allocate(size: int) -> Memory:
        made.append(Memory(size))
        return made[-1]

    extra = Extra(allocate)
    for size in (10, 60_000, 70_000, 100):
        extra.reserve(size)
        first, second = extra.place(5), extra.place(3)
        assert second - first == UNIT
    assert [memory.closed for memory in made] == [True, False]
    assert made[-1].bytes >= 70_000


def test_the_plan_made_by_hand_fits_the_kernels() -> None:
    """The tests on a GPU use it; that no kernel has other arguments by now shows without one."""
    assert [bucket.decode for bucket in buckets()] == [True] * 4 + [False]
