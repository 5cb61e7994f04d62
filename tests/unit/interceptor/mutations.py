"""Requests whose bytes were changed at random: what two parsers may read in two ways. From a seed, so a run can be repeated."""

from __future__ import annotations

import random

PIECES = [
    b"\r\n",
    b"\n",
    b"\r",
    b" ",
    b"\t",
    b":",
    b"\0",
    b"0",
    b"GET /x HTTP/1.1\r\nHost: other.test\r\n\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Content-Length: 0\r\n",
    b"Content-Length: 5\r\n",
    b"Host: other.test\r\n",
    b"Connection: close, Host\r\n",
    b"Expect: 100-continue\r\n",
    b"0\r\n\r\n",
    b"HTTP/1.1",
    b"http://other.test",
    b"\x80",
    b",",
    b";a=b",
]
CHUNKS = b"3\r\nabc\r\n2;x=y\r\nde\r\n0\r\n\r\n"


def mutated(chance: random.Random, host: str, *, before: str = "", path: str = "/p") -> bytes:
    """One to three changes to a good request; `before` stands before its path, for absolute targets."""
    body = bytes(chance.randrange(256) for _ in range(chance.randrange(20))) or b"x"
    start = f"Host: {host}\r\nX-A: b\r\n".encode()
    target = f"{before}{path}".encode()
    data = bytearray(
        chance.choice(
            [
                b"GET " + target + b"?b=c HTTP/1.1\r\n" + start + b"\r\n",
                b"POST " + target + b" HTTP/1.1\r\n" + start + b"Content-Length: %d\r\n\r\n" % len(body) + body,
                b"POST " + target + b" HTTP/1.1\r\n" + start + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKS,
            ]
        )
    )
    for _ in range(chance.randrange(1, 4)):
        at = chance.randrange(len(data))
        match chance.randrange(4):
            case 0:
                data[at:at] = chance.choice(PIECES)
            case 1:
                del data[at : at + chance.randrange(1, 5)]
            case 2:
                data[at] = chance.randrange(256)
            case _:
                data[at : at + 1] = chance.choice(PIECES)
    return bytes(data)
