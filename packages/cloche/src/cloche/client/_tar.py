"""Tar, read in whatever pieces it comes. Pure, and suspicious: the bytes were written by a guest.

Only what an archive can say is decided here (where an entry begins and ends, its name, kind and size), every length with a
limit. What may be done with it is decided in `_extract`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from cloche.wire.errors import ClocheError, error

BLOCK: Final = 512
EXTENSION_BYTES_MAX: Final = 1024 * 1024
"""Of one pax header or long name."""
SIZE_MAX: Final = 2**62
NAME_BYTES_MAX: Final = 64 * 1024

Kind = Literal["file", "dir", "symlink", "hardlink", "other"]
_KINDS: Final[dict[bytes, Kind]] = {
    b"0": "file",
    b"\0": "file",
    b"7": "file",
    b"1": "hardlink",
    b"2": "symlink",
    b"5": "dir",
}
_PAX_RECORD: Final = re.compile(rb"(\d{1,20}) ([^=]{1,1024})=")


@dataclass(frozen=True)
class Member:
    """One entry. Names are text; bytes that are not UTF-8 are lone surrogates in it, as everywhere in Python."""

    name: str
    kind: Kind
    size: int
    mode: int
    mtime_ns: int
    target: str = ""


class Sink(Protocol):
    """Who is told what the archive holds."""

    def begin(self, member: Member) -> None: ...

    def data(self, part: memoryview) -> None: ...

    def end(self) -> None: ...


def broken(what: str) -> ClocheError:
    return error("transfer_aborted", f"The archive that came is not one: {what}.")


class TarReader:
    """Feeds a sink. Raises `transfer_aborted` where the archive makes no sense; `finish` when it was cut off."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._header = bytearray()
        self._left = 0
        self._padding = 0
        self._extension: tuple[bytes, bytearray] | None = None
        self._in_member = False
        self._pax: dict[str, str] = {}
        self._long: dict[bytes, bytes] = {}
        self.ended = False

    def feed(self, data: bytes) -> None:
        view = memoryview(data)
        at = 0
        while at < len(view) and not self.ended:
            if self._left:
                count = min(self._left, len(view) - at)
                self._content(view[at : at + count])
                self._left -= count
                if not self._left:
                    self._content_done()
            elif self._padding:
                count = min(self._padding, len(view) - at)
                self._padding -= count
            else:
                count = min(BLOCK - len(self._header), len(view) - at)
                self._header += view[at : at + count]
                if len(self._header) == BLOCK:
                    header = bytes(self._header)
                    self._header.clear()
                    self._take(header)
            at += count

    def finish(self) -> None:
        if not self.ended:
            raise broken("it was cut off")

    def _content(self, part: memoryview) -> None:
        if self._extension is not None:
            self._extension[1].extend(part)
        else:
            self._sink.data(part)

    def _content_done(self) -> None:
        if self._extension is not None:
            kind, content = self._extension
            self._extension = None
            self._extend(kind, bytes(content))
        elif self._in_member:
            self._in_member = False
            self._sink.end()

    def _take(self, header: bytes) -> None:
        if not any(header):
            self.ended = True
            return
        if _number(header[148:156]) != sum(header) - sum(header[148:156]) + 8 * 32:
            raise broken("a checksum is wrong")
        size = _number(header[124:136])
        kind = header[156:157]
        if kind in (b"x", b"g", b"L", b"K"):
            if size > EXTENSION_BYTES_MAX:
                raise broken("a header is too long")
            self._extension = (kind, bytearray())
        else:
            member = self._member(header, size, kind)
            size = member.size
            self._pax, self._long = {}, {}
            self._in_member = True
            self._sink.begin(member)
        self._left, self._padding = size, -size % BLOCK
        if not size:
            self._content_done()

    def _extend(self, kind: bytes, content: bytes) -> None:
        if kind == b"x":
            self._pax = _pax(content)
        elif kind in (b"L", b"K"):
            self._long[kind] = content.rstrip(b"\0")
        # a global header says nothing that we would believe

    def _member(self, header: bytes, size: int, kind: bytes) -> Member:
        name = _string(header[0:100])
        if header[257:262] == b"ustar" and header[257:265] != b"ustar  \0" and header[345] != 0:
            name = _string(header[345:500]) + b"/" + name
        name = self._long.get(b"L", name)
        target = self._long.get(b"K", _string(header[157:257]))
        pax = self._pax
        text = pax.get("path", name.decode("utf-8", "surrogateescape"))
        link = pax.get("linkpath", target.decode("utf-8", "surrogateescape"))
        if len(text) > NAME_BYTES_MAX or len(link) > NAME_BYTES_MAX:
            raise broken("a name is too long")
        if "size" in pax:
            size = _decimal(pax["size"])
        what: Kind = "other" if any(key.startswith("GNU.sparse") for key in pax) else _KINDS.get(kind, "other")
        if what == "file" and kind != b"0" and text.endswith("/"):
            what = "dir"
        return Member(text, what, size, _number(header[100:108]) & 0o7777, _time(pax.get("mtime"), header), link)


def _string(field: bytes) -> bytes:
    return field.split(b"\0", 1)[0]


def _number(field: bytes) -> int:
    """Octal, or GNU's base 256. Negative and unreadable ones are no numbers."""
    if field[0] & 0x80:
        value = int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
    else:
        digits = field.split(b"\0", 1)[0].strip(b" ")
        if digits.strip(b"01234567"):
            raise broken("a number is not one")
        value = int(digits or b"0", 8)
    if value > SIZE_MAX:
        raise broken("a number is too large")
    return value


def _decimal(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 19 and int(text) <= SIZE_MAX):
        raise broken("a size is not a number")
    return int(text)


def _time(pax: str | None, header: bytes) -> int:
    try:
        if pax is not None:
            whole, _, part = pax.partition(".")
            return int(whole) * 10**9 + int((part[:9] or "0").ljust(9, "0"))
        return _number(header[136:148]) * 10**9
    except (ValueError, ClocheError):
        return 0


def _pax(content: bytes) -> dict[str, str]:
    records: dict[str, str] = {}
    at = 0
    while at < len(content):
        found = _PAX_RECORD.match(content, at)
        if found is None:
            raise broken("a pax record is not one")
        end = at + int(found[1])
        if not found.end() < end <= len(content) or content[end - 1 : end] != b"\n":
            raise broken("a pax record's length is wrong")
        key = found[2].decode("utf-8", "replace")
        records[key] = content[found.end() : end - 1].decode("utf-8", "surrogateescape")
        at = end
    return records
