"""HTTP/1 requests as a proxy reads them: strictly, in any pieces, with the framing of their bodies.

A message that two programs could read in two ways is refused, not repaired: two lengths, a length and a chunked body,
a bare CR or LF, a folded line, a blank before a colon, two Hosts, a Host that is not the target. A body is passed
on in the bytes in which it came, after its framing was checked.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal

from cloche_server.egress.fields import BadRequest, Fields, read_fields
from cloche_server.policy.model import HTTP_PORT
from cloche_server.policy.names import BadName, host_and_port, normal_host

HEAD_BYTES_MAX: Final = 64 * 1024
TARGET_BYTES_MAX: Final = 16 * 1024
CHUNK_LINE_BYTES_MAX: Final = 18
"""Sixteen digits and the end of the line: a chunk extension is no digit."""

Form = Literal["connect", "absolute", "origin"]

_TOKEN: Final = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]"
_HEAD: Final = re.compile(
    rb"(%(t)b{1,32}+) ([\x21-\x7e]++) HTTP/1\.([01])\r\n((?:%(t)b++:[\t\x20-\x7e\x80-\xff]*+\r\n)*+)\r\n"
    % {b"t": _TOKEN}
)
_FIRST: Final = re.compile(_TOKEN)
_BARE_LF: Final = re.compile(rb"(?<!\r)\n")
_BARE_CR: Final = re.compile(rb"\r(?!\n)")
_REQUEST_LINE: Final = re.compile(rb"%(t)b{1,32} [\x21-\x7e]+ HTTP/([0-9])\.([0-9])" % {b"t": _TOKEN})
_ABSOLUTE: Final = re.compile(r"[hH][tT][tT][pP]://([^/?#]*)(.*)")
_CHUNK_SIZE: Final = re.compile(rb"([0-9a-fA-F]{1,16})\r\n")
_SIZE_MAX: Final = 2**63 - 1


@dataclass(slots=True)
class Head:
    """One request without its body. `host` is normal; `path` is in origin form and has its query."""

    method: str
    form: Form
    host: str
    port: int
    path: str
    version: Literal["1.0", "1.1"]
    fields: Fields
    raw: bytes

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """As they came: names as written, values without the blanks around them."""
        return [(name, value.strip(b" \t")) for name, value in self.fields.pairs]

    @property
    def methods(self) -> tuple[str, ...]:
        """Its method, and one that the server may take instead: a rule must allow each."""
        override = self.fields.override
        return (self.method,) if override in (None, self.method) else (self.method, override)

    @property
    def upgrade(self) -> bool:
        """To a WebSocket. What comes next is not HTTP if the server agrees."""
        return self.fields.upgrade

    @property
    def close(self) -> bool:
        """The client wants no second request on this connection."""
        fields = self.fields
        return fields.close or (self.version == "1.0" and not fields.keep_alive)

    @property
    def has_body(self) -> bool:
        return self.fields.chunked or bool(self.fields.length)

    def for_upstream(self) -> bytes:
        """The head in origin form: the Host that was decided on, nothing that is for the proxy alone."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port == HTTP_PORT else f":{self.port}"
        start = f"{self.method} {self.path} HTTP/{self.version}\r\nHost: {host}{port}\r\n".encode("ascii")
        return start + self.fields.upstream


@dataclass(frozen=True, slots=True)
class Body:
    """A part of a body, in the bytes that go upstream."""

    data: bytes


@dataclass(frozen=True, slots=True)
class End:
    """The request is whole; another may follow."""


Event = Head | Body | End
_NO_FIELDS: Final = Fields(b"\n", "1.1", [])
"""The block of no head."""
_END: Final = End()


class _State(Enum):
    HEAD = "head"
    LENGTH = "length"
    CHUNK_SIZE = "chunk size"
    CHUNK = "chunk"
    CHUNK_END = "end of chunk"
    LAST = "last chunk"
    END = "end"
    OVER = "over"


