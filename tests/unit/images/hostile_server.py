"""A web server that answers exactly the bytes a test wants: the registry that misbehaves on purpose."""

import asyncio
import contextlib
import hashlib
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

CONFIG = {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": "sha256:" + "0" * 64, "size": 2}


@dataclass(frozen=True)
class Asked:
    """One request."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes = b""

    @property
    def start(self) -> int:
        """Of the range that is asked for."""
        return int(self.headers.get("range", "bytes=0-").removeprefix("bytes=").split("-")[0])


Answer = Callable[[Asked, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class HostileServer:
    """Where it is and what it was asked."""

    host: str
    url: str
    asked: list[Asked] = field(default_factory=list)

    def paths(self) -> list[str]:
        return [each.path for each in self.asked]


def reply(
    status: int, body: bytes = b"", headers: Mapping[str, str] | None = None, *, length: int | None = None
) -> bytes:
    """A whole answer; `length` is what it says its length is."""
    lines = {"content-length": str(len(body) if length is None else length), **(headers or {})}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"HTTP/1.1 {status} Said\r\n{head}\r\n".encode() + body


def redirect(url: str, status: int = 307) -> bytes:
    return reply(status, headers={"location": url})


def manifest_of(*layers: Mapping[str, Any]) -> bytes:
    kind = "application/vnd.oci.image.manifest.v1+json"
    return json.dumps({"schemaVersion": 2, "mediaType": kind, "config": CONFIG, "layers": layers}).encode()


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


@contextlib.asynccontextmanager
async def hostile(answer: Answer, tls: ssl.SSLContext | None = None) -> AsyncIterator[HostileServer]:
    """`answer` writes to the connection whatever it likes; it is closed when it closes the writer or returns an error."""
    tasks: set[asyncio.Task[Any]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            while (asked := await _read(reader)) is not None and not writer.is_closing():
                if asked.path != "/v2/":
                    found.asked.append(asked)
                    await answer(asked, writer)
                else:
                    writer.write(reply(200))  # the client asks this once to see whether TLS is spoken
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError, ValueError, asyncio.CancelledError):
            pass  # the client went away, or speaks TLS, or the test is over
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    port = server.sockets[0].getsockname()[1]
    found = HostileServer(f"127.0.0.1:{port}", f"{'https' if tls else 'http'}://127.0.0.1:{port}")
    try:
        yield found
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _read(reader: asyncio.StreamReader) -> Asked | None:
    first = await reader.read(1)
    if not first or first == b"\x16":
        return None  # gone, or a TLS handshake
    head = (first + await reader.readuntil(b"\r\n\r\n")).decode()
    request, *lines = head.rstrip("\r\n").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    method, path, _ = request.split(" ")
    return Asked(method, path, headers, await reader.readexactly(int(headers.get("content-length", "0"))))
