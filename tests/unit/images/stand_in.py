"""A converter that is none: it takes a job as the real one does, and answers as its first argument says."""

from __future__ import annotations

import array
import json
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any

CHANNEL = socket.socket(fileno=0)
ROOT = {"root_bytes": 4, "root_sha256": "a" * 64, "entries": 1, "raw_bytes": 9, "lost": {"xattrs": 0}}
LINE = {
    "path": "a", "type": "file", "mode": 0o644, "uid": 0, "gid": 0, "mtime": 1.5, "size": 2, "offset": 1, "link": None,
    "sha256": "b" * 64,
}  # fmt: skip


def job() -> tuple[dict[str, Any], list[int]]:
    head, ancillary, _, _ = CHANNEL.recvmsg(4, socket.CMSG_SPACE(4 * 253))
    fds = array.array("i")
    for _, _, data in ancillary:
        fds.frombytes(data)
    (length,) = struct.unpack("<I", head)
    body = b""
    while len(body) < length:
        body += CHANNEL.recv(length - len(body))
    return json.loads(body), list(fds)


def say(message: Any) -> None:
    text = message if isinstance(message, bytes) else json.dumps(message).encode()
    CHANNEL.sendall(struct.pack("<I", len(text)) + text)


def index(fd: int, *lines: Any, entries: int | None = None, end: bytes = b"\n") -> None:
    for line in lines:
        os.write(fd, (line if isinstance(line, bytes) else json.dumps({**LINE, **line}).encode()) + end)
    say({"done": {"entries": len(lines) if entries is None else entries, "bytes": 3}})


def echo(asked: dict[str, Any], fds: list[int]) -> None:
    os.write(fds[0], b"root")
    os.write(fds[1], json.dumps([asked, [os.fstat(fd).st_ino for fd in fds]]).encode())
    say({"progress": {"layer": 0, "bytes": 5}})
    say({"done": ROOT})


def flood(piece: bytes) -> None:
    while True:
        CHANNEL.sendall(piece)


def says(fds: list[int], text: str) -> None:
    os.write(fds[0], b"root")
    say(text.encode())
    signal.pause()


def main(how: str, text: str) -> None:
    if how == "deaf":
        signal.pause()
    asked, fds = job()
    chatter = b'{"progress":{"layer":0,"bytes":1}}'
    ways: dict[str, Callable[[], object]] = {
        "echo": lambda: echo(asked, fds),
        "silent": signal.pause,
        "dies": lambda: sys.stderr.write("out of \x1b[31mluck"),
        "chatter": lambda: flood(struct.pack("<I", len(chatter)) + chatter),
        "endless": lambda: flood(b"\xff" * 65536),
        "grows": lambda: flood(struct.pack("<I", 65536) + b"[" * 65536),
        "says": lambda: says(fds, text),
        "index": lambda: index(fds[0], *json.loads(text)),
        "index-cut": lambda: index(fds[0], b'{"path":', entries=0, end=b""),
        "index-more": lambda: index(fds[0], *[{}] * 5, entries=2),
        "index-flood": lambda: index(fds[0], b"x" * 200_000),
        "index-none": lambda: index(fds[0], {}, entries=10**9),
    }
    ways[how]()


main(sys.argv[1], sys.argv[2])
