"""The streams of one channel as a pure state machine: no socket, no clock, no task.

Frames of the guest and calls of the owner go in; frames to send go into the outbox, and each stream's
sink is told what happened. Every rule of the contract that a guest could break is enforced here, by
raising ProtocolError; a rule that only our own code could break is an assertion.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from cloche_server.channel.credit import WINDOW_BYTES_START, WINDOWS_BYTES_PER_SANDBOX_MAX, Budget, Inbound, Outbound
from cloche_server.channel.errors import BadFrame, ChannelFull, ProtocolError
from cloche_server.channel.frames import (
    PAYLOAD_BYTES_MAX,
    PING_BYTES_MAX,
    STREAM_ID_MAX,
    Kind,
    decode_credit,
    decode_json,
    decode_offset,
    encode_credit,
    encode_json,
    encode_offset,
)
from cloche_server.channel.messages import JsonObject, check_hello, check_result, check_text, refusal
from cloche_server.channel.outbox import Outbox
from cloche_server.channel.pace import ANSWER_BYTES, EXCHANGE_BYTES, FIRST_DATA_BYTES
from cloche_server.channel.reset import StreamState
from cloche_server.channel.waiting import Waiting

STREAMS_PER_OPENER_MAX = 512
_DATA = int(Kind.DATA)
_ANSWERS = frozenset({Kind.OPENED, Kind.EOF, Kind.END})
_LATE = frozenset({Kind.DATA, Kind.CREDIT, Kind.EOF, Kind.TELL, Kind.ABORT})


class Sink(Protocol):
    """Who is told what happens on a stream. All calls are synchronous and come from inside the decoder."""

    def opened(self, info: JsonObject) -> None: ...

    def data(self, view: memoryview) -> None:
        """Copy or consume before returning: the view dies with the call."""

    def eof(self, offset: int) -> None: ...

    def end(self, result: JsonObject) -> None:
        """The whole END: `{"ok": {...}}` or `{"error": {"code", "message"}}`. A command's stderr sink is told too."""

    def credit(self, consumed: int, limit: int) -> None: ...

    def lost(self, reason: str) -> None: ...


class Flow:
    """One open stream."""

    __slots__ = ("adopted", "answered", "ended", "extra", "id", "inbound", "op", "opened", "outbound", "parent", "sink")

    def __init__(self, stream: int, op: str, sink: Sink, inbound: Inbound, outbound: Outbound) -> None:
        self.id = stream
        self.op = op
        self.sink = sink
        self.inbound = inbound
        self.outbound = outbound
        self.opened = False
        self.ended = False
        self.adopted = False
        self.answered = 0
        """What we had sent when its last data came that was worth more than its bytes."""
        self.parent: Flow | None = None
        self.extra: list[Flow] = []


GuestOpen = Callable[[int, str, JsonObject], Sink | None]
"""Called for a stream the guest opens, with a way to answer later (`Mux.accept`, `Mux.end`); None refuses it now."""


