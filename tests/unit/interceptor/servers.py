"""Servers for the interceptor to reach: they keep what they were sent and answer as a path says."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Seen:
    """One request as it came."""

    head: bytes
    body: bytes

    @property
    def line(self) -> bytes:
        return self.head.partition(b"\r\n")[0]

    def header(self, name: str) -> bytes | None:
        for line in self.head.split(b"\r\n")[1:]:
            key, _, value = line.partition(b":")
            if key.strip().lower() == name.encode().lower():
                return value.strip()
        return None


Answer = Callable[[Seen], bytes]


def plain(body: bytes, *headers: bytes, status: bytes = b"200 OK") -> bytes:
    lines = [b"HTTP/1.1 " + status, b"Content-Length: %d" % len(body), *headers, b"", body]
    return b"\r\n".join(lines)


@dataclass
class Http1Server:
    """HTTP/1.1. `answers` by path; else it says what it saw."""

    context: ssl.SSLContext | None
    seen: list[Seen] = field(default_factory=list)
    raw: bytearray = field(default_factory=bytearray)
    answers: dict[bytes, Answer | list[bytes]] = field(default_factory=dict)
    closes: set[bytes] = field(default_factory=set)
    """Paths after whose answer it closes, without saying so."""
    connections: int = 0
    address: tuple[str, int] = ("", 0)

    async def start(self) -> None:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self.context, limit=1 << 20)
        self.address = server.sockets[0].getsockname()
        self._server = server

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.raw += head
                seen = Seen(head, b"")
                seen.body = await self._body(reader, seen)
                self.seen.append(seen)
                path = seen.line.split(b" ")[1].partition(b"?")[0]
                answer = self.answers.get(path, _echo)
                for piece in answer if isinstance(answer, list) else [answer(seen)]:
                    writer.write(piece)
                    await writer.drain()
                if path in self.closes:
                    return
        except (asyncio.IncompleteReadError, OSError, ssl.SSLError):
            pass  # the other side left
        finally:
            writer.close()

    async def _body(self, reader: asyncio.StreamReader, seen: Seen) -> bytes:
        body = bytearray()
        if (seen.header("transfer-encoding") or b"").lower() == b"chunked":
            while (size := int(await reader.readuntil(b"\r\n"), 16)) > 0:
                body += await reader.readexactly(size)
                self.raw += body[-size:]
                await reader.readexactly(2)
            await reader.readuntil(b"\r\n")
            return bytes(body)
        left = int(seen.header("content-length") or 0)
        while left and (data := await reader.read(min(left, 1 << 16))):
            left -= len(data)
            body += data if len(body) < 1 << 20 else b""
            self.raw += data if len(self.raw) < 1 << 20 else b""
        if left:
            raise asyncio.IncompleteReadError(bytes(body), left)
        return bytes(body)


def _echo(seen: Seen) -> bytes:
    return plain(seen.head + seen.body, b"Content-Type: text/plain")
