"""What the prefix cache holds, told to routers as it changes: vLLM's KV events, over ZeroMQ.

A batch of events is a message of three frames: topic, sequence number (8 bytes, big-endian), and a msgpack array
`[time, events, data_parallel_rank]` of events that are arrays themselves, each with its name first. Who missed some
asks the replay socket: a request is the first sequence number wanted; answers are (number, batch), the last one
(-1, "").
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Protocol

import msgspec

from ..errors import UserError
from ..options import KVEventsConfig
from ..step import Int32

if TYPE_CHECKING:
    import zmq

_END = (-1).to_bytes(8, "big", signed=True)
_BINDS = ("ipc://", "inproc://")


class _KVEvent(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(_KVEvent):
    """Pages, one after the other, whose content is cached now. A hash names all tokens up to the page's end."""

    block_hashes: list[int]
    parent_block_hash: int | None
    """Of the page before; None at the start of a sequence."""
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[tuple[str, ...] | None] | None = None
    """For each page what else its hash depends on: the salt, which is named at the start of a sequence."""
    group_idx: int | None = None
    """Of the cache group, where there are several."""
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(_KVEvent):
    """Pages whose content is cached no more."""

    block_hashes: list[int]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(_KVEvent):
    """Nothing is cached any more."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The events of a step."""

    ts: float
    events: list[KVEvent]
    data_parallel_rank: int | None = None


class Sink(Protocol):
    """Where events go."""

    def publish(self, events: list[KVEvent]) -> None:
        """Pass events on. Never blocks."""

    def close(self) -> None:
        """Deliver what was published, and end."""


class EventRecorder:
    """Collects the changes of the cache groups' contents in their order."""

    def __init__(self, windows: Sequence[int], page_tokens: int, medium: str) -> None:
        """`medium` is "GPU" or "CPU"."""
        self._page_tokens, self._medium = page_tokens, medium
        several = len(windows) > 1
        self._groups = [group if several else None for group in range(len(windows))]
        self._kinds = [
            (None, None) if not several else ("sliding_window", window) if window else ("full_attention", None)
            for window in windows
        ]
        self._events: list[KVEvent] = [AllBlocksCleared()]

    def take(self) -> list[KVEvent]:
        """What happened since the last call."""
        events, self._events = self._events, []
        return events

    def stored(self, group: int, pages: range, keys: Sequence[bytes], tokens: Int32, salt: str) -> None:
        """Pages of the sequence `tokens`, one after the other, were published."""
        size = self._page_tokens
        kind, window = self._kinds[group]
        first: list[tuple[str, ...] | None] = [(salt,) if salt and page == 0 else None for page in pages]
        self._events.append(
            BlockStored(
                [block_hash(key) for key in keys[pages.start : pages.stop]],
                block_hash(keys[pages.start - 1]) if pages.start else None,
                tokens[pages.start * size : pages.stop * size].tolist(),
                size,
                medium=self._medium,
                extra_keys=first if any(first) else None,
                group_idx=self._groups[group],
                kv_cache_spec_kind=kind,
                kv_cache_spec_sliding_window=window,
            )
        )

    def removed(self, group: int, key: bytes) -> None:
        """The content with this key is known no more."""
        index, last = self._groups[group], self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved) and last.group_idx == index:
            last.block_hashes.append(block_hash(key))
        else:
            self._events.append(BlockRemoved([block_hash(key)], self._medium, index))

    def cleared(self) -> None:
        """Nothing is known any more."""
        self._events = [AllBlocksCleared()]


def block_hash(key: bytes) -> int:
    """A page's key as events have it: 64 bits."""
    return int.from_bytes(key[-8:], "big")


class ZmqPublisher:
    """Numbers, sends and remembers batches, in a thread of its own."""

    def __init__(self, config: KVEventsConfig) -> None:
        """Raises UserError if an endpoint can't be used."""
        import zmq

        self._context = zmq.Context()
        self._config = config
        self._encoder = msgspec.msgpack.Encoder()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.set_hwm(config.hwm)
        self._pub.linger = 1000
        self._replay = self._context.socket(zmq.ROUTER) if config.replay_endpoint else None
        self._queue, self._work = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        for end in (self._queue, self._work):
            end.set_hwm(config.max_queue_size)
        self._work.bind("inproc://work")
        self._queue.connect("inproc://work")
        try:
            bound = "*" in config.endpoint or "::" in config.endpoint or config.endpoint.startswith(_BINDS)
            (self._pub.bind if bound else self._pub.connect)(config.endpoint)
            if self._replay is not None and config.replay_endpoint:
                self._replay.linger = 0
                self._replay.bind(config.replay_endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            endpoints = ", ".join(filter(None, (config.endpoint, config.replay_endpoint)))
            raise UserError(f"the endpoints of KV events, {endpoints}, can't be used: {error}") from None
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def publish(self, events: list[KVEvent]) -> None:
        """See `Sink`. If the thread can't follow, a number is left out, and who listens asks for nothing that is
        there."""
        import zmq

        with suppress(zmq.Again):
            self._queue.send(self._encoder.encode(EventBatch(time.time(), events, 0)), zmq.NOBLOCK)

    def close(self) -> None:
        """See `Sink`."""
        if self._queue.closed:
            return
        self._queue.send(b"")
        self._thread.join()
        self._queue.close()
        self._context.term()

    def _run(self) -> None:
        import zmq

        topic, numbers = self._config.topic.encode(), count()
        kept: deque[tuple[bytes, bytes]] = deque(maxlen=self._config.buffer_steps)
        poller = zmq.Poller()
        for socket in filter(None, (self._work, self._replay)):
            poller.register(socket, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._work in ready:
                payload = self._work.recv()
                if not payload:
                    break
                kept.append((next(numbers).to_bytes(8, "big"), payload))
                self._pub.send_multipart((topic, *kept[-1]))
            if self._replay is not None and self._replay in ready:
                self._answer(self._replay, kept)
        for socket in filter(None, (self._work, self._pub, self._replay)):
            socket.close()

    @staticmethod
    def _answer(replay: zmq.Socket[bytes], kept: Sequence[tuple[bytes, bytes]]) -> None:
        client, *frames = replay.recv_multipart()
        if len(frames) != 2 or len(frames[1]) != 8:
            return
        for message in (*(each for each in kept if each[0] >= frames[1]), (_END, b"")):
            replay.send_multipart((client, b"", *message))