class RequestReader:
    """Feed it, then take events until there is none. After CONNECT or an upgrade it reads no further: see `rest`."""

    def __init__(self) -> None:
        self._data = b""
        self._at = 0
        self._partial = bytearray()
        self._state = _State.HEAD
        self._left = 0
        self._fields = _NO_FIELDS
        """Of the last head: most clients send the same ones with every request of a connection."""

    def feed(self, data: bytes) -> None:
        if self._at >= len(self._data):
            self._data = data
        else:
            self._data = self._data[self._at :] + data
        self._at = 0

    @property
    def rest(self) -> bytes:
        """What was fed and is not part of an event yet."""
        return bytes(self._partial) + self._data[self._at :]

    @property
    def is_between_requests(self) -> bool:
        """Nothing of a next request is here: the client may go without harm."""
        return self._state is _State.HEAD and not self._partial and self._at >= len(self._data)

    def next_event(self) -> Event | None:
        """None: more bytes are needed. Raises BadRequest, and then nothing more can be read."""
        state = self._state
        if state is _State.HEAD:
            return self._head()
        if state is _State.LENGTH or state is _State.CHUNK:
            return self._content()
        if state is _State.END:
            self._state = _State.HEAD
            return _END
        return None if state is _State.OVER else self._framing()

    def _head(self) -> Head | None:
        if self._at >= len(self._data):
            return None
        raw = self._take_head()
        if raw is None:
            return None
        try:
            head = parse_head(raw, self._fields)
        except BadRequest:
            self._state = _State.OVER
            raise
        self._fields = head.fields
        if head.form == "connect" or head.fields.upgrade:
            self._state = _State.OVER
        elif head.fields.chunked:
            self._state = _State.CHUNK_SIZE
        elif head.fields.length:
            self._left = head.fields.length
            self._state = _State.LENGTH
        else:
            self._state = _State.END
        return head

    def _take_head(self) -> bytes | None:
        """The bytes of a whole head. In pieces they are gathered in one place, each looked at once."""
        partial = self._partial
        if not partial:
            end = self._data.find(b"\r\n\r\n", self._at)
            if 0 <= end <= self._at + HEAD_BYTES_MAX - 4:
                raw = self._data[self._at : end + 4]
                self._at = end + 4
                return raw
        known = len(partial)
        piece = self._data[self._at : self._at + HEAD_BYTES_MAX + 1 - known]
        partial += piece
        end = partial.find(b"\r\n\r\n", max(0, known - 3))
        if end >= 0:
            self._at += end + 4 - known
            raw = bytes(partial[: end + 4])
            partial.clear()
            return raw
        self._at += len(piece)
        self._check_partial(max(0, known - 1))
        return None

    def _check_partial(self, since: int) -> None:
        """What can be refused before the head is whole, so that nobody waits for its end."""
        partial = self._partial
        reason = None
        if not _FIRST.match(partial):
            reason = "request_line"
        elif _BARE_LF.search(partial, since):
            reason = "bare_lf"
        elif len(partial) > HEAD_BYTES_MAX:
            reason = "too_long"
        if reason is not None:
            self._state = _State.OVER
            raise BadRequest(reason)

    def _content(self) -> Body | None:
        """Of a body with a length, or of one chunk."""
        have = len(self._data) - self._at
        if not have:
            return None
        whole = self._at == 0 and have <= self._left
        data = self._data if whole else self._data[self._at : self._at + self._left]
        self._at += len(data)
        self._left -= len(data)
        if not self._left:
            self._state = _State.END if self._state is _State.LENGTH else _State.CHUNK_END
        return Body(data)

    def _framing(self) -> Body | None:
        """What stands between chunks."""
        if self._state is _State.CHUNK_SIZE:
            return self._chunk_size()
        line = self._data[self._at : self._at + 2]
        if not b"\r\n".startswith(line):
            last = self._state is _State.LAST
            self._state = _State.OVER
            raise BadRequest("trailers" if last else "chunk_end")
        if len(line) < 2:
            return None
        self._at += 2
        self._state = _State.END if self._state is _State.LAST else _State.CHUNK_SIZE
        return Body(line)

    def _chunk_size(self) -> Body | None:
        match = _CHUNK_SIZE.match(self._data, self._at)
        if match is None:
            part = self._data[self._at : self._at + CHUNK_LINE_BYTES_MAX]
            if re.fullmatch(rb"(?:[0-9a-fA-F]{1,16}\r?)?", part):
                return None
            self._state = _State.OVER
            raise BadRequest("chunk_extension" if b";" in part else "chunk_size")
        self._left = int(match[1], 16)
        if self._left > _SIZE_MAX:
            self._state = _State.OVER
            raise BadRequest("chunk_size")
        self._at = match.end()
        self._state = _State.CHUNK if self._left else _State.LAST
        return Body(match[0])


