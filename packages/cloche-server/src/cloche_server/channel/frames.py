"""The frame codec of guest channel generation 1: bytes to frames and back, and nothing else.

    kind u8 | stream u32 | length u32 | payload[length] | crc32 u32        (little-endian)

The checksum finds bugs and torn frames; it is no protection against a guest that lies.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Generator, Mapping
from enum import IntEnum
from typing import NoReturn

from isal import isal_zlib

from cloche_server.channel.errors import BadFrame

GENERATION = 1
PAYLOAD_BYTES_MAX = 131_072
HEADER_BYTES = 9
TRAILER_BYTES = 4
FRAME_BYTES_MAX = HEADER_BYTES + PAYLOAD_BYTES_MAX + TRAILER_BYTES
STREAM_ID_MAX = 0xFFFF_FFFF
PING_BYTES_MAX = 64
JSON_DEPTH_MAX = 16


class Kind(IntEnum):
    """What a frame is."""

    HELLO = 1
    OPEN = 2
    OPENED = 3
    DATA = 4
    CREDIT = 5
    EOF = 6
    END = 7
    CONFIRM = 8
    ABORT = 9
    TELL = 10
    PING = 11
    PONG = 12
    RESET = 13
    STATE = 14
    RESUME = 15


KIND_MAX = max(Kind)

Frame = tuple[int, int, memoryview]
"""(kind, stream, payload). The payload is a view into the receive buffer: valid until the next frame is asked for."""

_HEADER = struct.Struct("<BII")
_TRAILER = struct.Struct("<I")
_CREDIT = struct.Struct("<QQ")
_OFFSET = struct.Struct("<Q")
_ENCODE = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode  # made once: `dumps` makes one a call
_NOT_PADDING = re.compile(rb"[^\0]")

crc32 = isal_zlib.crc32


def encode(kind: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame in one piece: for small payloads."""
    assert len(payload) <= PAYLOAD_BYTES_MAX, "a frame's payload is at most 128 KiB"
    body = _HEADER.pack(kind, stream, len(payload)) + payload
    return body + _TRAILER.pack(crc32(body))


def encode_around(kind: int, stream: int, payload: bytes | memoryview) -> tuple[bytes, bytes]:
    """Header and trailer of a frame whose payload is sent from where it lies, without a copy."""
    assert len(payload) <= PAYLOAD_BYTES_MAX, "a frame's payload is at most 128 KiB"
    header = _HEADER.pack(kind, stream, len(payload))
    return header, _TRAILER.pack(crc32(payload, crc32(header)))


class Decoder:
    """Turns received bytes into frames. Between two feeds it keeps only what is not yet decoded.

    The receive buffer belongs to the caller and may be shared by many decoders, because decoding is
    synchronous: `load` puts the kept bytes at its front, the caller receives behind them, `frames`
    decodes and keeps the rest when its iterator is exhausted or closed.
    """

    __slots__ = ("_kept",)

    def __init__(self, kept: bytes = b"") -> None:
        self._kept = kept

    @property
    def kept_bytes(self) -> int:
        return len(self._kept)

    def load(self, buffer: bytearray) -> int:
        count = len(self._kept)
        buffer[:count] = self._kept
        return count

    def frames(self, buffer: bytearray, end: int) -> Generator[Frame, None, None]:
        """Decode `buffer[:end]`, which begins with what `load` put there. Raises BadFrame and nothing else."""
        view = memoryview(buffer)
        at = 0
        header, trailer, checksum = _HEADER.unpack_from, _TRAILER.unpack_from, crc32
        try:
            while at < end:
                if not buffer[at]:
                    found = _NOT_PADDING.search(buffer, at, end)
                    at = end if found is None else found.start()
                if end - at < HEADER_BYTES:
                    break
                kind, stream, length = header(buffer, at)
                if length > PAYLOAD_BYTES_MAX:
                    raise BadFrame("length", str(length))
                if kind > KIND_MAX:
                    raise BadFrame("kind", str(kind))
                stop = at + HEADER_BYTES + length
                if stop + TRAILER_BYTES > end:
                    break
                if checksum(view[at:stop]) != trailer(buffer, stop)[0]:
                    raise BadFrame("crc")
                payload = view[at + HEADER_BYTES : stop]
                at = stop + TRAILER_BYTES
                yield kind, stream, payload
                payload.release()  # whoever kept the view fails loudly instead of reading another frame's bytes
        finally:
            self._kept = bytes(view[at:end])
            view.release()

    def feed(self, data: bytes | memoryview) -> Generator[Frame, None, None]:
        """The simple form, with a buffer of its own."""
        buffer = bytearray(self._kept)
        buffer += data
        return self.frames(buffer, len(buffer))


# --- payloads ---------------------------------------------------------------------------------


def encode_json(value: Mapping[str, object]) -> bytes:
    """ASCII, so that a path's lone surrogates (bytes that are not UTF-8) travel as `\\udcXX`."""
    return _ENCODE(value).encode("ascii")


def decode_json(payload: bytes | memoryview) -> dict[str, object]:
    """A guest's JSON object: at most one frame long, at most 16 deep, no NaN. Raises BadFrame."""
    if len(payload) > PAYLOAD_BYTES_MAX:
        raise BadFrame("json", "too long")
    raw = bytes(payload)
    try:
        value = _JSON.decode(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise BadFrame("json", type(error).__name__) from None
    if not isinstance(value, dict):
        raise BadFrame("json", "not an object")
    if raw.count(b"{") + raw.count(b"[") > JSON_DEPTH_MAX:
        _check_depth(value)
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)


_JSON = json.JSONDecoder(parse_constant=_refuse_constant)


def _check_depth(value: object) -> None:
    level: list[object] = [value]
    for _ in range(JSON_DEPTH_MAX):
        below: list[object] = []
        for item in level:
            children = item.values() if isinstance(item, dict) else item
            below.extend(child for child in children if isinstance(child, (dict, list)))  # type: ignore[attr-defined]
        if not below:
            return
        level = below
    raise BadFrame("json", "too deep")


def encode_credit(consumed: int, limit: int) -> bytes:
    return _CREDIT.pack(consumed, limit)


def decode_credit(payload: memoryview) -> tuple[int, int]:
    if len(payload) != _CREDIT.size:
        raise BadFrame("credit", f"{len(payload)} bytes")
    consumed, limit = _CREDIT.unpack(payload)
    return consumed, limit


def encode_offset(offset: int) -> bytes:
    return _OFFSET.pack(offset)


def decode_offset(payload: memoryview) -> int:
    if len(payload) != _OFFSET.size:
        raise BadFrame("eof", f"{len(payload)} bytes")
    (offset,) = _OFFSET.unpack(payload)
    return int(offset)
