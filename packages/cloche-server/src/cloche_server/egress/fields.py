"""The header fields of one HTTP/1 request: what they say of framing, and which of them go upstream."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final, Literal

FIELDS_MAX: Final = 200
LENGTH_DIGITS_MAX: Final = 18

REASONS: Final = {
    "request_line": "its first line is no request",
    "version": "it is neither HTTP/1.1 nor HTTP/1.0",
    "header": "a header is malformed",
    "too_long": "its head is too long",
    "too_many_headers": f"it has more than {FIELDS_MAX} headers",
    "target": "its target is no URL",
    "target_too_long": "its target is too long",
    "scheme": "a proxy takes http:// here; https goes by CONNECT",
    "fragment": "its target has a fragment",
    "userinfo": "its target has a user before an @",
    "bad_host": "its host is no name of a host",
    "host_missing": "it has no Host",
    "host_twice": "it has two Hosts",
    "host_mismatch": "its Host is not its target",
    "bare_lf": "a line ends without CR",
    "bare_cr": "it has a CR within a line",
    "nul": "it has a NUL",
    "folded_line": "it has a folded line",
    "space_before_colon": "it has a blank before a colon",
    "length": "its Content-Length is no plain number",
    "length_twice": "it has two Content-Lengths",
    "length_and_encoding": "it has a Content-Length and a Transfer-Encoding",
    "transfer_encoding": "its Transfer-Encoding is not just chunked",
    "connection": "its Connection names a header that must stay",
    "upgrade": "it asks for an upgrade other than to a WebSocket",
    "override": "it names two methods, or none, to take instead of its own",
    "connect_body": "a CONNECT has no body",
    "chunk_size": "the size of a chunk is no number",
    "chunk_extension": "a chunk has an extension",
    "chunk_end": "a chunk is longer than it said",
    "trailers": "its body has trailers",
}


class BadRequest(ValueError):
    """`reason` is a key of REASONS. Nothing of the hostile bytes is in the message."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"This request is malformed: {REASONS[reason]}.")
        self.reason = reason


Version = Literal["1.0", "1.1"]


@dataclass(slots=True)
class Fields:
    """Made by `read_fields`, and not changed after that: the next request of the connection may have the same."""

    block: bytes
    version: Version
    pairs: list[tuple[bytes, bytes]]
    lines: list[bytes] = field(default_factory=list)
    """What goes upstream as it is."""
    upstream: bytes = b""
    """All that goes upstream behind Host, with the empty line."""
    host: str | None = None
    length: int | None = None
    chunked: bool = False
    close: bool = False
    keep_alive: bool = False
    upgrade: bool = False
    override: str | None = None
    """A method that some servers take instead of the request's own (X-HTTP-Method-Override and its like)."""


_FIELD: Final = re.compile(rb"([^:]+):([^\r]*)\r\n")
_NUMBER: Final = re.compile(rb"[0-9]{1,%d}" % LENGTH_DIGITS_MAX)
_TOKEN: Final = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")

_HOP: Final = frozenset({b"keep-alive", b"te", b"trailer", b"proxy-connection", b"http2-settings"})
_READ: Final = frozenset({b"host", b"content-length", b"transfer-encoding", b"connection", b"upgrade"})
_LISTS: Final = frozenset({b"connection", b"proxy-connection", b"upgrade"})
_LOOK_ALIKE: Final = frozenset({b"content_length", b"transfer_encoding"})
"""Some servers make one of both spellings."""
_OVERRIDE: Final = frozenset({b"x-http-method-override", b"x-http-method", b"x-method-override"})
_SPECIAL: Final = _HOP | _READ | _LOOK_ALIKE | _OVERRIDE
_PROXY: Final = b"proxy-"


