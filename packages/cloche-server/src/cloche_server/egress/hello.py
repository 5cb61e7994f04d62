"""The first message of TLS, the ClientHello: only what a gate must know of it, read strictly.

What is doubtful is refused (two names, one extension twice, something behind the message), because the server
might read it in another way than we do. The bytes themselves are passed on by the caller as they came.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cloche_server.policy.names import BadName, normal_host

HELLO_BYTES_MAX: Final = 64 * 1024
RECORD_BYTES_MAX: Final = 16 * 1024
EXTENSIONS_MAX: Final = 256
PROTOCOLS_MAX: Final = 64

_HANDSHAKE: Final = 22
_CLIENT_HELLO: Final = 1
_SERVER_NAME: Final = 0
_ALPN: Final = 16
_ECH: Final = frozenset({0xFE0D, 0xFE08, 0xFE09, 0xFE0A, 0xFE0B, 0xFE0C, 0xFFCE})
"""Encrypted Client Hello, its drafts, and ESNI before it. Browsers also send it empty, as GREASE."""
_RECORD_HEAD: Final = 5
_MESSAGE_HEAD: Final = 4

ALERT_ACCESS_DENIED: Final = bytes.fromhex("15030100020231")
"""What a client is sent whose name no rule allows."""


@dataclass(frozen=True, slots=True)
class Hello:
    """`sni` is in its normal form (`policy.names`)."""

    sni: str | None
    ech: bool
    alpn: tuple[str, ...]


class NotTls(ValueError):
    """These bytes are no ClientHello that we would pass on: `reason` says why, in one word."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"This is no TLS ClientHello: {reason}.")
        self.reason = reason


class HelloParser:
    """Takes bytes as they come, in any pieces; holds at most HELLO_BYTES_MAX of them."""

    def __init__(self) -> None:
        self._head = bytearray()
        self._left = 0
        self._message = bytearray()

    def feed(self, data: bytes) -> Hello | None:
        """The hello once it is whole; what follows it in `data` is not looked at."""
        at = 0
        while at < len(data):
            if not self._left:
                at = self._record(data, at)
                continue
            part = data[at : at + min(self._left, HELLO_BYTES_MAX - len(self._message))]
            self._message += part
            at += len(part)
            self._left -= len(part)
            found = self._whole()
            if found is not None:
                return found
        return None

    def _record(self, data: bytes, at: int) -> int:
        """Reads on in the head of a record."""
        part = data[at : at + _RECORD_HEAD - len(self._head)]
        self._head += part
        head = self._head
        if head[0] != _HANDSHAKE or (len(head) > 1 and head[1] != 3) or (len(head) > 2 and head[2] > 4):
            raise NotTls("not_tls")
        if len(head) == _RECORD_HEAD:
            self._left = int.from_bytes(head[3:5])
            if not 1 <= self._left <= RECORD_BYTES_MAX:
                raise NotTls("record_length")
            head.clear()
        return at + len(part)

    def _whole(self) -> Hello | None:
        message = self._message
        if message[0] != _CLIENT_HELLO:
            raise NotTls("not_hello")
        if len(message) < _MESSAGE_HEAD:
            return None
        length = int.from_bytes(message[1:4])
        if length >= HELLO_BYTES_MAX - _MESSAGE_HEAD:
            raise NotTls("too_long")
        if len(message) < length + _MESSAGE_HEAD:
            return None
        if len(message) > length + _MESSAGE_HEAD or self._left:
            raise NotTls("trailing")
        return _hello(_Reader(bytes(message[_MESSAGE_HEAD:])))


class _Reader:
    """Numbers and vectors from a message; one that reaches beyond its end raises."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def __bool__(self) -> bool:
        return self._at < len(self._data)

    def take(self, count: int) -> bytes:
        part = self._data[self._at : self._at + count]
        if len(part) != count:
            raise NotTls("length")
        self._at += count
        return part

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size))

    def vector(self, size: int) -> bytes:
        return self.take(self.number(size))

    def end(self) -> None:
        if self:
            raise NotTls("length")


def _hello(body: _Reader) -> Hello:
    if body.take(2)[0] != 3:
        raise NotTls("version")
    body.take(32)
    if len(body.vector(1)) > 32:
        raise NotTls("session")
    ciphers = body.vector(2)
    if len(ciphers) < 2 or len(ciphers) % 2:
        raise NotTls("ciphers")
    if not body.vector(1):
        raise NotTls("compression")
    found = _extensions(body.vector(2)) if body else {}
    body.end()
    name = found.get(_SERVER_NAME)
    protocols = found.get(_ALPN)
    return Hello(
        None if name is None else _server_name(name),
        not _ECH.isdisjoint(found),
        () if protocols is None else _protocols(protocols),
    )


def _extensions(data: bytes) -> dict[int, bytes]:
    reader = _Reader(data)
    found: dict[int, bytes] = {}
    while reader:
        kind = reader.number(2)
        if kind in found:
            raise NotTls("extension_twice")
        if len(found) == EXTENSIONS_MAX:
            raise NotTls("too_many_extensions")
        found[kind] = reader.vector(2)
    return found


def _server_name(data: bytes) -> str:
    """One name of a host, and nothing else: a server that takes the second would go elsewhere than we allowed."""
    outer = _Reader(data)
    names = _Reader(outer.vector(2))
    outer.end()
    if names.number(1) != 0:
        raise NotTls("sni_kind")
    name = names.vector(2)
    if names:
        raise NotTls("two_sni")
    try:
        host, address = normal_host(name.decode("ascii"))
    except (BadName, UnicodeDecodeError):
        raise NotTls("bad_sni") from None
    if address is not None:
        raise NotTls("bad_sni")
    return host


def _protocols(data: bytes) -> tuple[str, ...]:
    outer = _Reader(data)
    reader = _Reader(outer.vector(2))
    outer.end()
    found: list[str] = []
    while reader:
        name = reader.vector(1)
        if not name or len(found) == PROTOCOLS_MAX:
            raise NotTls("alpn")
        found.append(name.decode("latin-1"))
    return tuple(found)