def parse_head(raw: bytes, last: Fields = _NO_FIELDS) -> Head:
    """Of a whole head with its empty line. `last` are fields that need not be read again if they are the same."""
    match = _HEAD.fullmatch(raw)
    if match is None:
        raise BadRequest(_why(raw))
    method, wanted, minor, block = match.groups()
    if len(wanted) > TARGET_BYTES_MAX:
        raise BadRequest("target_too_long")
    version: Literal["1.0", "1.1"] = "1.1" if minor == b"1" else "1.0"
    fields = last if last.block == block and last.version == version else read_fields(block, version)
    form, host, port, path = _target(method, wanted.decode("ascii"), fields)
    if form == "connect" and (fields.chunked or fields.length or fields.upgrade):
        raise BadRequest("connect_body")
    if fields.upgrade and (method != b"GET" or fields.chunked or fields.length):
        raise BadRequest("upgrade")
    return Head(method.decode("ascii"), form, host, port, path, version, fields, raw)


def _target(method: bytes, wanted: str, fields: Fields) -> tuple[Form, str, int, str]:
    try:
        if method == b"CONNECT":
            host, port = host_and_port(wanted)
            return "connect", _agreeing(wanted, host, port, fields, port, required=False), port, ""
        if wanted[0] == "/" or (wanted == "*" and method == b"OPTIONS"):
            if "#" in wanted:
                raise BadRequest("fragment")
            if fields.host is None:
                raise BadRequest("host_missing")
            host, port = host_and_port(fields.host, HTTP_PORT)
            return "origin", normal_host(host)[0], port, wanted
        match = _ABSOLUTE.fullmatch(wanted)
        if match is None:
            raise BadRequest("target" if "://" not in wanted else "scheme")
        authority, path = match.groups()
        if "#" in path:
            raise BadRequest("fragment")
        host, port = host_and_port(authority, HTTP_PORT)
        name = _agreeing(authority, host, port, fields, HTTP_PORT, required=fields.version == "1.1")
        return "absolute", name, port, path if path[:1] == "/" else "/" + path
    except BadName as bad:
        raise BadRequest("userinfo" if bad.reason == "userinfo" else "bad_host") from None


def _agreeing(authority: str, host: str, port: int, fields: Fields, default_port: int, *, required: bool) -> str:
    """The normal name of the target, if the Host field says the same. `default_port`: of a Host without one."""
    name = normal_host(host)[0]
    if fields.host is None:
        if required:
            raise BadRequest("host_missing")
    elif fields.host != authority:
        said, said_port = host_and_port(fields.host, default_port)
        if normal_host(said)[0] != name or said_port != port:
            raise BadRequest("host_mismatch")
    return name


def _why(raw: bytes) -> str:
    """Why a head does not have the form of one."""
    if not _FIRST.match(raw):
        return "request_line"
    if _BARE_LF.search(raw):
        return "bare_lf"
    if _BARE_CR.search(raw):
        return "bare_cr"
    if b"\0" in raw:
        return "nul"
    first, *lines = raw[:-4].split(b"\r\n")
    match = _REQUEST_LINE.fullmatch(first)
    if match is None:
        return "version" if re.fullmatch(rb"%b{1,32} [\x21-\x7e]+" % _TOKEN, first) else "request_line"
    if (match[1], match[2]) not in ((b"1", b"0"), (b"1", b"1")):
        return "version"
    for line in lines:
        if line[:1] in (b" ", b"\t"):
            return "folded_line"
        if re.match(rb"%b*[ \t]+:" % _TOKEN, line):
            return "space_before_colon"
    return "header"
