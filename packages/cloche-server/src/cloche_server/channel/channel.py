"""A sandbox's channel as the node uses it: open streams, await their answers, learn of the end."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

from cloche_server.channel import calls
from cloche_server.channel.credit import Budget
from cloche_server.channel.errors import ChannelFull, ChannelLost, ProtocolError
from cloche_server.channel.messages import JsonObject
from cloche_server.channel.pump import Pump
from cloche_server.channel.reset import (
    NONCE_BYTES,
    SCAN_SECONDS_MAX,
    Scan,
    State,
    StreamState,
    reset_bytes,
    resume_bytes,
)
from cloche_server.channel.stream import Relay, Stream
from cloche_server.channel.streams import Mux, Sink

PINGS_MAX = 16

GuestOpen = Callable[[Stream, str, JsonObject], None]
"""Gets a stream that the guest opened, its op and its fields; calls `accept` or `refuse` on it, now or later."""


@dataclass(frozen=True, slots=True)
class Stats:
    """Counters of one channel since it was attached."""

    frames_in: int
    bytes_in: int
    frames_out: int
    bytes_out: int
    out_waiting_bytes: int
    streams_open: int
    window_bytes: int
    pauses: int
    paused_s: float


class Channel:
    """Made by `fresh` or `reattach`. Owns the socket from then on; `on_lost` is called once, never after `close`."""

    def __init__(
        self,
        sock: socket.socket,
        *,
        budget: Budget,
        on_lost: Callable[[str], None],
        guest_open: GuestOpen | None = None,
        expect_hello: bool = False,
        share: float | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_lost: Callable[[str], None] | None = on_lost
        self._guest_open = guest_open
        self._attached: asyncio.Future[None] = self._loop.create_future()
        self._pings: dict[bytes, asyncio.Future[None]] = {}
        self._ping_count = 0
        self._to_adopt: dict[int, int] = {}
        self.lost_reason: str | None = None
        self._pump = Pump(sock, self._loop, take=self._take, failed=self._failed, share=share)
        self._mux = Mux(
            budget,
            self._pump.outbox,
            guest_open=self._offer if guest_open is not None else None,
            on_hello=self._said_hello if expect_hello else None,
            on_pong=self._ponged,
        )

    # --- attach -------------------------------------------------------------------------------

    @classmethod
    async def fresh(
        cls,
        sock: socket.socket,
        *,
        guest_open: GuestOpen | None = None,
        budget: Budget,
        on_lost: Callable[[str], None],
        share: float | None = None,
    ) -> Channel:
        """Attach to a guest that has just booted and wait for its HELLO. The caller sets the time-out.

        Raises WrongGeneration, ProtocolError, ChannelLost; the socket is closed then, and `on_lost` is not called.
        """
        self = cls(sock, budget=budget, on_lost=on_lost, guest_open=guest_open, expect_hello=True, share=share)
        self._pump.start()
        await self._attach()
        return self

    @classmethod
    async def reattach(
        cls,
        sock: socket.socket,
        *,
        logged: Callable[[dict[int, StreamState]], dict[int, int]],
        guest_open: GuestOpen | None = None,
        budget: Budget,
        on_lost: Callable[[str], None],
        timeout_s: float = SCAN_SECONDS_MAX,
        share: float | None = None,
    ) -> tuple[Channel, dict[int, StreamState]]:
        """Attach to a guest that ran before. `logged` chooses, from the checked STATE, the streams to keep.

        Nothing more is read until each kept stream was adopted, so none of its bytes can come too early.
        Raises ProtocolError (`unresponsive`, `state`, `resume`, ...), ChannelLost; the socket is closed then.
        """
        self = cls(sock, budget=budget, on_lost=on_lost, guest_open=guest_open, share=share)
        nonce = os.urandom(NONCE_BYTES)
        scan, found = Scan(nonce), list[State]()

        def search(view: memoryview) -> bytes | None:
            state = scan.feed(view)
            if state is None:
                return None
            found.append(state)
            self._pump.hold("adopt")
            if not self._attached.done():
                self._attached.set_result(None)
            return scan.rest

        self._pump.outbox.put_raw(reset_bytes(nonce))
        self._pump.start(search)
        try:
            async with asyncio.timeout(timeout_s):
                await self._attach()
        except TimeoutError:
            raise ProtocolError("unresponsive", f"no STATE within {timeout_s} s") from None
        try:
            self._resume(nonce, found[0], logged)
        except BaseException:
            self.close("reattach_failed")
            raise
        return self, found[0].streams

    async def _attach(self) -> None:
        try:
            await self._attached
        except BaseException:
            self.close("not_attached")
            raise

    def _resume(self, nonce: bytes, state: State, logged: Callable[[dict[int, StreamState]], dict[int, int]]) -> None:
        keep = logged(dict(state.streams))
        self._pump.outbox.put_raw(resume_bytes(nonce, state, keep))
        self._mux.highest_host = state.highest_host
        self._mux.highest_guest = state.highest_guest
        self._to_adopt = dict(keep)
        if not keep:
            self._pump.release("adopt")

    # --- what the node calls ------------------------------------------------------------------

    @property
    def hello(self) -> JsonObject | None:
        return self._mux.hello

    @property
    def stats(self) -> Stats:
        pump, outbox = self._pump, self._pump.outbox
        return Stats(
            frames_in=pump.frames_in,
            bytes_in=pump.bytes_in,
            frames_out=outbox.frames_total,
            bytes_out=outbox.bytes_total,
            out_waiting_bytes=outbox.bytes,
            streams_open=self.streams_open,
            window_bytes=self._mux.budget.bytes_used,
            pauses=pump.pauses,
            paused_s=pump.paused_s,
        )

    @property
    def streams_open(self) -> int:
        return len(self._mux.flows)

    def flush(self) -> None:
        """What was said leaves now, not at the end of the loop's turn: for what somebody waits for."""
        self._pump.flush()

    def next_stream_id(self) -> int:
        """The id that the next `open` will use: to journal it before OPEN. A stderr stream gets this + 2."""
        return self._mux.next_stream_id()

    def open(
        self,
        op: str,
        fields: Mapping[str, object],
        *,
        sink: Sink,
        stream: int | None = None,
        extra_streams: int = 0,
        extra_sinks: Sequence[Sink] = (),
    ) -> Stream:
        """OPEN. With `extra_streams=1`, `extra_sinks[0]` gets a command's stderr and `stderr_stream` is filled in."""
        self._raise_if_lost()
        assert extra_streams == len(extra_sinks), "one sink for each extra stream"
        assert extra_streams <= 1, "generation 1 has one extra stream: an exec's stderr"
        first = self.next_stream_id() if stream is None else stream
        if extra_streams:
            fields = {**fields, "stderr_stream": first + 2}
        relays = [Relay(each) for each in (sink, *extra_sinks)]
        flows = self._mux.open(op, fields, relays, stream=first)
        extra = tuple(
            Stream(self._pump, self._mux, flow, relay) for flow, relay in zip(flows[1:], relays[1:], strict=True)
        )
        return Stream(self._pump, self._mux, flows[0], relays[0], extra)

    def adopt(self, stream_id: int, state: StreamState, *, sink: Sink) -> Stream:
        """Go on with a stream that `logged` named. Nothing is read before the last of them was adopted."""
        self._raise_if_lost()
        relay = Relay(sink)
        flow = self._mux.adopt(stream_id, state, self._to_adopt.pop(stream_id), relay)
        if not self._to_adopt:
            self._pump.release("adopt")
        return Stream(self._pump, self._mux, flow, relay)

    async def call(
        self,
        op: str,
        fields: Mapping[str, object],
        *,
        data: AsyncIterator[bytes] | None = None,
        limit_bytes: int = 1_048_576,
    ) -> tuple[JsonObject, bytes]:
        """One short operation, from OPEN to CONFIRM: its `ok` and the bytes it sent. Raises OperationFailed."""
        return await calls.call(self, op, fields, data=data, limit_bytes=limit_bytes)

    async def ping(self, timeout_s: float) -> float:
        """Seconds there and back. Raises TimeoutError, ChannelLost."""
        self._raise_if_lost()
        if len(self._pings) >= PINGS_MAX:
            raise ChannelFull("pings")
        self._ping_count += 1
        payload = self._ping_count.to_bytes(8, "little") + os.urandom(8)
        answered = self._pings[payload] = self._loop.create_future()
        started = perf_counter()
        try:
            self._mux.ping(payload)
            async with asyncio.timeout(timeout_s):
                await answered
        finally:
            self._pings.pop(payload, None)
        return perf_counter() - started

    async def drain(self) -> None:
        """Wait until the outbox is below its high mark."""
        await self._pump.drain()

    def pause_reading(self) -> None:
        """Nothing more is taken from the guest until `resume_reading`."""
        self._pump.hold("owner")

    def resume_reading(self) -> None:
        self._pump.release("owner")

    def close(self, reason: str) -> None:
        """Let go of the channel; every open stream's sink is told `lost(reason)`. The guest is not told."""
        self._on_lost = None
        self._pump.close()
        self._lose(reason)

    # --- what the pump and the streams tell ---------------------------------------------------

    def _take(self, kind: int, stream: int, payload: memoryview) -> int:
        return self._mux.receive(kind, stream, payload)

    def _said_hello(self, hello: JsonObject) -> None:
        if not self._attached.done():
            self._attached.set_result(None)

    def _ponged(self, payload: bytes) -> None:
        answered = self._pings.get(payload)
        if answered is not None and not answered.done():
            answered.set_result(None)

    def _offer(self, stream_id: int, op: str, fields: JsonObject) -> Sink | None:
        assert self._guest_open is not None
        relay = Relay(None)
        self._guest_open(Stream(self._pump, self._mux, self._mux.flows[stream_id], relay), op, fields)
        return relay

    def _failed(self, reason: str, error: ProtocolError | None) -> None:
        told, self._on_lost = self._on_lost, None
        attached = self._attached.done()
        if error is not None and not attached:
            self._attached.set_exception(error)  # who awaits `fresh` or `reattach` learns the exact reason
        self._lose(reason)
        if told is not None and attached:
            told(reason)

    def _lose(self, reason: str) -> None:
        if self.lost_reason is not None:
            return
        self.lost_reason = reason
        error = ChannelLost(reason)
        for future in (self._attached, *self._pings.values()):
            if not future.done():
                future.set_exception(error)
                future.exception()  # retrieved: whoever waits still gets it
        self._mux.lost(reason)

    def _raise_if_lost(self) -> None:
        if self.lost_reason is not None:
            raise ChannelLost(self.lost_reason)
