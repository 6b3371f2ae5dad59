"""Messages between processes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.runtime.channel import Channel


@contextmanager
def connected() -> Iterator[tuple[Channel, Channel]]:
    one, end = Channel.pair()
    other = Channel(end)
    try:
        yield one, other
    finally:
        one.close()
        other.close()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.one_of(st.binary(max_size=200), st.integers(0, 600_000).map(bytes)), max_size=8))
def test_messages_arrive_whole_and_in_order(messages: list[bytes]) -> None:
    """Also more than the kernel takes at once, which neither blocks the sender nor is lost."""
    with connected() as (one, other):
        for message in messages:
            one.send(message)
        received: list[bytes] = []
        while len(received) < len(messages):
            one.flush()
            received += other.receive()
        assert received == messages
        assert other.receive() == []


def test_an_end_is_noticed_after_the_last_message() -> None:
    with connected() as (one, other):
        one.send(b"last")
        one.close()
        assert not other.ended
        assert other.receive() == [b"last"]
        other.wait(10)
        assert other.receive() == []
        assert other.ended
        other.send(b"to nobody")


def test_what_is_unsent_lingers() -> None:
    async def body() -> None:
        with connected() as (one, other):
            message = bytes(3_000_000)
            received: list[bytes] = []
            other.attach(asyncio.get_running_loop(), received.append)
            one.send(message)
            await asyncio.to_thread(one.close, 10.0)
            async with asyncio.timeout(10):
                while not received:
                    await asyncio.sleep(0.01)
            assert received == [message]

    asyncio.run(body())


def test_a_loop_sends_what_had_no_room() -> None:
    async def body() -> None:
        with connected() as (one, other):
            loop = asyncio.get_running_loop()
            received: list[bytes] = []
            one.send(bytes(2_000_000))
            one.attach(loop, received.append)
            one.send(b"behind it")
            other.attach(loop, received.append)
            async with asyncio.timeout(10):
                while len(received) < 2:
                    await asyncio.sleep(0.01)
            assert received == [bytes(2_000_000), b"behind it"]

    asyncio.run(body())
