"""What the interceptor says, from bytes to checked values. Pure. It reads hostile bytes, so its word is hostile too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

MESSAGE_BYTES_MAX: Final = 64 * 1024
"""Of what it says; the longest field is a path. What it is told may have `TOLD_BYTES_MAX`."""
TOLD_BYTES_MAX: Final = 1024 * 1024
LENGTH_BYTES: Final = 4
ID_MAX: Final = (1 << 53) - 1
PATH_CHARS_MAX: Final = 8192

Id = Annotated[int, Meta(ge=1, le=ID_MAX)]
Method = Annotated[str, Meta(pattern=r"\A[!-~]{1,32}\Z")]
Path = Annotated[str, Meta(max_length=PATH_CHARS_MAX)]
Text = Annotated[str, Meta(max_length=1000)]
Code = Annotated[str, Meta(pattern=r"\A[a-z][a-z0-9_]{0,39}\Z")]


class Lie(Exception):
    """The process broke its contract."""


class Ready(msgspec.Struct, frozen=True, tag_field="t", tag="ready"):
    """It can be used."""


class Dial(msgspec.Struct, frozen=True, tag_field="t", tag="dial"):
    """It wants the upstream of a connection."""

    dial: Id
    conn: Id


class Request(msgspec.Struct, frozen=True, tag_field="t", tag="request"):
    """It asks whether a request may go on. The path is without its query."""

    ask: Id
    conn: Id
    method: Method
    path: Path


class Response(msgspec.Struct, frozen=True, tag_field="t", tag="response"):
    """What the upstream answered to a request."""

    ask: Id
    status: Annotated[int, Meta(ge=100, le=999)]


class Alert(msgspec.Struct, frozen=True, tag_field="t", tag="alert"):
    """Something about a secret that a person should see."""

    conn: Id
    kind: Literal["placeholder_elsewhere", "secret_in_request", "foreign_credential"]
    where: Text = ""
    secret: Text = ""


class Denied(msgspec.Struct, frozen=True, tag_field="t", tag="denied"):
    """It refused something by itself."""

    conn: Id
    code: Code
    text: Text = ""
    ask: Id | None = None
    method: Text | None = None
    path: Path | None = None


class Closed(msgspec.Struct, frozen=True, tag_field="t", tag="closed"):
    """A connection is over."""

    conn: Id


Message = Ready | Dial | Request | Response | Alert | Denied | Closed

_decoder: Final[msgspec.json.Decoder[Message]] = msgspec.json.Decoder(Message)


def parse(body: bytes) -> Message:
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as bad:
        raise Lie(f"a message that is none: {str(bad)[:200]}") from None


class Frames:
    """Cuts what comes into messages. Lie when one is too long."""

    def __init__(self) -> None:
        self._unread = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        self._unread += data
        while len(self._unread) >= LENGTH_BYTES:
            length = int.from_bytes(self._unread[:LENGTH_BYTES], "little")
            if length > MESSAGE_BYTES_MAX:
                raise Lie(f"a message of {length} bytes")
            if len(self._unread) < LENGTH_BYTES + length:
                return
            body = bytes(self._unread[LENGTH_BYTES : LENGTH_BYTES + length])
            del self._unread[: LENGTH_BYTES + length]
            yield parse(body)


def told(message: dict[str, Any]) -> bytes:
    """One message to the process; ValueError when it is longer than the process takes."""
    body = msgspec.json.encode(message)
    if len(body) > TOLD_BYTES_MAX:
        raise ValueError(f"a message of {len(body)} bytes")
    return len(body).to_bytes(LENGTH_BYTES, "little") + body
