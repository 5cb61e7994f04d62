"""A client of HTTP/1 that can say anything, right or wrong."""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass

from tests.unit.interceptor.conftest import World


@dataclass
class Reply:
    """What came back, until the end or the declared length."""

    raw: bytes
    connection: int

    @property
    def status(self) -> int:
        return int(self.raw.split(b" ", 2)[1]) if self.raw.startswith(b"HTTP/") else 0

    @property
    def head(self) -> bytes:
        return self.raw.partition(b"\r\n\r\n")[0]

    @property
    def body(self) -> bytes:
        return self.raw.partition(b"\r\n\r\n")[2]


class Talk:
    """One intercepted connection."""

    def __init__(
        self, world: World, host: str = "api.test", port: int = 443, *, sni: str | None = "", **how: object
    ) -> None:
        self.world = world
        tls = bool(how.get("tls", True))
        plain, self.connection = world.gate.open(host, port, **how)  # type: ignore[arg-type]
        self.socket: socket.socket = plain
        if tls:
            name = host if sni == "" else sni
            context = ssl.create_default_context(cadata=world.lineage.cert)
            context.check_hostname = name is not None
            context.set_alpn_protocols(["http/1.1"])
            self.socket = context.wrap_socket(plain, server_hostname=name)

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def reply(self, *, until_end: bool = False) -> Reply:
        raw = b""
        while until_end or not _whole(raw):
            try:
                data = self.socket.recv(1 << 16)
            except (ConnectionError, ssl.SSLError):
                break
            if not data:
                break
            raw += data
        return Reply(raw, self.connection)

    def say(self, data: bytes) -> Reply:
        self.send(data)
        return self.reply()

    def close(self) -> None:
        self.socket.close()


def request(method: str = "GET", target: str = "/", *headers: str, host: str = "api.test", body: bytes = b"") -> bytes:
    lines = [f"{method} {target} HTTP/1.1", f"Host: {host}", *headers]
    if body and not any(header.lower().startswith("transfer-encoding") for header in headers):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def say(world: World, data: bytes, host: str = "api.test", **how: object) -> Reply:
    """On a connection of its own."""
    talk = Talk(world, host, **how)  # type: ignore[arg-type]
    try:
        return talk.say(data)
    finally:
        talk.close()


def _whole(raw: bytes) -> bool:
    head, found, body = raw.partition(b"\r\n\r\n")
    if not found:
        return False
    for line in head.lower().split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name == b"content-length":
            return len(body) >= int(value)
        if name == b"transfer-encoding":
            return body.endswith(b"0\r\n\r\n")
    return head.startswith(b"HTTP/1.1 101") or b" 204 " in head[:20]
