"""Trees that a hostile guest could send: one mechanism each. `TREES` is name → bytes; nothing outside may change."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable

BLOCK = 512
RESULT = b'{"files": 1}'


def entry(name: str, kind: bytes = tarfile.REGTYPE, data: bytes = b"", target: str = "", **more: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size, info.mode = kind, target, len(data), more.get("mode", 0o644)
    info.mtime = more.get("mtime", 1_000_000_000)
    info.devmajor = info.devminor = 1
    # tarfile itself would strip or refuse some of these names, so the text goes in as it is
    made = info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
    return made + data + bytes(-len(data) % BLOCK)


def result(content: bytes = RESULT) -> bytes:
    return entry(".cloche-result.json", data=content) + bytes(2 * BLOCK)


def patched(block: bytes, at: int, value: bytes) -> bytes:
    """A header with a field overwritten and its checksum right."""
    header = bytearray(block[:BLOCK])
    header[at : at + len(value)] = value
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + block[BLOCK:]


def pax(records: dict[str, bytes]) -> bytes:
    body = b""
    for key, value in records.items():
        plain = b" " + key.encode() + b"=" + value + b"\n"
        length = len(plain) + len(str(len(plain) + 2))
        length = len(plain) + len(str(length))
        body += str(length).encode() + plain
    return entry("pax", tarfile.XHDTYPE, body)


def gnu_long(kind: bytes, text: bytes) -> bytes:
    return entry("././@LongLink", kind, text + b"\0")


def symlink(name: str, target: str) -> bytes:
    return entry(name, tarfile.SYMTYPE, target=target)


def hardlink(name: str, target: str) -> bytes:
    return entry(name, tarfile.LNKTYPE, target=target)


def _many(count: int, make: Callable[[int], bytes]) -> bytes:
    return b"".join(make(number) for number in range(count))


# `outside` is a directory beside the destination, holding `secret`; OUT stands for its absolute path.
OUT = "/@OUTSIDE@"

TREES: dict[str, bytes] = {
    "absolute name": entry(f"{OUT}/pwned", data=b"x") + result(),
    "absolute name with many slashes": entry(f"//{OUT}/pwned", data=b"x") + result(),
    "parent name": entry("../outside/pwned", data=b"x") + result(),
    "parent in the middle": entry("a/../../outside/pwned", data=b"x") + result(),
    "parent at the end": entry("a/..", tarfile.DIRTYPE) + entry("a/../../outside/x", data=b"x") + result(),
    "dots and slashes": entry("./.././/outside/./pwned", data=b"x") + result(),
    "parent by pax path": pax({"path": b"../outside/pwned"}) + entry("fine", data=b"x") + result(),
    "absolute by pax path": pax({"path": OUT.encode() + b"/pwned"}) + entry("fine", data=b"x") + result(),
    "parent by gnu long name": gnu_long(b"L", b"../outside/pwned") + entry("fine", data=b"x") + result(),
    "parent by ustar prefix": patched(entry("outside/pwned"), 345, b"..") + result(),
    "global pax path": entry("g", b"g", b"27 path=../outside/pwned12\n") + entry("fine", data=b"x") + result(),
    "through a link to a parent": symlink("a", "..") + entry("a/outside/pwned", data=b"x") + result(),
    "through an absolute link": symlink("a", OUT) + entry("a/pwned", data=b"x") + result(),
    "over an absolute link": symlink("a", f"{OUT}/secret") + entry("a", data=b"x") + result(),
    "through an inner link": entry("d", tarfile.DIRTYPE) + symlink("a", "d") + entry("a/x", data=b"x") + result(),
    "link then directory of its name": symlink("a", OUT) + entry("a", tarfile.DIRTYPE, mode=0o777) + result(),
    "inner link then directory": entry("d", tarfile.DIRTYPE)
    + symlink("a", "d")
    + entry("a", tarfile.DIRTYPE)
    + result(),
    "chain of links upwards": (
        entry("a/b/c", tarfile.DIRTYPE)
        + symlink("a/b/c/up", "../../..")
        + symlink("out", "a/b/c/up/../outside")
        + entry("out/pwned", data=b"x")
        + result()
    ),
    "link with parent after a name": entry("d", tarfile.DIRTYPE) + symlink("a", "d/../../outside") + result(),
    "link one above": symlink("d/a", "../../outside/secret") + result(),
    "link by pax linkpath": pax({"linkpath": OUT.encode()}) + symlink("a", "fine") + entry("a/x", data=b"x") + result(),
    "link by gnu long link": gnu_long(b"K", b"../outside") + symlink("a", "fine") + entry("a/x", data=b"x") + result(),
    "empty link": patched(symlink("a", "x"), 157, b"\0") + result(),
    "link to itself": symlink("a", "a") + entry("a/x", data=b"x") + result(),
    "hard link to an absolute name": hardlink("a", f"{OUT}/secret") + entry("a", data=b"changed") + result(),
    "hard link to a parent": hardlink("a", "../outside/secret") + entry("a", data=b"changed") + result(),
    "hard link to what was there before": hardlink("a", "mine") + entry("a", data=b"changed") + result(),
    "hard link to a link": symlink("l", "mine") + hardlink("a", "l") + entry("a", data=b"changed") + result(),
    "hard link through a link": symlink("l", "..") + hardlink("a", "l/outside/secret") + result(),
    "hard link to a replaced file": (
        entry("f", data=b"1") + symlink("f", "mine") + hardlink("a", "f") + entry("a", data=b"changed") + result()
    ),
    "hard link with data": patched(hardlink("a", "mine"), 124, b"00000000004\0") + b"evil" + bytes(508) + result(),
    "hard link to itself": hardlink("a", "a") + result(),
    "character device": entry("dev", tarfile.CHRTYPE) + result(),
    "block device": entry("dev", tarfile.BLKTYPE) + result(),
    "pipe": entry("pipe", tarfile.FIFOTYPE) + entry("pipe/x", data=b"x") + result(),
    "unknown kind": patched(entry("odd"), 156, b"Q") + result(),
    "sparse by pax": pax({"GNU.sparse.major": b"1"}) + entry("s", data=b"x") + result(),
    "set-user-id": entry("su", data=b"#!/bin/sh\n", mode=0o6755) + entry("sd", tarfile.DIRTYPE, mode=0o7777) + result(),
    "no permission at all": entry("d", tarfile.DIRTYPE, mode=0) + entry("d/x", data=b"x", mode=0) + result(),
    "NUL in a name": pax({"path": b"a\0/../../outside/x"}) + entry("fine", data=b"x") + result(),
    "escapes in a name": entry("\x1b]52;c;ZXZpbA==\x07\u202e", data=b"x") + entry("\x1b[2J/../x", data=b"x") + result(),
    "not utf-8": entry("a\udcff", data=b"x") + entry("\udcff/../x") + result(),
    "very long name": pax({"path": b"a/" * 3000 + b"x"}) + entry("fine", data=b"x") + result(),
    "long part": pax({"path": b"a" * 300}) + entry("fine", data=b"x") + result(),
    "very deep": pax({"path": b"a/" * 200 + b"x"}) + entry("fine", data=b"x") + result(),
    "no name": patched(entry("x", data=b"x"), 0, b"\0" * 100) + result(),
    "only dots": entry("./.", data=b"x") + result(),
    "over my directory": entry("mydir", data=b"x") + symlink("mydir", "mine") + result(),
    "through my file": entry("mine/x", data=b"x") + result(),
    "through my own link out": entry("mylink/pwned", data=b"x") + result(),
    "over my own link out": entry("mylink", data=b"x") + result(),
    "directory over my own link": entry("mylink", tarfile.DIRTYPE, mode=0o777) + result(),
    "mode of the place itself": entry(".", tarfile.DIRTYPE, mode=0) + entry("./", tarfile.DIRTYPE) + result(),
    "result as a guest's file": entry(".cloche-result.json", data=b"mine") + entry("x", data=b"x") + result(),
    "escapes in the result": result(
        b'{"files":0,"errors":[{"path":"\\u001b[2J","code":"io","message":"\\u001b]0;x\\u0007"}]}'
    ),
    "times out of range": pax({"mtime": b"99999999999999999999"}) + entry("t", data=b"x") + result(),
    "negative time": pax({"mtime": b"-5.5"}) + entry("t", data=b"x") + result(),
    "many links": _many(200, lambda n: symlink(f"l{n}", f"l{n + 1}")) + symlink("l200", "../outside") + result(),
}

BROKEN: dict[str, bytes] = {
    "cut in a header": entry("a", data=b"x")[:300],
    "cut in the content": entry("a", data=b"x" * 5000)[:2000],
    "cut at the end": entry("a", data=b"x"),
    "no result": entry("a", data=b"x") + bytes(2 * BLOCK),
    "result is not json": result(b"nonsense"),
    "wrong checksum": entry("a")[:148] + b"0000000\0" + entry("a")[156:] + result(),
    "size is not a number": patched(entry("a"), 124, b"99999999999\0") + result(),
    "negative size": patched(entry("a"), 124, b"\xff" * 12) + result(),
    "huge size": patched(entry("a"), 124, b"\x80" + b"\x7f" * 11) + result(),
    "pax length wrong": entry("x", tarfile.XHDTYPE, b"99 path=a\n") + entry("a") + result(),
    "pax length zero": entry("x", tarfile.XHDTYPE, b"0 path=a\n") + entry("a") + result(),
    "pax without record": entry("x", tarfile.XHDTYPE, b"nonsense") + entry("a") + result(),
    "pax too long": patched(entry("x", tarfile.XHDTYPE), 124, b"00010000000\0") + bytes(4096),
    "pax size not a number": pax({"size": b"1e9"}) + entry("a") + result(),
    "noise": bytes(range(256)) * 8,
}


def gzip_bomb_free_stream(count: int) -> bytes:
    """Plain tar has no compression, so a bomb is only ever as large as what is sent."""
    made = io.BytesIO()
    for number in range(count):
        made.write(entry(f"f{number}", data=b"x" * 100))
    made.write(result())
    return made.getvalue()
