"""One stream as its owner holds it: the pure flow of `streams.py` with futures around it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from cloche_server.channel.errors import ChannelLost, StreamEnded
from cloche_server.channel.messages import JsonObject, refusal, unwrap
from cloche_server.channel.pump import OUT_BYTES_HIGH, Pump
from cloche_server.channel.streams import Flow, Mux, Sink

SEND_WAITING_BYTES_MAX = 1_048_576


class Relay:
    """Stands between the state machine and the owner's sink: passes everything on and wakes who awaits the stream."""

    data: Callable[[memoryview], None]

    def __init__(self, sink: Sink | None) -> None:
        self.info: JsonObject | None = None
        self.result: JsonObject | None = None
        self.lost_reason: str | None = None
        self.future: asyncio.Future[JsonObject] | None = None
        self._sink = sink
        self._waiters: list[asyncio.Future[None]] = []
        self.on_room: Callable[[], None] | None = None
        if sink is not None:
            self.data = sink.data  # straight through: the hot path has no layer here

    def attach(self, sink: Sink) -> None:
        self._sink = sink
        self.data = sink.data

    def opened(self, info: JsonObject) -> None:
        self.info = info
        if self._sink is not None:
            self._sink.opened(info)
        self._wake()

    def eof(self, offset: int) -> None:
        if self._sink is not None:
            self._sink.eof(offset)

    def end(self, result: JsonObject) -> None:
        self.result = result
        if self._sink is not None:
            self._sink.end(result)
        self.complete()

    def credit(self, consumed: int, limit: int) -> None:
        if self._sink is not None:
            self._sink.credit(consumed, limit)
        self._wake()
        self.tell_room()

    def tell_room(self) -> None:
        callback, self.on_room = self.on_room, None
        if callback is not None and self.result is None and self.lost_reason is None:
            callback()

    def lost(self, reason: str) -> None:
        if self.result is not None or self.lost_reason is not None:
            return  # an operation that has ended cannot be lost
        self.lost_reason = reason
        if self._sink is not None:
            self._sink.lost(reason)
        self.complete()

    def complete(self) -> None:
        """Settle the result's future, if someone asked for it and there is something to settle it with."""
        self._wake()
        future = self.future
        if future is None or future.done():
            return
        if self.result is not None:
            future.set_result(self.result)
        elif self.lost_reason is not None:
            future.set_exception(ChannelLost(self.lost_reason))
            future.exception()  # retrieved: whoever awaits it still gets it

    async def change(self) -> None:
        """Until anything but data happens on the stream."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def raise_if_over(self) -> None:
        if self.lost_reason is not None:
            raise ChannelLost(self.lost_reason)
        if self.result is not None:
            raise StreamEnded


class Stream:
    """Made by `Channel.open`, by `Channel.adopt`, or for a stream that the guest opened."""

    def __init__(self, pump: Pump, mux: Mux, flow: Flow, relay: Relay, extra: tuple[Stream, ...] = ()) -> None:
        self.id = flow.id
        self.op = flow.op
        self.extra = extra
        self._pump = pump
        self._mux = mux
        self._flow = flow
        self._relay = relay
        if flow.opened:
            relay.info = {}  # adopted: what OPENED said went to a predecessor

    # --- sending ------------------------------------------------------------------------------

    @property
    def sent(self) -> int:
        """Offset of the next byte that goes out; bytes that wait for credit are not counted."""
        return self._flow.outbound.sent

    @property
    def confirmed(self) -> int:
        """The guest holds everything before this offset, whatever happens to us."""
        return self._flow.outbound.confirmed

    @property
    def received(self) -> int:
        """Offset of the next byte that the guest sends."""
        return self._flow.inbound.received

    def send(self, data: bytes | bytearray | memoryview) -> None:
        """Send, or keep until there is credit. Await `writable` first: what waits is bounded."""
        self._relay.raise_if_over()
        waiting = self._flow.outbound.pending_bytes
        if waiting and waiting + len(data) > SEND_WAITING_BYTES_MAX:
            raise BufferError("await writable() before send(): too many bytes already wait for credit")
        self._mux.send(self._flow, bytes(data))

    @property
    def room(self) -> int:
        """How many bytes would leave at once. 0: ask `when_room`."""
        outbound = self._flow.outbound
        if outbound.pending_bytes or self._pump.outbox.bytes > OUT_BYTES_HIGH:
            return 0
        return outbound.limit - outbound.sent

    def when_room(self, callback: Callable[[], None]) -> None:
        """Called once, when there may be room again; never after the stream's end. The last call counts."""
        if self._relay.result is not None or self._relay.lost_reason is not None:
            return
        self._relay.on_room = callback
        outbound = self._flow.outbound
        if not outbound.pending_bytes and outbound.limit > outbound.sent:  # credit is there; the outbox is full
            self._pump.when_drained(self._relay.tell_room)

    async def writable(self) -> None:
        """Until everything sent so far has gone out. Raises StreamEnded, ChannelLost."""
        while True:
            self._relay.raise_if_over()
            if self._flow.outbound.pending_bytes:
                await self._relay.change()
            elif self._pump.outbox.bytes > OUT_BYTES_HIGH:
                await self._pump.drain()
            else:
                return

    def eof(self) -> None:
        """Nothing follows in our direction. Bytes that wait for credit go out before it. Idempotent."""
        if not self._flow.outbound.closed:
            self._mux.send_eof(self._flow)

    # --- the operation ------------------------------------------------------------------------

    async def opened(self) -> JsonObject:
        """OPENED's object; `{}` if END came without it and was ok. Raises OperationFailed, ChannelLost."""
        relay = self._relay
        while relay.info is None:
            if relay.result is not None:
                unwrap(relay.result)
                return {}
            if relay.lost_reason is not None:
                raise ChannelLost(relay.lost_reason)
            await relay.change()
        return relay.info

    @property
    def result(self) -> asyncio.Future[JsonObject]:
        """END as the guest sent it (`{"ok": ...}` or `{"error": ...}`), or ChannelLost. Use `unwrap` on it."""
        if self._relay.future is None:
            self._relay.future = asyncio.get_running_loop().create_future()
            self._relay.complete()
        return self._relay.future

    def tell(self, message: Mapping[str, object]) -> None:
        if self._relay.lost_reason is None:
            self._mux.tell(self._flow, message)

    def abort(self, reason: str) -> None:
        """Ask the guest to stop; END still comes. A stream that the guest opened is ended with `refuse` or `end`."""
        if self._relay.lost_reason is None:
            self._mux.abort(self._flow, reason)

    def consumed(self, total: int) -> None:
        """Everything before this absolute offset is taken over for good (logged): grants credit."""
        if self._relay.lost_reason is None:
            self._mux.consumed(self._flow, total)

    def confirm(self) -> None:
        """END is recorded: the guest may forget the operation. Idempotent."""
        if self._relay.lost_reason is None:
            self._mux.confirm(self._flow)

    def discard(self, reason: str) -> None:
        """Nobody cares any more: abort, drop what still comes, confirm END when it comes."""
        if self._relay.result is not None:
            self.confirm()
        else:
            for each in (self, *self.extra):
                each._relay.attach(_Discard(each))
                each.consumed(each.received)  # the guest may be waiting for credit before it can end
            self.abort(reason)

    # --- for a stream that the guest opened ---------------------------------------------------

    def accept(self, sink: Sink, info: Mapping[str, object] | None = None) -> None:
        """OPENED. Bytes that came before go to the sink now."""
        self._relay.raise_if_over()
        self._relay.attach(sink)
        self._mux.accept(self._flow, info or {}, self._relay)

    def refuse(self, code: str = "refused", message: str = "this sandbox may not open that") -> None:
        self.end(refusal(code, message))

    def end(self, result: JsonObject) -> None:
        """Answer END; nothing more is heard of the stream. Too late (the guest gave up) is no error."""
        if self._relay.lost_reason is None and self._relay.result is None:
            self._relay.result = result
            self._mux.end(self._flow, result)
            self._relay.complete()


class _Discard:
    """The sink of a stream that its owner gave up."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def opened(self, info: JsonObject) -> None: ...

    def data(self, view: memoryview) -> None:
        self._stream.consumed(self._stream.received)

    def eof(self, offset: int) -> None: ...

    def end(self, result: JsonObject) -> None:
        if self._stream._flow.parent is None:
            self._stream.confirm()

    def credit(self, consumed: int, limit: int) -> None: ...

    def lost(self, reason: str) -> None: ...
