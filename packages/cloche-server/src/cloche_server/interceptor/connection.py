"""One intercepted connection: mitmproxy's layers on two unix sockets, one from the gate and one for the server.

Whatever goes wrong in a layer or a hook ends the connection: mitmproxy itself would log it and leave the client waiting.
"""
# mypy: disable-error-code="import-not-found"
# mypy: disallow-subclassing-any=False

from __future__ import annotations

import asyncio
import logging
import socket
import time
import traceback
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

from mitmproxy.connection import Client, ConnectionState
from mitmproxy.proxy import commands, events, layers, mode_specs, tunnel
from mitmproxy.proxy.context import Context
from mitmproxy.proxy.server import ConnectionHandler, ConnectionIO

from .binding import Target
from .certificates import Authority, Roots, address_of
from .flow import HELD_BYTES_HIGH, BoundedHttpLayer
from .judge import Judge

HANDSHAKE_S: Final = 10.0
HEAD_S: Final = 10.0
READ_BYTES: Final = 64 << 10
_PROTOCOLS: Final = (b"h2", b"http/1.1")
_UNRECOGNIZED_NAME: Final = bytes.fromhex("15030300020270")
_CRASHED: Final = "mitmproxy has crashed!"

log = logging.getLogger("interceptor")


class Refused(Exception):
    """The gate gave no upstream; the text is for the client."""


class Dialler(Protocol):
    """Asks the gate for an upstream of one connection."""

    async def dial(self) -> socket.socket: ...


