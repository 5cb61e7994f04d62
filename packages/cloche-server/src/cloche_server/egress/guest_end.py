"""The guest's end of one connection: first a conversation reads from it, then a relay takes it over.

It is the channel's sink. While a conversation reads, what has come waits here, and the stream's window bounds it. A relay gets
each piece straight from the decoder. Whatever ends the stream, `over` is called once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from cloche_server.channel import JsonObject, Stream

LINGER_S = 2.0
"""How long a client that was refused may still send: an end before that could destroy the answer on its way."""
LINGER_BYTES_MAX = 1_048_576


class GuestGone(Exception):
    """The guest closed the connection, or its channel is lost."""


class Flow(Protocol):
    """Who takes a connection's bytes after the conversation. All calls come from inside the decoder."""

    def up(self, view: memoryview) -> None:
        """Bytes of the guest; the view dies with the call. `GuestEnd.taken` grants credit for them."""

    def up_eof(self) -> None: ...

    def gone(self, reason: str) -> None:
        """Nothing more can be sent or will come."""


class GuestEnd:
    """Made for a stream that the guest opened, then given to `Stream.accept`."""

    __slots__ = (
        "_buffer", "_eof", "_flow", "_lost", "_over", "_said_eof", "_taken", "_timer", "_waiter", "held", "is_over",
        "stream",
    )  # fmt: skip

    def __init__(self, stream: Stream, over: Callable[[GuestEnd], None]) -> None:
        self.stream = stream
        self.is_over = False
        self.held = 0
        """Bytes that somebody keeps besides the relay: no credit for those."""
        self._over = over
        self._buffer: bytearray | None = bytearray()
        self._flow: Flow | None = None
        self._taken = 0
        self._eof = False
        self._said_eof = False
        self._lost: str | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    # --- what the channel tells -----------------------------------------------------------------

    def opened(self, info: JsonObject) -> None: ...

    def data(self, view: memoryview) -> None:
        flow = self._flow
        if flow is not None:
            flow.up(view)
        elif self._buffer is not None:
            self._buffer += view
            self._wake()

    def eof(self, offset: int) -> None:
        self._eof = True
        if self._flow is not None:
            self._flow.up_eof()
        self._wake()

    def end(self, result: JsonObject) -> None: ...

    def credit(self, consumed: int, limit: int) -> None: ...

    def lost(self, reason: str) -> None:
        self._lost = reason
        flow, self._flow = self._flow, None
        self._wake()
        if flow is not None:
            flow.gone(reason)
        self._finished()

    # --- a conversation reads -------------------------------------------------------------------

    async def read(self, timeout_s: float) -> bytes:
        """What has come, at least a byte; nothing at the end. Raises GuestGone, TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while not self._buffer:
                if self._lost is not None or self.is_over:
                    raise GuestGone(self._lost or "ended")
                if self._eof:
                    return b""
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
        data = bytes(self._buffer)
        self._buffer.clear()
        self.taken(0)
        return data

    def say(self, data: bytes) -> None:
        """A short answer. Too late is no error: the conversation is cancelled then."""
        if not self.is_over:
            self.stream.send(data)

    def flow_to(self, flow: Flow, early: bytes = b"") -> None:
        """From now on bytes go to `flow`: first `early`, which the conversation had read, then what waits here."""
        waiting, self._buffer = bytes(self._buffer or b""), None
        if self._lost is not None or self.is_over:
            flow.gone(self._lost or "over")
            return
        self._flow = flow
        for piece in (early, waiting):
            if piece and self._flow is flow:
                flow.up(memoryview(piece))
        if self._eof and self._flow is flow:
            flow.up_eof()

    # --- what a relay needs ---------------------------------------------------------------------

    def taken(self, pending: int) -> None:
        """All but `pending` bytes were taken over for good: grants credit."""
        total = self.stream.received - pending - self.held
        if total > self._taken:  # what a conversation had read and handed on counts as taken already
            self._taken = total
            self.stream.consumed(total)

    def eof_to_guest(self) -> None:
        if not self.is_over and not self._said_eof:
            self._said_eof = True
            self.stream.eof()

    # --- the end --------------------------------------------------------------------------------

    def end_ok(self) -> None:
        """An orderly close, after what was sent."""
        if not self.is_over:
            self.stream.end({"ok": {}})
            self._finished()

    def reset(self, code: str) -> None:
        """The client sees a reset connection."""
        if not self.is_over:
            self.stream.refuse(code, "the gate closed it")
            self._finished()

    def finish(self, last_words: bytes) -> None:
        """Say it, and let the client read it: what it still sends is dropped for a while."""
        if self.is_over:
            return
        self.say(last_words)
        self.eof_to_guest()
        if self._eof:
            self.end_ok()
            return
        self._timer = asyncio.get_running_loop().call_later(LINGER_S, self.end_ok)
        self._flow = None
        self.flow_to(_Lingering(self))

    def _finished(self) -> None:
        if self.is_over:
            return
        self.is_over = True
        flow, self._flow = self._flow, None
        self._buffer = None
        if self._timer is not None:
            self._timer.cancel()
        self._wake()
        if flow is not None:
            flow.gone("over")
        self._over(self)

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class _Lingering:
    """Takes and drops, up to a limit."""

    __slots__ = ("_guest", "_left")

    def __init__(self, guest: GuestEnd) -> None:
        self._guest = guest
        self._left = LINGER_BYTES_MAX

    def up(self, view: memoryview) -> None:
        self._left -= len(view)
        if self._left < 0:
            self._guest.end_ok()
        else:
            self._guest.taken(0)

    def up_eof(self) -> None:
        self._guest.end_ok()

    def gone(self, reason: str) -> None: ...