class Mux:
    """All streams of one channel."""

    def __init__(
        self,
        budget: Budget,
        outbox: Outbox,
        *,
        guest_open: GuestOpen | None = None,
        on_hello: Callable[[JsonObject], None] | None = None,
        on_pong: Callable[[bytes], None] | None = None,
    ) -> None:
        self.budget = Budget(WINDOWS_BYTES_PER_SANDBOX_MAX, budget)
        self.outbox = outbox
        self.flows: dict[int, Flow] = {}
        self.hello: JsonObject | None = None
        self.highest_host = 0
        self.highest_guest = 0
        self._guest_open = guest_open
        self._on_hello = on_hello
        self._on_pong = on_pong
        self._hello_awaited = on_hello is not None
        self._channel_frames: dict[int, Callable[[memoryview], None]] = {
            Kind.HELLO: self._take_hello,
            Kind.PING: self._take_ping,
            Kind.PONG: self._take_pong,
        }
        self._stream_frames: dict[int, Callable[[Flow, memoryview], None]] = {
            Kind.OPENED: self._take_opened,
            Kind.CREDIT: self._take_credit,
            Kind.EOF: self._take_eof,
            Kind.END: self._take_end,
            Kind.CONFIRM: self._take_confirm,
            Kind.ABORT: self._take_abort,
            Kind.TELL: self._take_tell,
        }

    # --- frames of the guest ------------------------------------------------------------------

    def receive(self, kind: int, stream: int, payload: memoryview) -> int:
        """Take one frame; how useful it was to the pump's pace, in bytes.

        That is the count of data bytes an open stream got by it, and a fixed worth for a frame that we asked for: one
        that comes once on a stream that we opened (OPENED, the first DATA, EOF, END), or data on the guest's own stream
        after we sent something on it, and CREDIT for what we sent. A guest gets no more of those than we gave cause for.
        """
        if self._hello_awaited and kind != Kind.HELLO:
            raise ProtocolError("hello_missing", f"kind {kind} came first")
        flow = self.flows.get(stream)
        if kind == _DATA and flow is not None:
            if flow.ended:
                raise ProtocolError("data_after_end")
            count = len(payload)
            flow.inbound.take(count)
            if count:  # empty DATA costs no credit: a sink that kept it would grow without bound
                flow.sink.data(payload)
                return count + self._worth(flow, count)
            return count
        if flow is not None and (take := self._stream_frames.get(kind)) is not None:
            confirmed = flow.outbound.confirmed
            take(flow, payload)
            if kind == Kind.CREDIT:  # it makes us send more: worth the bytes that it confirms
                return flow.outbound.confirmed - confirmed
            if kind in _ANSWERS and not stream % 2 and not flow.adopted:  # adopted: OPENED may come again and again
                return ANSWER_BYTES
        elif stream == 0 and (take_channel := self._channel_frames.get(kind)) is not None:
            take_channel(payload)
        elif kind == Kind.OPEN:
            self._take_open(stream, payload)
        elif not self._is_late(kind, stream):
            raise ProtocolError("unexpected_frame", f"kind {kind} on stream {stream}")
        return 0

    @staticmethod
    def _worth(flow: Flow, count: int) -> int:
        """Beyond its bytes: a first answer to us, or what follows an answer of ours (a request of a kept connection)."""
        if flow.id % 2 == 0:
            return FIRST_DATA_BYTES if flow.inbound.received == count else 0
        if flow.answered == flow.outbound.sent:
            return 0
        flow.answered = flow.outbound.sent
        return EXCHANGE_BYTES

    def _is_late(self, kind: int, stream: int) -> bool:
        """A frame that crossed our END or CONFIRM on its way. A guest's CONFIRM always does: END already forgot."""
        if stream == 0 or stream in self.flows:
            return False
        if stream % 2:
            return stream <= self.highest_guest and (kind in _LATE or kind == Kind.CONFIRM)
        return stream <= self.highest_host and kind in _LATE

    def _take_hello(self, payload: memoryview) -> None:
        if not self._hello_awaited:
            raise ProtocolError("hello_again")
        self._hello_awaited = False
        self.hello = check_hello(decode_json(payload))
        if self._on_hello is not None:
            self._on_hello(self.hello)

    def _take_ping(self, payload: memoryview) -> None:
        if len(payload) > PING_BYTES_MAX:
            raise BadFrame("ping", f"{len(payload)} bytes")
        self.outbox.put(Kind.PONG, 0, bytes(payload))

    def _take_pong(self, payload: memoryview) -> None:
        if len(payload) > PING_BYTES_MAX:
            raise BadFrame("pong", f"{len(payload)} bytes")
        if self._on_pong is not None:
            self._on_pong(bytes(payload))

    def _take_open(self, stream: int, payload: memoryview) -> None:
        if stream % 2 == 0 or stream <= self.highest_guest:
            raise ProtocolError("stream_id", f"guest opened {stream} after {self.highest_guest}")
        fields = decode_json(payload)
        op = check_text(fields, "op")
        self.highest_guest = stream
        if (
            self._guest_open is None
            or self._opened_by(1) >= STREAMS_PER_OPENER_MAX
            or not self.budget.take(WINDOW_BYTES_START)
        ):
            self.outbox.put(Kind.END, stream, encode_json(refusal()))
            return
        waiting = Waiting()
        flow = Flow(stream, op, waiting, Inbound(self.budget), Outbound())
        self.flows[stream] = flow
        sink = self._guest_open(stream, op, fields)
        if sink is None:
            if stream in self.flows:
                self.end(flow, refusal())
        else:
            waiting.owner = sink

    def _take_opened(self, flow: Flow, payload: memoryview) -> None:
        if flow.id % 2 or flow.parent is not None or flow.ended or (flow.opened and not flow.adopted):
            raise ProtocolError("unexpected_frame", f"OPENED on stream {flow.id}")
        info = decode_json(payload)
        flow.opened = True
        flow.sink.opened(info)

    def _take_credit(self, flow: Flow, payload: memoryview) -> None:
        consumed, limit = decode_credit(payload)
        if flow.parent is not None:
            raise ProtocolError("unexpected_frame", f"CREDIT on stream {flow.id}")
        if flow.ended:
            return
        flow.outbound.credit(consumed, limit)
        self._push(flow)
        flow.sink.credit(consumed, limit)

    def _take_eof(self, flow: Flow, payload: memoryview) -> None:
        if flow.ended:
            raise ProtocolError("eof_after_end")
        offset = decode_offset(payload)
        flow.inbound.finish(offset)
        flow.sink.eof(offset)

    def _take_end(self, flow: Flow, payload: memoryview) -> None:
        if flow.id % 2 or flow.parent is not None or flow.ended:
            raise ProtocolError("unexpected_frame", f"END on stream {flow.id}")
        result = check_result(decode_json(payload))
        for each in (*flow.extra, flow):
            each.ended = True
            each.inbound.release()
            each.outbound.drop()
        for each in (*flow.extra, flow):
            each.sink.end(result)

    def _take_confirm(self, flow: Flow, payload: memoryview) -> None:
        raise ProtocolError("unexpected_frame", f"CONFIRM on stream {flow.id}, which has not ended")

    def _take_abort(self, flow: Flow, payload: memoryview) -> None:
        if flow.id % 2 == 0:
            raise ProtocolError("unexpected_frame", f"ABORT on stream {flow.id}")
        decode_json(payload)
        sink = flow.sink
        self.end(flow, refusal("aborted", "the opener gave up"))
        sink.lost("aborted")

    def _take_tell(self, flow: Flow, payload: memoryview) -> None:
        if flow.id % 2 == 0:
            raise ProtocolError("unexpected_frame", f"TELL on stream {flow.id}")
        decode_json(payload)  # no operation of the guest's takes a message in this generation

    # --- calls of the owner -------------------------------------------------------------------

    def next_stream_id(self) -> int:
        if self.highest_host + 2 > STREAM_ID_MAX:
            raise ChannelFull("ids")
        return self.highest_host + 2

    def open(
        self, op: str, fields: Mapping[str, object], sinks: Sequence[Sink], *, stream: int | None = None
    ) -> list[Flow]:
        """OPEN; the first sink is the stream's, each further one belongs to an extra stream on the next even id."""
        first = self.next_stream_id() if stream is None else stream
        assert first % 2 == 0, "the host opens even ids"
        assert first > self.highest_host, "an id is never used twice"
        if first + 2 * (len(sinks) - 1) > STREAM_ID_MAX:
            raise ChannelFull("ids")
        if self._opened_by(0) + len(sinks) > STREAMS_PER_OPENER_MAX:
            raise ChannelFull("streams")
        payload = encode_json({"op": op, **fields})
        if len(payload) > PAYLOAD_BYTES_MAX:
            raise ValueError(f"OPEN {op} has {len(payload)} bytes; a frame holds {PAYLOAD_BYTES_MAX}")
        flows = []
        for index, sink in enumerate(sinks):
            self.budget.take_always(WINDOW_BYTES_START)
            flow = Flow(first + 2 * index, op, sink, Inbound(self.budget), Outbound())
            self.flows[flow.id] = flow
            flows.append(flow)
        flows[0].extra = flows[1:]
        for flow in flows[1:]:
            flow.parent = flows[0]
            flow.outbound.drop()
        self.highest_host = flows[-1].id
        self.outbox.put(Kind.OPEN, first, payload)
        return flows

    def _opened_by(self, parity: int) -> int:
        return sum(stream % 2 == parity for stream in self.flows)

    def adopt(self, stream: int, state: StreamState, logged: int, sink: Sink) -> Flow:
        """Go on with a stream that RESUME named; a stderr stream after its command."""
        assert stream <= self.highest_host, "only what RESUME named can be adopted"
        assert stream not in self.flows, "a stream is adopted once"
        self.budget.take_always(WINDOW_BYTES_START)
        inbound = Inbound(self.budget, at=logged, adopted=True)
        flow = Flow(
            stream, state.op, sink, inbound, Outbound(at=state.received, adopted=True, eof_sent=state.eof_received)
        )
        flow.adopted = True
        flow.opened = state.opened
        if state.op == "exec.stderr":
            flow.parent = self.flows[stream - 2]  # kept and adopted before, or the caller is wrong
            flow.parent.extra.append(flow)
            flow.outbound.drop()
        self.flows[stream] = flow
        self.outbox.put(Kind.CREDIT, stream, encode_credit(*inbound.grant()))
        return flow

    def send(self, flow: Flow, data: bytes) -> None:
        flow.outbound.push(data)
        self._push(flow)

    def send_eof(self, flow: Flow) -> None:
        flow.outbound.finish()
        self._push(flow)

    def _push(self, flow: Flow) -> None:
        outbound = flow.outbound
        while (piece := outbound.next_piece(PAYLOAD_BYTES_MAX)) is not None:
            self.outbox.put(Kind.DATA, flow.id, piece)
        if (offset := outbound.take_eof()) is not None:
            self.outbox.put(Kind.EOF, flow.id, encode_offset(offset))

    def consumed(self, flow: Flow, total: int) -> None:
        credit = flow.inbound.consume(total)
        if credit is not None:
            self.outbox.put(Kind.CREDIT, flow.id, encode_credit(*credit))

    def tell(self, flow: Flow, message: Mapping[str, object]) -> None:
        if not flow.ended:
            self.outbox.put(Kind.TELL, flow.id, encode_json(message))

    def abort(self, flow: Flow, reason: str) -> None:
        if not flow.ended:
            flow.outbound.drop()
            self.outbox.put(Kind.ABORT, flow.id, encode_json({"reason": reason}))

    def confirm(self, flow: Flow) -> None:
        """END is recorded: the guest forgets the stream, and so do we, with its extra streams."""
        assert flow.ended, "only an ended operation is confirmed"
        assert flow.parent is None, "an extra stream is forgotten with its command"
        if self.flows.pop(flow.id, None) is None:
            return
        for extra in flow.extra:
            self.flows.pop(extra.id, None)
        self.outbox.put_later(Kind.CONFIRM, flow.id)

    def ping(self, payload: bytes) -> None:
        assert len(payload) <= PING_BYTES_MAX
        self.outbox.put(Kind.PING, 0, payload)

    # --- answers to a stream that the guest opened ---------------------------------------------

    def accept(self, flow: Flow, info: Mapping[str, object], sink: Sink) -> None:
        """OPENED; then the sink gets what came before, which the first window bounds."""
        waiting = flow.sink
        assert isinstance(waiting, Waiting), "a guest's stream is accepted once"
        assert not flow.ended, "a stream that has ended is not accepted"
        self.outbox.put(Kind.OPENED, flow.id, encode_json(info))
        flow.opened = True
        flow.sink = sink
        waiting.replay(sink)

    def end(self, flow: Flow, result: Mapping[str, object]) -> None:
        """END on a stream that the guest opened. It is forgotten at once: no re-attach keeps a guest's streams."""
        assert flow.id % 2, "END answers a stream that the guest opened"
        assert not flow.ended, "END is sent once"
        flow.ended = True
        flow.inbound.release()
        flow.outbound.drop()
        self.flows.pop(flow.id, None)
        self.outbox.put(Kind.END, flow.id, encode_json(result))

    def lost(self, reason: str) -> None:
        """The channel is gone: every sink learns it, every window goes back."""
        flows, self.flows = list(self.flows.values()), {}
        for flow in flows:
            flow.outbound.drop()
            if not flow.ended:
                flow.inbound.release()
        for flow in flows:
            flow.sink.lost(reason)
