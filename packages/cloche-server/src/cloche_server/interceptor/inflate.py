"""Decodes a compressed body piece by piece, only to look at it. Pure."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Final

_PIECE_BYTES: Final = 64 << 10
DECODED_BYTES_MAX: Final = 256 << 20
_ANY_HEADER: Final = 32 + zlib.MAX_WBITS
_CODINGS: Final = frozenset({"gzip", "x-gzip", "deflate"})


class BadEncoding(Exception):
    """The body cannot be looked at."""


def coding_of(header: str) -> str:
    """Of a Content-Encoding header: `identity`, `inflate` when an Inflater can read it, else `unknown`."""
    codings = [coding.strip().lower() for coding in header.split(",")]
    # aws-chunked only puts lengths and sums between parts of the body, which stay readable.
    real = [coding for coding in codings if coding not in ("", "identity", "aws-chunked")]
    if not real:
        return "identity"
    return "inflate" if len(real) == 1 and real[0] in _CODINGS else "unknown"


class Inflater:
    """One body. What comes out is bounded in pieces and in all."""

    def __init__(self, bytes_max: int = DECODED_BYTES_MAX) -> None:
        self._stream = zlib.decompressobj(_ANY_HEADER)
        self._bytes_max = self._left = bytes_max
        self._begun = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        while data:
            if self._stream.eof:
                self._stream = zlib.decompressobj(_ANY_HEADER)
            self._begun = True
            try:
                piece = self._stream.decompress(data, _PIECE_BYTES)
            except zlib.error as failure:
                raise BadEncoding("the body is not encoded as its header says") from failure
            self._left -= len(piece)
            if self._left < 0:
                raise BadEncoding(f"the decoded body has more than {self._bytes_max >> 20} MiB")
            yield piece
            data = self._stream.unused_data if self._stream.eof else self._stream.unconsumed_tail

    def finish(self) -> None:
        """Raises BadEncoding when the end is missing."""
        if self._begun and not self._stream.eof:
            raise BadEncoding("the encoded body has no end")
