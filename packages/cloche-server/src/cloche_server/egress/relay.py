"""Moves the bytes of one allowed connection between the guest's end and a socket: callbacks only, no task, no buffer at rest.

Up: a piece goes from the decoder's buffer straight into the socket; what the kernel does not take waits here, and credit is
granted only for what it took. Down: one shared buffer is filled, as far as the guest has room. Pausing is not reading: the
kernel's buffers then slow the far end.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable

from cloche_server.egress.guest_end import GuestEnd
from cloche_server.egress.limits import PIECE_BYTES_MAX, Bytes

ROUNDS_MAX = 4
"""Full reads in one turn, before another connection gets its turn."""
HALF_CLOSED_S = 60.0
IDLE_S = 3600.0
_NO_LINGER = struct.pack("ii", 1, 0)


class _Shared(threading.local):
    def __init__(self) -> None:
        self.view = memoryview(bytearray(PIECE_BYTES_MAX))


_shared = _Shared()


def close_abruptly(sock: socket.socket) -> None:
    """The far end sees a reset: what it got is not the whole."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    sock.close()


class Relay:
    """Owns the socket from `__init__` on. `over` is told once how it ended: `closed`, or what cut it."""

    __slots__ = (
        "_down_ended", "_down_timer", "_fd", "_guest", "_limits", "_loop", "_over", "_pending", "_quiet_since",
        "_reading", "_seen", "_sock", "_unpaid", "_up_ended", "_up_timer", "bytes_down", "bytes_up", "peek",
    )  # fmt: skip

    def __init__(self, guest: GuestEnd, sock: socket.socket, limits: Bytes, over: Callable[[Relay, str], None]) -> None:
        self.bytes_up = self.bytes_down = 0
        self.peek: Callable[[memoryview], None] | None = None
        """Is shown what comes down, after the guest got it."""
        self._guest = guest
        self._sock: socket.socket | None = sock
        self._fd = sock.fileno()
        self._limits = limits if limits.bounded else None
        self._over = over
        self._loop = asyncio.get_running_loop()
        self._pending: bytearray | None = None
        self._unpaid = 0
        """Bytes of the guest that went up and that the rate has not made room for yet."""
        self._reading = self._up_ended = self._down_ended = False
        self._up_timer: asyncio.TimerHandle | None = None
        self._down_timer: asyncio.TimerHandle | None = None
        self._seen = (0, 0)
        self._quiet_since = self._loop.time()

    def start(self) -> None:
        """Begin to read from the socket. Bytes of the guest can come before."""
        if self._sock is not None:
            self._read_on()

    # --- up: the guest's bytes to the socket ------------------------------------------------------

    def up(self, view: memoryview | bytes) -> None:
        sock = self._sock
        if sock is None:
            return
        count = len(view)
        self.bytes_up += count
        if self._pending is not None:
            self._pending += view  # the stream's window bounds it: no credit until the kernel has taken it
        else:
            try:
                sent = sock.send(view)
            except BlockingIOError:
                sent = 0
            except OSError:
                self.cut("upstream_reset")
                return
            if sent < count:
                self._pending = bytearray(view[sent:])
                self._loop.add_writer(self._fd, self._writable)
        if self._limits is None:
            self._guest.taken(0 if self._pending is None else len(self._pending))
        elif not self._limits.count(count):
            self.cut("bytes_used_up")
        else:
            self._unpaid += count
            self._pay()

    def up_eof(self) -> None:
        self._up_ended = True
        if self._pending is None:
            self._shut_down()

    def _writable(self) -> None:
        sock, pending = self._sock, self._pending
        if sock is None or pending is None:
            return
        try:
            sent = sock.send(pending)
        except BlockingIOError:
            return
        except OSError:
            self.cut("upstream_reset")
            return
        if sent < len(pending):
            del pending[:sent]
        else:
            self._pending = None
            self._loop.remove_writer(self._fd)
        self._guest.taken(max(self._unpaid, 0 if self._pending is None else len(self._pending)))
        if self._up_ended and self._pending is None:
            self._shut_down()

    def _shut_down(self) -> None:
        if self._sock is not None:
            with contextlib.suppress(OSError):  # the far end is gone already: reading tells
                self._sock.shutdown(socket.SHUT_WR)
            self._loop.call_soon(self._end_if_both)  # not in the decoder's turn, which the guest is charged for

    def _pay(self) -> None:
        """Credit is granted piece by piece, as the rate allows."""
        limits = self._limits
        assert limits is not None
        while self._unpaid and self._up_timer is None:
            piece = min(self._unpaid, limits.piece)
            self._unpaid -= piece
            wait_s = limits.pay(piece, self._loop.time())
            if wait_s:
                self._up_timer = self._loop.call_later(wait_s, self._up_again)
        pending = 0 if self._pending is None else len(self._pending)
        self._guest.taken(max(self._unpaid, pending))

    def _up_again(self) -> None:
        assert self._limits is not None
        self._up_timer = None
        wait_s = self._limits.wait_s(self._loop.time())
        if wait_s:
            self._up_timer = self._loop.call_later(wait_s, self._up_again)
        else:
            self._pay()

    # --- down: the socket's bytes to the guest ----------------------------------------------------

    def _read_on(self) -> None:
        if not self._reading and not self._down_ended and self._down_timer is None and self._sock is not None:
            self._reading = True
            self._loop.add_reader(self._fd, self._readable)

    def _stop_reading(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._fd)

    def _readable(self) -> None:
        """Read until there is nothing more: libuv forgets a socket that has an error, even if there is still data."""
        sock, stream = self._sock, self._guest.stream
        if sock is None or not self._reading:
            return
        for _ in range(ROUNDS_MAX):
            room = stream.room
            if room <= 0:
                self._stop_reading()
                stream.when_room(self._read_on)
                return
            piece = PIECE_BYTES_MAX if self._limits is None else self._limits.piece
            try:
                count = sock.recv_into(_shared.view[: min(room, piece)])
            except BlockingIOError:
                return
            except OSError:
                self.cut("upstream_reset")
                return
            if not count:
                self._down_eof()
                return
            if not self._pass_down(_shared.view[:count]):
                return
        self._loop.call_soon(self._readable)

    def _pass_down(self, view: memoryview) -> bool:
        """Whether more may be read now."""
        self.bytes_down += len(view)
        self._guest.stream.send(view)
        if self.peek is not None:
            self.peek(view)
            if self._sock is None:
                return False
        if self._limits is None:
            return True
        wait_s = self._limits.pay(len(view), self._loop.time())
        if not self._limits.count(len(view)):
            self.cut("bytes_used_up")
            return False
        if wait_s:
            self._stop_reading()
            self._down_timer = self._loop.call_later(wait_s, self._down_again)
        return not wait_s

    def _down_again(self) -> None:
        assert self._limits is not None
        self._down_timer = None
        wait_s = self._limits.wait_s(self._loop.time())
        if wait_s:
            self._down_timer = self._loop.call_later(wait_s, self._down_again)
        else:
            self._read_on()

    def _down_eof(self) -> None:
        self._stop_reading()
        self._down_ended = True
        self._guest.eof_to_guest()
        self._end_if_both()

    # --- the end ----------------------------------------------------------------------------------

    def _end_if_both(self) -> None:
        if self._sock is not None and self._down_ended and self._up_ended and self._pending is None:
            self._close()
            self._guest.end_ok()
            self._over(self, "closed")

    def gone(self, reason: str) -> None:
        """The guest's end is over, in whatever state we are."""
        self._stop_reading()
        self._down_ended = True
        self._loop.call_soon(self._gone)  # closing and recording are not for the decoder's turn

    def _gone(self) -> None:
        if self._sock is not None:
            whole = self._up_ended and self._pending is None
            self._close(abruptly=not whole)
            self._over(self, "closed" if whole else "guest_gone")

    def cut(self, code: str) -> None:
        """End it from here: both ends see a reset."""
        if self._sock is not None:
            self._close(abruptly=True)
            self._guest.reset(code)
            self._over(self, code)

    def leave(self) -> None:
        """Close the socket, in order, and leave the guest's end to its owner."""
        if self._sock is not None:
            self._close()
            self._over(self, "closed")

    def sweep(self, now: float) -> None:
        """Called every now and then: ends what nothing moves in."""
        seen = (self.bytes_up, self.bytes_down)
        if seen != self._seen:
            self._seen, self._quiet_since = seen, now
        elif now - self._quiet_since > (HALF_CLOSED_S if self._down_ended or self._up_ended else IDLE_S):
            self.cut("idle")

    @property
    def is_over(self) -> bool:
        return self._sock is None

    def _close(self, *, abruptly: bool = False) -> None:
        sock, self._sock = self._sock, None
        assert sock is not None
        self._stop_reading()
        if self._pending is not None:
            self._pending = None
            self._loop.remove_writer(self._fd)
        for timer in (self._up_timer, self._down_timer):
            if timer is not None:
                timer.cancel()
        self._up_timer = self._down_timer = None
        if abruptly:
            close_abruptly(sock)
        else:
            sock.close()
