"""A subscriber that knows the wire format alone can tell at any time what the prefix cache holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from unit.runtime.engine_harness import make_request
from unit.runtime.fake_device import FakeDevice, fake_plan
from unit.runtime.queued_device import QueuedDevice

from toolkit.runtime.device.base import Device
from toolkit.runtime.engine import Engine
from toolkit.runtime.errors import UserError
from toolkit.runtime.kv.events import ZmqPublisher
from toolkit.runtime.kv.prefix import PageKeys
from toolkit.runtime.options import EngineOptions, KVEventsConfig

TOPIC = "kv"
SIZE = 4
Block = tuple[int | None, tuple[int, ...], str]
"""Hash of the block before, tokens, salt."""


def config_in(folder: Path, **fields: Any) -> KVEventsConfig:
    return KVEventsConfig(
        enable_kv_cache_events=True,
        endpoint=f"ipc://{folder}/events",
        replay_endpoint=f"ipc://{folder}/replay",
        topic=TOPIC,
        **fields,
    )


class Router:
    """What events say that is cached, by group and hash."""

    def __init__(self) -> None:
        self.blocks: dict[int, dict[int, Block]] = {}
        self.next = self.named = 0
        self.kinds: set[tuple[int, str | None, int | None]] = set()

    def take(self, number: int, payload: bytes) -> None:
        assert number == self.next
        self.next += 1
        _, events, rank = msgspec.msgpack.decode(payload)
        assert rank == 0
        assert events
        for name, *fields in events:
            getattr(self, name)(*fields)

    def BlockStored(  # noqa: PLR0917
        self,
        hashes: list[int],
        parent: int | None,
        tokens: list[int],
        size: int,
        lora: None = None,
        medium: str | None = None,
        lora_name: None = None,
        extra: list[list[str] | None] | None = None,
        group: int | None = None,
        kind: str | None = None,
        window: int | None = None,
    ) -> None:
        assert (size, medium, len(tokens)) == (SIZE, "CPU", SIZE * len(hashes))
        known = self.blocks.setdefault(group or 0, {})
        self.kinds.add((group or 0, kind, window))
        for index, value in enumerate(hashes):
            assert value not in known
            salt = extra[index] if extra else None
            known[value] = (parent, tuple(tokens[index * SIZE : (index + 1) * SIZE]), salt[0] if salt else "")
            parent = value

    def BlockRemoved(self, hashes: list[int], medium: str | None, group: int | None = None) -> None:
        assert medium == "CPU"
        for value in hashes:
            del self.blocks[group or 0][value]

    def AllBlocksCleared(self) -> None:
        self.blocks = {}

    def check(self, engine: Engine) -> None:
        """The same as what the engine knows, and hashes name what they should."""
        for group, pool in enumerate(engine.kv.pools):
            found = self.blocks.get(group, {})
            keys = pool._page_of
            assert found.keys() == {int.from_bytes(key[-8:], "big") for key in keys}
            for value in found:
                if (text := self._text(found, value)) is not None:
                    tokens, salt = text
                    assert PageKeys(salt, SIZE)(np.array(tokens, np.int32), len(tokens) // SIZE)[-1] in keys
                    self.named += 1

    @staticmethod
    def _text(blocks: dict[int, Block], value: int) -> tuple[list[int], str] | None:
        """All tokens up to a block's end, and the salt; None if a block before it is gone."""
        at: int | None = value
        parts: list[tuple[int, ...]] = []
        salt = ""
        while at is not None:
            if at not in blocks:
                return None
            at, tokens, salt = blocks[at]
            parts.append(tokens)
        return [token for part in reversed(parts) for token in part], salt


@contextmanager
def subscriber(endpoint: str) -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    socket = context.socket(zmq.SUB)
    socket.subscribe(TOPIC)
    socket.set(zmq.RCVTIMEO, 5000)
    socket.connect(endpoint)
    try:
        yield socket
    finally:
        context.destroy(linger=0)


def replay(endpoint: str, start: int) -> list[tuple[int, bytes]]:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.set(zmq.RCVTIMEO, 5000)
    socket.connect(endpoint)
    socket.send_multipart([b"", start.to_bytes(8, "big")])
    answers: list[tuple[int, bytes]] = []
    while True:
        _, number, payload = socket.recv_multipart()
        if int.from_bytes(number, "big", signed=True) == -1:
            assert payload == b""
            context.destroy(linger=0)
            return answers
        answers.append((int.from_bytes(number, "big"), payload))


