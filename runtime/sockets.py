"""ZeroMQ sockets between processes of one server."""

from __future__ import annotations

import zmq


def readable(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message is there. A socket signals more than messages, and to ask is cheaper than an exception."""
    events = 0 if socket.closed else socket.get(zmq.EVENTS)
    return isinstance(events, int) and bool(events & zmq.POLLIN)


def close_socket(socket: zmq.Socket[bytes]) -> None:
    """Close it and its context, after what may linger."""
    context = socket.context
    socket.close()
    context.term()


def open_socket() -> zmq.Socket[bytes]:
    """One end of a connection, which queues without limit and never blocks."""
    socket = zmq.Context().socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.linger = 0
    return socket
