"""Bounded memory for mitmproxy's HTTP layers: credit is given only for what the other side has taken.

Stock mitmproxy advertises the largest HTTP/2 windows and queues without limit; it takes HTTP/1 heads of any size. Here windows
begin small. One opens again when little of it waits on its way, and grows for a peer that takes what it gets; what connections have
beyond their first window is bounded for all of them together. An HTTP/1 buffer has a limit.
"""
# mypy: disable-error-code="import-not-found"
# mypy: disallow-subclassing-any=False

from __future__ import annotations

import collections
import re
from collections.abc import Iterator
from typing import Any, Final

import h2.connection
import h11
from h2.errors import ErrorCodes
from h2.events import StreamReset
from h11._readers import ChunkedReader
from mitmproxy.connection import Connection, ConnectionState
from mitmproxy.http import Headers
from mitmproxy.proxy import commands, events, tunnel
from mitmproxy.proxy.context import Context
from mitmproxy.proxy.layers import http
from mitmproxy.proxy.layers.http import (
    HttpLayer,
    HTTPMode,
    RequestData,
    RequestEndOfMessage,
    RequestTrailers,
    ResponseData,
    _http1,
    _http2,
)
from mitmproxy.proxy.layers.http._base import ReceiveHttp
from mitmproxy.proxy.layers.http._http_h2 import BufferedH2Connection

from .answers import raw_answer, stock_answer
from .judge import Judge
from .streams import JudgedStream
from .strict import raw_head

STREAM_WINDOW_BYTES: Final = 64 << 10
STREAM_WINDOW_BYTES_MAX: Final = 1 << 20
CONNECTION_WINDOW_BYTES: Final = 256 << 10
"""At first; so much a client that takes nothing can make us keep, on each connection and whatever its streams."""
CONNECTION_WINDOW_BYTES_MAX: Final = 8 << 20
SPARE_BYTES: Final = 24 << 20
WINDOWS_MAX: Final = 256
"""Of streams, kept for one connection before those that are over are forgotten."""
HTTP1_BUFFER_BYTES_MAX: Final = 256 << 10
HELD_BYTES_HIGH: Final = 1 << 20
HELD_BYTES_MAX: Final = 16 << 20
INTERIM_ANSWERS_MAX: Final = 16
_INTERIM: Final = re.compile(rb"HTTP/1\.[01] 1(?!01)[0-9][0-9] ")
STREAM_ID_LAST: Final = 20_000
"""After about 10,000 requests an idle HTTP/2 connection is closed: mitmproxy keeps a little of each."""


class Spare:
    """What all connections of the process may have beyond their first windows."""

    def __init__(self, bytes_max: int) -> None:
        self._left = bytes_max

    def take(self, count: int) -> bool:
        if count > self._left:
            return False
        self._left -= count
        return True

    def give(self, count: int) -> None:
        self._left += count


SPARE: Final = Spare(SPARE_BYTES)