@pytest.mark.parametrize("windows", [(0,), (0, 6)])
@pytest.mark.parametrize("queued", [False, True])
def test_a_subscriber_knows_what_is_cached(windows: tuple[int, ...], queued: bool, tmp_path: Path) -> None:
    """Through evictions, preemption, aborts, resets and sleep."""
    config = config_in(tmp_path)
    publisher = ZmqPublisher(config)
    device: Device = FakeDevice(fake_plan(windows=windows, max_sequences=4), 18)
    if queued:
        device = QueuedDevice(device)
    engine = Engine(device, EngineOptions(), kv_events=publisher)
    router = Router()
    rng = np.random.default_rng(1)
    trunk = rng.integers(3, 60, 30).tolist()
    with subscriber(config.endpoint) as socket:
        _catch_up(router, engine, config, socket)
        for number in range(60):
            salt = ("", "secret")[number % 2]
            prompt = trunk[: int(rng.integers(0, 30))] + rng.integers(3, 60, int(rng.integers(1, 20))).tolist()
            engine.add(make_request(str(number), prompt, salt=salt, max_tokens=14, ignore_eos=True))
            for _ in range(int(rng.integers(1, 6))):
                engine.step()
            if number % 13 == 0:
                engine.abort(str(number))
            if number == 30:
                engine.reset_prefix_cache()
            if number == 45:
                engine.sleep()
                engine.wake_up()
            _drain(router, socket)
            _wait(router, engine, config)
            router.check(engine)
        while engine.has_work:
            engine.step()
        _wait(router, engine, config)
        router.check(engine)
        assert engine.stats().preemptions > 0
        assert router.named > 500
        assert any(salt == "secret" for _, _, salt in router.blocks[0].values())
        engine.reset_prefix_cache()
        _wait(router, engine, config)
        assert router.blocks == {}
    kinds = {(0, None, None)} if len(windows) == 1 else {(0, "full_attention", None), (1, "sliding_window", 6)}
    assert router.kinds == kinds
    engine.close()
    engine.close()


def _catch_up(router: Router, engine: Engine, config: KVEventsConfig, socket: zmq.Socket[bytes]) -> None:
    """Subscribing takes a moment: what comes before is asked for."""
    engine.add(make_request("first", [5] * 9, max_tokens=1))
    while engine.has_work:
        engine.step()
    _wait(router, engine, config)
    assert router.next


def _wait(router: Router, engine: Engine, config: KVEventsConfig) -> None:
    """Take in everything that was published until now, by replay."""
    assert config.replay_endpoint is not None
    for number, payload in replay(config.replay_endpoint, router.next):
        router.take(number, payload)


def _drain(router: Router, socket: zmq.Socket[bytes]) -> None:
    while socket.poll(0):
        topic, number, payload = socket.recv_multipart()
        assert topic == TOPIC.encode()
        if int.from_bytes(number, "big") >= router.next:
            router.take(int.from_bytes(number, "big"), payload)


def test_batches_come_by_subscription_in_order(tmp_path: Path) -> None:
    config = config_in(tmp_path, buffer_steps=2)
    publisher = ZmqPublisher(config)
    assert config.replay_endpoint is not None
    engine = Engine(FakeDevice(fake_plan(), 50), EngineOptions(), kv_events=publisher)
    with subscriber(config.endpoint) as socket:
        router = Router()
        for number in range(200):  # until the subscription has arrived
            engine.add(make_request(str(number), [3 + number % 50] * 9, max_tokens=1))
            while engine.has_work:
                engine.step()
            if socket.poll(10):
                break
        engine.add(make_request("last", [9, 8, 7, 6, 5], max_tokens=1))
        while engine.has_work:
            engine.step()
        _, number_bytes, _ = socket.recv_multipart()
        router.next = int.from_bytes(number_bytes, "big") + 1
        _, number_bytes, payload = socket.recv_multipart()
        router.take(int.from_bytes(number_bytes, "big"), payload)
        assert [tokens for _, tokens, _ in router.blocks[0].values()] == [(9, 8, 7, 6)]
    kept = replay(config.replay_endpoint, 0)
    assert [number for number, _ in kept] == [router.next - 2, router.next - 1]
    engine.close()


def test_endpoints_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="tcp://nowhere"):
        ZmqPublisher(KVEventsConfig(enable_kv_cache_events=True, endpoint="tcp://nowhere"))
    assert not KVEventsConfig().enabled
    assert not KVEventsConfig(enable_kv_cache_events=True, publisher="null").enabled
