"""SOCKS 5 (RFC 1928), the part that a client needs for CONNECT: a greeting, a login that nobody looks at, one request.

Who asks is known by the channel; a user name is read (RFC 1929) and forgotten. BIND and UDP are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from ipaddress import ip_address
from typing import Final

from cloche_server.policy.model import Target
from cloche_server.policy.names import BadName, target

VERSION: Final = 5
REPLY_OK: Final = 0
REPLY_FAILURE: Final = 1
REPLY_NOT_ALLOWED: Final = 2
REPLY_UNREACHABLE: Final = 4
REPLY_REFUSED: Final = 5
REPLY_COMMAND: Final = 7
REPLY_ADDRESS_KIND: Final = 8

_NO_LOGIN: Final = 0
_PASSWORD: Final = 2
_NO_METHOD: Final = 0xFF
_CONNECT: Final = 1
_IPV4, _NAME, _IPV6 = 1, 3, 4


def reply(code: int) -> bytes:
    """An answer to a request. The address in it is nobody's business."""
    return bytes((VERSION, code, 0, _IPV4, 0, 0, 0, 0, 0, 0))


class BadSocks(ValueError):
    """Something else than we take; `answer` is what the client is sent before it is closed."""

    def __init__(self, reason: str, answer: bytes = b"") -> None:
        super().__init__(f"This SOCKS request is not taken: {reason}.")
        self.reason = reason
        self.answer = answer


@dataclass(frozen=True, slots=True)
class Answer:
    """Send this and read on."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Connect:
    """The request. What comes after it (`rest`) is the client's data."""

    target: Target


class _State(Enum):
    GREETING = "greeting"
    LOGIN = "login"
    REQUEST = "request"
    OVER = "over"


class SocksReader:
    """Takes bytes as they come; at most a few hundred are held until the request is whole."""

    def __init__(self) -> None:
        self._data = b""
        self._state = _State.GREETING

    def feed(self, data: bytes) -> None:
        self._data += data

    @property
    def rest(self) -> bytes:
        """What came after the request."""
        return self._data

    def next_event(self) -> Answer | Connect | None:
        """None: more bytes are needed, or all is said."""
        if not self._data or self._state is _State.OVER:
            return None
        if self._state is _State.GREETING:
            return self._greeting()
        if self._state is _State.LOGIN:
            return self._login()
        return self._request()

    def _greeting(self) -> Answer | None:
        data = self._data
        if data[0] != VERSION:
            raise BadSocks("version")
        if len(data) < 2 or len(data) < 2 + data[1]:
            return None
        methods = data[2 : 2 + data[1]]
        self._data = data[2 + data[1] :]
        if _NO_LOGIN in methods:
            self._state = _State.REQUEST
            return Answer(bytes((VERSION, _NO_LOGIN)))
        if _PASSWORD in methods:
            self._state = _State.LOGIN
            return Answer(bytes((VERSION, _PASSWORD)))
        raise BadSocks("method", bytes((VERSION, _NO_METHOD)))

    def _login(self) -> Answer | None:
        data = self._data
        if data[0] != 1:
            raise BadSocks("login")
        if len(data) < 2 or len(data) < 3 + data[1]:
            return None
        end = 3 + data[1] + data[2 + data[1]]
        if len(data) < end:
            return None
        self._data = data[end:]
        self._state = _State.REQUEST
        return Answer(b"\x01\x00")

    def _request(self) -> Connect | None:
        data = self._data
        if data[0] != VERSION:
            raise BadSocks("version", reply(REPLY_FAILURE))
        if len(data) < 5:
            return None
        if data[1] != _CONNECT:
            raise BadSocks("command", reply(REPLY_COMMAND))
        if data[2] != 0:
            raise BadSocks("reserved", reply(REPLY_FAILURE))
        start, length = {_IPV4: (4, 4), _IPV6: (4, 16), _NAME: (5, data[4])}.get(data[3], (0, 0))
        if not start:
            raise BadSocks("address_kind", reply(REPLY_ADDRESS_KIND))
        if len(data) < start + length + 2:
            return None
        port = int.from_bytes(data[start + length : start + length + 2])
        self._data = data[start + length + 2 :]
        self._state = _State.OVER
        return Connect(_target(data[3], data[start : start + length], port))


def _target(kind: int, host: bytes, port: int) -> Target:
    """A name is ASCII; NUL, CR, LF and the rest are no part of one (`policy.names`)."""
    try:
        return target(host.decode("ascii") if kind == _NAME else str(ip_address(host)), port)
    except UnicodeDecodeError:
        raise BadSocks("bad_host", reply(REPLY_NOT_ALLOWED)) from None
    except BadName as bad:
        raise BadSocks("bad_port" if bad.reason == "port" else "bad_host", reply(REPLY_NOT_ALLOWED)) from None