class BoundedH2(BufferedH2Connection):
    """Gives credit when told to. A server that says it will leave may first answer what it has begun."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.local_settings.initial_window_size = STREAM_WINDOW_BYTES
        self.local_settings.acknowledge()
        self.unacknowledged: collections.Counter[int] = collections.Counter()
        self.leaving = False
        self.spare = 0
        """What it took of the spare."""
        self._window = CONNECTION_WINDOW_BYTES
        self._taken = 0
        """Since the window grew last."""
        self._windows: dict[int, tuple[int, int]] = {}
        """The same of each stream: its window, and what was taken since it grew."""

    def initiate_connection(self) -> None:
        h2.connection.H2Connection.initiate_connection(self)
        self.increment_flow_control_window(CONNECTION_WINDOW_BYTES - self.inbound_flow_control_window)

    def acknowledge_received_data(self, acknowledged_size: int, stream_id: int) -> None:
        if acknowledged_size:
            self.unacknowledged[stream_id] += acknowledged_size

    def low_bytes(self, stream_id: int) -> int:
        """When less than this waits on its way, there is credit for more."""
        return self._windows.get(stream_id, (STREAM_WINDOW_BYTES, 0))[0] // 4

    def give_credit(self, stream_id: int) -> None:
        """For what the other side has taken. Who takes a whole window gets twice as much, as far as it goes.

        h2 takes what is open for the largest window; what is under way belongs to it too, and would be lost.
        """
        size = self.unacknowledged.pop(stream_id)
        super().acknowledge_received_data(size, stream_id)
        if self.state_machine.state is h2.connection.ConnectionState.CLOSED:
            return
        self._taken += size
        wider = self._taken >= self._window < CONNECTION_WINDOW_BYTES_MAX
        if wider and SPARE.take(self._window):
            self.spare += self._window
            self.increment_flow_control_window(self._window)
            self._window, self._taken = 2 * self._window, 0
            self._inbound_flow_control_window_manager.max_window_size = self._window
        self._widen(stream_id, size)

    def _widen(self, stream_id: int, size: int) -> None:
        stream = self.streams.get(stream_id)
        if stream is None or not stream.open:
            self._windows.pop(stream_id, None)
            return
        window, taken = self._windows.get(stream_id, (STREAM_WINDOW_BYTES, 0))
        taken += size
        if taken >= window < STREAM_WINDOW_BYTES_MAX:
            self.increment_flow_control_window(window, stream_id)
            window, taken = 2 * window, 0
            stream._inbound_window_manager.max_window_size = window
        self._windows[stream_id] = (window, taken)
        if len(self._windows) > WINDOWS_MAX:
            open_ones = (each for each in self._windows if each in self.streams and self.streams[each].open)
            self._windows = {each: self._windows[each] for each in open_ones}

    def _receive_goaway_frame(self, frame: Any) -> tuple[list[Any], list[Any]]:
        begun = [stream_id for stream_id, stream in self.streams.items() if stream.open]
        late = [stream_id for stream_id in begun if stream_id > frame.last_stream_id]
        if not self.config.client_side or frame.error_code != ErrorCodes.NO_ERROR or len(late) == len(begun):
            ended: tuple[list[Any], list[Any]] = super()._receive_goaway_frame(frame)
            return ended
        self.leaving = True
        return [], [StreamReset(stream_id, error_code=ErrorCodes.REFUSED_STREAM) for stream_id in late]

    def queued_bytes(self, stream_id: int) -> int:
        return sum(len(chunk.data) for chunk in self.stream_buffers.get(stream_id, ()))


class TrailersApart(ChunkedReader):
    """A chunked body whose trailers are taken off: mitmproxy fails at them. Of an answer they are left out, as HTTP allows."""

    trailers: tuple[tuple[bytes, bytes], ...] = ()

    def __call__(self, buf: Any) -> Any:
        found = super().__call__(buf)
        if isinstance(found, h11.EndOfMessage) and found.headers:
            self.trailers = tuple(found.headers)
            return h11.EndOfMessage()
        return found


class StrictHttp1Server(_http1.Http1Server):
    """Looks at the bytes of a head before they are normalised."""

    def __init__(self, context: Context, judge: Judge) -> None:
        super().__init__(context)
        self._judge = judge

    @property
    def reads_head(self) -> bool:
        """Whether a head has begun and not ended."""
        return self.state == self.read_headers and bool(self.buf)

    def read_headers(self, event: Any) -> Iterator[Any]:
        if isinstance(event, events.DataReceived) and (refusal := raw_head(bytes(self.buf))) is not None:
            self._judge.denied(refusal.code, refusal.text)
            yield commands.SendData(self.conn, raw_answer(refusal.status, refusal.code, refusal.text))
            yield commands.CloseConnection(self.conn)
            self.state = self.done
            return
        yield from super().read_headers(event)
        if self.state == self.done and self.request is None:
            self._judge.denied("bad_request", "the request could not be read")

    def read_body(self, event: Any) -> Iterator[Any]:
        for command in super().read_body(event):
            ended = isinstance(command, ReceiveHttp) and isinstance(command.event, RequestEndOfMessage)
            if ended and (trailers := getattr(self.body_reader, "trailers", ())):
                yield ReceiveHttp(RequestTrailers(self.stream_id, Headers(trailers)))
            yield command

    def send(self, event: Any) -> Iterator[Any]:
        if self.conn.state & ConnectionState.CAN_WRITE:
            yield from super().send(event)


class PatientHttp1Client(_http1.Http1Client):
    """Passes over interim answers (100, 103), which mitmproxy takes for the answer."""

    def read_headers(self, event: Any) -> Iterator[Any]:
        for _ in range(INTERIM_ANSWERS_MAX):
            if not _INTERIM.match(bytes(self.buf)) or not self.buf.maybe_extract_lines():
                break
        if not isinstance(event, events.DataReceived) or not self.request or not _INTERIM.match(bytes(self.buf)):
            yield from super().read_headers(event)


class BoundedHttpLayer(HttpLayer):
    """mitmproxy's HTTP layer, with bounds and with streams that a judge looks at."""

    def __init__(self, context: Context, judge: Judge) -> None:
        super().__init__(context, HTTPMode.transparent)
        self._judge = judge
        self._http2s: set[BoundedH2] = set()

    @property
    def http1(self) -> StrictHttp1Server | None:
        """The client's side, when it speaks HTTP/1."""
        found = self.connections.get(self.context.client)
        return found if isinstance(found, StrictHttp1Server) else None

    @property
    def held_bytes(self) -> int:
        """Of requests that wait for a verdict."""
        return sum(_held(stream) for stream in self.streams.values())

    def get_connection(self, event: Any, *, reuse: bool = True) -> Iterator[Any]:
        leaving = [connection for connection, top in self.connections.items() if _is_leaving(top)]
        for connection in leaving:
            self.connections[connection] = self.connections.pop(connection)  # looked at last
        others = any(
            event.connection_spec_matches(connection)
            and (connection.connected or connection in self.waiting_for_establishment)
            for connection in self.connections
            if connection not in leaving
        )
        yield from super().get_connection(event, reuse=reuse and (others or not leaving))

    def make_stream(self, stream_id: int) -> Iterator[Any]:
        self.streams[stream_id] = JudgedStream(self.context.fork(), stream_id, self._judge)
        yield from self.event_to_child(self.streams[stream_id], events.Start())

    def _handle_event(self, event: Any) -> Iterator[Any]:
        if isinstance(event, events.Start) and self.context.client.alpn != b"h2":
            self.connections[self.context.client] = StrictHttp1Server(self.context.fork(), self._judge)
        yield from super()._handle_event(event)
        for connection, top in list(self.connections.items()):
            spoken = _spoken(top)
            if isinstance(spoken, _http1.Http1Connection):
                yield from self._bound_http1(connection, spoken)
            elif spoken is not None:
                yield from self._bound_http2(connection, top, spoken)

    def _bound_http1(self, connection: Connection, spoken: Any) -> Iterator[Any]:
        stream = self.streams.get(spoken.stream_id)
        held = 0 if stream is None else _held(stream)
        if len(spoken.buf) > HTTP1_BUFFER_BYTES_MAX or held > HELD_BYTES_MAX:
            self._judge.denied("head_too_large", "more was sent than is kept while it cannot go on")
            spoken.buf = type(spoken.buf)()
            yield commands.CloseConnection(connection)

    def _bound_http2(self, connection: Connection, top: Any, spoken: Any) -> Iterator[Any]:
        http2 = spoken.h2_conn
        if not connection.connected:
            return
        for stream_id in list(http2.unacknowledged):
            if self._waiting_bytes(spoken, stream_id) < http2.low_bytes(stream_id):
                self._http2s.add(http2)
                http2.give_credit(stream_id)
        worn_out = connection is self.context.client and http2.highest_inbound_stream_id > STREAM_ID_LAST
        over = not self.streams if worn_out else http2.leaving and not spoken.streams
        if worn_out and over:
            http2.close_connection()
        if data := http2.data_to_send():
            yield from _through(top, commands.SendData(connection, data))
        if over:
            yield from _through(top, commands.CloseConnection(connection))

    def release(self) -> None:
        """The connection is over."""
        SPARE.give(sum(http2.spare for http2 in self._http2s))
        self._http2s.clear()

    def _waiting_bytes(self, spoken: Any, stream_id: int) -> int:
        """Of what this side sent on that stream: what the other side has not taken."""
        from_server = isinstance(spoken, _http2.Http2Client)
        theirs = spoken.their_stream_id.get(stream_id, -1) if from_server else stream_id
        stream = self.streams.get(theirs)
        if stream is None:
            return 0
        waiting = _held(stream) + len(stream.request_body_buf) + len(stream.response_body_buf)
        other = _spoken(self.connections.get(self.context.client if from_server else stream.context.server))
        if not isinstance(other, _http2.Http2Connection):
            return waiting
        if from_server:
            return waiting + int(other.h2_conn.queued_bytes(theirs))
        queue = other.stream_queue.get(theirs, ())
        waiting += sum(len(event.data) for event in queue if isinstance(event, RequestData))
        return waiting + int(other.h2_conn.queued_bytes(other.our_stream_id.get(theirs, -1)))


def _spoken(top: Any) -> Any:
    """The layer that speaks HTTP on a connection, below its TLS."""
    while top is not None and not isinstance(top, _http2.Http2Connection | _http1.Http1Connection):
        top = getattr(top, "child_layer", None)
    return top


def _is_leaving(top: Any) -> bool:
    spoken = _spoken(top)
    return isinstance(spoken, _http2.Http2Connection) and spoken.h2_conn.leaving


def _through(top: Any, command: Any) -> Iterator[Any]:
    if isinstance(top, tunnel.TunnelLayer):
        yield from top._handle_command(command)
    else:
        yield command


def _held(stream: Any) -> int:
    waiting = stream._paused_event_queue
    return sum(len(event.data) for event in waiting if isinstance(event, RequestData | ResponseData))


def install() -> None:
    """Puts these in the place of what mitmproxy looks up by name. Called once, before any connection."""
    _http2.BufferedH2Connection = BoundedH2
    _http1.make_error_response = stock_answer
    _http1.ChunkedReader = TrailersApart
    http.Http1Client = PatientHttp1Client
