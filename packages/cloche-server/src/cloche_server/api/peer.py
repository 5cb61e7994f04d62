"""Connections that say who is at their other end.

Two small subclasses of uvicorn's protocols. Each asks the kernel once, when the connection is made, and writes the
answer into every request's scope, where no client can reach.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from cloche.wire.errors import ClocheError, error
from cloche_server.api.caller import Peer
from cloche_server.api.gathering import GatheringCycle
from cloche_server.api.problems import whole_answer

EXTENSION: Final = "cloche.peer"
UCRED: Final = struct.Struct("3i")
CONNECTIONS_MAX: Final = 4096
SEND_BUFFER_BYTES: Final = 1024 * 1024
WRITE_HIGH_BYTES: Final = 1024 * 1024
WRITE_LOW_BYTES: Final = 256 * 1024


def peer_of(transport: asyncio.BaseTransport) -> Peer | None:
    """None when the kernel does not answer: the gate refuses such a connection."""
    sock = transport.get_extra_info("socket")
    if sock is None:
        return None
    if sock.family != socket.AF_UNIX:
        return Peer(None)
    try:
        _pid, uid, _gid = UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, UCRED.size))
    except OSError:
        return None
    return Peer(uid & 0xFFFFFFFF)


def _widen(transport: asyncio.Transport) -> None:
    """Room for a few large pieces: a follower of bulk output is woken once per 256 KiB, not per 16."""
    transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES, low=WRITE_LOW_BYTES)
    sock = transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)


class PeerHttpProtocol(HttpToolsProtocol):
    """HTTP/1.1 with the peer in each scope."""

    peer: Peer | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.peer = peer_of(transport)
        _widen(transport)

        if len(self.connections) > CONNECTIONS_MAX:
            self._refuse(error("overloaded", "The node has too many connections.", retry_after_s=1.0))

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if type(self.cycle) is RequestResponseCycle:  # None or an older one when the request was refused
            GatheringCycle.adopt(self.cycle)

    def send_400_response(self, msg: str) -> None:
        self._refuse(error("invalid_request", "This is not HTTP."))

    def _refuse(self, err: ClocheError) -> None:
        self.transport.write(whole_answer(err))
        self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]
        scope["extensions"] = {EXTENSION: self.peer}


class PeerWebSocketProtocol(WebSocketsSansIOProtocol):
    """A WebSocket with the peer in its scope."""

    peer: Peer | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.peer = peer_of(transport)

    def handle_connect(self, event: Any) -> None:
        super().handle_connect(event)  # the application's task is only scheduled by this, not yet run
        scope = getattr(self, "scope", None)
        if scope is not None:
            scope["extensions"][EXTENSION] = self.peer
