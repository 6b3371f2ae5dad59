"""The CUDA device with a plan made by hand: inputs, results, steps queued ahead, copies, random weights, failures."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from gpu.runtime.tiny_plan import PAGE_BYTES, VOCABULARY, Floats, logits, make_plan

from toolkit.runtime.device.cuda.device import CudaDevice
from toolkit.runtime.device.cuda.driver import call
from toolkit.runtime.errors import InternalError, UserError
from toolkit.runtime.load import read_plan
from toolkit.runtime.options import EngineOptions
from toolkit.runtime.random_weights import fill_random
from toolkit.runtime.sampling import scoring_rows
from toolkit.runtime.step import Int32, StepBatch

OPTIONS = EngineOptions(memory=1 << 28)


def open_tiny(directory: Path, **plan: Any) -> CudaDevice:
    make_plan(directory, **plan)
    return CudaDevice(directory, read_plan(directory), OPTIONS)


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CudaDevice]:
    device = open_tiny(tmp_path_factory.mktemp("tiny"))
    yield device
    device.close()
    device.close()


def decode_batch(tokens: Any) -> StepBatch:
    """A step of one token each, every one sampled greedily."""
    count = len(tokens)
    rows = scoring_rows(range(count))
    rows["sample"] = 1
    return StepBatch(
        tokens=np.asarray(tokens, np.int32),
        positions=np.arange(5, 5 + count, dtype=np.int32),
        lengths=np.full(count, 20, np.int32),
        seq_start=np.arange(count + 1, dtype=np.int32),
        context=np.arange(6, 6 + count, dtype=np.int32),
        rows=rows,
        slots=[np.arange(64, 64 * (count + 1), 64, dtype=np.int32)],
        pages=[np.arange(1, count + 1, dtype=np.int32)[:, None].copy()],
    )


def best(tokens: Any) -> Int32:
    chosen: Int32 = logits()[np.asarray(tokens)].argmax(axis=1).astype(np.int32)
    return chosen


def log_softmax(rows: Floats) -> npt.NDArray[np.float64]:
    wide = rows.astype(np.float64)
    found: npt.NDArray[np.float64] = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    return found


@pytest.mark.parametrize("count", [1, 3, 4, 8])
def test_decode_steps_are_replayed_padded(device: CudaDevice, count: int) -> None:
    for seed in range(4):
        tokens = np.random.default_rng(seed).integers(0, VOCABULARY, count)
        result = device.wait(device.submit(decode_batch(tokens)))
        np.testing.assert_array_equal(result.rows["token"], best(tokens))
        assert not result.rows["status"].any()
        assert 0 < result.seconds < 0.1


@pytest.mark.parametrize("count", [1, 3, 8])
def test_steps_queued_ahead_take_their_tokens_from_the_step_before(device: CudaDevice, count: int) -> None:
    """Each step feeds its rows, in reverse, to the next, which is queued before its results are read."""
    tokens = np.random.default_rng(count).integers(0, VOCABULARY, count).astype(np.int32)
    order = -1 - np.arange(count, dtype=np.int32)[::-1]
    tickets, expected = [device.submit(decode_batch(tokens))], best(tokens)
    for _ in range(30):
        tickets.append(device.submit(decode_batch(order)))
        np.testing.assert_array_equal(device.wait(tickets.pop(0)).rows["token"], expected)
        expected = best(expected[::-1])
    np.testing.assert_array_equal(device.wait(tickets.pop()).rows["token"], expected)


def test_other_steps_are_launched_at_their_own_size(device: CudaDevice) -> None:
    for total, ends in ((5, [0, 2, 4]), (64, [10, 63]), (17, [16])):
        tokens = np.random.default_rng(total).integers(0, VOCABULARY, total).astype(np.int32)
        rows = scoring_rows(ends)
        rows["sample"], rows["top_n"] = 1, 3
        seq_start = np.array([0, *(end + 1 for end in ends)], np.int32)
        seq_start[-1] = total
        batch = StepBatch(
            tokens=tokens,
            positions=np.arange(total, dtype=np.int32),
            lengths=np.full(total, total, np.int32),
            seq_start=seq_start,
            context=np.diff(seq_start).astype(np.int32),
            rows=rows,
            slots=[np.arange(64, 64 + total, dtype=np.int32)],
            pages=[np.ones((len(ends), 1), np.int32)],
        )
        result = device.wait(device.submit(batch))
        np.testing.assert_array_equal(result.rows["token"], best(tokens[ends]))
        expected = log_softmax(logits()[tokens[ends]])
        np.testing.assert_allclose(result.top_logprobs[:, :3], np.sort(expected, axis=1)[:, :-4:-1], atol=1e-4)
        for row, chosen in zip(expected, result.top_tokens[:, :3], strict=True):
            np.testing.assert_array_equal(chosen, np.argsort(-row, kind="stable")[:3])


def test_what_rows_point_to_is_copied(device: CudaDevice) -> None:
    """History with its last token still unknown, biases, and log-probabilities of the whole vocabulary."""
    first = np.array([3, 4, 5], np.int32)
    drawn = best(first)
    histories = [np.array([9, 9, token, -1], np.int32) for token in (1, 2, 3)]
    bias_tokens, bias_values = np.array([7, 8], np.int32), np.array([60.0, -1.0], np.float32)
    whole = np.zeros((3, VOCABULARY), np.float32)
    batch = decode_batch(-1 - np.arange(3))
    for index, history in enumerate(histories):
        batch.rows["history"][index], batch.rows["history_length"][index] = history.ctypes.data, 4
        batch.rows["prompt_length"][index] = 2
    batch.rows["presence_penalty"] = [1000.0, 0.0, 0.0]
    batch.rows["bias_count"][1], batch.rows["bias_tokens"][1] = 2, bias_tokens.ctypes.data
    batch.rows["bias_values"][1] = bias_values.ctypes.data
    batch.rows["logprobs"][2] = whole[2].ctypes.data
    before = device.submit(decode_batch(first))
    ticket = device.submit(batch)
    for history in histories:
        history[:] = 11
    device.wait(before)
    result = device.wait(ticket)
    scores = logits()[drawn[0]].copy()
    scores[[1, drawn[0]]] -= 1000.0
    assert result.rows["token"].tolist() == [scores.argmax(), 7, best(drawn)[2]]
    np.testing.assert_allclose(whole[2], log_softmax(logits()[drawn])[2], atol=1e-4)
    assert not whole[:2].any()


def test_pages_are_copied_over_all_layers(device: CudaDevice) -> None:
    driver, pages = device._gpu.driver, device.pages[0]
    device._gpu.make_current()
    held = np.random.default_rng(0).integers(0, 256, (2, pages, PAGE_BYTES), dtype=np.uint8)
    call(driver.cuMemcpyHtoD, device._caches[0], held.ctypes.data, held.nbytes)
    device.copy_pages(0, [(1, 2), (2, 3)])
    call(driver.cuCtxSynchronize)
    found = np.zeros_like(held)
    call(driver.cuMemcpyDtoH, found.ctypes.data, device._caches[0], held.nbytes)
    held[:, 2] = held[:, 3] = held[:, 1]
    np.testing.assert_array_equal(found, held)


def test_random_weights_are_those_of_the_cpu(tmp_path: Path) -> None:
    device = open_tiny(tmp_path, random=True)
    plan, size = device.plan, device.plan.weight_files[0].bytes
    expected, found = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
    with ThreadPoolExecutor(1) as pool:
        fill_random(plan, "weights.safetensors", expected, pool)
    call(device._gpu.driver.cuMemcpyDtoH, found.ctypes.data, device._weights.address("table") - 64, size)
    np.testing.assert_array_equal(found[64:], expected[64:])
    assert len(np.unique(found[64:])) > 200
    device.close()


def test_a_profile_and_a_replay_take_time(device: CudaDevice) -> None:
    _, times = device.profile(decode_batch([1, 2]))
    assert times.shape == (4, 2)
    assert np.all((times > 0) & (times < 0.1))
    assert 0 < device.replay(decode_batch([1, 2, 3, 4]), 50) < 0.01
    result = device.wait(device.submit(decode_batch([6])))
    np.testing.assert_array_equal(result.rows["token"], best([6]))
    assert device.memory()["kv"] == 2 * device.pages[0] * PAGE_BYTES


def test_wrong_steps_are_refused(device: CudaDevice) -> None:
    for tokens in ([VOCABULARY], [-9]):
        with pytest.raises(InternalError, match="vocabulary"):
            device.submit(decode_batch(tokens))
    tickets = [device.submit(decode_batch([1])) for _ in range(2)]
    with pytest.raises(InternalError, match="before step"):
        device.submit(decode_batch([1]))
    for ticket in tickets:
        device.wait(ticket)


def test_an_older_plan_runs_as_ptx(tmp_path: Path) -> None:
    make_plan(tmp_path, arch="sm80")
    device = CudaDevice(tmp_path, read_plan(tmp_path), OPTIONS)
    try:
        result = device.wait(device.submit(decode_batch([1, 5])))
        np.testing.assert_array_equal(result.rows["token"], best([1, 5]))
    finally:
        device.close()


def test_a_plan_for_another_architecture_and_damaged_weights_are_refused(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, arch="sm80")
    alone = msgspec.structs.replace(plan, modules=plan.modules[:1])  # machine code without PTX
    with pytest.raises(UserError, match=r"kernels for sm80, but this machine's .* is sm90: compile with --target sm90"):
        CudaDevice(tmp_path, alone, OPTIONS)
    make_plan(tmp_path)
    weights = tmp_path / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(UserError, match="was changed"):
        CudaDevice(tmp_path, read_plan(tmp_path), OPTIONS)


_FAILS = """
import sys
from pathlib import Path
import msgspec
from gpu.runtime.test_device import decode_batch, OPTIONS
from gpu.runtime.tiny_plan import make_plan
from toolkit.runtime.device.cuda.device import CudaDevice
from toolkit.runtime.errors import InternalError
from toolkit.runtime.plan import ConstArg
plan = make_plan(Path(sys.argv[1]))
wild = lambda launch: msgspec.structs.replace(launch, args=(*launch.args[:2], ConstArg(1 << 60), *launch.args[3:]))
buckets = tuple(msgspec.structs.replace(b, forward=(wild(b.forward[0]), b.forward[1])) for b in plan.buckets)
device = CudaDevice(Path(sys.argv[1]), msgspec.structs.replace(plan, buckets=buckets), OPTIONS)
for _ in range(2):
    try:
        device.wait(device.submit(decode_batch([1])))
    except InternalError as error:
        print(error)
device.close()
"""


def test_a_kernel_that_writes_elsewhere_fails_its_step(tmp_path: Path) -> None:
    found = subprocess.run([sys.executable, "-c", _FAILS, str(tmp_path)], capture_output=True, text=True, check=False)
    first, second = found.stdout.splitlines()
    assert "step 1 failed on the GPU" in first, found.stderr
    assert "must be restarted" in second
