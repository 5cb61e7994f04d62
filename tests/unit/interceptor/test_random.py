"""Random changes to requests: what the server gets is what was asked for, one by one, and never anything else."""

from __future__ import annotations

import contextlib
import random
import re

import pytest

from tests.unit.interceptor.conftest import World
from tests.unit.interceptor.gate import secret, wait_until
from tests.unit.interceptor.talk import Talk, request

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
_ONE_HOST = re.compile(rb"\r\nhost: api\.test\r\n", re.IGNORECASE)


def _changed(chance: random.Random) -> bytes:
    body = bytes(chance.randrange(256) for _ in range(chance.randrange(20)))
    data = bytearray(
        chance.choice(
            [
                request("GET", "/a?b=c", "X-A: b"),
                request("POST", "/p", "X-A: b", body=body or b"x"),
                request("POST", "/p", "Transfer-Encoding: chunked") + b"3\r\nabc\r\n2;x=y\r\nde\r\n0\r\n\r\n",
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


@pytest.mark.req("NET-5")
def test_no_change_of_bytes_makes_a_request_that_was_not_asked_for(world: World, seed: int, long_run: bool) -> None:
    chance = random.Random(seed)
    world.gate.sandbox("s2", secret("TOKEN", "real-value-of-the-token", "api.test"))
    world.http1.seen.clear()
    connections = []
    for _ in range(5000 if long_run else 300):
        talk = Talk(world, sandbox=chance.choice(["s1", "s2"]))
        talk.socket.settimeout(0.3)
        talk.send(_changed(chance))
        with contextlib.suppress(TimeoutError):  # it waits for more of a request: so do servers
            talk.reply()
        talk.close()
        connections.append(talk.connection)
    wait_until(lambda: {m["conn"] for m in world.gate.of("closed")} >= set(connections), "the ends")
    asked = [m for m in world.gate.of("request") if m["conn"] in set(connections)]
    assert world.gate.process.poll() is None
    assert len(world.http1.seen) <= len(asked)
    wanted = [(m["method"].encode(), m["path"].encode("utf-8", "backslashreplace")) for m in asked]
    for seen in world.http1.seen:
        method, target, _ = seen.line.split(b" ")
        path = target.partition(b"?")[0].decode("utf-8", "backslashreplace").encode("utf-8", "backslashreplace")
        assert (method, path) in wanted
        assert len(_ONE_HOST.findall(seen.head)) == 1
        assert seen.head.lower().count(b"\r\nhost:") == 1
        assert not (seen.header("transfer-encoding") and seen.header("content-length"))
        assert b"\n" not in seen.head.replace(b"\r\n", b"")
    assert not world.gate.of("alert")
