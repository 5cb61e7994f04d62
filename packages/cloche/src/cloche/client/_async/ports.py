"""Ports inside a sandbox: one connection, or a local port that forwards."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from cloche.client._async.transport import AsyncTransport
from cloche.client._failures import translate
from cloche.client._forward import Forward
from cloche.client._frames import EOF, read_frame
from cloche.wire.ids import short

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection


class AsyncPorts:
    """The ports of one sandbox."""

    def __init__(self, transport: AsyncTransport, sandbox: str) -> None:
        self._transport = transport
        self._sandbox = sandbox

    async def connect(self, port: int) -> AsyncPortConnection:
        """A connection to 127.0.0.1:`port` inside; `connection_refused` when nobody listens."""
        socket = await self._transport.open_socket(f"/v1/sandboxes/{self._sandbox}/ports/{port}")
        return AsyncPortConnection(self._transport, socket)

    async def forward(self, port: int, local_port: int = 0) -> Forward:
        """127.0.0.1:`local_port` here is `port` inside, until it is closed. 0: any free one, see `.local_port`."""
        return Forward(self._transport.target, self._sandbox, port, local_port)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {short(self._sandbox)}>"


class AsyncPortConnection:
    """Bytes both ways."""

    def __init__(self, transport: AsyncTransport, socket: ClientConnection) -> None:
        self._transport = transport
        self._socket = socket
        self._at_end = False

    async def receive(self) -> bytes:
        """What came; b"" at end of file."""
        from websockets.exceptions import WebSocketException

        while not self._at_end:
            try:
                message = await self._socket.recv()
            except (WebSocketException, OSError) as raised:
                raise translate(raised, self._transport.target) from raised
            if isinstance(message, bytes):
                return message
            self._at_end = read_frame(message) is True
        return b""

    async def send(self, data: bytes) -> None:
        await self._send(data)

    async def send_eof(self) -> None:
        """Nothing more will be sent; receiving goes on."""
        await self._send(EOF)

    async def _send(self, message: str | bytes) -> None:
        from websockets.exceptions import WebSocketException

        try:
            await self._socket.send(message)
        except (WebSocketException, OSError) as raised:
            raise translate(raised, self._transport.target) from raised

    async def aclose(self) -> None:
        await self._socket.close()

    async def __aenter__(self) -> AsyncPortConnection:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
