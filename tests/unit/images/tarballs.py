"""Tar archives byte by byte, honest or not."""

from __future__ import annotations

import gzip
import struct

BLOCK = 512
END = bytes(2 * BLOCK)
FILE, LINK, SYMLINK, CHAR, DEVICE, DIR, FIFO = b"0", b"1", b"2", b"3", b"4", b"5", b"6"


def octal(value: int, width: int) -> bytes:
    return b"%0*o\0" % (width - 1, value)


def base256(value: int, width: int) -> bytes:
    data = bytearray(value.to_bytes(width, "big", signed=value < 0))
    data[0] |= 0x80
    return bytes(data)


def head(
    name: bytes,
    kind: bytes = FILE,
    size: int | bytes = 0,
    *,
    mode: int = 0o644,
    uid: int | bytes = 0,
    gid: int = 0,
    mtime: int = 0,
    link: bytes = b"",
    magic: bytes = b"ustar\x0000",
    device: tuple[int, int] | tuple[bytes, bytes] = (0, 0),
    prefix: bytes = b"",
    checksum: int | None = None,
) -> bytes:
    """One header block. Numbers may be given as the field's raw bytes."""

    def field(value: int | bytes, width: int) -> bytes:
        raw = octal(value, width) if isinstance(value, int) else value
        return raw.ljust(width, b"\0")[:width]

    block = bytearray(BLOCK)
    block[0:100] = name.ljust(100, b"\0")[:100]
    block[100:108] = octal(mode, 8)
    block[108:116] = field(uid, 8)
    block[116:124] = octal(gid, 8)
    block[124:136] = field(size, 12)
    block[136:148] = octal(mtime, 12)
    block[148:156] = b" " * 8
    block[156:157] = kind
    block[157:257] = link.ljust(100, b"\0")[:100]
    block[257:265] = magic
    block[329:337] = field(device[0], 8)
    block[337:345] = field(device[1], 8)
    block[345:500] = prefix.ljust(155, b"\0")[:155]
    block[148:156] = b"%06o\0 " % (sum(block) if checksum is None else checksum)
    return bytes(block)


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % BLOCK)


def file(name: bytes, data: bytes = b"", **fields: object) -> bytes:
    return head(name, FILE, len(data), **fields) + padded(data)  # type: ignore[arg-type]


def folder(name: bytes, mode: int = 0o755) -> bytes:
    return head(name, DIR, mode=mode)


def symlink(name: bytes, target: bytes) -> bytes:
    return head(name, SYMLINK, link=target, mode=0o777)


def hardlink(name: bytes, target: bytes) -> bytes:
    return head(name, LINK, link=target)


def record(key: bytes, value: bytes) -> bytes:
    length = len(key) + len(value) + 3
    while length != len(key) + len(value) + 3 + len(str(length)):
        length = len(key) + len(value) + 3 + len(str(length))
    return b"%d %s=%s\n" % (length, key, value)


def pax(*records: tuple[bytes, bytes], kind: bytes = b"x") -> bytes:
    return extended(b"".join(record(key, value) for key, value in records), kind)


def extended(data: bytes, kind: bytes) -> bytes:
    return head(b"extended", kind, len(data)) + padded(data)


def gzip_repeated(piece: bytes, times: int) -> bytes:
    """A gzip file of the piece many times, made in the time of one: members may be concatenated."""
    return gzip.compress(piece, 6, mtime=0) * times


ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
ZSTD_BLOCK_MAX = 128 << 10


def zstd_block(kind: int, size: int, data: bytes, *, last: bool) -> bytes:
    return struct.pack("<I", int(last) | kind << 1 | size << 3)[:3] + data


def zstd_frame(blocks: list[bytes], window: int = 0x38) -> bytes:
    """0x38 is a window of 128 KiB."""
    return ZSTD_MAGIC + b"\x00" + bytes([window]) + b"".join(blocks)


def zstd_stored(data: bytes) -> bytes:
    """An honest zstd file whose blocks are not compressed."""
    pieces = [data[at : at + ZSTD_BLOCK_MAX] for at in range(0, len(data), ZSTD_BLOCK_MAX)]
    return zstd_frame([zstd_block(0, len(piece), piece, last=at == len(pieces) - 1) for at, piece in enumerate(pieces)])


def zstd_zeros(count: int) -> bytes:
    """Zeros, 128 KiB for each four bytes."""
    blocks = count // ZSTD_BLOCK_MAX
    return zstd_frame([zstd_block(1, ZSTD_BLOCK_MAX, b"\0", last=at == blocks - 1) for at in range(blocks)])
