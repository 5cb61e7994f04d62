"""Moves bytes between two sockets of the host: what the gate dialled, and the interceptor's end of it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

from cloche_server.egress.relay import ROUNDS_MAX, close_abruptly

PIECE_BYTES_MAX = 262_144


class _Way:
    """One direction: at most one piece waits."""

    __slots__ = ("ended", "from_", "pending", "reading", "to")

    def __init__(self, from_: socket.socket, to: socket.socket) -> None:
        self.from_ = from_
        self.to = to
        self.pending: memoryview | None = None
        self.ended = False
        self.reading = False


class Splice:
    """Owns both sockets. `over` is told once, with the bytes that went from the first to the second and back."""

    def __init__(self, one: socket.socket, other: socket.socket, over: Callable[[Splice], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._ways = (_Way(one, other), _Way(other, one))
        self._over: Callable[[Splice], None] | None = over
        for sock in (one, other):
            sock.setblocking(False)
        for way in self._ways:
            self._read_on(way)

    def _read_on(self, way: _Way) -> None:
        if not way.reading:
            way.reading = True
            self._loop.add_reader(way.from_.fileno(), self._readable, way)

    def _stop_reading(self, way: _Way) -> None:
        if way.reading:
            way.reading = False
            self._loop.remove_reader(way.from_.fileno())

    def _readable(self, way: _Way) -> None:
        for _ in range(ROUNDS_MAX):
            if self._over is None or not way.reading:
                return
            try:
                data = way.from_.recv(PIECE_BYTES_MAX)
            except BlockingIOError:
                return
            except OSError:
                self.close(abruptly=True)
                return
            if data:
                self._send(way, memoryview(data))
            else:
                self._stop_reading(way)
                self._ended(way)
        self._loop.call_soon(
            self._readable, way
        )  # libuv forgets a socket that has an error, even if there is still data

    def _send(self, way: _Way, data: memoryview) -> None:
        try:
            sent = way.to.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            self.close(abruptly=True)
            return
        if sent < len(data):
            if way.pending is None:
                self._loop.add_writer(way.to.fileno(), self._writable, way)
            way.pending = data[sent:]
            self._stop_reading(way)
        elif way.pending is not None:
            way.pending = None
            self._loop.remove_writer(way.to.fileno())

    def _writable(self, way: _Way) -> None:
        if way.pending is not None:
            self._send(way, way.pending)
        if self._over is not None and way.pending is None and not way.ended:
            self._read_on(way)

    def _ended(self, way: _Way) -> None:
        way.ended = True
        with contextlib.suppress(OSError):  # the far end is gone already
            way.to.shutdown(socket.SHUT_WR)
        if all(each.ended for each in self._ways):
            self.close()

    def close(self, *, abruptly: bool = False) -> None:
        over, self._over = self._over, None
        if over is None:
            return
        for way in self._ways:
            self._stop_reading(way)
            if way.pending is not None:
                way.pending = None
                self._loop.remove_writer(way.to.fileno())
        for way in self._ways:
            if abruptly:
                close_abruptly(way.from_)
            else:
                way.from_.close()
        over(self)