def read_fields(block: bytes, version: Version) -> Fields:
    """`block` has the form of header lines already (`heads._HEAD`)."""
    pairs = _FIELD.findall(block)
    if len(pairs) > FIELDS_MAX:
        raise BadRequest("too_many_headers")
    fields = Fields(block, version, pairs)
    keep = fields.lines
    special: list[tuple[bytes, bytes]] = []
    for name, value in pairs:
        low = name.lower()
        if low in _SPECIAL:
            special.append((low, value.strip(b" \t")))
        elif low[:6] == _PROXY:
            if low == b"proxy-connection":
                special.append((low, value.strip(b" \t")))
        else:
            keep.append(name + b":" + value + b"\r\n")
    _read_special(fields, special)
    fields.upstream = b"".join(fields.lines) + _tail(fields)
    return fields


def _tail(fields: Fields) -> bytes:
    """What this hop is told of the connection, and the empty line."""
    if fields.upgrade:
        return b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    if fields.close:
        return b"Connection: close\r\n\r\n"
    if fields.keep_alive and fields.version == "1.0":
        return b"Connection: keep-alive\r\n\r\n"
    return b"\r\n"


def _read_special(fields: Fields, special: list[tuple[bytes, bytes]]) -> None:
    options: list[bytes] = []
    upgrades: list[bytes] = []
    for name, value in special:
        if name == b"host":
            if fields.host is not None:
                raise BadRequest("host_twice")
            fields.host = _host(value)
        elif name == b"content-length":
            _length(fields, value)
        elif name == b"transfer-encoding":
            if fields.chunked or value.lower() != b"chunked" or fields.version != "1.1":
                raise BadRequest("transfer_encoding")
            fields.chunked = True
            fields.lines.append(b"Transfer-Encoding: chunked\r\n")
        elif name in _LISTS:
            words = upgrades if name == b"upgrade" else options
            words += [each.strip(b" \t").lower() for each in value.split(b",")]
        elif name in _LOOK_ALIKE:
            raise BadRequest("header")
        elif name in _OVERRIDE:
            _override(fields, name, value)
    if fields.chunked and fields.length is not None:
        raise BadRequest("length_and_encoding")
    if options or upgrades:
        _connection(fields, options, upgrades)


def _host(value: bytes) -> str:
    try:
        return value.decode("ascii")
    except UnicodeDecodeError:
        raise BadRequest("bad_host") from None


def _length(fields: Fields, value: bytes) -> None:
    if fields.length is not None:
        raise BadRequest("length_twice")
    if not _NUMBER.fullmatch(value):
        raise BadRequest("length_twice" if b"," in value else "length")
    fields.length = int(value)
    fields.lines.append(b"Content-Length: " + value + b"\r\n")


def _override(fields: Fields, name: bytes, value: bytes) -> None:
    method = value.decode("latin-1").upper()
    if fields.override not in (None, method) or not _TOKEN.fullmatch(value):
        raise BadRequest("override")
    fields.override = method
    fields.lines.append(name + b": " + value + b"\r\n")


def _connection(fields: Fields, options: list[bytes], upgrades: list[bytes]) -> None:
    """What the Connection field says of this hop; the headers that it names stay behind."""
    fields.close = b"close" in options
    fields.keep_alive = b"keep-alive" in options and not fields.close
    named = {each for each in options if each not in (b"", b"close", b"keep-alive", b"upgrade")}
    if named:
        if not all(_TOKEN.fullmatch(each) for each in named) or not named.isdisjoint(_MUST_STAY):
            raise BadRequest("connection")
        fields.lines = [line for line in fields.lines if line.partition(b":")[0].lower() not in named]
    wanted = [each for each in upgrades if each != b"h2c"]
    if wanted:
        # An offer of HTTP/2 in clear text (Java and curl make it) can be passed over; any other changes what flows.
        if wanted != [b"websocket"] or b"upgrade" not in options or fields.version != "1.1":
            raise BadRequest("upgrade")
        fields.upgrade = True


_MUST_STAY: Final = frozenset(
    {
        b"host",
        b"content-length",
        b"transfer-encoding",
        b"authorization",
        b"cookie",
        b"content-encoding",
        b"content-type",
    }
)
