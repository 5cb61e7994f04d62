"""The socket: bytes in by turns, bytes out in batches. No other file of this room touches one.

Receiving uses one buffer for all channels of a thread, because decoding is synchronous; a channel at rest keeps
only an undecoded piece of a frame. A turn ends after TURN_S of work that no useful byte accounts for, and
`pace` may then rest the channel. Writing gathers what one turn of the loop produced into one `sendmsg`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import select
import socket
import threading
from collections.abc import Callable
from functools import partial
from time import perf_counter, thread_time

from cloche_server.channel.errors import ProtocolError
from cloche_server.channel.frames import FRAME_BYTES_MAX, Decoder
from cloche_server.channel.outbox import Outbox
from cloche_server.channel.pace import Pace, turn_is_over

SOCKET_BUFFER_BYTES = 1_048_576
RECEIVE_BYTES_MIN = 16_384
RECEIVE_BYTES_MAX = 1_048_576
WRITE_BYTES = 524_288
FLUSH_BYTES_MAX = 2_097_152
OUT_BYTES_HIGH = 524_288
"""`drain` and `writable` wait above this."""
OUT_BYTES_MAX = 4_194_304
"""Above this nothing is read: a guest that makes us answer must read the answers."""
LATE_S = 0.005
"""How long a frame that nobody waits for waits for another one."""
CHECK_FRAMES = 16
CHECK_PAYLOAD_BYTES = 1024

Take = Callable[[int, int, memoryview], int]
Search = Callable[[memoryview], bytes | None]
Failed = Callable[[str, ProtocolError | None], None]


class _Shared(threading.local):
    def __init__(self) -> None:
        self.buffer = bytearray(FRAME_BYTES_MAX + RECEIVE_BYTES_MAX)
        self.view = memoryview(self.buffer)


_shared = _Shared()


class Pump:
    """`take` gets every frame and answers how many useful bytes it held; `failed` is told once why it all ended."""

    def __init__(
        self,
        sock: socket.socket,
        loop: asyncio.AbstractEventLoop,
        *,
        take: Take,
        failed: Failed,
        share: float | None = None,
    ) -> None:
        sock.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
        self.outbox = Outbox(self._schedule_flush, self._schedule_late_flush)
        self.frames_in = self.bytes_in = self.pauses = 0
        self.paused_s = 0.0
        self._sock = sock
        self._fd = sock.fileno()
        self._hang_up = select.poll()
        self._hang_up.register(self._fd, 0)
        self._loop = loop
        self._take = take
        self._failed: Failed | None = failed
        self._decoder = Decoder()
        self._search: Search | None = None
        self._pace = Pace(perf_counter()) if share is None else Pace(perf_counter(), share=share)
        self._receive_bytes = 65_536
        self._holds: set[str] = {"start"}
        self._reading = self._writing = False
        self._unfinished = False  # the decoder still holds whole frames: decode those before receiving more
        self._turn_due = self._flush_due = False
        self._write_failed = False
        self._drained: list[Callable[[], None]] = []

    # --- who may stop reading: the owner, a full outbox, the pace ------------------------------

    def start(self, search: Search | None = None) -> None:
        """Begin to read; with `search`, bytes go there until it answers with what follows the frame it sought."""
        self._search = search
        self.release("start")

    def hold(self, why: str) -> None:
        self._holds.add(why)
        self._stop_reading()

    def release(self, why: str) -> None:
        self._holds.discard(why)
        if self._holds or self._failed is None:
            return
        if self._unfinished:
            self._schedule_turn()
        elif not self._reading:
            self._loop.add_reader(self._fd, self._turn)
            self._reading = True

    def _stop_reading(self) -> None:
        if self._reading:
            self._loop.remove_reader(self._fd)
            self._reading = False

    def _schedule_turn(self) -> None:
        self._stop_reading()
        if not self._turn_due:
            self._turn_due = True
            self._loop.call_soon(self._due_turn)

    def _due_turn(self) -> None:
        self._turn_due = False
        self._turn()

    # --- in -----------------------------------------------------------------------------------

    def _turn(self) -> None:
        if self._holds or self._is_closed():
            return
        started = perf_counter(), thread_time()
        at = self._decoder.load(_shared.buffer)
        count = 0
        if not self._unfinished:
            received = self._receive(_shared.view[at : at + self._receive_bytes])
            if received is None:
                return
            count = received
        try:
            useful = self._decode(at, count, started)
        except ProtocolError as error:
            self.fail(f"protocol_error: {error}", error)
            return
        except Exception as error:  # a sink failed on hostile bytes: this sandbox pays, no other
            self._loop.call_exception_handler({"message": "a channel's owner failed", "exception": error})
            self.fail("internal_error")
            return
        spent_s = thread_time() - started[1]
        if turn_is_over(spent_s, useful):
            self._receive_bytes = RECEIVE_BYTES_MIN  # costly bytes come in small pieces, until they are cheap again
        pause_s = self._pace.charge(perf_counter(), spent_s, useful)
        if not self._is_closed():
            self._after_turn(pause_s)

    def _after_turn(self, pause_s: float) -> None:
        if pause_s:
            self._rest(pause_s)
        if self.outbox.bytes > OUT_BYTES_MAX:
            self.hold("outbox")
        if self._unfinished:
            if not self._holds:
                self._schedule_turn()
        elif not self._holds and self._hang_up.poll(0):
            # libuv forgets a socket at its first error, also when there were last words and only those were read.
            self._schedule_turn()
        elif not self._reading:
            self.release("")

    def _receive(self, room: memoryview) -> int | None:
        try:
            count = self._sock.recv_into(room)  # plain recv: descriptors that a peer attaches are discarded
        except (BlockingIOError, InterruptedError):
            if not self._reading:
                self.release("")
            return None
        except OSError as error:
            self.fail(f"io_error: {errno.errorcode.get(error.errno or 0, 'unknown')}")
            return None
        if not count:
            self.fail("closed_by_guest")
            return None
        self.bytes_in += count
        if count == self._receive_bytes:
            self._receive_bytes = min(RECEIVE_BYTES_MAX, count * 2)
        return count

    def _decode(self, at: int, count: int, started: tuple[float, float]) -> int:
        if self._search is not None:
            rest = self._search(_shared.view[at : at + count])
            if rest is not None:
                self._search = None
                self._decoder = Decoder(rest)
                self._unfinished = bool(rest)
            return 0
        take, useful, frames = self._take, 0, 0
        self._unfinished = False
        decoded = self._decoder.frames(_shared.buffer, at + count)
        try:
            for kind, stream, payload in decoded:
                useful += take(kind, stream, payload)
                frames += 1
                if self._holds or self._failed is None:
                    self._unfinished = True
                    break
                if (
                    (len(payload) > CHECK_PAYLOAD_BYTES or not frames % CHECK_FRAMES)
                    and turn_is_over(perf_counter() - started[0], useful)
                    and turn_is_over(thread_time() - started[1], useful)  # a turn is not blamed for being preempted
                ):
                    self._unfinished = True
                    break
        finally:
            decoded.close()
            self.frames_in += frames
        return useful

    def _rest(self, pause_s: float) -> None:
        self.pauses += 1
        self.paused_s += pause_s
        self.hold("pace")
        self._loop.call_later(pause_s, self.release, "pace")

    # --- out ----------------------------------------------------------------------------------

    def flush(self) -> None:
        self._flush()

    def _schedule_flush(self) -> None:
        if not self._flush_due and not self._writing and self._failed is not None:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def _schedule_late_flush(self) -> None:
        if self._failed is not None:
            self._loop.call_later(LATE_S, self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        if self._failed is None:
            return
        left = FLUSH_BYTES_MAX
        while self.outbox.bytes and left > 0 and self._write():
            left -= WRITE_BYTES
        if self.outbox.bytes and not self._writing:
            self._loop.add_writer(self._fd, self._flush)
            self._writing = True
        elif not self.outbox.bytes and self._writing:
            self._loop.remove_writer(self._fd)
            self._writing = False
        if self.outbox.bytes <= OUT_BYTES_HIGH:
            self._wake_drained()
            if "outbox" in self._holds:
                self.release("outbox")

    def _write(self) -> bool:
        """Write once; False when the socket takes no more."""
        try:
            count = self._sock.sendmsg(self.outbox.iovecs(WRITE_BYTES))
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            # The guest's side is gone. Its last words may still be in the pipe: reading goes on to its end.
            self._write_failed = True
        if self._write_failed:
            self.outbox.clear()
            return False
        self.outbox.written(count)
        return True

    async def drain(self) -> None:
        """Wait until the outbox is below its high mark (or the channel is gone)."""
        while self.outbox.bytes > OUT_BYTES_HIGH and self._failed is not None:
            waiter = self._loop.create_future()
            self.when_drained(partial(_settle, waiter))
            await waiter

    def when_drained(self, callback: Callable[[], None]) -> None:
        """Called once, when the outbox is at or below its high mark, or the channel is gone."""
        self._drained.append(callback)

    def _wake_drained(self) -> None:
        callbacks, self._drained = self._drained, []
        for callback in callbacks:
            callback()

    def _is_closed(self) -> bool:
        return self._failed is None

    # --- the end ------------------------------------------------------------------------------

    def fail(self, reason: str, error: ProtocolError | None = None) -> None:
        failed = self._failed
        if failed is not None:
            self.close()
            failed(reason, error)

    def close(self) -> None:
        """Write what the socket still takes, then let go of it. Idempotent; `failed` is not told."""
        if self._failed is None:
            return
        if self.outbox.bytes:
            self._write()
        self._failed = None
        self._stop_reading()
        if self._writing:
            self._loop.remove_writer(self._fd)
            self._writing = False
        self._sock.close()
        self.outbox.clear()
        self._wake_drained()


def _settle(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