class Corked:
    """A writer that sends what one event brought as one piece, where mitmproxy writes head and body apart."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._pieces: list[bytes] = []

    @property
    def transport(self) -> asyncio.WriteTransport:
        return self._writer.transport

    def write(self, data: bytes) -> None:
        self._pieces.append(data)

    def uncork(self) -> None:
        if self._pieces:
            pieces, self._pieces = self._pieces, []
            if not self._writer.is_closing():
                self._writer.write(pieces[0] if len(pieces) == 1 else b"".join(pieces))

    def is_closing(self) -> bool:
        return self._writer.is_closing()

    def write_eof(self) -> None:
        self.uncork()
        self._writer.write_eof()

    async def drain(self) -> None:
        await self._writer.drain()

    def close(self) -> None:
        self.uncork()
        self._writer.close()


class Intercepted(ConnectionHandler):
    """Runs until the client is gone: `await handle_client()`."""

    def __init__(
        self,
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        options: Any,
        target: Target,
        *,
        judge: Judge,
        dialler: Dialler,
        authority: Authority | None,
        roots: Roots,
    ) -> None:
        client = Client(
            peername=("sandbox", 0),
            sockname=(target.host, target.port),
            timestamp_start=time.time(),
            state=ConnectionState.OPEN,
            proxy_mode=mode_specs.ProxyMode.parse("transparent"),
        )
        context = Context(client, options)
        context.server.address = (target.host, target.port)
        context.server.sni = target.host
        super().__init__(context)
        self._target = target
        self._judge = judge
        self._dialler = dialler
        self._authority = authority
        self._roots = roots
        self._moved = asyncio.Event()
        self._head_timer: asyncio.TimerHandle | None = None
        stack = tunnel.LayerStack()
        if target.tls:
            stack /= layers.ServerTLSLayer(context)
            stack /= layers.ClientTLSLayer(context)
        self._http = BoundedHttpLayer(context, judge)
        stack /= self._http
        self.layer = stack[0]
        self.transports[client] = ConnectionIO(None, streams[0], Corked(streams[1]))
        self._hooks: dict[str, Callable[..., Awaitable[None]]] = {
            "tls_clienthello": self._hello,
            "tls_start_client": self._start_client,
            "tls_start_server": self._start_server,
            "tls_established_server": self._server_established,
            "requestheaders": judge.requestheaders,
            "request": judge.request,
            "responseheaders": judge.responseheaders,
            "response": judge.response,
            "websocket_message": judge.websocket_message,
        }

    async def run(self) -> None:
        """Until both sides are closed."""
        timer = asyncio.get_running_loop().call_later(HANDSHAKE_S, self._handshake_late)
        try:
            await self.handle_client()
        finally:
            timer.cancel()
            self._stop_head_timer()
            self._http.release()
            for transport in list(self.transports.values()):
                if transport.writer is not None:
                    transport.writer.close()

    def end(self) -> None:
        """From outside, or when something failed: nothing more goes either way."""
        for transport in list(self.transports.values()):
            if transport.writer is not None:
                transport.writer.transport.abort()
            if transport.handler is not None:
                transport.handler.cancel("ended")

    # What fails, ends the connection.

    def log(self, message: str, level: int = logging.INFO, exc_info: Any = None) -> None:
        """mitmproxy's messages may quote what was sent, so none is written; a crash in a layer is told here alone."""
        if message == _CRASHED:
            self._failed("a layer")
        elif level >= logging.ERROR:
            log.warning("mitmproxy reported an error")

    async def handle_hook(self, hook: Any) -> None:
        try:
            if (found := self._hooks.get(hook.name)) is not None:
                await found(*hook.args())
        except Exception:  # whatever it was, the connection must not go on: the layer never hears of the hook's end
            self._failed(f"hook {hook.name}")
            raise asyncio.CancelledError from None

    def _failed(self, where: str) -> None:
        log.warning("%s failed:\n%s", where, _frames())
        self._judge.denied("protocol_error", "the connection was closed because it could not be followed")
        self.end()

    # Time and memory.

    async def server_event(self, event: Any) -> None:
        await super().server_event(event)
        for transport in self.transports.values():
            if isinstance(transport.writer, Corked):
                transport.writer.uncork()
        self._moved.set()
        self._time_head()

    async def drain_writers(self) -> None:
        """Called between reads. A client whose request waits for a verdict is not read without end."""
        await super().drain_writers()
        client = self.transports.get(self.client)
        if client is None or client.handler is not asyncio.current_task() or self._http.http1 is None:
            return
        while self._http.held_bytes > HELD_BYTES_HIGH:
            self._moved.clear()
            await self._moved.wait()

    def _time_head(self) -> None:
        """A head that has begun must end soon."""
        http1 = self._http.http1
        if http1 is None:
            return
        if not http1.reads_head:
            self._stop_head_timer()
        elif self._head_timer is None:
            self._head_timer = asyncio.get_running_loop().call_later(HEAD_S, self._head_late)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_late(self) -> None:
        self._judge.denied("head_too_slow", f"the head of a request took more than {HEAD_S:.0f} s")
        self.end()

    def _handshake_late(self) -> None:
        if self._target.tls and not self.client.tls_established:
            self._judge.denied("handshake_too_slow", f"the TLS handshake took more than {HANDSHAKE_S:.0f} s")
            self.end()

    # TLS.

    def _names_target(self) -> bool:
        name = self.client.sni
        if name is None:
            return address_of(self._target.host) is not None
        return str(name).lower() == self._target.host

    async def _hello(self, data: Any) -> None:
        data.establish_server_tls_first = self._names_target()

    async def _start_client(self, data: Any) -> None:
        if self._authority is None:
            raise LookupError("the lineage is not known")
        if not self._names_target():
            code = "sni_missing" if self.client.sni is None else "sni_mismatch"
            self._judge.denied(code, f"the TLS name is not {self._target.host}")
            client = self.transports[self.client]
            assert client.writer is not None
            client.writer.write(_UNRECOGNIZED_NAME)
            return  # without a TLS connection mitmproxy closes
        server = data.context.server
        protocol = server.alpn if server.tls_established else b"http/1.1"
        data.ssl_conn = self._authority.server_side(self._target.host, protocol)

    async def _start_server(self, data: Any) -> None:
        offers = [offer for offer in self.client.alpn_offers if offer in _PROTOCOLS]
        if self.client.tls_established:
            offers = [self.client.alpn] if self.client.alpn else []
        data.conn.alpn_offers = offers
        data.ssl_conn = self._roots.client_side(self._target.host, offers)

    async def _server_established(self, data: Any) -> None:
        client, server = self.client, data.conn
        if client.tls_established and (client.alpn == b"h2") != (server.alpn == b"h2"):
            raise ConnectionError("the server speaks another protocol than before")

    # The way to the server.

    async def open_connection(self, command: commands.OpenConnection) -> None:
        connection = command.connection
        if connection.address != (self._target.host, self._target.port):
            raise ConnectionError("another address than the connection's")
        async with self.max_conns[connection.address]:
            try:
                upstream = await self._dialler.dial()
                reader, writer = await asyncio.open_unix_connection(sock=upstream, limit=READ_BYTES)
            except (Refused, OSError) as failure:
                connection.error = str(failure) or "the connection failed"
                self.transports.pop(connection, None)
                await self.server_event(events.OpenConnectionCompleted(command, connection.error))
                return
            connection.timestamp_start = connection.timestamp_tcp_setup = time.time()
            connection.state = ConnectionState.OPEN
            connection.peername = connection.sockname = connection.address
            self.transports[connection] = ConnectionIO(asyncio.current_task(), reader, Corked(writer))
            await self.server_event(events.OpenConnectionCompleted(command, None))
            await self.handle_connection(connection)


def _frames() -> str:
    """Where it failed, without any text that could hold what was sent."""
    import sys

    failure = sys.exc_info()[1]
    if failure is None:
        return "(nothing is known)"
    frames = traceback.extract_tb(failure.__traceback__)[-8:]
    lines = [f"  {frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
    return "\n".join([*lines, f"  {type(failure).__name__}"])
