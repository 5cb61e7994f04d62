"""Random changes to requests: what the server gets is what was asked for, one by one, and never anything else."""

from __future__ import annotations

import contextlib
import random
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.unit.interceptor.conftest import World
from tests.unit.interceptor.gate import secret, wait_until
from tests.unit.interceptor.mutations import mutated
from tests.unit.interceptor.talk import Talk

_ONE_HOST = re.compile(rb"\r\nhost: api\.test\r\n", re.IGNORECASE)


@pytest.mark.req("NET-5")
@pytest.mark.timeout(600)
def test_no_change_of_bytes_makes_a_request_that_was_not_asked_for(world: World, seed: int, long_run: bool) -> None:
    chance = random.Random(seed)
    world.gate.sandbox("s2", secret("TOKEN", "real-value-of-the-token", "api.test"))
    world.http1.seen.clear()
    said = [(chance.choice(["s1", "s2"]), mutated(chance, "api.test")) for _ in range(5000 if long_run else 300)]

    def one(what: tuple[str, bytes]) -> int:
        talk = Talk(world, sandbox=what[0])
        talk.socket.settimeout(0.3)
        talk.send(what[1])
        with contextlib.suppress(TimeoutError):  # it waits for more of a request: so do servers
            talk.reply()
        talk.close()
        return talk.connection

    with ThreadPoolExecutor(16) as pool:  # most of the time is waiting
        connections = list(pool.map(one, said))
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
