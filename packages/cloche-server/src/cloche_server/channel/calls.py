"""Bytes of a stream as an async iterator, bytes to a stream, and whole short operations."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING

from cloche_server.channel.errors import ChannelLost, OperationFailed, StreamEnded
from cloche_server.channel.messages import JsonObject, unwrap
from cloche_server.channel.stream import Relay, Stream

if TYPE_CHECKING:
    from cloche_server.channel.channel import Channel

WRITE_BYTES_MAX = 262_144
JOIN_BYTES_MAX = 16_384


class ByteReader:
    """A sink that is read as an async iterator; credit is granted as chunks are taken, so one window bounds it.

    Ends at EOF, or at END when the operation sent no EOF. An END with an error raises OperationFailed after the
    last chunk, a lost channel ChannelLost at once. One reader at a time.
    """

    def __init__(self) -> None:
        self._chunks: deque[bytes | bytearray] = deque()
        self._taken = 0
        self._finished = False
        self._signal = Relay(None)
        self._stream: Stream | None = None

    def attach(self, stream: Stream) -> ByteReader:
        """Say whose bytes these are, right after `open`, `adopt` or `accept`: credit is granted there."""
        self._stream = stream
        self._taken = stream.received - sum(map(len, self._chunks))
        return self

    def opened(self, info: JsonObject) -> None: ...

    def data(self, view: memoryview) -> None:
        last = self._chunks[-1] if self._chunks else None
        if len(view) > JOIN_BYTES_MAX:
            self._chunks.append(bytes(view))
        elif type(last) is bytearray and len(last) < JOIN_BYTES_MAX:
            last += view  # one object for each tiny frame would cost many times the window
        else:
            self._chunks.append(bytearray(view))
        self._signal.credit(0, 0)

    def eof(self, offset: int) -> None:
        self._finished = True
        self._signal.credit(0, 0)

    def end(self, result: JsonObject) -> None:
        self._finished = True
        self._signal.end(result)

    def credit(self, consumed: int, limit: int) -> None: ...

    def lost(self, reason: str) -> None:
        self._signal.lost(reason)

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        while not self._chunks:
            if self._signal.lost_reason is not None:
                raise ChannelLost(self._signal.lost_reason)
            if self._finished:
                if self._signal.result is not None:
                    unwrap(self._signal.result)
                raise StopAsyncIteration
            await self._signal.change()
        chunk = self._chunks.popleft()
        self._taken += len(chunk)
        if self._stream is not None:
            self._stream.consumed(self._taken)
        return bytes(chunk)


class ByteWriter:
    """Sends with credit and backpressure."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    async def write(self, data: bytes | memoryview) -> None:
        """Raises StreamEnded when the operation ended first: its result says why."""
        view = memoryview(data)
        for at in range(0, len(view), WRITE_BYTES_MAX):
            await self._stream.writable()
            self._stream.send(view[at : at + WRITE_BYTES_MAX])
        await self._stream.writable()

    async def write_all(self, data: AsyncIterator[bytes]) -> None:
        """Everything, then EOF. Stops early, without an error, when the operation ends first."""
        try:
            async for piece in data:
                await self.write(piece)
            self.close()
        except StreamEnded:
            return

    def close(self) -> None:
        self._stream.eof()


class _Collector:
    """Keeps what an operation sends, up to a limit, and consumes it at once."""

    def __init__(self, limit_bytes: int) -> None:
        self.content = bytearray()
        self.over = False
        self.stream: Stream | None = None
        self._limit_bytes = limit_bytes

    def opened(self, info: JsonObject) -> None: ...

    def data(self, view: memoryview) -> None:
        stream = self.stream
        assert stream is not None
        if self.over:
            pass
        elif len(self.content) + len(view) > self._limit_bytes:
            self.over = True
            self.content.clear()
            stream.abort("too_large")
        else:
            self.content += view
        stream.consumed(stream.received)

    def eof(self, offset: int) -> None: ...

    def end(self, result: JsonObject) -> None: ...

    def credit(self, consumed: int, limit: int) -> None: ...

    def lost(self, reason: str) -> None: ...


async def call(
    channel: Channel,
    op: str,
    fields: Mapping[str, object],
    *,
    data: AsyncIterator[bytes] | None,
    limit_bytes: int,
) -> tuple[JsonObject, bytes]:
    collector = _Collector(limit_bytes)
    stream = collector.stream = channel.open(op, fields, sink=collector)
    try:
        if data is not None:
            await ByteWriter(stream).write_all(data)
        result = await stream.result
    except BaseException:
        stream.discard("the caller gave up")
        raise
    stream.confirm()
    if collector.over:
        raise OperationFailed("too_large", f"the answer has more than {limit_bytes} bytes")
    return unwrap(result), bytes(collector.content)
