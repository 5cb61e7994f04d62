"""Finds the end of a guest's tar stream, so that one more entry can be put behind its last. Pure.

Only headers' sizes are read; nothing is extracted. What a guest writes there can make the stream wrong for the client, who
checks it anyway, and nothing else.
"""

from __future__ import annotations

import io
import tarfile
from typing import Final

BLOCK: Final = 512
RESULT_NAME: Final = ".cloche-result.json"
_ZEROS: Final = bytes(BLOCK)


class TarBroken(Exception):
    """A header's size is not a number."""


class TarTail:
    """Passes a tar stream on, up to and without its end-of-archive blocks."""

    def __init__(self) -> None:
        self.ended = False
        self._header = bytearray()
        self._content_left = 0

    def feed(self, data: bytes) -> bytes:
        if self.ended:
            return b""
        if self._content_left >= len(data):
            self._content_left -= len(data)
            return data
        passed = bytearray()
        at = 0
        while at < len(data) and not self.ended:
            if self._content_left:
                count = min(self._content_left, len(data) - at)
                passed += data[at : at + count]
                self._content_left -= count
            else:
                count = min(BLOCK - len(self._header), len(data) - at)
                self._header += data[at : at + count]
                if len(self._header) == BLOCK:
                    passed += self._take_header()
            at += count
        return bytes(passed)

    @property
    def is_whole(self) -> bool:
        return self.ended or (not self._header and not self._content_left)

    def _take_header(self) -> bytes:
        header = bytes(self._header)
        self._header.clear()
        if header == _ZEROS:
            self.ended = True
            return b""
        self._content_left = -(-_size(header[124:136]) // BLOCK) * BLOCK
        return header


def _size(field: bytes) -> int:
    if field[0] & 0x80:
        return int.from_bytes(field[1:], "big")
    digits = field.rstrip(b" \0").lstrip(b" ")
    try:
        return int(digits or b"0", 8)
    except ValueError as bad:
        raise TarBroken(f"size {digits!r}") from bad


def result_entry(content: bytes) -> bytes:
    """The last entry, and the end of the archive."""
    info = tarfile.TarInfo(RESULT_NAME)
    info.size = len(content)
    info.mode = 0o600
    made = io.BytesIO()
    made.write(info.tobuf(tarfile.USTAR_FORMAT))
    made.write(content)
    made.write(bytes(-len(content) % BLOCK + 2 * BLOCK))
    return made.getvalue()
